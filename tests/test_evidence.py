"""Registered claims and the statistics that answer them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from branchgrpo.analysis.statistics import HOLDS, OPEN, SAME, Pair, decide, possible
from branchgrpo.recipes import RECIPES
from branchgrpo.reproduction.cache import cache_key
from branchgrpo.reproduction.pages import jobs, planned_runs
from branchgrpo.reproduction.study import Claim, Registration, StudyArms, answers, read_registration
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
LOOKS = [5, 10, 20]


def curve(ends, cost=10.0):
    "Return a run's evaluations: it starts at 0.5, and rises evenly to `ends` over six evaluations."
    values = np.linspace(0.5, ends, 7)
    rows = enumerate(values)
    return [{"cost": cost * n, "nfe": cost * n, "eval_reward": float(v)} for n, v in rows]


def page(spread=0.01, seeds=20, **ends):
    "Return curves of methods that end at these values, up to noise."
    draws = np.random.default_rng(0)
    return {
        label: {seed: curve(end + spread * draws.normal()) for seed in range(seeds)}
        for label, end in ends.items()
    }


def claim(**changes):
    "Return a claim that `ours` ends above `theirs`."
    first = Claim("higher", "branchgrpo", "…", "–", "digits", "ours", "theirs", "end", 0.1)
    return dataclasses.replace(first, **changes)


def answered(curves, *claims):
    "Return the answers to the claims on one page."
    return answers(Registration(list(claims or (claim(),)), {}, LOOKS), {"digits": curves})


def test_the_registered_file_is_valid():
    registered = read_registration()
    assert len(registered.claims) <= 12
    assert {found.paper for found in registered.claims} == {"branchgrpo", "pro-grpo"}
    assert registered.looks == (5, 10, 20)
    assert all(RECIPES.get(recipe) for found in registered.claims for recipe in found.recipes)


def test_an_answer_stays_though_later_seeds_differ():
    curves = page(ours=0.8, theirs=0.7)
    first = answered({label: dict(list(runs.items())[:5]) for label, runs in curves.items()})[0]
    for seed in range(10, 20):
        curves["ours"][seed] = curve(0.6)
    later = answered(curves)[0]
    assert (first.answer, later.answer) == (HOLDS, HOLDS)
    assert (first.decided_at, later.decided_at) == (5, 5)
    assert later.found["end"].share < first.found["end"].share


def test_a_missing_run_ends_what_is_counted():
    "Otherwise a run that comes later would change an answer that was given before."
    curves = page(ours=0.8, theirs=0.7, third=0.75)
    del curves["theirs"][13]
    found = answered(curves)[0]
    assert (found.answer, found.decided_at, found.seeds) == (HOLDS, 5, 13)
    del curves["theirs"][3]
    assert (answered(curves)[0].answer, answered(curves)[0].seeds) == (OPEN, 3)


def test_a_look_is_not_changed_by_tasks_that_run_later():
    weak = page(0.06, ours=0.74, theirs=0.7)
    others = [claim(name=f"other {n}", task="later") for n in range(9)]
    registered = Registration([claim(), *others], {}, LOOKS)
    alone = answers(registered, {"digits": weak})[0]
    together = answers(registered, {"digits": weak, "later": page(ours=0.9, theirs=0.7)})[0]
    assert (alone.answer, alone.decided_at) == (together.answer, together.decided_at)


def test_wrong_answers_are_rare_for_every_true_difference():
    draws = np.random.default_rng(2)
    for truth, right in [(0.0, {SAME, OPEN}), (0.1, {HOLDS, OPEN}), (0.05, {HOLDS, SAME, OPEN})]:
        wrong = 0
        for _ in range(300):
            y = draws.normal(scale=0.08, size=(2, 6))
            y[0] += truth
            d = Pair("a", "b", *y, np.ones(6))
            wrong += decide(possible(d, "above", 0.1)) not in right
        assert wrong / 300 < 0.08, truth


def test_the_recipes_of_a_task_are_compared_like_with_like():
    "They have the same model, reward, captions and iterations, whatever else differs."
    registered = read_registration()
    for name, task in registered.tasks.items():
        settings = [resolve(task.config(recipe, 0)) for recipe in registered.recipes(name)]
        for field in (
            "backbone",
            "reward",
            "prompts",
            "iterations",
            "evaluation_prompts",
            "prompts_per_iteration",
        ):
            assert len({getattr(found, field) for found in settings}) == 1, (name, field)


def test_pages_share_the_runs_of_the_study():
    "Table 1 and the figures of the same recipes take them from there."
    registered = read_registration()
    study = {
        key(config)
        for config in StudyArms(registered, {"digits": 5, "groups": 5}, "").configs().values()
    }
    shared = {}
    for page in ("branchgrpo/table1", "pro_grpo/table1_fig5"):
        (job,) = jobs([page], "testbed", ROOT / "reproduce")
        shared[page] = len({key(config) for config, _ in planned_runs(job)} & study) / 5
    assert shared == {"branchgrpo/table1": 6, "pro_grpo/table1_fig5": 2}


def test_the_quickstart_shows_the_seed_in_the_middle():
    "Its images flatter no method: half of the seeds end higher."
    record = json.loads((ROOT / "figures/testbed/quickstart.json").read_text())
    for method, settings in record["settings"].items():
        right = {
            seed: record["numbers"][f"{method}-{seed}"]["after"]["eval_check_all"]
            for seed in record["seeds"]
        }
        assert sorted(right, key=right.get)[len(right) // 2] == record["seeds"][0], method
        assert settings["backbone"] == "tiny-sd3", "the first page says so"


def key(config):
    "Return the name of a run."
    return cache_key(resolve(config).to_dict())


def test_the_committed_runs_are_one_table():
    "Every record's runs, with settings, as one Parquet data set that other tools read."
    table = pq.read_table(ROOT / "figures/testbed/runs")
    assert set(table.column("kind").unique().to_pylist()) <= {
        "evaluations",
        "metrics",
        "settings",
        "run",
    }
    pages = table.column("page").unique().to_pylist()
    assert {f"{page}.parquet" for page in pages} == {
        path.name for path in (ROOT / "figures/testbed/runs").iterdir()
    }
    size = sum(path.stat().st_size for path in (ROOT / "figures/testbed/runs").iterdir())
    assert size < 15e6
