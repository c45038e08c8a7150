"""What waits for a GPU, in the order of its worth: one command a step, of a few minutes each.

    python tests/gpu_steps.py list                          # the steps, and how long each takes
    python tests/gpu_steps.py table1 --output figures/gpu   # again, until it says that all is done

Random weights at the published sizes: seconds and memory do not depend on the weights. A step is a
list of arms that take turns, round by round. Each arm's line is written when it is measured, into
OUTPUT/STEP-CARD.json; a line that is there (or in `--known`) is not measured again, so the same
command goes on where it was cut off. No arm begins that would end later than `--seconds`, and one
that fails leaves its error as a line. Where `--output` is another folder than `--known`, copy the
files there after each call.

`--tiny` runs the same at a small size on any machine. `--dry-run` measures nothing: it makes every
arm's model in its published size without values (PyTorch's device meta), sends one batch of the
arm's own size forward and backward through it, and prints the calls and the seconds to expect.

It needs what tests/gpu_bench.py needs; the step `memory` also needs torchao and bitsandbytes. Where
a machine has PyTorch but no network, carry wheels, as tests/gpu_bench.py says:

    pip download --no-deps -d wheels diffusers==0.42.1 ruamel.yaml==0.19.1 torchao bitsandbytes
"""

import argparse
import contextlib
import copy
import gc
import json
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from gpu_bench import DEVICE, call, config_of, large, peak_memory, per_latent, roofs
from gpu_models import MODELS, RandomReward, of_size, quantised, without_adapter
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from branchgrpo.machine.bench import seconds_of
from branchgrpo.machine.counting import (
    CallCost,
    count,
    equal_runs,
    set_trainable,
    shortened,
    training_flops,
)
from branchgrpo.machine.estimate import calls_after_pruning
from branchgrpo.machine.gpus import MEASURED_SPEED
from branchgrpo.machine.measured import WAITING
from branchgrpo.machine.peak import memory_parts
from branchgrpo.plan import RolloutPlan
from branchgrpo.planning import plan_of
from branchgrpo.testbed.making import quiet
from branchgrpo.training.config import Settings, TrainConfig
from branchgrpo.training.experience import Experience
from branchgrpo.training.resolve import resolve
from branchgrpo.training.runs import environment
from branchgrpo.training.speed import compile_blocks, set_attention
from branchgrpo.training.trainer import Trainer
from branchgrpo.training.update import shared_micro_batches, update

TREE = {"steps": 3, "splits": (0, 1)}
CHAINS = {"steps": 3, "roots": 4, "splits": ()}
SMALL = {  # of the recipes, at a small size
    "dancegrpo": TREE | {"splits": (0,), "branch_factor": 4},
    "mixgrpo": CHAINS | {"window_size": 1, "window_stop": 1},
    "branchgrpo-mix": TREE | {"window_size": 1, "window_stop": 1},
    "branchgrpo-deppru": TREE | {"window_size": 1, "window_stop": 1},
    "flow-grpo": CHAINS,
    "pro-grpo": CHAINS | {"prune_at": {1: 2}},
}
FEW = {"steps": 6, "splits": (0, 2)}  # 17 calls: enough for a mismatch and a peak
ONE = {"steps_per_pass": 1}  # of one prompt, no second optimiser step has an edge


@dataclass(frozen=True)
class Arm:
    "One thing that is measured: a job on a model of a size, with settings of a training."

    name: str
    job: str  # of JOBS
    model: str = "flux"  # of MODELS
    settings: dict = field(default_factory=dict)
    share: int = 1  # of the update's micro-batches, every `share`-th is made
    side: int | None = None  # pixels; none: the model's
    tiny: dict = field(default_factory=dict)  # settings at a small size

    def changes(self, tiny: bool) -> dict:
        "Return the settings of a training, besides those of `large`."
        recipe = self.settings.get("recipe", "branchgrpo")
        given = {"max_batch": MODELS[self.model].rows} | ONE | self.settings
        if not tiny:
            return given
        return given | {"max_batch": 2} | SMALL.get(recipe, TREE) | self.tiny


@dataclass(frozen=True)
class Step:
    "A command: arms that take turns."

    arms: tuple[Arm, ...]
    rounds: int = 1
    seconds: int = 560  # no arm begins that would end later


def iterations(model: str, names: tuple[str, ...], share: int, job: str = "iteration", **more):
    "Return an arm for each recipe."
    return tuple(Arm(name, job, model, {"recipe": name} | more, share) for name in names)


TABLE_1 = ("dancegrpo", "branchgrpo", "branchgrpo-widpru", "branchgrpo-deppru")
TABLE_1 += ("branchgrpo-mix", "mixgrpo")
PAYS = {"compile": True, "attention": "_native_cudnn", "checkpoint_blocks": 2}
VARIANTS = {
    "as it is": {},
    "compiled blocks": {"compile": True},
    "attention: cuDNN": {"attention": "_native_cudnn"},
    "attention: flash": {"attention": "_native_flash"},
    "attention: FlashAttention 3": {"attention": "_flash_3"},
    "every second block again": {"checkpoint_blocks": 2},
    "every third block again": {"checkpoint_blocks": 3},
    "batches of 1": {"max_batch": 1},
    "batches of 2": {"max_batch": 2},
    "batches of 8": {"max_batch": 8},
    "batches of 16": {"max_batch": 16},
    "compiled, cuDNN, every second block": PAYS,
    "compiled, cuDNN, every second block, batches of 8": PAYS | {"max_batch": 8},
}
SPEED = (
    Arm("heads", "heads"),
    *(Arm(name, "calls", "flux", FEW | table) for name, table in VARIANTS.items()),
    Arm("what depends on the step alone", "modulation", "flux", FEW),
)
BASES = ("bfloat16", "int8", "nf4")
MEMORY = tuple(Arm(base, "peaks", "flux", FEW | {"base_dtype": base}) for base in BASES)
LEAVES = {4: (0, 3), 8: (0, 3, 6), 16: (0, 3, 6, 9), 32: (0, 3, 6, 9, 12), 64: (0, 3, 6, 9, 12, 15)}


def growth() -> tuple[Arm, ...]:
    "Return the arms of the curves: a tree of SD3.5-M, and one thing at a time that grows."
    tree = {"recipe": "branchgrpo", "kl": 0.0}

    def arm(name: str, side: int | None = None, tiny: dict | None = None, **more) -> Arm:
        return Arm(name, "iteration", "sd3", tree | more, 4, side, tiny or TREE)

    small = {4: (0, 1), 8: (0, 1), 16: (0, 1), 32: (0, 1), 64: (0, 1)}
    found = [
        arm(f"leaves {n}", splits=splits, tiny={"splits": small[n]}) for n, splits in LEAVES.items()
    ]
    found += [arm(f"steps {n}", steps=n, splits=(0, 2, 4, 6)) for n in (10, 20, 40)]
    found += [arm(f"pixels {n}", n) for n in (256, 512, 768, 1024)]
    found += [arm(f"prompts {n}", prompts_per_iteration=n) for n in (1, 2, 4)]
    return tuple(found)


STEPS = {
    "table1": Step(
        iterations("flux", TABLE_1, share=4),
        rounds=2,
    ),
    "sd35": Step(
        iterations("sd3", ("flow-grpo", "pro-grpo"), share=1),
        rounds=3,
        seconds=240,
    ),
    "speed": Step(SPEED),
    "memory": Step(MEMORY, seconds=240),
    "units": Step(
        (
            *iterations("wan", ("branchgrpo",), share=4, **FEW),
            *iterations("wan", ("dancegrpo",), share=4, steps=6),
        ),
        seconds=240,
    ),
    "growth": Step(growth(), seconds=300),
}


class Record:
    "The lines of a step on one card, written after each; and the clock."

    def __init__(self, step: str, tiny: bool, seconds: float, output: Path, known: Path):
        self.began, self.seconds, self.tiny = time.time(), seconds, tiny
        here = environment()
        card = str(here["device"]).split()[-1 if DEVICE.type == "cpu" else 1].lower()
        self.path = output / f"{step}-{card}.json"
        self.table = {"part": step, "tiny": tiny, "date": time.strftime("%Y-%m-%d"), **here}
        self.table["lines"] = []
        for path in (known / self.path.name, self.path):
            if path.is_file() and (found := json.loads(path.read_text()))["tiny"] == tiny:
                self.table["lines"] = found["lines"]

    def is_known(self, arm: Arm, turn: int) -> bool:
        "Return whether an arm was measured in a round; an arm with an error counts as measured."
        return any((line["name"], line["round"]) == (arm.name, turn) for line in self.lines)

    @property
    def lines(self) -> list[dict]:
        return self.table["lines"]

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.seconds - (time.time() - self.began)

    def add(self, table: str, **values) -> None:
        "Add one line, and write the file."
        values = {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items()}
        self.lines.append({"table": table, **values})
        print(f"{time.time() - self.began:5.0f} s  {table:10} {values}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.table, indent=1) + "\n", encoding="utf-8")


class Ticks:
    "The seconds between the calls of an object's function, by the device's own clock."

    def __init__(self, owner: object, name: str):
        self.owner, self.name, self.marks = owner, name, []

    def __enter__(self):
        function = getattr(self.owner, self.name)

        def ticking(*given, **named):
            self.mark()
            return function(*given, **named)

        setattr(self.owner, self.name, ticking)
        return self

    def __exit__(self, *_):
        self.mark()
        delattr(self.owner, self.name)

    def mark(self) -> None:
        "Note the time, without a wait for the device."
        if DEVICE.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def seconds(self) -> list[float]:
        "Return the seconds from each call to the next one."
        if DEVICE.type != "cuda":
            return [after - before for before, after in zip(self.marks, self.marks[1:])][:-1]
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:])
        return [before.elapsed_time(after) / 1000 for before, after in pairs][:-1]


@dataclass
class Bench:
    "A step at work: its record, the model that is loaded, and the trees of a round."

    record: Record
    policy: object = None
    loaded: tuple = ()
    reward: RandomReward | None = None
    rolled: dict = field(default_factory=dict)
    reference: Tensor | None = None  # the first arm's output of one call

    @property
    def tiny(self) -> bool:
        return self.record.tiny

    def opened(self, arm: Arm, base: str = "bfloat16"):
        "Return the arm's model, as it was before any training; the one that is loaded if it can."
        if self.loaded != (arm.model, base):
            self.policy = None
            gc.collect()
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
            made = MODELS[arm.model].make(DEVICE, self.tiny)
            self.policy = made if base == "bfloat16" else quantised(made, base, DEVICE)
            self.loaded = (arm.model, base)
        policy = without_adapter(self.policy)
        if not MODELS[arm.model].own_attention:
            set_attention(policy.denoiser, "native")
        return policy if self.tiny else of_size(policy, arm.side)

    def trainer(self, arm: Arm, base: str = "bfloat16") -> Trainer:
        "Return a trainer of the arm's settings, with a fresh adapter."
        changes = arm.changes(self.tiny)
        compiles = changes.pop("compile", False)
        given = {} if self.tiny else changes | {"compile": compiles}
        policy = self.opened(arm, base)
        self.reward = self.reward or RandomReward(DEVICE, self.tiny)
        # the random model is quantised by hand
        changes = (given or changes) | {"base_dtype": "bfloat16"}
        trainer = large(self, policy, self.reward, **changes)
        if self.tiny and compiles:
            compile_blocks(trainer.policy.denoiser, "eager")
        return trainer


def thinned(trainer: Trainer, x: Experience, share: int, turn: int) -> tuple[Experience, int, int]:
    """Return an experience with every `share`-th micro-batch of its update, beginning at `turn`;
    how many those are, and how many there were."""
    batches = shared_micro_batches(trainer.learner, x.tree, x.edge_mask)
    some = batches[turn % share :: share] or batches[:1]
    mask = [torch.zeros_like(of_depth) for of_depth in x.edge_mask]
    for batch in some:
        mask[batch.step + 1][batch.prompt, batch.child] = True
    return replace_mask(x, mask), len(some), len(batches)


def replace_mask(x: Experience, mask: list[Tensor]) -> Experience:
    "Return an experience with other trained edges."
    other = copy.copy(x)
    other.edge_mask = mask
    return other


def roll(bench: Bench, trainer: Trainer, arm: Arm, turn: int) -> tuple[Experience, dict]:
    "Return a rollout and its seconds; recipes with the same tree share one in a round."
    s = trainer.settings
    key = (turn, arm.model, arm.side, s.max_batch, str(plan_of(s, 0)), s.prompts_per_iteration)
    if key not in bench.rolled:
        bench.rolled.clear()
        with Ticks(trainer.policy, "predict") as ticks:
            began = time.perf_counter()
            x, peak = peak_memory(lambda: trainer.collect(turn))
            took = time.perf_counter() - began
        batches = [round(value, 4) for value in ticks.seconds()]
        latents = x.tree.latents[-1].flatten(0, 1)
        decode = seconds_of(lambda: trainer.policy.decode(latents), DEVICE)
        told = ["x"] * len(x.images), [{}] * len(x.images)
        reward = seconds_of(lambda: trainer.scorer(x.images, *told), DEVICE)
        times = 1 + x.previews / len(x.images)
        line = {"rollout": took - times * (decode + reward), "decode": times * decode}
        line |= {"reward": times * reward, "rollout_peak_gb": peak, "rollout_batches": batches}
        bench.rolled[key] = (x, line | {"rolled_by": arm.name})
    x, line = bench.rolled[key]
    return copy.copy(x), line


def measure_iteration(bench: Bench, arm: Arm, turn: int) -> dict:
    "Return the line of one iteration: seconds of its parts, peaks and mismatch."
    trainer = bench.trainer(arm)
    x, line = roll(bench, trainer, arm, turn)
    trainer.credit(x)
    some, made, batches = thinned(trainer, x, 1 if bench.tiny else arm.share, turn)
    with Ticks(trainer.accelerator, "backward") as ticks:
        began = time.perf_counter()
        stats, peak = peak_memory(lambda: update(trainer.learner, some))
        took = time.perf_counter() - began
    each = ticks.seconds() or [took / made]
    line |= {"update": took + (batches - made) * sum(each) / len(each), "update_peak_gb": peak}
    line |= {"batches": batches, "made": made, "update_batches": [round(t, 4) for t in each]}
    line |= {key: float(stats[key]) for key in ("rollout_mismatch", "grad_norm", "clip_fraction")}
    plan = x.tree.plan
    line |= {"calls": plan.denoiser_calls, "leaves": plan.leaves}
    line |= {"prompts": trainer.settings.prompts_per_iteration, "rows": trainer.settings.max_batch}
    line |= {"trained_calls": float(trained_calls(x))}
    if bench.tiny:
        return line
    cost = cost_of(arm.model, arm.side)
    training = training_flops(cost, trainer.settings)
    return line | {"forward_tflop": cost.forward / 1e12, "training_tflop": training / 1e12}


def trained_calls(x: Experience) -> int:
    "Return how many latents the update calls the denoiser with."
    from branchgrpo.training.update import micro_batches

    return sum(len(batch.parents) for batch in micro_batches(x.tree, x.edge_mask, None))


def measure_calls(bench: Bench, arm: Arm, turn: int) -> dict:
    """Return the line of a setting of speed: seconds per latent forward, and with backward; the
    first call's; the output beside the first arm's; and an iteration of 17 calls."""
    trainer = bench.trainer(arm)
    policy, rows = trainer.policy, trainer.settings.max_batch
    torch.manual_seed(0)
    first = seconds_of(call(policy, rows), DEVICE)
    one = seconds_of(call(policy, rows, True), DEVICE)
    line = {"rows": rows, "first_call": first, "first_backward": one}
    line["forward"] = per_latent(policy, rows)
    line["backward"], line["backward_peak_gb"] = peak_memory(lambda: per_latent(policy, rows, True))
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        latents = x.to(DEVICE).expand(rows, *x.shape[1:])
        output = policy.predict(latents, torch.tensor(0.5), policy.encode(["x"] * rows))
    bench.reference = output[:1].float() if bench.reference is None else bench.reference
    off = (output[:1].float() - bench.reference).norm() / bench.reference.norm()
    return line | {"off": float(off)} | measure_mismatch(trainer)


def measure_mismatch(trainer: Trainer) -> dict:
    "Return the seconds, the peaks and the mismatch of a trainer's first iteration."
    began = time.perf_counter()
    x, rollout_peak = peak_memory(lambda: trainer.collect(0))
    middle = time.perf_counter()
    trainer.credit(x)
    stats, update_peak = peak_memory(lambda: update(trainer.learner, x))
    line = {"rollout": middle - began, "update": time.perf_counter() - middle}
    line |= {"rollout_peak_gb": rollout_peak, "update_peak_gb": update_peak}
    return line | {key: float(stats[key]) for key in ("rollout_mismatch", "grad_norm")}


def measure_peaks(bench: Bench, arm: Arm, turn: int) -> dict:
    "Return the line of a base's precision: peaks and mismatch of a short iteration."
    base = arm.settings["base_dtype"]
    if bench.tiny and base == "nf4":
        raise ValueError("base_dtype: 'nf4' needs a GPU")
    trainer = bench.trainer(arm, base)
    rows = trainer.settings.max_batch
    line = {"rows": rows, "forward": per_latent(trainer.policy, rows)}
    line |= {"backward": per_latent(trainer.policy, rows, True)} | measure_mismatch(trainer)
    return line if bench.tiny else line | doctor_peaks(arm)


def doctor_peaks(arm: Arm) -> dict:
    "Return what the doctor expects of an arm without encoders, with the tower alone as reward."
    s = resolve(settings_of(arm, MODELS[arm.model].name))
    left_out = ("rewards", "encoders", "encoding prompts", "CUDA and communication")
    parts = [part for part in memory_parts(s) if part.name not in left_out]
    of_phase = {
        phase: sum(p.gb for p in parts if phase in p.phases) for phase in ("rollout", "update")
    }
    return {f"doctor_{phase}_gb": gb + 2.5 for phase, gb in of_phase.items()}


def measure_heads(bench: Bench, arm: Arm, turn: int) -> dict:
    """Return by head size and number of keys how far the attention kernels are from float32,
    forward and in their gradients; NaN where they are not finite. 1088 keys are 64 more than a
    multiple of 128, and `far` keys have strongly negative logits (pytorch#196678)."""
    kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    kernels = {"math": SDPBackend.MATH} if DEVICE.type == "cpu" else kernels
    line = {}
    for size in (24, 64) if bench.tiny else (24, 32, 40, 64, 72, 80, 96, 128):
        for keys, shift in ((1024, 0.0), (1088, 0.0), (1088, -120.0)):
            given = inputs_of_attention(size, keys // 16 if bench.tiny else keys, shift)
            exact = with_gradients(given, torch.float32, SDPBackend.MATH)
            for name, kernel in kernels.items():
                found = with_gradients(given, torch.bfloat16, kernel)
                off = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact)]
                far = " far" if shift else ""
                line[f"{name} {size} × {keys}{far}"] = [round(value, 5) for value in off]
    return line


def inputs_of_attention(size: int, keys: int, shift: float) -> list[Tensor]:
    "Return queries, keys and values of two heads, whose logits are about `shift`."
    torch.manual_seed(size)
    given = [torch.randn(1, 2, keys, size, device=DEVICE) for _ in "qkv"]
    if shift:
        given[0][..., 0], given[1][..., 0] = 1.0, shift * size**0.5
    return given


def with_gradients(given: list[Tensor], dtype: torch.dtype, kernel: SDPBackend) -> list[Tensor]:
    "Return the output of attention and the gradients of its inputs, in float32."
    inputs = [value.detach().to(dtype).requires_grad_() for value in given]
    with sdpa_kernel(kernel):
        output = torch.nn.functional.scaled_dot_product_attention(*inputs)
        output.float().square().sum().backward()
    return [output.detach().float(), *(value.grad.float() for value in inputs)]


STEP_PARTS = ("time_text_embed", "context_embedder", "pos_embed")


def measure_modulation(bench: Bench, arm: Arm, turn: int) -> dict:
    """Return the seconds of what does not depend on a node's latent, in one call of one batch: the
    most that computing it once a step could save."""
    trainer = bench.trainer(arm)
    policy, rows = trainer.policy, trainer.settings.max_batch
    parts = [getattr(policy.denoiser, name) for name in STEP_PARTS]
    parts += [
        m.linear for m in policy.denoiser.modules() if type(m).__name__.startswith("AdaLayer")
    ]
    spans = []

    def begins(*_):
        spans.append([clock()])

    def ends(*_):
        spans[-1].append(clock())

    handles = [part.register_forward_pre_hook(begins) for part in parts]
    handles += [part.register_forward_hook(ends) for part in parts]
    job = call(policy, rows)
    job()
    spans.clear()
    whole = seconds_of(job, DEVICE)
    for handle in handles:
        handle.remove()
    inside = sum(between(*span) for span in spans)
    return {"rows": rows, "call": whole, "inside": inside, "share": inside / whole}


def clock():
    "Return a mark of time on the device."
    if DEVICE.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first, last) -> float:
    "Return the seconds between two marks."
    return first.elapsed_time(last) / 1000 if DEVICE.type == "cuda" else last - first


JOBS: dict[str, Callable[[Bench, Arm, int], dict]] = {
    "iteration": measure_iteration,
    "calls": measure_calls,
    "peaks": measure_peaks,
    "heads": measure_heads,
    "modulation": measure_modulation,
}


def settings_of(arm: Arm, backbone: str = "random") -> TrainConfig:
    "Return the config of an arm at its published size, as `Bench.trainer` has it."
    table = {"prompts_per_iteration": 1, "mixed_precision": "bf16", "lora_rank": 32}
    table |= {"base_dtype": "bfloat16", "gradient_checkpointing": True, "prompts": "digit-pairs"}
    side = {"height": arm.side, "width": arm.side} if arm.side else {}
    sized = side or MODELS[arm.model].sizes
    given = table | sized | {"backbone": backbone, "reward": "hps-v2.1"} | arm.changes(False)
    return config_of(**given)


@lru_cache(maxsize=16)
def on_meta(model: str, side: int | None):
    "Return a model of the published size without values."
    return of_size(MODELS[model].make(torch.device("meta"), False), side)


@lru_cache(maxsize=16)
def cost_of(model: str, side: int | None) -> CallCost:
    "Return what one call of a model of the published size costs, with an adapter of rank 32."
    return count(of_size(MODELS[model].make(torch.device("meta"), False), side), True, 32)


@dataclass(frozen=True)
class Expected:
    "What an arm will do, by the counts."

    settings: Settings
    plan: RolloutPlan
    trained: float  # calls
    seconds: float


OVERHEAD = {"iteration": 5.0, "calls": 6.0, "peaks": 15.0, "heads": 5.0, "modulation": 4.0}
COMPILING = 60.0  # seconds of one class of blocks in three modes, at most: a guess


def expected(arm: Arm, first: bool = True) -> Expected:
    "Return what an arm will do, and its seconds at the measured speed; `first` of its rollout."
    s = resolve(settings_of(arm, MODELS[arm.model].name))
    cost = cost_of(arm.model, arm.side)
    plan = plan_of(s, 0)
    trained = calls_after_pruning(s, plan) * s.prompts_per_iteration
    rolled = s.prompts_per_iteration * plan.denoiser_calls * cost.forward if first else 0
    flops = rolled + trained * cost.training / arm.share
    if arm.job == "calls":  # warmed up, timed thrice, both ways, and compared
        flops += 6 * s.max_batch * (cost.forward + cost.training)
    flops = 0 if arm.job in ("heads", "modulation") else flops
    seconds = OVERHEAD[arm.job] + flops / (0.9 * MEASURED_SPEED * 1e12)
    return Expected(s, plan, trained, seconds + (COMPILING if s.compile else 0))


def expected_seconds(step: Step) -> float:
    "Return the seconds of a whole step, with the start of its program."
    seen, total = set(), 30.0
    for arm in step.arms:
        key = str(plan_of(resolve(settings_of(arm, MODELS[arm.model].name)), 0))
        total += step.rounds * expected(arm, arm.job != "iteration" or key not in seen).seconds
        seen |= {key}
    return total


def try_on_meta(arm: Arm) -> tuple[int, ...]:
    """Send a batch of the arm's size through its model without values, forward and backward, with
    two blocks of each kind; return the output's shape."""
    policy = on_meta(arm.model, arm.side)
    s = resolve(settings_of(arm, MODELS[arm.model].name))
    if not getattr(policy.denoiser, "peft_config", None):
        set_trainable(policy, s.lora_rank, s.gradient_checkpointing)
    latents = torch.empty(s.max_batch, *policy.latent_shape, device="meta", dtype=policy.dtype)
    with shortened(policy.denoiser, dict.fromkeys(equal_runs(policy.denoiser), 2)):
        output = policy.predict(latents, 0.5, policy.blank(s.max_batch))
        output.float().sum().backward()
    if tuple(output.shape) != (s.max_batch, *policy.latent_shape):
        raise ValueError(f"{arm.name}: {tuple(output.shape)} is not a batch of latents")
    return tuple(output.shape)


def dry_run(names: list[str]) -> None:
    "Print what every arm of some steps will do, after its model was made in its full size."
    for name in names:
        step, seen = STEPS[name], set()
        print(f"{name}: {WAITING[name].about}; about {expected_seconds(step) / 60:.0f} minutes")
        for arm in step.arms:
            if arm.job == "heads":
                continue
            e = expected(arm)
            key = (arm.model, arm.side, e.settings.max_batch)
            shape = try_on_meta(arm) if key not in seen else ""
            seen |= {key}
            calls = f"{e.plan.denoiser_calls} calls, {e.trained:.0f} trained"
            print(f"    {arm.name:48} {calls:28} {e.seconds:5.0f} s {shape}")


def told_to_end(signum, frame):
    raise TimeoutError("the command's time is over")


def measure(bench: Bench, arm: Arm, turn: int) -> bool:
    "Measure an arm and add its line; return whether there was time for it."
    record = bench.record
    if not record.tiny and record.left < 1.2 * expected(arm).seconds:
        print(f"{arm.name}: {record.left:.0f} s are left; give the same command again")
        return False
    signal.alarm(max(1, int(record.left)))
    try:
        line = JOBS[arm.job](bench, arm, turn)
    except Exception as error:  # one arm's fault is its line, and the others go on
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if record.left < 1:
            print(f"{arm.name}: cut off; give the same command again")
            return False
        traceback.print_exc(limit=-4)
        line = {"error": text}
        bench.loaded = ()
    finally:
        signal.alarm(0)
    record.add(f"step {record.table['part']}", name=arm.name, round=turn, **line)
    return True


def run(name: str, record: Record) -> bool:
    "Measure what is not measured yet of a step; return whether all is done."
    step, bench = STEPS[name], Bench(record)
    before = signal.signal(signal.SIGALRM, told_to_end)
    if not any(line["table"] == "machine" for line in record.lines):
        roofs(Roofs(record))
    try:
        for turn in range(1 if record.tiny else step.rounds):
            for arm in step.arms:
                if not record.is_known(arm, turn) and not measure(bench, arm, turn):
                    return False
    finally:
        signal.signal(signal.SIGALRM, before)
    print(f"{name}: all is done, in {record.path}")
    return True


@dataclass
class Roofs:
    "A record as `roofs` fills it."

    record: Record

    @property
    def tiny(self) -> bool:
        return self.record.tiny

    def add(self, table: str, name: str, **values) -> None:
        self.record.add(table, name=name, round=0, **values)


def list_steps() -> None:
    "Print the steps in order, with their minutes and their commands."
    for place, (name, step) in enumerate(WAITING.items(), start=1):
        print(f"{place}. {name:8} {step.minutes:3} minutes  {step.about}")
        print(f"   {step.command(name)}")


def main(words: list[str] | None = None) -> bool:
    "Run one step; return whether all of it is done."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["list", "all", *STEPS])
    parser.add_argument("--output", type=Path, default=Path("figures/gpu"))
    parser.add_argument("--known", type=Path, default=Path("figures/gpu"), help="lines of before")
    parser.add_argument("--seconds", type=float, help="of this call: else the step's own")
    parser.add_argument("--tiny", action="store_true", help="a small size, on any machine")
    parser.add_argument("--dry-run", action="store_true", help="measure nothing")
    given = parser.parse_args(words)
    quiet()
    warnings.filterwarnings("ignore")
    if given.step == "list":
        list_steps()
        return True
    names = list(STEPS) if given.step == "all" else [given.step]
    if given.dry_run:
        dry_run(names)
        return True
    done = []
    for name in names:
        limit = given.seconds or STEPS[name].seconds
        done.append(run(name, Record(name, given.tiny, limit, given.output, given.known)))
    return all(done)


if __name__ == "__main__":
    main()
