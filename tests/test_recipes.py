"""Recipes train tiny-flux with the calls that their plans promise; options train a Gaussian flow.

`test_arithmetic` counts every recipe; `test_device` trains them with options on a virtual GPU.
"""

import pytest
import torch
from slow import often

from branchgrpo import GaussianFlow, recipes
from branchgrpo.planning import plan_of
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

CHOSEN = ("branchgrpo-adaptive", "mixgrpo-flash", "gdpo")  # splits to come, a window with a solver, a sum of rewards
SMALL = dict(evaluate_every=0, tracker="none")


@pytest.mark.parametrize("name", often(recipes.names(), CHOSEN))
def test_recipe_trains(name, tmp_path):
    trainer = Trainer(TrainConfig(recipe=name, iterations=3, output=str(tmp_path), prompts_per_iteration=1, **SMALL))
    parameters = trainer.learner.parameters
    before = {n: p.detach().clone() for n, p in parameters.items()}
    calls, predict, collect = [0], trainer.policy.predict, trainer.collector

    def counted(latents, *args):
        calls[0] += len(latents)
        return predict(latents, *args)

    def collecting(iteration):
        trainer.policy.predict = counted  # during the rollout: an update may predict old means without a gradient
        collected = collect(iteration)
        trainer.policy.predict = predict
        return collected

    collecting.noise = collect.noise
    trainer.collector = collecting
    for iteration in range(3):
        spent = calls[0]
        row = trainer.step()
        if not trainer.settings.adaptive:
            assert calls[0] - spent == plan_of(trainer.settings, iteration).denoiser_calls
        assert calls[0] == row["denoiser_calls"]
        assert row["edges"] > 0
        assert row["rollout_mismatch"] < 1e-5
        assert all(v == v for v in row.values() if isinstance(v, float))
    assert any(not torch.equal(p, before[n]) for n, p in parameters.items())


OPTIONS = [
    *({"advantage": name} for name in ("joint", "leave-one-out", "leaf-backup", "broadcast", "siblings")),
    {"step_weights": "std"},
    {"step_weights": "inverse-gradient", "merged": {3: 2}, "noise_factors": {0: 2.0}},
    {"transition": "linear", "eta": 1.0},
    {"transition": "cps", "eta": 0.5},
    {"ratio": "guard", "passes": 2},
    {"kl": 0.1},
    {"split_noise": "scaled"},
    {"min_nodes": 4},
    {"std": "pooled"},
    {"max_batch": 5},
]


@pytest.mark.parametrize("setting", OPTIONS, ids=str)
def test_option_trains(setting, tmp_path):
    sizes = dict(prompts_per_iteration=2, steps=6, splits=(0, 2), iterations=2, lora_rank=0)
    config = TrainConfig(output=str(tmp_path / "run"), **SMALL, **sizes | {"steps_per_pass": 1} | setting)
    policy, prompts = GaussianFlow(shape=(4,)), ["a", "b", "c"]
    trainer = Trainer(config, policy=policy, reward=lambda images, prompts: images.flatten(1).mean(1), prompts=prompts)
    first, second = trainer.step(), trainer.step()
    assert first["rollout_mismatch"] < 1e-5 and second["grad_norm"] > 0
    if setting.get("kl"):
        assert first["kl"] < 1e-12 < second["kl"]
