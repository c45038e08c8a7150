"""Processes share an evaluation; it takes the weights that are asked for; `sample` draws a model of
one's own."""

import os
import shutil
import sys

import pytest
import torch
from commands import popen
from PIL import Image
from test_training import ends_well

from branchgrpo import cli
from branchgrpo.backbones.names import folder_of
from branchgrpo.evaluation.evaluate import Evaluator
from branchgrpo.evaluation.fields import Evaluation
from branchgrpo.evaluation.policies import load_policy
from branchgrpo.evaluation.sampling import sample_block
from branchgrpo.testbed.digits import scenes
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

OPTIONS = ["--steps", "3", "--block", "5", "--rewards", "tiny-clip", "tiny-pickscore"]
CALL = [sys.executable, "-m", "branchgrpo.cli", "evaluate", *OPTIONS]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    "A file of 60 captions of the digits testbed."
    path = tmp_path_factory.mktemp("prompts") / "captions.txt"
    path.write_text(
        "\n".join(list(dict.fromkeys(s.caption for s in scenes(200, "test", seed=1)))[:60])
    )
    return str(path)


def start(folder, prompts, **extra):
    "Start an evaluation; its log is beside its folder."
    words = [*CALL, "--prompts", prompts, "--output", folder]
    with open(f"{folder}{extra.get('RANK', '')}.log", "a") as log:
        return popen(words, stdout=log, stderr=log, env=os.environ | extra)


def test_two_processes_share_the_work(tmp_path, prompts):
    both = [start(tmp_path / "run", prompts, RANK=str(r), WORLD_SIZE="2") for r in range(2)]
    for rank, process in enumerate(both):
        ends_well(process, tmp_path / f"run{rank}")
    numbers = [
        line.split(",")[0] for line in (tmp_path / "run/images.jsonl").read_text().splitlines()
    ]
    assert len(numbers) == len(set(numbers)) == 60


PROMPTS = ["a red 3", "two blue 5s"]


def trained_run(folder, lora_rank):
    "Train two iterations and return the run's folder."
    small = dict(
        backbone="tiny-flux",
        steps=4,
        splits=(0,),
        prompts_per_iteration=1,
        iterations=2,
        evaluate_every=0,
        tracker="none",
    )
    Trainer(
        TrainConfig(
            **small, learning_rate=1e-2, ema_decay=0.5, lora_rank=lora_rank, output=str(folder)
        )
    ).fit()
    return str(folder)


@torch.no_grad()
def velocity(policy):
    "The policy's output on two fixed latents."
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    return policy.predict(latents, torch.tensor(0.5), policy.encode(PROMPTS))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_weights_of_a_run(tmp_path, lora_rank):
    "Trained, averaged and base weights of one run draw different images; those of an adapter too."
    run = trained_run(tmp_path / "run", lora_rank)
    found = {}
    for weights in ("trained", "ema", "base"):
        evaluation = Evaluation(backbone=run, weights=weights, prompts="digits", limit=2, steps=3)
        found[weights] = velocity(Evaluator(evaluation, tmp_path / weights).policy)
    assert not torch.allclose(found["trained"], found["base"], atol=1e-4)
    assert not torch.allclose(found["ema"], found["base"], atol=1e-4)
    assert not torch.allclose(found["trained"], found["ema"], atol=1e-5)
    plain = velocity(load_policy("tiny-flux", guidance_scale=1.0))
    torch.testing.assert_close(found["base"], plain, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Folders of models: as for a model of one's own, nothing says at which size they were trained."
    place = tmp_path_factory.mktemp("models")
    for name in ("tiny-wan", "tiny-sd3"):
        shutil.copytree(folder_of(name), place / name)
    return place


def drawing_line(command, place, words):
    "What is typed to draw one prompt with `sample` or `evaluate`."
    asked = {
        "sample": f"--prompt x --output {place}/x.png",
        "evaluate": f"--limit 1 --output {place}/e",
    }
    return [command, *asked[command].split(), *words.split()]


def test_the_size_of_a_folder_is_given(folders, tmp_path):
    words = (
        f"--backbone {folders}/tiny-wan --height 32 --width 64 --frames 5 --guidance-scale 1"
        " --steps 2 --shift 2"
    )
    assert cli.main(drawing_line("sample", tmp_path, words)) == 0
    assert Image.open(tmp_path / "x.png").size == (5 * 64 * 8, 32 * 8)  # enlarged to 256 pixels


def test_shift_changes_the_noise_levels():
    drawn = [
        sample_block(load_policy("tiny-flux", shift=shift), ["a red 3"], [0], 4, 0)
        for shift in (None, 3.0, 1.0)
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
