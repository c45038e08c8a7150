"Optimiser steps, averaged weights and evaluations do what the recipes' sources say."

import pytest
import torch

from branchgrpo import TrainConfig, Trainer, recipes
from branchgrpo.planning import process_of
from branchgrpo.training.credit import assign_credit, part_mask
from branchgrpo.training.export import averaged_weights


def config(output, **changes):
    "A short run of a small group on the smallest model."
    small = dict(steps=4, splits=(0, 2), prompts_per_iteration=2, iterations=2, evaluate_every=0, tracker="none")
    return TrainConfig(**small | {"output": str(output)} | changes)


def counted(trainer):
    "Count what an iteration does: rows that the denoiser sees with gradient, and steps of the optimiser."
    seen = {"rows": 0, "steps": 0}

    def rows(module, args, kwargs):
        if torch.is_grad_enabled():
            seen["rows"] += len(kwargs.get("hidden_states", args[0] if args else None))

    trainer.policy.denoiser.register_forward_pre_hook(rows, with_kwargs=True)
    trainer.learner.optimizer.optimizer.register_step_post_hook(lambda *_: seen.update(steps=seen["steps"] + 1))
    return seen


FLOW = dict(recipe="flow-grpo", splits=(), roots=4, kl=0.0, lora_rank=0)


def test_two_updates_use_disjoint_halves(tmp_path):
    "D2: Flow-GRPO steps twice per rollout, each trajectory once; two passes would cost the training twice."
    trainer = Trainer(config(tmp_path / "run", **FLOW))
    seen = counted(trainer)
    row = trainer.step()
    assert seen == {"rows": 2 * 4 * 3, "steps": 2}, "prompts × chains × trained steps, once"
    assert (row["trained_calls"], row["optimiser_steps"]) == (24, 2)
    collected = trainer.collector(1)
    process = process_of(trainer.settings, trainer.policy, 1)
    rolled, _ = assign_credit(trainer.learner, collected, process, trainer.collector.noise(1))
    first, second = (part_mask(rolled.edge_mask, rolled.parts, m) for m in range(2))
    for depth in (1, 3):
        assert not (first[depth] & second[depth]).any()
        assert first[depth].sum(1).tolist() == [2, 2], "half of each prompt's chains"
    assert torch.equal(first[1], first[3]), "a chain stays in one half"


def test_the_clip_acts_in_later_steps_only(tmp_path):
    "Ratio 1 holds for the first step of a rollout; from then on the clip fraction is reported."
    one = Trainer(config(tmp_path / "one", steps_per_pass=1)).step()
    assert (one["ratio"], one["clip_fraction"]) == (1.0, 0.0)
    three = Trainer(config(tmp_path / "three", steps_per_pass=3, step_unit="edges", learning_rate=1e-3)).step()
    assert three["clip_fraction"] > 0.1
    assert three["rollout_mismatch"] < 1e-6
    assert three["edges"] == one["edges"]


@pytest.mark.parametrize("unit", ["prompts", "trajectories", "edges"])
def test_parts_of_one_step_are_the_whole_gradient(tmp_path, unit):
    "Without a step in between, the gradients of all parts add up to that of the whole rollout."
    trainer = Trainer(config(tmp_path / "run", steps_per_pass=2, step_unit=unit))
    from branchgrpo.training.update import accumulate, shared_micro_batches

    collected, process = trainer.collector(0), process_of(trainer.settings, trainer.policy, 0)
    rolled, _ = assign_credit(trainer.learner, collected, process, trainer.collector.noise(0))

    def gradient(part):
        mask = rolled.edge_mask if part is None else part_mask(rolled.edge_mask, rolled.parts, part)
        trainer.learner.optimizer.zero_grad()
        stats = accumulate(trainer.learner, rolled, shared_micro_batches(trainer.learner, rolled.tree, mask))
        return stats["edges"], torch.cat([p.grad.flatten() for p in trainer.learner.parameters.values()])

    (a, first), (b, second), (n, whole) = gradient(0), gradient(1), gradient(None)
    assert a + b == n
    torch.testing.assert_close((a * first + b * second) / n, whole, rtol=1e-4, atol=1e-6)


def test_adamw_divides_the_released_loss_out_above_its_epsilon(tmp_path):
    "A loss divided by a tree's edges gives AdamW's step of the mean loss where gradients are above ε, and less below."
    moved = {}
    for eps in (1e-15, 1.0):
        for loss_mean in ("step", "step*tree"):
            name = f"{eps}{loss_mean}".replace("*", "")
            trainer = Trainer(config(tmp_path / name, loss_mean=loss_mean, adam_eps=eps, max_grad_norm=1e9))
            before = torch.cat([p.detach().flatten().clone() for p in trainer.learner.parameters.values()])
            trainer.step()
            after = torch.cat([p.detach().flatten() for p in trainer.learner.parameters.values()])
            moved[eps, loss_mean] = float((after - before).norm())
    assert moved[1e-15, "step*tree"] == pytest.approx(moved[1e-15, "step"], rel=0.05)
    assert moved[1.0, "step*tree"] < 0.5 * moved[1.0, "step"]


def test_the_average_reaches_its_decay_and_is_what_is_used(tmp_path):
    "D4: a constant decay holds from the first step, and the averaged weights are evaluated and exported."
    average = dict(ema_decay=0.5, ema_every=1, learning_rate=1e-2, evaluate_every=2, evaluation_prompts=4)
    used = Trainer(config(tmp_path / "used", ema_used=True, **average))
    assert used.learner.ema.decay_now == 0.5
    run = used.fit()
    plain = Trainer(config(tmp_path / "plain", **average)).fit()
    assert [r["reward"] for r in run.metrics] == [r["reward"] for r in plain.metrics], "training is the same"
    assert run.evaluations[-1]["eval_reward"] != plain.evaluations[-1]["eval_reward"]
    with averaged_weights(used.learner):
        scores, _ = used.evaluator(used.policy)
    assert scores["eval_reward"] == run.evaluations[-1]["eval_reward"]
    from safetensors.torch import load_file

    found = load_file(next((tmp_path / "used/model/transformer").glob("*.safetensors")))
    for name, value in found.items():
        assert torch.equal(value, used.learner.ema.weights[name])


def test_flow_grpo_averages_every_eighth_step(tmp_path):
    assert (flow := recipes.get("flow-grpo").values).ema_every == 8 and flow.ema_used
    trainer = Trainer(config(tmp_path / "run", **FLOW | {"learning_rate": 1e-2, "ema_every": 8}))
    name = next(iter(trainer.learner.parameters))
    start = trainer.learner.ema.weights[name].clone()
    for _ in range(3):
        trainer.step()
    assert torch.equal(trainer.learner.ema.weights[name], start), "after six optimiser steps nothing has moved"
    trainer.step()
    assert not torch.equal(trainer.learner.ema.weights[name], start)


def test_an_evaluation_has_its_own_number_of_steps(tmp_path):
    "SD3.5-M trains with 10 steps and is evaluated with 40."
    assert recipes.get("flow-grpo").values.evaluation_steps == 40
    scores = {}
    for steps in (None, 4, 9):
        trainer = Trainer(config(tmp_path / f"run{steps}", evaluation_steps=steps, evaluation_prompts=4))
        rows = []
        trainer.policy.denoiser.register_forward_pre_hook(lambda *_: rows.append(1), with_kwargs=False)
        scores[steps] = trainer.evaluator(trainer.policy)[0]["eval_reward"]
        assert len(rows) == (steps or 4)
    assert scores[None] == scores[4] != scores[9]


def test_an_evaluation_of_fewer_steps_than_the_window_needs_no_window(tmp_path):
    "Nothing of an evaluation is stochastic, so that the place of a window does not matter there."
    moving = dict(steps=8, window="progressive", window_size=2, window_stop=5)
    moving |= dict(stochastic="window", splits="window-start")
    trainer = Trainer(config(tmp_path / "run", **moving, evaluation_steps=4, evaluation_prompts=2))
    assert trainer.evaluator(trainer.policy)[0]["eval_reward"] > 0
