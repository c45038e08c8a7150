"""Losses, sums of rewards and selections: their limits hold in training, and a run that was stopped goes on equally."""

import dataclasses
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from branchgrpo import TrainConfig, Trainer, process_of
from branchgrpo.objective import win_rate
from branchgrpo.rewards.contract import RewardSum
from branchgrpo.rewards.names import load_reward
from branchgrpo.selection import FEATURES, SELECTIONS, sees_images
from branchgrpo.training.checkpoints import newest, read_saved_table
from branchgrpo.training.credit import assign_credit
from branchgrpo.training.resolve import resolve
from branchgrpo.training.update import accumulate

SMALL = dict(steps=5, splits=(0, 2), prompts_per_iteration=2, iterations=2, evaluate_every=0, tracker="none")
TIMES = ("seconds", "seconds_rollout", "seconds_update")
TWO_REWARDS = "tiny-clip+0.5*tiny-aesthetic"
LATER = dict(steps_per_pass=3, step_unit="edges", learning_rate=1e-3)


def trainer(folder, **changes):
    return Trainer(TrainConfig.from_dict(SMALL | {"output": str(folder)} | changes))


def weights(t):
    return torch.cat([p.detach().flatten() for p in t.learner.parameters.values()])


def rows(run):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics]


@pytest.mark.parametrize("kl_limit", [0.0, 1e-5, float("inf")])
def test_before_the_first_step_the_mask_is_the_clip(tmp_path, kl_limit):
    "Nothing has moved yet, so nothing is dropped at any limit: the same weights, to the bit."
    one = trainer(tmp_path / "clip", steps_per_pass=1)
    two = trainer(tmp_path / "mask", steps_per_pass=1, loss="kl-mask", kl_limit=kl_limit)
    assert one.step()["clip_fraction"] == two.step()["clip_fraction"] == 0
    assert torch.equal(weights(one), weights(two))


def test_the_mask_acts_in_later_steps_and_without_a_limit_never(tmp_path):
    "At the limit 0 every edge that moves on is dropped; at inf none is, as with a clip that is never reached."
    limits = (0.0, 1e9)
    row = {limit: trainer(tmp_path / f"{limit}", loss="kl-mask", kl_limit=limit, **LATER).step() for limit in limits}
    assert 0.1 < row[0.0]["clip_fraction"] < 1 and row[1e9]["clip_fraction"] == 0
    never = trainer(tmp_path / "never", loss="kl-mask", **LATER)
    far = trainer(tmp_path / "far", clip_range=1e6, recompute_old=True, **LATER)
    never.step(), far.step()
    assert torch.equal(weights(never), weights(far))


@pytest.mark.parametrize("reward_sum", ["decoupled", "decoupled+batch"])
def test_a_single_reward_is_normalised_as_ever(tmp_path, reward_sum):
    one, two = trainer(tmp_path / "one"), trainer(tmp_path / "two", reward_sum=reward_sum)
    one.step(), two.step()
    assert torch.equal(weights(one), weights(two))


def test_decoupled_rewards_do_not_depend_on_their_units(tmp_path):
    "The weight of a reward counts and its unit does not: one a thousand times as large gives the same advantages."
    clip, aesthetic = load_reward("tiny-clip"), load_reward("tiny-aesthetic")
    found = {}
    for scale in (1, 1000):
        second = lambda images, *other: scale * aesthetic(images, *other)  # noqa: B023, E731
        reward = RewardSum({"a": (1.0, clip), "b": (0.5, second)})
        t = Trainer(TrainConfig.from_dict(SMALL | {"output": str(tmp_path / str(scale))}), reward=reward)
        collected, process, noise = t.collector(0), process_of(t.settings, t.policy, 0), t.collector.noise(0)
        for reward_sum in ("together", "decoupled"):
            t.learner.settings = dataclasses.replace(t.settings, reward_sum=reward_sum)
            found[scale, reward_sum] = assign_credit(t.learner, collected, process, noise)[0].advantages[-1]
    torch.testing.assert_close(found[1, "decoupled"], found[1000, "decoupled"], rtol=1e-3, atol=1e-3)
    assert (found[1, "together"] - found[1000, "together"]).abs().max() > 0.1


@pytest.mark.parametrize("advantage", ["gains", "granularities"])
def test_previews_of_a_sum_are_not_taken_apart(tmp_path, advantage):
    "A preview has one score, that of the sum: taken apart it would count once for each reward."
    with pytest.raises(ValueError, match="^reward_sum: 'decoupled' takes a sum apart, and previews have its total"):
        trainer(tmp_path, reward=TWO_REWARDS, reward_sum="decoupled", advantage=advantage, previews="x0")


NO_DEPTH = [dict(preview_at=()), dict(adaptive=True, stochastic="splits+window")]  # nothing is drawn before it splits


@pytest.mark.parametrize("changes", NO_DEPTH, ids=["none named", "splits to come"])
def test_gains_need_a_latent_that_is_completed(tmp_path, changes):
    with pytest.raises(ValueError, match=r"^preview_at: (\(\)|'drawn') leaves no latent to complete"):
        trainer(tmp_path, advantage="gains", previews="x0", **changes)


class Largest(TorchDispatchMode):
    "Notes the most numbers that one operation returns."

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_win_rates_of_many_samples_need_no_table_of_pairs():
    scores = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(20).round()  # many are equal
    with Largest() as seen:
        rates = win_rate(scores[::2])
    assert seen.most <= 2 * 250
    assert torch.equal(rates, (scores[::2, None] > scores[::2]).float().mean(1))


JUDGED = dict(reward="tiny-clip+0*tiny-aesthetic", kl=1.0, **LATER)


def test_the_kl_sees_the_suspects_only(tmp_path):
    "A reward of weight 0 judges and is not trained; with the whole share, the KL is the plain one."
    plain, judged = (
        trainer(tmp_path / "plain", **JUDGED | {"reward": "tiny-clip"}),
        trainer(tmp_path / "judged", **JUDGED),
    )
    first, second = plain.step(), judged.step()
    assert first["kl"] == second["kl"] > 0 and torch.equal(weights(plain), weights(judged))
    some = trainer(tmp_path / "some", **JUDGED, kl_share=0.3)
    assert 0 < some.step()["kl"] < second["kl"]
    with pytest.warns(UserWarning, match="^kl_share: 0.3 compares with rewards of weight 0, and 'tiny-clip' has none"):
        nobody = trainer(tmp_path / "nobody", **JUDGED | {"reward": "tiny-clip", "kl_share": 0.3})
    assert nobody.step()["kl"] == second["kl"]


def test_a_mask_of_all_edges_is_no_mask(tmp_path):
    t = trainer(tmp_path / "run", **JUDGED)
    t.step()
    process, noise = process_of(t.settings, t.policy, 1), t.collector.noise(1)
    rolled, _ = assign_credit(t.learner, t.collector(1), process, noise)
    found = []
    for mask in (None, [torch.ones_like(m) for m in rolled.edge_mask], [torch.zeros_like(m) for m in rolled.edge_mask]):
        t.learner.optimizer.zero_grad()
        accumulate(t.learner, dataclasses.replace(rolled, kl_mask=mask))
        found.append(torch.cat([p.grad.flatten() for p in t.learner.parameters.values()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


CUT = dict(splits=(), roots=8, prune_at={2: 6}, group_keep=4)


def test_without_weight_diversity_is_the_variance(tmp_path):
    "Both selections, in flight and at the end, keep what ovf keeps at weight 0, and others at weight 0.9."
    table = {}
    for rule, diversity in (("ovf", 0.9), ("diverse", 0.0), ("diverse", 0.9)):
        rules = dict(selection=rule, group_selection=rule, diversity=diversity)
        t = trainer(tmp_path / f"{rule}{diversity}", **CUT, **rules)
        t.step()
        table[rule, diversity] = weights(t)
    assert torch.equal(table["ovf", 0.9], table["diverse", 0.0])
    assert not torch.equal(table["ovf", 0.9], table["diverse", 0.9])


def test_a_rule_of_your_own_may_see_or_not(tmp_path):
    "A rule of three arguments is called as ever; a marked one gets features of its own kind."
    shapes = []

    @FEATURES.register("colour")
    def colour(images):
        return images.mean((-2, -1)).flatten(1)

    @SELECTIONS.register("first")
    def first(rewards, k, generators):
        return torch.arange(k).expand(len(rewards), k)

    @SELECTIONS.register("seeing")
    @sees_images
    def seeing(rewards, k, generators, seen):
        shapes.append((*seen.features.shape, seen.diversity))
        return first(rewards, k, generators)

    try:
        plain = trainer(tmp_path / "plain", **CUT, selection="first", group_selection="first")
        other = dict(selection="seeing", group_selection="seeing", features="colour", diversity=0.25)
        marked = trainer(tmp_path / "marked", **CUT, **other)
        plain.step(), marked.step()
        assert torch.equal(weights(plain), weights(marked))
        assert shapes == [(2, 8, 3, 0.25), (2, 6, 3, 0.25)]
        with pytest.raises(ValueError, match="^group_selection: 'seeing' compares images, and ranks_per_prompt 2"):
            trainer(tmp_path / "spread", **CUT | {"prune_at": {}}, **other, ranks_per_prompt=2)
    finally:
        del SELECTIONS.entries["first"], SELECTIONS.entries["seeing"], FEATURES.entries["colour"]


FACTORS = {  # of a diffusion model of six steps, whose levels are its own
    "{99: 1.0}": "step 99 is outside 0…5",
    "{1: -1.0}": "-1.0 at step 1 is not a finite number of at least 0",
    "{1: 0.0}": "{1: 0.0} gives noise of std 0 at step 1, too little to train on",
    "{1: 10**400}": "1000000000000000000000000000000000000",
}


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("kind", [dict(backbone="tiny-sd", recipe="dancegrpo-sd"), dict(splits=(0, 2))], ids=str)
def test_factors_of_noise_are_looked_at_before_a_model_is(tmp_path, kind, factors):
    table = SMALL | {"splits": ()} | kind | {"steps": 6, "roots": 2, "noise_factors": eval(factors)}
    with pytest.raises(ValueError, match="^noise_factors: " + re.escape(FACTORS[factors])):
        resolve(TrainConfig.from_dict(table | {"output": str(tmp_path / "run")}))


def test_the_most_images_of_a_prompt_are_compared_whatever_splits_come(tmp_path):
    rules = dict(group_selection="diverse", group_keep=4, adaptive=True, branch_factor=4)
    with pytest.raises(ValueError, match="^group_selection: 'diverse' compares all pairs of at most 2048 images, not"):
        trainer(tmp_path, **rules, steps=8, splits=tuple(range(6)))


ALL_TOGETHER = dict(splits=(), roots=2, side=(0, 2), branch_factor=3, merged={3: 2}, noise_factors={0: 1.5})
ALL_TOGETHER |= dict(previews="ode/2+x0", preview_at="after", advantage="granularities", step_weights="std")
RESUMED = {
    "side, previews, merged, guard": ALL_TOGETHER | dict(ratio="guard", kl=0.1, max_batch=3),
    "gated kl": JUDGED | dict(kl_share=0.3, std="none"),
    "diverse": CUT | dict(selection="diverse", group_selection="diverse", diversity=0.5),
    "kl-mask": dict(loss="kl-mask", kl_limit=1e-6, passes=2, **LATER),
    "decoupled": dict(reward=TWO_REWARDS, reward_sum="decoupled"),
    "decoupled+batch": dict(reward=TWO_REWARDS, reward_sum="decoupled+batch", roots=2, splits=(1,)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, name):
    changes = RESUMED[name] | {"checkpoint_every": 1}
    whole = trainer(tmp_path / "whole", **changes).fit()
    trainer(tmp_path / "half", **changes | {"iterations": 1}).fit()
    again = trainer(tmp_path / "half", **changes).fit()
    assert rows(whole) == rows(again)
    one, two = (read_saved_table(newest(tmp_path / folder), "weights") for folder in ("whole", "half"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
