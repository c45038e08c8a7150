"""Trees of any shape: fans, re-rooted and resampled chains, and what must hold for every list of
edges."""

import signal

import pytest
import torch

from branchgrpo import (
    GaussianFlow,
    Judge,
    Noise,
    Predictor,
    RolloutPlan,
    TrainConfig,
    Trainer,
    flow_sigmas,
    flow_transition,
    rollout,
)
from branchgrpo.credit import ADVANTAGES, CreditOptions, estimate_advantages
from branchgrpo.fusion import fuse_rewards
from branchgrpo.pruning import PRUNINGS, keep_edges
from branchgrpo.rollouts import edges_in, revisit
from branchgrpo.selection import choose
from branchgrpo.training import update as update_module
from branchgrpo.training.stop import Preempted
from branchgrpo.training.update import micro_batches
from branchgrpo.transition import SolverTail, dpm_solver

PROMPTS = 3
SHAPES = {  # a plan, and how a pruning step chooses
    "tree": (RolloutPlan.tree(6, (0, 2)), None),
    "side branches": (RolloutPlan(6, roots=2, side={0: 3, 2: 2}), None),
    "funnel": (RolloutPlan.funnel(6, (6, 3), (2,)), "best"),
    "fans": (RolloutPlan(6, roots=2, fans={0: (3, 1), 2: (1, 2, 1, 4)}), None),
    "re-root": (RolloutPlan(6, splits={0: 4}, prune_at={2: 4, 3: 4}), "re-root"),
    "resample": (RolloutPlan(6, splits={0: 6}, prune_at={1: 6, 3: 4}), "resample"),
    "resample and split": (RolloutPlan(6, splits={0: 4, 2: 2}, prune_at={2: 3}), "resample"),
}


class Chosen(Judge):
    "Chooses by the mean of x̂₀."

    def __init__(self, rule, noise):
        self.rule, self.noise = rule, noise

    def survivors(self, step, x0_hat, k):
        generators = [self.noise.generator(p, -2 - step) for p in self.noise.prompts]
        return choose(self.rule, x0_hat.flatten(2).mean(2), k, generators)


def grown(name, s=2.0):
    "A tree, with the policy and the process that drew it."
    plan, rule = SHAPES[name]
    policy, noise = GaussianFlow(0.3, 1.0, (2, 3)), Noise(0, 0, tuple(range(PROMPTS)))
    process = flow_transition("dance", flow_sigmas(plan.steps, 3.0), 0.7)
    judge = Chosen(rule, noise) if rule else None
    return rollout(plan, Predictor(policy, {}), process, noise, s, judge=judge), policy, process


@pytest.mark.parametrize("name", SHAPES)
def test_every_estimator_and_every_pruning_rule_knows_every_shape(name):
    tree, _, _ = grown(name)
    rewards = tree.finished.flatten(2).mean(2)
    for estimator in ADVANTAGES.names():
        if getattr(ADVANTAGES.get(estimator), "needs_previews", False):
            continue
        found = estimate_advantages(tree, rewards, estimator, CreditOptions(s=2.0, beta=0.5))
        for values, parents in zip(found, tree.parents):
            assert values.shape == parents.shape and values.isfinite().all(), estimator
    values = fuse_rewards(tree, rewards)
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    whole = keep_edges(tree, everyone, "none", values, rewards)
    for rule in PRUNINGS.names():
        kept = keep_edges(tree, everyone, rule, values, rewards)
        assert all((some <= every).all() for some, every in zip(kept, whole)), (
            "a rule only takes edges away"
        )


@pytest.mark.parametrize("name", SHAPES)
def test_the_batched_gradient_is_the_sum_over_edges(name):
    "Each parent is predicted once, and the densities are those of the rollout."
    tree, policy, process = grown(name)
    rewards = tree.finished.flatten(2).mean(2)
    advantages = estimate_advantages(tree, rewards, "siblings", CreditOptions())
    everyone = torch.ones_like(rewards, dtype=torch.bool)
    mask = keep_edges(tree, everyone, "none", fuse_rewards(tree, rewards), rewards)
    one_by_one = []
    for step in sorted(tree.plan.trained):
        for prompt, child in mask[step + 1].nonzero().tolist():
            chosen = torch.zeros_like(mask[step + 1])
            chosen[prompt, child] = True
            one_by_one.append(edges_in(tree, chosen, step))
    gradients = []
    for batches in (micro_batches(tree, mask, 4), one_by_one):
        for batch in batches:
            dist = revisit(tree, policy, {}, process, batch).at(batch.parent)
            log_prob = dist.log_prob(batch.of(tree.latents))
            torch.testing.assert_close(log_prob, batch.of(tree.log_probs), atol=1e-6, rtol=1e-5)
            (log_prob.exp() * batch.of(advantages)).sum().backward()
        gradients.append(policy.denoiser.mean.grad.clone())
        policy.denoiser.mean.grad = None
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    for batch in micro_batches(tree, mask, None):
        assert len(batch.parents.unique(dim=0)) == len(batch.parents), "each parent once"


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("name", SHAPES)
def test_each_trained_edge_is_dealt_to_one_process(name, ranks):
    tree, _, _ = grown(name)
    generator = torch.Generator().manual_seed(0)
    mask = [drawn & (torch.rand(drawn.shape, generator=generator) < 0.6) for drawn in tree.drawn]
    counts = [torch.zeros_like(drawn, dtype=torch.long) for drawn in tree.drawn]
    calls = []
    for rank in range(ranks):
        batches = micro_batches(tree, mask, 2, rank, ranks)
        for batch in batches:
            counts[batch.step + 1][batch.prompt, batch.child] += 1
        calls.append(sum(len(batch.parents) for batch in batches))
    for step in tree.plan.trained:
        assert torch.equal(counts[step + 1], mask[step + 1].long())
    assert max(calls) - min(calls) <= 1, calls


@pytest.mark.parametrize("name", SHAPES)
def test_no_two_images_of_a_tree_are_equal(name):
    tree, _, _ = grown(name)
    for leaves in tree.finished.flatten(2):
        assert len(leaves.unique(dim=0)) == len(leaves)


def test_a_group_that_shrinks_at_a_solvers_first_step_ends_in_the_same_images():
    "A solver remembers the rows of its first step, so the rows are chosen before it."
    sigmas, noise = flow_sigmas(8, 3.0), Noise(0, 0, (0, 1))
    policy = GaussianFlow(0.3, 1.0, (3,))
    finished = {}
    for prune_at in ({}, {4: 2}):
        process = flow_transition("dance", sigmas, 0.7, tail=SolverTail(dpm_solver(sigmas[4:]), 4))
        plan = RolloutPlan(8, roots=4, stochastic=range(4), prune_at=prune_at)
        judge = Chosen("best", noise) if prune_at else None
        finished[len(prune_at)] = rollout(plan, Predictor(policy, {}), process, noise, judge=judge)
    rows = finished[1].lines
    torch.testing.assert_close(
        finished[1].finished, finished[0].finished[torch.arange(2)[:, None], rows]
    )


SMALL = dict(
    steps=5,
    splits=(0, 2),
    prompts_per_iteration=2,
    iterations=4,
    evaluate_every=2,
    evaluation_prompts=2,
)


def trainer(folder, **changes):
    config = TrainConfig.from_dict(SMALL | {"tracker": "none", "output": str(folder)} | changes)
    return Trainer(config, policy=GaussianFlow(shape=(4,)), reward=mean_of, prompts=["a", "b", "c"])


def mean_of(images, prompts):
    return images.flatten(1).mean(1)


def test_all_micro_batches_are_made_before_the_first_forward(tmp_path, monkeypatch):
    "To look for the chosen edges makes a GPU wait."
    t = trainer(tmp_path / "run", steps_per_pass=2)
    x = t.collect(0)
    t.credit(x)
    made, predicted = [], []
    make, predict = update_module.micro_batches, t.policy.predict
    monkeypatch.setattr(
        update_module, "micro_batches", lambda *given: made.append(len(predicted)) or make(*given)
    )
    monkeypatch.setattr(t.policy, "predict", lambda *given: predicted.append(1) or predict(*given))
    t.update(x)
    assert made == [0, 0] and predicted


def test_a_signal_between_collection_and_credit_loses_no_update(tmp_path):
    whole = trainer(tmp_path / "whole")
    rows = whole.fit().metrics
    t = trainer(tmp_path / "run", evaluate_every=0)
    collect = t.collect

    def told(iteration):
        experience = collect(iteration)
        if iteration == 1:
            t.stop.remember(signal.SIGUSR2, None)
        return experience

    t.collect = told
    with pytest.raises(Preempted, match="stopped by SIGUSR2 at iteration 1"):
        t.fit()
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["000001"]
    again = trainer(tmp_path / "run", evaluate_every=0)
    assert [row["reward"] for row in again.fit().metrics] == [row["reward"] for row in rows]
    for one, other in zip(whole.learner.parameters.values(), again.learner.parameters.values()):
        assert torch.equal(one, other)
