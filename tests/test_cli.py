"""The command line: what it prints can be read back (what is wrong costs one line:
faults/bad_inputs.yaml)."""

import argparse
import contextlib
import errno
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading

import pytest
from commands import run
from slow import often

import branchgrpo
from branchgrpo import cli, recipes
from branchgrpo.backbones.declarations import declared
from branchgrpo.backbones.names import family
from branchgrpo.backbones.published import PUBLISHED
from branchgrpo.machine.counting import meta_pipeline
from branchgrpo.messages import docstring_text
from branchgrpo.options import parse, parser_of
from branchgrpo.settings import RETIRED
from branchgrpo.yaml_files import parse_table


def called(capsys, *words):
    "Run a command in this process; return its exit code, its output and its errors."
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_printed_config_can_be_read_back(tmp_path, capsys):
    for recipe in recipes.names():
        backbone = "tiny-sd" if recipe == "pro-grpo-sd" else "tiny-flux"
        code, printed, _ = called(
            capsys, "train", "--recipe", recipe, "--backbone", backbone, "--print-config"
        )
        assert code == 0
        (tmp_path / "run.yaml").write_text(printed)
        code, again, _ = called(
            capsys, "train", "--config", tmp_path / "run.yaml", "--print-config"
        )
        assert (code, again) == (0, printed)


@pytest.mark.parametrize("words", [("--prompts", "pickapic"), ("--backbone", "someone/model")])
def test_the_doctor_does_not_wait_for_a_hub_that_is_silent(tmp_path, words):
    """It asks once, for two seconds, and then takes what is on this machine; the hub's libraries
    ask five times."""
    asked, stays = [], socket.create_server(("127.0.0.1", 0))

    def accept():
        with contextlib.suppress(OSError):
            while True:
                asked.append(stays.accept())

    threading.Thread(target=accept, daemon=True).start()
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{stays.getsockname()[1]}", "HF_HOME": str(tmp_path)}
    place |= {"NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    found = run(
        [sys.executable, "-m", "branchgrpo.cli", "doctor", *words],
        env=os.environ | place | {"HF_HUB_OFFLINE": "0"},
    )
    stays.close()
    assert len(asked) == 1
    lines = [
        line for line in found.stdout.splitlines() if words[1] in line or "yuvalkirstain" in line
    ]
    assert len(lines) == 1 and ("MISSING" in lines[0] or found.returncode == 2), found.stdout


def test_every_flag_has_a_help_text():
    for name, command in cli.COMMANDS.items():
        assert command.run.__doc__
        parser = parser_of(name, docstring_text(command.run), command.classes(), command.config)
        for action in parser._actions:
            said = action.help and not action.help.startswith(" [")  # more than its default
            assert said and (action.help != argparse.SUPPRESS or action.dest in RETIRED), (
                action.dest
            )


def test_a_setting_that_is_gone_is_ignored_with_one_line(tmp_path, capsys):
    "On the command line and in a file of an earlier version."
    (tmp_path / "run.yaml").write_text("iterations: 3\nretain: 7\n")
    for words in (("--retain", "7"), ("--config", tmp_path / "run.yaml")):
        with pytest.warns(UserWarning, match="retain: this setting is gone and is ignored"):
            code, printed, _ = called(capsys, "train", *words, "--print-config")
        assert code == 0 and "retain" not in parse_table(printed)


CALLS = """
import contextlib, io, json, sys
from branchgrpo import cli
said = {}
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(words)
    slow = ("torch", "numpy", "diffusers", "transformers", "matplotlib")
    heavy = [name for name in slow if name in sys.modules]
    said[" ".join(words)] = [out.getvalue(), heavy]
print(json.dumps(said))
"""


def test_help_and_lists_are_light():
    """In a fresh process: nothing that takes seconds is imported, whichever command says what it
    does."""
    lines = [[], ["--help"], ["--version"], ["recipes"], ["recipes", "--json"]]
    lines += [[name, "--help"] for name in cli.COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(lines)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (
        len(said) == len(lines) and said["--version"][0] == f"branchgrpo {branchgrpo.__version__}\n"
    )
    assert {line: heavy for line, (_, heavy) in said.items() if heavy} == {}
    assert all(text for text, _ in said.values())
    for name in cli.COMMANDS:
        assert said[f"{name} --help"][0].startswith(f"usage: branchgrpo {name} [options]")
        assert f"\n  {name} " in said["--help"][0]


def test_alone_it_says_what_to_do_next(capsys):
    "Three lines that can be typed as they are, then the commands."
    code, said, _ = called(capsys)
    assert code == 0
    first, _, rest = said.partition("\n\n")
    lines = [shlex.split(line.split("  ")[0]) for line in first.splitlines()]
    assert len(lines) == 3 and rest == cli.overview() + "\n"
    for program, name, *words in lines:
        command = cli.COMMANDS[name]
        assert program == "branchgrpo"
        # raises if a word is none
        parse(parser_of(name, "", command.classes(), command.config), words)


PIPED = [
    "",
    "--help",
    "train --help",
    "recipes",
    "recipes branchgrpo",
    "rewards",
    "models",
    "prompts",
    "nonsense",
]


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "line by line"])
@pytest.mark.parametrize("words", often(PIPED, ("recipes", "nonsense")))
def test_a_reader_that_has_ended_ends_the_command_silently(words, buffered):
    "As in `branchgrpo recipes | head -1`: `head` may have ended before the first line is printed."
    reader, writer = os.pipe()
    os.close(reader)
    command = [
        sys.executable,
        *([] if buffered else ["-u"]),
        "-m",
        "branchgrpo.cli",
        *words.split(),
    ]
    wrong = words == "nonsense"  # it prints on standard error, so that one is the pipe
    streams = (
        {"stdout": subprocess.PIPE, "stderr": writer}
        if wrong
        else {"stdout": writer, "stderr": subprocess.PIPE}
    )
    done = subprocess.run(command, text=True, **streams)
    os.close(writer)
    assert done.returncode == 141, done.stderr  # what a shell says of a command that SIGPIPE ended
    assert not done.stdout and not done.stderr


def test_a_broken_connection_is_no_reader_that_has_ended(monkeypatch, tmp_path):
    "An error of a socket is not taken for a pipe of what is printed, and is not silent."

    def lost(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli, "run_words", lost)
    with (
        open(tmp_path / "out", "w") as out,
        contextlib.redirect_stdout(out),
        pytest.raises(BrokenPipeError),
    ):
        cli.main(["recipes"])


LISTS = [("recipes",), ("recipes", "pro-grpo"), ("rewards",), ("models",), ("prompts",)]


@pytest.mark.parametrize("words", LISTS, ids=str)
def test_json_says_what_the_text_says(words, capsys):
    code, text, error = called(capsys, *words)
    assert code == 0, error
    code, said, error = called(capsys, *words, "--json")
    assert code == 0, error
    table = json.loads(said, parse_constant=pytest.fail)  # no NaN, no Infinity
    if len(words) == 1:
        assert [row["name"] for row in table] == [line.split()[0] for line in text.splitlines()]
        assert all((row.get("summary") or row["about"]) in text for row in table)
        assert all((row.get("where") or "") in text for row in table)
    else:
        sources = {one["source"] for one in table["values"].values()} - {"off"}
        assert sources and all(source in text for source in sources)


SHOWN = {
    "rewards hps-v2.1": (
        "hps-v2.1: HPS-v2.1: cosine",
        "xswu/HPSv2",
        "3.95 GB",
        "branchgrpo train --reward hps-v2.1",
    ),
    "rewards 0.5*tiny-clip+motion": ("tiny-clip: CLIP score", "motion: exact motion check"),
    "models tiny-wan": ("tiny-wan: a small Wan: clips", "WanPolicy", "32 × 32 pixels, 9 frames"),
    "models black-forest-labs/FLUX.1-dev": (
        "11.9 billion",
        "huggingface.co",
        "1024 × 1024 pixels\n",
        "guidance   3.5",
    ),
    "prompts digit-pairs": (
        "captions of two digits",
        "2000 to train on, 256 to test on",
        "by an exact checker",
    ),
}


@pytest.mark.parametrize("words", SHOWN)
def test_a_name_alone_shows_one(words, capsys):
    "What is known of it, and the command that uses it; the same as JSON."
    code, text, _ = called(capsys, *words.split())
    assert code == 0 and all(part in text for part in SHOWN[words]), text
    assert "branchgrpo train --" in text
    _, said, _ = called(capsys, *words.split(), "--json")
    for row in json.loads(said):
        assert f"{row['name']}: {row['about']}" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("rewards tiny-clop", "reward: 'tiny-clop' is not one of .*did you mean 'tiny-clip'"),
        ("models tiny-flix", "backbone: 'tiny-flix' is not one of .*did you mean 'tiny-flux'"),
        ("prompts digit-pair", "prompts: 'digit-pair' is not one of .*did you mean 'digit-pairs'"),
    ],
)
def test_a_name_that_nobody_has_is_one_line(words, line, capsys):
    code, _, said = called(capsys, *words.split())
    assert code == 2 and re.match(f"branchgrpo: {line}", said) and said.count("\n") == 1, said


@pytest.mark.parametrize("name", often(list(PUBLISHED), ("black-forest-labs/FLUX.1-dev",)))
def test_the_parameters_in_the_list_of_models_are_counted(name):
    denoiser = getattr(meta_pipeline(name), declared(family(name), "component"))
    counted = sum(parameter.numel() for parameter in denoiser.parameters()) / 1e9
    assert PUBLISHED[name].billions == pytest.approx(counted, rel=5e-3)


REFUSED = {
    "advantage: nobody": "advantage: 'nobody' is not one of",
    "advantage: nowhere.py:loo": "advantage: '.*/nowhere.py:loo': there is no file",
    "previews: x0\n  advantage: gains\n  preview_at: []": "preview_at: .. leaves no latent",
    "group_selection: best\n  group_keep: 99": "group_keep: 99 is not within",
}


@pytest.mark.parametrize("values", REFUSED)
def test_recipes_refuses_what_train_refuses(values, tmp_path, capsys):
    "In the same line, on the model that train takes or on another one."
    file = tmp_path / "mine.yaml"
    file.write_text(f"values:\n  {values}\n")
    for model in ((), ("--backbone", "tiny-sd3")):
        lines = []
        for words in (("recipes", file), ("train", "--recipe", file, "--output", tmp_path / "run")):
            code, _, said = called(capsys, *words, *model)
            assert code == 2
            lines.append(said)
        assert lines[0] == lines[1]
        assert re.match(f"branchgrpo: {REFUSED[values]}", lines[0]), lines[0]


def test_recipes_checks_on_the_model_that_is_named(tmp_path, capsys):
    """A transition of flows alone is refused on a diffusion model, and a recipe of one's own that
    fits is printed."""
    (tmp_path / "mine.yaml").write_text("values: {preview_levels: even}\n")
    assert called(capsys, "recipes", tmp_path / "mine.yaml")[0] == 0
    code, _, said = called(capsys, "recipes", tmp_path / "mine.yaml", "--backbone", "tiny-sd")
    assert code == 2 and "preview_levels: 'even' is not grid, as a diffusion model needs" in said


def test_the_seed_stands_under_the_run(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = capsys.readouterr().out
    section = said.partition("The run:\n")[2].partition("\n\n")[0]
    assert "--seed" in section and said.count("The run:") == 1


def test_the_doctor_speaks_json(capsys):
    "The settings, the findings and the costs of its text, as one table."
    words = ("doctor", "--gpus", 2, "--iterations", 7)
    _, text, _ = called(capsys, *words)
    code, said, _ = called(capsys, *words, "--json")
    assert code == 0
    table = json.loads(said, parse_constant=pytest.fail)
    assert table["branchgrpo"] == branchgrpo.__version__
    assert table["settings"]["iterations"] == 7
    assert (
        table["costs"]["gpus"] == 2 and table["costs"]["fits"] and table["costs"]["fits_with"] == {}
    )
    assert (
        f"{table['costs']['calls']} calls, {table['costs']['trained_calls']} trained calls" in text
    )
    for found in table["found"]:
        assert found["what"] in text and found["note"] in text
    assert table["verify"] == []


def test_every_shell_has_a_script(capsys):
    for shell in ("bash", "zsh", "fish", "tcsh"):
        code, script, _ = called(capsys, "completion", shell)
        assert code == 0 and all(name in script for name in (*cli.COMMANDS, "mixgrpo-flash")), shell
