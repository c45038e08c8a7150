"""Bad input at the shell: one line that names the field and the value, exit code 2, and nothing
written.

The cases are tables in `bad_inputs.yaml`. Most call the command line in this process; what depends
on the environment, and what looks odd and is fine, run as processes of their own.
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
FAST = {*NAMES[::24], *(name for name in NAMES if name.startswith("size --backbone b_"))}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    "The files and folders that the tables name: `{f}` stands for this folder."
    folder = tmp_path_factory.mktemp("inputs") / "f"
    make_files(folder)
    return folder


def words_of(line, files):
    for name, value in {
        "{5000 ones}": "1" * 5000,
        "{f}": str(files),
        "{reproduce}": str(ROOT / "reproduce"),
    }.items():
        line = line.replace(name, value)
    return [
        word.encode().decode("unicode_escape") if "\\x" in word else word
        for word in shlex.split(line)
    ]


def what_is_there(*folders):
    "Size and time of every file below some folders; folders themselves without a time."
    found = [
        path
        for folder in folders
        for path in Path(folder).rglob("*")
        if "__pycache__" not in path.parts
    ]
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
        for path in found
    }


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
    """One line that begins with the field and the value, and says what is allowed in less than a
    screen."""
    begin = f"branchgrpo: {message}".replace("{f}", str(files))
    assert text.count("\n") == 1 and text.startswith(begin), text
    assert len(begin) < len(text) < 2000 + len(str(files)), len(text)


def row_of(name, line, files, happened="it runs", kept="what it makes", variables=""):
    "Return what a case notes."
    line = line if len(line) < 200 else f"{line[:150]}…"
    command = f"{variables} branchgrpo {line}".strip()
    return dict(
        what=name,
        happened=happened.strip().replace(str(files), "…"),
        kept=kept,
        kind="inputs",
        command=command,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.fast] if n in FAST else []) for n in NAMES]
)
def test_a_bad_input_costs_one_line(name, files, tmp_path, monkeypatch, capfd, noted):
    line, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = what_is_there(tmp_path, files)
    code, out, err = called(capfd, words_of(line, files))
    assert (code, out) == (2, ""), (code, err)
    check_line(err, message, files)
    assert what_is_there(tmp_path, files) == before
    noted(**row_of(name, line, files, err, "nothing written"))


ODD = ENVIRONMENT | {name: ({}, line, None, printed) for name, (line, printed) in RUNS.items()}


@pytest.mark.parametrize("name", sorted(ODD))
def test_what_is_odd_runs_or_costs_one_line(name, files, tmp_path, noted):
    """In a process of its own: variables of any value, and commands and files that look wrong and
    are fine."""
    variables, line, message, *printed = ODD[name]
    before = what_is_there(tmp_path, files)
    words = [sys.executable, "-m", "branchgrpo.cli", *words_of(line, files)]
    done = commands.run(words, timeout=300, cwd=tmp_path, env=os.environ | variables)
    set_to = " ".join(f"{key}={value}" for key, value in variables.items())
    if message is None:
        assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
        assert all(text in done.stdout for text in printed), done.stdout
        noted(**row_of(name, line, files, variables=set_to))
        return
    assert done.returncode == 2, done.stdout
    check_line(done.stdout, message, files)
    assert what_is_there(tmp_path, files) == before
    noted(**row_of(name, line, files, done.stdout, "nothing written", set_to))


@pytest.mark.parametrize("name", ("short", "square", "text", "none"))
def test_a_reward_whose_first_answer_is_wrong(name, files, tmp_path, capfd, noted):
    "Nothing was trained, so the same folder takes the corrected command."
    words = words_of("train --config {f}/small.yaml --reward", files)
    own, output = f"{files / 'own.py'}:", ["--output", str(tmp_path / "run")]
    code, _, err = called(capfd, [*words, own + name, *output])
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("branchgrpo: ")]
    check_line(line + "\n", "reward: ", files)
    code, _, err = called(capfd, [*words, own + "ones", *output])
    assert code == 0, err
    happened = line.replace(str(files), "…")
    noted(
        f"a reward that returns {name}", happened, "the folder, for another reward", kind="inputs"
    )


@pytest.mark.fast
def test_every_command_has_bad_inputs():
    commands = {line.split()[0] for line, _ in BAD.values() if line.split()}
    assert len(BAD) >= 220 and set(cli.COMMANDS) <= commands
