"""A number that is not finite, in one process of several: its prompt or its step is left out, and
all go on or stop."""

import json
import math
import sys
from pathlib import Path

import commands
import pytest
from test_sharding import BEGIN, END, FULL, processes, settings
from test_training import SMALL

# Each kind of fault is put where it would arise, for one prompt of the last process, while `faulty`
# holds its name.
INJECT = """
import branchgrpo.training.trainer as trained_iteration
faulty, last = set(), rank == t.accelerator.num_processes - 1
nan = float("nan")
predict, decode, reward = t.policy.predict, t.policy.decode, t.scorer.reward
calls = {"decode": 0, "predict": 0}
def first_row(values, number=nan):
    return torch.cat([torch.full_like(values[:1], number), values[1:]])
def predicted(latents, time, conditioning):
    out = predict(latents, time, conditioning)
    if not last: return out
    if torch.is_grad_enabled():
        if "gradient" in faulty: out.register_hook(lambda grad: grad * nan)
        return out
    calls["predict"] += 1
    hit = f"latents at step {calls['predict'] - 1}" in faulty
    return first_row(out) if hit else out
def decoded(latents):
    images = decode(latents)
    calls["decode"] += 1
    hit = last and ("image" in faulty or ("x0" in faulty and calls["decode"] == 1))
    return first_row(images) if hit else images
def scored(images, prompts, metadata=None):
    assert images.isfinite().all(), "a reward sees finite images"
    scores = reward(images, prompts, metadata)
    hit = last and ("reward" in faulty or "infinite reward" in faulty)
    return first_row(scores, nan if "reward" in faulty else float("inf")) if hit else scores
if hasattr(reward, "members"):
    name, (weight, member) = next(iter(reward.members.items()))
    def part(images, prompts, metadata=None):
        scores = member(images, prompts, metadata)
        return first_row(scores) if last and "part" in faulty else scores
    reward.members[name] = (weight, part)
else:
    t.scorer.reward = scored
t.policy.predict, t.policy.decode, t.scorer.wait, t.scorer.retries = predicted, decoded, 0.0, 0
assign = trained_iteration.assign_credit
def assigned(s, policy, accelerator, x):
    assign(s, policy, accelerator, x)
    if last and "loss" in faulty: x.advantages = [a * nan for a in x.advantages]
trained_iteration.assign_credit = assigned
def gradients(lose):
    calls.update(decode=0, predict=0)
    x = t.collect(3)
    if lose and (last or t.settings.ranks_per_prompt > 1): x.unscored[:1] = True
    t.credit(x)
    accumulate(t.learner, x)
    grads = everything({n: p.grad for n, p in t.learner.parameters.items()})
    t.learner.optimizer.zero_grad()
    return grads, x.unscored_prompts
"""
LEFT_OUT = """
start = [p.detach().clone() for p in t.learner.parameters.values()]
clean, none = gradients(lose=True)
assert none == 0 and any(g.abs().max() > 0 for g in clean.values())
for kind in json.loads(KINDS):
    faulty.add(kind)
    grads, lost = gradients(lose=False)
    assert lost == 1, (kind, lost)
    assert all(torch.equal(clean[name], grad) for name, grad in grads.items()), kind
    calls.update(decode=0, predict=0)
    row = t.step()
    assert row["unscored_prompts"] and row["skipped_steps"] == 0 and row["optimiser_steps"], row
    assert all(v == v for v in row.values() if isinstance(v, float)), (kind, row)
    faulty.clear()
    t.learner.optimizer.zero_grad()
    for p, w in zip(t.learner.parameters.values(), start): p.data.copy_(w)
state = {**t.learner.parameters, **t.learner.ema.weights}
assert all(whole_tensor(v.detach()).isfinite().all() for v in state.values())
if rank == 0: torch.save({}, out)
t.accelerator.wait_for_everyone()
"""
TREE = {}
SUM = {"reward": "norm(tiny-clip+2*tiny-pickscore)"}
FUNNEL = {
    "roots": 6,
    "splits": [],
    "prune_at": {"2": 4},
    "group_selection": "ovf",
    "group_keep": 3,
    "std": "global",
}
PREVIEWS = {"previews": "ode", "advantage": "gains"}
SHARED = {"ranks_per_prompt": 2, "kl": 0.1}
ADAPTIVE = {"splits": [0, 2], "adaptive": True, "kl": 0.1}
WAYS = {"one process": (1, {}), "2 processes (DDP)": (2, {}), "2 processes, sharded": (2, FULL)}
LATENT = ["latents at step 0", "latents at step 3"]
CASES = {
    "tree": (TREE, [*LATENT, "image", "reward", "infinite reward"]),
    "funnel": (FUNNEL, ["x0", "latents at step 2", "reward"]),
    "sum of rewards": (SUM, ["part"]),
    "previews": (PREVIEWS, ["x0", "image"]),
}
MORE = {
    "tree over ranks": (SHARED, ["latents at step 3", "image", "reward"]),
    "adaptive splits": (ADAPTIVE, ["x0", "reward"]),
}
TRIED = [(way, case) for way in WAYS for case in CASES] + [
    ("2 processes (DDP)", case) for case in MORE
]


def left_out(tmp_path, n, changes, kinds):
    table = settings(tmp_path / "run", **{"max_unscored": 0.5, "std": "pooled"} | changes)
    processes(
        n,
        BEGIN + INJECT + LEFT_OUT.replace("KINDS", repr(json.dumps(kinds))) + END,
        table,
        tmp_path / "out",
    )


KEPT = (
    "the other prompts' gradients are equal to the bit to a run without its edges; weights and"
    " averages stay finite"
)


@pytest.mark.parametrize("way, case", TRIED)
def test_a_prompt_that_is_not_finite_is_left_out(tmp_path, noted, way, case):
    n, sharding = WAYS[way]
    changes, kinds = (CASES | MORE)[case]
    left_out(tmp_path, n, changes | sharding, kinds)
    for kind in kinds:
        noted(
            f"NaN in one prompt: {kind} of a {case}, {way}",
            "unscored_prompts 1; the run goes on",
            KEPT,
        )


SKIPPED = """
for kind in ("loss", "gradient"):
    faulty.add(kind)
    before = everything(t.learner.parameters)
    row = t.step()
    assert row["skipped_steps"] == t.settings.steps_per_pass == 2, row
    assert row["unscored_prompts"] == 0, row
    assert all(torch.equal(before[n], v) for n, v in everything(t.learner.parameters).items()), kind
    faulty.clear()
assert t.learner.ema.steps == 0 and t.learner.skipped_in_a_row == 2
row = t.step()
assert row["optimiser_steps"] == 2 and row["skipped_steps"] == 0, row
assert t.learner.skipped_in_a_row == 0, row
t.learner.skipped_in_a_row = 8
faulty.add("loss")
t.step()
try: t.step(); raise AssertionError
except ValueError as error: print(error)
if rank == 0: torch.save({}, out)
t.accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_not_finite_is_taken_by_nobody(tmp_path, noted, way):
    n, sharding = WAYS[way]
    processes(
        n, BEGIN + INJECT + SKIPPED + END, settings(tmp_path / "run", **sharding), tmp_path / "out"
    )
    line = "the gradient was not finite in 10 updates in a row"
    for rank in range(n):
        assert line in Path(f"{tmp_path}/out.log{rank}").read_text()
    for kind in ("loss", "gradient"):
        noted(
            f"NaN in the {kind} of one process, {way}",
            "skipped_steps 2; stops after 10 updates in a row",
            "weights",
        )


@pytest.mark.fast
@pytest.mark.parametrize(
    "changes, kinds", [(TREE, ["latents at step 3", "image"]), (PREVIEWS, ["x0"])]
)
def test_a_prompt_with_nan_latents_or_images_trains_nothing(tmp_path, changes, kinds):
    "In one process; the whole suite does it in two, and with sharded weights."
    left_out(tmp_path, 1, changes, kinds)


OWN = """
import pathlib
from branchgrpo.rewards.names import load_reward
clip = load_reward("tiny-clip")
def score(images, prompts, metadata=None):
    scores = clip(images, prompts, metadata)
    return scores * float("nan") if pathlib.Path(__file__).with_name("bad").exists() else scores
"""
SHELL = """
import os, sys
from branchgrpo.cli import main
os._exit(main(["train", "--config", sys.argv[2] + ".yaml"]))
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_loses_all_its_prompts_stops_and_goes_on(tmp_path, noted, way):
    """One line on every process, the same; exit code 2; started again when the cause is gone, it
    finishes."""
    n, sharding = WAYS[way]
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "bad").touch()
    table = settings(
        tmp_path / "run",
        reward=f"{tmp_path}/own.py:score",
        iterations=2,
        **sharding,
    )
    (tmp_path / "shell.yaml").write_text(json.dumps(table))
    unused = settings(tmp_path / "unused")
    started = processes(n, SHELL, unused, tmp_path / "shell", wait=False)
    assert [process.wait(timeout=240) for process in started] == [2] * n
    line = (
        "branchgrpo: max_unscored: 4 of 4 prompts could not be scored at iteration 0, more than a"
        " share of 0.5: "
    )
    line += "a reward is not finite" + ("" if n == 1 else " (process 0)")
    for rank in range(n):
        assert Path(f"{tmp_path}/shell.log{rank}").read_text().count(line) == 1
    (tmp_path / "bad").unlink()
    started = processes(n, SHELL, unused, tmp_path / "shell", wait=False)
    assert [process.wait(timeout=240) for process in started] == [0] * n
    kept = "started again when the cause was gone, it ended with code 0"
    noted(f"NaN in the rewards of all prompts, {way}", f"code 2: {line}", kept)


BROKEN = """
import json, sys, torch
from branchgrpo import TrainConfig, Trainer
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
real = t.held_out["tiny-aesthetic"].reward
def holes(images, prompts, metadata=None):
    scores = real(images, prompts, metadata)
    scores[0] = float("nan")
    return scores
decode = t.policy.decode
def hole(latents):
    images = decode(latents)
    if len(images) == 4: images[3] = float("inf")  # the evaluation, not the rollout
    return images
t.held_out["tiny-aesthetic"].reward, t.policy.decode = holes, hole
t.held_out["tiny-aesthetic"].retries = 0
t.fit()
"""


@pytest.mark.fast
def test_an_evaluation_leaves_out_and_counts_what_is_not_finite(tmp_path, noted):
    "A broken image is missing in all scores, a missing score in its own; files stay JSON."
    changes = {
        "evaluate_every": 1,
        "evaluation_prompts": 4,
        "held_out": "tiny-aesthetic",
        "iterations": 1,
    }
    table = SMALL | {"output": str(tmp_path / "run"), "splits": [0, 2]} | changes
    done = commands.run([sys.executable, "-c", BROKEN, json.dumps(table)], timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]

    def refused(word):
        raise AssertionError(f"{word} is not JSON")

    for name in ("metrics", "evaluations"):
        lines = (tmp_path / f"run/{name}.jsonl").read_text().splitlines()
        row = [json.loads(line, parse_constant=refused) for line in lines][-1]
        assert row["eval_unscored"] == 1 and row["eval_unscored/tiny-aesthetic"] == 2
        assert math.isfinite(row["eval_reward"]) and math.isfinite(
            row["eval_reward/tiny-aesthetic"]
        )
    noted(
        "an infinite image and a NaN held-out score in an evaluation",
        "eval_unscored 1, eval_unscored/tiny-aesthetic 2",
        "means over the other images; the run goes on",
    )
