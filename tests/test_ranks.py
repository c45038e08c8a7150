"""Several processes share an evaluation, an error, and the tree of one prompt."""

import json

import pytest
import torch
from slow import often
from test_training import SMALL, together

EVALUATION = """
rows = []
predict = t.policy.predict
def counted(latents, time, conditioning):
    rows.append(len(latents))
    return predict(latents, time, conditioning)
t.policy.predict = counted
scores, images = t.evaluator(t.policy)
out = {"scores": scores, "images": images, "rows": rows}
torch.save(out, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""


BEGIN = """
import sys, json, torch
from branchgrpo import TrainConfig, Trainer
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
"""


def results(n, code, table, place):
    "What each of `n` processes saved."
    for status, log in together(n, BEGIN + code, json.dumps(table), place):
        assert status == 0, log
    return [torch.load(f"{place}.{rank}", weights_only=False) for rank in range(n)]


SHARED_BY = {"37 prompts, two": (37, 2), "37 prompts, four": (37, 4), "3 prompts, four": (3, 4)}


@pytest.mark.parametrize("case", often(SHARED_BY, ("37 prompts, two",)))
def test_an_evaluation_shared_by_processes_gives_the_scores_of_one(tmp_path, case):
    "To the bit, with fewer prompts than processes too; every process makes the same calls."
    count, processes = SHARED_BY[case]
    table = SMALL | {
        "output": str(tmp_path / "run"),
        "splits": [0, 2],
        "evaluation_prompts": count,
        "max_batch": 4,
    }
    table |= {
        "prompts_per_iteration": 4,
        "reward": "0.7*tiny-clip+0.3*tiny-pickscore",
        "held_out": "tiny-aesthetic",
    }
    one = results(1, EVALUATION, table, tmp_path / "one")[0]
    assert len(one["images"]) == min(count, 8) and "eval_check_all" in one["scores"], one["scores"]
    several = results(processes, EVALUATION, table, tmp_path / "several")
    assert all(own["scores"] == one["scores"] for own in several)
    assert torch.equal(several[0]["images"], one["images"])
    assert all(len(own["images"]) == 0 for own in several[1:])
    assert all(own["rows"] == several[0]["rows"] for own in several)
    assert len(several[0]["rows"]) < len(one["rows"]) or count < 8


SHARED = """
out = {"rows": [], "prompts": t.collector.noise(0).prompts}
predict, collect = t.policy.predict, t.collect
def counted(latents, time, conditioning):
    out["rows"] += [] if "collected" in out else [len(latents)]  # calls of the rollout
    return predict(latents, time, conditioning)
def kept(iteration):
    out["collected"] = collect(iteration)
    return out["collected"]
def no_step(): out["grads"] = {n: p.grad.clone() for n, p in t.learner.parameters.items()}
t.policy.predict, t.collect, t.learner.optimizer.step = counted, kept, no_step
out["row"] = {k: v for k, v in t.step().items() if not k.startswith("seconds")}
tree, rewards = out["collected"].tree, out.pop("collected").rewards
out |= {"parents": tree.parents, "rewards": rewards, "log_probs": tree.log_probs}
out["latents"] = tree.latents
torch.save(out, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""

LEAVES81 = {"steps": 5, "splits": [0, 1, 2, 3], "branch_factor": 3, "prompts_per_iteration": 1}
PRUNED = {
    "prune": "extreme",
    "prune_keep": 2,
    "advantage": "leave-one-out",
    "splits": [0, 1, 3],
}
FUNNEL = {
    "roots": 12,
    "splits": [],
    "prune_at": {"1": 7, "3": 5},
    "group_selection": "ovf",
    "group_keep": 3,
}
FUNNEL |= {
    "std": "global",
    "kl": 0.1,
    "ratio": "guard",
    "reward": "norm(tiny-clip+2*tiny-pickscore)",
}
ADAPTIVE = {"splits": [0, 1, 3], "adaptive": True}
SEEN = {
    "splits": [0, 1, 3],
    "previews": "ode/2+x0",
    "advantage": "consistent-turns",
    "std": "pooled",
}
TREES = {  # settings, and (processes, of them for each prompt)
    "81 leaves": (LEAVES81, [(2, 2), (4, 4)]),
    "pruned, two": (PRUNED, [(2, 2)]),
    "pruned": (PRUNED, [(4, 2)]),
    "funnel": (FUNNEL, [(2, 2), (4, 4)]),
    "adaptive": (ADAPTIVE, [(4, 4)]),
    "previews": (SEEN, [(4, 2)]),
}


@pytest.mark.parametrize("name", often(TREES, ("pruned, two",)))
def test_a_tree_shared_by_processes_is_the_tree_of_one(tmp_path, name):
    """Calls of one latent and of one image, so that rewards are equal to the bit; gradients and
    metrics agree."""
    changes, layouts = TREES[name]
    table = (
        SMALL
        | {"output": str(tmp_path / "run"), "max_batch": 1, "decode_batch": 1, "train_batch": 8}
        | changes
    )
    one = results(1, SHARED, table, tmp_path / "one")[0]
    for n, ranks in layouts:
        several = results(
            n, SHARED, table | {"ranks_per_prompt": ranks}, tmp_path / f"out{n}{ranks}"
        )
        for own in several:
            same_run(own, one)
            assert own["rows"] == several[0]["rows"] and len(own["rows"]) < len(one["rows"])
        assert len({len(own["prompts"]) for own in several}) == 1


def same_run(own, one):
    "Check what one process of several saw against the run of one process."
    here = list(own["prompts"])
    assert torch.equal(own["rewards"], one["rewards"][here])
    assert all(torch.equal(a, b[here]) for a, b in zip(own["parents"], one["parents"]))
    for name in ("log_probs", "latents"):
        assert all(torch.equal(a, b[here]) for a, b in zip(own[name], one[name])), name
    for name, gradient in one["grads"].items():
        torch.testing.assert_close(own["grads"][name], gradient, rtol=0, atol=1e-5)
    assert own["row"].keys() == one["row"].keys()
    for key, value in one["row"].items():
        assert own["row"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


FAILING = """
real, second = t.scorer.reward, t.accelerator.process_index == 1
def refusing(images, prompts, metadata=None):
    if second: raise ValueError("reward: the server refused a request (400)")
    return real(images, prompts)
def huge(images, prompts, metadata=None):
    if second: raise torch.OutOfMemoryError("CUDA out of memory")
    return real(images, prompts)
seen = []
for reward in (refusing, huge):
    t.scorer.reward = reward
    for part in (t.step, lambda: t.evaluator(t.policy)):
        try: part()
        except Exception as error: seen.append((type(error).__name__, str(error)))
t.scorer.reward = real
assert t.step()["unscored_prompts"] == 0
torch.save(seen, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""


FAILURES = {
    "a tree each": {},
    "a shared funnel": {"roots": 4, "splits": [], "prune_at": {"1": 2}, "ranks_per_prompt": 2},
}


@pytest.mark.parametrize("case", often(FAILURES, ("a shared funnel",)))
def test_an_error_of_one_process_is_raised_on_all(tmp_path, case):
    "In a rollout, its previews and an evaluation; afterwards the processes still work together."
    table = (
        SMALL
        | {"output": str(tmp_path / "run"), "splits": [0, 2], "evaluation_prompts": 16}
        | FAILURES[case]
    )
    first, second = results(2, FAILING, table, tmp_path / "out")
    refused = "reward: the server refused a request (400)"
    assert (
        second[:2] == [("ValueError", refused)] * 2
        and first[:2] == [("ValueError", f"{refused} (process 1)")] * 2
    )
    assert [kind for kind, _ in second[2:]] == ["OutOfMemoryError"] * 2
    assert all(
        kind == "RuntimeError" and "'huge' runs out of memory on" in text
        for kind, text in first[2:]
    )
    assert all("set decode_batch below" in text for _, text in first[2:] + second[2:])
