"""Notebooks are the source: they run, they are clean, and the modules are exactly what they export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
NOTEBOOKS = sorted(
    p for p in [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("reproduce/**/*.ipynb")] if ".ipynb_checkpoints" not in str(p)
)
LESSONS = [p for p in NOTEBOOKS if p.is_relative_to(ROOT / "nbs")]
name = lambda p: str(p.relative_to(ROOT))


TEST = """import sys; from pathlib import Path; from nbdev.config import get_config; from nbdev.test import test_nb
config = get_config(Path.cwd())
sys.exit(not all([test_nb(Path(f), skip_flags=config.tst_flags.split(), basepath=config.config_path)[0] for f in sys.argv[1:]]))"""


@pytest.mark.parametrize("part", range(8))
def test_lessons_run(part):
    """As nbdev-test does; in parts, so that the processes of the suite share them."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", TEST, *map(str, LESSONS[part::8])],
        cwd=ROOT / "nbs",
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def exported(folder):
    return {
        str(p.relative_to(folder)): p.read_text()
        for p in (folder / "branchgrpo").rglob("*.py")
        if p.name != "__init__.py"
    }


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
    return sorted(
        k for k in before.keys() | after.keys() if before.get(k) != after.get(k) and not k.endswith("_modidx.py")
    )


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
    assert [name(p) for p in NOTEBOOKS if p.read_text() != (copy / name(p)).read_text()] == [], (
        "run make clean-notebooks"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_is_small(path):
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_lesson_opens_with_a_title_and_a_sentence(path):
    cells = json.loads(path.read_text())["cells"]
    first = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and first.startswith("# ") and "\n> " in first
    for cell in cells:
        source = "".join(cell["source"])
        if source.startswith("#| export"):
            assert source.count("\n") <= 42, source[:80]


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p not in LESSONS], ids=name)
def test_template_has_no_outputs(path):
    assert not any(cell.get("outputs") for cell in json.loads(path.read_text())["cells"])
