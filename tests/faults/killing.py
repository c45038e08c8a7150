"""What the tests of kills share: a small run, its processes with a fault, and all that must be
equal at its end."""

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

from commands import popen
from safetensors import safe_open
from safetensors.torch import load_file
from small import rows
from test_training import SMALL, free_port

from branchgrpo.training.checkpoint_files import newest, read_manifest, read_saved_table

INJECTOR = Path(__file__).with_name("injector.py")
KILLED = {"KILL": -9, "limit": -25}
RUN = SMALL | dict(
    steps=4, splits=[0, 2], iterations=3, checkpoint_every=1, keep_checkpoints=2, evaluate_every=3
)
RUN |= dict(  # the injector stops in parts of FLUX
    backbone="tiny-flux",
    reward="tiny-clip",
    evaluation_prompts=2,
    evaluation_steps=2,
    ema_decay=0.5,
    max_batch=2,
    learning_rate=1e-4,
)
FULL = {"sharding": "full"}
MODES = {  # processes, and what differs
    "1 process": (1, {"checkpoint_every": 2, "iterations": 4, "evaluate_every": 2}),
    "1 process, 2 passes": (1, {"passes": 2, "steps_per_pass": 1, "lora_rank": 2}),
    "2 processes": (2, {"prompts_per_iteration": 2}),
    "2 processes, sharded": (2, FULL),
}


class Attempt:
    "The processes of one start of a run; the fault is in one of them."

    def __init__(self, folder, mode, fault=None, run=None):
        self.n, changes = MODES[mode]
        self.folder, self.fault = folder, fault
        self.logs = [Path(f"{folder}.log{rank}") for rank in range(self.n)]
        settings = Path(f"{folder}.yaml")
        settings.write_text(json.dumps((run or RUN | changes) | {"output": str(folder)}))
        shared = {
            "MASTER_PORT": free_port(),
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
        }
        shared |= {"WORLD_SIZE": self.n, "LOCAL_WORLD_SIZE": self.n} if self.n > 1 else {}
        shared |= {"BRANCHGRPO_FAULT": json.dumps(fault)} if fault else {}
        self.processes = [self.start(rank, shared, settings) for rank in range(self.n)]

    def start(self, rank, shared, settings):
        own = shared | ({"RANK": rank, "LOCAL_RANK": rank} if self.n > 1 else {})
        env = os.environ | {key: str(value) for key, value in own.items()}
        words = [sys.executable, INJECTOR, "-m", "branchgrpo.cli", "train", "--config", settings]
        with open(self.logs[rank], "w") as log:
            return popen(words, env=env, stdout=log, stderr=log)

    def log(self):
        return "\n".join(
            f"--- process {n}\n{log.read_text()[-2500:]}" for n, log in enumerate(self.logs)
        )

    def ended(self, seconds=300):
        """Wait for all processes; return their exit codes, and the seconds from the first end to
        the last."""
        deadline, first = time.time() + seconds, None
        while any(process.poll() is None for process in self.processes):
            if first is None and any(process.poll() is not None for process in self.processes):
                first = time.time()
            if time.time() > deadline:
                for process in self.processes:
                    process.kill()
                raise AssertionError(f"still running after {seconds} s\n{self.log()}")
            time.sleep(0.02)
        return [process.poll() for process in self.processes], time.time() - (first or time.time())

    def ends_well(self):
        codes, _ = self.ended()
        assert codes == [0] * self.n, self.log()

    def ends_by_fault(self):
        """Wait for the end; return the exit code of the process with the fault, the others' codes
        and their seconds."""
        codes, late = self.ended()
        rank = self.fault.get("rank", 0) if self.fault.get("rank") != "all" else 0
        assert "fault reached" in self.logs[rank].read_text(), (
            f"not reached: {self.fault}\n{self.log()}"
        )
        return codes.pop(rank), codes, late


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def content(path):
    """Return the bytes of a file; of safetensors a description, since its writer puts metadata in
    any order."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    tensors = {key: digest(tensor.numpy().tobytes()) for key, tensor in load_file(path).items()}
    with safe_open(path, "pt") as file:
        return json.dumps([tensors, sorted((file.metadata() or {}).items())]).encode()


def digests(folder, pattern):
    "Return a digest of the content of every file that fits a pattern."
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): digest(content(path)) for path in paths}


def tables(folder):
    """Return a digest of every tensor of a checkpoint: weights, averages and the optimiser's
    moments."""
    found = {}
    for kind in ("weights", "averages", "optimizer"):
        for name, tensor in read_saved_table(folder, kind).items():
            found[f"{kind} {name}"] = digest(tensor.contiguous().view(-1).numpy().tobytes())
    return found


def outcome(folder):
    """Return all that a run has left, without seconds: metrics, evaluations, images, checkpoints,
    the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = newest(folder)
    progress = read_manifest(last)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {
        "state": json.loads((folder / "run.json").read_text())["state"],
        "metrics": rows(folder),
        "evaluations": rows(folder, "evaluations.jsonl"),
        "images": digests(folder, "samples/*"),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "progress": [progress["iteration"], progress["averaging_steps"], progress["counts"]],
        "tables": tables(last),
        "model": digests(folder, "model/**/*") | digests(folder, "lora/**/*"),
        "files": [path for path in files if not path.startswith("checkpoints/")]
        + [path for path in files if path.startswith(f"checkpoints/{last.name}/")],
    }


def command(words, log, fault=None, **options):
    """Start `words` (`-m module …` or `-c code …`) with a fault; its output goes to the end of
    `log`."""
    env = os.environ | {"BRANCHGRPO_FAULT": json.dumps(fault or {})} | options.pop("env", {})
    with open(log, "a") as file:
        return popen(
            [sys.executable, INJECTOR, *words], env=env, stdout=file, stderr=file, **options
        )
