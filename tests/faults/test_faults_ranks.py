"""Told to stop anywhere, a run saves and goes on; a process that dies or hangs ends the others, with its name."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_sharding import BEGIN, END, FIT, FULL, processes, rows, settings
from test_training import config

from branchgrpo.reproduction.launch import Launch, train_in_subprocess
from branchgrpo.training.checkpoints import newest, read_saved_table

# FAULT="place:iteration:nth:rank:signal" sends a signal to this process just before it does something.
INJECTOR = """
import importlib, os, signal, time
where = {
    "rollout": "rollouts:take_step", "decode": "training.scoring:start_scoring",
    "micro-batch": "training.update:edge_terms", "optimiser": "training.update:optimiser_step",
    "evaluation": "training.held_out:sample_held_out", "checkpoint": "training.checkpoints:begin_checkpoint",
    "export": "training.trainer:export", "backward": "training.update:edge_sums",
}
def inject(place, iteration, nth, rank, number):
    if rank != "all" and os.environ.get("RANK", "0") != rank:
        return
    if place == "start":
        os.kill(os.getpid(), signal.Signals[number])
    name, function = where[place].split(":")
    module = importlib.import_module(f"branchgrpo.{name}")
    trainer = importlib.import_module("branchgrpo.training.trainer")
    real, step, count = getattr(module, function), trainer.train_iteration, {"iteration": -1, "nth": 0}
    def stepped(t):
        count.update(iteration=t.progress.iteration, nth=0)
        return step(t)
    def hit(*args, **options):
        count["nth"] += 1
        if (count["iteration"], count["nth"]) == (int(iteration), int(nth)):
            if "FAULT_TIME" in os.environ:
                open(os.environ["FAULT_TIME"], "w").write(str(time.time()))
                print("these are my last words", flush=True)
            os.kill(os.getpid(), signal.Signals[number])
        return real(*args, **options)
    trainer.train_iteration = stepped
    setattr(module, function, hit)
if "FAULT" in os.environ:
    inject(*os.environ["FAULT"].split(":"))
"""
SHELL = f"""
import os, sys
from branchgrpo.cli import ended_at_once, main
with ended_at_once():
    exec({INJECTOR!r})
os._exit(main(["train", "--config", sys.argv[2] + ".yaml"]))
"""
# where, at which call in the second of three iterations; and the iteration whose checkpoint is left
PLACES = {
    "between two denoiser steps of a rollout": ("rollout:1:4", 1),
    "while images are scored": ("decode:1:1", 1),
    "between two micro-batches": ("micro-batch:1:1", 1),
    "between the two optimiser steps": ("optimiser:1:1", 2),
    "in an evaluation": ("evaluation:1:1", 2),
    "in a checkpoint": ("checkpoint:1:1", 2),
}
WAYS = {"one process": (1, {}), "2 processes (DDP)": (2, {}), "2 processes, sharded": (2, FULL)}
RUN = {"iterations": 3, "prompts_per_iteration": 4, "checkpoint_every": 2, "evaluate_every": 2, "evaluation_prompts": 4}
RUN |= {"max_batch": 2, "steps_per_pass": 2, "train_batch": 1}


def table_of(folder, sharding):
    return settings(folder, **RUN | sharding)


def told(tmp_path, monkeypatch, n, table, fault):
    "Run the command line with a fault; return the exit codes and the logs."
    (tmp_path / "shell.yaml").write_text(json.dumps(table))
    if fault:
        monkeypatch.setenv("FAULT", fault)
    else:
        monkeypatch.delenv("FAULT", raising=False)
    started = processes(n, SHELL, settings(tmp_path / "unused"), tmp_path / "shell", wait=False)
    codes = [process.wait(timeout=300) for process in started]
    return codes, [Path(f"{tmp_path}/shell.log{rank}").read_text() for rank in range(n)]


def same(one, two):
    "Check that two runs ended with equal metrics, evaluations and weights."
    assert rows(one) == rows(two) and len(rows(one)) == 3
    kept = [[json.loads(line) for line in (x / "evaluations.jsonl").read_text().splitlines()] for x in (one, two)]
    kept = [[{k: v for k, v in row.items() if k != "seconds"} for row in lines] for lines in kept]
    assert kept[0] == kept[1] and len(kept[0]) == 3
    tables = [{kind: read_saved_table(newest(x), kind) for kind in ("weights", "averages")} for x in (one, two)]
    for kind in tables[0]:
        assert all(torch.equal(value, tables[1][kind][name]) for name, value in tables[0][kind].items())


def stopped_everywhere(tmp_path, monkeypatch, noted, way, places):
    n, sharding = WAYS[way]
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    processes(n, BEGIN + FIT + END, table_of(whole, sharding), tmp_path / "end")
    for number, (place, (fault, left)) in enumerate(places.items()):
        table = table_of(tmp_path / f"stopped{number}", sharding)
        folder = Path(table["output"])
        rank = "all" if number % 2 else str(n - 1)
        name = "SIGTERM" if number % 3 else "SIGUSR2"
        codes, logs = told(tmp_path, monkeypatch, n, table, f"{fault}:{rank}:{name}")
        assert codes == [75] * n, (place, codes, logs[0][-2000:])
        assert re.search(rf"branchgrpo: stopped by {name} at iteration \d.*; a second call continues the run", logs[-1])
        assert int(newest(folder).name) == left and len(rows(folder)) == left, place
        codes, logs = told(tmp_path, monkeypatch, n, table, "")
        assert codes == [0] * n, (place, codes, logs[0][-2000:])
        same(whole, folder)
        who = "all processes" if rank == "all" and n > 1 else "one of them" if n > 1 else "it"
        kept = f"checkpoint {left} of 3; started again, it ended equal to the bit"
        noted("kills", f"{name} {place}, {way}", f"{who} told: exit code 75 on all", kept)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_told_to_stop_saves_at_once_and_goes_on(tmp_path, monkeypatch, noted, way):
    "In a rollout, its scores, micro-batches, steps, an evaluation and a checkpoint; one rank is told, or all."
    stopped_everywhere(tmp_path, monkeypatch, noted, way, PLACES)


@pytest.mark.fast
def test_an_evaluation_that_a_signal_breaks_off_is_done_afterwards(tmp_path, monkeypatch, noted):
    places = {"in an evaluation": PLACES["in an evaluation"]}
    stopped_everywhere(tmp_path, monkeypatch, noted, "one process", places)


@pytest.mark.parametrize("place", ["start", "export:2:1"])
def test_before_and_after_the_training_a_signal_loses_nothing(tmp_path, monkeypatch, noted, place):
    "Before it, the process ends at once; the export is finished first."
    fault = f"{place}:all:SIGTERM" if place != "start" else "start:0:0:all:SIGTERM"
    table = table_of(tmp_path / "run", {})
    codes, logs = told(tmp_path, monkeypatch, 1, table, fault)
    assert codes == [75 if place == "start" else 0], logs
    assert (tmp_path / "run").exists() == (place != "start")
    if place == "start":
        noted("kills", "SIGTERM before the training", "exit code 75 at once", "nothing had begun, nothing is written")
    else:
        assert (tmp_path / "run/model").is_dir()
        noted("kills", "SIGTERM in the export", "the export is finished, exit code 0", "the whole result")


OWN = (
    INJECTOR
    + """
from branchgrpo.rewards.names import load_reward
clip = load_reward("tiny-clip")
def score(images, prompts, metadata=None):
    return clip(images, prompts, metadata)
"""
)
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
KILLED = {
    "in a rollout": ("rollout:1:4", 1, {}),
    "before the backward pass that all make": ("micro-batch:1:3", 0, {}),
    "in a checkpoint, sharded": ("checkpoint:1:1", 1, FULL),
}


def launched(tmp_path, monkeypatch, fault, **changes):
    "Train with torchrun, as `branchgrpo reproduce` does; return the error and the seconds from the fault to the end."
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_TIME", str(tmp_path / "time"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = replace(config(tmp_path / "run", reward=f"{tmp_path}/own.py:score", iterations=3), **changes)
    with pytest.raises(RuntimeError) as caught:
        train_in_subprocess(run, Launch(TORCHRUN))
    return str(caught.value).splitlines()[0], time.time() - float((tmp_path / "time").read_text())


@pytest.mark.parametrize("place", KILLED)
def test_a_process_that_is_killed_ends_the_others_with_its_name(tmp_path, monkeypatch, noted, place):
    fault, rank, changes = KILLED[place]
    line, seconds = launched(tmp_path, monkeypatch, f"{fault}:{rank}:SIGKILL", max_batch=2, **changes)
    assert re.search(rf"rank {rank} \(pid \d+, host \S+\) was killed by SIGKILL; its last line: .*my last words", line)
    assert seconds < 60, "torchrun gives the others 30 seconds"
    log = (tmp_path / "run/log.txt").read_text()
    assert re.search(rf"\[rank{1 - rank}\]: branchgrpo: process {1 - rank} lost another one, which has ended", log)
    what = f"SIGKILL of rank {rank} of 2 {place}, torchrun"
    noted("kills", what, f"all gone after {seconds:.0f} s: {line.split(': ', 1)[1][:90]}…", "the last checkpoint")


def test_a_process_that_hangs_ends_the_others_after_the_timeout(tmp_path, monkeypatch, noted):
    "SIGSTOP: the other waits for `timeout_minutes` and says so; torchrun then kills the one that is stopped."
    line, seconds = launched(tmp_path, monkeypatch, "rollout:1:4:1:SIGSTOP", timeout_minutes=0.2)
    assert "timeout_minutes: process 0 waited 0.2 minutes for another, which is stuck or slow" in line
    assert seconds < 12 + 60
    noted(
        "faults",
        "SIGSTOP of one of 2 processes, torchrun",
        f"after {seconds:.0f} s: {line.split(': ', 1)[1][:90]}…",
        "the last checkpoint",
    )


def test_a_dead_process_is_named_by_accelerate_too(tmp_path, monkeypatch):
    "`accelerate launch` ends with torchrun's report; its own option `--tee 3` marks the lines."
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("FAULT", "rollout:1:4:1:SIGKILL")
    monkeypatch.setenv("FAULT_TIME", str(tmp_path / "time"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run = replace(config(tmp_path / "run", reward=f"{tmp_path}/own.py:score", iterations=3))
    launch = f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --tee 3"
    with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+, host \S+\) was killed by SIGKILL; its last line: "):
        train_in_subprocess(run, Launch(launch))
    assert os.path.exists(tmp_path / "time")
