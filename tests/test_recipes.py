"""Every recipe trains tiny-flux, with exactly the denoiser calls its plan promises."""

import pytest
import torch
from slow import often

from branchgrpo import recipes
from branchgrpo.planning import plan_of
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

# a tree, a pruned one, windows with a solver, a funnel, a side branch with previews, a sum of rewards, an own density
CHOSEN = ("branchgrpo", "branchgrpo-adaptive", "mixgrpo-flash", "pro-grpo", "g2rpo", "gdpo", "flow-cps", "dancegrpo-sd")


@pytest.mark.parametrize("name", often(recipes.names(), CHOSEN))
def test_recipe_trains(name, tmp_path):
    trainer = Trainer(
        TrainConfig(
            recipe=name,
            iterations=3,
            output=str(tmp_path / "run"),
            prompts_per_iteration=1,
            evaluate_every=0,
            tracker="none",
        )
    )
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


@pytest.mark.parametrize(
    "setting",
    [
        {"advantage": "joint"},
        {"advantage": "leave-one-out"},
        {"advantage": "leaf-backup"},
        {"advantage": "broadcast"},
        {"advantage": "siblings"},
        {"step_weights": "std"},
        {"step_weights": "inverse-gradient", "merged": {3: 2}, "noise_factors": {0: 2.0}},
        {"transition": "linear", "eta": 1.0},
        {"ratio": "guard", "passes": 2},
        {"kl": 0.1},
        {"kl": 0.1, "lora_rank": 2},
        {"split_noise": "scaled"},
        {"transition": "cps", "eta": 0.5},
        {"min_nodes": 4},
        {"std": "pooled"},
        {"max_batch": 5},
    ],
    ids=str,
)
def test_option_trains(setting, tmp_path):
    config = TrainConfig(
        iterations=2,
        output=str(tmp_path / "run"),
        prompts_per_iteration=2,
        steps=6,
        splits=(0, 2),
        evaluate_every=0,
        tracker="none",
        **{"steps_per_pass": 1} | setting,
    )
    trainer = Trainer(config)
    first, second = trainer.step(), trainer.step()
    assert first["rollout_mismatch"] < 1e-5 and second["grad_norm"] > 0
    if setting.get("kl"):
        assert first["kl"] < 1e-12 < second["kl"]
