"The mechanism, measured: the exact gradient, projections without a backward, and variances by formula."

import json
import math
from pathlib import Path

import pytest
import torch

from branchgrpo import TrainConfig, Trainer
from branchgrpo.mechanism.exact import (
    edge_derivatives,
    moved_policy,
    pathwise_side,
    projections,
    prompt_gradient,
    score_function_side,
    scored,
)
from branchgrpo.mechanism.gaussian import all_schedules, gradient_moments, linear_steps, schedule_quality
from branchgrpo.mechanism.measure import alignment_rows, read_samples, reference_of
from branchgrpo.plan import RolloutPlan
from branchgrpo.planning import plan_of, process_of
from branchgrpo.policy import GaussianFlow
from branchgrpo.training.credit import assign_credit
from branchgrpo.training.resolve import resolve


def mean_of_image(images, prompts, metadata=None):
    return images.flatten(1).mean(1)


def near_one(images, prompts, metadata=None):
    "Best where the image is 1: not linear, so that both sides of the identity have noise."
    return -(images.flatten(1) - 1).square().mean(1)


def trainer(folder, reward=mean_of_image, elements=3, **fields):
    config = TrainConfig(lora_rank=0, tracker="none", output=str(folder), kl=0.0, **fields)
    return Trainer(config, policy=GaussianFlow(0.2, 0.7, (elements,)), reward=reward, prompts=["a", "b", "c"])


@pytest.mark.parametrize("reward", [mean_of_image, near_one])
@pytest.mark.parametrize("recipe", ["dancegrpo", "flow-grpo"])
def test_the_score_function_gradient_is_the_pathwise_one(tmp_path, recipe, reward):
    "Rollout, log-densities and credit together: a wrong factor in any of them is seen."
    t = trainer(tmp_path, reward, recipe=recipe, std="none", steps=6, prompts_per_iteration=800)
    along = torch.ones(3) / math.sqrt(3)
    found = score_function_side(t, 0, along, 0.1)
    exact = pathwise_side(t, 0, along, copies=10)
    error = float(found.std()) / math.sqrt(len(found))
    assert error < 0.1 * abs(exact)
    assert abs(float(found.mean()) - exact) < 4 * error


RECIPES = ["branchgrpo", "branchgrpo-widpru", "branchgrpo-released", "grpo-guard", "mixgrpo", "g2rpo-one", "flash-grpo"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_projection_is_that_of_the_whole_gradient(tmp_path, recipe):
    "Of every prompt, for splits, side branches, windows, prunings, ratio rules and step weights."
    t = trainer(tmp_path, recipe=recipe, prompts_per_iteration=2)
    collected, process = t.collector(0), process_of(t.settings, t.policy, 0)
    rolled, _ = assign_credit(t.learner, collected, process, t.collector.noise(0))
    along = torch.tensor([0.6, 0.8, 0.0])
    edges = edge_derivatives(t.learner, rolled, moved_policy(t.learner, along, 0.1), 0.1)
    whole = torch.stack([prompt_gradient(t.learner, rolled, p) for p in range(2)])
    assert whole.abs().max() > 0
    torch.testing.assert_close(projections(rolled, edges).sum(1), whole @ along, rtol=1e-3, atol=1e-5)


def test_the_formula_is_the_policy_gradient_theorem():
    "Of a star, and of a tree whose splits are all at step 0: they are the same group."
    s = resolve(TrainConfig(recipe="dancegrpo", steps=8))
    process = process_of(s, GaussianFlow())
    plan = plan_of(s)
    steps = linear_steps(process, plan.drawn)
    leaves = plan.leaves
    expected = (1 - 1 / leaves) * steps.gradient(plan.trained) / len(plan.trained)
    assert gradient_moments(plan, steps).mean == pytest.approx(expected, rel=1e-5)
    assert gradient_moments(plan, steps, "broadcast").mean == pytest.approx(expected, rel=1e-5)


def test_more_chains_point_better_and_a_best_schedule_is_the_best():
    s = resolve(TrainConfig(recipe="branchgrpo", steps=6, splits=(0, 2)))
    process = process_of(s, GaussianFlow())
    found = [schedule_quality(process, (0,), factor=n)["cosine_squared"] for n in (4, 8, 16)]
    assert found == sorted(found)
    rows = all_schedules(process, 2)
    assert len(rows) == math.comb(5, 2)
    assert rows[0]["per_cost"] == max(row["per_cost"] for row in rows) >= schedule_quality(process, (0, 2))["per_cost"]


def test_what_cannot_be_measured_is_said():
    with pytest.raises(ValueError, match="reference_batches: 1 is below 2"):
        reference_of(torch.ones(1, 3))
    with pytest.raises(ValueError, match="reward: .*has no gradient"):
        scored(lambda images, prompts: torch.zeros(len(images)), torch.ones(1, 3, 2, 2), ["a"])
    plan = RolloutPlan.funnel(6, (8, 4), (3,))
    process = process_of(resolve(TrainConfig(recipe="dancegrpo", steps=6)), GaussianFlow())
    with pytest.raises(ValueError, match="plan: with pruning steps"):
        gradient_moments(plan, linear_steps(process, plan.drawn))


def test_the_committed_ratios_follow_from_the_committed_projections():
    "Everybody can compute them anew: each row of the record, intervals and all."
    figures = Path(__file__).parents[1] / "figures/testbed"
    record = json.loads((figures / "beyond_mechanism.json").read_text())
    measured = read_samples(figures / "beyond_mechanism.parquet")
    assert {str(moment) for moment in measured} == set(record["alignment"])
    for moment, found in measured.items():
        rows = alignment_rows(found, record["baseline"], record["draws"])
        for ours, theirs in zip(rows, record["alignment"][str(moment)], strict=True):
            assert ours["label"] == theirs["label"]
            for key in ("per_cost", "ratio", "ratio_per_cost"):
                assert ours[key] == pytest.approx(theirs[key]), (ours["label"], key)
