"""A new user's own parts: rewards, advantages, models, recipes and callbacks, with no file of the
package changed."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from commands import run

from branchgrpo import ADVANTAGES, STEP_WEIGHTS, Callback, GaussianFlow, TrainConfig, Trainer
from branchgrpo.training.credit import assign_credit

SMALL = {
    "steps": 4,
    "splits": (0, 1),
    "iterations": 2,
    "prompts_per_iteration": 2,
    "evaluate_every": 0,
}
PROMPTS = ["a red 3", "two blue 5s"]
GREEDY = """
name: two-splits
base: dancegrpo
values:
  steps: 4
  splits: [0, 1]
  clip_range: {value: 2e-4, source: "mine"}
"""


def config(folder, **changes):
    return TrainConfig.from_dict(SMALL | {"tracker": "none", "output": str(folder)} | changes)


def brightness(images, prompts, metadata=None):
    "The mean of each image."
    return images.flatten(1).mean(1)


def trained(folder, policy=None, reward=brightness, callbacks=(), **changes):
    "Train an exact Gaussian flow: all machinery of a run, and no network."
    policy = policy or GaussianFlow(shape=(4,))
    made = Trainer(
        config(folder, **changes),
        policy=policy,
        reward=reward,
        prompts=PROMPTS,
        callbacks=callbacks,
    )
    return made, made.fit()


def test_a_lambda_is_a_reward(tmp_path):
    _, result = trained(
        tmp_path / "run", reward=lambda images, prompts, metadata: images.flatten(1).sum(1)
    )
    assert result.finished
    assert result.info["settings"]["reward"].startswith("lambda-")


def test_another_lambda_is_another_run(tmp_path):
    trained(tmp_path / "run", reward=lambda images, prompts, metadata: images.flatten(1).sum(1))
    with pytest.raises(ValueError, match="holds another run"):
        trained(
            tmp_path / "run", reward=lambda images, prompts, metadata: -images.flatten(1).sum(1)
        )


def test_a_model_a_reward_and_prompts_of_your_own(tmp_path):
    "The trained mean of the Gaussian goes where the reward is."
    policy = GaussianFlow(shape=(4,))
    trained(tmp_path / "run", policy=policy, iterations=10, learning_rate=0.05)
    assert policy.denoiser.mean.mean() > 0.1


def test_an_advantage_that_is_registered_later(tmp_path, monkeypatch):
    monkeypatch.setattr(ADVANTAGES, "entries", dict(ADVANTAGES.entries))
    widths = []

    @ADVANTAGES.register("flat")
    def flat(tree, leaf_rewards, options):
        widths.append(leaf_rewards.shape[1])
        return [torch.ones_like(log_probs) for log_probs in tree.log_probs]

    made, result = trained(tmp_path / "run", advantage="flat")
    assert widths == [4, 4]  # two splits in two, two iterations
    assert result.info["settings"]["advantage"] == "flat"
    assert "advantage" in made.settings.sources  # another source is another run


def test_weights_of_steps_that_are_registered_later(tmp_path, monkeypatch):
    monkeypatch.setattr(STEP_WEIGHTS, "entries", dict(STEP_WEIGHTS.entries))

    @STEP_WEIGHTS.register("first only")
    def first_only(process, step):
        return step == 0

    made, result = trained(
        tmp_path / "run", step_weights="first only", steps_per_pass=1, learning_rate=0.1
    )
    assert result.info["settings"]["step_weights"] == "first only"
    assert "step_weights" in made.settings.sources  # another source is another run
    rolled = made.collect(0)
    made.credit(rolled)
    plain = replace(rolled)
    equal = replace(made.settings, step_weights="equal")
    assign_credit(equal, made.policy, made.accelerator, plain)
    for depth in range(1, 4):  # three trained steps, so the first one weighs 3
        torch.testing.assert_close(
            rolled.advantages[depth], plain.advantages[depth] * (3.0 if depth == 1 else 0.0)
        )


def test_a_recipe_of_your_own_file(tmp_path):
    (tmp_path / "greedy.yaml").write_text(GREEDY)
    made, result = trained(
        tmp_path / "run", recipe=str(tmp_path / "greedy.yaml"), steps=None, splits=None
    )
    assert made.settings.recipe == "two-splits"
    assert made.settings.splits == (0, 1)
    assert made.settings.clip_range == 2e-4
    assert result.finished


class Watch(Callback):
    def __init__(self):
        self.events = []

    def on_start(self, trainer):
        self.events.append("start")

    def on_iteration(self, trainer, row):
        self.events.append(row["iteration"])

    def on_end(self, trainer):
        self.events.append("end")


def test_a_callback(tmp_path):
    watch = Watch()
    trained(tmp_path / "run", callbacks=[watch])
    assert watch.events == ["start", 1, 2, "end"]


SCORES = """
def redness(images, prompts, metadata=None):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""
FLAGS = (
    "--steps 4 --splits 0,1 --iterations 1 --prompts-per-iteration 1 --evaluate-every 0 --tracker"
    " none"
)


def test_a_reward_of_your_own_file_at_the_shell(tmp_path):
    name = "0.5*tiny-clip+my_scores:redness"
    (tmp_path / "my_scores.py").write_text(SCORES)
    command = ["train", "--reward", name, *FLAGS.split(), "--output", "run"]
    done = run([sys.executable, "-m", "branchgrpo.cli", *command], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    recorded = json.loads((tmp_path / "run/run.json").read_text())["settings"]
    assert recorded["reward"] == name
    assert "reward" in recorded["sources"]


def test_a_run_with_an_older_digest_of_code_resumes(tmp_path):
    """Made of compiled code, it cannot be compared with one of source; a digest of other source is
    another run."""
    trained(tmp_path / "run")
    table = json.loads((tmp_path / "run/run.json").read_text())

    def resumed(digest):
        table["settings"]["sources"]["reward"] = digest
        (tmp_path / "run/run.json").write_text(json.dumps(table))
        return trained(tmp_path / "run", iterations=3)[1]

    with pytest.raises(ValueError, match="holds another run .differs in sources"):
        resumed("source-" + "0" * 16)
    assert len(resumed("0" * 16).metrics) == 3


PLUGIN = """
class MyPolicy:
    kind, default_size = "flow", 64

def bright(images, prompts, metadata=None):
    "The mean of each image."
    return images.flatten(1).mean(1)
"""
ENTRY_POINTS = """
[branchgrpo.rewards]
bright = my_plugin:bright

[branchgrpo.families]
MyPipeline = my_plugin:MyPolicy
"""
USE = """
import torch
from branchgrpo import FAMILIES, REWARDS, load_reward
from branchgrpo.backbones.loading import default_sizes, family
assert "bright" in REWARDS.names()
assert "MyPipeline" in FAMILIES.names()
assert load_reward("2*bright")(torch.ones(1, 3, 8, 8), ["white"]).tolist() == [2.0]
assert family("model").__module__ == "my_plugin"
assert default_sizes("model") == {"height": 64, "width": 64}
"""


@pytest.fixture
def installed(tmp_path):
    "A folder with an installed package that adds a reward and a backbone family."
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "my_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_index.json").write_text(json.dumps({"_class_name": "MyPipeline"}))
    return tmp_path


def test_a_package_adds_a_reward_and_a_family(installed):
    done = run([sys.executable, "-c", USE], cwd=installed)
    assert done.returncode == 0, done.stdout


def test_the_command_line_lists_the_reward_of_a_package(installed):
    done = run([sys.executable, "-m", "branchgrpo.cli", "rewards"], cwd=installed)
    assert done.returncode == 0, done.stdout
    assert "bright The mean of each image." in [
        " ".join(line.split()) for line in done.stdout.splitlines()
    ]
