"""Notebooks are the source: they run, they are clean, and the modules are exactly what they
export."""

import base64
import builtins
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import pytest
from commands import preloaded
from fastcore.nbio import md_frontmatter
from nbdev import test as nbdev_test
from nbdev.config import get_config

from branchgrpo.registry import Registry, installed_in
from branchgrpo.reproduction import workers

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
FOUND = [*ROOT.glob("nbs/**/*.ipynb"), *ROOT.glob("reproduce/**/*.ipynb")]
NOTEBOOKS = sorted(path for path in FOUND if ".ipynb_checkpoints" not in path.parts)
LESSONS = [path for path in NOTEBOOKS if path.is_relative_to(ROOT / "nbs")]
INSTALLED = (sys.prefix, sys.base_prefix, str(ROOT))
FLAGS = get_config(ROOT).tst_flags.split()
NIGHTLY = "nightly"  # the flag of cells that take long; `make slow` runs them
TEMPLATES = [path for path in NOTEBOOKS if path not in LESSONS]
LONG = [path for path in LESSONS if f"#| {NIGHTLY}" in path.read_text(encoding="utf-8")]


def name(path):
    return str(path.relative_to(ROOT))


def registries():
    "The registries of all modules that are imported."
    modules = [
        module for name, module in sys.modules.items() if name.partition(".")[0] == "branchgrpo"
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Registry)
    ]


@pytest.fixture
def as_before():
    """Take back what a lesson changes in this process: variables, registries, its own modules,
    figures, warnings."""
    known = [(registry, dict(registry.entries)) for registry in registries()]
    variables, folders, modules = dict(os.environ), list(sys.path), dict(sys.modules)
    known_builtins = set(vars(builtins))
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.resetwarnings()  # the suite's filters hide what a lesson shows
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        # the package's own filter, which is undone here: torch takes a slower rms_norm in bf16 on a
        # CPU
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
        yield
    plt.close("all")
    plt.switch_backend("agg")
    for registry, entries in known:
        registry.entries = entries
    sys.path[:], sys.modules["__main__"] = folders, modules["__main__"]
    installed_in.cache_clear()  # a lesson may have installed a package of its own
    for module in sys.modules.keys() - modules.keys():
        if not (getattr(sys.modules[module], "__file__", None) or sys.prefix).startswith(INSTALLED):
            del sys.modules[module]  # a file that the lesson wrote
    # of IPython: what asks for them believes to be in a notebook
    for added in set(vars(builtins)) - known_builtins:
        delattr(builtins, added)
    os.environ.clear()
    os.environ.update(variables)


@pytest.fixture
def run_lesson(as_before, monkeypatch):
    """Run the cells of a lesson, as nbdev-test does, in this process: run_lesson(path, flags).

    Its workers are fresh processes that need not import the libraries again.
    """
    contexts = SimpleNamespace(get_context=lambda _: preloaded())
    monkeypatch.setattr(workers, "multiprocessing", contexts)
    monkeypatch.chdir(ROOT / "nbs")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")

    def run(path, skipped):
        passed, _ = nbdev_test.test_nb(path, skip_flags=skipped, basepath=ROOT, cell_timeout=900)
        assert passed

    return run


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_lesson(path, run_lesson):
    run_lesson(path, FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize("path", LONG, ids=name)
def test_lesson_with_the_cells_that_take_long(path, run_lesson):
    run_lesson(path, [flag for flag in FLAGS if flag != NIGHTLY])


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_a_title_has_no_settings_below_it(path):
    """nbdev reads `- key: value` beside a title as YAML, or warns of it; a list of sentences begins
    with `*`."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    with warnings.catch_warnings(action="error"):
        for cell in cells:
            if cell["cell_type"] == "markdown":
                assert md_frontmatter("".join(cell["source"])).keys() <= {"title", "description"}


SETTINGS = ("pyproject.toml", "settings.ini", "setup.py")  # nbdev writes none of them


def exported(folder):
    "The exported modules below `folder`, by path."
    paths = [
        path
        for path in (folder / "branchgrpo").rglob("*.py")
        if path.name not in ("__init__.py", "_modidx.py")
    ]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture
def copy(tmp_path):
    for part in ("nbs", "branchgrpo"):
        shutil.copytree(
            ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("weights", "__pycache__")
        )
    for file in (*SETTINGS, "README.md"):
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
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def test_modules_are_in_sync_and_a_hand_edit_or_a_stray_module_is_found(copy):
    with open(copy / "branchgrpo/plan.py", "a") as f:
        f.write("\nextra = 1\n")
    (copy / "branchgrpo/stray.py").write_text("x = 1\n")
    assert out_of_sync(copy) == ["branchgrpo/plan.py", "branchgrpo/stray.py"]


def test_notebooks_are_clean(copy):
    shutil.copytree(ROOT / "reproduce", copy / "reproduce", dirs_exist_ok=True)
    for folder in ("nbs", "reproduce"):
        subprocess.run(
            [BIN / "nbdev-clean", "--fname", folder], cwd=copy, check=True, capture_output=True
        )
    changed = [
        name(path) for path in NOTEBOOKS if path.read_text() != (copy / name(path)).read_text()
    ]
    assert changed == [], "run make export"
    assert [
        file for file in SETTINGS if (ROOT / file).read_text() != (copy / file).read_text()
    ] == []


def cells(path):
    return json.loads(path.read_text())["cells"]


def opens_well(path):
    "Return whether a notebook begins with a title and a sentence."
    first = cells(path)[0]
    text = "".join(first["source"])
    return first["cell_type"] == "markdown" and text.startswith("# ") and "\n> " in text


def test_notebooks_open_with_a_title_and_a_sentence():
    assert [name(path) for path in LESSONS if not opens_well(path)] == []


def outputs(path):
    "Return all outputs that a notebook stores."
    return [output for cell in cells(path) for output in cell.get("outputs", [])]


def test_pages_are_stored_with_their_outputs():
    "Results are where they are made; `make figures` stores them, without traces of its execution."
    without = {name(path) for path in TEMPLATES if not outputs(path)}
    assert not without
    kinds = {output["output_type"] for path in TEMPLATES for output in outputs(path)}
    assert kinds <= {"display_data", "stream"}
    assert [
        name(path)
        for path in TEMPLATES
        if any(output.get("name") == "stderr" for output in outputs(path))
    ] == []
    assert sum(path.stat().st_size for path in TEMPLATES) <= 10_000_000


def picture_sizes(path):
    "Return the bytes of every picture that a notebook stores."
    sizes = []
    for cell in cells(path):
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            if picture:
                sizes.append(len(base64.b64decode("".join(picture))))
    return sizes


def test_every_lesson_of_the_course_stores_small_pictures_and_exports_nothing():
    course = [path for path in LESSONS if path.parent.name == "course"]
    assert len(course) == 11
    assert [name(path) for path in course if not picture_sizes(path)] == []
    assert max(max(picture_sizes(path)) for path in course) <= 120_000
    assert sum(path.stat().st_size for path in course) <= 2_500_000
    exporting = [path for path in course if "#| export" in path.read_text(encoding="utf-8")]
    assert [name(path) for path in exporting] == []


def test_every_notebook_names_its_kernel():
    "JupyterLab and papermill ask for a kernel where a notebook names none."
    kernels = {
        path: json.loads(path.read_text())["metadata"].get("kernelspec", {}).get("name")
        for path in NOTEBOOKS
    }
    assert {path for path, kernel in kernels.items() if kernel != "python3"} == set()
