"""Seconds of a rollout and an update against their floor, and against a reference of one node and one edge at a time.

Jobs are interleaved and their medians taken; run it with `make benchmark` on an idle machine.
The floor of a rollout is (denoiser calls) × (best batched forward time per sample);
of an update, (trained calls) × (best batched forward-and-backward time per sample).
`engine alone` is the rollout with a denoiser that costs nothing.
"""

import statistics
import sys
import tempfile
import time
from functools import partial

import torch

from branchgrpo.objective import edge_loss
from branchgrpo.planning import plan_of, process_of, sibling_s
from branchgrpo.rollout import edge_log_probs, rollout
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer, assign_credit
from branchgrpo.training.update import accumulate


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def reference_rollout(t, work, noise):
    "One node at a time, one prompt at a time: what a Python object per node comes to."
    plan, process = work.tree.plan, work.process
    with torch.no_grad():
        for p in range(len(noise.prompts)):
            row = {k: v[p : p + 1] for k, v in work.conditioning.items()}
            nodes = [torch.randn(1, *t.policy.latent_shape)]
            for i in range(plan.steps):
                children = []
                for x in nodes:
                    dist = process.step(i, x, t.policy.predict(x, process.times[i], row))
                    children += [dist.sample(torch.randn_like(x)) for _ in range(plan.splits.get(i, 1))]
                nodes = children


def reference_update(t, work):
    "One edge at a time, its parent's forward repeated for every child."
    tree, process = work.tree, work.process
    for i in sorted(tree.plan.trained):
        for p in range(tree.prompts):
            row = {k: v[p : p + 1] for k, v in work.conditioning.items()}
            for child, parent in enumerate(tree.parents[i + 1][p].tolist()):
                x = tree.latents[i][p, parent][None]
                dist = process.step(i, x, t.policy.predict(x, process.times[i], row))
                log_prob = edge_log_probs(dist, tree.latents[i + 1][p, child][None, None])
                old = tree.log_probs[i + 1][p, child].view(1, 1)
                advantage = work.advantages[i + 1][p, child].view(1, 1)
                edge_loss(log_prob, old, advantage, 1e-4).sum().backward()


def per_sample(t, conditioning, backward: bool, batch: int):
    "Seconds per sample of one batched call."
    x = torch.randn(batch, *t.policy.latent_shape)
    row = {k: v[:1].expand(batch, *v.shape[1:]) for k, v in conditioning.items()}

    def call():
        with torch.set_grad_enabled(backward):
            out = t.policy.predict(x, torch.tensor(0.5), row)
            if backward:
                out.square().mean().backward()

    return seconds(call) / batch


def without_denoiser(t, job):
    "Seconds of a job when the denoiser costs nothing: the engine alone."
    real = t.policy.predict
    t.policy.predict = lambda x, *_: torch.zeros_like(x)
    try:
        return statistics.median(seconds(job) for _ in range(5))
    finally:
        t.policy.predict = real


def prepare(recipe: str, prompts: int):
    "A trainer, one rollout with its credit, and its noise."
    changes = {"evaluate_every": 0, "tracker": "none", "output": f"{tempfile.mkdtemp()}/run"}
    t = Trainer(TrainConfig(recipe=recipe, prompts_per_iteration=prompts, **changes))
    noise = t.collector.noise(0)
    work, _ = assign_credit(t.learner, t.collector(0), process_of(t.settings, t.policy, 0), noise)
    return t, work, noise


def measured(t, jobs: dict, rounds: int) -> dict:
    "Median seconds of each job, interleaved, after one round that does not count."
    times = {name: [] for name in jobs}
    for r in range(rounds + 1):
        for name, job in jobs.items():
            value = job()
            if r:
                times[name].append(value)
            t.learner.optimizer.zero_grad()
    return {name: statistics.median(values) for name, values in times.items()}


def main(recipe: str, prompts: int, rounds: int = 11):
    t, work, noise = prepare(recipe, prompts)
    plan = plan_of(t.settings, 0)

    def roll():
        return rollout(plan, t.policy, work.conditioning, work.process, noise, sibling_s(t.settings))

    jobs = {"rollout": lambda: seconds(roll), "update": lambda: seconds(lambda: accumulate(t.learner, work))}
    for kind, backward in (("forward", False), ("backward", True)):
        for batch in (16, 32, 64, 128):
            jobs[f"{kind} {batch}"] = partial(per_sample, t, work.conditioning, backward, batch)
    took = measured(t, jobs, rounds)
    alone = without_denoiser(t, roll)
    slow = {
        "rollout": seconds(lambda: reference_rollout(t, work, noise)),
        "update": seconds(lambda: reference_update(t, work)),
    }
    print(f"{recipe}, {prompts} prompts × {plan.leaves} leaves, {plan.steps} steps, {torch.get_num_threads()} threads")
    print(f"{'':9}{'seconds':>9}{'floor':>9}{'× floor':>9}{'one by one':>12}{'× faster':>10}{'engine alone':>14}")
    calls = {"rollout": (plan.denoiser_calls, "forward "), "update": (plan.trained_calls, "backward ")}
    for name, (count, kind) in calls.items():
        floor = prompts * count * min(value for key, value in took.items() if key.startswith(kind))
        line = f"{name:9}{took[name]:9.3f}{floor:9.3f}{took[name] / floor:9.2f}"
        line += f"{slow[name]:12.2f}{slow[name] / took[name]:10.1f}"
        print(line + (f"{alone:11.4f} s" if name == "rollout" else ""))


if __name__ == "__main__":
    for prompts in (4, 8):
        for name in sys.argv[1:] or ("branchgrpo", "dancegrpo"):
            main(name, prompts)
