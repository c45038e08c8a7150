"""One iteration of every recipe: denoiser calls, trained calls, edges and optimiser steps, as the
papers count them.

The denoiser is an exact Gaussian flow of a few numbers. A forward hook counts the rows that it is
called with, and a hook on AdamW its steps. Steps, roots, splits and the group are the recipe's own;
there are two prompts.
"""

from typing import NamedTuple

import pytest
import torch

from branchgrpo import recipes
from branchgrpo.credit import ADVANTAGES, STDS, CreditOptions, estimate_advantages
from branchgrpo.plan import RolloutPlan
from branchgrpo.policy import GaussianFlow
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer
from branchgrpo.tree import Tree

PROMPTS = 2  # per iteration: those of one GPU in the released scripts


class Counts(NamedTuple):
    """What one prompt costs in one iteration; a pair is the least and the most where the tree is
    drawn."""

    rollout: int | tuple[int, int]  # denoiser calls
    trained: int | tuple[int, int]  # denoiser calls of the update, with gradient
    edges: int | tuple[int, int]  # trained edges
    steps: int = 2  # optimiser steps of the rollout
    reference: bool = False  # the update calls the model before training as often
    again: int = 0  # denoiser calls that keep the means of the rollout's policy for later steps


EXPECTED = {
    # DanceGRPO: 16 chains of 20 steps are 320 calls. A star shares its first: 1 + 16·19 = 305.
    # 19 of 20 steps are trained, 16·19 edges; the first step's 16 share one call: 1 + 16·18.
    "dancegrpo": Counts(305, 289, 304),
    # ⌊0.6·19⌋ = 11 steps of each of 16 chains; chains that train their first step share one call.
    "dancegrpo-tf0.6": Counts(305, (161, 176), 176),
    # MixGRPO (20, 5): 16·20 calls, every chain alone, and 16·5 trained.
    "mixgrpo": Counts(320, 80, 80),
    # The window, then round(0.4·15) = 6 solver steps in the place of 15: 16·(5 + 6).
    "mixgrpo-flash": Counts(176, 80, 80),
    # The window begins at step 0, where one chain becomes 16: 1 + 16·19 and 1 + 16·4.
    "mixgrpo-shared": Counts(305, 65, 80),
    # The tree of 20 steps: 203, 169 and 135 calls; 218, 184 and 150 edges, of which the last step's
    # 16 are not trained.
    "branchgrpo": Counts(203, 203 - 16, 218 - 16),
    "branchgrpo-mixed": Counts(169, 169 - 16, 184 - 16),
    "branchgrpo-sparse": Counts(135, 135 - 16, 150 - 16),
    # 218 − 80 = 138 edges in the paper, of which the last step's 8 are never trained. Calls: 43 up
    # to the last split, then 9 steps of one child each: 8·9.
    "branchgrpo-widpru": Counts(203, 43 + 72, 138 - 8),
    # Four best and four worst chains; how many parents they share is drawn with the tree.
    "branchgrpo-extreme": Counts(203, (94, 115), (95, 122)),
    # 218 − 5·16 = 138: a window of 4 depths, the first of them the last split's (8 calls), and the
    # last step.
    "branchgrpo-deppru": Counts(203, 187 - (8 + 3 * 16), 138),
    # 34 edges at steps {0, 1, 2, 3, 6, 9}; their parents are 1 + 2 + 2 + 2 + 4 + 8.
    "branchgrpo-mix": Counts(203, 19, 34),
    # Four splits somewhere before step 13.
    "branchgrpo-adaptive": Counts((136, 271), (120, 255), (135, 271)),
    # Flow-GRPO: N·T = 24·10 calls. 9 of 10 steps are trained (timestep_fraction 0.99), each with a
    # reference.
    "flow-grpo": Counts(240, 216, 216, reference=True),
    # The guard compares means: those of the second step's half, 108 edges, are computed before the
    # first step.
    "grpo-guard": Counts(240, 216, 216, again=108),
    "flow-cps": Counts(240, 216, 216, reference=True),
    "uniform-subsample": Counts(240, 12 * 9, 12 * 9, reference=True),
    "ovf": Counts(240, 12 * 9, 12 * 9, reference=True),
    # Pro-GRPO: Σ N_k Δt_k + (N_0 − K) = 48·5 + 24·2 + 12·3 + 36, and 24·5 + 16·2 + 12·3 + 12.
    "pro-grpo": Counts(360, 12 * 9, 12 * 9, reference=True),
    "pro-grpo-flash": Counts(200, 12 * 9, 12 * 9, reference=True),
    # SD: 16·50, and 48·30 + 32·10 + 8·10 + 40; 49 of 50 steps are trained, without a reference.
    "dancegrpo-sd": Counts(800, 16 * 49, 16 * 49),
    "pro-grpo-sd": Counts(1880, 8 * 49, 8 * 49),
    # Ours: 1 + 4·3 + 8·3 + 8·3 + 16·10 calls. Trained is what leads to a leaf: how much is shared
    # is drawn.
    "branch-pro": Counts(221, (163, 169), (166, 184)),
    # A window of four splits at a place 0…5 that is drawn: 111 − 15·place calls. 15 trained calls
    # for 30 edges.
    "treegrpo": Counts((36, 111), 15, 30),
    # The script trains all 218 edges in steps of 12, 2·218 of them in 37 steps, with a call for
    # each edge. Here siblings whose edges are in one step share a call, so there are 203 to 218.
    "branchgrpo-released": Counts(203, (203, 218), 218, 37),
    # 12 chains of 16 steps are 192 calls, a star's 1 + 12·15; ⌊0.6·15⌋ = 9 steps of each are
    # trained.
    "dancegrpo-released": Counts(181, (97, 108), 108, 2),
    # Flow-GRPO's chains with other advantages, and with a KL term on some edges: its reference is
    # called for all.
    "gdpo": Counts(240, 216, 216, reference=True),
    "gardo": Counts(240, 216, 216, reference=True),
    "ovf-diverse": Counts(240, 12 * 9, 12 * 9, reference=True),
    # Four roots, splits at steps 1 and 2: 4 + 4 + 8 + 16·7 calls. The last step's 16 are not
    # trained.
    "multi-grpo": Counts(128, 4 + 4 + 8 + 16 * 6, 4 + 8 + 16 * 7, reference=True),
    # 16 chains of 10 steps, of which three draw noise; no reference. Before the first of two
    # optimiser steps, the old means of the second one's half of the edges are computed: a call
    # each, in which nothing is trained.
    "flow-dppo": Counts(160, 48, 48, again=48 // 2),
    # 64 chains, 16 of them trained at 9 steps; no reference.
    "pods": Counts(640, 16 * 9, 16 * 9),
    # DenseGRPO: 24 chains of 10 steps, and 9 + 8 + … + 1 more for the previews of their first nine
    # latents.
    "dense-grpo": Counts(24 * (10 + 45), 216, 216, reference=True),
    # Stepwise-Flow-GRPO: a star of 16, each latent completed in five steps, of which the first is
    # its own. The first step's 16 edges share a call, unless they are in two optimiser steps.
    "stepwise-flow-grpo": Counts(1 + 9 * 16 + 4 * (1 + 8 * 16), (129, 130), 9 * 16, reference=True),
    # TP-GRPO: as DenseGRPO.
    "tp-grpo": Counts(24 * (10 + 45), 216, 216, reference=True),
    # G2RPO: 8 of the trunk; 12 branches at 8 steps, completed in 15…8 steps, and by every second
    # and third of them, which is ⌈n/2⌉ and ⌈n/3⌉ calls with the first one shared. Siblings share
    # their trained call.
    "g2rpo": Counts(8 + 12 * (92 + (48 - 8) + (33 - 8)), 8, 96, 1),
    # TempFlow-GRPO: a trunk of 9 steps for each of 4 seeds, and 6 branches at each: 4·9 + 4·6·(9 +
    # 8 + … + 1).
    "tempflow-grpo": Counts(1116, 36, 216, 2, reference=True),
    # G²RPO with one granularity: 8 + 12·(15 + 14 + … + 8) calls; the branches of a step share one
    # parent.
    "g2rpo-one": Counts(1112, 8, 96, 1),
    # Flash-GRPO: 8·20 calls, and one trained step of each chain.
    "flash-grpo": Counts(160, 8, 8, 2),
    # E-GRPO: 14 steps are left of 16; 7 of them have 12 branches: 7 + 12·(13 + 12 + … + 7).
    "e-grpo": Counts(847, 7, 84, 1),
    # A binary tree in a window at step 0: 1 + 2 + 4 + 8 + 16·16 calls, 15 parents of 30 edges.
    "growing-noise-tree": Counts(271, 15, 30),
}


def reward(images, prompts):
    "The mean of each image."
    return images.flatten(1).mean(1)


class Counter:
    "Counts rows of the denoiser and steps of the optimiser during one iteration."

    def __init__(self, policy: GaussianFlow):
        self.quiet, self.trained, self.steps = 0, 0, 0
        policy.denoiser.register_forward_hook(self.count)

    def __deepcopy__(self, memo):
        return self  # the copy of the model before training is counted too

    def count(self, module, inputs, output):
        rows = len(inputs[0])
        if torch.is_grad_enabled():
            self.trained += rows
        else:
            self.quiet += rows

    def step(self, *_):
        self.steps += 1


def counted(name: str, folder) -> tuple[Counter, dict, Trainer]:
    """Train one iteration of a recipe at its own plan; return the counts, the metrics and the
    trainer."""
    policy = GaussianFlow(shape=(4,))
    counter = Counter(policy)
    small = dict(iterations=1, prompts_per_iteration=PROMPTS, evaluate_every=0, tracker="none")
    # the flow has nothing to adapt
    config = TrainConfig(recipe=name, output=str(folder), lora_rank=0, **small)
    trainer = Trainer(
        config, policy=policy, reward=reward, prompts=[f"prompt {n}" for n in range(8)]
    )
    trainer.learner.optimizer.optimizer.register_step_post_hook(counter.step)
    return counter, trainer.step(), trainer


def within(value: float, expected: int | tuple[int, int]) -> bool:
    low, high = expected if isinstance(expected, tuple) else (expected, expected)
    return low * PROMPTS <= value <= high * PROMPTS


def test_every_recipe_is_counted():
    assert set(EXPECTED) == set(recipes.names())


@pytest.mark.parametrize("name", EXPECTED)
def test_iteration_costs_what_the_paper_counts(name, tmp_path):
    expected = EXPECTED[name]
    counter, row, trainer = counted(name, tmp_path / "run")
    rollout_calls = (
        counter.quiet - (counter.trained if expected.reference else 0) - PROMPTS * expected.again
    )
    assert within(rollout_calls, expected.rollout), (
        f"{rollout_calls / PROMPTS} rollout calls per prompt"
    )
    assert within(counter.trained, expected.trained), (
        f"{counter.trained / PROMPTS} trained calls per prompt"
    )
    assert within(row["edges"], expected.edges), (
        f"{row['edges'] / PROMPTS} trained edges per prompt"
    )
    assert counter.steps == expected.steps
    reported = (row["denoiser_calls"], row["trained_calls"], row["optimiser_steps"])
    assert reported == (rollout_calls, counter.trained, counter.steps)
    assert bool(trainer.settings.kl) == expected.reference
    assert row["rollout_mismatch"] < 1e-5


@pytest.mark.parametrize("estimator", ADVANTAGES.names())
@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(
    "shape", [{"roots": 2, "splits": {0: 3, 1: 7}}, {"roots": 12}], ids=["tree", "chains"]
)
def test_equal_rewards_teach_nothing(estimator, std, shape):
    """The mean of equal numbers is rounded, and over a standard deviation of rounding that would be
    an advantage of one."""
    plan = RolloutPlan(4, **shape, previews={1: (1,), 2: (1,)})
    tree = Tree.from_plan(plan, prompts=200)
    rewards = (
        torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
        .expand(200, plan.leaves)
        .clone()
    )
    seen = {d: rewards[:, : plan.populations[d], None] for d in plan.previews}
    found = estimate_advantages(tree, rewards, estimator, CreditOptions(std=std, previews=seen))
    # of all prompts, so that none differs from the mean of all
    one = rewards[:1].expand_as(rewards)
    for advantages in (
        found,
        estimate_advantages(tree, one, estimator, CreditOptions(std=std, previews=None)),
    ):
        assert max(float(a.abs().max()) for a in advantages) < 1e-4
