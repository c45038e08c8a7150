"""The scripts and settings of the pages for GPU nodes; every command of theirs is parsed by test_prose."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from small import package_settings, requirements

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
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[1])[1].split(",")
    assert pip[0] == "-c constraints.txt" and set(extras) <= requirements().keys()
    assert f"'.[{','.join(extras)}]'" in TEXT
    python = next(entry for entry in table["dependencies"] if str(entry).startswith("python="))
    assert python.removeprefix("python=") in package_settings()["pythons"].split()
