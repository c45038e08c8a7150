"""Credit as the sources have it: standard deviations, clipping, the scale of β, and the steps of each trajectory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from branchgrpo.credit import CreditOptions, depthwise_advantages, estimate_advantages
from branchgrpo.fusion import beta_at, density_scale, effective_sample_size, fuse_rewards
from branchgrpo.noise import Noise
from branchgrpo.plan import RolloutPlan
from branchgrpo.planning import process_of
from branchgrpo.policy import GaussianFlow
from branchgrpo.pruning import keep_edges, random_steps
from branchgrpo.rollouts import Predictor, rollout
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.credit import advantages_of, trained_edges
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer
from branchgrpo.tree import Tree, ancestors

TWO_PROMPTS = torch.tensor([[0.2, 0.3, 0.4, 0.5], [0.7, 0.8, 0.9, 1.0]])


def flow_grpo(rewards: Tensor) -> Tensor:
    "Return Flow-GRPO's advantages (flow_grpo/stat_tracking.py, global_std) without its 1e-4."
    values = rewards.double().numpy()
    return torch.tensor((values - values.mean(1, keepdims=True)) / np.std(values)).float()


def test_the_global_std_is_flow_grpos():
    found = depthwise_advantages([TWO_PROMPTS], std="global")[0]
    torch.testing.assert_close(found[0], torch.tensor([-0.548, -0.183, 0.183, 0.548]), atol=5e-4, rtol=0)
    torch.testing.assert_close(found, flow_grpo(TWO_PROMPTS))


def test_the_pooled_std_is_that_within_the_groups():
    found = depthwise_advantages([TWO_PROMPTS], std="pooled")[0]
    torch.testing.assert_close(found[0], torch.tensor([-1.162, -0.387, 0.387, 1.162]), atol=5e-4, rtol=0)


@pytest.mark.parametrize("std", ["pooled", "global"])
def test_two_processes_have_the_standard_deviation_of_one(std):
    sums = []
    for part in TWO_PROMPTS.split(1):
        depthwise_advantages([part], std=std, reduce=lambda own: sums.append(own) or own)
    for part, whole in zip(TWO_PROMPTS.split(1), depthwise_advantages([TWO_PROMPTS], std=std)[0]):
        found = depthwise_advantages([part], std=std, reduce=lambda own: sum(sums))[0]
        torch.testing.assert_close(found[0], whole)


def test_an_unscored_prompt_leaves_the_global_std_unchanged():
    unknown = torch.full((1, 4), torch.nan)
    found = depthwise_advantages([torch.cat([TWO_PROMPTS, unknown])], std="global")[0]
    torch.testing.assert_close(found, torch.cat([flow_grpo(TWO_PROMPTS), torch.zeros(1, 4)]))


def test_a_large_mean_does_not_cost_the_global_std_its_digits():
    found = depthwise_advantages([TWO_PROMPTS.double() + 1e4], std="global")[0]
    torch.testing.assert_close(found.float(), flow_grpo(TWO_PROMPTS), rtol=1e-4, atol=0)


@pytest.mark.parametrize("advantage", ["depthwise", "joint", "leaf-backup", "broadcast"])
def test_the_estimators_take_the_global_std(advantage):
    tree = Tree.from_plan(RolloutPlan.chains(3, 4), prompts=2)
    found = estimate_advantages(tree, TWO_PROMPTS, advantage, CreditOptions(std="global"))
    for of_depth in found[1:]:
        torch.testing.assert_close(of_depth, flow_grpo(TWO_PROMPTS))


def test_broadcast_does_not_clip_the_sum_of_advantages_that_it_clipped():
    tree = Tree.from_plan(RolloutPlan.tree(6, (0, 1, 2, 3)))
    rewards = torch.tensor([[1.0] * 8 + [0.0] * 8])
    first = estimate_advantages(tree, rewards, "broadcast", clip=5.0)[1]
    torch.testing.assert_close(first, torch.tensor([[7.746, -7.746]]), atol=1e-3, rtol=0)


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


def rolled(shape=(16, 4), prompts=3) -> Tree:
    "Return the trees of a rollout of a small flow whose latents have `shape`."
    policy = GaussianFlow(mean=0.5, std=0.5, shape=shape)
    settings = resolve(TrainConfig(recipe="branchgrpo", steps=12))
    plan, process = RolloutPlan.tree(12, (0, 2, 4, 5)), process_of(settings, policy)
    return rollout(plan, Predictor(policy, {}), process, Noise(0, 0, tuple(range(prompts))), s=4.0)


def test_densities_are_means_sums_or_between():
    tree = rolled()
    assert [density_scale(tree, name) for name in ("mean", "sqrt", "sum")] == [1.0, 8.0, 64.0]
    with pytest.raises(ValueError, match="beta_scale: 'total' is not one of mean, sqrt, sum"):
        density_scale(tree, "total")


@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
@pytest.mark.parametrize("effective", [12.0, 8.0, 4.0])
def test_beta_at_leaves_the_wanted_number_of_leaves(scale, effective):
    tree = rolled()
    beta = beta_at(tree, effective, scale)
    left = effective_sample_size(tree, beta * density_scale(tree, scale)).mean().item()
    assert left == pytest.approx(effective, rel=1e-3)


def test_beta_on_the_root_scale_does_not_depend_on_the_size_of_a_latent():
    small, large = (beta_at(rolled((n,), prompts=40), 8.0, "sqrt") for n in (128, 2048))
    assert small == pytest.approx(large, rel=0.1)


class Sized(GaussianFlow):
    "A flow with latents of 64 elements."

    def __init__(self):
        super().__init__(mean=0.0, std=0.5, shape=(64,))


def near_one(images, prompts, metadata=None):
    return -(images.flatten(1).mean(1) - 1.0).square()


def trained(folder, **changes):
    "Return a trainer of a small tree and its first iteration's metrics."
    fields = {"steps": 6, "splits": (0, 2, 3), "prompts_per_iteration": 2, "beta": 1.0, "tracker": "none"}
    config = TrainConfig(recipe="branchgrpo", iterations=1, evaluate_every=0, output=str(folder), **(fields | changes))
    return Trainer(config, policy=Sized(), reward=near_one, prompts=["a", "b"])


def test_a_run_uses_the_scale_of_beta_everywhere(tmp_path):
    found = {}
    for scale in ("mean", "sum"):
        trainer = trained(tmp_path / scale, beta_scale=scale, advantage_clip=1e9)
        collected = trainer.collector(0)
        beta = density_scale(collected.tree, scale)
        found[scale] = trainer.step()
        expected = effective_sample_size(collected.tree, beta).mean().item()
        assert found[scale]["ess"] == pytest.approx(expected, rel=1e-4)
    assert found["sum"]["ess"] < 0.7 * found["mean"]["ess"]


def test_credit_and_pruning_see_the_scaled_beta(tmp_path):
    trainer = trained(tmp_path / "run", beta_scale="sum", prune="parent-top1")
    collected, s = trainer.collector(0), trainer.settings
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


def test_each_trajectory_draws_its_own_steps():
    star = Tree.from_plan(RolloutPlan.chains(20, 16), prompts=2)
    kept = random_steps(star, 0.6, generators(0, 1))
    steps = torch.stack([kept[step + 1] for step in sorted(star.plan.trained)])  # (19, P, 16)
    assert (steps.sum(0) == 11).all(), "⌊0.6 · 19⌋ steps of every chain, as DanceGRPO counts them"
    assert len({tuple(chain.tolist()) for chain in steps.flatten(1).T}) == 32


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
