"""A process that dies or hangs ends the others, with its name. (Told to stop, all save:
test_faults_kills.)"""

import re
import sys
import time
from dataclasses import replace

import pytest
from test_sharding import FULL
from test_training import config

from branchgrpo.reproduction.launch import train_in_subprocess

# A reward's file is imported by every process: FAULT="function:iteration:call:rank:signal" strikes
# just before a call.
OWN = """
import importlib, os, signal, time
from branchgrpo.rewards.names import load_reward
clip = load_reward("tiny-clip")
def score(images, prompts, metadata=None):
    return clip(images, prompts, metadata)
def strike(name, iteration, call, rank, number):
    if os.environ["RANK"] != rank:
        return
    module, _, function = name.rpartition(".")
    module = importlib.import_module(f"branchgrpo.{module}")
    trainer = importlib.import_module("branchgrpo.training.trainer")
    real, collect, now = getattr(module, function), trainer.Trainer.collect, {}
    def collected(t, iteration):
        now.update(iteration=iteration, call=0)
        return collect(t, iteration)
    def hit(*args, **options):
        now["call"] = now.get("call", 0) + 1
        if (now.get("iteration"), now["call"]) == (int(iteration), int(call)):
            open(os.environ["FAULT_TIME"], "w").write(str(time.time()))
            print("these are my last words", flush=True)
            os.kill(os.getpid(), signal.Signals[number])
        return real(*args, **options)
    trainer.Trainer.collect = collected
    setattr(module, function, hit)
strike(*os.environ["FAULT"].split(":"))
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
ACCELERATE = (
    f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    " --tee 3"
)
ROLLOUT = "rollouts.take_step:1:4"
KILLED = {
    "in a rollout": (ROLLOUT, 1, {}),
    "before the backward pass that all make": ("training.update.edge_terms:1:3", 0, {}),
    "in a checkpoint, sharded": ("training.checkpoints.write_checkpoint:1:1", 1, FULL),
}


def launched(tmp_path, monkeypatch, fault, launch=TORCHRUN, **changes):
    """Train as `branchgrpo reproduce` does; return the error, which ends with torchrun's report,
    and the seconds from the fault to the end."""
    (tmp_path / "own.py").write_text(OWN)
    variables = {"FAULT": fault, "FAULT_TIME": str(tmp_path / "time"), "ACCELERATE_USE_CPU": "true"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = replace(
        config(tmp_path / "run", reward=f"{tmp_path}/own.py:score", iterations=3), **changes
    )
    with pytest.raises(RuntimeError) as caught:
        train_in_subprocess(run, launch)
    return str(caught.value), time.time() - float((tmp_path / "time").read_text())


@pytest.mark.parametrize("place", KILLED)
def test_a_process_that_is_killed_ends_the_others_with_its_name(
    tmp_path, monkeypatch, noted, place
):
    fault, rank, changes = KILLED[place]
    error, seconds = launched(
        tmp_path, monkeypatch, f"{fault}:{rank}:SIGKILL", max_batch=2, **changes
    )
    assert re.search(rf"rank +: {rank} .*\s+exitcode +: -9 \(pid: \d+\)", error)
    assert seconds < 60, "torchrun gives the others 30 seconds"
    log = (tmp_path / "run/log.txt").read_text()
    assert f"[rank{rank}]: these are my last words" in log
    assert re.search(
        rf"\[rank{1 - rank}\]: branchgrpo: process {1 - rank} lost another one, which has ended",
        log,
    )
    what = f"SIGKILL of rank {rank} of 2 {place}, torchrun"
    noted(
        what,
        f"all gone after {seconds:.0f} s; torchrun's report names the rank",
        "the last checkpoint",
        kind="kills",
    )


def test_a_process_that_hangs_ends_the_others_after_the_timeout(tmp_path, monkeypatch, noted):
    """SIGSTOP: the other waits for `timeout_minutes` and says so; torchrun then kills the one that
    is stopped."""
    error, seconds = launched(tmp_path, monkeypatch, f"{ROLLOUT}:1:SIGSTOP", timeout_minutes=0.2)
    line = error.splitlines()[0]
    assert (
        "timeout_minutes: process 0 waited 0.2 minutes for another, which is stuck or slow" in line
    )
    assert seconds < 12 + 60
    happened = f"after {seconds:.0f} s: {line.split(': ', 1)[1][:90]}…"
    noted("SIGSTOP of one of 2 processes, torchrun", happened, "the last checkpoint")


def test_a_dead_process_is_named_by_accelerate_too(tmp_path, monkeypatch):
    "`accelerate launch` ends with torchrun's report; its own option `--tee 3` marks the lines."
    error, _ = launched(tmp_path, monkeypatch, f"{ROLLOUT}:1:SIGKILL", ACCELERATE)
    assert re.search(r"rank +: 1 .*\s+exitcode +: -9 \(pid: \d+\)", error)
