"""The table of pipelines, made by running.

`python tests/pipeline_table.py [NAME …]` checks and trains each tiny pipeline, and writes
tests/golden/pipelines.json, row by row; without names, those that have no row yet. With --again
it tries them all again, writes nothing, and fails if one no longer trains: for a new diffusers."""

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from tiny_pipelines import PIPELINES, make
from tiny_pipelines import RECORD as DESCRIBED

from branchgrpo.backbones.any_pipeline import AnyPolicy, hold
from branchgrpo.messages import reason
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.stop import Preempted
from branchgrpo.training.trainer import Trainer

RECORD = Path(__file__).parent / "golden/pipelines.json"
PROMPTS = ["a red cat", "two blue birds over the sea", "x", "a green house beside a tree"]
SECONDS = int(os.environ.get("ROW_SECONDS", 900))  # of the processor, of a row, at most


class Late(BaseException):
    "A row took too long."


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    "Raise `Late` in a row that takes more seconds of the processor."

    def late(*given: object) -> None:
        raise Late

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def redness(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    return images[:, 0].flatten(1).mean(1) - images[:, 1].flatten(1).mean(1)


def milliseconds(policy: AnyPolicy, rows: int = 4, calls: int = 7) -> list[float]:
    "Return the least time of a prediction beyond the denoisers, and in them."
    spent, own = [0.0], policy.run_module

    def timed(name, *inputs, **more):
        began = time.perf_counter()
        made = own(name, *inputs, **more)
        spent[0] += time.perf_counter() - began
        return made

    policy.run_module = timed
    latents = torch.zeros(rows, *policy.latent_shape)
    conditioning = policy.encode(PROMPTS[:1] * rows)
    walls = []
    with torch.no_grad():
        for _ in range(calls):
            spent[0] = 0.0
            began = time.perf_counter()
            policy.predict(latents, policy.own_levels(4)[0][1], conditioning)
            walls.append((time.perf_counter() - began - spent[0], spent[0]))
    del policy.run_module
    return [round(1e3 * min(wall[n] for wall in walls), 1) for n in (0, 1)]


def held(name: str) -> AnyPolicy:
    "Return the policy of a tiny pipeline, with the arguments of its row."
    return hold(make(name), **PIPELINES[name])


def trained(policy: AnyPolicy, checkpointing: bool) -> dict[str, Any]:
    """Train two iterations of 4 steps, for evaluations of 10, and both are checked before; return
    the largest mismatch, the checks' numbers and notes, or a refusal."""
    sizes = {key: getattr(policy, key) for key in ("height", "width", "frames")}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            output=f"{folder}/run",
            iterations=2,
            steps=4,
            evaluation_steps=10,
            splits=(0, 1),
            branch_factor=2,
            prompts_per_iteration=2,
            evaluate_every=0,
            tracker="none",
            gradient_checkpointing=checkpointing,
            **{key: value for key, value in sizes.items() if value is not None},
        )
        try:
            made = Trainer(config, policy=policy, reward=redness, prompts=PROMPTS)
            rows = made.fit(quiet=True).metrics
        except ValueError as error:
            return {"refused": str(error)}
    found: dict[str, float] = {}
    for what, value in [pair for check in made.checks for pair in check.found.items()]:
        found[what] = max(found.get(what, 0.0), value)
    mismatch = max(row["rollout_mismatch"] for row in rows)
    return {"mismatch": mismatch, "found": found, "notes": made.checks[0].notes}


def row_of(name: str) -> dict[str, Any]:
    """Check and train a pipeline, with gradient checkpointing if it has that; where that is
    refused, without."""
    row: dict[str, Any] = {"name": name, "pipeline": DESCRIBED[name]["pipeline"]}
    try:
        with at_most(SECONDS):
            policy = held(name)
            row["kind"] = policy.kind
            way = bool(getattr(policy.denoiser, "_supports_gradient_checkpointing", False))
            made = trained(policy, way)
            if way and "gradient checkpointing" in made.get("refused", ""):
                row["with_checkpointing"] = made
                policy, way = held(name), False
                made = trained(policy, way)
            row |= made | {"checkpointing": way}
            if "refused" not in made:
                row["beyond_ms"], row["denoiser_ms"] = milliseconds(policy)
    except ValueError as error:
        row["refused"] = str(error)
    except Late:
        row["late"] = f"it takes more than {SECONDS} s of the processor"
    except Preempted:  # the table was stopped, and goes on here later
        raise
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {reason(error)}"
        row["at"] = traceback.format_exc(limit=-2)
    return row


def recorded() -> dict[str, Any]:
    "Return the record as it is now."
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}


def write_row(name: str, row: dict[str, Any]) -> None:
    "Write a row into the record, beside what other processes have written."
    whole = recorded()
    rows = whole["rows"] | {name: row}
    rows = {known: rows[known] for known in PIPELINES if known in rows}
    made = {"diffusers": diffusers.__version__, "torch": torch.__version__, "rows": rows}
    RECORD.write_text(json.dumps(whole | made, indent=1) + "\n")


def main(names: list[str], again: bool) -> None:
    "Make the rows of some pipelines, or try them again."
    known = recorded()["rows"]
    lost = []
    for name in names or [name for name in PIPELINES if again or name not in known]:
        row = row_of(name)
        print(json.dumps(row), flush=True)
        if not again:
            write_row(name, row)
        elif "mismatch" in known.get(name, {}) and "mismatch" not in row:
            lost.append(name)
    if lost:
        sys.exit(f"diffusers {diffusers.__version__}: no longer trained: {', '.join(lost)}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main([given for given in sys.argv[1:] if given != "--again"], "--again" in sys.argv)
