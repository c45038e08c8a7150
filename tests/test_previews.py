"""Previews: they change no tree, and count what they call."""

import torch
from small import rows
from test_training import config

from branchgrpo import Trainer
from branchgrpo.training.checkpoint_files import newest, read_saved_table

COUNTS = ("denoiser_calls", "previews")


def test_previews_that_no_advantage_reads_change_nothing(tmp_path):
    "Two iterations of the same run, to the bit, but for the calls and previews that are counted."
    found = {}
    for words in ("none", "ode+x0"):
        run = Trainer(
            config(
                tmp_path / words.replace("+", ""), previews=words, preview_at="after", iterations=2
            )
        ).fit()
        weights = read_saved_table(newest(run.path), "weights")
        found[words] = rows(run.path), weights
    (plain, weights), (seen, others) = found.values()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    for one, two in zip(plain, seen):
        assert one | dict.fromkeys(COUNTS) == two | dict.fromkeys(COUNTS)
    # splits at 0 and 2 of six steps: 1 + 2 + 2 + 4 + 4 + 4 calls; depths 1…5 have 2, 2, 4, 4, 4
    # nodes
    more = 2 * 4 + 2 * 3 + 4 * 2 + 4 * 1
    assert [row["denoiser_calls"] for row in plain] == [2 * 17, 4 * 17]
    assert [row["denoiser_calls"] for row in seen] == [2 * (17 + more), 4 * (17 + more)]
    assert [row["previews"] for row in seen] == [2 * 2 * 16, 4 * 2 * 16]
    assert [row["previews"] for row in plain] == [0, 0]
