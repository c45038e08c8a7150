"""One, two and four processes, with whole (DDP) and with sharded weights (FSDP2), do the same; on CPUs, by gloo."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import popen
from slow import often
from test_training import SMALL, free_port

from branchgrpo.training.checkpoints import checkpoints_of, damage, newest, read_saved_table
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

BEGIN = """
import json, os, sys, warnings
import torch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from branchgrpo import TrainConfig, Trainer, process_of
from branchgrpo.training.checkpoints import Progress, Saver, load_checkpoint
from branchgrpo.training.credit import assign_credit
from branchgrpo.training.speed import gathered, sharded_parts, whole_tensor
from branchgrpo.training.update import accumulate, optimiser_step, update
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
rank, out = t.accelerator.process_index, sys.argv[2]
everything = lambda table: {name: whole_tensor(value.detach()).clone() for name, value in table.items()}
"""
END = """
sys.stdout.flush()
os._exit(0)  # without waiting for gloo's threads
"""


def processes(n, code, table, out, wait=True):
    "Start `n` processes of one training, as torchrun does; wait until all end well, or return them."
    per_node = 2 if table.get("sharding") == "hybrid" else n
    shared = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": per_node, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": 1}
    started = []
    for rank in range(n):
        env = os.environ | {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        if n == 1:
            env.pop("WORLD_SIZE")
        with open(f"{out}.log{rank}", "w") as log:
            words = [sys.executable, "-c", code, json.dumps(table), str(out)]
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
t.learner.ema.step(t.learner.parameters)
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
HYBRID = {"sharding": "hybrid"}  # here: two nodes of two processes
PLAIN = {"kl": 0.1}
PRUNED = {"prune": "extreme", "prune_keep": 1, "train_fraction": 0.6, "advantage": "leave-one-out", "min_nodes": 3}
FUNNEL = {"roots": 6, "splits": [], "prune_at": {"2": 4}, "group_selection": "ovf", "group_keep": 3, "kl": 0.1}


WHOLE = {}  # DDP
CASES = {
    "pruned, kl": (PRUNED | PLAIN, [(2, WHOLE), (2, FULL)]),
    "tree": (PLAIN, [(2, WHOLE), (4, WHOLE), (4, HYBRID)]),
    "pruned": (PRUNED, [(2, FULL), (4, FULL)]),
    "funnel": (FUNNEL, [(4, WHOLE), (2, FULL)]),
    "tree, one prompt lost": (PLAIN, [(2, WHOLE), (2, FULL)]),
}


@pytest.mark.parametrize("case", often(CASES, ("pruned, kl",)))
def test_any_number_of_processes_and_any_sharding_do_the_same(tmp_path, case):
    "Trees, rewards, gradients, weights and averages; with KL, uneven micro-batches, pruning, and a lost prompt."
    lose = "lose" if "lost" in case else ""
    changes, ways = CASES[case]
    table = settings(tmp_path / "run", **changes, max_batch=5, learning_rate=1e-4)
    one = processes(1, BEGIN + STEP + END, table, tmp_path / f"one{lose}")
    assert one["grads"] and any(grad.abs().max() > 0 for grad in one["grads"].values())
    for n, sharding in ways:
        many = processes(n, BEGIN + STEP + END, table | sharding, tmp_path / f"many{lose}{n}{len(sharding)}")
        assert (many["sharded"] > 1) == bool(sharding)
        torch.testing.assert_close(many["leaves"], one["leaves"], rtol=0, atol=2e-4)
        torch.testing.assert_close(many["rewards"], one["rewards"], rtol=0, atol=1e-4)
        assert many["mismatch"] < 1e-5
        for name, gradient in one["grads"].items():
            torch.testing.assert_close(many["grads"][name], gradient, rtol=0, atol=1e-5)
        for kept in ("weights", "averages"):  # AdamW turns a gradient near 0 into a step of either sign
            differences = torch.cat([(many[kept][k] - one[kept][k]).abs().flatten() for k in one[kept]])
            assert many[kept].keys() == one[kept].keys() and differences.mean() < 2e-6, "2 % of the learning rate"


STATE = """
from pathlib import Path
source, target = Path(sys.argv[2] + ".from").read_text(), Path(sys.argv[2] + ".to").read_text()
if source:
    progress = load_checkpoint(Path(source), t.learner)
    assert progress.iteration == 3 and t.learner.ema.steps == 4, progress  # two updates of two steps
else:
    progress = Progress(3)
    for iteration in range(2):
        rolled, _ = assign_credit(t.learner, t.collector(3), process_of(t.settings, t.policy, 3), t.collector.noise(3))
        update(t.learner, rolled)
saver = Saver(Path(target), t.settings, t.accelerator)
saver.save(t.learner, progress)
saver.finish()
moments = {name: t.learner.optimizer.state[p] for name, p in t.learner.parameters.items()}
result = {"weights": everything(t.learner.parameters), "averages": everything(t.learner.ema.weights)}
result |= {kind: everything({n: m[kind] for n, m in moments.items()}) for kind in ("step", "exp_avg", "exp_avg_sq")}
if rank == 0: torch.save(result, out)
t.accelerator.wait_for_everyone()
"""


def test_a_checkpoint_is_read_by_any_number_of_processes_to_the_bit(tmp_path):
    "Saved by 2, read and saved by 1, by 4, and by one process with whole weights; in a thread or not."
    table, source, states = settings(tmp_path / "run", learning_rate=1e-3), "", []
    chain = [(2, FULL | {"checkpoint_async": True}), (1, FULL), (4, FULL | {"checkpoint_async": True}), (1, {})]
    for place, (n, changes) in enumerate(chain):
        out, target = tmp_path / f"state{place}", tmp_path / f"saved{place}"
        Path(f"{out}.from").write_text(str(source))
        Path(f"{out}.to").write_text(str(target))
        states.append(processes(n, BEGIN + STATE + END, table | changes, out))
        source = target
    for state in states[1:]:
        for kind in states[0]:
            assert state[kind].keys() == states[0][kind].keys()
            for name, value in states[0][kind].items():
                assert torch.equal(value, state[kind][name]), f"{kind} of {name}"
    assert all(step == 4 for step in states[0]["step"].values()), "two updates of two steps"
    assert any(moment.abs().max() > 0 for moment in states[0]["exp_avg"].values())


FIT = """
run = t.fit()
if rank == 0: torch.save({}, out)
"""


def rows(folder):
    "The metrics of a run, without seconds."
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in lines]


def killed_when(started, condition):
    "Kill all processes with SIGKILL as soon as `condition()` holds."
    deadline = time.time() + 200
    while not condition():
        assert time.time() < deadline and all(process.poll() is None for process in started)
        time.sleep(0.0005)
    for process in started:
        process.send_signal(signal.SIGKILL)
    for process in started:
        process.wait()


def test_two_sharded_processes_killed_within_a_save_go_on_to_the_same_end(tmp_path):
    changes = FULL | {"checkpoint_every": 1, "keep_checkpoints": 2, "keep_every": 3, "prompts_per_iteration": 2}
    whole_tensor, killed = (settings(tmp_path / name, **changes) for name in ("whole", "killed"))
    processes(2, BEGIN + FIT + END, whole_tensor, tmp_path / "end")
    saves = tmp_path / "killed/checkpoints"
    killed_when(
        processes(2, BEGIN + FIT + END, killed, tmp_path / "end1", wait=False),
        lambda: saves.exists() and any(path.name == "000002.tmp" for path in saves.iterdir()),
    )
    assert damage(newest(tmp_path / "killed"), contents=False) is None
    processes(2, BEGIN + FIT + END, killed, tmp_path / "end2")
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed") and len(rows(tmp_path / "killed")) == 4
    one, two = (read_saved_table(newest(tmp_path / name), "weights") for name in ("whole", "killed"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert [path.name for path in checkpoints_of(tmp_path / "killed")] == ["000003", "000004"]
    check_export(tmp_path / "killed", two)


def check_export(run, weights):
    "The result of a sharded run is a plain diffusers pipeline with the trained weights."
    from diffusers import FluxPipeline

    transformer = FluxPipeline.from_pretrained(run / "model", dtype=torch.float32).transformer
    exported = dict(transformer.named_parameters())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(value, exported[name]) for name, value in weights.items())


SHELL = """
import os, sys
from branchgrpo.cli import main
os._exit(main(["train", "--config", sys.argv[2] + ".yaml"]))
"""
STOPPED = {
    "alone": (1, {}, signal.SIGUSR2),
    "two": (2, {}, signal.SIGTERM),
    "two, sharded": (2, FULL, signal.SIGTERM),
}


@pytest.mark.parametrize("case", often(STOPPED, ("two, sharded",)))
def test_a_run_that_is_told_to_stop_saves_and_asks_to_be_started_again(tmp_path, case):
    "At the shell: exit code 75, a checkpoint of the iteration that was reached, and the same end; one rank is told."
    n, sharding, number = STOPPED[case]
    changes = sharding | {"checkpoint_every": 100, "prompts_per_iteration": 2, "iterations": 3}
    whole_tensor, stopped = (settings(tmp_path / name, **changes) for name in ("whole", "stopped"))
    processes(n, BEGIN + FIT + END, whole_tensor, tmp_path / "end")
    (tmp_path / "shell.yaml").write_text(json.dumps(stopped))
    started = processes(n, SHELL, settings(tmp_path / "unused"), tmp_path / "shell", wait=False)
    metrics, deadline = tmp_path / "stopped/metrics.jsonl", time.time() + 200
    while not (metrics.exists() and metrics.read_text().count("\n")):
        assert time.time() < deadline and all(process.poll() is None for process in started)
        time.sleep(0.001)
    started[0].send_signal(number)
    assert [process.wait(timeout=200) for process in started] == [75] * n
    assert f"stopped by {number.name} at iteration" in (tmp_path / "shell.log0").read_text()
    assert int(newest(tmp_path / "stopped").name) == len(rows(tmp_path / "stopped")) < 3
    processes(n, BEGIN + FIT + END, stopped, tmp_path / "end2")
    assert rows(tmp_path / "whole") == rows(tmp_path / "stopped")


LOADED = """
held = [p.numel() for p in t.policy.denoiser.parameters()]
assert sum(p.to_local().numel() for p in t.policy.denoiser.parameters()) < 0.6 * sum(held)
row = t.step()
assert row["grad_norm"] > 0 and row["rollout_mismatch"] < 1e-3, row
if rank == 0: torch.save({"reward": torch.tensor(row["reward"])}, out)
"""
KINDS = {
    "bfloat16": {"mixed_precision": "bf16", "gradient_checkpointing": True},
    "adapter": {"mixed_precision": "bf16", "base_dtype": "bfloat16", "lora_rank": 4, "kl": 0.1},
    "SD3": {"backbone": "tiny-sd3", "embeddings": "EMBEDDINGS"},
    "tree over processes": {"ranks_per_prompt": 2, "prompts_per_iteration": 1},
    "clips": {"backbone": "tiny-wan", "reward": "motion", "prompts": "clips", "kl": 0.1},
}


@pytest.mark.parametrize("kind", often(KINDS, ("adapter",)))
def test_precisions_adapters_and_families_are_sharded(tmp_path, kind):
    changes = {key: str(tmp_path) if value == "EMBEDDINGS" else value for key, value in KINDS[kind].items()}
    table = settings(tmp_path / "run", **{"prompts_per_iteration": 2} | changes)
    alone = FULL | {"ranks_per_prompt": 1}
    one = processes(1, BEGIN + LOADED.replace("0.6", "1.1") + END, table | alone, tmp_path / "one")
    two = processes(2, BEGIN + LOADED + END, table | FULL, tmp_path / "two")
    torch.testing.assert_close(one["reward"], two["reward"], rtol=0, atol=2e-3)


NOT_FINITE = """
rolled, _ = assign_credit(t.learner, t.collector(3), process_of(t.settings, t.policy, 3), t.collector.noise(3))
if rank == 1:
    rolled.advantages = [advantages * float("nan") for advantages in rolled.advantages]
before = everything(t.learner.parameters)
stats = update(t.learner, rolled)
assert stats["skipped_steps"] == t.settings.steps_per_pass == 2, stats
assert all(torch.equal(before[name], value) for name, value in everything(t.learner.parameters).items())
assert t.learner.ema.steps == 0
if rank == 0: torch.save({}, out)
t.accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("sharding", often(("none", "full"), ("full",)))
def test_a_gradient_that_is_not_finite_on_one_process_is_skipped_by_all(tmp_path, sharding):
    processes(2, BEGIN + NOT_FINITE + END, settings(tmp_path / "run", sharding=sharding), tmp_path / "out")


def test_what_shards_the_model_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="launch: accelerate's FSDP is not supported"):
        Trainer(TrainConfig.from_dict(settings(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
