"""A day in a night: memory, open files, threads and disk of long work do not grow; a large run cache stays quick."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from branchgrpo.training.files import read_jsonl

HERE = Path(__file__).parents[1]
TINY = dict(steps=2, splits=[0], prompts_per_iteration=1, lora_rank=1, evaluation_prompts=1)
SAMPLER = """
import json, sys
from pathlib import Path
import psutil
from branchgrpo.training.callbacks import Callback

class Sampler(Callback):
    "Keeps memory, open files, threads and disk every `every` calls."

    def __init__(self, folder, every):
        self.folder, self.every, self.calls, self.process = Path(folder), every, 0, psutil.Process()

    def sample(self, **at):
        self.calls += 1
        if self.calls % self.every:
            return
        sizes = {path: path.stat().st_size for path in self.folder.rglob("*") if path.is_file()}
        steady = sum(size for path, size in sizes.items() if path.suffix in (".distcp", ".metadata", ".json"))
        row = at | {
            "memory_mb": self.process.memory_info().rss / 1e6,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "disk_mb": sum(sizes.values()) / 1e6,
            "checkpoints_mb": steady / 1e6,
        }
        print(json.dumps(row), flush=True)

    def on_iteration(self, trainer, row):
        self.sample(iterations=row["iteration"])
"""
TRAINED = """
from branchgrpo import TrainConfig, Trainer
table = json.loads(sys.argv[1])
Trainer(TrainConfig.from_dict(table), callbacks=[Sampler(table["output"], 50)]).fit()
"""
CACHED = """
import contextlib, os
from branchgrpo import TrainConfig
from branchgrpo.reproduction.run_cache import get_or_train
table, root, runs = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sampler = Sampler(root, 25)
for seed in range(runs):
    with contextlib.redirect_stderr(open(os.devnull, "w")) if seed else contextlib.nullcontext():
        get_or_train(TrainConfig.from_dict(table | {"seed": seed}), root)
    sampler.sample(runs=seed + 1)
"""


def sampled(code, *words):
    "The rows that a process of its own prints while it works."
    done = subprocess.run(
        [sys.executable, "-c", SAMPLER + code, *map(str, words)], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def grown(rows, key):
    "How much the median of the last tenth is above that of the second tenth; the first tenth is the warm-up."
    tenth = max(1, len(rows) // 10)
    early, late = rows[tenth : 2 * tenth], rows[-tenth:]
    return statistics.median(r[key] for r in late) - statistics.median(r[key] for r in early)


def curve(rows, digits=2):
    return [{key: round(value, digits) for key, value in row.items() if key != "checkpoints_mb"} for row in rows]


def test_2000_iterations_and_200_evaluations(tmp_path, noted):
    table = TINY | {"iterations": 2000, "evaluate_every": 10, "checkpoint_every": 20, "output": str(tmp_path / "run")}
    rows = sampled(TRAINED, json.dumps(table))
    print(json.dumps(rows))


def test_1000_runs_in_one_process(tmp_path, noted):
    table = TINY | {"iterations": 1, "evaluate_every": 0, "tracker": "none"}
    rows = sampled(CACHED, json.dumps(table), tmp_path / "runs", 1000)
    print(json.dumps(rows))
