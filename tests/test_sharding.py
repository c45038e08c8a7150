"""One, two and four processes, with whole (DDP) and with sharded weights (FSDP2), do the same; on CPUs, by gloo."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from test_training import SMALL, free_port

from branchgrpo.reproduction.warm import popen
from branchgrpo.training.checkpoints import checkpoints, is_sound, newest, read_table

BEGIN = """
import dataclasses, json, os, sys, warnings
import torch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from branchgrpo import TrainConfig, Trainer, process_of
from branchgrpo.training.checkpoints import Progress, Saver, load_checkpoint
from branchgrpo.training.distributed import gathered, sharded_parts, whole
from branchgrpo.training.trainer import assign_credit
from branchgrpo.training.update import accumulate, optimiser_step, update
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
rank, out = t.accelerator.process_index, sys.argv[2]
everything = lambda table: {name: whole(value.detach()).clone() for name, value in table.items()}
"""
END = """
sys.stdout.flush()
os._exit(0)  # without waiting for gloo's threads
"""


def processes(n, code, table, out, wait=True):
    "Start `n` processes of one training, as torchrun does; wait until all end well, or return them."
    shared = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": 1}
    started = []
    for rank in range(n):
        env = os.environ | {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        if n == 1:
            env.pop("WORLD_SIZE")
        with open(f"{out}.log{rank}", "w") as log:
            words = [sys.executable, "-c", BEGIN + code + END, json.dumps(table), str(out)]
            started.append(popen(words, env=env, stdout=log, stderr=log))
    if not wait:
        return started
    for rank, process in enumerate(started):
        assert process.wait(timeout=300) == 0, Path(f"{out}.log{rank}").read_text()[-3000:]
    return torch.load(out, weights_only=True)


def settings(folder, **changes):
    return SMALL | {"output": str(folder), "iterations": 4, "splits": [0, 2], "prompts_per_iteration": 4} | changes


STEP = """
with gathered(t.policy.denoiser):
    collected = t.collector(3)
process = process_of(t.settings, t.policy, 3)
if "lose" in sys.argv[2] and rank == 0:
    collected.unscored[:1] = True
rolled, _ = assign_credit(t.learner, collected, process, t.collector.noise(3))
stats = accumulate(t.learner, rolled)
grads = everything({name: p.grad for name, p in t.learner.parameters.items() if p.grad is not None})
optimiser_step(t.learner)
t.learner.average()
update(t.learner, rolled)
result = {"leaves": t.accelerator.gather(collected.tree.latents[-1].contiguous()),
          "rewards": t.accelerator.gather(collected.rewards.contiguous()), "grads": grads,
          "weights": everything(t.learner.parameters), "averages": everything(t.learner.ema.weights),
          "calls": t.accelerator.gather(torch.tensor([stats["calls"]])), "mismatch": stats["rollout_mismatch"],
          "sharded": torch.tensor(len(sharded_parts(t.policy.denoiser)))}
if rank == 0: torch.save(result, out)
t.accelerator.wait_for_everyone()
"""
FULL = {"sharding": "full"}
PLAIN = {"kl": 0.1}
PRUNED = {"prune": "extreme", "prune_keep": 1, "train_fraction": 0.6, "advantage": "leave-one-out", "min_nodes": 3}
FUNNEL = {"roots": 6, "splits": [], "prune_at": {"2": 4}, "group_selection": "ovf", "group_keep": 3, "kl": 0.1}


CASES = {"tree": PLAIN, "pruned": PRUNED, "funnel": FUNNEL, "tree, one prompt lost": PLAIN}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_and_any_sharding_do_the_same(tmp_path, case):
    "Trees, rewards, gradients, weights and averages; with KL, uneven micro-batches, pruning, and a lost prompt."
    lose = "lose" if "lost" in case else ""
    table = settings(tmp_path / "run", **CASES[case], max_batch=5, learning_rate=1e-4)
    one = processes(1, STEP, table, tmp_path / f"one{lose}")
    assert one["grads"] and any(grad.abs().max() > 0 for grad in one["grads"].values())
    for n, sharding in [(2, {}), (2, FULL), (4, FULL)]:
        many = processes(n, STEP, table | sharding, tmp_path / f"many{lose}{n}{len(sharding)}")
        assert (many["sharded"] > 1) == bool(sharding)
        torch.testing.assert_close(many["leaves"], one["leaves"], rtol=0, atol=2e-4)
        torch.testing.assert_close(many["rewards"], one["rewards"], rtol=0, atol=1e-4)
        assert many["mismatch"] < 1e-5
        for name, gradient in one["grads"].items():
            torch.testing.assert_close(many["grads"][name], gradient, rtol=0, atol=1e-5)
        for kept in ("weights", "averages"):  # AdamW turns a gradient near 0 into a step of either sign
            differences = torch.cat([(many[kept][k] - one[kept][k]).abs().flatten() for k in one[kept]])
            assert many[kept].keys() == one[kept].keys() and differences.mean() < 2e-6, "2 % of the learning rate"
