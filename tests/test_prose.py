"""Every command in prose is one: in README.md, the project's other texts, and every notebook's
cells of text.

Each is parsed as the program would do it; those that are cheap are run, with small numbers."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from slow import often
from torch.distributed.run import get_args_parser as torchrun_parser

from branchgrpo import cli
from branchgrpo.options import parse, parser_of
from branchgrpo.reproduction.command import (
    PageOptions,
    SlurmOptions,
    check_options,
    given_parameters,
)
from branchgrpo.reproduction.pages import jobs
from branchgrpo.reproduction.slurm import sbatch_options
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")]
NOTEBOOKS = [
    path for folder in ("nbs", "reproduce") for path in sorted((ROOT / folder).rglob("*.ipynb"))
]
PROGRAMS = (
    "branchgrpo|make|python|accelerate launch|torchrun|srun|jupyter|pip|ruff|pytest|nbdev-[a-z-]+"
)
COMMAND = re.compile(
    rf"(?:\$ )?((?:\w+=\S+ )*(?:srun .*?)?(?:\.venv/bin/)?(?:{PROGRAMS})(?: .*)?)$"
)
FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
STANDS_FOR = {"recipes": "branchgrpo", "reproduce": "quickstart"}  # what NAME, PAGE or … may be
SMALL = "--iterations 1 --prompts-per-iteration 1 --evaluate-every 0 --tracker none"


def commands_in(text):
    """Return the commands of a text of Markdown: lines of blocks, indented lines, and code within a
    line."""
    text = text.replace("\\\n", " ")
    lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
    rest = FENCED.sub("", text)
    lines += [line for line in rest.splitlines() if line.startswith("    ")]
    lines += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", rest) if " " in code]
    found = [COMMAND.match(line.strip()) for line in lines]
    return [" ".join(match[1].split("  #")[0].split(" # ")[0].split()) for match in found if match]


def collected():
    "Return every command, with the first file that has it."
    texts = [(path, path.read_text(encoding="utf-8")) for path in TEXTS]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts += [
            (path, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown"
        ]
    found = {}
    for path, text in texts:
        for command in commands_in(text):
            found.setdefault(command, str(path.relative_to(ROOT)))
    return found


FOUND = collected()


def words_of(command):
    """Return the words of a command as the shell would give them: no variables before it, nothing
    after > or |."""
    words = shlex.split(command, comments=True)
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    ends = [place for place, word in enumerate(words) if word in (">", "|", "&&", ";")]
    return words[: ends[0]] if ends else words


def ours(words):
    """Return the words after `branchgrpo`, with names for what stands for one; None if it is no
    command of ours."""
    for program in ("branchgrpo", "branchgrpo.cli"):
        if program in words and (program == "branchgrpo.cli" or Path(words[0]).name == program):
            words = words[words.index(program) + 1 :]
            name = STANDS_FOR.get(words[0] if words else "", "")
            return [name if word in ("NAME", "PAGE", "…") else word for word in words]
    return None


OURS = {
    shlex.join(found): command
    for command in FOUND
    if (found := ours(words_of(command))) is not None
}
MAKE = {
    target for command in FOUND if command.startswith("make ") for target in words_of(command)[1:]
}
OTHERS = [
    command
    for command in FOUND
    if ours(words_of(command)) is None and not command.startswith("make ")
]


def test_commands_are_found():
    text = (
        "Run `branchgrpo tarin`, or `branchgrpo`:\n```\nA=1 make all  # all\nsee\n```\n   "
        " branchgrpo view \\\n   x\n"
    )
    assert commands_in(text) == ["A=1 make all", "branchgrpo view x", "branchgrpo tarin"]
    assert ours(["accelerate", "launch", "-m", "branchgrpo.cli", "train"]) == ["train"]
    assert {"README.md", "CONTRIBUTING.md", "nbs/faq.ipynb", "nbs/viewing/03_page.ipynb"} <= set(
        FOUND.values()
    )
    assert len(OURS) > 20 and len(MAKE) > 8


def given_by(line):
    "Return what a command of ours is given. Raises `ValueError` if a word or a value is wrong."
    name, *words = shlex.split(line)
    command = cli.COMMANDS[name]
    return parse(parser_of(f"branchgrpo {name}", "", command.classes(), command.config), words)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands speak of: runs, the method of README.md, the files of
    examples/."""
    folder = tmp_path_factory.mktemp("prose")
    (folder / "figures").symlink_to(ROOT / "figures")
    (folder / "examples").symlink_to(ROOT / "examples")
    block = re.search(
        r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[1]
    (folder / re.search(r"(\S+\.yaml), for", block)[1]).write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", *SMALL.split(), "--output", "runs/demo"]) == 0
    for name in ("a", "b", "flux", "flux-16"):
        shutil.copytree(folder / "runs/demo", folder / "runs" / name)
    return folder


SHOWS = ("", "--help", "--version")
# others take minutes
RUN = {"recipes", "rewards", "completion", "doctor", "view", "sample", "train", "reproduce"}


def test_every_command_of_ours_is_valid(place, monkeypatch):
    monkeypatch.chdir(place)
    assert {
        line.split()[0] for line in OURS if line.endswith("--help") and line != "--help"
    } <= set(cli.COMMANDS)
    for line in OURS:
        if line.split(" ")[0] in SHOWS or line.endswith("--help"):
            continue
        given = given_by(line)
        if line.split()[0] in ("train", "doctor"):
            known = given.keys() & TrainConfig.__dataclass_fields__.keys()
            try:
                resolve(TrainConfig.from_dict({name: given[name] for name in known}))
            except ValueError as error:
                # a model of the hub that no family here knows: the command is right
                assert "could not be fetched" in str(error)
        if line.startswith("reproduce "):
            kinds = (PageOptions, SlurmOptions)
            pages, slurm = (
                kind(**{k: given[k] for k in given.keys() & kind.__dataclass_fields__})
                for kind in kinds
            )
            check_options(pages, slurm)
            sbatch_options(slurm.slurm_options)
            jobs(
                list(pages.names),
                pages.scale,
                ROOT / "reproduce",
                given=given_parameters(pages.set),
            )


def smaller(line):
    "Return a command with small numbers, which does in seconds what the command does."
    name, *words = shlex.split(line)
    if name == "train":
        replaced = [*SMALL.split(), "--output", "runs/other"]
        for flag in replaced:  # a flag that is given twice is a warning
            if flag.startswith("--") and flag in words:
                place = words.index(flag)
                del words[place : place + 2]
        return [name, *words, *replaced]
    if name == "reproduce":
        words = [word for word in words if word != "--redraw"]  # tests/test_figures.py draws
        return [
            name,
            *words,
            "--folder",
            str(ROOT / "reproduce"),
            *([] if "--dry-run" in words else ["--dry-run"]),
        ]
    return [name, *words]


def runs(line):
    """Return whether a command is run, too: it is cheap and needs no weights that are not in the
    package."""
    name = line.split(" ")[0]
    # a name alone, of a command that wants more
    if line in ("view", "train", "sample", "reproduce"):
        return False
    large = "--slurm" in line or (
        name == "train"
        and re.search(
            r"--backbone [\w-]+/|--config examples/|--reward (server:|yes-no:|ocr )", line
        )
    )
    return name in {*SHOWS, *RUN} and not large and "FOLDER" not in line


CHEAP = sorted(filter(runs, OURS))
CHOSEN = {line.split(" ")[0]: line for line in reversed(CHEAP)}.values()  # one of each command


@pytest.mark.parametrize("line", often(CHEAP, CHOSEN))
def test_every_cheap_command_runs(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = [] if not line else smaller(line)
    if "--help" in words:
        with pytest.raises(SystemExit) if len(words) > 1 else pytest.MonkeyPatch.context():
            assert cli.main(words) == 0
    else:
        for old in (place / "runs").glob("other*"):  # with a number behind it, of several seeds
            shutil.rmtree(old)
        code = cli.main(words)
        said = capsys.readouterr()
        # 1: something is missing
        assert code == 0 or line.startswith("doctor") and code == 1 and said.out, said.err


def test_every_make_target_is_there():
    done = subprocess.run(["make", "-n", *sorted(MAKE)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_start_by_accelerate_or_torchrun_is_valid():
    "Their own parsers take the words before ours."
    torchruns = [words_of(command) for command in FOUND if re.search(r"\btorchrun .*-m ", command)]
    assert torchruns, "on several nodes"
    for words in torchruns:
        given = torchrun_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert given.training_script == "branchgrpo.cli" and given.module
    starts = [words_of(command) for command in FOUND if "launch" in command.split()]
    for words in (words[words.index("launch") + 1 :] for words in starts):
        if words:
            given = launch_command_parser().parse_args(words)
            assert given.training_script == "branchgrpo.cli" and given.module


def test_every_other_command_has_its_program_and_files():
    for command in OTHERS:
        words = [word for word in words_of(command) if "…" not in word]
        program = Path(words[0]).name
        if program in ("srun", "pip"):  # of a cluster; of every environment
            continue
        assert shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(
            program
        ), command
        files = [
            word
            for word in words[1:]
            if re.fullmatch(r"[\w./-]+\.(py|ipynb|md|txt)", word) or word == "nbs"
        ]
        assert all((ROOT / file).exists() for file in files), command
        assert files or words[1:3] != ["-m", "pytest"], command
