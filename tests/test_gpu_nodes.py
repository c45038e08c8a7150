"""The scripts and settings of the pages for GPU nodes; every command of theirs is parsed by test_prose."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from branchgrpo.cli import main
from branchgrpo.files import parse_table
from branchgrpo.reproduction.command import given_parameters
from branchgrpo.reproduction.pages import jobs

ROOT = Path(__file__).parents[1]
PAGES = [json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8")) for name in ("gpu_nodes", "gpu_memory")]
CELLS = [cell for page in PAGES for cell in page["cells"] if cell["cell_type"] == "markdown"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS)


def blocks(kind: str = "") -> list[str]:
    "Return the blocks of code of one kind in the pages' text."
    text = TEXT.replace("\\\n", " ")  # a long command is several lines
    return [code for of, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if of == kind]


SCRIPTS = blocks("bash")


@pytest.mark.parametrize("script", SCRIPTS, ids=["one GPU", "several nodes"])
def test_a_script_is_bash_and_sends_the_signal(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    assert options["signal"] == "USR2@600" and "time" in options and "gpus-per-node" in options
    if "torchrun" in script:
        call = next(line for line in script.splitlines() if "torchrun" in line)
        assert f"--nnodes {options['nodes']} --nproc-per-node {options['gpus-per-node']} " in call


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


def printed_by(page: str) -> str:
    "Return what the cells of a page have printed."
    cells = json.loads((ROOT / f"nbs/{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(line for output in outputs for line in output.get("text", []))


def test_the_pages_and_the_doctor_name_the_same_hours_and_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "flux.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    code = main(["doctor", "--config", str(tmp_path / "flux.yaml"), "--gpus", "8", "--gpu-memory", "85.5"])
    said = capsys.readouterr().out
    assert code == int("MISSING" in said)
    line = re.search(
        r"^ *8 GPUs, adapter .*: +([\d.]+) GB each, +([\d.]+) hours", printed_by("gpu_nodes"), re.MULTILINE
    )
    assert f"{line[1]} of 85.5 GB on each of 8 GPUs" in said and f"{line[2]} hours on 8 GPUs" in said
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
        r"16 GPUs, all weights sharding hybrid.*: +([\d.]+) GB each, +([\d.]+) hours", printed_by("gpu_nodes")
    )
    assert f"takes {ours[1]} GB instead of {of_node[1]}" in TEXT, (ours[1], of_node[1])
    assert f"{ours[2]} hours instead of {of_node[2]}" in TEXT
