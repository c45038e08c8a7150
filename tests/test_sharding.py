"""One, two and four processes, with whole (DDP) and with sharded weights (FSDP2), do the same; on
CPUs, by gloo."""

import json
from pathlib import Path

import pytest
import torch
from slow import often
from test_training import SMALL, started

from branchgrpo.training.checkpoint_files import newest, read_saved_table

BEGIN = """
import json, os, sys, warnings
import torch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from branchgrpo import TrainConfig, Trainer
from branchgrpo.training.checkpoints import Progress, Saver, load_checkpoint
from branchgrpo.training.speed import sharded_parts, whole_tensor
from branchgrpo.training.update import accumulate, optimiser_step, update
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
rank, out = t.accelerator.process_index, sys.argv[2]
def everything(table):
    return {name: whole_tensor(value.detach()).clone() for name, value in table.items()}
"""
END = """
sys.stdout.flush()
os._exit(0)  # without waiting for gloo's threads
"""


def processes(n, code, table, out, wait=True):
    """Start `n` processes of one training; wait until all end well and return what they saved, or
    return them."""
    per_node = 2 if table.get("sharding") == "hybrid" else n
    found = started(
        n, code, [json.dumps(table), str(out)], out, LOCAL_WORLD_SIZE=per_node, OMP_NUM_THREADS=1
    )
    if not wait:
        return found
    for rank, process in enumerate(found):
        assert process.wait(timeout=300) == 0, Path(f"{out}.log{rank}").read_text()[-3000:]
    return torch.load(out, weights_only=True)


def settings(folder, **changes):
    return (
        SMALL
        | {"output": str(folder), "iterations": 4, "splits": [0, 2], "prompts_per_iteration": 4}
        | changes
    )


STEP = """
x = t.collect(3)
if "lose" in sys.argv[2] and rank == 0:
    x.unscored[:2] = True
t.credit(x)
stats = accumulate(t.learner, x)
grads = everything({name: p.grad for name, p in t.learner.parameters.items() if p.grad is not None})
optimiser_step(t.learner)
t.learner.ema.step(t.learner.parameters)
update(t.learner, x)
result = {"leaves": t.accelerator.gather(x.tree.latents[-1].contiguous()),
          "rewards": t.accelerator.gather(x.rewards.contiguous()), "grads": grads,
          "weights": everything(t.learner.parameters),
          "averages": everything(t.learner.ema.weights),
          "calls": t.accelerator.gather(torch.tensor([stats["calls"]])),
          "mismatch": stats["rollout_mismatch"],
          "sharded": torch.tensor(len(sharded_parts(t.policy.denoiser)))}
if rank == 0: torch.save(result, out)
t.accelerator.wait_for_everyone()
"""
FULL = {"sharding": "full"}
HYBRID = {"sharding": "hybrid"}  # here: two nodes of two processes
PLAIN = {"kl": 0.1}
PRUNED = {
    "prune": "extreme",
    "prune_keep": 1,
    "train_fraction": 0.6,
    "advantage": "leave-one-out",
}
FUNNEL = {
    "roots": 6,
    "splits": [],
    "prune_at": {"2": 4},
    "group_selection": "ovf",
    "group_keep": 3,
    "kl": 0.1,
}


OBJECTIVE = dict(
    loss="kl-mask", kl_limit=1e-6, passes=2, reward="tiny-clip+0.5*tiny-hps+0*tiny-aesthetic"
)
# the batch is that of all processes
OBJECTIVE |= dict(reward_sum="decoupled+batch", kl=0.1, kl_share=0.3)
WHOLE = {}  # DDP
CASES = {
    "pruned, kl": (PRUNED | PLAIN, [(2, FULL)]),
    "pruned, kl, whole": (PRUNED | PLAIN, [(2, WHOLE)]),
    "tree": (PLAIN, [(2, WHOLE), (4, WHOLE), (4, HYBRID)]),
    "pruned": (PRUNED, [(2, FULL), (4, FULL)]),
    "funnel": (FUNNEL, [(4, WHOLE), (2, FULL)]),
    "tree, two prompts lost": (PLAIN, [(2, WHOLE), (2, FULL)]),  # all of one process
    "another objective": (OBJECTIVE, [(2, WHOLE)]),
}


@pytest.mark.parametrize("case", often(CASES, ("pruned, kl",)))
def test_any_number_of_processes_and_any_sharding_do_the_same(tmp_path, case):
    """Trees, rewards, gradients, weights and averages; with KL, uneven micro-batches, pruning, and
    lost prompts."""
    lose = "lose" if "lost" in case else ""
    changes, ways = CASES[case]
    table = settings(tmp_path / "run", **changes, max_batch=5, learning_rate=1e-4)
    one = processes(1, BEGIN + STEP + END, table, tmp_path / f"one{lose}")
    assert one["grads"] and any(grad.abs().max() > 0 for grad in one["grads"].values())
    for n, sharding in ways:
        many = processes(
            n, BEGIN + STEP + END, table | sharding, tmp_path / f"many{lose}{n}{len(sharding)}"
        )
        assert (many["sharded"] > 1) == bool(sharding)
        torch.testing.assert_close(many["leaves"], one["leaves"], rtol=0, atol=2e-4)
        torch.testing.assert_close(many["rewards"], one["rewards"], rtol=0, atol=1e-4)
        assert many["mismatch"] < 1e-5
        for name, gradient in one["grads"].items():
            torch.testing.assert_close(many["grads"][name], gradient, rtol=0, atol=1e-5)
        # AdamW turns a gradient near 0 into a step of either sign
        for kept in ("weights", "averages"):
            differences = torch.cat(
                [(many[kept][k] - one[kept][k]).abs().flatten() for k in one[kept]]
            )
            assert many[kept].keys() == one[kept].keys() and differences.mean() < 2e-6, (
                "2 % of the learning rate"
            )


STATE = """
from pathlib import Path
source, target = Path(sys.argv[2] + ".from").read_text(), Path(sys.argv[2] + ".to").read_text()
if source:
    progress = load_checkpoint(Path(source), t.learner)
    # two updates of two steps
    assert progress.iteration == 3 and t.learner.ema.steps == 4, progress
else:
    progress = Progress(3)
    for iteration in range(2):
        x = t.collect(3)
        t.credit(x)
        update(t.learner, x)
saver = Saver(Path(target), t.settings, t.accelerator)
saver.save(t.learner, progress)
moments = {name: t.learner.optimizer.state[p] for name, p in t.learner.parameters.items()}
result = {"weights": everything(t.learner.parameters),
          "averages": everything(t.learner.ema.weights)}
for kind in ("step", "exp_avg", "exp_avg_sq"):
    result[kind] = everything({n: m[kind] for n, m in moments.items()})
if rank == 0: torch.save(result, out)
t.accelerator.wait_for_everyone()
"""


CHAINS = {  # each process count saves, and the next one reads
    "two, one": [(2, FULL), (1, {})],
    "two, one, four, one": [(2, FULL), (1, FULL), (4, FULL), (1, {})],
}


@pytest.mark.parametrize("name", often(CHAINS, ("two, one",)))
def test_a_checkpoint_is_read_by_any_number_of_processes_to_the_bit(tmp_path, name):
    "With sharded and with whole weights."
    table, source, states = settings(tmp_path / "run", learning_rate=1e-3), "", []
    for place, (n, changes) in enumerate(CHAINS[name]):
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


def test_a_sharded_run_ends_in_a_plain_pipeline(tmp_path):
    run = tmp_path / "run"
    processes(
        2,
        BEGIN + FIT + END,
        settings(run, **FULL | {"prompts_per_iteration": 2, "iterations": 1}),
        tmp_path / "end",
    )
    check_export(run, read_saved_table(newest(run), "weights"))


def check_export(run, weights):
    "The result of a sharded run is a plain diffusers pipeline with the trained weights."
    from diffusers import FluxPipeline

    transformer = FluxPipeline.from_pretrained(run / "model", dtype=torch.float32).transformer
    exported = dict(transformer.named_parameters())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(value, exported[name]) for name, value in weights.items())


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


@pytest.mark.parametrize("kind", often(KINDS, ()))
def test_precisions_adapters_and_families_are_sharded(tmp_path, kind):
    changes = {
        key: str(tmp_path) if value == "EMBEDDINGS" else value for key, value in KINDS[kind].items()
    }
    table = settings(tmp_path / "run", **{"prompts_per_iteration": 2} | changes)
    alone = FULL | {"ranks_per_prompt": 1}
    one = processes(1, BEGIN + LOADED.replace("0.6", "1.1") + END, table | alone, tmp_path / "one")
    two = processes(2, BEGIN + LOADED + END, table | FULL, tmp_path / "two")
    torch.testing.assert_close(one["reward"], two["reward"], rtol=0, atol=2e-3)
