"""Runs in processes of their own: on two nodes, told to stop, started again; killed, they hold
their lock."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import submitit
from commands import popen
from filelock import FileLock, Timeout
from slow import often
from small import wait_for

from branchgrpo.reproduction.command import task_lists
from branchgrpo.reproduction.pages import jobs
from branchgrpo.reproduction.slurm import Resumed, job_arrays, slurm_scripts, torchrun
from branchgrpo.reproduction.training import train_task
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.runs import Run

SMALL = dict(iterations=2, steps=4, splits=(0,), branch_factor=2, prompts_per_iteration=2)
SMALL = TrainConfig(**SMALL, evaluate_every=0, tracker="none")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def submit(folder: Path, nodes: int, launch: str, config: TrainConfig):
    "Submit a run to submitit's executor of this machine, with one task per node."
    executor = submitit.LocalExecutor(folder / "slurm", max_num_timeout=10)
    executor.update_parameters(timeout_min=10, tasks_per_node=nodes, signal_delay_s=1)
    return executor.submit(Resumed(train_task), config, str(folder / "runs"), launch)


def only_run(folder: Path) -> Run:
    "Return the run in a folder; there is no other."
    (path,) = (folder / "runs").glob("branchgrpo-*")
    return Run(path)


@pytest.mark.slow
def test_two_tasks_train_one_run(tmp_path):
    "Each stands for a node: both start torchrun, and only the first takes the run's lock."
    job = submit(tmp_path, 2, torchrun(2, 1), SMALL)
    assert len(job.results()) == 2
    run = only_run(tmp_path)
    progress = json.loads(next(run.path.glob("checkpoints/*/progress.json")).read_text())
    assert run.finished and progress["processes"] == 2
    assert sorted(path.name for path in run.path.glob("log*.txt")) == ["log-1.txt", "log.txt"]


@pytest.mark.parametrize("launch", often(("here", "launched"), ("here",)))
def test_near_its_time_limit_a_task_saves_and_is_requeued(tmp_path, launch):
    config = replace(SMALL, iterations=15)
    job = submit(tmp_path, 1, sys.executable if launch == "launched" else "", config)
    runs = tmp_path / "runs"
    wait_for(lambda: any(file.stat().st_size for file in runs.glob("*/metrics.jsonl")))
    (task,) = psutil.Process(job._process.pid).children()
    task.send_signal(signal.SIGUSR2)
    wait_for(lambda: list(runs.glob(f"*/checkpoints/{'[0-9]' * 6}")))
    saved = int(next(runs.glob(f"*/checkpoints/{'[0-9]' * 6}")).name)
    assert job.results() and 0 < saved < 15
    assert "Requeued job" in job.stdout()
    assert [row["iteration"] for row in only_run(tmp_path).metrics] == list(range(1, 16))


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_the_scripts_shown_are_those_that_submitit_writes(tmp_path, monkeypatch, seeds):
    "Line by line, in a folder with a space; one task is no array."
    job = jobs(
        ["quickstart"], "smoke", Path(__file__).parents[1] / "reproduce", given={"seeds": seeds}
    )[0]
    folder = tmp_path / "a place"
    lists = task_lists([job], "", None, 8)
    arrays = job_arrays(lists, "smoke", more="partition=a100,cpus-per-task=8")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", lambda *_: 1)
    shown = slurm_scripts(arrays, folder)
    for name, (tasks, settings) in arrays.items():
        executor = submitit.SlurmExecutor(folder)
        after = {"dependency": "afterany:<the jobs of the runs>"} if name == "pages" else {}
        executor.update_parameters(**settings, **after)
        executor.parameters |= {"map_count": len(tasks)} if len(tasks) > 1 else {}
        assert executor._make_submission_file_text(executor._submitit_command_str, "") in shown


HOLDER = """
import sys
from pathlib import Path
from filelock import FileLock
from branchgrpo.reproduction.launch import run_logged
from branchgrpo.reproduction.training import lock_files
lock = FileLock("run.lock")
code = (
    "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN);"
    " print('trains'); time.sleep(5); print('saved')"
)
with lock, lock_files(lock) as files:
    run_logged([sys.executable, "-c", code], Path("log.txt"), files)
"""


def test_a_launched_training_holds_its_lock_after_a_kill(tmp_path):
    "Nobody else may train a run while the training of a killed command still saves."
    log, lock = tmp_path / "log.txt", FileLock(tmp_path / "run.lock")
    command = popen([sys.executable, "-c", HOLDER], cwd=tmp_path)
    until = time.time() + 60
    while not (log.exists() and "trains" in log.read_text()) and time.time() < until:
        time.sleep(0.1)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    with pytest.raises(Timeout):
        lock.acquire(timeout=0)
    with lock.acquire(timeout=60):
        assert log.read_text().endswith("saved\n")
