"""The command line: what it prints can be read back (what is wrong costs one line: faults/bad_inputs.yaml)."""

import argparse
import subprocess
import sys

import pytest
import yaml

from branchgrpo import cli, recipes
from branchgrpo.options import parser_of


def called(capsys, *words):
    "Run a command in this process; return its exit code, its output and its errors."
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_rank_above_the_width_of_the_layers(tmp_path, monkeypatch, capsys):
    "Known once the model is loaded; still nothing is written."
    monkeypatch.chdir(tmp_path)
    code, _, err = called(capsys, "train", "--lora-rank", "100000")
    assert code == 2
    assert err.splitlines()[-1].startswith("branchgrpo: lora_rank: 100000 is above 128")
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    code, _, err = called(capsys, "train", "--output", tmp_path / "file/run")
    assert code == 2
    assert err.startswith("branchgrpo: output: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_with_an_unknown_setting_or_a_wrong_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for table, message in (({"iteration": 3}, "config: "), ({"iterations": "many"}, "iterations: ")):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(table))
        code, _, err = called(capsys, "train", "--config", tmp_path / "run.yaml")
        assert code == 2
        assert err.startswith(f"branchgrpo: {message}")
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_printed_config_can_be_read_back(recipe, tmp_path, capsys):
    backbone = "tiny-sd" if recipe == "pro-grpo-sd" else "tiny-flux"
    code, printed, _ = called(capsys, "train", "--recipe", recipe, "--backbone", backbone, "--print-config")
    assert code == 0
    (tmp_path / "run.yaml").write_text(printed)
    code, again, _ = called(capsys, "train", "--config", tmp_path / "run.yaml", "--print-config")
    assert code == 0
    assert again == printed


def test_a_flag_overrides_the_file(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("iterations: 3\nseed: 5\n")
    words = ("--iterations", "7", "--config", tmp_path / "run.yaml", "--print-config")
    _, printed, _ = called(capsys, "train", *words)
    table = yaml.safe_load(printed)
    assert table["iterations"] == 7
    assert table["seed"] == 5


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_flag_has_a_help_text(name):
    command = cli.COMMANDS[name]
    assert command.run.__doc__
    parser = parser_of(name, command.run.__doc__, command.classes(), command.config)
    for action in parser._actions:
        assert action.help and action.help != argparse.SUPPRESS, action.dest


def test_every_command_shows_its_help(capsys):
    code, out, _ = called(capsys, "--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert f"\n  {name} " in out, name


HEAVY = "print([name for name in ('torch', 'diffusers', 'transformers', 'matplotlib') if name in sys.modules])"


@pytest.mark.parametrize("code", ["import branchgrpo", "from branchgrpo import cli; cli.main(['--help'])"])
def test_help_and_import_are_light(code):
    "In a fresh process: nothing that takes seconds is imported."
    words = [sys.executable, "-c", f"import sys; {code}; {HEAVY}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
