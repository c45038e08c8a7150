"""Two processes on one run folder, locks of dead processes, and one notebook executed twice at once."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import popen, run
from test_sharding import processes
from test_training import SMALL, ends_well, start

from branchgrpo.reproduction.pages import jobs, new_page
from branchgrpo.training.runs import LOCK, RunLock

TRAIN = """
import json, sys
from branchgrpo import cli
sys.exit(cli.main(["train", *json.loads(sys.argv[1])]))
"""
WORDS = "--steps 4 --splits 0,1 --prompts-per-iteration 2 --tracker none --evaluate-every 0 --lora-rank 4 --output"


def trained(folder, iterations=3):
    "Train by the command line in a process of its own; return its exit code and its last line."
    words = [*WORDS.split(), str(folder), "--iterations", str(iterations)]
    done = run([sys.executable, "-c", TRAIN, json.dumps(words)], env=os.environ | {"TQDM_DISABLE": "1"}, timeout=300)
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
    assert line.startswith(f"branchgrpo: output: '{folder}' is being trained by process {first.pid} on host "), line
    noted(
        "faults",
        "two processes train in one folder at once",
        happened="the second: code 74, one line with the process, host and start of the first",
        kept="the first goes on; the second touches nothing",
    )


def test_a_lock_dies_with_its_process(tmp_path, noted):
    folder = tmp_path / "run"
    first = start(folder)
    wait_for(folder / "metrics.jsonl", first)
    first.kill()
    first.wait()
    assert (folder / LOCK).exists(), "the file stays, the lock does not"
    ends_well(start(folder), folder)
    assert not (folder / LOCK).exists()
    (folder / LOCK).write_text(json.dumps({"process": 1, "host": "another", "since": "2020-01-01 00:00:00"}))
    ends_well(start(folder, iterations=7), folder)
    noted(
        "faults",
        "the lock of a killed process is left behind",
        happened="nothing: the kernel lets go of a lock when its last process dies",
        kept="the run goes on with the same command",
    )


RANK = """
t.fit()
"""


def test_a_run_stays_locked_while_a_process_of_it_lives(tmp_path, noted):
    folder = tmp_path / "run"
    table = SMALL | {"output": str(folder), "iterations": 500, "splits": [0, 2]}
    from test_sharding import BEGIN, END

    main, other = processes(2, BEGIN + RANK + END, table, tmp_path / "out", wait=False)
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
        "faults",
        "SIGKILL of the first of 2 processes, the second hangs, and the run is started again",
        happened="code 74, one line, until the second process has ended too",
        kept="all; what hangs cannot write into the new training",
    )


READ = """
import sys
from pathlib import Path
from branchgrpo.training.runs import Run
run = Run(Path(sys.argv[1]))
print(len(run.metrics), run.info["state"], run.finished)
"""


def test_a_run_is_read_while_it_is_trained(tmp_path, noted):
    folder = tmp_path / "run"
    process = start(folder, iterations=200)
    try:
        wait_for(folder / "metrics.jsonl", process)
        done = run([sys.executable, "-c", READ, folder], timeout=120)
    finally:
        process.kill()
    assert done.returncode == 0 and done.stdout.split()[1:] == ["started", "False"], done.stdout
    noted(
        "faults",
        "a run is read while another process trains it",
        happened="nothing: reading needs no lock, and every file is old or new, never half",
        kept="the rows so far",
    )


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    "NFS without its lock server answers ENOLCK; no such disk is here, so the kernel's answer alone is replaced."
    import fcntl

    def no_locks(file, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = RunLock(tmp_path / "run")
    with pytest.warns(UserWarning, match="has no locks .No locks available.; do not train this run twice"):
        lock.take()
    lock.release()


PAGE = """
import os, time
from pathlib import Path
with open(f"{where}/begun-{n}", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(3)
import matplotlib.pyplot as plt
from branchgrpo.reproduction.figures import save_figure
from branchgrpo.training.runs import write_text
figure, axes = plt.subplots()
axes.plot(range(2000))
save_figure(figure, f"{where}/figure")
write_text(f"{where}/record.json", "[" + "1, " * 50000 + "1]")
"""
REPRODUCE = """
import json, sys
from branchgrpo import cli
sys.exit(cli.main(["reproduce", *json.loads(sys.argv[1])]))
"""


@pytest.fixture
def page(tmp_path):
    "A folder with one page, and the words that execute it."
    new_page(tmp_path / "reproduce/page.ipynb", f"n: int = 0\nwhere: str = {str(tmp_path)!r}", PAGE)
    (tmp_path / "reproduce/scales.yaml").write_text("page: {smoke: {n: 1}}\n")
    words = ["page", "--scale", "smoke", "--folder", str(tmp_path / "reproduce"), "--output", str(tmp_path / "out")]
    return [sys.executable, "-c", REPRODUCE, json.dumps(words)]


def whole_files(folder):
    "Check that no file is half, and none is left over."
    import nbformat
    from PIL import Image

    Image.open(folder / "figure.png").load()
    assert len(json.loads((folder / "record.json").read_text())) == 50001
    assert nbformat.read(folder / "out/smoke/page.ipynb", 4).metadata["branchgrpo"]["digest"]
    assert [p.name for p in folder.rglob("*") if ".tmp" in p.name or ".running" in p.name] == []


def test_one_notebook_executed_twice_at_once(tmp_path, page, noted):
    logs = [tmp_path / f"log{n}" for n in range(2)]
    started = []
    for log in logs:
        with open(log, "w") as file:
            started.append(popen(page, stdout=file, stderr=file))
    assert [process.wait(timeout=300) for process in started] == [0, 0], [log.read_text()[-1500:] for log in logs]
    assert len((tmp_path / "begun-1").read_text().splitlines()) == 1, "it is executed once"
    said = [log.read_text() for log in logs]
    assert sum("found   page" in text for text in said) == 1, said
    whole_files(tmp_path)
    noted(
        "faults",
        "one notebook executed twice at once by `branchgrpo reproduce`",
        happened="the second waits, says so, and takes the first one's result",
        kept="one notebook, its figures and its record, each whole",
    )


MILL = "import papermill, sys; papermill.execute_notebook(sys.argv[1], sys.argv[2], progress_bar=False)"


def test_one_notebook_executed_by_papermill_too(tmp_path, page, noted):
    words = [sys.executable, "-c", MILL, tmp_path / "reproduce/page.ipynb", tmp_path / "own.ipynb"]
    with open(tmp_path / "log", "w") as file:
        started = [popen(page, stdout=file, stderr=file), popen(words, stdout=file, stderr=file)]
    assert [process.wait(timeout=300) for process in started] == [0, 0], (tmp_path / "log").read_text()[-2000:]
    whole_files(tmp_path)
    noted(
        "faults",
        "one notebook executed by `branchgrpo reproduce` and by papermill at once",
        happened="both end well; each writes its own notebook",
        kept="figures and record, each whole",
    )


def test_what_a_killed_execution_leaves(tmp_path, page, noted):
    with open(tmp_path / "log", "w") as file:
        process = popen(page, stdout=file, stderr=file)
    wait_for(tmp_path / "begun-1", process)
    process.kill()
    process.wait()
    left = list((tmp_path / "out/smoke").glob("*.running.ipynb"))
    done = run(page, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    whole_files(tmp_path)
    assert jobs(["page"], "smoke", tmp_path / "reproduce", tmp_path / "out")[0].done
    noted(
        "faults",
        "SIGKILL of `branchgrpo reproduce` within a notebook",
        happened=f"started again, it executes the notebook anew ({len(left)} half notebook was left, and is removed)",
        kept="all runs of the notebook",
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
    from disk import scene

    template = tmp_path / "reproduce/page.ipynb"
    found = scene(f"TEMPLATE = {str(template)!r}" + SCENE, tmp_path / "scene")
    assert found["full"]["state"] == "failed", found
    assert found["full"]["error"].startswith("Refused: ") and found["left"] == [], found
    assert found["again"]["state"] == "done", found
    noted(
        "faults",
        "disk full at an executed notebook",
        happened="one line; `branchgrpo reproduce` goes on with the other notebooks and ends with code 74",
        kept="no half notebook; executed again when there is space",
        disk=found["kind"],
    )
