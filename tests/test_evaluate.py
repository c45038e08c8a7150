"""An evaluation that is killed, or shared, ends with the file of one that was not."""

import os
import signal
import sys
import time

import pytest
import torch
from test_training import ends_well

from branchgrpo.evaluation.evaluate import Evaluation, Evaluator
from branchgrpo.evaluation.sampling import load_policy
from branchgrpo.reproduction.warm import popen
from branchgrpo.testbed.digits import scenes
from branchgrpo.training.trainer import TrainConfig, Trainer

OPTIONS = ["--steps", "3", "--block", "5", "--rewards", "tiny-clip", "tiny-pickscore"]
CALL = [sys.executable, "-m", "branchgrpo.cli", "evaluate", *OPTIONS]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    "A file of 60 captions of the digits testbed."
    path = tmp_path_factory.mktemp("prompts") / "captions.txt"
    path.write_text("\n".join(list(dict.fromkeys(s.caption for s in scenes(200, "test", seed=1)))[:60]))
    return str(path)


def start(folder, prompts, **extra):
    "Start an evaluation; its log is beside its folder."
    words = [*CALL, "--prompts", prompts, "--output", folder]
    with open(f"{folder}{extra.get('RANK', '')}.log", "a") as log:
        return popen(words, stdout=log, stderr=log, env=os.environ | extra)


def test_sixty_prompts_killed_in_the_middle(tmp_path, prompts):
    whole, killed = start(tmp_path / "whole", prompts), start(tmp_path / "killed", prompts)
    blocks, deadline = tmp_path / "killed/blocks", time.time() + 120
    while not blocks.exists() or len(list(blocks.glob("*.jsonl"))) < 3:
        assert time.time() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed/summary.json").exists()
    again = start(tmp_path / "killed", prompts)
    ends_well(whole, tmp_path / "whole")
    ends_well(again, tmp_path / "killed")
    for name in ("images.jsonl", "summary.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert len((tmp_path / "whole/images.jsonl").read_text().splitlines()) == 60
    assert len(list((tmp_path / "killed/images").glob("*.png"))) == 60


def test_two_processes_share_the_work(tmp_path, prompts):
    both = [start(tmp_path / "run", prompts, RANK=str(r), WORLD_SIZE="2") for r in range(2)]
    for rank, process in enumerate(both):
        ends_well(process, tmp_path / f"run{rank}")
    numbers = [line.split(",")[0] for line in (tmp_path / "run/images.jsonl").read_text().splitlines()]
    assert len(numbers) == len(set(numbers)) == 60


PROMPTS = ["a red 3", "two blue 5s"]


def trained_run(folder, lora_rank):
    "Train two iterations and return the run's folder."
    small = dict(steps=4, splits=(0,), prompts_per_iteration=1, iterations=2, evaluate_every=0, tracker="none")
    Trainer(TrainConfig(**small, learning_rate=1e-2, ema_decay=0.5, lora_rank=lora_rank, output=str(folder))).fit()
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
