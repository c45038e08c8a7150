"""Registered claims and the statistics that answer them."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from slow import often

from branchgrpo.recipes import RECIPES
from branchgrpo.reproduction.records import read_runs
from branchgrpo.reproduction.report import sentence
from branchgrpo.reproduction.runs import cache_key
from branchgrpo.reproduction.statistics import FAILS, HOLDS, OPEN, SAME, Pair, decide, possible
from branchgrpo.reproduction.study import NOT_RUN, Claim, Registration, answers, read_registration, recipes_of
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
LOOKS = [5, 10, 20]


def curve(ends, cost=10.0):
    "Return a run's evaluations: it starts at 0.5, and rises evenly to `ends` over six evaluations."
    values = np.linspace(0.5, ends, 7)
    return [{"iteration": 5 * n, "cost": cost * n, "eval_reward": float(v)} for n, v in enumerate(values)]


def page(spread=0.01, seeds=20, **ends):
    "Return curves of methods that end at these values, up to noise."
    draws = np.random.default_rng(0)
    return {label: {seed: curve(end + spread * draws.normal()) for seed in range(seeds)} for label, end in ends.items()}


def claim(**changes):
    "Return a claim that `ours` ends above `theirs`."
    first = Claim("higher", "own", "…", "–", "ours", "theirs", "value at the end", 0.1, "flux")
    return dataclasses.replace(first, **changes)


def answered(curves, *claims):
    "Return the answers to the claims on one page."
    return answers(Registration(list(claims or (claim(),)), LOOKS), {"flux": curves})


def test_the_registered_file_is_valid():
    registered = read_registration(ROOT / "reproduce" / "registered.yaml")
    papers = [found.paper for found in registered.claims]
    assert 12 <= len(papers) <= 16
    assert papers.count("own") == 2
    assert {"branchgrpo", "pro-grpo"} < set(papers)
    assert max(found.seeds for found in registered.claims) == registered.looks[-1] == 20


def test_registered_claims_compare_recipes():
    for found in read_registration(ROOT / "reproduce" / "registered.yaml").claims:
        for label in {found.label, found.other, found.baseline or found.other}:
            assert RECIPES.get(label), f"{found.name}: {label}"


def test_without_runs_no_claim_is_answered():
    registered = read_registration(ROOT / "reproduce" / "registered.yaml")
    found = answers(registered, {})
    assert {answer.answer for answer in found} == {NOT_RUN}
    assert [answer.claim.name for answer in found] == [each.name for each in registered.claims]
    assert all(sentence(answer) for answer in found)


@pytest.mark.parametrize(
    ("ours", "spread", "expected"),
    [(0.80, 0.01, HOLDS), (0.60, 0.01, FAILS), (0.70, 0.005, SAME), (0.71, 0.08, OPEN)],
)
def test_each_answer_is_reached(ours, spread, expected):
    assert answered(page(spread, ours=ours, theirs=0.7))[0].answer == expected


def test_an_answer_stays_though_later_seeds_differ():
    curves = page(ours=0.8, theirs=0.7)
    first = answered({label: dict(list(runs.items())[:5]) for label, runs in curves.items()})[0]
    for seed in range(10, 20):
        curves["ours"][seed] = curve(0.6)
    later = answered(curves)[0]
    assert (first.answer, later.answer) == (HOLDS, HOLDS)
    assert (first.decided_at, later.decided_at) == (5, 5)
    assert later.difference < first.difference


def test_a_claim_before_its_first_look_is_open():
    assert (answered(page(seeds=4, ours=0.8, theirs=0.7))[0].answer) == OPEN


def test_more_registered_claims_make_each_harder():
    curves = page(0.02, seeds=5, ours=0.735, theirs=0.7)
    alone = answered(curves)[0]
    others = [claim(name=f"other {n}", world="elsewhere") for n in range(30)]
    assert (alone.answer, answered(curves, claim(), *others)[0].answer) in {(HOLDS, OPEN), (HOLDS, HOLDS), (OPEN, OPEN)}
    strong = answered(page(ours=0.9, theirs=0.7), claim(), *others)[0]
    assert strong.answer == HOLDS, "a clear one still holds"


def test_a_missing_run_ends_what_is_counted():
    "Otherwise a run that comes later would change an answer that was given before."
    curves = page(ours=0.8, theirs=0.7, third=0.75)
    del curves["theirs"][13]
    found = answered(curves)[0]
    assert (found.answer, found.decided_at, found.seeds) == (HOLDS, 5, 13)
    del curves["theirs"][3]
    assert (answered(curves)[0].answer, answered(curves)[0].seeds) == (OPEN, 3)


def test_a_look_is_not_changed_by_worlds_that_run_later():
    weak = page(0.06, ours=0.74, theirs=0.7)
    others = [claim(name=f"other {n}", world="later") for n in range(9)]
    registered = Registration([claim(), *others], LOOKS)
    alone = answers(registered, {"flux": weak})[0]
    together = answers(registered, {"flux": weak, "later": page(ours=0.9, theirs=0.7)})[0]
    assert (alone.answer, alone.decided_at) == (together.answer, together.decided_at)


@pytest.mark.parametrize("margin", often([0.1, 0.3, 0.6], [0.1]))
def test_of_sixteen_claims_without_a_difference_any_is_rarely_called_different(margin):
    "Whether or not the same claims are found to be the same, which they are."
    draws = np.random.default_rng(int(100 * margin))
    claims = [claim(name=str(n), world=str(n), margin=margin) for n in range(16)]
    wrong = 0
    for _ in range(60):
        ends = 0.7 + 0.02 * draws.normal(size=(16, 2, 8))
        worlds = {
            str(n): {label: dict(enumerate(map(curve, row))) for label, row in zip(("ours", "theirs"), pair)}
            for n, pair in enumerate(ends)
        }
        found = answers(Registration(claims, [8]), worlds)
        wrong += any(answer.answer in (HOLDS, FAILS) for answer in found)
    assert wrong / 60 <= 0.12


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


def test_every_world_is_valid_and_compares_like_with_like():
    "The recipes of a world have the same model, reward, captions and iterations, whatever else differs."
    registered = read_registration(ROOT / "reproduce" / "registered.yaml")
    for name, recipes in recipes_of(registered).items():
        settings = [resolve(registered.worlds[name].config(recipe, 0)) for recipe in recipes]
        for field in ("backbone", "reward", "prompts", "iterations", "evaluation_prompts", "prompts_per_iteration"):
            assert len({getattr(found, field) for found in settings}) == 1, (name, field)
        assert {found.seed for found in settings} == {0}


def test_the_committed_runs_are_one_table():
    "Every record's runs, with settings, as one Parquet data set that other tools read."
    table = pq.read_table(ROOT / "figures/testbed/runs")
    assert set(table.column("kind").unique().to_pylist()) <= {"evaluations", "metrics", "settings", "run"}
    pages = table.column("page").unique().to_pylist()
    assert {f"{page}.parquet" for page in pages} == {path.name for path in (ROOT / "figures/testbed/runs").iterdir()}
    size = sum(path.stat().st_size for path in (ROOT / "figures/testbed/runs").iterdir())
    assert size < 15e6


def test_runs_that_wait_are_of_registered_seeds_that_no_answer_has_used():
    "They are named by their settings, and come after the seeds of the table of answers."
    tables = ROOT / "figures/testbed/runs"
    waiting = tables / "study_waiting.parquet"  # not there when no run waits
    seeds = read_registration(ROOT / "reproduce/registered.yaml").seeds(20)
    answered = {int(seed) for found in read_runs(tables / "study_answers.parquet").values() for seed in found}
    for name, found in (read_runs(waiting) if waiting.exists() else {}).items():
        for seed, run in found.items():
            assert int(seed) in set(seeds) - answered, name
            assert cache_key(run["settings"]) == name
