"""The files of examples/ for GPUs, and the pages that show them; commands of the pages are parsed
by test_prose."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from small import package_settings, requirements

from branchgrpo import cli
from branchgrpo.cli import main
from branchgrpo.options import parse, parser_of
from branchgrpo.reproduction.command import given_parameters
from branchgrpo.reproduction.pages import jobs
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
from branchgrpo.yaml_files import parse_table, read_table

ROOT = Path(__file__).parents[1]
PAGES = [
    json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8"))
    for name in ("gpu_nodes", "gpu_memory")
]
CELLS = [cell for page in PAGES for cell in page["cells"] if cell["cell_type"] == "markdown"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS)


SETTINGS = sorted((ROOT / "examples").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "examples/slurm").glob("*.sh"))


def file_name(path: Path) -> str:
    return path.name


def test_the_page_shows_every_file():
    cells = [cell for cell in PAGES[0]["cells"] if cell["cell_type"] == "code"]
    shown = {
        file for cell in cells for file in re.findall(r'^shown\("(.*)"\)$', "".join(cell["source"]))
    }
    assert shown == {str(path.relative_to(ROOT / "examples")) for path in SETTINGS + SCRIPTS}
    outputs = [out.get("data", {}) for cell in cells for out in cell["outputs"]]
    texts = "".join("".join(data.get("text/markdown", [])) for data in outputs)
    for path in SETTINGS + SCRIPTS:
        assert path.read_text(encoding="utf-8") in texts, (
            f"run the page again: {path.name} has changed"
        )


def given_to_train(words: list[str]) -> TrainConfig:
    "Return the config of the words after `branchgrpo train`, as the command reads them."
    command = cli.COMMANDS["train"]
    given = parse(parser_of("branchgrpo train", "", command.classes(), command.config), words)
    return TrainConfig.from_dict(
        {key: given[key] for key in given.keys() & TrainConfig.__dataclass_fields__.keys()}
    )


@pytest.mark.parametrize("path", SETTINGS, ids=file_name)
def test_a_file_of_settings_is_taken_by_the_command(path):
    settings = resolve(given_to_train(["--config", str(path)]))
    table = read_table(path)
    # a value that a file gives is final
    assert {name: getattr(settings, name) for name in table} == table
    assert settings.lora_rank > 0 and settings.embeddings


def options_of(script: str) -> dict[str, str]:
    "Return what a script asks Slurm for."
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))


@pytest.mark.parametrize("path", SCRIPTS, ids=file_name)
def test_a_script_is_bash_and_sends_the_signal(path):
    script = path.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    options = options_of(script)
    assert options["signal"] == "USR2@600" and "time" in options and "gpus-per-node" in options
    if "torchrun" in script:
        call = next(line for line in script.splitlines() if line.startswith("srun"))
        assert f"--nnodes {options['nodes']} --nproc-per-node {options['gpus-per-node']} " in call


@pytest.mark.parametrize("path", SCRIPTS, ids=file_name)
def test_the_training_of_a_script_is_taken_by_the_command(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script = path.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^srun .* train (.*)$", script, re.M)
    settings, options = resolve(given_to_train(shlex.split(line))), options_of(script)
    assert settings.output == f"runs/{options['job-name']}"
    gpus = int(options.get("nodes", 1)) * int(options["gpus-per-node"])
    assert settings.prompts_per_iteration % gpus == 0, "each GPU has as many prompts"


def test_the_settings_given_by_set_are_merged():
    (text,) = re.findall(r"`--set '([^']*)'`", TEXT)
    job = jobs(["branchgrpo/table1"], "paper", ROOT / "reproduce", given=given_parameters((text,)))[
        0
    ]
    assert job.parameters["extra"]["lora_rank"] == 32 and job.parameters["extra"]["max_batch"] == 4


def test_conda_and_pip_install_the_same():
    table = parse_table((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = [entry["pip"] for entry in table["dependencies"] if isinstance(entry, dict)]
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[1])[1].split(",")
    assert pip[0] == "-c constraints.txt" and set(extras) <= requirements().keys()
    assert f"'.[{','.join(extras)}]'" in TEXT
    python = next(entry for entry in table["dependencies"] if str(entry).startswith("python="))
    assert python.removeprefix("python=") in package_settings()["pythons"].split()


def printed_by(page: str) -> str:
    "Return what the cells of a page have printed."
    cells = json.loads((ROOT / f"nbs/{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(line for output in outputs for line in output.get("text", []))


def test_the_pages_and_the_doctor_name_the_same_hours_and_memory(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = main(
        [
            "doctor",
            "--config",
            str(ROOT / "examples/flux_lora.yaml"),
            "--gpus",
            "8",
            "--gpu-memory",
            "85.5",
        ]
    )
    said = capsys.readouterr().out
    assert code == int("MISSING" in said)
    line = re.search(
        r"^ *8 GPUs, FLUX\S+ +adapter .*: +([\d.]+) GB each, +([\d.]+) hours",
        printed_by("gpu_nodes"),
        re.MULTILINE,
    )
    assert (
        f"{line[1]} of 85.5 GB on each of 8 GPUs" in said and f"{line[2]} hours on 8 GPUs" in said
    )
    speed = re.search(r"(\d+) TFLOP/s on every GPU", TEXT)[1]
    assert f"at {speed} TFLOP/s each" in said
    adapter = re.search(r"^6 an adapter .* ([\d.]+) GB", printed_by("gpu_memory"), re.MULTILINE)
    assert adapter[1] == line[1]


def test_the_pages_and_the_dry_run_name_the_same_hours_and_memory(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", "branchgrpo/table1", "--scale", "paper", "--dry-run"]) == 0
    said = capsys.readouterr().out
    ours = re.search(r"branchgrpo-FLUX\S+ .* 16 GPUs +([\d.]+) GB each.* ([\d.]+) hours", said)
    of_node = re.search(
        r"16 GPUs, FLUX\S+ +all weights sharding hybrid.*: +([\d.]+) GB each, +([\d.]+) hours",
        printed_by("gpu_nodes"),
    )
    assert f"takes {ours[1]} GB instead of {of_node[1]}" in TEXT, (ours[1], of_node[1])
    assert f"{ours[2]} hours instead of {of_node[2]}" in TEXT
