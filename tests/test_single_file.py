"""examples/branchgrpo_single_file.py, which people copy, computes on tiny-flux what the engine
computes: to the bit.

Both take the same draws. Where the example draws by itself, it follows Eq. 2 as printed, and the
engine its Cholesky factors: the same law, which `test_siblings_have_the_same_law` compares.
"""

import ast
import importlib.util
import io
import sys
import tokenize
from pathlib import Path

import commands
import pytest
import torch

from branchgrpo import TrainConfig, Trainer, load_backbone, load_reward
from branchgrpo.noise import Noise, child_lines, sibling_factors
from branchgrpo.planning import process_of
from branchgrpo.training.update import accumulate
from branchgrpo.tree import Siblings

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples/branchgrpo_single_file.py"
TINY = ROOT / "branchgrpo/testbed/weights/tiny-flux"
SIZES = {
    "a tree": {"splits": [0, 2], "prompts_per_iteration": 2},
    "three children": {"splits": [0, 3], "branch_factor": 3, "prompts_per_iteration": 3},
    "in small batches": {"splits": [0, 1, 2], "prompts_per_iteration": 2, "max_batch": 2},
}


@pytest.fixture(scope="module")
def single():
    "The example as a module."
    spec = importlib.util.spec_from_file_location("branchgrpo_single_file", FILE)
    # its dataclasses look for it there
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def trainer(folder, **changes):
    table = {
        "recipe": "branchgrpo",
        "backbone": "tiny-flux",
        "reward": "tiny-clip",
        "steps": 6,
        "evaluate_every": 0,
        "tracker": "none",
    }
    return Trainer(TrainConfig.from_dict(table | {"output": str(folder)} | changes))


def options(single, t):
    "The trainer's settings as the example has them; the engine keeps η in float32."
    s = t.settings
    eta = float(process_of(s, t.policy, 0).noise[0])
    same = (
        "steps",
        "splits",
        "branch_factor",
        "s",
        "shift",
        "beta",
        "advantage_clip",
        "clip_range",
        "max_batch",
    )
    same += ("learning_rate", "weight_decay", "max_grad_norm", "ema_decay")
    sizes = {
        "prompts": s.prompts_per_iteration,
        "steps_per_rollout": s.steps_per_pass,
        "decode_batch": 64,
    }
    return single.Options(eta=eta, **{name: getattr(s, name) for name in same}, **sizes)


class EngineNoise:
    "The engine's draws, in the example's order: node by node, families together."

    def __init__(self, noise: Noise, s: float):
        self.noise, self.s = noise, s

    def roots(self, prompts, shape):
        self.lines = torch.arange(1).expand(prompts, -1)
        return self.noise.roots(1, shape)

    def children(self, step, parents, branches, shape):
        nodes = (
            torch.arange(self.lines.shape[1])
            .repeat_interleave(branches)
            .expand(len(self.lines), -1)
        )
        siblings = Siblings.among(nodes, torch.ones_like(nodes, dtype=torch.bool))
        self.lines = child_lines(self.lines, nodes, siblings)
        drawn = self.noise.children(step, self.lines, siblings, self.s, shape)
        return drawn.unflatten(1, (-1, branches)).flatten(0, 1)


def same(mine, theirs):
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_rollout_and_its_gradient(single, sizes, tmp_path):
    t = trainer(tmp_path / "run", steps_per_pass=1, **sizes)
    s, o = t.settings, options(single, t)
    model = single.Flux(t.policy.pipeline, s.height, s.width, s.guidance_scale)
    rolled = t.collect(0)
    t.credit(rolled)
    parameters = dict(t.learner.parameters)
    stats = accumulate(t.learner, rolled)
    theirs = {name: p.grad.clone() for name, p in parameters.items()}
    t.learner.optimizer.zero_grad()

    prompts = t.collector.draw(0)
    encoded = [model.encode(prompt) for prompt in prompts]
    text = {name: torch.cat([one[name] for one in encoded]) for name in encoded[0]}
    tree = single.rollout(model, text, o, EngineNoise(rolled.noise, s.s))
    assert same(tree.latents, rolled.tree.latents)
    assert same(tree.log_probs, rolled.tree.log_probs)
    for d in range(1, s.steps + 1):
        families = torch.arange(tree.log_probs[d].shape[1]) // o.branch_factor ** (
            d - 1 in s.splits
        )
        assert torch.equal(rolled.tree.parents[d], families.expand(len(prompts), -1))

    values = single.fuse_rewards(tree, rolled.rewards, o.beta)
    advantages = single.depthwise_advantages(values, o.advantage_clip)
    assert same(advantages, rolled.advantages)
    assert sum(float(a.abs().sum()) for a in advantages) > 0

    loss = single.accumulate(model, text, tree, advantages, o)
    # summed in another order
    assert loss == pytest.approx(float(stats["loss"]), rel=1e-5, abs=1e-7)
    mine = {name: p.grad for name, p in parameters.items()}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert any(bool(g.any()) for g in theirs.values())


def test_two_iterations_train_the_same_weights(single, tmp_path):
    "Two optimiser steps each, clipped gradients, AdamW, and the averaged weights."
    t = trainer(tmp_path / "run", prompts_per_iteration=2, splits=[0, 2], ema_every=2)
    s, o = t.settings, options(single, t)
    assert s.steps_per_pass == 2
    fresh = load_backbone("tiny-flux", s.height, s.width, s.guidance_scale)
    model = single.Flux(fresh.pipeline, s.height, s.width, s.guidance_scale)
    before = {name: p.detach().clone() for name, p in model.denoiser.named_parameters()}

    draws = [t.collector.draw(i) for i in range(2)]
    reward = load_reward("tiny-clip")
    rows = list(
        single.train(model, reward, draws, o, lambda i: EngineNoise(t.collector.noise(i), s.s))
    )
    metrics = [t.step() for _ in range(2)]
    assert [row[1] for row in rows] == pytest.approx([row["reward"] for row in metrics], rel=1e-6)
    assert [row[2] for row in rows] == pytest.approx(
        [row["loss"] for row in metrics], rel=1e-4, abs=1e-6
    )

    theirs = t.learner.parameters
    mine = dict(model.denoiser.named_parameters())
    assert mine.keys() == theirs.keys() == before.keys()
    assert any(not torch.equal(before[name], mine[name]) for name in before)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert same(rows[-1][3], list(t.learner.ema.weights.values()))


@pytest.mark.parametrize("s", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("branches", [2, 3])
def test_siblings_have_the_same_law(single, s, branches):
    "The covariance of siblings: of Eq. 2's coefficients, and of the engine's factors."
    units = torch.eye(branches + 1, dtype=torch.float64)  # ξ as a linear map of (ξ₀, η₁, …, η_K)
    mapped = single.correlate(units[0].expand(1, 1, -1), units[1:][None], s)[0]
    factors = sibling_factors(branches, s)
    theirs = torch.zeros(branches, branches, dtype=torch.float64)
    for a, (own, later) in enumerate(factors):
        theirs[a, a], theirs[a + 1 :, a] = own, later
    torch.testing.assert_close(mapped @ mapped.T, theirs @ theirs.T, rtol=0, atol=1e-12)


def test_it_stands_alone_and_is_short():
    "It imports torch, diffusers and Python's own modules, and can be read at a sitting."
    source = FILE.read_text()
    found = set()
    for node in ast.walk(ast.parse(source)):
        found |= (
            {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.Import)
            else set()
        )
        found |= {str(node.module).split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    assert found - set(sys.stdlib_module_names) == {"torch", "diffusers"}
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    words = [t for t in tokens if t.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING)]
    assert len(words) <= 1600


def test_it_runs_as_its_first_lines_say():
    words = [sys.executable, FILE, "--model", TINY, "--iterations", "1"]
    done = commands.run(words, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "iteration 1: reward " in done.stdout
