"""A day in a night: memory, open files, threads and disk of long work do not grow."""

import json
import statistics
import subprocess
import sys

from branchgrpo.files import read_jsonl

TINY = dict(steps=2, splits=[0], prompts_per_iteration=1, lora_rank=1, evaluation_prompts=1)
SAMPLER = """
import ctypes, gc, json, sys
from pathlib import Path
import psutil
from branchgrpo.training.trainer import Callback

class Sampler(Callback):
    "Keeps memory, open files, threads and disk every `every` calls."

    def __init__(self, folder, every):
        self.folder, self.every, self.calls, self.process = Path(folder), every, 0, psutil.Process()

    def sample(self, **at):
        self.calls += 1
        if self.calls % self.every:
            return
        gc.collect()
        # memory that is free, and that the allocator keeps, is no leak
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        sizes = {path: path.stat().st_size for path in self.folder.rglob("*") if path.is_file()}
        kept = (".safetensors", ".metadata", ".json")
        steady = sum(
            size
            for path, size in sizes.items()
            if "checkpoints" in path.parts and path.suffix in kept
        )
        row = at | {
            "memory_mb": self.process.memory_info().rss / 1e6,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "objects": len(gc.get_objects()),
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


def sampled(code, *words):
    "The rows that a process of its own prints while it works."
    command = [sys.executable, "-c", SAMPLER + code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def grown(rows, key):
    """How much the median of the last tenth is above that of the second tenth; the first tenth is
    the warm-up."""
    tenth = max(1, len(rows) // 10)
    early, late = rows[tenth : 2 * tenth], rows[-tenth:]
    return statistics.median(r[key] for r in late) - statistics.median(r[key] for r in early)


def curve(rows, digits=2):
    return [
        {key: round(value, digits) for key, value in row.items() if key != "checkpoints_mb"}
        for row in rows
    ]


def without_growth(rows, memory):
    """Check the sampled rows: `memory` MB may come on top; files and threads may not.

    The allocator keeps freed blocks and Python its caches, so the memory of a sound process creeps
    at first and then stays; a leak of one latent (4 kB) or of one row of metrics an iteration would
    show as 8 MB in 2,000.
    """
    assert grown(rows, "memory_mb") <= memory, curve(rows)
    assert grown(rows, "files") <= 0 and grown(rows, "threads") <= 0, curve(rows)


def test_2000_iterations_and_200_evaluations(tmp_path, noted):
    folder = tmp_path / "run"
    table = TINY | {
        "iterations": 2000,
        "evaluate_every": 10,
        "checkpoint_every": 20,
        "output": str(folder),
    }
    rows = sampled(TRAINED, json.dumps(table))
    assert len(rows) == 40 and len(read_jsonl(folder / "evaluations.jsonl")) == 201
    without_growth(rows, memory=24)
    # a third one is there while the oldest is deleted
    sizes = [row["checkpoints_mb"] for row in rows]
    assert abs(min(sizes[-4:]) - min(sizes[4:8])) < 0.001, (
        "the last two checkpoints, whatever the iteration"
    )
    lengths = [len(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    early, late = statistics.median(lengths[200:400]), statistics.median(lengths[-200:])
    assert abs(late - early) < 20, "a row of metrics is as long at the end as at the start"
    noted(
        "2,000 iterations and 200 evaluations in one process, 100 checkpoints",
        f"memory {grown(rows, 'memory_mb'):+.1f} MB from the second tenth to the last; files,"
        " threads +0",
        f"2 checkpoints; {late:.0f} bytes of metrics an iteration, first to last",
        kind="load",
        curve=curve(rows),
    )
