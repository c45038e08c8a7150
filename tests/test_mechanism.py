"""The mechanism, measured: the exact gradient, projections without a backward, and variances by
formula."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from branchgrpo import TrainConfig, Trainer
from branchgrpo.mechanism.exact import (
    edge_derivatives,
    moved_policy,
    pathwise_side,
    projections,
    prompt_gradient,
    score_function_side,
)
from branchgrpo.mechanism.measure import GradientSamples, alignment_rows
from branchgrpo.policy import GaussianFlow


def mean_of_image(images, prompts, metadata=None):
    return images.flatten(1).mean(1)


def near_one(images, prompts, metadata=None):
    "Best where the image is 1: not linear, so that both sides of the identity have noise."
    return -(images.flatten(1) - 1).square().mean(1)


def trainer(folder, reward=mean_of_image, elements=3, **fields):
    config = TrainConfig(lora_rank=0, tracker="none", output=str(folder), kl=0.0, **fields)
    return Trainer(
        config, policy=GaussianFlow(0.2, 0.7, (elements,)), reward=reward, prompts=["a", "b", "c"]
    )


@pytest.mark.parametrize("reward", [mean_of_image, near_one])
@pytest.mark.parametrize("recipe", ["dancegrpo", "flow-grpo"])
def test_the_score_function_gradient_is_the_pathwise_one(tmp_path, recipe, reward):
    "Rollout, log-densities and credit together: a wrong factor in any of them is seen."
    t = trainer(tmp_path, reward, recipe=recipe, std="none", steps=6, prompts_per_iteration=800)
    along = torch.ones(3) / math.sqrt(3)
    found = score_function_side(t, 0, along, 0.1)
    exact = pathwise_side(t, 0, along, copies=10)
    error = float(found.std()) / math.sqrt(len(found))
    assert error < 0.1 * abs(exact)
    assert abs(float(found.mean()) - exact) < 4 * error


RECIPES = [
    "branchgrpo",
    "branchgrpo-widpru",
    "branchgrpo-released",
    "grpo-guard",
    "mixgrpo",
    "g2rpo-one",
    "flash-grpo",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_projection_is_that_of_the_whole_gradient(tmp_path, recipe):
    "Of every prompt, for splits, side branches, windows, prunings, ratio rules and step weights."
    t = trainer(tmp_path, recipe=recipe, prompts_per_iteration=2)
    rolled = t.collect(0)
    t.credit(rolled)
    along = torch.tensor([0.6, 0.8, 0.0])
    edges = edge_derivatives(t.learner, rolled, moved_policy(t.learner, along, 0.1), 0.1)
    whole = torch.stack([prompt_gradient(t.learner, rolled, p) for p in range(2)])
    assert whole.abs().max() > 0
    torch.testing.assert_close(
        projections(rolled, edges).sum(1), whole @ along, rtol=1e-3, atol=1e-5
    )


def test_the_committed_ratios_follow_from_the_committed_projections():
    "Everybody can compute them anew: each row of the record, intervals and all."
    figures = Path(__file__).parents[1] / "figures/testbed"
    record = json.loads((figures / "beyond_mechanism.json").read_text())
    samples = pd.read_parquet(figures / "beyond_mechanism.parquet")
    assert set(samples.moment.astype(str)) == set(record["alignment"])
    for moment, of_moment in samples.groupby("moment"):
        found = {
            m.recipe: GradientSamples(np.stack(m.projections), np.stack(m.squares), m.cost)
            for m in of_moment.itertuples()
        }
        rows = alignment_rows(found, record["baseline"], record["draws"])
        for ours, theirs in zip(rows, record["alignment"][str(moment)], strict=True):
            assert ours["label"] == theirs["label"]
            for key in ("per_cost", "ratio", "ratio_per_cost"):
                assert ours[key] == pytest.approx(theirs[key]), (ours["label"], key)
