"""Places: a run read from another folder, a home folder, links, and names of files that are there
already."""

import dataclasses
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import SMALL

from branchgrpo import Run, TrainConfig, Trainer, cli
from branchgrpo.backbones.loading import load_backbone
from branchgrpo.backbones.lora import load_lora
from branchgrpo.backbones.names import folder_of
from branchgrpo.evaluation.policies import load_policy
from branchgrpo.evaluation.sampling import check_images
from branchgrpo.evaluation.scores import draw_and_score, score_table
from branchgrpo.files import check_file, check_output
from branchgrpo.options import parse, parser_of
from branchgrpo.prompts import load_prompts
from branchgrpo.recipes import get
from branchgrpo.refusals import refusals_in_words
from branchgrpo.rewards.names import load_reward
from branchgrpo.rewards.scorer import Scorer
from branchgrpo.settings import PLACES, read_settings
from branchgrpo.training.origins import settings_from
from branchgrpo.training.resolve import resolve

ONE = SMALL | {
    "iterations": 1,
    "prompts_per_iteration": 1,
    "lora_rank": 2,
    "height": 32,
    "width": 32,
}


def change_weights(base, seed):
    "Replace a model by another one of the same class and shapes."
    path = next((base / "transformer").glob("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    table = load_file(path)
    save_file(
        {k: v + 0.05 * torch.randn(v.shape, generator=generator) for k, v in table.items()},
        path,
        {"format": "pt"},
    )


def weights_of(policy):
    return torch.cat(
        [p.detach().flatten() for n, p in policy.denoiser.named_parameters() if "lora" not in n]
    )


def test_a_run_finds_what_it_began_from_or_says_that_it_cannot(tmp_path, monkeypatch):
    work, other = tmp_path / "mine", tmp_path / "other"
    shutil.copytree(folder_of("tiny-flux"), work / "base")
    shutil.copytree(folder_of("tiny-flux"), other / "base")
    change_weights(other / "base", 1)
    monkeypatch.chdir(work)
    run = Trainer(TrainConfig.from_dict(ONE | {"backbone": "base", "output": "runs/a"})).fit()
    assert run.info["settings"]["backbone"] == "base"
    right = weights_of(load_policy("runs/a"))

    monkeypatch.chdir(other)  # another model of that name is here
    assert torch.equal(weights_of(load_policy("../mine/runs/a")), right)
    with pytest.raises(ValueError, match="differs in backbone|is not what this run began from"):
        config = ONE | {"iterations": 2, "backbone": "base", "output": "../mine/runs/a"}
        Trainer(TrainConfig.from_dict(config)).fit()

    work.rename(tmp_path / "moved")  # both, together
    moved = "../moved/runs/a"
    assert torch.equal(weights_of(load_policy(moved)), right)
    (tmp_path / "moved/base").rename(tmp_path / "gone")
    with pytest.raises(
        ValueError, match=r"backbone: the run '../moved/runs/a' began from 'base'.*another one now"
    ):
        load_policy(moved)
    shutil.rmtree("base")
    with pytest.raises(
        ValueError,
        match=r"backbone: the run '../moved/runs/a' began from 'base'.*is not there any more",
    ):
        load_policy(moved)

    info = Run(moved).info  # as an earlier version recorded it
    info.pop("origins")
    with pytest.raises(
        ValueError, match="the run 'x' began from 'base', which is not in the current folder"
    ):
        settings_from(info, "x")
    shutil.copytree(tmp_path / "gone", "base")
    with pytest.warns(UserWarning, match="recorded no digest of it"):
        assert settings_from(info, "x")["backbone"] == "base"


def test_a_home_folder_is_found_in_every_setting_that_is_a_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in PLACES:
        hint = tuple[str, ...] if name == "runs" else str
        cls = type("Options", (), {"__annotations__": {name: hint}, name: None})
        value = ["~/x"] if name == "runs" else "~/x"
        found = read_settings(dataclasses.dataclass(cls), {name: value})[name]
        assert found in (f"{tmp_path}/x", (f"{tmp_path}/x",))
    (tmp_path / "mine.py").write_text(
        "def dark(images, prompts):\n    return -images.mean((1, 2, 3))\n"
    )
    (tmp_path / "p.txt").write_text("a red 3\na blue 7\n")
    (tmp_path / "r.yaml").write_text("base: dancegrpo\nvalues:\n  steps: 5\n")
    (tmp_path / "c.yaml").write_text("output: ~/runs/demo\nrecipe: ~/r.yaml\nprompts: ~/p.txt\n")
    assert load_reward("0.5*~/mine.py:dark+tiny-clip")(
        torch.ones(1, 3, 32, 32), ["a red 3"]
    ).shape == (1,)
    assert (
        load_prompts("~/p.txt").test == ["a red 3", "a blue 7"]
        and get("~/r.yaml").values.steps == 5
    )
    s = resolve(TrainConfig.from_yaml("~/c.yaml"))
    assert (s.output, s.prompts, s.recipe) == (f"{tmp_path}/runs/demo", f"{tmp_path}/p.txt", "r")
    assert resolve(TrainConfig(output="~/x", reward="~/mine.py:dark")).output == f"{tmp_path}/x"
    assert Run("~/x").path == tmp_path / "x" and Run("runs/x").path.name == "x"
    with pytest.raises(ValueError, match="output: '~no-such-user/x' names a home folder"):
        resolve(TrainConfig(output="~no-such-user/x"))
    for name in ("~/no.safetensors", "~/no"):
        with pytest.raises(ValueError, match="lora: "):
            resolve(TrainConfig(lora=name))


def test_a_link_that_leads_nowhere_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("/no/such/scratch", "dangling")
    os.symlink("two", "one")
    os.symlink("one", "two")
    (tmp_path / "file").write_text("kept")
    os.symlink("file", "to_file")
    os.mkfifo("pipe")
    for path in ("dangling", "dangling/run", "one", "one/run"):
        for check in (check_output, check_file):
            with pytest.raises(
                ValueError, match=rf"output: '{path}.* is a link to .*, which leads nowhere"
            ):
                check(path)
    with pytest.raises(ValueError, match="output: 'to_file' exists and is not a run"):
        Trainer(TrainConfig.from_dict(ONE | {"output": "to_file"}))
    for path in ("/dev/null", "pipe"):
        with pytest.raises(ValueError, match="is a device or a pipe"):
            check_file(path)


def test_an_error_behind_itself_is_told():
    first, then = ValueError("output: x"), OSError("y")
    first.__context__, then.__context__ = then, first
    with pytest.raises(ValueError, match="output: x"), refusals_in_words({}):
        raise first


def test_lists_add_up_and_of_one_value_the_last_counts():
    for name, command in cli.COMMANDS.items():
        parser = parser_of(name, "", command.classes(), command.config)
        for action in parser._actions:
            if action.nargs == "+" and action.option_strings:
                flag = action.option_strings[0]
                assert parse(parser, [flag, "1", flag, "2", "3"])[action.dest] == ["1", "2", "3"]
    parser = parser_of("train", "", (TrainConfig,), True)
    assert parse(parser, ["--seed", "1", "--seed", "1"]) == {"seed": "1"}
    with pytest.warns(UserWarning, match="seed: it is given twice; '2' counts, not '1'"):
        assert parse(parser, ["--seed", "1", "--seed", "2"]) == {"seed": "2"}


def test_a_sample_takes_no_other_file_s_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sample", "--steps", "1", "--prompt", "a red 3"]
    for name, more in (
        ("sample.png", ()),
        ("sample-2.png", ()),
        ("sample-2.png", ("--output", "sample-2.png")),
    ):
        assert cli.main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert f": {name}" in said and ("in place of" in said) == bool(more)
    assert sorted(os.listdir()) == ["sample-2.png", "sample.png"]


def test_what_is_not_finite_is_no_image_and_no_adapter(tmp_path):
    policy = load_backbone("tiny-flux")
    layer = next(n for n, m in policy.denoiser.named_modules() if n.endswith("attn.to_q"))
    width = policy.denoiser.get_submodule(layer).in_features
    pair = {
        "A": torch.zeros(2, width),
        "B": torch.zeros(policy.denoiser.get_submodule(layer).out_features, 2),
    }
    for bad in (torch.nan, torch.inf):
        pair["B"][0, 0] = bad
        save_file(
            {f"transformer.{layer}.lora_{k}.weight": v for k, v in pair.items()},
            tmp_path / "bad.safetensors",
        )
        with pytest.raises(
            ValueError, match=r"lora: .*bad.safetensors' holds numbers that are not finite"
        ):
            load_lora(policy, str(tmp_path / "bad.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    check_images(images)
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="backbone: 1 of 2 images are not finite"):
        check_images(images)
    seen = []
    prompts = load_prompts("digits")

    def watches(shown, texts, known):
        seen.append(shown)
        return shown.sum((1, 2, 3))

    scorers = {"mine": Scorer(watches)}
    decoder = SimpleNamespace(decode=lambda latents: latents)
    _, waiting = draw_and_score(decoder, images, list(prompts.test[:2]), scorers, prompts)
    scores = score_table(scorers, waiting)
    assert seen[0].isfinite().all() and scores["mine"][""][0] > 0 and "check" in scores
    for table in scores.values():
        for column in table.values():
            assert column[0] == column[0] and column[1] != column[1]
