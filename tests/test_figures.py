"""Every committed figure and number is drawn again from the committed runs, without training."""

import dataclasses
import json
import shutil
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

from branchgrpo.reproduction.pages import default_parameters, jobs
from branchgrpo.reproduction.records import read_record, record_path, recorded_runs
from branchgrpo.reproduction.redraw import redraw

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "figures/testbed"


def drawn_from_runs():
    "Return the pages that `make figures` draws from runs, with their records."
    found = {}
    for job in jobs([], "testbed", ROOT / "reproduce"):
        record = record_path(job.name, COMMITTED)
        try:
            recorded_runs(read_record(record))
        except (OSError, ValueError):  # no record, or one without runs
            continue
        if "record" in default_parameters(job.template):
            found[job.name] = (job, record)
    return found


PAGES = drawn_from_runs()


def test_most_pages_are_drawn_from_runs():
    assert len(PAGES) >= 20


def execute_here(job, parameters):
    "Execute the code of a page in this process: a kernel of its own takes seconds to start."
    names = {"__name__": "page"}
    with matplotlib.rc_context():
        for cell in nbformat.read(job.template, 4).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, job.name, "exec"), names)
            if "parameters" in cell.metadata.get("tags", []):
                names |= job.parameters | parameters
        plt.close("all")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn_again_to_the_bit(page, tmp_path):
    job, record = PAGES[page]
    for other in set(COMMITTED.glob("*.json")) - {record}:  # a page may read another page's record
        shutil.copy(other, tmp_path)
    execute_here(job, {"output": str(tmp_path), "record": str(record)})
    drawn = sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".json"))
    # what draws from models keeps its pictures
    assert job.runner.get("models") or any(name.endswith(".png") for name in drawn)
    for name in drawn:
        new, old = (tmp_path / name).read_bytes(), (COMMITTED / name).read_bytes()
        if name.endswith(".json"):
            new, old = json.loads(new), json.loads(old)
        assert new == old, f"{name}: `make figures` is due"
    for table in tmp_path.glob("runs/*.parquet"):
        assert table.read_bytes() == (COMMITTED / "runs" / table.name).read_bytes(), (
            f"{table.name}: it has changed"
        )


@pytest.mark.slow
def test_each_call_draws_a_page_anew(tmp_path):
    "What draws may have changed since: an executed page is no reason to keep it."
    figures = shutil.copytree(COMMITTED, tmp_path / "figures")
    job = PAGES["study/tuning"][0]
    job = dataclasses.replace(job, parameters=job.parameters | {"output": str(figures)})
    assert [redraw([job], tmp_path, 1, keep=False)[0].state for _ in range(2)] == ["done", "done"]
