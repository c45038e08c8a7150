"""A result has a card, goes to the hub if that is asked for, and a distilled model is named."""

import json
from dataclasses import replace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from branchgrpo.backbones.distilled import distilled_line
from branchgrpo.backbones.loading import load_backbone
from branchgrpo.refusals import Refused
from branchgrpo.training.card import AGAIN, shared_settings
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
from branchgrpo.training.runs import Run
from branchgrpo.training.trainer import Trainer


def config(folder, backbone, **changes):
    "A run of two splits and one iteration on a model of the package."
    sizes = {"steps": 4, "splits": (0, 1), "prompts_per_iteration": 1, "iterations": 1}
    sizes |= {"backbone": backbone, "prompts": "digits", "evaluate_every": 0, "tracker": "none"}
    return TrainConfig.from_dict(sizes | {"output": str(folder)} | changes)


class Hub:
    "The hub as it answers to a token that writes; `uploads` are the folders that it got."

    uploads: list = []
    full = False

    def whoami(self):
        return {"name": "me", "auth": {"accessToken": {"role": "write"}}}

    def create_repo(self, name, private, exist_ok):
        assert private and exist_ok

    def upload_folder(self, repo_id, folder_path, commit_message):
        if self.full:
            raise OSError("the quota is used up")
        files = {path.name for path in folder_path.iterdir()}
        self.uploads.append((repo_id, folder_path.name, files))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(Hub, "uploads", [])
    return Hub


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A run with an adapter, evaluated before and after."
    folder = tmp_path_factory.mktemp("card") / "run"
    few = {"evaluate_every": 1, "evaluation_prompts": 3, "lora_rank": 4, "iterations": 1}
    return Trainer(config(folder, "tiny-sd3", **few)).fit()


def test_a_card_has_the_head_that_the_hub_reads_and_the_numbers_of_its_run(trained):
    card = ModelCard.load(trained.path / "lora" / "README.md")
    head = card.data.to_dict()
    assert (head["library_name"], head["pipeline_tag"]) == ("diffusers", "text-to-image")
    assert {"lora", "branchgrpo"} <= set(head["tags"]) and head["license_name"] == "see-base"
    before, after = (f"{row['eval_reward']:.4f}" for row in trained.evaluations)
    assert f"{before} → {after}. Mean change" in card.text
    assert "over 3 held-out prompts" in card.text and AGAIN in card.text
    assert "seed 0, 1 iteration." in card.text and "| `branch_factor` |" in card.text
    for name in ("curve.png", "before.png", "after.png", "how_to_draw.md", "settings.yaml"):
        assert name in card.text and (trained.path / "lora" / name).stat().st_size
    assert str(trained.path.parent) not in card.content


def test_the_settings_of_a_card_train_the_same_run(trained):
    again = TrainConfig.from_yaml(trained.path / "lora" / "settings.yaml")
    places = ("push_to_hub", "embeddings")
    recorded = {k: v for k, v in trained.info["settings"].items() if k not in places}
    assert json.loads(json.dumps(shared_settings(resolve(again)))) == recorded


def test_a_result_is_uploaded_at_the_end_and_a_finished_run_by_the_same_call(trained, hub):
    settings = trained.info["settings"] | {"output": str(trained.path)}
    asked = replace(TrainConfig.from_dict(settings), push_to_hub="me/mine")
    trainer = Trainer(asked)
    hub.full = True
    with pytest.raises(Refused, match="quota is used up.*the same call uploads it again"):
        trainer.fit()
    hub.full = False
    before = (trained.path / "run.json").read_bytes()
    run = trainer.fit()
    name, folder, files = hub.uploads[0]
    assert (name, folder) == ("me/mine", "lora")
    assert {"README.md", "pytorch_lora_weights.safetensors"} <= files
    assert trainer.end_lines(run)[-1] == "on the hub: https://huggingface.co/me/mine"
    assert (trained.path / "run.json").read_bytes() == before


def test_an_upload_that_cannot_be_is_refused_before_training(tmp_path, hub, monkeypatch):
    asked = config(tmp_path / "run", "tiny-sd3", push_to_hub="me/mine")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub: there is no token.*hf auth login"):
        Trainer(asked)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    with pytest.raises(ValueError, match="push_to_hub: .* HF_HUB_OFFLINE is set"):
        Trainer(asked)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_to_expect_of_a_distilled_model(tmp_path):
    flux = load_backbone("tiny-flux")
    assert "in guidance, not in steps" in distilled_line(flux, "tiny-flux")
    for name in ("tiny-sd3", "tiny-sd", "tiny-wan"):
        assert distilled_line(load_backbone(name), name) is None
    flux.denoiser.register_to_config(guidance_embeds=False)
    flux.pipeline.scheduler.register_to_config(use_dynamic_shifting=False)
    assert "distilled to few steps" in distilled_line(flux, "mine")


def test_the_line_about_a_distilled_model_comes_first(tmp_path, capsys):
    few = {"iterations": 1, "evaluate_every": 0}
    Trainer(config(tmp_path / "run", "tiny-flux", **few)).fit()
    assert "tiny-flux is distilled in guidance, not in steps" in capsys.readouterr().err
    assert Run(tmp_path / "run").finished
