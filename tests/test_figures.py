"""Every committed figure and number is drawn again from the committed runs, without training."""

import dataclasses
import json
import shutil
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

from branchgrpo.reproduction.command import PageOptions
from branchgrpo.reproduction.pages import jobs
from branchgrpo.reproduction.recorded import REDRAW, record_of
from branchgrpo.reproduction.redraw import redrawn

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "figures/testbed"


def drawn_from_runs():
    "Return the pages that `make figures` draws: those with a record of runs that need no model."
    found = {}
    for job in jobs([], "testbed", ROOT / "reproduce"):
        job = dataclasses.replace(job, parameters=job.parameters | {"output": str(COMMITTED)})
        try:
            found[job.name] = (job, record_of(job))
        except ValueError:  # no runs
            continue
    return {name: pair for name, pair in found.items() if not pair[0].runner.get("models")}


PAGES = drawn_from_runs()


def test_most_pages_are_drawn_from_runs():
    assert len(PAGES) >= 15
    assert len({record for _, record in PAGES.values()}) == len(PAGES)


def run_cells(job):
    "Run the cells of a page in this process, as papermill does in a kernel."
    names = {"display": lambda *shown: None}
    with matplotlib.rc_context():
        for cell in nbformat.read(job.template, 4).cells:
            if cell.cell_type == "code":
                exec(cell.source, names)
            if "parameters" in cell.metadata.get("tags", []):
                names |= job.parameters
    plt.close("all")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn_again_to_the_bit(page, tmp_path, monkeypatch):
    job, record = PAGES[page]
    for other in set(COMMITTED.glob("*.json")) - {record}:  # a page may read another page's record
        shutil.copy(other, tmp_path)
    monkeypatch.setenv(REDRAW, str(record))
    run_cells(dataclasses.replace(job, parameters=job.parameters | {"output": str(tmp_path)}))
    drawn = sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".json"))
    assert any(name.endswith(".png") for name in drawn)
    for name in drawn:
        new, old = (tmp_path / name).read_bytes(), (COMMITTED / name).read_bytes()
        if name.endswith(".json"):
            new, old = json.loads(new), json.loads(old)
        assert new == old, f"{name}: `make figures` is due"
    for table in tmp_path.glob("runs/*.parquet"):
        assert table.read_bytes() == (COMMITTED / "runs" / table.name).read_bytes(), f"{table.name}: it has changed"


@pytest.mark.slow
def test_each_call_draws_a_page_anew(tmp_path, monkeypatch):
    "What draws may have changed since: an executed page is no reason to keep it."
    figures = shutil.copytree(COMMITTED, tmp_path / "figures")
    job = PAGES["study/tuning"][0]
    job = dataclasses.replace(job, parameters=job.parameters | {"output": str(figures)})
    options = PageOptions(output=str(tmp_path / "executed"))
    monkeypatch.setenv(REDRAW, "")  # `redrawn` sets it for its process
    assert [redrawn(job, options).state for _ in range(2)] == ["done", "done"]
