"""The models of cards need no flag but their name: they train, draw and are scored at their own
guidance."""

import pytest
from small import rows

from branchgrpo.backbones.defaults import default_guidance
from branchgrpo.backbones.names import ABOUT_CARDS
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer

QUICK = {
    "reward": "cards-geneval",
    "steps": 3,
    "splits": (0, 1),
    "prompts_per_iteration": 1,
    "iterations": 1,
    "evaluate_every": 1,
    "evaluation_prompts": 2,
    "tracker": "none",
}


@pytest.mark.parametrize("name", ABOUT_CARDS)
def test_they_train_at_their_own_guidance_and_size(name):
    settings = resolve(TrainConfig(backbone=name, reward="cards-geneval"))
    assert settings.guidance_scale == default_guidance(name) > 1
    assert (settings.height, settings.width) == (64, 64)


def test_the_checker_of_cards_judges_a_training(tmp_path):
    config = TrainConfig(backbone="cards-sd3", output=str(tmp_path / "run"), **QUICK)
    run = Trainer(config).fit()
    evaluations = [row for row in rows(run.path) if "eval_reward" in row]
    assert {"eval_check_digit", "eval_check_all"} <= evaluations[-1].keys()
    assert 0 < evaluations[-1]["eval_reward"] < 1
