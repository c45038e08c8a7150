"What an audit of the science found wrong; D2 and D4 are in test_steps, D3, D5, D10 and D11 in test_credit."

import json
from pathlib import Path

import pytest

from branchgrpo import TrainConfig, recipes
from branchgrpo.plan import RolloutPlan, papers_cost
from branchgrpo.planning import plan_of
from branchgrpo.reproduction.comparison import Comparison
from branchgrpo.reproduction.statistics import difference, with_false_discovery
from branchgrpo.testbed.scaling import at_testbed, scale_splits
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("splits", [(5, 7, 9, 11), (0, 11)])
def test_a_split_at_the_noiseless_last_step_is_an_error(splits):
    "D1: its siblings were one image, 8 of 16 in Fig. 5b's late arm."
    with pytest.raises(ValueError, match="splits: step 11 is the last"):
        RolloutPlan.tree(12, splits)
    with pytest.raises(ValueError, match="splits: step 11 is the last"):
        plan_of(resolve(TrainConfig(splits=splits, steps=12)))


def test_scaling_keeps_the_number_of_splits():
    "D1: (9, 12, 15, 18) of 20 had become (5, 7, 9, 11) of 12, and four splits of a few steps two."
    assert scale_splits((9, 12, 15, 18), 20, 12) == (5, 7, 9, 10)
    assert len(set(scale_splits((0, 3, 6, 9), 20, 6))) == 4
    with pytest.raises(ValueError, match="splits: 4 splits do not fit into 4 steps"):
        scale_splits((0, 3, 6, 9), 20, 4)


def test_the_sd_baseline_shares_all_but_the_group():
    "D6: DanceGRPO's flow recipe stood in for it, with 20 steps, 720 pixels and guidance 3.5."
    ours, baseline = recipes.get("pro-grpo-sd").values, recipes.get("dancegrpo-sd").values
    different = {name for name in vars(ours) if getattr(ours, name) != getattr(baseline, name)}
    assert different == {"roots", "prune_at"}
    assert (baseline.roots, baseline.steps, baseline.height, baseline.guidance_scale) == (16, 50, 512, 5.0)
    with pytest.warns(UserWarning, match="dancegrpo-sd"):
        recipes.at_kind(recipes.get("dancegrpo"), "diffusion")


class Finished:
    "A finished run that has only its evaluations."

    def __init__(self, rows, kl=0.0):
        names = ("iteration", "denoiser_calls", "trained_calls", "eval_reward")
        self.evaluations = [dict(zip(names, row)) for row in rows]
        self.metrics, self.info = [], {"settings": {"kl": kl}}


def test_cost_counts_training():
    "D7: the axis of rollout calls hid what pruning saves in training."
    run = Finished([(0, 0, 0, 0.5), (10, 100, 40, 0.6)])
    with_reference = Finished([(0, 0, 0, 0.5), (10, 100, 40, 0.6)], kl=0.1)
    found = Comparison({"plain": [run], "reference": [with_reference]}, [0])
    assert found.evaluations("plain")[0][-1]["cost"] == papers_cost(100, 40, False) == 100 + 3 * 40
    assert found.evaluations("reference")[0][-1]["cost"] == papers_cost(100, 40, True) == 100 + 4 * 40


def test_nothing_is_read_off_a_line_from_the_base_model():
    "D8: Fig. 6 read K = 4 at iteration 3.3, between the base model and the first evaluation."
    wide = [Finished([(0, 0, 0, 0.5), (10, 3000, 900, 0.9)])] * 2
    narrow = [Finished([(0, 0, 0, 0.5), (10, 1000, 300, 0.6)])] * 2
    claim = Comparison({"wide": wide, "narrow": narrow}, [0, 1]).test_claim(
        "wide", "narrow", "eval_reward", "denoiser_calls"
    )
    assert claim["difference"] is None and claim["verdict"].startswith("unclear")


def test_the_same_is_an_answer_and_claims_are_counted():
    "D9: one test for all claims, no margin, no correction, and equal values could not be judged."
    assert difference([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])["verdict"] == "equal"
    close = difference([0.90, 0.91, 0.92], [0.901, 0.909, 0.92], gains=[0.05, 0.05, 0.05])
    assert close["verdict"] == "equal within 10 % of the gain"
    many = with_false_discovery([close | {"p": p} for p in (0.01, 0.04, 0.5, 0.9)])
    assert [round(claim["p_page"], 3) for claim in many] == [0.04, 0.08, 0.667, 0.9]


def test_pruning_pairs_are_measured_as_printed():
    "D12: groups of 24 were cut to 12 and 6 beside the paper's 48, 24 and 12."
    record = json.loads((ROOT / "figures/testbed/pro_grpo_table9_fig7.json").read_text())
    assert record["group"] == 48


def test_pruning_steps_follow_the_pilot():
    "Pro-GRPO's recipe prunes where previews rank as they do in the paper, not at the same fraction."
    record = json.loads((ROOT / "figures/testbed/pro_grpo_table9_fig7.json").read_text())
    first, second = at_testbed(recipes.get("pro-grpo")).values.prune_at
    assert [first, second] == record["pilot"]["prune_at"] == [7, 9]
    assert round(record["spearman"][first], 2) >= 0.79 and round(record["spearman"][second], 2) >= 0.90
    assert record["spearman"][first - 1] < 0.7922, "no earlier step ranks as well"
