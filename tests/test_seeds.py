"""Several seeds in one command: each run is as if it were trained alone, and a stop stops them
all."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import popen
from small import rows, wait_for
from test_training import together

from branchgrpo import cli
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.stop import REQUEUE

SMALL = "--steps 4 --splits 0,1 --prompts-per-iteration 2 --evaluation-prompts 4 --evaluate-every 2"
COMMAND = "import sys; from branchgrpo.cli import main; sys.exit(main(sys.argv[1:]))"


def called(capsys, *words):
    code = cli.main(["train", *SMALL.split(), *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def settings_of(folder):
    return json.loads((Path(folder) / "run.json").read_text())["settings"]


def test_each_seed_is_the_run_of_that_seed_alone(tmp_path, capsys):
    """To the bit, with the same settings; the second call finds all of it finished, and a further
    seed joins."""
    words = ("--iterations", 2, "--tracker", "none", "--lora-rank", 2)
    assert called(capsys, *words, "--seed", 1, "--output", tmp_path / "alone")[0] == 0
    code, said, _ = called(capsys, *words, "--seeds", "0,1", "--output", tmp_path / "mine")
    assert code == 0
    assert (
        f"seed 0 (1 of 2): {tmp_path}/mine-0 begins" in said
        and f"seed 1 (2 of 2): {tmp_path}/mine-1 begins" in said
    )
    assert f"branchgrpo compare 'mine={tmp_path}/mine-*'" in said and "(95 %, 2 seeds)" in said
    assert rows(tmp_path / "mine-1") == rows(tmp_path / "alone") != rows(tmp_path / "mine-0")
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        assert rows(tmp_path / "mine-1", name) == rows(tmp_path / "alone", name)
    assert settings_of(tmp_path / "mine-1") == settings_of(tmp_path / "alone")
    assert "seeds" not in TrainConfig.__dataclass_fields__
    code, said, _ = called(capsys, *words, "--seeds", 0, 1, 5, "--output", tmp_path / "mine")
    assert (
        code == 0 and said.count("is finished already") == 2 and f"{tmp_path}/mine-5 begins" in said
    )


def test_a_file_may_hold_seeds_and_flags_override_it(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("seeds: [3, 4]\niterations: 1\n")
    (tmp_path / "one.yaml").write_text("seed: 7\niterations: 1\n")
    many, one = ("--config", tmp_path / "mine.yaml"), ("--config", tmp_path / "one.yaml")
    printed = called(capsys, *many, "--print-config")[1]
    assert "\nseeds: [3, 4]\n" in printed and "\nseed:" not in printed
    (tmp_path / "printed.yaml").write_text(printed)
    assert called(capsys, "--config", tmp_path / "printed.yaml", "--print-config")[1] == printed
    assert "\nseed: 9\n" in called(capsys, *many, "--seed", 9, "--print-config")[1]
    assert "\nseeds: [1, 2]\n" in called(capsys, *one, "--seeds", "1,2", "--print-config")[1]


WRONG = {
    "0,x": "seeds: 'x' is not a whole number",
    "0,0": "seeds: 0 is there twice",
    "-1": "seeds: -1 is not a whole number from 0",
    "": "seeds: '' is not a whole number",
    "0,1 --seed 3": "seeds: ['0,1'] is given beside seed 3; give one of the two",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_seeds_cost_one_line(tmp_path, capsys, words):
    code, said, error = called(
        capsys, "--output", tmp_path / "mine", "--seeds", *(words.split() or [""])
    )
    assert (
        (code, said) == (2, "")
        and error.startswith(f"branchgrpo: {WRONG[words]}")
        and error.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


def test_a_wrong_folder_is_named_before_the_first_run(tmp_path, capsys):
    "One that holds something else, and one that holds another run."
    words = ("--iterations", 1, "--tracker", "none", "--output", tmp_path / "mine")
    (tmp_path / "mine-1").mkdir()
    (tmp_path / "mine-1/notes.txt").write_text("not a run")
    code, said, error = called(capsys, *words, "--seeds", "0,1")
    assert (code, said) == (2, "") and "mine-1' exists and is not a run" in error
    (tmp_path / "mine-1/notes.txt").unlink()
    assert called(capsys, *words, "--seeds", "1", "--learning-rate", "1e-5")[0] == 0
    code, said, error = called(capsys, *words, "--seeds", "0,1")
    assert (code, said) == (2, "") and "holds another run (differs in learning_rate)" in error
    assert not (tmp_path / "mine-0").exists()


@pytest.mark.parametrize("stopped", [0, 1], ids=["the first", "the second"])
def test_a_signal_stops_all_and_a_second_call_continues(tmp_path, stopped):
    "With exit code 75, whichever run is at work."
    words = [*SMALL.split(), "--iterations", "4", "--tracker", "none", "--checkpoint-every", "1"]
    words = [
        sys.executable,
        "-c",
        COMMAND,
        "train",
        *words,
        "--seeds",
        "0,1",
        "--output",
        str(tmp_path / "mine"),
    ]
    with open(tmp_path / "log", "w") as log:
        process = popen(words, stdout=log, stderr=log)
        wait_for(lambda: len(rows(tmp_path / f"mine-{stopped}")) >= 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == REQUEUE, (tmp_path / "log").read_text()
    assert "stopped by SIGTERM at iteration" in (tmp_path / "log").read_text()
    assert (tmp_path / "mine-1").exists() == bool(stopped)
    with open(tmp_path / "log", "w") as log:
        assert popen(words, stdout=log, stderr=log).wait(timeout=300) == 0
    said = (tmp_path / "log").read_text()
    assert f"mine-{stopped} continues after" in said
    for seed in (0, 1):
        assert [row["iteration"] for row in rows(tmp_path / f"mine-{seed}")] == [1, 2, 3, 4]


def test_several_processes_train_several_seeds(tmp_path):
    """With a tracker, which ends each run's events and not the processes' connection; the numbers
    are those of one."""
    shared = [*SMALL.split(), "--iterations", "2", "--seeds", "0,1"]
    for n, name in ((2, "two"), (1, "one")):
        words = ["train", *shared, "--output", str(tmp_path / name)]
        for code, log in together(n, COMMAND, *words):
            assert code == 0, log
    said = [Path(f"{tmp_path}/two.log{rank}").read_text() for rank in (0, 1)]
    assert "seed 1 (2 of 2)" in said[0] and "seed" not in said[1]
    for seed in (0, 1):
        events = list((tmp_path / f"two-{seed}").rglob("events.out*"))
        assert len(events) == 1 and events[0].stat().st_size > 500
        one, two = (
            rows(tmp_path / f"{name}-{seed}", "evaluations.jsonl") for name in ("one", "two")
        )
        assert [row["iteration"] for row in two] == [0, 2]
        assert two[0] == one[0] and two[1]["eval_reward"] == pytest.approx(
            one[1]["eval_reward"], abs=1e-3
        )


SCRIPT = """
import sys
from branchgrpo import GaussianFlow, TrainConfig, Trainer
small = dict(iterations=2, evaluate_every=1, evaluation_prompts=4, steps=4, splits=(0, 1))
bright = lambda images, prompts: images.mean((1, 2, 3))
for output, given in (("told", {}), ("silent", {"quiet": True})):
    policy = GaussianFlow(shape=(3, 8, 8))
    config = TrainConfig(**small, output=output)
    Trainer(config, policy=policy, reward=bright, prompts=["a", "b"]).fit(**given)
    print("end of", output, file=sys.stderr)
print("mine alone")
"""


def test_a_script_is_told_how_its_training_ended_unless_it_is_quiet(tmp_path):
    """On standard error, so that what it prints stays alone. A process of the fork server is no
    script."""
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "mine alone\n"), done.stderr
    told, silent, rest = re.split("end of .*\n", done.stderr)
    assert "held-out reward" in told and "next:\n  branchgrpo view told\n" in told, told
    assert "held-out reward" not in silent and "next:" not in silent and not rest, done.stderr
