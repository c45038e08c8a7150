"""Every command of the pages for GPU nodes is parsed by the program that it calls."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from branchgrpo.cli import COMMANDS
from branchgrpo.files import parse_table
from branchgrpo.options import parse, parser_of
from branchgrpo.reproduction.command import PageOptions, SlurmOptions, check_options, given_parameters
from branchgrpo.reproduction.pages import jobs
from branchgrpo.reproduction.slurm import sbatch_options
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
PAGES = [json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8")) for name in ("gpu_nodes", "gpu_memory")]
CELLS = [cell for page in PAGES for cell in page["cells"] if cell["cell_type"] == "markdown"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS)


def blocks(kind: str = "") -> list[str]:
    "Return the blocks of code of one kind in the pages' text."
    text = TEXT.replace("\\\n", " ")  # a long command is several lines
    return [code for of, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if of == kind]


SCRIPTS = blocks("bash")
LINES = [line for text in (*blocks(), *SCRIPTS) for line in text.splitlines() if line and not line.startswith("#")]
INLINE = re.findall(r"`(branchgrpo [a-z]+ --[^`]*)`", TEXT)
CALLS = [line for line in (*LINES, *INLINE) if re.search(r"\b(branchgrpo|torchrun|accelerate)\b", line)]


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    "The pages' file of settings, in the current folder."
    monkeypatch.chdir(tmp_path)
    Path("flux.yaml").write_text(blocks("yaml")[0])


def launched(words: list[str]) -> tuple[list[str], int]:
    "Return the words after the launcher, as it understands them, and its number of processes."
    if words[0] == "torchrun":
        run = get_args_parser().parse_args(words[1:])
        assert run.module and run.training_script == "branchgrpo.cli"
        return run.training_script_args, int(run.nnodes.split(":")[-1]) * int(run.nproc_per_node)
    if words[:2] == ["accelerate", "launch"]:
        run = launch_command_parser().parse_args(words[2:])
        assert run.module and run.multi_gpu and run.training_script == "branchgrpo.cli"
        return run.training_script_args, run.num_processes
    assert words[0] == "branchgrpo", words
    return words[1:], 1


def checked(words: list[str], gpus: int) -> None:
    "Check the words of a command of ours: its options, and what they mean together."
    command = COMMANDS[words[0]]
    given = parse(parser_of("branchgrpo", "", command.classes(), command.config), words[1:])
    if words[0] == "train":
        given.pop("print_config", None)
        s = resolve(TrainConfig.from_dict(given))
        assert s.prompts_per_iteration * s.ranks_per_prompt % gpus == 0
    if words[0] == "reproduce":
        pages = PageOptions(**{name: given[name] for name in given if name in PageOptions.__dataclass_fields__})
        slurm = SlurmOptions(**{name: given[name] for name in given if name in SlurmOptions.__dataclass_fields__})
        check_options(pages, slurm)
        sbatch_options(slurm.slurm_options)
        assert jobs(list(pages.names), pages.scale, ROOT / "reproduce", given=given_parameters(pages.set))


def test_every_command_is_parsed_and_all_kinds_of_starts_are_there():
    for line in CALLS:
        words = shlex.split(line)
        start = next(i for i, word in enumerate(words) if word in ("branchgrpo", "torchrun", "accelerate"))
        checked(*launched(words[start:]))
    starts = {re.search(r"\b(branchgrpo [a-z]+|torchrun|accelerate launch)", line)[1] for line in CALLS}
    assert starts >= {"torchrun", "accelerate launch", "branchgrpo train", "branchgrpo doctor", "branchgrpo reproduce"}
    assert len(CALLS) > 12 and len(SCRIPTS) == 2


def test_other_programs_are_known():
    known = {"python", "python3", ".venv/bin/pip", "conda", "export", "hf", "tail", "source", "srun", "if"}
    first = {re.split(r"[ =]", line)[0] for line in LINES} - {"branchgrpo", "torchrun", "accelerate", "head"}
    assert first <= known, first - known
    for line in LINES:
        if line.startswith("python tests"):
            assert (ROOT / shlex.split(line)[1]).is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=["one GPU", "several nodes"])
def test_a_script_is_bash_and_sends_the_signal(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    assert options["signal"] == "USR2@600" and "time" in options and "gpus-per-node" in options
    if "torchrun" in script:
        call = next(line for line in script.splitlines() if "torchrun" in line)
        assert f"--nnodes {options['nodes']} --nproc-per-node {options['gpus-per-node']} " in call


def test_a_wrong_flag_is_refused():
    with pytest.raises(ValueError, match="max-bach"):
        checked(["train", "--config", "flux.yaml", "--max-bach", "4"], 1)


def test_the_settings_given_by_set_are_merged():
    (text,) = re.findall(r"`--set '([^']*)'`", TEXT)
    job = jobs(["branchgrpo/table1"], "paper", ROOT / "reproduce", given=given_parameters((text,)))[0]
    assert job.parameters["extra"]["lora_rank"] == 32 and job.parameters["extra"]["max_batch"] == 4


def test_conda_and_pip_install_the_same():
    table = parse_table((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = [entry["pip"] for entry in table["dependencies"] if isinstance(entry, dict)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[1])[1].split(",")
    assert pip[0] == "-c constraints.txt" and set(extras) <= project["optional-dependencies"].keys()
    assert f"'.[{','.join(extras)}]'" in TEXT
    python = next(entry for entry in table["dependencies"] if str(entry).startswith("python="))
    assert f"Programming Language :: Python :: {python.removeprefix('python=')}" in project["classifiers"]
