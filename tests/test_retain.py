"""The first optimiser step with the rollout's own graphs: the same gradient, in bounded memory."""

import contextlib
import gc
import signal
import time
import weakref
from functools import partial

import pytest
import torch
from test_sharding import BEGIN, END, processes, settings
from test_training import config, gradient, prepared, rows, start

from branchgrpo.training import model
from branchgrpo.training.checkpoints import newest, read_table
from branchgrpo.training.signals import Preempted
from branchgrpo.training.trainer import Trainer
from branchgrpo.training.update import accumulate

ALL = 10**6
CHAIN = {"splits": (), "roots": 4, "group_selection": "all", "prune": "none"}
WINDOW = {"recipe": "mixgrpo-shared", "splits": "window-start", "branch_factor": 4, "window": "random"}
WINDOW |= {"window_size": 2, "window_stop": 3, "tail_ratio": 0.5}
TREE = {"splits": (0, 2)}
SIDE = {"splits": (), "roots": 2, "side": (0, 2), "branch_factor": 3, "merged": {"3": 2}, "noise_factors": {"0": 1.5}}
SIDE |= {"previews": "ode/2+x0", "preview_at": "after", "advantage": "granularities", "step_weights": "std"}


def both(folder, **changes):
    "Gradients and statistics of one rollout's first optimiser step: predicted again, and with the rollout's graphs."
    found = []
    for retain in (0, changes.pop("retain", ALL)):
        trainer = Trainer(config(folder, **{"steps_per_pass": 1, "passes": 1, **changes, "retain": retain}))
        stats = accumulate(trainer.learner, prepared(trainer))
        found.append((gradient(trainer), stats))
    return found


def equal(one, other):
    assert one.keys() == other.keys() and any(grad.abs().max() > 0 for grad in one.values())
    assert all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    size = torch.cat([grad.flatten() for grad in one.values()]).abs().max()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5 * max(1.0, size.item()))


EXACT = {
    "chain": CHAIN,
    "window": WINDOW,
    "tree": TREE,
    "tree in small calls": TREE | {"max_batch": 3},
    "tree in calls that are not filled up": TREE | {"max_batch": 3, "pad_batches": False},
    "tree, some graphs": TREE | {"max_batch": 2, "retain": 7},
    "adapter, bf16, checkpointing": TREE | {"lora_rank": 4, "mixed_precision": "bf16", "gradient_checkpointing": True},
    "guidance and KL": TREE | {"kl": 0.1, "backbone": "tiny-sd3", "guidance_scale": 3.0, "guidance_grad": True},
    "guard": TREE | {"ratio": "guard", "kl": 0.1},
    "adaptive": TREE | {"adaptive": True},
    "noisy last": TREE | {"noisy_last": True},
    "tree's mean": TREE | {"loss_mean": "step*tree"},
    "previews": TREE | {"previews": "ode/2+x0", "advantage": "consistent-turns", "merged": {"4": 2}},
    "trust region": TREE | {"loss": "kl-mask", "kl_limit": 1e-6, "reward_sum": "decoupled"},
    "side branches": SIDE | {"ratio": "guard", "kl": 0.1, "retain": ALL},  # the trunk is a small part of later calls
}


@pytest.mark.parametrize("case", EXACT)
def test_the_gradient_is_the_same_to_the_bit(tmp_path, case):
    (again, before), (kept, now) = both(tmp_path / "run", **EXACT[case])
    assert before["retained"] == 0 and now["retained"] > 0
    if "retain" not in EXACT[case]:
        assert now["retained"] == now["calls"], "no parent is predicted again"
    else:
        assert now["retained"] <= EXACT[case]["retain"] and now["retained"] < now["calls"]
    assert now["rollout_mismatch"] == 0 and now["ratio_minus_1"] == 0
    for name in ("loss", "kl", "edges", "calls"):
        assert now[name] == before[name]
    equal(again, kept)


FUNNEL = {"splits": (), "roots": 6, "prune_at": {2: 5}, "kl": 0.1, "group_selection": "all"}
ROUNDED = {
    "funnel": FUNNEL,
    "pruned": TREE | {"prune": "extreme", "prune_keep": 1, "branch_factor": 3},
    "best children": TREE | {"prune": "parent-top1"},
    "a share of the steps": CHAIN | {"train_fraction": 0.8},
    "selected": CHAIN | {"group_selection": "ovf", "group_keep": 3, "max_batch": 2},
}


@pytest.mark.parametrize("case", ROUNDED)
def test_where_edges_are_dropped_the_gradient_is_the_same_up_to_rounding(tmp_path, case):
    (again, before), (kept, now) = both(tmp_path / "run", **ROUNDED[case])
    assert now["retained"] > 0 and (now["edges"], now["calls"]) == (before["edges"], before["calls"])
    close(again, kept)


TOGETHER = """
import dataclasses
from branchgrpo.training.iteration import step
found = []
for u in (Trainer(TrainConfig.from_dict(json.loads(sys.argv[1]) | {"retain": 0})), t):
    grads, counts = {}, []
    for iteration in range(2):
        with gathered(u.policy.denoiser):
            collected = u.collector(iteration)
        process = process_of(u.settings, u.policy, iteration)
        rolled, _ = assign_credit(u.learner, collected, process, u.collector.noise(iteration))
        stats = accumulate(u.learner, rolled)
        grads |= {f"{iteration} {name}": whole(p.grad.detach()).clone() for name, p in u.learner.parameters.items()}
        optimiser_step(u.learner)
        counts.append(u.accelerator.gather(torch.tensor([[stats["retained"], stats["calls"]]])))
    row = step(u)
    found.append({"grads": grads, "weights": everything(u.learner.parameters), "counts": torch.stack(counts),
                  "row": row, "sharded": len(sharded_parts(u.policy.denoiser))})
if rank == 0: torch.save(found, out)
t.accelerator.wait_for_everyone()
"""
UNEVEN = {"prune": "extreme", "prune_keep": 1, "branch_factor": 3, "max_batch": 2, "train_fraction": 0.8}
SPREAD = {"ranks_per_prompt": 2, "branch_factor": 3, "kl": 0.1}
MANY = {
    "some graphs": (2, {"max_batch": 2, "retain": 7}, True),
    "uneven": (2, UNEVEN, False),
    "one tree on two": (2, SPREAD, False),
    "one tree on two, previews": (2, SPREAD | {"previews": "ode/2+x0", "advantage": "gains"}, False),
    "side branches": (2, SIDE | {"max_batch": 3}, False),
    "sharded and uneven": (2, UNEVEN | {"sharding": "full"}, False),
    "sharded and checkpointed": (
        2,
        {"sharding": "full", "gradient_checkpointing": True, "mixed_precision": "bf16"},
        True,
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_processes_that_keep_graphs_do_what_they_did(tmp_path, case):
    "Two iterations and a step, with whole (DDP) and sharded weights (FSDP2); processes with unequal micro-batches."
    n, changes, exact = MANY[case]
    table = settings(tmp_path / "run", steps_per_pass=1, **{"retain": ALL} | changes)
    again, kept = processes(n, BEGIN + TOGETHER + END, table, tmp_path / "out")
    assert (kept["sharded"] > 1) == ("sharding" in changes)
    assert again["counts"][..., 0].sum() == 0 and (kept["counts"][..., 0].sum(-1) > 0).all()
    assert torch.equal(again["counts"][..., 1], kept["counts"][..., 1]), "the same parents are trained"
    assert kept["row"]["retained_calls"] > 0 and "retained_calls" not in again["row"]
    (equal if exact else close)(again["grads"], kept["grads"])
    if exact:
        equal(again["weights"], kept["weights"])


@pytest.mark.parametrize("unit", ["prompts", "edges"])
def test_only_the_first_of_several_steps_uses_graphs(tmp_path, unit):
    "Later steps and later passes predict again; the weights end up the same."
    ends = []
    for retain in (0, ALL):
        changes = {"steps_per_pass": 2, "step_unit": unit, "passes": 2, "max_batch": 2, "retain": retain}
        trainer = Trainer(config(tmp_path / "run", **changes))
        row = trainer.step()
        ends.append({name: p.detach().clone() for name, p in trainer.learner.parameters.items()})
    assert row["optimiser_steps"] == 4 and row["trained_calls"] > 2 * row["retained_calls"] > 0
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=2e-5)
    if unit == "prompts":
        equal(*ends)


def test_a_lost_prompt_takes_its_graphs_with_it(tmp_path):
    "Calls that hold a latent which is not finite are predicted again, without it; and the other prompts' graphs serve."
    found = []
    for retain in (0, ALL):
        trainer = Trainer(
            config(tmp_path / "run", max_batch=2, prompts_per_iteration=4, steps_per_pass=1, retain=retain)
        )
        encode, first = trainer.policy.encode, trainer.collector.draw(0)[0]

        def broken(prompts, encode=encode, lost=first):
            table = encode(prompts)
            table["prompt_embeds"][[prompt == lost for prompt in prompts]] = torch.nan
            return table

        trainer.policy.encode = broken
        with pytest.warns(UserWarning, match="prompts are left out"):
            row = trainer.step()
        assert row["unscored_prompts"] >= 1 and row["skipped_steps"] == 0 and row["grad_norm"] > 0
        found.append({name: p.detach().clone() for name, p in trainer.learner.parameters.items()})
    assert 0 < row["retained_calls"] < row["trained_calls"]
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=2e-5)


def test_memory_is_free_when_the_backward_pass_has_run(tmp_path):
    "What the graphs hold dies call by call; and with them all if a signal ends the update."
    trainer = Trainer(config(tmp_path / "run", max_batch=2, steps_per_pass=1, retain=ALL))
    alive, seen = weakref.WeakSet(), []

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # else it would hold the graph that holds it
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        rolled = prepared(trainer)
    backward = trainer.accelerator.backward

    def counted(loss):
        backward(loss)
        seen.append(len(alive))

    held = len(alive)
    trainer.accelerator.backward = counted
    accumulate(trainer.learner, rolled)
    assert held > 0 and seen == sorted(seen, reverse=True) and seen[0] < held and seen[-1] == 0
    assert seen[0] > held * 0.8, "a call at a time"
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        rolled = prepared(trainer)
    assert len(alive) == held
    trainer.stop.received = "SIGTERM"
    before = len(seen)
    with contextlib.suppress(Preempted):
        accumulate(trainer.learner, rolled)
    assert len(seen) == before + 1, "the rest of the update was left out"
    del rolled
    gc.collect()
    assert not alive


def test_a_rollout_keeps_no_more_than_it_shall(tmp_path):
    trainer = Trainer(config(tmp_path / "run", max_batch=4, retain=11, steps_per_pass=1))
    graphs = trainer.collector(0).graphs
    sizes = [chunk.size for calls in graphs.calls.values() for chunk in calls.chunks if chunk.output is not None]
    assert sizes == [4, 4] and graphs.room == 3, "padded rows hold memory, too"
    assert trainer.collector(0).tree.latents[-1].grad_fn is None


def test_a_killed_run_that_keeps_graphs_ends_as_one_that_predicts_again(tmp_path):
    changes = {"steps_per_pass": 1, "max_batch": 4}
    whole = start(tmp_path / "whole", **changes, retain=0)
    killed = start(tmp_path / "killed", **changes, retain=21)
    file, deadline = tmp_path / "killed/metrics.jsonl", time.time() + 300
    while not (file.exists() and file.read_text().count("\n") >= 3):
        assert time.time() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    for name, process in (("whole", whole), ("killed", start(tmp_path / "killed", **changes, retain=21))):
        assert process.wait(timeout=300) == 0, (tmp_path / f"{name}.log").read_text()[-2000:]
    found = rows(tmp_path / "killed")
    kept = [row.pop("retained_calls") for row in found]
    assert len(kept) == 6 and min(kept) > 0 and found == rows(tmp_path / "whole")
    one, two = (read_table(newest(tmp_path / name), "weights") for name in ("whole", "killed"))
    equal(one, two)


def test_what_cannot_be_meant_is_refused(tmp_path):
    for changes, line in (
        ({"retain": -1}, "retain: -1 is not a whole number of at least 0"),
        (
            {"retain": 4, "passes": 2, "max_batch": 4, "train_batch": 2},
            "retain: 4 with passes 2 needs train_batch none",
        ),
    ):
        with pytest.raises(ValueError, match=line):
            config(tmp_path / "run", **changes).settings()


def test_compiled_blocks_keep_their_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "speed_up", partial(model.speed_up, backend="aot_eager"))
    (again, before), (kept, now) = both(tmp_path / "run", **TREE, compile=True, max_batch=4)
    assert before["retained"] == 0 and now["retained"] == now["calls"] and now["rollout_mismatch"] == 0
    equal(again, kept)
