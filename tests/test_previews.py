"""Previews: they change no tree, count what they call, and lose a prompt alone."""

import pytest
import torch
from test_training import config, gradient, prepared

from branchgrpo import GaussianFlow, TrainConfig, Trainer
from branchgrpo.training.checkpoints import newest, read_saved_table
from branchgrpo.training.update import accumulate

COUNTS = ("denoiser_calls", "previews")
TIMES = ("seconds", "seconds_rollout", "seconds_update")


def test_previews_that_no_advantage_reads_change_nothing(tmp_path):
    "Two iterations of the same run, to the bit, but for the calls and previews that are counted."
    found = {}
    for words in ("none", "ode+x0"):
        run = Trainer(config(tmp_path / words.replace("+", ""), previews=words, preview_at="after", iterations=2)).fit()
        weights = read_saved_table(newest(run.path), "weights")
        found[words] = run.metrics, weights
    (plain, weights), (seen, others) = found.values()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    for one, two in zip(plain, seen):
        assert {k: v for k, v in one.items() if k not in COUNTS + TIMES} == {
            k: v for k, v in two.items() if k not in COUNTS + TIMES
        }
    # splits at 0 and 2 of six steps: 1 + 2 + 2 + 4 + 4 + 4 calls; depths 1…5 have 2, 2, 4, 4, 4 nodes
    more = 2 * 4 + 2 * 3 + 4 * 2 + 4 * 1
    assert [row["denoiser_calls"] for row in plain] == [2 * 17, 4 * 17]
    assert [row["denoiser_calls"] for row in seen] == [2 * (17 + more), 4 * (17 + more)]
    assert [row["previews"] for row in seen] == [2 * 2 * 16, 4 * 2 * 16]
    assert [row["previews"] for row in plain] == [0, 0]


@pytest.mark.parametrize("advantage", ["gains", "joint-gains", "turns", "consistent-turns", "granularities"])
@pytest.mark.parametrize("std", ["own", "global"])
def test_a_preview_that_is_not_finite_leaves_its_prompt_out(tmp_path, advantage, std):
    "The other prompt learns what it would learn beside a prompt whose images have no finite reward."
    sizes = {"steps": 6, "splits": (0, 2), "prompts_per_iteration": 2, "tracker": "none", "advantage": advantage}

    class Faulty(GaussianFlow):
        fault = None
        calls = 0

        def decode(self, latents):
            self.calls += 1
            images = super().decode(latents).clone()
            if self.calls == self.fault:
                images[0] = torch.nan
            return images

    def near_two(images, prompts, metadata=None):
        return -(images[:, 0] - 2.0).square()

    found = {}
    for fault in (3, 6):  # a preview of the third depth; the leaves
        settings = TrainConfig(output=str(tmp_path / "run"), previews="ode", std=std, **sizes)
        t = Trainer(settings, policy=Faulty(), reward=near_two, prompts=["a", "b"])
        t.policy.fault = fault
        with pytest.warns(UserWarning, match="prompts are left out"):
            rolled = prepared(t)
        assert rolled.edge_mask[1].any(1).tolist() == [False, True]
        assert all(a.isfinite().all() and not a[0].any() for a in rolled.advantages)
        accumulate(t.learner, rolled)
        found[fault] = gradient(t)
        assert any(g.abs().sum() > 0 for g in found[fault].values())
    for name, one in found[3].items():
        assert torch.equal(one, found[6][name]), name
