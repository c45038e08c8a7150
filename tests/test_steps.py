"Optimiser steps, averaged weights and evaluations do what the recipes' sources say."

import pytest
import torch

from branchgrpo import TrainConfig, Trainer, recipes
from branchgrpo.training.export import averaged_weights


def config(output, **changes):
    "A short run of a small group on the smallest model."
    small = dict(
        steps=4,
        splits=(0, 2),
        prompts_per_iteration=2,
        iterations=2,
        evaluate_every=0,
        tracker="none",
    )
    return TrainConfig(**small | {"output": str(output)} | changes)


def test_adamw_divides_the_released_loss_out_above_its_epsilon(tmp_path):
    """A loss divided by a tree's edges gives AdamW's step of the mean loss where gradients are
    above ε, and less below."""
    moved = {}
    for eps in (1e-15, 1.0):
        for loss_mean in ("step", "step*tree"):
            name = f"{eps}{loss_mean}".replace("*", "")
            trainer = Trainer(
                config(tmp_path / name, loss_mean=loss_mean, adam_eps=eps, max_grad_norm=1e9)
            )
            before = torch.cat(
                [p.detach().flatten().clone() for p in trainer.learner.parameters.values()]
            )
            trainer.step()
            after = torch.cat([p.detach().flatten() for p in trainer.learner.parameters.values()])
            moved[eps, loss_mean] = float((after - before).norm())
    assert moved[1e-15, "step*tree"] == pytest.approx(moved[1e-15, "step"], rel=0.05)
    assert moved[1.0, "step*tree"] < 0.5 * moved[1.0, "step"]


def test_the_average_reaches_its_decay_and_is_what_is_used(tmp_path):
    """D4: a constant decay holds from the first step, and the averaged weights are evaluated and
    exported."""
    average = dict(
        ema_decay=0.5, ema_every=1, learning_rate=1e-2, evaluate_every=2, evaluation_prompts=4
    )
    used = Trainer(config(tmp_path / "used", ema_used=True, **average))
    assert used.learner.ema.decay_now == 0.5
    run = used.fit()
    plain = Trainer(config(tmp_path / "plain", **average)).fit()
    assert [r["reward"] for r in run.metrics] == [r["reward"] for r in plain.metrics], (
        "training is the same"
    )
    assert run.evaluations[-1]["eval_reward"] != plain.evaluations[-1]["eval_reward"]
    with averaged_weights(used.learner):
        scores, _ = used.evaluator(used.policy)
    assert scores["eval_reward"] == run.evaluations[-1]["eval_reward"]
    from safetensors.torch import load_file

    found = load_file(next((tmp_path / "used/model/transformer").glob("*.safetensors")))
    for name, weight in used.learner.ema.weights.items():
        assert torch.equal(found[name], weight)


def test_an_evaluation_has_its_own_number_of_steps(tmp_path):
    "SD3.5-M trains with 10 steps and is evaluated with 40."
    assert recipes.get("flow-grpo").values.evaluation_steps == 40
    scores = {}
    for steps in (None, 4, 9):
        trainer = Trainer(
            config(tmp_path / f"run{steps}", evaluation_steps=steps, evaluation_prompts=4)
        )
        rows = []
        trainer.policy.denoiser.register_forward_pre_hook(
            lambda *_: rows.append(1), with_kwargs=False
        )
        scores[steps] = trainer.evaluator(trainer.policy)[0]["eval_reward"]
        assert len(rows) == (steps or 4)
    assert scores[None] == scores[4] != scores[9]


def test_an_evaluation_of_fewer_steps_than_the_window_needs_no_window(tmp_path):
    "Nothing of an evaluation is stochastic, so that the place of a window does not matter there."
    moving = dict(steps=8, window="progressive", window_size=2, window_stop=5)
    moving |= dict(stochastic="window", splits="window-start")
    trainer = Trainer(config(tmp_path / "run", **moving, evaluation_steps=4, evaluation_prompts=2))
    assert trainer.evaluator(trainer.policy)[0]["eval_reward"] > 0
