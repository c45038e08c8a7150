"""What an audit of the science found wrong.

D1 is in nbs/04_plan and testbed/05_scaling, D2 in training/07_credit, D4 in test_steps, D7 to D9 in
reproduction/09_comparison and analysis/04_statistics, D3, D5, D10 and D11 in test_credit.
"""

import json
from pathlib import Path

import pytest

from branchgrpo import recipes
from branchgrpo.testbed.scaling import at_testbed

ROOT = Path(__file__).parents[1]


def test_the_sd_baseline_shares_all_but_the_group():
    "D6: DanceGRPO's flow recipe stood in for it, with 20 steps, 720 pixels and guidance 3.5."
    ours, baseline = recipes.get("pro-grpo-sd").values, recipes.get("dancegrpo-sd").values
    different = {name for name in vars(ours) if getattr(ours, name) != getattr(baseline, name)}
    assert different == {"roots", "prune_at"}
    assert (baseline.roots, baseline.steps, baseline.height, baseline.guidance_scale) == (
        16,
        50,
        512,
        5.0,
    )
    with pytest.warns(UserWarning, match="dancegrpo-sd"):
        recipes.at_kind(recipes.get("dancegrpo"), "diffusion")


def test_pruning_pairs_are_measured_as_printed():
    "D12: groups of 24 were cut to 12 and 6 beside the paper's 48, 24 and 12."
    record = json.loads((ROOT / "figures/testbed/pro_grpo_table9_fig7.json").read_text())
    assert record["group"] == 48


def test_pruning_steps_follow_the_pilot():
    """Pro-GRPO's recipe prunes where previews rank as they do in the paper, not at the same
    fraction."""
    record = json.loads((ROOT / "figures/testbed/pro_grpo_table9_fig7.json").read_text())
    first, second = at_testbed(recipes.get("pro-grpo")).values.prune_at
    assert [first, second] == record["pilot"]["prune_at"] == [7, 9]
    assert (
        round(record["spearman"][first], 2) >= 0.79 and round(record["spearman"][second], 2) >= 0.90
    )
    assert record["spearman"][first - 1] < 0.7922, "no earlier step ranks as well"
