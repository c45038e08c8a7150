"""The table of pipelines, made by running.

`python tests/pipeline_table.py [NAME …]` checks and trains each tiny pipeline, and writes
tests/golden/pipelines.json."""

import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import diffusers
import torch
from tiny_pipelines import PIPELINES, make

from branchgrpo.backbones.any_pipeline import hold
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

RECORD = Path(__file__).parent / "golden/pipelines.json"
PROMPTS = ["a red cat", "two blue birds over the sea", "x", "a green house beside a tree"]


def redness(images, prompts):
    return images[:, 0].flatten(1).mean(1) - images[:, 1].flatten(1).mean(1)


def milliseconds(policy, rows=4, calls=7):
    "Return the median time of a prediction beyond the denoisers, and in them."
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
    return [round(1e3 * sorted(wall[n] for wall in walls)[calls // 2], 1) for n in (0, 1)]


def trained(name, checkpointing):
    "Train two iterations; return the largest mismatch, or why it was refused."
    sizes = PIPELINES[name][1]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            output=f"{folder}/run",
            iterations=2,
            steps=4,
            splits=(0, 1),
            branch_factor=2,
            prompts_per_iteration=2,
            evaluate_every=0,
            tracker="none",
            gradient_checkpointing=checkpointing,
            **sizes,
        )
        try:
            made = Trainer(config, policy=make(name), reward=redness, prompts=PROMPTS)
            rows = made.fit(quiet=True).metrics
        except ValueError as error:
            return {"refused": str(error)}
        return {
            "mismatch": max(row["rollout_mismatch"] for row in rows),
            "notes": made.checks[0].notes,
        }


def row_of(name):
    policy = hold(make(name), **PIPELINES[name][1])
    row = {"name": name, "pipeline": type(policy.pipeline).__name__, "kind": policy.kind}
    try:
        checked = policy.self_check(10)
    except ValueError as error:
        return row | {"refused": str(error)}
    beyond, inside = milliseconds(policy)
    return row | {
        "found": checked.found,
        "notes": checked.notes,
        "beyond_ms": beyond,
        "denoiser_ms": inside,
        "trained": trained(name, False),
        "with_checkpointing": trained(name, True),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else {}
    for name in sys.argv[1:] or PIPELINES:
        table[name] = row_of(name)
        print(json.dumps(table[name]), flush=True)
        record = {"diffusers": diffusers.__version__, "torch": torch.__version__, "rows": table}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
