"""Bad input at the shell: one line names the field, the value and what is allowed; code 2, and nothing is written.

The tables are in `bad_inputs.py`. Most cases call the command line in this process; a sample, and what depends on
the environment, run as processes of their own.
"""

import os
import shlex
import sys
from pathlib import Path

import commands
import pytest
from bad_inputs import BAD, ENVIRONMENT, RUNS, make_files

from branchgrpo import cli

ROOT = Path(__file__).parents[2]
NAMES = sorted(BAD)
FAST = set(NAMES[::24])
SAMPLE = NAMES[::40]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    "The files and folders that the tables name: `{f}` stands for this folder."
    folder = tmp_path_factory.mktemp("inputs") / "f"
    make_files(folder)
    return folder


def words_of(line, files):
    line = (
        line.replace("{5000 ones}", "1" * 5000)
        .replace("{f}", str(files))
        .replace("{reproduce}", str(ROOT / "reproduce"))
    )
    return [word.encode().decode("unicode_escape") if "\\x" in word else word for word in shlex.split(line)]


def what_is_there(*folders):
    "Size and time of every file below some folders; folders themselves without a time."
    found = [path for folder in folders for path in Path(folder).rglob("*") if "__pycache__" not in path.parts]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None for path in found}


def called(capfd, words):
    "Call the command line in this process; return its code, and what it printed."
    path, environment = list(sys.path), dict(os.environ)
    try:
        code = cli.main(words)
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
    said = capfd.readouterr()
    return code, said.out, said.err


def check_line(text, message, files):
    "One line that begins with the field; it says the value and what is allowed in less than a screen."
    assert text.count("\n") == 1, text
    assert text.startswith(f"branchgrpo: {message}".replace("{f}", str(files))), text
    assert len(text.replace(str(files), "")) < 2000, len(text)


def marked(names):
    return [pytest.param(name, marks=[pytest.mark.fast] if name in FAST else []) for name in names]


@pytest.mark.parametrize("name", marked(NAMES))
def test_a_bad_input_costs_one_line(name, files, tmp_path, monkeypatch, capfd, noted):
    line, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = what_is_there(tmp_path, files)
    code, out, err = called(capfd, words_of(line, files))
    assert code == 2, (code, err)
    check_line(err, message, files)
    assert out == ""
    assert what_is_there(tmp_path, files) == before
    shown = line if len(line) < 200 else f"{line[:150]}…"
    happened = err.strip().replace(str(files), "…")
    noted("inputs", name, happened=happened, kept="nothing written", command=f"branchgrpo {shown}")


@pytest.mark.parametrize("name", SAMPLE)
def test_the_same_in_a_process_of_its_own(name, files, tmp_path):
    line, message = BAD[name]
    before = what_is_there(tmp_path, files)
    words = [sys.executable, "-m", "branchgrpo.cli", *words_of(line, files)]
    done = commands.run(words, timeout=300, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)})
    assert done.returncode == 2, done.stdout
    check_line(done.stdout, message, files)
    assert what_is_there(tmp_path, files) == before


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_what_the_environment_says(name, files, tmp_path, noted):
    variables, line, message = ENVIRONMENT[name]
    before = what_is_there(tmp_path, files)
    words = [sys.executable, "-m", "branchgrpo.cli", *words_of(line, files)]
    done = commands.run(words, timeout=300, cwd=tmp_path, env=os.environ | variables)
    set_to = " ".join(f"{key}={value}" for key, value in variables.items())
    if message is None:
        assert done.returncode == 0, done.stdout
        assert "Traceback" not in done.stdout
        noted("inputs", name, happened="it runs", kept="what it makes", command=f"{set_to} branchgrpo {line}")
        return
    assert done.returncode == 2, done.stdout
    check_line(done.stdout, message, files)
    assert what_is_there(tmp_path, files) == before
    happened = done.stdout.strip().replace(str(files), "…")
    noted("inputs", name, happened=happened, kept="nothing written", command=f"{set_to} branchgrpo {line}")


@pytest.mark.parametrize("name", sorted(RUNS))
def test_what_is_odd_and_fine_runs(name, files, tmp_path, noted):
    line, printed = RUNS[name]
    words = [sys.executable, "-m", "branchgrpo.cli", *words_of(line, files)]
    done = commands.run(words, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert printed in done.stdout
    assert "Traceback" not in done.stdout
    noted("inputs", name, happened="it runs", kept="what it makes", command=f"branchgrpo {line[:200]}")


@pytest.mark.parametrize("name", ("short", "square", "text", "none"))
def test_a_reward_whose_first_answer_is_wrong(name, files, tmp_path, capfd, noted):
    "Nothing was trained, so the same folder takes the corrected command."
    words = words_of("train --config {f}/small.yaml --reward", files)
    own, output = f"{files / 'own.py'}:", ["--output", str(tmp_path / "run")]
    code, _, err = called(capfd, [*words, own + name, *output])
    assert code == 2, err
    said = [line for line in err.splitlines() if line.startswith("branchgrpo: ")]
    assert len(said) == 1, err
    check_line(said[0] + "\n", "reward: ", files)
    code, _, err = called(capfd, [*words, own + "ones", *output])
    assert code == 0, err
    happened = said[0].replace(str(files), "…")
    noted("inputs", f"a reward that returns {name}", happened=happened, kept="the folder, for another reward")


@pytest.mark.fast
def test_there_are_enough_of_them():
    assert len(BAD) >= 220
    commands = {line.split()[0] for line, _ in BAD.values() if line.split()}
    assert set(cli.COMMANDS) <= commands
