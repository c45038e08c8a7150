"""Notebooks are the source: they run, they are clean, and the modules are exactly what they export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
FOUND = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("reproduce/**/*.ipynb")]
NOTEBOOKS = sorted(path for path in FOUND if ".ipynb_checkpoints" not in path.parts)
LESSONS = [path for path in NOTEBOOKS if path.is_relative_to(ROOT / "nbs")]
TEMPLATES = [path for path in NOTEBOOKS if path not in LESSONS]


def name(path):
    return str(path.relative_to(ROOT))


TEST = """
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
config = get_config(Path.cwd())
passed, _ = test_nb(Path(sys.argv[1]), skip_flags=config.tst_flags.split(), basepath=config.config_path)
sys.exit(not passed)
"""


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_lesson(path):
    "As nbdev-test does; in a process where the libraries are imported already, but nothing of branchgrpo."
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = run([sys.executable, "-c", TEST, path], cwd=ROOT / "nbs", env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]


def exported(folder):
    "The exported modules below `folder`, by path."
    paths = [path for path in (folder / "branchgrpo").rglob("*.py") if path.name not in ("__init__.py", "_modidx.py")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture
def copy(tmp_path):
    for part in ("nbs", "branchgrpo"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    for file in ("pyproject.toml", "settings.ini", "README.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def out_of_sync(folder):
    "Modules that differ from a fresh export of the notebooks in `folder`."
    before = exported(folder)
    for path in before:
        (folder / path).unlink()
    subprocess.run([BIN / "nbdev-export"], cwd=folder, check=True, capture_output=True)
    after = exported(folder)
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def test_modules_are_in_sync(copy):
    assert out_of_sync(copy) == []


def test_a_hand_edit_and_a_stray_module_are_found(copy):
    with open(copy / "branchgrpo/plan.py", "a") as f:
        f.write("\nextra = 1\n")
    (copy / "branchgrpo/stray.py").write_text("x = 1\n")
    assert out_of_sync(copy) == ["branchgrpo/plan.py", "branchgrpo/stray.py"]


def test_notebooks_are_clean(copy):
    shutil.copytree(ROOT / "reproduce", copy / "reproduce", dirs_exist_ok=True)
    for folder in ("nbs", "reproduce"):
        subprocess.run([BIN / "nbdev-clean", "--fname", folder], cwd=copy, check=True, capture_output=True)
    changed = [name(path) for path in NOTEBOOKS if path.read_text() != (copy / name(path)).read_text()]
    assert changed == [], "run make clean-notebooks"


def test_notebooks_are_small():
    assert [name(path) for path in NOTEBOOKS if path.stat().st_size >= 200_000] == []


def cells(path):
    return json.loads(path.read_text())["cells"]


def opens_well(path):
    "Return whether a notebook begins with a title and a sentence."
    first = cells(path)[0]
    text = "".join(first["source"])
    return first["cell_type"] == "markdown" and text.startswith("# ") and "\n> " in text


def test_notebooks_open_with_a_title_and_a_sentence():
    assert [name(path) for path in LESSONS if not opens_well(path)] == []


def test_pages_have_no_outputs():
    assert [name(path) for path in TEMPLATES if any(cell.get("outputs") for cell in cells(path))] == []


def test_every_notebook_names_its_kernel():
    "JupyterLab and papermill ask for a kernel where a notebook names none."
    kernels = {path: json.loads(path.read_text())["metadata"].get("kernelspec", {}).get("name") for path in NOTEBOOKS}
    assert {path for path, kernel in kernels.items() if kernel != "python3"} == set()
