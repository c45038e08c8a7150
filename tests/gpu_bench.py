"""Does it work on a GPU? Every family, command and stop, on one H100 or H200, without network and
without real weights. What it costs there, tests/gpu_steps.py measures.

    python tests/gpu_bench.py smoke --json figures/gpu/smoke.json
    python tests/gpu_bench.py first-half-hour --json figures/gpu/first-half-hour.json

smoke            every family and many recipes through fit, evaluate, save, resume and export;
                 rollout mismatch by batch sizes
first-half-hour  smoke and more, in steps with a time limit each; the same call goes on where it
                 stopped, until every step is done

The json is written after every line, so what a time limit cuts off is kept; a part that fails
leaves its error as a line. `--tiny` runs the same at a small size on any machine.

It needs torch 2.9, diffusers 0.42, transformers, accelerate, peft, safetensors, scipy, pillow and
ruamel.yaml; no torchvision, nbdev, fastcore or tensorboard. Where a machine has PyTorch but not the
others, carry wheels, and set PYTHONPATH to their folder and to this repository's root:

    pip download --no-deps -d wheels diffusers==0.42.1 ruamel.yaml==0.19.1
    python -m pip install -q --no-index --no-deps --target site wheels/*.whl
    export PYTHONPATH=site:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
    python tests/gpu_bench.py smoke --json smoke.json
"""

import argparse
import contextlib
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from gpu_models import RandomReward, sd, wan, without_adapter
from torch._dynamo.utils import counters

from branchgrpo import cli
from branchgrpo.machine.bench import interleaved, seconds_of
from branchgrpo.prompts import PromptSet
from branchgrpo.testbed.making import quiet
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.learner import autocast
from branchgrpo.training.runs import Run, environment
from branchgrpo.training.speed import compile_blocks
from branchgrpo.training.trainer import Trainer
from branchgrpo.training.update import (
    MISMATCH_LIMIT,
    edge_sums,
    edge_terms,
    shared_micro_batches,
    update,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = PromptSet([f"prompt {n}" for n in range(64)], [f"test {n}" for n in range(16)])
SHORT = {"steps": 6, "splits": (0, 2)}  # 17 calls: enough for a mismatch
TINY = {"steps": 3, "splits": (0, 1)}
MODEL = {"backbone": "tiny-flux", "reward": "tiny-clip"}  # the reward takes any text


class Lines:
    "The lines of a part, written to a file after each; and the clock."

    def __init__(self, part: str, tiny: bool, limit: float, path: str | None):
        self.start, self.limit, self.tiny, self.path = time.time(), limit, tiny, path
        self.record = {
            "part": part,
            "tiny": tiny,
            "date": time.strftime("%Y-%m-%d"),
            **environment(),
            "lines": [],
        }
        if path and part == "first-half-hour" and Path(path).is_file():  # it goes on
            known = json.loads(Path(path).read_text())
            if (known["tiny"], known["device"]) == (tiny, self.record["device"]):
                self.record |= {name: known[name] for name in ("lines", "steps")}

    def add(self, table: str, **values) -> None:
        "Add one line to a table."
        values = {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}
        self.record["lines"].append({"table": table, **values})
        self.record["seconds"] = round(time.time() - self.start)
        print(f"{self.record['seconds']:5} s  {table:12} {values}", flush=True)
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(json.dumps(self.record, indent=1), encoding="utf-8")

    def left(self) -> float:
        "Return the seconds that are left."
        return self.limit - (time.time() - self.start)

    def attempt(self, table: str, name: str, job, needed: float = 10.0):
        "Return what a job returns; an error, or too little time for it, becomes a line."
        try:
            if self.left() < needed:
                raise TimeoutError(f"left out: {self.left():.0f} s left, {needed:.0f} s needed")
            return job()
        except Exception as error:
            self.add(
                table,
                name=name,
                error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            )
            if not isinstance(error, TimeoutError):
                traceback.print_exc(limit=-4)
        gc.collect()
        # after an illegal access the device answers nothing more
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        return None


def config_of(**changes) -> TrainConfig:
    "Return a config without evaluations and trackers, in a folder of its own."
    table = {"evaluate_every": 0, "tracker": "none", "output": f"{tempfile.mkdtemp()}/run"}
    return TrainConfig.from_dict(table | changes)


def large(lines: Lines, policy, reward, **changes) -> Trainer:
    """Return a trainer of one prompt with an adapter on a bfloat16 base, as one would train on a
    GPU."""
    table = {
        "backbone": "random",
        "reward": "random",
        "prompts": "random",
        "prompts_per_iteration": 1,
    }
    table |= {
        "mixed_precision": "bf16",
        "lora_rank": 32,
        "base_dtype": "bfloat16",
        "gradient_checkpointing": True,
    }
    table |= (
        {"max_batch": 4}
        | (TINY if lines.tiny else {})
        | changes
        | ({"lora_rank": 4} if lines.tiny else {})
    )
    return Trainer(
        config_of(**table), policy=without_adapter(policy), reward=reward, prompts=PROMPTS
    )


def call(policy, batch: int, backward: bool = False):
    "Return a job: one denoiser call of a batch, with its backward."
    x = torch.randn(batch, *policy.latent_shape, device=DEVICE)
    rows = policy.encode([f"prompt {n}" for n in range(batch)])

    def job():
        with torch.set_grad_enabled(backward), torch.autocast(DEVICE.type, torch.bfloat16):
            output = policy.predict(x, torch.tensor(0.5), rows)
            if backward:
                output.float().square().mean().backward()

    return job


def peak_memory(job) -> tuple:
    """Return what a job returns, and the peak memory in GB: the GPU's during the job; on a CPU the
    process's so far."""
    if DEVICE.type != "cuda":
        return job(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    result = job()
    torch.cuda.synchronize(DEVICE)
    return result, torch.cuda.max_memory_allocated(DEVICE) / 1e9


def per_latent(policy, batch: int, backward: bool = False, rounds: int = 3) -> float:
    "Return seconds per latent of a call, and drop its gradient."
    took = interleaved({"call": call(policy, batch, backward)}, rounds, DEVICE)["call"] / batch
    policy.denoiser.zero_grad()
    return took


def iteration(trainer: Trainer, lines: Lines, table: str, name: str) -> None:
    "Add the line of one iteration: seconds of its parts, peaks, mismatch."
    start = time.perf_counter()
    x, rollout_peak = peak_memory(lambda: trainer.collect(0))
    middle = time.perf_counter()
    trainer.credit(x)
    stats, update_peak = peak_memory(lambda: update(trainer.learner, x))
    end = time.perf_counter()
    plan, images = x.tree.plan, x.images
    decode = seconds_of(lambda: trainer.policy.decode(x.tree.latents[-1].flatten(0, 1)), DEVICE)
    reward = seconds_of(
        lambda: trainer.scorer(images, ["x"] * len(images), [{}] * len(images)), DEVICE
    )
    line = {
        "calls": plan.denoiser_calls,
        "trained_calls": stats["calls"],
        "rollout": middle - start,
    }
    line |= {"update": end - middle, "decode": decode, "reward": reward}
    line |= {"rollout_peak_gb": rollout_peak, "update_peak_gb": update_peak}
    line |= {key: float(stats[key]) for key in ("rollout_mismatch", "clip_fraction", "grad_norm")}
    lines.add(table, name=name, **line)


def roofs(lines: Lines) -> None:
    "Add what the machine can do: matrix products and copies."
    n = 256 if lines.tiny else 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    took = interleaved({"product": lambda: a @ b}, 10, DEVICE, warm_up=2)["product"]
    lines.add("machine", name="bf16 matrix product, TFLOP/s", value=2 * n**3 / took / 1e12)
    x = torch.zeros(1 << (20 if lines.tiny else 30), device=DEVICE, dtype=torch.uint8)
    y = torch.empty_like(x)
    took = interleaved({"copy": lambda: y.copy_(x)}, 10, DEVICE, warm_up=2)["copy"]
    lines.add("machine", name="copy, read and written, GB/s", value=2 * x.numel() / took / 1e9)


CLIPS = {"prompts": "clips", "reward": "motion"}
RUNS = [
    ("tiny-flux", recipe, {})
    for recipe in ("branchgrpo", "dancegrpo", "mixgrpo-flash", "branchgrpo-adaptive")
]
FUNNEL = {"max_batch": 8}  # rows are pruned: one batch size for rollout and update
RUNS += [
    ("tiny-sd3", "pro-grpo", FUNNEL),
    ("tiny-sd", "pro-grpo-sd", FUNNEL),
    ("tiny-wan", "branchgrpo", CLIPS),
]
RUNS += [("tiny-wan-i2v", "branchgrpo", CLIPS), ("tiny-flux", "flow-grpo", {"lora_rank": 4})]
RUNS += [("tiny-flux", f"branchgrpo-{name}", {}) for name in ("widpru", "extreme", "deppru", "mix")]
RUNS += [
    ("tiny-flux", "treegrpo", {}),
    ("tiny-flux", "branch-pro", {"gradient_checkpointing": True}),
]
RUNS += [("tiny-flux", "branchgrpo", {"sharding": "full"})]
BATCHES = [
    {},
    {"train_batch": 1},
    {"train_batch": 3},
    {"gradient_checkpointing": True},
    {"recipe": "branchgrpo-extreme"},
]


def whole_run(lines: Lines, backbone: str, recipe: str, precision: str, more: dict) -> None:
    "Train two iterations, resume for a third, and add the run's line."
    table = {"backbone": backbone, "recipe": recipe, "mixed_precision": precision, "iterations": 2}
    table |= {
        "prompts_per_iteration": 2,
        "evaluate_every": 2,
        "evaluation_prompts": 4,
        "checkpoint_every": 1,
    }
    config = config_of(**table | {"ema_used": True} | more | (TINY if lines.tiny else {}))
    start = time.perf_counter()
    Trainer(config).fit()
    run = Trainer(replace(config, iterations=3)).fit()
    rows = run.metrics
    written = [place for place in ("model", "lora") if (run.path / place).is_dir()]
    numbers = {
        key: torch.tensor([row[key] for row in rows]).max().item()
        for key in ("rollout_mismatch", "grad_norm")
    }
    took = time.perf_counter() - start
    name = f"{backbone} {recipe} {precision} {more or ''}".strip()
    lines.add("runs", name=name, iterations=len(rows), exported=written, seconds=took, **numbers)


def mismatch(lines: Lines, more: dict) -> None:
    "Add an iteration of tiny-flux whose update has other batches or kernels than its rollout."
    table = {"prompts_per_iteration": 2, "max_batch": 4, "mixed_precision": "bf16"}
    table |= MODEL | (TINY if lines.tiny else SHORT)
    iteration(
        Trainer(config_of(**table | more)),
        lines,
        "mismatch",
        f"tiny-flux {more or 'the same batches'}",
    )


def compiled_run(lines: Lines) -> None:
    "Add how many graphs are compiled in each of three iterations: only the first may compile."
    backend = "eager" if lines.tiny else "inductor"
    table = {"prompts_per_iteration": 2, "max_batch": 4}
    table |= MODEL | (TINY if lines.tiny else SHORT)
    trainer = Trainer(config_of(**table))
    compile_blocks(trainer.policy.denoiser, backend)
    graphs = [counters["stats"]["unique_graphs"]]
    for _ in range(3):
        trainer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    made = [after - before for before, after in zip(graphs, graphs[1:])]
    lines.add("compiled", name=f"tiny-flux, {backend}: graphs made in each iteration", graphs=made)


def lines_of_run(tiny: bool, backbone: str, recipe: str, precision: str, more: dict) -> list[dict]:
    "Return the lines of one run, made in a process of its own."
    torch.set_num_threads(1)
    quiet()
    warnings.filterwarnings("ignore")
    lines = Lines("smoke", tiny, 300, None)
    name = f"{backbone} {recipe} {precision}"
    with contextlib.redirect_stdout(io.StringIO()):
        lines.attempt("runs", name, partial(whole_run, lines, backbone, recipe, precision, more))
    return lines.record["lines"]


def many_runs(lines: Lines) -> None:
    "Add the lines of all runs: several at once, for a small model leaves a GPU idle."
    precisions = ("bf16",) if lines.tiny else ("no", "bf16")
    jobs = [(lines.tiny, *run[:2], precision, run[2]) for run in RUNS for precision in precisions]
    jobs = jobs[:1] if lines.tiny else jobs
    with get_context("spawn").Pool(min(len(jobs), max(1, (os.cpu_count() or 2) // 2))) as pool:
        for found in [pool.apply_async(lines_of_run, job) for job in jobs]:
            for line in found.get(max(1.0, lines.left())):
                lines.add(**line)


def smoke(lines: Lines) -> None:
    "Every family and many recipes, from the first iteration to the exported weights."
    roofs(lines)
    lines.attempt("runs", "all", partial(many_runs, lines), 20)
    for more in BATCHES[:2] if lines.tiny else BATCHES:
        lines.attempt("mismatch", str(more), partial(mismatch, lines, more))
    lines.attempt("compiled", "tiny-flux", lambda: compiled_run(lines), 30)


def by_step(lines: Lines, trainer: Trainer, name: str) -> None:
    "Add the largest |ρ − 1| of every step before an update, and what to do where it is too large."
    learner, s = trainer.learner, trainer.settings
    x = trainer.collect(0)
    trainer.credit(x)
    found: dict[int, float] = {}
    for batch in shared_micro_batches(learner, x.tree, x.edge_mask):
        with torch.no_grad(), autocast(learner):
            worst = edge_sums(edge_terms(learner, x, batch))[1].item()
        found[batch.step] = max(found.get(batch.step, 0.0), worst)
    worst = max(found.values())
    cures = (
        [f"--max-batch {s.max_batch} without --train-batch"]
        if worst > min(s.clip_range / 4, MISMATCH_LIMIT)
        else []
    )
    cures += ["--recompute-old"] if cures and s.steps_per_pass > 1 else []
    values = {
        "by_step": {str(step): round(value, 7) for step, value in found.items()},
        "worst": worst,
    }
    lines.add(
        "guided",
        name=name,
        **values,
        clip_range=s.clip_range,
        stops=worst > MISMATCH_LIMIT,
        remedy=cures,
    )


GUIDED = ({}, {"train_batch": 1}, {"gradient_checkpointing": False})


def guided(lines: Lines) -> None:
    """SD-1.5 with Pro-GRPO's funnel and Wan: the mismatch of rollout and update under guidance, by
    step."""
    reward = RandomReward(DEVICE, lines.tiny)
    funnel = {"recipe": "pro-grpo-sd"} | (
        {"roots": 4, "prune_at": {1: 3}, "group_keep": 2} if lines.tiny else {}
    )
    funnel |= {"splits": (), "max_batch": 2 if lines.tiny else 8}
    for name, model, changes in (
        ("SD-1.5", sd, funnel),
        ("Wan2.1-1.3B", wan, {} if lines.tiny else SHORT),
    ):
        policy = lines.attempt("guided", name, partial(model, DEVICE, lines.tiny))
        for more in GUIDED[:2] if lines.tiny else GUIDED:

            def job(policy=policy, name=name, changes=changes, more=more):
                by_step(
                    lines,
                    large(lines, policy, reward, **changes | more),
                    f"{name} {more or 'the same batches'}",
                )

            lines.attempt("guided", f"{name} {more}", job, 1 if lines.tiny else 30)


def start(lines: Lines) -> None:
    "One iteration of tiny-flux on the device, and compiled blocks with TF32."
    roofs(lines)
    whole_run(lines, "tiny-flux", "branchgrpo", "bf16", {})
    compiled_run(lines)


def commands(lines: Lines) -> None:
    """`sample` and `evaluate` on the device; a run that is told to stop, and started again, has the
    rows of a whole one."""
    place = Path(tempfile.mkdtemp())
    drawn = [
        "sample",
        "--prompt",
        "a red 3",
        "--backbone",
        "tiny-flux",
        "--output",
        f"{place}/drawn.png",
    ]
    scored = ["evaluate", "--backbone", "tiny-flux", "--limit", "4", "--output", f"{place}/scored"]
    for words in (drawn, scored):
        gc.collect()
        before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
        code, peak = peak_memory(partial(cli.main, words))
        used = peak * 1e9 > before + 1e6 if DEVICE.type == "cuda" else None
        lines.add("commands", name=words[0], code=code, peak_gb=peak, cuda_used=used)
    iterations = 4 if lines.tiny else 30
    (place / "run.yaml").write_text(
        f"{{steps: 3, splits: [0, 1], prompts_per_iteration: 2, iterations: {iterations}}}"
    )
    words = [
        "train",
        "--config",
        f"{place}/run.yaml",
        "--evaluate-every",
        "0",
        "--tracker",
        "none",
        "--output",
    ]
    assert cli.main([*words, f"{place}/whole"]) == 0
    run = [sys.executable, "-m", "branchgrpo.cli", *words, f"{place}/told"]
    told, metrics = subprocess.Popen(run), place / "told/metrics.jsonl"
    while told.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    told.send_signal(signal.SIGUSR2)
    codes = [told.wait(), subprocess.run(run, check=False).returncode]
    rows = [[row["reward"] for row in Run(place / name).metrics] for name in ("whole", "told")]
    lines.add("commands", name="SIGUSR2, then again", codes=codes, equal_rows=rows[0] == rows[1])


def no_errors(found: list[dict]) -> bool:
    return not any("error" in line for line in found)


def trains(found: list[dict]) -> bool:
    return no_errors(found) and all(line.get("grad_norm", 0) < float("inf") for line in found)


def commands_work(found: list[dict]) -> bool:
    codes = [line.get("code", 0) == 0 and line.get("codes", [75, 0]) == [75, 0] for line in found]
    where = [line.get("cuda_used") is not False and line.get("equal_rows", True) for line in found]
    return no_errors(found) and all(codes + where)


STEPS = {  # seconds that a step may take, and what it does
    "start": (120, start),
    "smoke": (400, smoke),
    "commands": (120, commands),
    "guided": (180, guided),
}
RULES = {  # of a step's lines: whether it holds, and what to do if not
    "start": (trains, "stop, and repair this first: no other step runs"),
    "smoke": (
        trains,
        "leave out the families with an error, or without a finite gradient, in what follows",
    ),
    "commands": (
        commands_work,
        (
            "sample or evaluate ran on the CPU, or a stopped run does not go on: repair before any"
            " long run"
        ),
    ),
    "guided": (
        lambda found: not any(line.get("stops") for line in found),
        "train only with the remedy of the line",
    ),
}


def told_to_end(signum, frame):
    raise TimeoutError("the step's time is over")


def first_half_hour(lines: Lines, steps: list[str] | None = None) -> None:
    """Make the steps that are not done yet, in order, each within its time; stop before one that
    may end too late.

    No step follows a first step that failed; the next call makes it again. A step that was cut off
    stays as it is."""
    done = {
        name: step
        for name, step in lines.record.get("steps", {}).items()
        if name != "start" or step["holds"]
    }
    lines.record["steps"] = done
    limit, before = lines.limit, signal.signal(signal.SIGALRM, told_to_end)
    for name in steps or STEPS:
        seconds, job = STEPS[name]
        if name in done or done.get("start", {}).get("holds") is False:
            continue
        lines.limit = limit
        if lines.left() < seconds:
            lines.add(
                "steps", name=name, next_call=f"{lines.left():.0f} s left, {seconds} s needed"
            )
            break
        first, began = len(lines.record["lines"]), time.time()
        # nothing of the step begins that would end later
        lines.limit = began - lines.start + seconds
        signal.alarm(seconds)
        lines.attempt(name, "the whole step", partial(job, lines), 0)
        signal.alarm(0)
        rule, advice = RULES.get(name, (no_errors, ""))
        holds = bool(rule(lines.record["lines"][first:]))
        done[name] = {"seconds": round(time.time() - began), "holds": holds}
        lines.add("steps", name=name, **done[name], **({} if holds else {"advice": advice}))
    lines.limit = limit
    signal.signal(signal.SIGALRM, before)


PARTS = {"smoke": smoke, "first-half-hour": first_half_hour}


def main(words: list[str] | None = None) -> dict:
    "Run one part; return its record."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", help="the file of the numbers")
    parser.add_argument(
        "--tiny", action="store_true", help="the same at a small size, on any machine"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="no new measurement begins that would end later"
    )
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, help="steps of the first half hour, in this order: all"
    )
    given = parser.parse_args(words)
    quiet()
    warnings.filterwarnings("ignore")
    lines = Lines(given.part, given.tiny, given.seconds, given.json)
    more = {"steps": given.steps} if given.steps else {}
    lines.attempt(given.part, "the whole part", lambda: PARTS[given.part](lines, **more), 0)
    lines.add("machine", name="seconds in all", value=round(time.time() - lines.start))
    return lines.record


if __name__ == "__main__":
    main()
