"""Every notebook of reproduce/ executes; a second call finds them done."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from commands import popen
from slow import often

from branchgrpo.recipes import get
from branchgrpo.reproduction.cache import cache_key
from branchgrpo.reproduction.pages import default_parameters, templates
from branchgrpo.reproduction.pages import jobs as all_jobs
from branchgrpo.reproduction.records import read_record, record_path
from branchgrpo.yaml_files import parse_table

ROOT = Path(__file__).parents[1]


def test_every_notebook_has_its_scales_and_every_parameter_is_known():
    table, found = (
        parse_table((ROOT / "reproduce/scales.yaml").read_text()),
        templates(ROOT / "reproduce"),
    )
    assert table.keys() == found.keys()
    for name, scales in table.items():
        assert {"smoke", "testbed"} <= scales.keys(), name
    for scale in ("smoke", "quickstart", "testbed", "paper"):
        all_jobs([], scale, ROOT / "reproduce")


def test_a_page_by_itself_shows_the_committed_result():
    "*Run all* draws the record; only the runner, which trains, leaves it out."
    for job in all_jobs([], "testbed", ROOT / "reproduce"):
        own = default_parameters(job.template)
        assert job.parameters.keys() <= {"record"}, job.name
        assert job.parameters.get("record", "") == "", job.name
        if own.get("record"):
            assert own["record"] == str(record_path(job.name, own["output"])), job.name
            assert (ROOT / own["record"]).is_file(), job.name


def declares_its_runs(path) -> bool:
    """Return whether a page trains only what its cells tagged `arms` declare, which the runner
    reads."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    declared = "".join(cell.source for cell in cells if "arms" in cell.metadata.get("tags", []))
    others = "".join(cell.source for cell in cells if "arms" not in cell.metadata.get("tags", []))
    trains = [word for word in ("get_or_train", "base_config", ".fit()") if word in others]
    loads = [word for word in ("compare_arms(", "import torch", "Trainer") if word in declared]
    same = bool(re.search(r"arms = Arms\(", declared)) == ("compare_arms(arms" in others)
    return same and not trains and not loads


def test_every_run_of_a_page_is_declared():
    assert [
        name for name, path in templates(ROOT / "reproduce").items() if not declares_its_runs(path)
    ] == []


def reproduce(folder, *words, part=""):
    "Start `branchgrpo reproduce` in a folder of its own, so that no earlier run is found."
    if not (folder / "reproduce").exists():
        (folder / "reproduce").symlink_to(ROOT / "reproduce")
    command = [sys.executable, "-m", "branchgrpo.cli", "reproduce", *words, "--scale", "smoke"]
    with open(folder / f"log{part}", "w") as log:
        return popen(command, cwd=folder, stdout=log, stderr=log)


def reproduced(folder, *words, part="", timeout=600) -> str:
    "Run `branchgrpo reproduce` to its end and return its log."
    code = reproduce(folder, *words, part=part).wait(timeout)
    log = (folder / f"log{part}").read_text()
    assert code == 0, log
    return log


@pytest.fixture(scope="session")
def together(tmp_path_factory):
    "One folder for all processes of the suite: notebooks share runs, whoever makes them."
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "together"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "reproduce").symlink_to(ROOT / "reproduce")
    return folder


# an audit, and a page whose runs the runner trains; sampled trees and previews are among the others
CHOSEN = ["audit", "quickstart"]
PARTS = {0: CHOSEN}
OTHERS = sorted(templates(ROOT / "reproduce").keys() - set(CHOSEN))
PARTS |= {part: OTHERS[part - 1 :: 4] for part in (1, 2, 3, 4)}


@pytest.mark.parametrize("part", often(PARTS, (0,)))
def test_every_notebook_executes_and_a_second_call_runs_nothing(together, part):
    "The smoke scale, in parts that the suite's processes share."
    names = PARTS[part]
    for expected in ("done", "found"):
        log = reproduced(together, *names, part=part, timeout=1200)
        assert len([line for line in log.splitlines() if f"  {expected} " in line]) == len(names), (
            log
        )
    assert "run   1/" not in log
    records = [read_record(path) for path in (together / "runs/smoke/figures").glob("*.json")]
    found = [pair for record in records for pair in record.get("verdict", {}).items()]
    assert not [
        pair
        for pair in found
        if str(pair[1]).startswith(("holds", "does not", "higher", "lower", "below", "it "))
    ], found


@pytest.mark.slow
def test_workers_end_with_the_command_that_started_them(tmp_path):
    "A cluster may end one process only. Its workers save what they have, and begin no other run."
    words = ("study/tuning", "--jobs", "2", "--set", "iterations=500", "seeds=[0, 1, 2]")
    call = reproduce(tmp_path, *words)
    runs = tmp_path / "runs/smoke/runs"
    started = time.monotonic()
    while sum(path.stat().st_size > 0 for path in runs.glob("*/metrics.jsonl")) < 2:
        assert call.poll() is None and time.monotonic() - started < 300, (
            tmp_path / "log"
        ).read_text()
        time.sleep(0.2)
    workers = psutil.Process(call.pid).children(recursive=True)
    call.send_signal(signal.SIGTERM)
    call.wait()
    gone, alive = psutil.wait_procs(workers, timeout=120)
    for worker in alive:
        worker.kill()
    assert len(gone) >= 2 and not alive
    assert len(list(runs.glob("*/metrics.jsonl"))) == 2
    assert len(list(runs.glob("*/checkpoints/*"))) >= 2


def recorded():
    "Yield the records of the committed figures with rows and runs."
    for path in sorted((ROOT / "figures/testbed").glob("*.json")):
        record = read_record(path)
        if isinstance(record.get("rows"), list) and isinstance(record.get("runs"), dict):
            yield path.name, record


def metric_of(title, evaluation):
    "Return the name of the metric that a column shows."
    names = {"reward": "eval_reward", "all right": "eval_check_all"}
    candidates = (title, f"eval_{title}", names.get(title, f"eval_reward/{title}"))
    return next((name for name in candidates if name in evaluation), None)


def is_earlier(name: str) -> bool:
    "Return whether the report says that a record's runs are of earlier recipes."
    parts = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "figures").glob("*.md")
    ).split("\n## ")
    return any(f"[{name}](" in part and "**Runs of earlier recipes**" in part for part in parts)


def test_every_committed_run_is_named_by_its_settings():
    "An earlier run has the hash of its time, which cannot be computed any more."
    for name, record in recorded():
        for label, found in record["runs"].items():
            for seed, run in found.items():
                settings, folder = run["settings"], Path(run["run"]).name
                # a record from before runs kept all settings
                if "backbone" not in settings or folder == "None":
                    assert is_earlier(name), name
                    continue
                assert folder == cache_key(settings) or is_earlier(name), (name, label, seed)
                begin = f"{settings['recipe']}-{settings['backbone']}-{seed}-"
                # mixgrpo of then is mixgrpo-shared now
                renamed = is_earlier(name) and "labels_renamed" in record
                assert folder.startswith(begin) or renamed, (name, label, seed)
                assert settings["seed"] == int(seed), (name, label, seed)
                assert get(settings["recipe"])


def test_every_committed_row_is_the_mean_of_its_runs():
    for name, record in recorded():
        # not those of a whole table
        for row in (row for row in record["rows"] if row.get("label") in record["runs"]):
            last = [run["evaluations"][-1] for run in record["runs"][row["label"]].values()]
            for title, value in row.items():
                metric = metric_of(title, last[0])
                if isinstance(value, list) and metric:
                    mean = sum(evaluation[metric] for evaluation in last) / len(last)
                    assert abs(value[0] - mean) < 1e-9, (name, row["label"], title)
