"""Rewards of one's own for record.py; old runs hold digests of this file's functions, so do not edit it."""

import torch


def redness(images, prompts, metadata=None):
    "Mean of red above the mean of green and blue."
    return images[:, 0].mean((-2, -1)) - images[:, 1:].mean((1, 2, 3))


def sometimes_nan(images, prompts, metadata=None):
    "Redness, and NaN for every prompt of an even number of letters."
    found = redness(images, prompts)
    return torch.where(torch.tensor([len(p) % 2 == 0 for p in prompts], device=found.device), torch.nan, found)


def near_two(images, prompts, metadata=None):
    "For the Gaussian flow, whose images are numbers."
    return -(images.flatten(1)[:, 0] - 2.0).square()
