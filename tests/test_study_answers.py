"""The registered studies' answers, worked out again from their raw records, without any of the
study's code; and no run of a control began before its registration."""

import json
import subprocess
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy.stats import ttest_1samp

ROOT = Path(__file__).parents[1]
SETTINGS = ["kl", "roots", "branch_factor", "splits", "prompts_per_iteration"]
COUNTERS = ["iteration", "denoiser_calls", "trained_calls", "eval_reward"]


def curves(page: str) -> dict:
    """Return each run's evaluations by label and seed: the reward, and the cost by the engine's and
    the papers' count."""
    table = pd.read_parquet(ROOT / f"figures/testbed/runs/{page}.parquet")
    table = table[table.name.isin([*SETTINGS, *COUNTERS, "edges"])]
    table["value"] = table.text.map(json.loads, na_action="ignore").fillna(table.value)
    runs = {}
    for run, rows in table.groupby(["label", "seed"]):
        of = {
            kind: part.pivot(index="row", columns="name", values="value")
            for kind, part in rows.groupby("kind")
        }
        s, at = of["settings"].loc[0], of["evaluations"][COUNTERS].astype(float)
        # a tree's edges are its calls, and one more for each further child: all leaves but the
        # roots
        further = s.prompts_per_iteration * s.roots * (s.branch_factor ** len(s.splits) - 1)
        edges = at.denoiser_calls + at.iteration * further
        trained_edges = np.append(0.0, of["metrics"].edges.astype(float).cumsum())[
            at.iteration.astype(int)
        ]
        weight = 4 if s.kl > 0 else 3
        cost, nfe = at.denoiser_calls + weight * at.trained_calls, edges + weight * trained_edges
        runs[run] = {"end": at.iteration, "cost": cost, "nfe": nfe, "reward": at.eval_reward}
    return runs


def at_endpoint(
    claim: dict, runs: dict, seeds: list[int], count: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the methods' difference and the baseline's gain on each seed, and the budget in units
    of the other's cost."""
    ours, theirs, base = ([runs[label, seed] for seed in seeds] for label in labels(claim))
    budget = min(run[count].iloc[-1] for run in ours + theirs)
    a, b = (
        [np.interp(budget, run[count], run["reward"]) for run in method]
        for method in (ours, theirs)
    )
    gains = np.array([run["reward"].iloc[-1] - run["reward"].iloc[0] for run in base])
    return np.subtract(a, b), gains, budget / np.mean([run[count].iloc[-1] for run in theirs])


def labels(claim: dict) -> list[str]:
    "Return the labels of a claim's two methods and of its baseline."
    recipes = claim["label"], claim["other"], claim.get("baseline", claim["other"])
    return [f"{claim['task']}: {recipe}" for recipe in recipes]


def p_above(values: np.ndarray) -> float:
    "Return the one-sided p value of a mean above zero."
    return ttest_1samp(values, 0, alternative="greater").pvalue


def answer(claim: dict, runs: dict, seeds: list[int], level: float) -> str:
    "Return the first answer that every count of the claim's endpoint shows at this level."
    shown = {"confirmed": [], "refuted": [], "the same": []}
    for count in ["end"] if claim["at"] == "end" else ["cost", "nfe"]:
        values, gains, _ = at_endpoint(claim, runs, seeds, count)
        margin, above = claim["margin"] * gains, claim.get("kind") != "not below"
        # confirmed and refuted are the two sides of one test, so each counts twice
        shown["confirmed"].append(2 * p_above(values if above else values + margin))
        shown["refuted"].append(2 * p_above(-values))
        shown["the same"].append(
            max(p_above(margin + values), p_above(margin - values)) if above else 1.0
        )
    return next((word for word, p in shown.items() if max(p) <= level), "undecided")


STUDIES = {
    "registered": "study_answers",
    "registered_control": "study_control",
    "registered_reasons": "study_control",
}


@pytest.mark.parametrize("file", STUDIES)
def test_the_answers_follow_from_the_registration_and_the_record(file):
    "Seeds, shares, intervals, p values and the answer of every claim that has runs."
    page = STUDIES[file]
    plan, runs = YAML(typ="safe").load(ROOT / f"reproduce/{file}.yaml"), curves(page)
    said_there = json.loads((ROOT / f"figures/testbed/{page}.json").read_text())["answers"]
    answers = [said for said in said_there if said["claim"] in plan["claims"]]
    last, again = (
        plan["looks"][-1],
        [claim["again"] for claim in plan["claims"].values() if "again" in claim],
    )
    assert [said["claim"] for said in answers] == list(plan["claims"])
    for said in answers:
        claim = plan["claims"][said["claim"]]
        planned = range(plan["first_seed"], plan["first_seed"] + last + claim.get("again", 0))
        made = list(
            takewhile(lambda seed: all((label, seed) in runs for label in labels(claim)), planned)
        )
        seeds, new = made[:last], made[last:]
        word, at = "undecided", 0
        for before, look in zip([0, *plan["looks"]], plan["looks"]):
            if look <= len(seeds) and word == "undecided":
                level = plan["alpha"] * (look - before) / last / len(plan["claims"])
                word, at = answer(claim, runs, seeds[:look], level), look
        # the second test: new seeds alone
        if word == "undecided" and new and len(new) == claim["again"]:
            seeds, at = new, len(new)
            word = answer(claim, runs, seeds, plan["alpha"] / len(again))
        assert said["seeds"] == len(seeds), said["claim"]
        for count, known in said["found"].items():
            values, gains, budget = at_endpoint(claim, runs, seeds, count)
            test, mean = ttest_1samp(values, 0), values.mean()
            in_rewards = {"share": mean, **test.confidence_interval(0.95)._asdict()}
            expected = {name: value / gains.mean() for name, value in in_rewards.items()}
            expected |= {
                "p_zero": test.pvalue,
                "p_margin": p_above(values + claim["margin"] * gains),
                "p_same": max(
                    p_above(values + claim["margin"] * gains),
                    p_above(claim["margin"] * gains - values),
                ),
            }
            expected |= {"reward": mean, "budget": budget}
            assert known == pytest.approx(expected, rel=1e-6, abs=1e-12), (said["claim"], count)
        if len(seeds) > 1:
            assert (said["answer"], said["decided_at"], len(said["found"])) == (word, at, 3), said[
                "claim"
            ]


REGISTERED_IN = "2497d4b7"  # the commit of both registrations of controls


def git(*words: str) -> str:
    "Return what git says of this repository; nothing where it knows no such thing."
    asked = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout if asked.returncode == 0 else ""


@pytest.mark.parametrize("file", ["registered_control", "registered_reasons"])
def test_no_run_of_a_control_began_before_its_registration(file):
    "Its claims are those that were committed; every run of its own arms began later."
    date = git("log", "-1", "--format=%cI", REGISTERED_IN)
    if not date:
        pytest.skip("this copy lacks the history: an sdist, or a shallow clone")
    plan = YAML(typ="safe").load(ROOT / f"reproduce/{file}.yaml")
    then = YAML(typ="safe").load(git("show", f"{REGISTERED_IN}:reproduce/{file}.yaml"))
    assert plan | {"deviations": []} == then, "only deviations are added later"
    table = pd.read_parquet(ROOT / "figures/testbed/runs/study_control.parquet")
    facts = table[table.kind == "run"].pivot(index=["label", "seed"], columns="name", values="text")
    own = [f"{task}: {name}" for task, about in plan["tasks"].items() for name in about["recipes"]]
    new = facts[[label in own and label != "groups: pro-grpo" for label, _ in facts.index]]
    assert len(new)
    for place, run in new.iterrows():
        began = datetime.fromisoformat(json.loads(run.began))
        assert began > datetime.fromisoformat(date.strip()), place
        assert json.loads(run.commit), place
