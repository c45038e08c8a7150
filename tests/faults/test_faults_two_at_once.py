"""Two processes on one run folder, locks of dead processes, and one notebook executed twice at
once."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import popen, run
from disk import scene
from test_sharding import BEGIN, END, FIT, processes
from test_training import SMALL, start

from branchgrpo.reproduction.pages import new_page
from branchgrpo.training.runs import RunLock

WORDS = (
    "--steps 4 --splits 0,1 --prompts-per-iteration 2 --tracker none --evaluate-every 0 --lora-rank"
    " 4 --output"
)


def trained(folder, iterations=3):
    "Train by the command line in a process of its own; return its exit code and its last line."
    words = [*WORDS.split(), str(folder), "--iterations", str(iterations)]
    command = [sys.executable, "-m", "branchgrpo.cli", "train", *words]
    done = run(command, env=os.environ | {"TQDM_DISABLE": "1"}, timeout=300)
    return done.returncode, done.stdout.strip().splitlines()[-1]


def wait_for(path, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def snapshot(folder):
    "The names, sizes and times of all files."
    stats = {path: path.stat() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.fast
def test_a_second_training_of_a_run_is_refused(tmp_path, noted):
    "Kept: the first goes on; the second touches nothing."
    folder = tmp_path / "run"
    first = start(folder, iterations=200)
    try:
        wait_for(folder / "metrics.jsonl", first)
        os.kill(first.pid, signal.SIGSTOP)  # so that only the second one could write
        before = snapshot(folder)
        code, line = trained(folder)
        assert snapshot(folder) == before
    finally:
        first.kill()
    first.wait()
    assert code == 74
    assert line.startswith(
        f"branchgrpo: output: '{folder}' is being trained by process {first.pid} on host "
    ), line
    noted(
        "two processes train in one folder at once",
        "the second: code 74, one line with the process, host and start of the first",
    )


def test_a_run_stays_locked_while_a_process_of_it_lives(tmp_path, noted):
    "Kept: all; what hangs cannot write into the new training."
    folder = tmp_path / "run"
    table = SMALL | {"output": str(folder), "iterations": 500, "splits": [0, 2]}
    main, other = processes(2, BEGIN + FIT + END, table, tmp_path / "out", wait=False)
    try:
        wait_for(folder / "metrics.jsonl", main)
        os.kill(other.pid, signal.SIGSTOP)
        main.kill()
        main.wait()
        before = snapshot(folder)
        code, line = trained(folder)
        assert code == 74 and f"is being trained by process {main.pid}" in line, line
        assert snapshot(folder) == before
    finally:
        main.kill()
        other.kill()
    other.wait()
    lock = RunLock(folder)
    lock.take()
    lock.release()
    noted(
        "SIGKILL of the first of 2 processes, the second hangs, and the run is started again",
        "code 74, one line, until the second process has ended too",
    )


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    """NFS without its lock server answers ENOLCK; no such disk is here, so the kernel's answer
    alone is replaced."""
    import fcntl

    def no_locks(file, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = RunLock(tmp_path / "run")
    with pytest.warns(
        UserWarning, match="has no locks .No locks available.; do not train this run twice"
    ):
        lock.take()
    lock.release()


PAGE = """
import os, time
from pathlib import Path
with open(f"{where}/begun-{n}", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(3)
import matplotlib.pyplot as plt
from branchgrpo.viewing.style import save_figure
from branchgrpo.training.runs import write_text
figure, axes = plt.subplots()
axes.plot(range(2000))
save_figure(figure, f"{where}/figure")
write_text(f"{where}/record.json", "[" + "1, " * 50000 + "1]")
"""


@pytest.fixture
def page(tmp_path):
    "A folder with one page, and the words that execute it."
    new_page(tmp_path / "reproduce/page.ipynb", f"n: int = 0\nwhere: str = {str(tmp_path)!r}", PAGE)
    (tmp_path / "reproduce/scales.yaml").write_text("page: {smoke: {n: 1}}\n")
    words = [
        "page",
        "--scale",
        "smoke",
        "--folder",
        str(tmp_path / "reproduce"),
        "--output",
        str(tmp_path / "out"),
    ]
    return [sys.executable, "-m", "branchgrpo.cli", "reproduce", *words]


def whole_files(folder):
    "Check that no file is half, and none is left over."
    import nbformat
    from PIL import Image

    Image.open(folder / "figure.png").load()
    assert len(json.loads((folder / "record.json").read_text())) == 50001
    assert nbformat.read(folder / "out/smoke/page.ipynb", 4).metadata["branchgrpo"]["digest"]
    assert [p.name for p in folder.rglob("*") if ".tmp" in p.name or ".running" in p.name] == []


def test_one_notebook_executed_twice_at_once(tmp_path, page, noted):
    "Kept: one notebook, its figures and its record, each whole."
    logs = [tmp_path / f"log{n}" for n in range(2)]
    started = []
    for log in logs:
        with open(log, "w") as file:
            started.append(popen(page, stdout=file, stderr=file))
    assert [process.wait(timeout=300) for process in started] == [0, 0], [
        log.read_text()[-1500:] for log in logs
    ]
    assert len((tmp_path / "begun-1").read_text().splitlines()) == 1, "it is executed once"
    said = [log.read_text() for log in logs]
    assert sum("found   page" in text for text in said) == 1, said
    whole_files(tmp_path)
    noted(
        "one notebook executed twice at once by `branchgrpo reproduce`",
        "the second waits, says so, and takes the first one's result",
    )


SCENE = """
from branchgrpo.reproduction.pages import Job
from branchgrpo.reproduction.schedule import execute
disk = Disk()
job = Job("page", Path(TEMPLATE), {"n": 2, "where": str(ROOT)}, disk.path / "page.ipynb")
before("branchgrpo.reproduction.schedule:run_notebook", disk.fill, 1)
found["full"] = vars(execute(job))
found["left"] = [p.name for p in disk.path.rglob("*.ipynb")]
disk.free()
found["again"] = vars(execute(job))
found["kind"] = disk.kind
"""


def test_a_full_disk_at_an_executed_notebook(tmp_path, page, noted):
    "Kept: no half notebook; executed again when there is space."
    template = tmp_path / "reproduce/page.ipynb"
    found = scene(f"TEMPLATE = {str(template)!r}" + SCENE, tmp_path / "scene")
    assert found["full"]["state"] == "failed", found
    assert found["full"]["error"].startswith("Refused: ") and found["left"] == [], found
    assert found["again"]["state"] == "done", found
    noted(
        "disk full at an executed notebook",
        "one line; `branchgrpo reproduce` goes on with the other notebooks and ends with code 74",
        disk=found["kind"],
    )
