"""Code of your own for every registry, by `file.py:name`: on the command line, in YAML, in a
recipe, in Python."""

import json
import os
import sys

import pytest
from commands import run

from branchgrpo import GaussianFlow, TrainConfig, Trainer, load_prompts
from branchgrpo.own import import_own
from branchgrpo.training.contradictions import CODED
from branchgrpo.training.resolve import resolve

RULES = """
import torch

from branchgrpo import fuse_rewards
from branchgrpo.objective import LossRule, RatioRule
from branchgrpo.samplers import dance_noise, flow_step
from branchgrpo.selection import sees_images
from branchgrpo.transition import Sampler
from branchgrpo.windows import window_places

called = set()


def advantage(tree, leaf_rewards, options):
    called.add("advantage")
    leaf_rewards -= 1000  # of a copy
    given = (leaf_rewards + 1000, options.beta, options.weights, options.leaf_mask)
    values = fuse_rewards(tree, *given)
    return [value - value.nanmean(1, keepdim=True) for value in values]


def worst(rewards, k, generators):
    called.add("worst")
    return rewards.argsort(1)[:, :k]


@sees_images
def first(rewards, k, generators, seen):
    called.add("first")
    assert seen.features.shape == (*rewards.shape, 4)
    return torch.arange(k).expand(len(rewards), -1)


def features(images):
    called.add("features")
    return images.flatten(1).double()


def prune(tree, values, leaf_rewards, options):
    called.add("prune")
    return [torch.ones(1, parents.shape[1], dtype=torch.bool) for parents in tree.parents]


def ratio(log_ratio, dist, old_mean):
    called.add("ratio")
    return 0.5 * log_ratio


def with_means(log_ratio, dist, old_mean):
    called.add("guarded")
    return log_ratio + (dist.mean - old_mean).square().mean()


guarded = RatioRule(with_means, needs_means=True)


def loss(log_ratio, advantages, options):
    called.add("loss")
    return -log_ratio.exp() * advantages


def far(log_ratio, advantages, options):
    return log_ratio.abs() > options.clip_range


masked = LossRule(loss, far)


def late(process, step):
    called.add("late")
    return step + 1


def by_depth(tree, edge_mask, parts, noise):
    called.add("by_depth")
    return [torch.full((1, mask.shape[1]), depth % parts) for depth, mask in enumerate(edge_mask)]


def last_place(window, iteration, seed):
    called.add("last_place")
    return window_places(window)[-1]


def step(x, velocity, sigma, next_sigma, noise):
    called.add("step")
    return flow_step(x, velocity, sigma, next_sigma, noise)


sampler = Sampler(step, dance_noise, per_root_h=True)


def two():
    return ["a red 3", "two blue 5s"]
"""
SMALL = {
    "steps": 5,
    "splits": (0, 1),
    "iterations": 2,
    "prompts_per_iteration": 2,
    "evaluate_every": 0,
}
TREE = {
    "advantage": "advantage",
    "prune": "prune",
    "selection": "worst",
    "group_selection": "first",
    "features": "features",
    "step_unit": "by_depth",
    "step_weights": "late",
    "ratio": "ratio",
    "loss": "loss",
    "transition": "sampler",
}
WITH_TREE = {"prune_at": {2: 4}, "group_keep": 3, "steps_per_pass": 2, "roots": 2}
WINDOW = {"window": "last_place", "ratio": "guarded", "loss": "masked"}
WITH_WINDOW = {"window_size": 2, "stochastic": "splits+window"}


@pytest.fixture
def rules(tmp_path):
    "A file of rules in a folder that is the current one."
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    before = os.getcwd()
    os.chdir(tmp_path)
    yield path
    os.chdir(before)


def names(settings, place="rules.py"):
    "Settings with the names of objects in a file."
    return {setting: f"{place}:{name}" for setting, name in settings.items()}


def brightness(images, prompts, metadata=None):
    return images.flatten(1).mean(1)


def trainer(folder, **changes):
    "A trainer of an exact Gaussian flow."
    table = SMALL | {"tracker": "none", "output": str(folder)} | changes
    policy = GaussianFlow(shape=(4,))
    return Trainer(
        TrainConfig.from_dict(table), policy=policy, reward=brightness, prompts=["a", "b"]
    )


@pytest.mark.parametrize(
    ("mine", "more"), [(TREE, WITH_TREE), (WINDOW, WITH_WINDOW)], ids=["tree", "window"]
)
def test_every_registry_takes_an_object_of_a_file(rules, tmp_path, mine, more):
    "Each is called, recorded with its whole path, and known by its source."
    assert {*TREE, *WINDOW} == {*CODED}
    result = trainer(tmp_path / "run", **names(mine), **more).fit()
    called = import_own(f"{rules}:called")
    functions = {"sampler": "step", "masked": "loss"}
    assert {functions.get(name, name) for name in mine.values()} <= called
    recorded = result.info["settings"]
    for setting, name in mine.items():
        assert recorded[setting] == f"{rules}:{name}"
        assert setting in recorded["sources"]
    # a rule that changes its tensors changes copies
    assert all(abs(row["reward"]) < 100 for row in result.metrics)


def test_a_changed_file_is_another_run_and_a_moved_one_is_not(rules, tmp_path):
    trainer(tmp_path / "run", **names({"advantage": "advantage"})).fit()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    rules.rename(moved / "rules.py")
    again = names({"advantage": "advantage"}, "elsewhere/rules.py")
    assert len(trainer(tmp_path / "run", **again, iterations=3).fit().metrics) == 3
    changed = (
        (moved / "rules.py")
        .read_text()
        .replace("leaf_rewards -= 1000  # of a copy", "leaf_rewards -= 1000")
    )
    (moved / "rules.py").write_text(changed)
    with pytest.raises(ValueError, match="differs in sources: the code of advantage has changed"):
        trainer(tmp_path / "run", **again, iterations=4).fit()


def test_an_edit_during_a_training_does_not_change_it(rules, tmp_path):
    made = trainer(tmp_path / "run", **names({"advantage": "advantage"}))
    rules.write_text("1 / 0\n")
    assert made.fit().finished


def test_a_mark_of_a_rule_is_a_part_of_its_code(rules):
    "Another `needs_means` trains something else, though the function is the same."

    def source(text):
        rules.write_text(text)
        return resolve(TrainConfig(ratio="rules.py:guarded")).sources["ratio"]

    assert source(RULES) != source(
        RULES.replace("RatioRule(with_means, needs_means=True)", "RatioRule(with_means)")
    )


def test_a_path_in_a_recipe_counts_from_its_folder(rules, tmp_path):
    (tmp_path / "recipes").mkdir()
    rules.rename(tmp_path / "recipes/rules.py")
    values = "advantage: rules.py:advantage\n  loss: {value: rules.py:loss, source: ours}"
    (tmp_path / "recipes/mine.yaml").write_text(f"base: branchgrpo\nvalues:\n  {values}\n")
    found = resolve(TrainConfig(recipe="recipes/mine.yaml"))
    assert found.advantage == f"{tmp_path}/recipes/rules.py:advantage"
    assert found.loss == f"{tmp_path}/recipes/rules.py:loss"
    os.chdir("/")
    recorded = {name: value for name, value in found.to_dict().items() if name != "sources"} | {
        "recipe": "branchgrpo"
    }
    assert resolve(TrainConfig.from_dict(recorded)).sources == found.sources


def test_prompts_of_a_function(rules):
    assert load_prompts("rules.py:two").train == ["a red 3", "two blue 5s"]
    with pytest.raises(ValueError, match="^prompts: 'rules.py:late' takes .process, step., not .."):
        load_prompts("rules.py:late")


WRONG = """
from branchgrpo.objective import LossRule, RatioRule
from branchgrpo.transition import Sampler

number = 4
rule = RatioRule(lambda log_ratio: log_ratio)
loss = LossRule(lambda log_ratio, advantages, options: 0, lambda log_ratio: 0)
sampler = Sampler(lambda x: x, lambda sigmas, noise_level: sigmas[1:])


def one():
    return 1


class Made:
    pass
"""


@pytest.mark.parametrize("setting", sorted(CODED))
def test_a_wrong_object_is_one_line_when_settings_are_checked(tmp_path, setting):
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    window = {"group_keep": 2, "window_size": 2}
    kinds = {
        "number": "is of type int, not a",
        "one": r"takes \(\), not \(",
        "Made": "is a class; name a function",
    }
    if setting == "transition":
        kinds = {
            "number": "is of type int, not a branchgrpo.transition.Sampler",
            "sampler": "step, takes",
        }
    elif setting in ("ratio", "loss"):
        kinds |= {
            "rule" if setting == "ratio" else "loss": r"takes \(log_ratio\), not \(log_ratio, "
        }
    kinds |= {"onee": "has no 'onee'; did you mean 'one'"}
    for name, message in kinds.items():
        with pytest.raises(ValueError, match=f"^{setting}: '{file}:{name}'.*{message}"):
            resolve(TrainConfig.from_dict(SMALL | window | {setting: f"{file}:{name}"}))
    with pytest.raises(
        ValueError, match=f"^{setting}: .*names a file and nothing in it; write file.py:name"
    ):
        resolve(TrainConfig.from_dict(SMALL | window | {setting: str(file)}))
    with pytest.raises(
        ValueError,
        match=rf"^{setting}: 'nothing' is not one of .* \(also allowed, of your own: file",
    ):
        resolve(TrainConfig.from_dict(SMALL | window | {setting: "nothing"}))


RETURNS = """
import torch
from branchgrpo import fuse_rewards
from branchgrpo.objective import LossRule


def one_depth_short(tree, leaf_rewards, options):
    return [torch.zeros(parents.shape) for parents in tree.parents[1:]]


def infinite(tree, leaf_rewards, options):
    return [torch.full(parents.shape, torch.inf) for parents in tree.parents]


def per_leaf(tree, leaf_rewards, options):
    return leaf_rewards


def unpacked(tree, leaf_rewards, options):
    first, second = [1]


def twice(rewards, k, generators):
    return torch.zeros(len(rewards), k, dtype=torch.int64)


def beyond(rewards, k, generators):
    return torch.full((len(rewards), k), rewards.shape[1]) - torch.arange(k)


def as_mask(rewards, k, generators):
    return rewards > 0


def of_numbers(tree, values, leaf_rewards, options):
    return values


def detached(log_ratio, second, third):
    return log_ratio.detach()


def mean(log_ratio, second, third):
    return log_ratio.mean()


def not_finite(log_ratio, second, third):
    return log_ratio / 0


outside = LossRule(
    lambda log_ratio, advantages, o: -log_ratio * advantages,
    lambda log_ratio, advantages, o: log_ratio,
)
kl = LossRule(lambda log_ratio, advantages, o: o.kl, lambda log_ratio, advantages, o: log_ratio > 0)


def text(process, step):
    return "late"


def below(process, step):
    return -1.0


def one_more(tree, edge_mask, parts, noise):
    return [torch.full(mask.shape, parts) for mask in edge_mask]


def no_place(window, iteration, seed):
    return 99 if iteration else window.start


def flat(images):
    return images.flatten()
"""
SEEING = {"group_selection": "diverse", "group_keep": 3, "diversity": 0.5}


@pytest.mark.parametrize(
    ("setting", "name", "message", "more"),
    [
        (
            "advantage",
            "one_depth_short",
            "returned a list of 5, not of 6 tensors, one for each of the depths 0…5",
            {},
        ),
        ("advantage", "infinite", "returned numbers that are not finite at depth 0", {}),
        ("advantage", "per_leaf", "returned Tensor, not a list of 6 tensors", {}),
        (
            "advantage",
            "unpacked",
            "failed .ValueError: not enough values .*, returns.py line 20",
            {},
        ),
        ("group_selection", "twice", "returned an index twice", {"group_keep": 2}),
        ("group_selection", "beyond", "not all within 0…3", {"group_keep": 2}),
        ("selection", "as_mask", "returned bool, not whole numbers", {"prune_at": {2: 3}}),
        ("features", "flat", "returned the shape .32,., not .8, any.", SEEING),
        ("prune", "of_numbers", "returned float32 at depth 0, not true or false", {}),
        ("ratio", "detached", "without a gradient", {}),
        ("ratio", "mean", "returned the shape .., not .", {}),
        ("loss", "not_finite", "not finite", {}),
        ("loss", "outside", "outside, returned float32, not true or false", {}),
        (
            "loss",
            "kl",
            "a rule that uses the KL says so: LossRule.function, outside, needs_means=True",
            {},
        ),
        ("step_weights", "text", "returned 'late' at step 0, not one number", {}),
        ("step_weights", "below", "not a finite number of at least 0", {}),
        ("step_unit", "one_more", "not all within 0…1", {"steps_per_pass": 2}),
        (
            "window",
            "no_place",
            "returned 99 at iteration 1, not one of the places 0, 1, 2",
            WITH_WINDOW,
        ),
    ],
)
def test_a_wrong_result_is_one_line_at_the_first_call(tmp_path, setting, name, message, more):
    (tmp_path / "returns.py").write_text(RETURNS)
    with pytest.raises(ValueError, match=f"^{setting}: .*{message}"):
        trainer(tmp_path / "run", **more, **{setting: f"{tmp_path}/returns.py:{name}"}).fit()


REPEATS = """
from branchgrpo.selection import may_repeat


@may_repeat
def first_again(rewards, k, generators):
    return rewards.argmax(-1, keepdim=True).expand(-1, k)
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"selection": "repeats.py:first_again", "steps": 6, "prune_at": {5: 3}},
            "keeps nodes several times, and step 5 of prune_at draws no noise",
        ),
        (
            {"group_selection": "repeats.py:first_again", "group_keep": 2},
            "keeps some nodes several times, and a group has each image once",
        ),
    ],
)
def test_the_mark_of_a_rule_counts_in_a_file_of_yours(tmp_path, monkeypatch, given, message):
    "A rule that may keep a node several times is checked as one of the package is."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repeats.py").write_text(REPEATS)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path / "run", **given)


FLAGS = (
    "--steps 4 --splits 0,1 --iterations 1 --prompts-per-iteration 1 --evaluate-every 0 --tracker"
    " none"
)


def test_the_shell_takes_a_file_as_a_flag_in_yaml_and_in_a_recipe(rules, tmp_path):
    "The three runs are one: the same folder continues."
    (tmp_path / "config.yaml").write_text("advantage: rules.py:advantage\n")
    (tmp_path / "mine.yaml").write_text("name: mine\nvalues: {advantage: rules.py:advantage}\n")
    given = {
        "flag": ["--advantage", "rules.py:advantage"],
        "config": ["--config", "config.yaml"],
        "recipe": ["--recipe", "mine.yaml"],
    }
    for kind, words in given.items():
        output = "run" if kind != "recipe" else "other"
        done = run(
            [
                sys.executable,
                "-m",
                "branchgrpo.cli",
                "train",
                *words,
                *FLAGS.split(),
                "--output",
                output,
            ]
        )
        assert done.returncode == 0, done.stdout
        recorded = json.loads((tmp_path / output / "run.json").read_text())["settings"]
        assert recorded["advantage"] == f"{rules}:advantage"
    assert list(recorded["sources"]) == ["advantage"]
