"""Agreement with values computed once from published implementations."""

import pytest
import torch

from branchgrpo.credit import depthwise_advantages
from branchgrpo.fusion import fuse_rewards
from branchgrpo.plan import RolloutPlan
from branchgrpo.samplers import (
    alpha_bars,
    dance_noise,
    ddim_step,
    ddim_timesteps,
    flow_grpo_noise,
    flow_sigmas,
    flow_step,
)
from branchgrpo.tree import Tree


def close(actual, expected):
    actual = torch.as_tensor(actual, dtype=torch.float32)
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def tensor(case, key):
    return torch.tensor(case[key]).view(case["shape"])


def test_dance_flow_sde(golden):
    data = golden("dance_flow_sde")
    sigmas = flow_sigmas(20, 3.0)
    close(sigmas, data["sigmas"])
    for case in data["cases"]:
        i = case["step"]
        given = tensor(case, "x"), tensor(case, "velocity"), sigmas[i], sigmas[i + 1]
        dist = flow_step(*given, dance_noise(sigmas, case["eta"])[i])
        (
            close(dist.mean, tensor(case, "mean")),
            close(dist.x0_hat, tensor(case, "x0")),
            close(dist.std, case["std"]),
        )
        close(dist.log_prob(tensor(case, "next")), case["log_prob"])


def test_flow_sde(golden):
    data = golden("flow_sde")
    sigmas = torch.tensor(data["sigmas"])
    for case in data["cases"]:
        i = case["step"]
        given = tensor(case, "x"), tensor(case, "velocity"), sigmas[i], sigmas[i + 1]
        dist = flow_step(*given, flow_grpo_noise(sigmas, case["noise_level"])[i])
        close(dist.mean, tensor(case, "mean")), close(dist.std, case["std"])
        close(dist.log_prob(tensor(case, "next")), case["log_prob"])


def test_ddim(golden):
    data = golden("ddim")
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    timesteps = ddim_timesteps(50)
    assert timesteps.tolist() == data["timesteps"]
    levels = alpha_bars(timesteps, torch.cumprod(1 - betas, 0))
    for case in data["cases"]:
        i = case["step"]
        given = tensor(case, "x"), tensor(case, "epsilon"), levels[i], levels[i + 1]
        close(ddim_step(*given, case["eta"]).log_prob(tensor(case, "next")), case["log_prob"])
        close(ddim_step(*given, 0.0).mean, tensor(case, "ddim_eta0_next"))


@pytest.mark.parametrize("n", range(4))
def test_tree_credit(golden, n):
    case = golden("tree_credit")["cases"][n]
    tree = Tree.from_plan(RolloutPlan.tree(case["steps"], case["splits"], case["branch_factor"]))
    for d, row in enumerate(case["log_prob"], 1):
        tree.log_probs[d] = torch.tensor([row])
    beta = 1.0 if case["path_weighted"] else 0.0
    values = fuse_rewards(tree, torch.tensor([case["leaf_rewards"]]), beta, weights="edge")
    for ours, theirs in zip(values, case["value"], strict=True):
        close(ours[0], theirs)
    for ours, theirs in zip(
        depthwise_advantages(values, clip=None), case["advantage"], strict=True
    ):
        close(ours[0], theirs)
