"""Losses, sums of rewards and selections: their limits hold in training."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from branchgrpo import TrainConfig, Trainer
from branchgrpo.methods.gardo import win_rate
from branchgrpo.selection import FEATURES, SELECTIONS, sees_images

SMALL = dict(
    steps=5, splits=(0, 2), prompts_per_iteration=2, iterations=2, evaluate_every=0, tracker="none"
)
LATER = dict(steps_per_pass=3, step_unit="edges", learning_rate=1e-3)


def trainer(folder, **changes):
    return Trainer(TrainConfig.from_dict(SMALL | {"output": str(folder)} | changes))


def weights(t):
    return torch.cat([p.detach().flatten() for p in t.learner.parameters.values()])


def test_the_mask_acts_in_later_steps_and_without_a_limit_never(tmp_path):
    """At the limit 0 every edge that moves on is dropped; at inf none is, as with a clip that is
    never reached."""
    limits = (0.0, 1e9)
    row = {
        limit: trainer(tmp_path / f"{limit}", loss="kl-mask", kl_limit=limit, **LATER).step()
        for limit in limits
    }
    assert 0.1 < row[0.0]["clip_fraction"] < 1 and row[1e9]["clip_fraction"] == 0
    never = trainer(tmp_path / "never", loss="kl-mask", **LATER)
    far = trainer(tmp_path / "far", clip_range=1e6, recompute_old=True, **LATER)
    never.step(), far.step()
    assert torch.equal(weights(never), weights(far))


class Largest(TorchDispatchMode):
    "Notes the most numbers that one operation returns."

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.most = max(
            [self.most, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))]
        )
        return out


def test_win_rates_of_many_samples_need_no_table_of_pairs():
    # many are equal
    scores = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(20).round()
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
    with pytest.warns(
        UserWarning,
        match="^kl_share: 0.3 compares with rewards of weight 0, and 'tiny-clip' has none",
    ):
        nobody = trainer(tmp_path / "nobody", **JUDGED | {"reward": "tiny-clip", "kl_share": 0.3})
    assert nobody.step()["kl"] == second["kl"]


CUT = dict(splits=(), roots=8, prune_at={2: 6}, group_keep=4)


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
        other = dict(
            selection="seeing", group_selection="seeing", features="colour", diversity=0.25
        )
        marked = trainer(tmp_path / "marked", **CUT, **other)
        plain.step(), marked.step()
        assert torch.equal(weights(plain), weights(marked))
        assert shapes == [(2, 8, 3, 0.25), (2, 6, 3, 0.25)]
        with pytest.raises(
            ValueError, match="^group_selection: 'seeing' compares images, and ranks_per_prompt 2"
        ):
            trainer(tmp_path / "spread", **CUT | {"prune_at": {}}, **other, ranks_per_prompt=2)
    finally:
        del SELECTIONS.entries["first"], SELECTIONS.entries["seeing"], FEATURES.entries["colour"]
