"""Credit as the sources have it, where several modules meet; each estimator and each rule alone:
nbs/08, 09, 12."""

import numpy as np
import pytest
import torch
from torch import Tensor

from branchgrpo.credit import (
    CreditOptions,
    centre,
    depthwise_advantages,
    estimate_advantages,
    flat_groups,
)
from branchgrpo.fusion import density_scale, effective_sample_size, fuse_rewards
from branchgrpo.plan import RolloutPlan
from branchgrpo.policy import GaussianFlow
from branchgrpo.pruning import keep_edges, random_steps
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.credit import advantages_of, trained_edges
from branchgrpo.training.trainer import Trainer
from branchgrpo.tree import Tree, ancestors

TWO_PROMPTS = torch.tensor([[0.2, 0.3, 0.4, 0.5], [0.7, 0.8, 0.9, 1.0]])


def flow_grpo(rewards: Tensor) -> Tensor:
    "Return Flow-GRPO's advantages (flow_grpo/stat_tracking.py, global_std) without its 1e-4."
    values = rewards.double().numpy()
    return torch.tensor((values - values.mean(1, keepdims=True)) / np.std(values)).float()


def test_groups_that_differ_by_rounding_are_flat():
    bit = torch.finfo(torch.float32).eps
    values = torch.tensor([[1.0, 1.0 + bit, 1.0], [1.0, 1.001, 1.0], [1.0, 9.0, 1.0]])
    known = torch.tensor([[True, True, True], [True, True, True], [True, False, True]])
    assert flat_groups(values, known).tolist() == [[True], [False], [True]]
    assert centre(torch.tensor([[0.9, 0.9001, 0.9]]))[0].abs().min() > 0
    assert not centre(torch.full((2, 3), torch.nan))[0].any()


@pytest.mark.parametrize("score", [0.9, 1 / 3, -0.7, 0.0, 1e30])
def test_equal_scores_have_no_difference_whatever_their_mean_is_rounded_to(score):
    same = torch.full((1, 12), score)
    assert not centre(same)[0].any()
    almost = same.nextafter(torch.tensor(9e30)) * torch.tensor([1.0] * 11 + [1 - 1e-7])
    assert not centre(almost)[0].any()


@pytest.mark.parametrize("advantage", ["depthwise", "joint", "leaf-backup", "broadcast"])
def test_the_estimators_take_the_global_std(advantage):
    tree = Tree.from_plan(RolloutPlan.chains(3, 4), prompts=2)
    found = estimate_advantages(tree, TWO_PROMPTS, advantage, CreditOptions(std="global"))
    for of_depth in found[1:]:
        torch.testing.assert_close(of_depth, flow_grpo(TWO_PROMPTS))


def test_broadcast_clips_each_leaf():
    tree = Tree.from_plan(RolloutPlan.tree(8, (0, 1, 2, 3, 4, 5)))
    rewards = torch.zeros(1, 64)
    rewards[0, 0] = 1.0
    found = estimate_advantages(tree, rewards, "broadcast", clip=5.0)
    chains = estimate_advantages(tree, rewards, "depthwise", clip=5.0)[-1]
    assert found[-1].max() == 5.0
    for d, of_depth in enumerate(found):
        below = torch.zeros_like(of_depth).scatter_add(1, ancestors(tree, d), chains)
        torch.testing.assert_close(of_depth, below)


class Sized(GaussianFlow):
    "A flow with latents of 64 elements."

    def __init__(self):
        super().__init__(mean=0.0, std=0.5, shape=(64,))


def near_one(images, prompts, metadata=None):
    return -(images.flatten(1).mean(1) - 1.0).square()


def trained(folder, **changes):
    "Return a trainer of a small tree and its first iteration's metrics."
    fields = {
        "steps": 6,
        "splits": (0, 2, 3),
        "prompts_per_iteration": 2,
        "beta": 1.0,
        "tracker": "none",
    }
    config = TrainConfig(
        recipe="branchgrpo",
        iterations=1,
        evaluate_every=0,
        output=str(folder),
        **(fields | changes),
    )
    return Trainer(config, policy=Sized(), reward=near_one, prompts=["a", "b"])


def test_a_run_uses_the_scale_of_beta_everywhere(tmp_path):
    found = {}
    for scale in ("mean", "sum"):
        trainer = trained(tmp_path / scale, beta_scale=scale, advantage_clip=1e9)
        tree = trainer.collect(0).tree
        beta = density_scale(tree, scale)
        found[scale] = trainer.step()
        expected = effective_sample_size(tree, beta).mean().item()
        assert found[scale]["ess"] == pytest.approx(expected, rel=1e-4)
    assert found["sum"]["ess"] < 0.7 * found["mean"]["ess"]


def test_credit_and_pruning_see_the_scaled_beta(tmp_path):
    trainer = trained(tmp_path / "run", beta_scale="sum", prune="parent-top1")
    collected, s = trainer.collect(0), trainer.settings
    tree, rewards = collected.tree, collected.rewards
    values = fuse_rewards(tree, rewards, 64.0)
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    found = advantages_of(s, tree, rewards, everyone, lambda sums: sums)
    for own, expected in zip(found, depthwise_advantages(values)):
        torch.testing.assert_close(own, expected)
    kept = trained_edges(s, tree, rewards, everyone, trainer.collector.noise(0))
    for own, expected in zip(kept, keep_edges(tree, everyone, "parent-top1", values, rewards)):
        assert torch.equal(own, expected)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_a_shared_edge_takes_the_draw_of_its_first_leaf():
    tree = Tree.from_plan(RolloutPlan.tree(8, (0, 2, 4)), prompts=2)
    kept = random_steps(tree, 0.5, generators(0, 1))
    star = random_steps(Tree.from_plan(RolloutPlan.chains(8, 8), prompts=2), 0.5, generators(0, 1))
    for step in tree.plan.trained:
        width = tree.plan.populations[step + 1]
        assert torch.equal(kept[step + 1], star[step + 1][:, :: 8 // width])


def test_a_prompts_steps_do_not_depend_on_its_process():
    star = RolloutPlan.chains(10, 4)
    both = random_steps(Tree.from_plan(star, prompts=2), 0.6, generators(0, 1))
    second = random_steps(Tree.from_plan(star, prompts=1), 0.6, generators(1))
    for whole, part in zip(both, second):
        assert torch.equal(whole[1:], part)
