"""Training on tiny-flux: shared siblings, exact ratios, kills, processes."""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from commands import popen, run

from branchgrpo.objective import edge_loss
from branchgrpo.planning import process_of
from branchgrpo.samplers import edge_log_probs
from branchgrpo.training.checkpoints import newest, read_saved_table
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.credit import assign_credit
from branchgrpo.training.trainer import Trainer
from branchgrpo.training.update import accumulate

SMALL = dict(steps=6, splits=(0, 2), prompts_per_iteration=2, evaluate_every=0, tracker="none", checkpoint_every=2)
TIMES = ("seconds", "seconds_rollout", "seconds_update")


def config(folder, **changes):
    return TrainConfig.from_dict(SMALL | {"output": str(folder), "iterations": 4} | changes)


def gradient(trainer):
    return {n: p.grad.clone() for n, p in trainer.learner.parameters.items() if p.grad is not None}


def prepared(trainer, iteration=0):
    "A rollout with credit assigned, as an update takes it."
    process = process_of(trainer.settings, trainer.policy, iteration)
    return assign_credit(trainer.learner, trainer.collector(iteration), process, trainer.collector.noise(iteration))[0]


SIDE = {"splits": [], "roots": 2, "side": [0, 2, 3], "branch_factor": 3, "advantage": "siblings", "lora_rank": 2}
SIDE |= {"merged": {"3": 2}, "noise_factors": {"2": 1.5}, "step_weights": "std"}


@pytest.mark.parametrize("changes", [{}, SIDE], ids=["tree", "side branches"])
def test_shared_siblings_give_the_edge_by_edge_gradient(tmp_path, changes):
    trainer = Trainer(config(tmp_path / "run", **changes))
    rolled = prepared(trainer)
    tree, cond, process = rolled.tree, rolled.conditioning, rolled.process
    stats = accumulate(trainer.learner, rolled)
    assert stats["rollout_mismatch"] == 0
    shared = gradient(trainer)
    trainer.learner.optimizer.zero_grad()
    edges = tree.prompts * tree.plan.trained_edges
    for i in sorted(tree.plan.trained):
        for p in range(tree.prompts):
            for child, parent in list(enumerate(tree.parents[i + 1][p].tolist()))[tree.plan.families(i).first :]:
                x, row = tree.latents[i][p, parent][None], {k: v[p : p + 1] for k, v in cond.items()}
                dist = process.step(i, x, trainer.policy.predict(x, process.times[i], row))
                log_prob = edge_log_probs(dist, tree.latents[i + 1][p, child][None, None])
                old = tree.log_probs[i + 1][p, child].view(1, 1)
                advantage = rolled.advantages[i + 1][p, child].view(1, 1)
                loss = edge_loss(log_prob, old, advantage, trainer.settings.clip_range)
                (loss.sum() / edges).backward()
    alone = gradient(trainer)
    size = torch.cat([g.flatten() for g in alone.values()]).abs().max()
    for name in shared:
        torch.testing.assert_close(shared[name], alone[name], rtol=1e-3, atol=1e-5 * max(1.0, size.item()))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ratio_is_exactly_one_before_the_first_update(tmp_path, precision):
    trainer = Trainer(config(tmp_path / "run", mixed_precision=precision, steps_per_pass=1))
    for _ in range(2):
        row = trainer.step()
        assert row["rollout_mismatch"] == 0 and row["ratio"] == 1 and row["clip_fraction"] == 0
    assert row["grad_norm"] > 0


START = """
import sys, json
from branchgrpo import TrainConfig, Trainer
Trainer(TrainConfig.from_dict(json.loads(sys.argv[1]))).fit()
"""


def start(folder, iterations=6, **changes):
    table = SMALL | {"output": str(folder), "iterations": iterations, "splits": [0, 2]} | changes
    with open(f"{folder}.log", "a") as log:
        return popen([sys.executable, "-c", START, json.dumps(table)], stdout=log, stderr=log)


def ends_well(process, folder):
    assert process.wait(timeout=200) == 0, Path(f"{folder}.log").read_text()[-2000:]


def rows(folder):
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMES}
        for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
    ]


MOVING = {
    "recipe": "mixgrpo-shared",
    "splits": "window-start",
    "branch_factor": 4,
    "window": "random",
    "window_size": 2,
    "window_stop": 3,
    "tail_ratio": 0.5,
}


OBJECTIVE = {
    "loss": "kl-mask",
    "kl_limit": 1e-6,
    "passes": 2,
    "reward": "tiny-clip+0.5*tiny-hps+0*tiny-aesthetic",
    "reward_sum": "decoupled+batch",
    "kl": 0.1,
    "kl_share": 0.3,
    "group_selection": "diverse",
    "group_keep": 3,
    "diversity": 0.5,
}


WHICH = ["tree", "moving window", "side branches", "another objective"]


@pytest.mark.parametrize("changes", [{}, MOVING, SIDE, OBJECTIVE], ids=WHICH)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, changes):
    whole, killed = start(tmp_path / "whole", **changes), start(tmp_path / "killed", **changes)
    file, deadline = tmp_path / "killed/metrics.jsonl", time.time() + 120
    while not (file.exists() and file.read_text().count("\n") >= 3):
        assert time.time() < deadline and killed.poll() is None
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed/model").exists()
    again = start(tmp_path / "killed", **changes)
    ends_well(whole, tmp_path / "whole")
    ends_well(again, tmp_path / "killed")
    assert len(rows(tmp_path / "whole")) == 6
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    one, two = (read_saved_table(newest(tmp_path / name), "weights") for name in ("whole", "killed"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


PROCESSES = """
import sys, json, torch
from branchgrpo import TrainConfig, Trainer, process_of
from branchgrpo.training.credit import assign_credit
from branchgrpo.training.update import accumulate
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
collected, process = t.collector(3), process_of(t.settings, t.policy, 3)
rolled, _ = assign_credit(t.learner, collected, process, t.collector.noise(3))
accumulate(t.learner, rolled)
out = {"leaves": t.accelerator.gather(collected.tree.latents[-1].contiguous()),
       "rewards": t.accelerator.gather(collected.rewards.contiguous()),
       "grads": {n: p.grad.clone() for n, p in t.learner.parameters.items()}}
torch.save(out, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""


CLAIMED = []


def free_port():
    """A port for this process alone: nobody connects outwards from one below 32768, and a lock keeps it from others.

    A port that the system had just given could be taken again before the processes used it: two suites at once met."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        claim = open(Path(tempfile.gettempdir()) / f"branchgrpo-port-{port}", "w")  # noqa: SIM115 held to the end
        with contextlib.suppress(OSError), socket.socket() as found:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.bind(("127.0.0.1", port))
            CLAIMED.append(claim)
            return port
        claim.close()


def together(n, code, *words):
    "Run `n` processes of one training, as torchrun starts them; return their exit codes and logs."
    shared = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": free_port()}
    shared |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    processes = []
    for rank in range(n):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank}
        env = os.environ | {key: str(value) for key, value in own.items()}
        with open(f"{words[-1]}.log{rank}", "w") as log:
            processes.append(popen([sys.executable, "-c", code, *words], env=env, stdout=log, stderr=log))
    codes = [process.wait(timeout=240) for process in processes]
    return [(code, Path(f"{words[-1]}.log{rank}").read_text()[-3000:]) for rank, code in enumerate(codes)]


FUNNEL = {
    "roots": 8,
    "splits": [],
    "prune_at": {"2": 6},
    "group_selection": "ovf",
    "group_keep": 3,
    "std": "global",
    "kl": 0.1,
}
PRUNED = {"prune": "extreme", "prune_keep": 1, "train_fraction": 0.6, "advantage": "leave-one-out", "min_nodes": 3}


@pytest.mark.parametrize("changes", [{}, FUNNEL, PRUNED], ids=["tree", "funnel", "pruned"])
def test_two_processes_do_what_one_does(tmp_path, changes):
    table = json.dumps(SMALL | {"output": str(tmp_path / "run"), "splits": [0, 2]} | changes)
    for n in (1, 2):
        for code, log in together(n, PROCESSES, table, tmp_path / f"out{n}"):
            assert code == 0, log
    one, two = torch.load(tmp_path / "out1.0"), torch.load(tmp_path / "out2.0")
    torch.testing.assert_close(one["leaves"], two["leaves"], rtol=0, atol=2e-4)
    torch.testing.assert_close(one["rewards"], two["rewards"], rtol=0, atol=1e-4)
    for name in one["grads"]:
        torch.testing.assert_close(one["grads"][name], two["grads"][name], rtol=0, atol=1e-5)


GATED = """
import sys, json, torch
from branchgrpo import TrainConfig, Trainer, process_of
from branchgrpo.training.credit import assign_credit
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
rolled, _ = assign_credit(t.learner, t.collector(0), process_of(t.settings, t.policy, 0), t.collector.noise(0))
found = [t.accelerator.gather(x[-1].contiguous().float()) for x in (rolled.advantages, rolled.kl_mask)]
torch.save(found, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""


def test_two_processes_normalise_and_judge_as_one(tmp_path):
    "The batch of decoupled rewards, and the samples that win rates compare with, are those of all processes."
    for n in (1, 2):
        table = json.dumps(SMALL | OBJECTIVE | {"output": str(tmp_path / f"run{n}"), "group_selection": "all"})
        for code, log in together(n, GATED, table, tmp_path / f"out{n}"):
            assert code == 0, log
    (one, mask), (two, same) = torch.load(tmp_path / "out1.0"), torch.load(tmp_path / "out2.0")
    torch.testing.assert_close(one, two, rtol=0, atol=1e-3)
    assert torch.equal(mask, same) and 0 < mask.sum() < mask.numel()


LOSING = """
import dataclasses, os, sys, json, torch
from branchgrpo import TrainConfig, Trainer
from branchgrpo.training.collection import TooManyUnscored
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
real, first = t.scorer.reward, t.accelerator.process_index == 0
def reward(images, prompts, metadata=None):
    if first: raise ConnectionError("this process's server is gone")
    return real(images, prompts)
t.scorer.reward, t.scorer.wait = reward, 0.0
row = t.step()
assert row["unscored_prompts"] == 1 and row["grad_norm"] > 0 and row["reward"] == row["reward"], row
t.collector.settings = dataclasses.replace(t.settings, max_unscored=0.0)
try: t.step(); raise AssertionError
except TooManyUnscored as e: print(e)
sys.stdout.flush()
os._exit(0)  # now and then a thread of gloo aborts a process while Python ends; not what is tested here
"""


def test_a_process_that_loses_all_its_prompts_does_not_stop_the_others(tmp_path):
    "Started by torchrun itself."
    script = tmp_path / "script.py"
    script.write_text(LOSING)
    table = json.dumps(SMALL | {"output": str(tmp_path / "run"), "splits": [0, 2], "reward_retries": 1})
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*launch, script, table], env=os.environ | {"ACCELERATE_USE_CPU": "true"}, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("1 of 2 prompts could not be scored") == 2


@pytest.mark.parametrize("lora", [0, 4])
def test_the_result_loads_in_plain_diffusers(tmp_path, lora):
    from diffusers import FluxPipeline

    rate = 1e-2 if lora else 1e-4
    settings = config(tmp_path / "run", iterations=2, lora_rank=lora, lora_alpha=16, learning_rate=rate)
    trainer = Trainer(settings)
    run = trainer.fit()
    x, cond = (
        torch.randn(2, *trainer.policy.latent_shape, generator=torch.Generator().manual_seed(0)),
        trainer.conditioner(["a red 3", "two blue 5s"]),
    )
    with torch.no_grad():
        ours = trainer.policy.predict(x, torch.tensor(0.5), cond)
    if lora:
        from branchgrpo.backbones.loading import folder_of

        pipe = FluxPipeline.from_pretrained(folder_of("tiny-flux"), dtype=torch.float32)
        pipe.load_lora_weights(run.path / "lora")
    else:
        pipe = FluxPipeline.from_pretrained(run.path / "model", dtype=torch.float32)
    trainer.policy.call = pipe.transformer.eval()
    with torch.no_grad():
        theirs = trainer.policy.predict(x, torch.tensor(0.5), cond)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert run.finished and len(Trainer(settings).fit().metrics) == 2  # a finished run is returned as it is


def test_prompts_that_come_again_are_encoded_as_the_first_time(tmp_path):
    "What a reward and the model see of a prompt does not depend on the prompts beside it, so resumed runs are equal."
    (tmp_path / "prompts.txt").write_text("a red 3\ntwo blue 5s\na green 7\n")
    table = SMALL | {"prompts": str(tmp_path / "prompts.txt"), "prompts_per_iteration": 2, "evaluate_every": 0}

    def rows(name, iterations):
        run = Trainer(TrainConfig.from_dict(table | {"output": str(tmp_path / name), "iterations": iterations})).fit()
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in run.metrics]

    rows("stopped", 2)
    assert rows("stopped", 4) == rows("whole", 4)


@pytest.mark.parametrize("left", [0, 1])
def test_lost_metrics_stop_no_run(left, tmp_path):
    "Rows are lost, the checkpoint is not: the run goes on, and no row gets the evaluation of another iteration."
    table = SMALL | {"output": str(tmp_path / "run"), "evaluate_every": 2, "checkpoint_every": 1}
    Trainer(TrainConfig.from_dict(table | {"iterations": 2})).fit()
    file = tmp_path / "run/metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:left]))
    with pytest.warns(UserWarning):
        run = Trainer(TrainConfig.from_dict(table | {"iterations": 4})).fit()
    assert [row["iteration"] for row in run.metrics][left:] == [3, 4]
    assert all("eval_reward" not in row for row in run.metrics[:left])


def test_another_run_in_the_folder_is_refused(tmp_path):
    Trainer(config(tmp_path / "run", iterations=2)).fit()
    before = (tmp_path / "run/metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="holds another run .differs in .*recipe"):
        Trainer(config(tmp_path / "run", iterations=2, recipe="dancegrpo", splits=None, branch_factor=None)).fit()
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


@pytest.mark.parametrize("reward", ["0.7*tiny-clip+0.3*tiny-hps", "norm(tiny-clip+2*tiny-pickscore)"])
def test_sums_of_rewards_are_logged_one_by_one(tmp_path, reward):
    trainer = Trainer(
        config(
            tmp_path / "run",
            reward=reward,
            held_out="tiny-aesthetic",
            evaluate_every=1,
            evaluation_prompts=4,
            iterations=1,
        )
    )
    run = trainer.fit()
    row, evaluation = run.metrics[0], run.evaluations[-1]
    names = [n for n in row if n.startswith("reward/")]
    assert len(names) == 2 and {f"eval_{n}" for n in names} | {"eval_reward/tiny-aesthetic"} <= evaluation.keys()
    if reward.startswith("norm"):
        assert abs(row["reward"]) < 1e-4 and row["reward_std"] > 0.5  # centred within each prompt
    else:
        assert abs(0.7 * row["reward/tiny-clip"] + 0.3 * row["reward/tiny-hps"] - row["reward"]) < 1e-5


def test_a_small_model_on_a_cpu_computes_in_one_thread(tmp_path, monkeypatch, capfd):
    "Said once; a number of one's own and a large model keep theirs."
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = {}
    try:
        for case, variables, small in (("own", {"OMP_NUM_THREADS": "2"}, 1e8), ("large", {}, 10), ("small", {}, 1e8)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr("branchgrpo.training.speed.SMALL_MODEL", small)
            torch.set_num_threads(2)
            Trainer(config(tmp_path))
            threads[case] = torch.get_num_threads()
        Trainer(config(tmp_path))
    finally:
        torch.set_num_threads(1)
    assert threads == {"own": 2, "large": 2, "small": 1}
    said = [line for line in capfd.readouterr().err.splitlines() if "thread" in line]
    assert said == ["branchgrpo: one thread of the CPU, as a small model needs; OMP_NUM_THREADS sets another number"]
