"""Seconds of a rollout and an update against their floor, and against a reference that walks one node and one edge at a time.

Interleaved, medians; run it with `make benchmark` on an idle machine. The floor of a rollout is (denoiser calls) × (best batched forward time per sample);
of an update, (trained calls) × (best batched forward-and-backward time per sample). `engine alone` is the rollout with a denoiser that costs nothing."""

import statistics
import sys
import tempfile
import time

import torch

from branchgrpo.objective import edge_loss
from branchgrpo.rollout import edge_log_probs, rollout, Noise
from branchgrpo.training.trainer import TrainConfig, Trainer


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def reference_rollout(t, cond, noise):
    "One node at a time, one prompt at a time: what a Python object per node comes to."
    with torch.no_grad():
        for p in range(len(noise.prompts)):
            nodes, row = [torch.randn(1, *t.policy.latent_shape)], {k: v[p : p + 1] for k, v in cond.items()}
            for i in range(t.plan.steps):
                children = []
                for x in nodes:
                    dist = t.process.step(i, x, t.policy.predict(x, t.process.times[i], row))
                    children += [dist.sample(torch.randn_like(x)) for _ in range(t.plan.splits.get(i, 1))]
                nodes = children


def reference_update(t, tree, cond, advantages):
    "One edge at a time, its parent's forward repeated for every child."
    for i in sorted(t.plan.trained):
        for p in range(tree.prompts):
            for child, parent in enumerate(tree.parents[i + 1][p].tolist()):
                x, row = tree.latents[i][p, parent][None], {k: v[p : p + 1] for k, v in cond.items()}
                dist = t.process.step(i, x, t.policy.predict(x, t.process.times[i], row))
                lp = edge_log_probs(dist, tree.latents[i + 1][p, child][None, None])
                edge_loss(
                    lp, tree.log_probs[i + 1][p, child].view(1, 1), advantages[i + 1][p, child].view(1, 1), 1e-4
                ).sum().backward()


def per_sample(t, cond, backward: bool, batch: int):
    "Seconds per sample of one batched call."
    x, row = torch.randn(batch, *t.policy.latent_shape), {k: v[:1].expand(batch, *v.shape[1:]) for k, v in cond.items()}

    def call():
        with torch.set_grad_enabled(backward):
            out = t.policy.predict(x, torch.tensor(0.5), row)
            if backward:
                out.square().mean().backward()

    return seconds(call) / batch


def without_denoiser(t, job):
    "Seconds of a job when the denoiser costs nothing: the engine alone."
    real, t.policy.predict = t.policy.predict, lambda x, *_: torch.zeros_like(x)
    try:
        return statistics.median(seconds(job) for _ in range(5))
    finally:
        t.policy.predict = real


def main(recipe: str, prompts: int, rounds: int = 11):
    t = Trainer(
        TrainConfig(
            recipe=recipe,
            prompts_per_iteration=prompts,
            output=f"{tempfile.mkdtemp()}/run",
            evaluate_every=0,
            tracker="none",
        )
    )
    tree, cond, rewards, *_ = t.collect(0)
    advantages, noise = t.advantages(tree, rewards), Noise(0, 0, t.positions())
    jobs = {
        "rollout": lambda: seconds(lambda: rollout(t.plan, t.policy, cond, t.process, noise, t.settings["s"])),
        "update": lambda: seconds(lambda: t.accumulate(tree, cond, advantages)),
    }
    floors = {
        f"{kind} {b}": (lambda back=back, b=b: per_sample(t, cond, back, b))
        for kind, back in (("forward", False), ("backward", True))
        for b in (16, 32, 64, 128)
    }
    times = {k: [] for k in [*jobs, *floors]}
    for r in range(rounds + 1):
        for name, job in {**jobs, **floors}.items():
            value = job()
            if r:
                times[name].append(value)
            t.optimizer.zero_grad()
    alone = {"rollout": without_denoiser(t, lambda: rollout(t.plan, t.policy, cond, t.process, noise, t.settings["s"]))}
    slow = {
        "rollout": seconds(lambda: reference_rollout(t, cond, noise)),
        "update": seconds(lambda: reference_update(t, tree, cond, advantages)),
    }
    best = lambda kind: min(statistics.median(times[k]) for k in times if k.startswith(kind + " "))
    n = tree.prompts
    print(f"{recipe}, {n} prompts × {t.plan.leaves} leaves, {t.plan.steps} steps, {torch.get_num_threads()} threads")
    print(f"{'':9}{'seconds':>9}{'floor':>9}{'× floor':>9}{'one by one':>12}{'× faster':>10}{'engine alone':>14}")
    for name, calls, kind in (
        ("rollout", t.plan.denoiser_calls, "forward"),
        ("update", t.plan.trained_calls, "backward"),
    ):
        took, floor = statistics.median(times[name]), n * calls * best(kind)
        print(
            f"{name:9}{took:9.3f}{floor:9.3f}{took / floor:9.2f}{slow[name]:12.2f}{slow[name] / took:10.1f}"
            + (f"{alone[name]:11.4f} s" if name in alone else "")
        )


if __name__ == "__main__":
    for prompts in (4, 8):
        for name in sys.argv[1:] or ("branchgrpo", "dancegrpo"):
            main(name, prompts)
