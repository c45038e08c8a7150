#!/usr/bin/env python
"""Record the numbers of a tree of branchgrpo: `record.py OUT.json [--only GROUP] [--item TEXT] [--list]`.

PYTHONPATH points to the tree. Uses only branchgrpo.{Trainer, TrainConfig, RECIPES, BACKBONES, Run, GaussianFlow}, the
command line, and the files that a run leaves. Every item runs in a fork of its own; OUT keeps the finished ones, so
that a second call goes on. `--make-old-runs` makes the folder old_runs/ once, by today's code, and is refused later.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "BRANCHGRPO_WARM"):
    os.environ.pop(_name, None)

import torch  # noqa: E402

torch.set_num_threads(1)

HERE = Path(__file__).resolve().parent
OLD = HERE / "old_runs"
sys.path.append(str(HERE))  # record_scores

SCRATCH = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else HERE)  # memory: a run waits for no disk
LIMIT = 900  # seconds of one item
TMP = Path()  # of this OUT
WEIGHTS = Path()  # of this OUT: the tensors of the group processes


# ------------------------------------------------------------------------------------------------ processes


def forked(function, log, env=None):
    "Run a function in a fork with its own output file; return the process id."
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update({key: str(value) for key, value in (env or {}).items()})
        code = function() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)  # without waiting for gloo's threads


def waited(pid, limit=LIMIT):
    "Wait for a process; return its exit code, negative after a signal. Kills it and its session after `limit`."
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"an item took more than {limit} s")


def tail(log, size=3000):
    return Path(log).read_text(errors="replace")[-size:] if Path(log).exists() else ""


def in_fork(function, log, expected=0):
    "Run a function in a fork and wait; raise if it does not end with the expected code."
    code = waited(forked(function, log))
    if code != expected:
        raise RuntimeError(f"exit code {code}, not {expected}: {tail(log)}")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(n, function, log, expected=0):
    "Run a function in `n` processes of one training, as torchrun starts them; with −9 expected all die with the first."
    shared = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    pids = [forked(function, f"{log}.{rank}", shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(n)]
    codes = [waited(pids[0])]
    for pid in pids[1:]:
        if codes[0] != 0:  # the others wait for the first one
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        codes.append(waited(pid))
    if codes[0] != expected or (expected == 0 and any(codes)):
        raise RuntimeError(f"exit codes {codes}: " + "\n".join(tail(f"{log}.{rank}", 1500) for rank in range(n)))


# ------------------------------------------------------------------------------------------------ public names


def config(table):
    from branchgrpo import TrainConfig

    return TrainConfig.from_dict(table) if hasattr(TrainConfig, "from_dict") else TrainConfig(**table)


def fit(table, callbacks=(), **objects):
    "Train a table of settings to the end."
    from branchgrpo import Trainer

    return Trainer(config(table), callbacks=callbacks, **objects).fit()


def main():
    "The command line's function, of the old or the new tree."
    try:
        from branchgrpo.cli.main import main
    except ImportError:
        from branchgrpo.cli import main
    return main


def command(words, folder, expected=0):
    "Run a command of the command line in a fork; return what it prints on standard output."
    out = folder / "stdout"
    out.unlink(missing_ok=True)

    def run():
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
        os.chdir(HERE)
        return main()([str(word) for word in words])

    in_fork(run, folder / "log", expected)
    return out.read_text()


class Killer:
    "A callback that kills its process when an iteration is reached, before its checkpoint is written."

    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration(self, trainer, row):
        if row["iteration"] == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)


# ------------------------------------------------------------------------------------------------ what is recorded


def digest(data):
    return hashlib.blake2b(data, digest_size=10).hexdigest()


def bytes_of(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def of_tensor(tensor):
    "Digest of a tensor's bytes, its norm, and its first numbers, so that a difference has a size."
    flat = tensor.detach().reshape(-1).double()
    return {"digest": digest(bytes_of(tensor) + str((tensor.dtype, tuple(tensor.shape))).encode()),
            "norm": float(flat.norm()), "first": flat[:3].tolist()}


def read_tensors(paths, root):
    "All tensors of safetensors files; parts of one tensor in several files are numbered."
    from safetensors import safe_open

    found = {}
    for path in sorted(paths):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                key, n = name, 0
                while key in found:
                    n += 1
                    key = f"{name}#{n}"
                found[key] = file.get_tensor(name)
    return found


def of_table(tensors):
    "One digest of many tensors, with their norm."
    whole = hashlib.blake2b(digest_size=10)
    total = 0.0
    for name in sorted(tensors):
        whole.update(name.encode() + str((tensors[name].dtype, tuple(tensors[name].shape))).encode())
        whole.update(bytes_of(tensors[name]))
        total += float(tensors[name].detach().double().square().sum())
    return {"digest": whole.hexdigest(), "tensors": len(tensors), "norm": total**0.5}


def checkpoint_of(run):
    folders = sorted(p for p in (run / "checkpoints").glob("*") if p.name.isdigit()) if (run / "checkpoints").exists() else []
    if not folders:
        return {}
    tensors = read_tensors(folders[-1].rglob("*.safetensors"), folders[-1])
    found = {"kept": [p.name for p in folders], "weights": {}}
    for name, tensor in tensors.items():
        if name.startswith("weights."):
            found["weights"][name] = of_tensor(tensor)
    kinds = {}
    for name, tensor in tensors.items():
        kind = name.partition(".")[0]
        kind += f".{name.partition('#')[0].rpartition('.')[2]}" if kind == "optimizer" else ""
        kinds.setdefault(kind, {})[name] = tensor
    found["tables"] = {kind: of_table(table) for kind, table in sorted(kinds.items())}
    return found


def result_of(run):
    "Tensors of the exported model or adapter, a table for each file."
    paths = sorted(p for kind in ("model", "lora") for p in (run / kind).rglob("*.safetensors"))
    return {str(p.relative_to(run)): of_table(read_tensors([p], run)) for p in paths}


def of_image(path):
    from PIL import Image

    image = Image.open(path)
    return {"size": list(image.size), "mode": image.mode, "digest": digest(image.tobytes())}


def timeless(row):
    return {key: value for key, value in row.items() if "seconds" not in key and key != "time"}


def rows_of(path):
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def of_tree(path):
    "Digests of the parts of a kept tree."
    table = json.loads(path.read_text())
    return {key: digest(json.dumps(value, sort_keys=True).encode()) for key, value in sorted(table.items())}


LEFT_OUT = ("retain", "output", "sources")  # of the settings


def run_record(run):
    "What a run's folder holds, but times."
    run = Path(run)
    info = json.loads((run / "run.json").read_text())
    return {
        "state": info["state"],
        "metrics": rows_of(run / "metrics.jsonl"),
        "evaluations": rows_of(run / "evaluations.jsonl"),
        "settings": {k: v for k, v in info["settings"].items() if k not in LEFT_OUT},
        "prompts": info.get("prompts"),
        "checkpoint": checkpoint_of(run),
        "result": result_of(run),
        "samples": {p.name: of_image(p) for p in sorted((run / "samples").glob("*.png"))},
        "trees": {p.name: of_tree(p) for p in sorted((run / "trees").glob("*.json"))},
    }


def keep_weights(run, name):
    "Save the trained weights beside OUT: the newest checkpoint's and the exported ones."
    run = Path(run)
    newest = sorted(p for p in (run / "checkpoints").glob("*") if p.name.isdigit())[-1]
    tensors = {f"checkpoint {k}": v for k, v in read_tensors(newest.rglob("*.safetensors"), newest).items()
               if k.startswith(("weights.", "averages."))}
    files = [p for kind in ("model/transformer", "model/unet", "lora") for p in (run / kind).rglob("*.safetensors")]
    tensors |= {f"result {k}": v for k, v in read_tensors(files, run).items()}
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, WEIGHTS / f"{name.replace('/', ' ')}.pt")


def folder_digest(folder):
    "A digest of all files of a folder, to see that an old run was not changed."
    whole = hashlib.blake2b(digest_size=10)
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        whole.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


# ------------------------------------------------------------------------------------------------ items

ITEMS = {}  # name -> function of (folder, name)


def trained(name, table, objects=None):
    "An item that trains in this process."

    def item(folder, _):
        made = {} if objects is None else objects()
        fit(table | {"output": str(folder / "run")}, **made)
        return run_record(folder / "run")

    ITEMS[name] = item


BASE = {"evaluate_every": 0, "tracker": "none", "evaluation_prompts": 4}
SMALL = BASE | {"steps": 6, "splits": (0, 2), "prompts_per_iteration": 2, "checkpoint_every": 2, "iterations": 2}


# 1: every recipe


def add_recipes():
    from branchgrpo import RECIPES

    for name in RECIPES.names():
        table = BASE | {"recipe": name, "iterations": 3, "prompts_per_iteration": 1, "evaluate_every": 1}
        trained(f"recipes/{name}", table)


# 2: the other tiny models

VIDEO = {"reward": "motion", "prompts": "clips"}
GUIDED = {"steps": 6, "splits": (0, 2), "prompts_per_iteration": 2, "guidance_scale": 3.0}


def add_backbones():
    table = {
        "tiny-sd3": ["branchgrpo", "flow-grpo", "pro-grpo"],
        "tiny-sd": ["branchgrpo", "dancegrpo-sd", "pro-grpo-sd"],
        "tiny-wan": ["branchgrpo", "flash-grpo"],
        "tiny-wan-i2v": ["branchgrpo", "flash-grpo"],
    }
    for backbone, recipes in table.items():
        kind = {"backbone": backbone, "iterations": 2} | (VIDEO if "wan" in backbone else {"prompts": "digits"})
        for recipe in recipes:
            size = {"recipe": recipe, "prompts_per_iteration": 1, "evaluate_every": 2}
            size |= {"steps": 8} if recipe == "branchgrpo" else {}
            size |= {"splits": (0, 2)} if recipe == "branchgrpo" else {}
            trained(f"backbones/{backbone} {recipe}", BASE | kind | size)
        changes = {"guided": {}, "guidance_grad": {"guidance_grad": True}, "bf16": {"mixed_precision": "bf16"},
                   "lora kl": {"lora_rank": 4, "lora_alpha": 16, "learning_rate": 1e-2, "kl": 0.1}}
        for what, change in changes.items():
            trained(f"backbones/{backbone} {what}", BASE | kind | GUIDED | change)
        trained(f"backbones/{backbone} evaluated", BASE | kind | GUIDED | {"evaluate_every": 1, "evaluation_steps": 4})


# 3: the option mixes of the tests

TWO_REWARDS = "tiny-clip+0.5*tiny-aesthetic"
LATER = dict(steps_per_pass=3, step_unit="edges", learning_rate=1e-3)
JUDGED = dict(reward="tiny-clip+0*tiny-aesthetic", kl=1.0, **LATER)
CUT = dict(splits=(), roots=8, prune_at={2: 6}, group_keep=4)
ALL_TOGETHER = dict(splits=(), roots=2, side=(0, 2), branch_factor=3, merged={3: 2}, noise_factors={0: 1.5})
ALL_TOGETHER |= dict(previews="ode/2+x0", preview_at="after", advantage="granularities", step_weights="std")
MOVING = {"recipe": "mixgrpo-shared", "splits": "window-start", "branch_factor": 4, "window": "random",
          "window_size": 2, "window_stop": 3, "tail_ratio": 0.5}
OBJECTIVE = {"loss": "kl-mask", "kl_limit": 1e-6, "passes": 2, "reward": "tiny-clip+0.5*tiny-hps+0*tiny-aesthetic",
             "reward_sum": "decoupled+batch", "kl": 0.1, "kl_share": 0.3, "group_selection": "diverse",
             "group_keep": 3, "diversity": 0.5}
SIDE = {"splits": (), "roots": 2, "side": (0, 2, 3), "branch_factor": 3, "advantage": "siblings", "lora_rank": 2,
        "merged": {3: 2}, "noise_factors": {2: 1.5}, "step_weights": "std"}
FUNNEL = {"roots": 8, "splits": (), "prune_at": {2: 6}, "group_selection": "ovf", "group_keep": 3, "std": "global",
          "kl": 0.1}
PRUNED = {"prune": "extreme", "prune_keep": 1, "train_fraction": 0.6, "advantage": "leave-one-out", "min_nodes": 3}
VIEW_FUNNEL = {"recipe": "pro-grpo", "roots": 6, "prune_at": {1: 4, 2: 2}, "splits": ()}
CHAIN = {"splits": (), "roots": 4, "group_selection": "all", "prune": "none"}
FLOW = dict(recipe="flow-grpo", splits=(), roots=4, kl=0.0, lora_rank=0)
AVERAGE = dict(ema_decay=0.5, ema_every=1, learning_rate=1e-2, evaluate_every=2)

OPTION_TRAINS = [  # tests/test_recipes.py
    {"advantage": "joint"},
    {"advantage": "leave-one-out"},
    {"advantage": "leaf-backup"},
    {"advantage": "broadcast"},
    {"advantage": "siblings"},
    {"step_weights": "std"},
    {"step_weights": "inverse-gradient", "merged": {3: 2}, "noise_factors": {0: 2.0}},
    {"transition": "linear", "eta": 1.0},
    {"ratio": "guard", "passes": 2},
    {"kl": 0.1},
    {"kl": 0.1, "lora_rank": 2},
    {"split_noise": "scaled"},
    {"transition": "cps", "eta": 0.5},
    {"min_nodes": 4},
    {"std": "pooled"},
    {"max_batch": 5},
]
MIXES = {
    # tests/test_objectives.py
    "plain": {},
    "kl-mask at 0": dict(loss="kl-mask", kl_limit=0.0, **LATER),
    "kl-mask without limit": dict(loss="kl-mask", **LATER),
    "kl-mask first step": dict(steps_per_pass=1, loss="kl-mask", kl_limit=1e-5),
    "clip first step": dict(steps_per_pass=1),
    "far clip, recompute_old": dict(clip_range=1e6, recompute_old=True, **LATER),
    "near clip": dict(clip_range=1e-5, **LATER),
    "one reward decoupled": dict(reward_sum="decoupled"),
    "one reward decoupled+batch": dict(reward_sum="decoupled+batch"),
    "judged": JUDGED,
    "judged some": JUDGED | dict(kl_share=0.3),
    "gated kl": JUDGED | dict(kl_share=0.3, std="none"),
    "cut ovf": CUT | dict(selection="ovf", group_selection="ovf"),
    "cut diverse": CUT | dict(selection="diverse", group_selection="diverse", diversity=0.5),
    "cut diverse 0.9": CUT | dict(selection="diverse", group_selection="diverse", diversity=0.9),
    "cut random": CUT | dict(selection="random", group_selection="random"),
    "cut best": CUT | dict(selection="best", group_selection="best"),
    "side, previews, merged, guard": ALL_TOGETHER | dict(ratio="guard", kl=0.1, max_batch=3),
    "kl-mask two passes": dict(loss="kl-mask", kl_limit=1e-6, passes=2, **LATER),
    "decoupled": dict(reward=TWO_REWARDS, reward_sum="decoupled"),
    "decoupled+batch": dict(reward=TWO_REWARDS, reward_sum="decoupled+batch", roots=2, splits=(1,)),
    "three rewards, objective": OBJECTIVE,
    # tests/test_previews.py
    "previews unread": dict(previews="ode+x0", preview_at="after"),
    "previews drawn, two solvers": dict(previews="ode/2+x0", advantage="gains"),
    "previews even levels": dict(previews="3", preview_levels="even", advantage="turns"),
    "previews at depths": dict(previews="x0", preview_at=(1, 3), advantage="gains"),
    **{f"previews {a} {s}": dict(previews="ode", advantage=a, std=s)
       for a in ("gains", "joint-gains", "turns", "consistent-turns", "granularities") for s in ("own", "global")},
    "small dense-grpo": {"recipe": "dense-grpo", "roots": 3, "splits": (), "steps": 4},
    "small stepwise-flow-grpo": {"recipe": "stepwise-flow-grpo", "branch_factor": 3, "splits": (0,), "steps": 4},
    "small tp-grpo": {"recipe": "tp-grpo", "roots": 3, "splits": (), "steps": 4},
    "small g2rpo": {"recipe": "g2rpo", "branch_factor": 3, "splits": (), "side": (0, 1), "steps": 4},
    "seen, pooled": {"splits": (0, 1, 3), "previews": "ode/2+x0", "advantage": "consistent-turns", "std": "pooled",
                     "min_nodes": 3},
    # tests/test_view.py
    "view tree": {"steps": 4, "splits": (0, 1), "tree_every": 1},
    "view funnel": VIEW_FUNNEL | {"steps": 4, "tree_every": 1},
    "view side": {"splits": (), "steps": 4, "roots": 2, "side": (0, 2), "branch_factor": 3, "advantage": "siblings",
                  "lora_rank": 2, "tree_every": 1},
    "view small batches": {"steps": 4, "splits": (0, 1), "max_batch": 3, "tree_every": 1},
    "view adaptive": {"steps": 4, "adaptive": True, "tree_every": 1},
    "view selected leaves": {"steps": 4, "splits": (0, 1), "group_selection": "ovf", "group_keep": 2,
                             "prune": "extreme", "prune_keep": 1, "tree_every": 1},
    "view demo": {"steps": 4, "splits": (0, 1), "iterations": 3, "evaluate_every": 2, "evaluation_prompts": 8},
    # tests/test_training.py, test_retain.py, test_steps.py
    "side branches": SIDE,
    "moving window": MOVING | {"iterations": 3},
    "funnel": FUNNEL,
    "pruned": PRUNED,
    "best children": {"prune": "parent-top1"},
    "depth window": {"prune": "depth-window"},
    "pruned wide": {"prune": "extreme", "prune_keep": 1, "branch_factor": 3, "max_batch": 2, "train_fraction": 0.8},
    "chain, a share": CHAIN | {"train_fraction": 0.8},
    "chain, selected": CHAIN | {"group_selection": "ovf", "group_keep": 3, "max_batch": 2},
    "guard and kl": {"ratio": "guard", "kl": 0.1},
    "adaptive": {"adaptive": True},
    "adaptive funnel": {"adaptive": True, "splits": (0, 1, 3), "group_selection": "ovf", "group_keep": 4},
    "noisy last": {"noisy_last": True},
    "tree's mean": {"loss_mean": "step*tree"},
    "previews, merged": {"previews": "ode/2+x0", "advantage": "consistent-turns", "merged": {4: 2}},
    "trust region": {"loss": "kl-mask", "kl_limit": 1e-6, "reward_sum": "decoupled"},
    "scaled, plain density": {"split_noise": "scaled", "split_density": "plain", "s": 0.8},
    "same root": {"roots": 2, "same_root": True, "splits": (1,)},
    "s inf": {"s": float("inf")},
    "beta edge sum": {"weights": "edge", "beta": 0.5, "beta_scale": "sum"},
    "beta sqrt": {"beta_scale": "sqrt", "beta": 2.0},
    "flow transition": {"transition": "flow", "eta": 0.7},
    "flow-grpo parts": FLOW,
    "flow-grpo averages": FLOW | {"learning_rate": 1e-2, "ema_every": 2, "iterations": 3},
    "parts edges": {"steps_per_pass": 3, "step_unit": "edges", "ema_every": 2, "ema_decay": 0.9},
    "parts prompts": {"steps_per_pass": 2, "step_unit": "prompts", "passes": 2, "max_batch": 2},
    "parts trajectories": {"steps_per_pass": 2, "step_unit": "trajectories", "passes": 2},
    "average used": AVERAGE | {"ema_used": True},
    "average": AVERAGE,
    "average ramp": AVERAGE | {"ema_ramp": True, "ema_used": True, "ema_decay": 0.99},
    "evaluation steps": {"evaluate_every": 1, "evaluation_steps": 9, "evaluation_prompts": 37, "max_batch": 4},
    "evaluation rewards": {"evaluate_every": 1, "reward": "0.7*tiny-clip+0.3*tiny-pickscore",
                           "held_out": "tiny-aesthetic,tiny-hps,tiny-geneval"},
    "norm of a sum": {"reward": "norm(tiny-clip+2*tiny-pickscore)", "evaluate_every": 1},
    "window progressive": {"steps": 8, "window": "progressive", "window_size": 2, "window_start": 0, "window_every": 1,
                           "window_stop": 5, "stochastic": "window", "splits": "window-start", "iterations": 3},
    "window geometric": {"recipe": "mixgrpo", "window": "geometric", "roots": 4, "window_size": 2, "window_stop": 3,
                         "splits": ()},
    "released gradients": {"loss_mean": "step*tree", "adam_eps": 1.0, "max_grad_norm": 1e9},
    # memory, precision and speed
    "max_batch 1, decode_batch 1": {"max_batch": 1, "decode_batch": 1},
    "max_batch, train_batch": {"max_batch": 3, "train_batch": 2, "advantage": "leave-one-out"},
    "no padding": {"max_batch": 4, "pad_batches": False},
    "recompute_old": {"recompute_old": True, "max_batch": 3, "train_batch": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "every second block": {"gradient_checkpointing": True, "checkpoint_blocks": 2},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, checkpointing, slicing": {"mixed_precision": "bf16", "gradient_checkpointing": True, "vae_slicing": True},
    "bf16 adapter": {"mixed_precision": "bf16", "base_dtype": "bfloat16", "lora_rank": 4, "kl": 0.1},
    "bf16, recompute_old": {"mixed_precision": "bf16", "recompute_old": True, "max_batch": 3, "passes": 2},
    "lora": {"lora_rank": 4, "lora_alpha": 16, "learning_rate": 1e-2, "evaluate_every": 1},
    "embeddings": {"embeddings": "EMBEDDINGS", "evaluate_every": 1},
    "tiling": {"vae_tiling": True, "evaluate_every": 2},
    "async checkpoints": {"checkpoint_async": True, "checkpoint_every": 1, "keep_checkpoints": 1, "iterations": 3},
    "keep_every": {"checkpoint_every": 1, "keep_checkpoints": 1, "keep_every": 2, "iterations": 4, "steps": 4},
    "81 leaves": {"steps": 5, "splits": (0, 1, 2, 3), "branch_factor": 3, "prompts_per_iteration": 1},
    "own reward by name": {"reward": "record_scores:redness", "held_out": "tiny-clip", "evaluate_every": 1},
    "own reward with nan": {"reward": "record_scores:sometimes_nan", "prompts_per_iteration": 4, "max_unscored": 1.0,
                            "iterations": 3},
    "seed": {"seed": 7, "prompts": "digits"},
    "nothing": {"learning_rate": 0.0},
}


def add_options():
    six = BASE | dict(iterations=2, prompts_per_iteration=2, steps=6, splits=(0, 2))
    for setting in OPTION_TRAINS:
        trained(f"options/recipes {json.dumps(setting)}", six | {"steps_per_pass": 1} | setting)
    for name, changes in MIXES.items():
        if changes.get("embeddings") == "EMBEDDINGS":
            ITEMS[f"options/{name}"] = with_embeddings(changes)
        else:
            trained(f"options/{name}", SMALL | changes)
    trained("options/own reward object", SMALL | {"evaluate_every": 1}, lambda: {"reward": own("redness")})
    trained("options/own prompts object", SMALL, lambda: {"prompts": ["a red 3", "two blue 5s", "a green 7"]})
    for extra in ({}, {"previews": "ode", "advantage": "gains"}, {"roots": 6, "splits": (), "prune_at": {2: 4}}):
        name = f"options/gaussian flow {json.dumps(extra)}"
        trained(name, SMALL | {"iterations": 3} | extra, gaussian)


def own(name):
    import record_scores

    return getattr(record_scores, name)


def gaussian():
    from branchgrpo import GaussianFlow

    return {"policy": GaussianFlow(), "reward": own("near_two"), "prompts": ["a", "b"]}


def with_embeddings(changes):
    def item(folder, _):
        for name in ("run", "again"):  # written, then read
            table = SMALL | changes | {"embeddings": str(folder / "embeddings"), "output": str(folder / name)}
            in_fork(lambda table=table: fit(table) and None, folder / "log")
        return {name: run_record(folder / name) for name in ("run", "again")}

    return item


# 4: two processes

FULL = {"sharding": "full"}
LINEAR = {"adam_eps": 1.0, "learning_rate": 0.1, "max_grad_norm": 1e9}  # AdamW's step is then nearly the gradient
LEAVES81 = {"steps": 5, "splits": (0, 1, 2, 3), "branch_factor": 3, "prompts_per_iteration": 1, "train_batch": 8}
TREE_PRUNED = {"prune": "extreme", "prune_keep": 2, "advantage": "leave-one-out", "min_nodes": 3, "splits": (0, 1, 3)}
BIG_FUNNEL = {"roots": 12, "splits": (), "prune_at": {1: 7, 3: 5}, "group_selection": "ovf", "group_keep": 3,
              "std": "global", "kl": 0.1, "ratio": "guard", "reward": "norm(tiny-clip+2*tiny-pickscore)"}
ADAPTIVE = {"splits": (0, 1, 3), "adaptive": True}
SEEN = MIXES["seen, pooled"]
SHARED = {"ranks_per_prompt": 2}
PROCESSES = {
    "ddp tree": {"kl": 0.1},
    "ddp pruned": PRUNED,
    "ddp funnel": FUNNEL,
    "ddp objective": OBJECTIVE,
    "ddp side": SIDE,
    "ddp evaluated": {"evaluate_every": 1, "evaluation_prompts": 7, "max_batch": 4, "tree_every": 1},
    "ddp uneven": {"max_batch": 5, "passes": 2, "steps_per_pass": 2, "step_unit": "edges"},
    "shared tree": SHARED | {"kl": 0.1},
    "shared 81 leaves": SHARED | LEAVES81,
    "shared pruned": SHARED | TREE_PRUNED,
    "shared funnel": SHARED | BIG_FUNNEL,
    "shared funnel pruned": SHARED | BIG_FUNNEL | {"prune": "extreme", "prune_keep": 1},
    "shared adaptive": SHARED | ADAPTIVE,
    "shared previews": SHARED | SEEN,
    "shared single calls": SHARED | {"max_batch": 1, "decode_batch": 1},
    "shared evaluated": SHARED | {"evaluate_every": 1, "evaluation_prompts": 7, "prompts_per_iteration": 1},
    "full tree": FULL | {"kl": 0.1},
    "full pruned": FULL | PRUNED,
    "full funnel": FULL | FUNNEL,
    "full shared funnel pruned": FULL | SHARED | BIG_FUNNEL | {"prune": "extreme", "prune_keep": 1},
    "full shared tree": FULL | SHARED | {"prompts_per_iteration": 1},
    "full evaluated": FULL | {"evaluate_every": 1, "evaluation_prompts": 5},
    "full bf16": FULL | {"mixed_precision": "bf16", "gradient_checkpointing": True},
    "full adapter": FULL | {"mixed_precision": "bf16", "base_dtype": "bfloat16", "lora_rank": 4, "kl": 0.1},
    "full clips": FULL | VIDEO | {"backbone": "tiny-wan", "kl": 0.1},
    "full sd3": FULL | {"backbone": "tiny-sd3"},
}
WITH_ADAM = ("ddp tree", "shared funnel", "full tree")  # with the usual AdamW too, whose steps have a gradient's sign


def processes_item(changes):
    def item(folder, name):
        table = SMALL | {"splits": (0, 2)} | changes | {"output": str(folder / "run")}
        together(2, lambda: fit(table) and None, folder / "log")
        keep_weights(folder / "run", name)
        return run_record(folder / "run")

    return item


def four_item(changes):
    def item(folder, name):
        table = SMALL | {"splits": (0, 2), "prompts_per_iteration": 4} | changes | {"output": str(folder / "run")}
        together(4, lambda: fit(table) and None, folder / "log")
        keep_weights(folder / "run", name)
        return run_record(folder / "run")

    return item


def torchrun_item(folder, name):
    "By the command line under torchrun itself."
    import subprocess

    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = folder / "worker.py"
    worker.write_text(
        "import os, sys\nimport torch\ntorch.set_num_threads(1)\n"
        "try:\n    from branchgrpo.cli.main import main\nexcept ImportError:\n    from branchgrpo.cli import main\n"
        "code = main(sys.argv[1:])\nsys.stdout.flush()\nos._exit(code)\n"
    )
    options = ["--steps", "6", "--splits", "0,2", "--prompts-per-iteration", "2", "--iterations", "2"]
    options += ["--evaluate-every", "0", "--tracker", "none", "--sharding", "full", "--adam-eps", "1.0"]
    options += ["--learning-rate", "0.1", "--max-grad-norm", "1e9"]
    done = subprocess.run([*words, worker, "train", "--output", folder / "run", *options], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    keep_weights(folder / "run", name)
    return run_record(folder / "run")


def add_processes():
    for name, changes in PROCESSES.items():
        lines = {} if "lora_rank" in changes else LINEAR
        ITEMS[f"processes/{name}"] = processes_item(lines | changes)
        if name in WITH_ADAM:
            ITEMS[f"processes/{name}, AdamW"] = processes_item(changes)
    ITEMS["processes/four shared by two, pruned"] = four_item(LINEAR | SHARED | TREE_PRUNED)
    ITEMS["processes/four hybrid"] = four_item(LINEAR | {"sharding": "hybrid"})
    ITEMS["processes/torchrun, command line, full"] = torchrun_item


# 5: killed and resumed

KILLED = {
    "tree": {},
    "moving window": MOVING,
    "side branches": SIDE,
    "another objective": OBJECTIVE,
    "averages, parts": {"steps_per_pass": 3, "step_unit": "edges", "ema_every": 2, "ema_decay": 0.9, "ema_used": True},
    "lora, evaluated": {"lora_rank": 2, "evaluate_every": 2, "learning_rate": 1e-3},
    "async": {"checkpoint_async": True},
    "bf16": {"mixed_precision": "bf16"},
    "funnel": FUNNEL,
    "adaptive": {"adaptive": True},
    "all together": ALL_TOGETHER | dict(ratio="guard", kl=0.1, max_batch=3),
    "gated kl": MIXES["gated kl"],
    "dense-grpo": MIXES["small dense-grpo"],
    "stepwise-flow-grpo": MIXES["small stepwise-flow-grpo"],
    "tp-grpo": MIXES["small tp-grpo"],
    "g2rpo": MIXES["small g2rpo"],
    "two sharded": FULL | {"processes": 2},
    "two shared funnel": SHARED | BIG_FUNNEL | {"processes": 2},
}


def options_of(table):
    "A table as the YAML file of the command line; JSON is YAML."
    return json.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in table.items()})


def killed_item(changes):
    def item(folder, _):
        changed = dict(changes)
        n = changed.pop("processes", 1)
        table = SMALL | {"checkpoint_every": 1, "iterations": 4} | changed
        log = folder / "log"

        def command_of(name):
            file = folder / f"{name}.yaml"
            file.write_text(options_of(table | {"output": str(folder / name)}))
            return lambda: main()(["train", "--config", str(file)])

        def kill():
            fit(table | {"output": str(folder / "killed")}, callbacks=[Killer(3)])

        def start(function, expected=0):
            together(n, function, log, expected) if n > 1 else in_fork(function, log, expected)

        start(command_of("whole"))
        start(kill, -signal.SIGKILL)
        before = run_record(folder / "killed")
        start(command_of("killed"))
        whole, again = run_record(folder / "whole"), run_record(folder / "killed")
        for record in (whole, again):  # which checkpoints are left may differ
            record["checkpoint"].pop("kept", None)
        return {"whole": whole, "resumed equals whole": whole == again, "rows at the kill": len(before["metrics"]),
                "differing": [key for key in whole if whole[key] != again[key]]}

    return item


def add_killed():
    for name, changes in KILLED.items():
        ITEMS[f"killed/{name}"] = killed_item(changes)


# 6: runs of today's code

OLD_TABLE = SMALL | {"iterations": 4, "evaluate_every": 2, "ema_decay": 0.9}
OLD_FINISHED = {
    "finished": {},
    "finished-lora": {"lora_rank": 4, "lora_alpha": 16, "learning_rate": 1e-2},
    "finished-sd": {"backbone": "tiny-sd", "recipe": "pro-grpo-sd", "roots": 6, "splits": (), "prune_at": {2: 4, 3: 2},
                    "prompts": "digits"},
    "finished-wan": VIDEO | {"backbone": "tiny-wan", "guidance_scale": 3.0, "iterations": 2},
}
OLD_UNFINISHED = {
    "unfinished": {},
    "unfinished-lora": OLD_FINISHED["finished-lora"],
    "unfinished-moving": MOVING,
    "unfinished-funnel": FUNNEL,
    "unfinished-previews": MIXES["small g2rpo"],
    "unfinished-objective": OBJECTIVE,
    "unfinished-own-reward": {"reward": "record_scores:redness", "held_out": "tiny-clip"},
    "unfinished-sharded": FULL | {"processes": 2},
}


def make_old_runs():
    "Make old_runs/ by the code on PYTHONPATH. Refused if it is there."
    if OLD.exists():
        sys.exit(f"{OLD} is there; it is made once")
    OLD.mkdir()
    log = HERE / "old_runs.log"
    for name, changes in OLD_FINISHED.items():
        print(name, flush=True)
        table = OLD_TABLE | changes | {"output": str(OLD / name)}
        in_fork(lambda table=table: fit(table) and None, log)
    for name, changes in OLD_UNFINISHED.items():
        print(name, flush=True)
        changed = dict(changes)
        n = changed.pop("processes", 1)
        table = OLD_TABLE | changed | {"output": str(OLD / name)}
        function = lambda table=table: fit(table, callbacks=[Killer(3)]) and None  # noqa: E731
        together(n, function, log, -9) if n > 1 else in_fork(function, log, -signal.SIGKILL)
        kept = sorted(p.name for p in (OLD / name / "checkpoints").iterdir() if p.name.isdigit())
        rows = len((OLD / name / "metrics.jsonl").read_text().splitlines())
        assert kept == ["000002"] and rows == 3, (name, kept, rows)
    print("evaluation-unfinished", flush=True)
    folder = HERE / "old_runs_making"
    folder.mkdir(exist_ok=True)
    command(evaluation_words(OLD / "finished", OLD / "evaluation-unfinished"), folder)
    for path in (*sorted((OLD / "evaluation-unfinished/blocks").glob("*"))[-1:],
                 OLD / "evaluation-unfinished/summary.json", OLD / "evaluation-unfinished/images.jsonl"):
        path.unlink()
    shutil.rmtree(folder)
    print("made", OLD)


def evaluation_words(backbone, output, *more):
    words = ["evaluate", "--backbone", backbone, "--output", output, "--limit", "10", "--block", "4", "--steps", "6"]
    return [*words, "--rewards", "tiny-clip", "tiny-aesthetic", "0.5*tiny-clip+tiny-hps", *more]


def evaluation_record(folder):
    return {
        "images": rows_of(folder / "images.jsonl"),
        "summary": json.loads((folder / "summary.json").read_text()),
        "pixels": {str(p.relative_to(folder)): of_image(p) for p in sorted(folder.rglob("*.png"))},
    }


def resumed_item(source, table, processes):
    def item(folder, _):
        shutil.copytree(OLD / source, folder / "run")
        whole = table | {"output": str(folder / "run")}
        function = lambda: fit(whole) and None  # noqa: E731
        log = folder / "log"
        together(processes, function, log) if processes > 1 else in_fork(function, log)
        return {"source": folder_digest(OLD / source)} | run_record(folder / "run")

    return item


def resumed_by_command(source, table):
    def item(folder, _):
        shutil.copytree(OLD / source, folder / "run")
        file = folder / "run.yaml"
        file.write_text(options_of(table | {"output": str(folder / "run")}))
        in_fork(lambda: main()(["train", "--config", str(file)]), folder / "log")
        return {"source": folder_digest(OLD / source)} | run_record(folder / "run")

    return item


def evaluated_item(source, *more):
    def item(folder, _):
        command(evaluation_words(OLD / source, folder / "found", *more), folder)
        return {"source": folder_digest(OLD / source)} | evaluation_record(folder / "found")

    return item


def continued_evaluation(folder, _):
    shutil.copytree(OLD / "evaluation-unfinished", folder / "found")
    command(evaluation_words(OLD / "finished", folder / "found"), folder)
    return {"source": folder_digest(OLD / "evaluation-unfinished")} | evaluation_record(folder / "found")


def sampled_item(source):
    def item(folder, _):
        words = ["--backbone", source if str(source).startswith("tiny") else OLD / source, "--steps", "6"]
        prompts = ["a red 3 moving left", "a blue 5 standing still"] if "wan" in source else ["a red 3", "two blue 5s"]
        command(["sample", "--prompt", *prompts, *words, "--output", folder / "found.png"], folder)
        return of_image(folder / "found.png")

    return item


def read_item(source):
    "What `Run` and `view` say of an old run."

    def item(folder, _):
        from branchgrpo import Run

        run = Run(OLD / source)
        return {"finished": run.finished, "metrics": [timeless(row) for row in run.metrics],
                "evaluations": [timeless(row) for row in run.evaluations]}

    return item


def add_old_runs():
    for name, changes in OLD_UNFINISHED.items():
        changed = {k: v for k, v in changes.items() if k != "processes"}
        table = OLD_TABLE | changed
        ITEMS[f"old_runs/{name} resumed"] = resumed_item(name, table, changes.get("processes", 1))
        if "processes" in changes:
            ITEMS[f"old_runs/{name} resumed by one"] = resumed_item(name, table, 1)
        ITEMS[f"old_runs/{name} read"] = read_item(name)
    ITEMS["old_runs/unfinished resumed by a command"] = resumed_by_command("unfinished", OLD_TABLE)
    for name, changes in OLD_FINISHED.items():
        ITEMS[f"old_runs/{name} read"] = read_item(name)
        ITEMS[f"old_runs/{name} started again"] = resumed_item(name, OLD_TABLE | changes, 1)
        ITEMS[f"old_runs/{name} goes on"] = resumed_item(name, OLD_TABLE | changes | {"iterations": 5}, 1)
        more = ("--prompts", "clips") if "wan" in name else ()
        ITEMS[f"old_runs/{name} evaluated"] = evaluated_item(name, *more)
        ITEMS[f"old_runs/{name} sampled"] = sampled_item(name)
    for weights in ("ema", "base"):
        ITEMS[f"old_runs/finished evaluated {weights}"] = evaluated_item("finished", "--weights", weights)
    ITEMS["old_runs/finished evaluated two samples"] = evaluated_item("finished", "--samples", "2", "--seed", "3")
    ITEMS["old_runs/evaluation goes on"] = continued_evaluation


# 7: the command line's numbers

PUBLISHED = {
    "black-forest-labs/FLUX.1-dev": ("branchgrpo", "pro-grpo"),
    "stabilityai/stable-diffusion-3.5-medium": ("flow-grpo",),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("pro-grpo-sd",),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("flash-grpo",),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": ("branchgrpo",),
    "Qwen/Qwen-Image": ("flow-grpo",),
}


def printed_item(*words):
    def item(folder, _):
        return {"stdout": command(words, folder).splitlines()}

    return item


def settings_item(*words):
    def item(folder, _):
        import yaml

        table = yaml.safe_load(command(["train", *words, "--print-config"], folder))
        return {k: v for k, v in table.items() if k not in LEFT_OUT}

    return item


def json_item(*words, keep=None):
    def item(folder, _):
        found = json.loads(command(words, folder))
        return {"found": found if keep is None else {key: found[key] for key in keep}}

    return item


def base_evaluation(backbone, *more):
    def item(folder, _):
        command(evaluation_words(backbone, folder / "found", *more), folder)
        return evaluation_record(folder / "found")

    return item


def add_commands():
    from branchgrpo import BACKBONES, RECIPES

    ITEMS["commands/recipes"] = json_item("recipes", "--json")
    ITEMS["commands/rewards"] = json_item("rewards", "--json")
    for name in RECIPES.names():
        ITEMS[f"commands/recipe {name}"] = json_item("recipes", name, "--json")
        ITEMS[f"commands/recipe printed {name}"] = printed_item("recipes", name)
        ITEMS[f"commands/settings {name}"] = settings_item("--recipe", name)
        ITEMS[f"commands/doctor {name}"] = json_item("doctor", "--recipe", name, "--json", keep=("costs",))
    for backbone in BACKBONES.names():
        more = ("--prompts", "clips") if "wan" in backbone else ()
        reward = ("--reward", "motion", "--prompts", "clips") if "wan" in backbone else ("--prompts", "digits")
        ITEMS[f"commands/evaluate {backbone}"] = base_evaluation(backbone, *more)
        if backbone != "tiny-wan-i2v":  # it needs images, which `sample` does not take
            ITEMS[f"commands/sample {backbone}"] = sampled_item(backbone)
        ITEMS[f"commands/settings {backbone}"] = settings_item("--backbone", backbone, *reward)
        words = ("doctor", "--backbone", backbone, *reward, "--json")
        ITEMS[f"commands/doctor {backbone}"] = json_item(*words, keep=("costs",))
    for backbone, recipes in PUBLISHED.items():
        for recipe in recipes:
            words = ("doctor", "--backbone", backbone, "--recipe", recipe, "--json")
            ITEMS[f"commands/doctor {backbone} {recipe}"] = json_item(*words, keep=("costs",))
    words = ("doctor", "--recipe", "branchgrpo", "--backbone", "black-forest-labs/FLUX.1-dev", "--sharding", "full")
    words += ("--gradient-checkpointing", "--mixed-precision", "bf16", "--max-batch", "4", "--json")
    ITEMS["commands/doctor FLUX sharded"] = json_item(*words, keep=("costs",))
    for name in ("dancegrpo-sd", "pro-grpo-sd"):
        ITEMS[f"commands/settings tiny-sd {name}"] = settings_item("--recipe", name, "--backbone", "tiny-sd")


GROUPS = {"recipes": add_recipes, "backbones": add_backbones, "options": add_options, "processes": add_processes,
          "killed": add_killed, "old_runs": add_old_runs, "commands": add_commands}


# ------------------------------------------------------------------------------------------------ the recording


def cleaned(value):
    "A result without the places of this recording."
    if isinstance(value, str):
        return value.replace(str(TMP), "TMP").replace(str(HERE), "HERE")
    if isinstance(value, dict):
        return {str(key): cleaned(v) for key, v in value.items()}
    return [cleaned(v) for v in value] if isinstance(value, (list, tuple)) else value


def recorded(name):
    "Run one item in a fork with a session of its own; return its result."
    folder = TMP / hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def work():
        os.setsid()
        os.chdir(HERE)
        result = cleaned(ITEMS[name](folder, name))
        (folder / "result.json").write_text(json.dumps(result))

    code = waited(forked(work, folder / "item.log"))
    if code:
        lines = tail(folder / "item.log").strip().splitlines() or [f"exit code {code}"]
        return {"failed": cleaned(lines[-1]), "log": cleaned("\n".join(lines[-40:]))}
    result = json.loads((folder / "result.json").read_text())
    shutil.rmtree(folder)
    return result


def warm_up(folder):
    "In a fork: train, evaluate and sample a little of each family; write the names of all modules that this needs."

    def work():
        for backbone in ("tiny-flux", "tiny-sd", "tiny-sd3", "tiny-wan", "tiny-wan-i2v"):
            kind = {"backbone": backbone} | (VIDEO if "wan" in backbone else {"reward": TWO_REWARDS})
            table = BASE | {"steps": 3, "splits": (0,), "iterations": 1, "prompts_per_iteration": 1, "evaluate_every": 1}
            table |= {"lora_rank": 1 if backbone == "tiny-flux" else 0, "output": str(folder / backbone)}
            try:
                fit(table | kind)
            except Exception:
                traceback.print_exc()
        main()([str(word) for word in evaluation_words("tiny-flux", folder / "found")])
        main()(["doctor", "--json"])
        main()(["sample", "--prompt", "a red 3", "--steps", "2", "--output", str(folder / "found.png")])
        (folder / "modules.json").write_text(json.dumps(list(sys.modules)))

    in_fork(work, folder / "log")
    return json.loads((folder / "modules.json").read_text())


def preload():
    "Import what the forks need, so that each starts fast. Trains nothing here: forks use autograd."
    import importlib

    from branchgrpo import RECIPES, Run, TrainConfig, Trainer  # noqa: F401

    main()
    if os.environ.get("RECORD_COLD"):  # the same numbers, by processes that import all for themselves
        return
    known = HERE / "modules.json"  # of other packages; found once
    if not known.exists():
        folder = TMP / "warm"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        others = [name for name in warm_up(folder) if name.partition(".")[0] not in ("branchgrpo", "record_scores", "__main__")]
        known.write_text(json.dumps(others))
        shutil.rmtree(folder)
    for name in json.loads(known.read_text()):
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except BaseException:
                pass
    import threading

    assert threading.active_count() == 1, threading.enumerate()


def changed(out, change):
    "Change the table in OUT under a lock, so that two recorders may work at different groups of one OUT."
    with open(out.with_name(f"{out.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = json.loads(out.read_text()) if out.exists() else {"items": {}, "seconds": {}}
        change(table)
        temporary = out.with_name(f"{out.name}.tmp")
        temporary.write_text(json.dumps(table, indent=0))
        os.replace(temporary, out)
    return table


def is_left(table, name):
    return "failed" in table["items"].get(name, {"failed": ""})


def run():
    global TMP, WEIGHTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group; may be given several times")
    parser.add_argument("--item", help="only items whose name holds this text")
    parser.add_argument("--list", action="store_true", help="list the items and stop")
    parser.add_argument("--reverse", action="store_true", help="the last item first")
    parser.add_argument("--make-old-runs", action="store_true")
    o = parser.parse_args()
    import branchgrpo

    print("branchgrpo:", branchgrpo.__file__, flush=True)
    if o.make_old_runs:
        TMP = SCRATCH / "record-making"
        preload()
        return make_old_runs()
    for group in o.only or GROUPS:
        GROUPS[group]()
    names = [name for name in ITEMS if not o.item or o.item in name]
    if o.reverse:
        names.reverse()
    if o.list:
        return print(*names, f"{len(names)} items", sep="\n")
    if o.out is None:
        parser.error("OUT.json is missing")
    out = o.out.resolve()
    TMP, WEIGHTS = SCRATCH / f"record-{out.stem}", out.with_suffix(".weights")
    about = {"tree": str(Path(branchgrpo.__file__).parent),
             "versions": {"torch": torch.__version__, "python": sys.version.split()[0]}}
    table = changed(out, lambda table: table.update(about))
    todo = [name for name in names if is_left(table, name)]
    print(f"{len(names)} items, {len(todo)} to do", flush=True)
    preload()
    begin = time.monotonic()
    for n, name in enumerate(todo, 1):
        if not is_left(json.loads(out.read_text()), name):  # another recorder did it
            continue
        started = time.monotonic()
        try:
            result = recorded(name)
        except TimeoutError as error:
            result = {"failed": str(error), "log": ""}
        seconds = round(time.monotonic() - started, 2)
        changed(out, lambda table: (table["items"].update({name: result}), table["seconds"].update({name: seconds})))
        state = f"FAILED: {result['failed'][:300]}" if "failed" in result else "ok"
        print(f"{n}/{len(todo)} {time.monotonic() - begin:6.0f} s  {seconds:6.1f} s  {name}  {state}", flush=True)
    if TMP.exists() and not any(TMP.iterdir()):
        TMP.rmdir()
    table = json.loads(out.read_text())
    failed = [name for name in names if is_left(table, name)]
    print(f"{len(names)} items, {len(failed)} failed, {time.monotonic() - begin:.0f} s", *failed, sep="\n  ")
    return sys.exit(bool(failed))


if __name__ == "__main__":
    run()
