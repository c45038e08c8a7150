"""Groups of runs compared: what may be compared, what is said, and what it costs to ask."""

import json
import subprocess
import sys

import pytest

from branchgrpo import Run, cli, compare

BASE = {
    "backbone": "tiny-sd3",
    "reward": "tiny-geneval",
    "prompts": "digits",
    "steps": 12,
    "iterations": 4,
}
BASE |= {
    "evaluate_every": 1,
    "learning_rate": 1e-3,
    "guidance_scale": 1.0,
    "evaluation_prompts": 16,
    "lora": None,
}
FACTS = {
    "state": "finished",
    "device": "2 CPU cores",
    "prompts": {"train": 9, "test": 9, "digest": "abc"},
}
LUCK = (0.003, -0.004, 0.001, 0.006)


def invented(path, seed=0, gain=0.01, calls=100, reached=4, facts=None, **changes):
    "Write the folder of a run, as a training leaves it."
    settings = BASE | {"recipe": "branchgrpo", "seed": seed} | changes
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(FACTS | (facts or {}) | {"settings": settings}))
    run, rows = Run(str(path)), []
    for i in range(reached + 1):
        wobble = LUCK[seed % 4] * (i > 0) + 0.0005 * (i > 0) * ((seed + calls) % 3)
        counts = {
            "iteration": i,
            "denoiser_calls": calls * i,
            "trained_calls": 50 * i,
            "seconds": 0.1 * calls * i,
        }
        rows.append(
            counts | {"eval_reward": 0.5 + gain * i + wobble, "eval_check_all": 0.1 + gain * i}
        )
    run.write_rows("evaluations", rows if settings["evaluate_every"] else [])
    run.write_rows("metrics", rows[1:])
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    "Three seeds of two methods, in runs/."
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        invented(tmp_path / f"runs/mine-{seed}", seed, 0.012, 80)
        invented(tmp_path / f"runs/dance-{seed}", seed, 0.010, 100, recipe="dancegrpo")
    return tmp_path / "runs"


def called(capsys, *words):
    code = cli.main(["compare", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "words",
    [
        ("mine=runs/mine-*", "base=runs/dance-*"),
        (
            "mine=runs/mine-0",
            "runs/mine-1",
            "runs/mine-2",
            "base=runs/dance-0",
            "runs/dance-1",
            "runs/dance-2",
        ),
        ("mine=", "runs/mine-*", "base=", "runs/dance-?"),
        ("base=runs/dance-*", "mine=runs/mine-*", "--base", "base"),
    ],
    ids=["patterns", "expanded", "apart", "base first"],
)
def test_the_command_answers_in_one_sentence(runs, capsys, words):
    "However the shell has filled in the words."
    code, said, _ = called(capsys, *words, "--json", "c.json")
    assert code == 0
    lines = said.splitlines()
    assert lines[-3].startswith("mine is higher than base by 0.0") and lines[-3].endswith(
        "(3 seeds, paired)."
    )
    assert lines[-2:] == ["curves: compare.png", "numbers: c.json"]
    assert (runs.parent / "compare.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((runs.parent / "c.json").read_text())
    assert [group["seeds"] for group in numbers["groups"]] == [[0, 1, 2]] * 2 and numbers[
        "base"
    ] == "base"
    assert {row["at equal"] for row in numbers["differences"]} == {
        "iteration",
        "denoiser_calls",
        "cost",
        "seconds",
    }


def test_three_lines_of_python(runs):
    found = compare(
        {"mine": [Run("runs/mine-0"), "runs/mine-1", "runs/mine-2"], "base": "runs/dance-*"}
    )
    assert found.answer("mine") in str(found)
    rows = {row["at equal"]: row for row in found.differences("mine")}
    ends = [[run.evaluations[-1]["eval_reward"] for run in group] for group in runs_of(runs)]
    mean = sum(a - b for a, b in zip(*ends)) / 3
    assert rows["iteration"]["difference"] == pytest.approx(mean)
    assert rows["denoiser_calls"]["budget"] == 320 and rows["cost"]["budget"] == 4 * (80 + 150)
    assert found.summary("mine")["before"] == 0.5


def runs_of(folder):
    return [[Run(folder / f"{name}-{seed}") for seed in range(3)] for name in ("mine", "dance")]


OTHER = {  # what differs in a run of the base: what the line says of it
    "backbone": (
        {"backbone": "tiny-flux"},
        "backbone is 'tiny-sd3' in 'runs/mine-0' and 'tiny-flux' in 'runs/other'",
    ),
    "reward": (
        {"reward": "tiny-clip"},
        "reward is 'tiny-geneval' in 'runs/mine-0' and 'tiny-clip' in 'runs/other'",
    ),
    "prompts": (
        {"prompts": "clips"},
        "prompts is 'digits' in 'runs/mine-0' and 'clips' in 'runs/other'",
    ),
    "guidance": (
        {"guidance_scale": 3.5},
        "guidance_scale is 1.0 in 'runs/mine-0' and 3.5 in 'runs/other'",
    ),
    "steps": ({"steps": 20}, "evaluation_steps is 12 in 'runs/mine-0' and 20 in 'runs/other'"),
    "evaluation steps": (
        {"evaluation_steps": 40},
        "evaluation_steps is 12 in 'runs/mine-0' and 40 in 'runs/other'",
    ),
    "count": (
        {"evaluation_prompts": 8},
        "evaluation_prompts is 16 in 'runs/mine-0' and 8 in 'runs/other'",
    ),
    "texts": (
        {"facts": {"prompts": {"digest": "xyz"}}},
        "prompts has other texts in 'runs/mine-0' than in",
    ),
    "never": (
        {"evaluate_every": 0},
        "'runs/other' has no evaluation of a trained model: it was trained with",
    ),
    "early": (
        {"reached": 0},
        "'runs/other' has no evaluation of a trained model: it has had 0 of 4 iterations",
    ),
}


@pytest.mark.parametrize("kind", OTHER)
def test_what_cannot_be_compared_is_named_with_both_values(runs, capsys, kind):
    changes, line = OTHER[kind]
    invented(runs / "other", **changes)
    code, said, error = called(capsys, "mine=runs/mine-*", "base=runs/other")
    assert (
        (code, said) == (2, "")
        and error.startswith(f"branchgrpo: runs: {line}")
        and error.count("\n") == 1
    )
    assert not (runs.parent / "compare.png").exists()


def test_what_differs_in_the_method_is_compared(runs):
    "Steps may differ in the rollout, if evaluations have their own."
    for name in ("a", "b"):
        own = {"steps": 6} if name == "a" else {}
        invented(runs / name, evaluation_steps=12, advantage=name, **own)
    assert "1 seed" in compare({"a": "runs/a", "b": "runs/b"}).answer("a")


def test_the_same_code_under_another_source_is_refused(runs, capsys):
    for name in ("a", "b"):
        invented(runs / name, reward="my.py:redness", sources={"reward": f"digest-{name}"})
    code, _, error = called(capsys, "x=runs/a", "y=runs/b")
    assert code == 2 and "reward has another source in 'runs/a' than in 'runs/b'" in error


def test_unfinished_runs_are_compared_as_far_as_all_have_come(runs):
    invented(runs / "late", 2, 0.012, 80, reached=2)
    found = compare({"mine": ["runs/mine-0", "runs/mine-1", "runs/late"], "base": "runs/dance-*"})
    assert found.iterations == 2
    assert any(
        "late is not finished: it was evaluated up to 2 of 4 iterations" in note
        for note in found.notes
    )
    assert found.differences("mine")[0]["budget"] == 2
    ends = [
        [Run(f"runs/{name}-{n}").evaluations[2]["eval_reward"] for n in range(2)]
        for name in ("mine", "dance")
    ]
    late = (
        Run("runs/late").evaluations[2]["eval_reward"]
        - Run("runs/dance-2").evaluations[2]["eval_reward"]
    )
    mean = (sum(a - b for a, b in zip(*ends)) + late) / 3
    assert found.differences("mine")[0]["difference"] == pytest.approx(mean)


def test_seeds_that_are_not_shared(runs):
    """A group with more seeds pairs those that it shares; groups without a common seed are compared
    without pairs."""
    invented(runs / "mine-3", 3, 0.012, 80)
    more = compare({"mine": "runs/mine-*", "base": "runs/dance-*"})
    assert (
        "(3 seeds, paired)" in more.answer("mine")
        and "seeds 3 of mine have no partner" in more.notes[0]
    )
    for seed in (5, 6):
        invented(runs / f"far-{seed}", seed, 0.010, recipe="dancegrpo")
    apart = compare({"mine": ["runs/mine-0", "runs/mine-1"], "base": "runs/far-*"})
    assert "without pairs" in apart.notes[0] and not apart.differences("mine")[0]["paired"]


def test_one_seed_has_a_value_and_no_interval(runs):
    found = compare({"mine": "runs/mine-0", "base": "runs/dance-0"})
    row = found.differences("mine")[0]
    assert row["difference"] > 0 and row["low"] is None and row["high"] is None
    assert "one seed does not show how much seeds differ" in found.answer("mine")
    assert "[" not in str(found).split("mine − base")[0].splitlines()[3]


WRONG = {
    "twice": (("mine=runs/mine-0", "mine=runs/mine-1"), "runs: group 'mine' is named twice"),
    "one group": (("mine=runs/mine-*",), "runs: 1 group is given, and two are compared"),
    "no run": (
        ("mine=runs/mine-*", "base=runs"),
        "runs: 'runs' is not a run's folder: there is no run.json",
    ),
    "nothing found": (
        ("mine=runs/m-*", "base=runs/dance-*"),
        "runs: 'runs/m-*' matches no run's folder",
    ),
    "no name": (("runs/mine-0", "base=runs/dance-0"), "runs: 'runs/mine-0' is in no group"),
    "one recipe": (("runs/mine-0", "runs/mine-1"), "runs: all are of recipe branchgrpo"),
    "a seed twice": (
        ("mine=runs/mine-0", "runs/mine-0", "base=runs/dance-0"),
        "runs: group 'mine' has seed 0 twice",
    ),
    "mixed": (
        ("mine=runs/mine-0", "runs/dance-1", "base=runs/dance-0"),
        "runs: group 'mine' is one setting on",
    ),
    "metric": (
        ("a=runs/mine-*", "b=runs/dance-*", "--metric", "rewards"),
        "metric: 'rewards' is not one of reward,",
    ),
    "base": (("a=runs/mine-*", "b=runs/dance-*", "--base", "c"), "base: 'c' is not one of a, b"),
    "picture": (
        ("a=runs/mine-*", "b=runs/dance-*", "--output", "c.gif"),
        "output: 'c.gif' does not end in .png",
    ),
    "nothing": ((), "runs: nothing is given; write branchgrpo compare"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_line_costs_one_line(runs, capsys, kind):
    words, line = WRONG[kind]
    code, said, error = called(capsys, *words)
    assert (
        (code, said) == (2, "")
        and error.startswith(f"branchgrpo: {line}")
        and error.count("\n") == 1
    ), error
    assert [path.name for path in runs.parent.iterdir()] == ["runs"]


LIGHT = (
    "import sys; from branchgrpo import cli; code = cli.main(sys.argv[1:]); sys.exit(code or"
    " 'torch' in sys.modules)"
)


def test_an_answer_needs_no_torch(runs):
    words = [sys.executable, "-c", LIGHT, "compare", "mine=runs/mine-*", "base=runs/dance-*"]
    done = subprocess.run(words, cwd=runs.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
