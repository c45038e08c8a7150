"""Code of a user's own: its inputs are copies, and the process is as before after a call of it."""

import logging
import os
import random
import signal
import sys
import textwrap
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_training import SMALL

from branchgrpo import ADVANTAGES, SELECTIONS, Callback, TrainConfig, Trainer
from branchgrpo.evaluation.scores import draw_and_score, score_table
from branchgrpo.own import import_own
from branchgrpo.own_calls import LEFT, PARTS, SAID, as_before, random_states
from branchgrpo.prompts import Prompt, PromptSet, load_prompts
from branchgrpo.rewards.contract import RewardSum
from branchgrpo.rewards.names import load_reward
from branchgrpo.rewards.scorer import Scorer

CHANGES = {
    "gradients": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "folder": lambda: os.chdir("/"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "benchmark": lambda: setattr(
        torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark
    ),
    "attention": lambda: torch.backends.cuda.enable_math_sdp(
        not torch.backends.cuda.math_sdp_enabled()
    ),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "seeds": lambda: (torch.manual_seed(0), random.seed(0), np.random.seed(0)),
    "numpy": lambda: np.seterr(all="raise"),
    "warnings": lambda: warnings.simplefilter("error"),
    "signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "alarm": lambda: (signal.signal(signal.SIGALRM, lambda *_: None), signal.alarm(60)),
    "variables": lambda: os.environ.update(CUDA_VISIBLE_DEVICES="", PATH="/nowhere"),
    "no variable": lambda: os.environ.pop("PATH", None),
    "search": lambda: sys.path.insert(0, "/nowhere"),
    "no search": lambda: sys.path.clear(),
    "logs": lambda: (logging.disable(), logging.getLogger("torch").setLevel(1)),
    "handlers": lambda: logging.root.addHandler(logging.NullHandler()),
    "recursion": lambda: sys.setrecursionlimit(99_999),
    "streams": lambda: setattr(sys, "stdout", sys.stderr),
}


def everything():
    "Return all that a process has; a folder that code adds to the end of the search path may stay."
    parts = {what: part.read() for what, part in PARTS.items()}
    parts["the search path"] = [
        folder for folder in sys.path if folder != "/nowhere" and "pytest-of" not in folder
    ]
    levels, *others = parts["the levels of logs"]  # an import adds loggers
    parts["the levels of logs"] = levels[logging.root], levels[logging.getLogger("torch")], *others
    of_python, of_numpy, of_torch, _ = random_states()
    states = [of_python, of_numpy[1].tolist(), of_numpy[2], of_torch.tolist()]
    return parts, dict(os.environ), states, signal.getitimer(signal.ITIMER_REAL)


@pytest.fixture(autouse=True)
def nothing_left():
    SAID.clear()
    yield
    LEFT.clear()
    LEFT["variables"] = {}
    sys.path[:] = [
        folder for folder in sys.path if folder != "/nowhere" and "pytest-of" not in folder
    ]


@pytest.mark.filterwarnings("ignore:.* as after each call:UserWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_leaves_the_process_as_it_was(change):
    "Whether the call returns or fails, and at every call."

    def reward(images, prompts):
        CHANGES[change]()
        if len(images) == 3:
            raise OSError("the disk")
        return images.mean((1, 2, 3))

    made = RewardSum({"mine": (1.0, reward)})
    for count in (2, 3, 2):
        before = everything()
        try:
            made(
                torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)),
                ["a"] * count,
            )
        except OSError:
            assert count == 3
        assert everything() == before


@pytest.mark.filterwarnings("ignore:.* as after each call:UserWarning")
def test_a_module_and_a_class_leave_the_process_as_it_was(tmp_path):
    (tmp_path / "rude.py").write_text(
        textwrap.dedent("""
        import os, sys, torch
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["MY_SERVER"] = "http://localhost"
        sys.path.insert(0, "/nowhere")
        os.chdir("/")

        class Reward:
            def __init__(self, device="cpu"):
                torch.set_default_dtype(torch.float64)

            def __call__(self, images, prompts):
                assert os.environ["MY_SERVER"] and torch.get_default_dtype() == torch.float32
                return images.mean((1, 2, 3))
    """)
    )
    before = everything()
    reward = load_reward(f"{tmp_path}/rude.py:Reward")
    assert everything() == before and "/nowhere" in sys.path[-2:]
    assert reward(torch.ones(1, 3, 4, 4), ["a"]).tolist() == [1.0]
    assert everything() == before


@pytest.mark.filterwarnings("ignore:.* as after each call:UserWarning")
def test_inference_mode_left_on_is_one_line():
    "PyTorch has no way to turn it off from outside."
    mode = torch.inference_mode()
    with (
        pytest.raises(ValueError, match="reward: 'mine' leaves inference mode on"),
        as_before("reward: 'mine'"),
    ):
        mode.__enter__()
    mode.__exit__(None, None, None)


def test_random_numbers_of_a_reward_go_on_from_call_to_call():
    reward = load_reward(lambda images, prompts: torch.rand(len(images)))
    images, state = torch.zeros(2, 3, 4, 4), torch.get_rng_state()
    assert reward(images, ["a"] * 2).tolist() != reward(images, ["a"] * 2).tolist()
    assert torch.equal(torch.get_rng_state(), state)


def in_place(images, prompts, metadata=None):
    images.sub_(0.48).div_(0.27)
    prompts[:] = ["nothing"] * len(prompts)
    for row in metadata or []:
        row.clear()
    return images.mean((1, 2, 3))


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_reward_does_to_its_inputs_reaches_nobody(remote):
    "Neither the next reward nor the saved images, the prompts and what is known of them."

    class Reward:
        def __call__(self, images, prompts, metadata):
            for prompt in prompts:
                prompt.row["tag"] = "gone"
            return in_place(images, prompts, metadata)

    Reward.remote = remote
    prompts = [Prompt("a red 3", {"tag": "one"}), Prompt("a blue 7", {"tag": "two"})]
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    kept, rows = images.clone(), [dict(prompt.row) for prompt in prompts]
    clip = load_reward("tiny-clip")
    alone = clip(images, prompts)
    scorer = Scorer(RewardSum({"mine": (1.0, Reward()), "tiny-clip": (1.0, clip)}))
    assert torch.equal(scorer(images, prompts, rows)[1]["tiny-clip"], alone)
    assert torch.equal(images, kept) and prompts == ["a red 3", "a blue 7"]
    assert [prompt.row for prompt in prompts] == rows == [{"tag": "one"}, {"tag": "two"}]
    check = lambda images, prompts: {"all": images.zero_().mean((1, 2, 3))}  # noqa: E731
    mine = PromptSet(prompts, prompts, check)
    scorers = {"mine": Scorer(load_reward(in_place)), "tiny-clip": Scorer(clip)}
    decoder = SimpleNamespace(decode=lambda latents: latents)
    drawn, waiting = draw_and_score(decoder, images, prompts, scorers, mine)
    scores = score_table(scorers, waiting)["tiny-clip"][""]
    assert torch.equal(drawn, kept) and scores.tolist() == pytest.approx(alone.tolist())


class Meddling(Callback):
    def on_iteration(self, trainer, row):
        row.clear()
        torch.set_grad_enabled(False)

    def on_evaluation(self, trainer, scores, images):
        scores.clear()
        images.zero_()


@pytest.mark.filterwarnings("ignore:.* as after each call:UserWarning")
def test_a_training_with_careless_code_equals_one_with_careful_code(tmp_path, monkeypatch):
    """A reward, an advantage, a selection and a callback: the rows are the same, and all files are
    in one folder."""
    monkeypatch.chdir(tmp_path)

    def careless(images, prompts):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        return images.clamp_(0, 1).mean((1, 2, 3))

    def rude_depthwise(tree, rewards, options):
        found = ADVANTAGES.get("depthwise")(tree, rewards.clone(), options)
        rewards.zero_()
        for latents in tree.latents:
            latents.zero_()
        torch.set_grad_enabled(False)
        return found

    def rude_best(rewards, k, generators):
        found = SELECTIONS.get("best")(rewards.clone(), k, generators)
        rewards.zero_()
        return found

    monkeypatch.setitem(ADVANTAGES.entries, "rude", rude_depthwise)
    monkeypatch.setitem(SELECTIONS.entries, "rude", rude_best)
    rows = {}
    common = SMALL | {"iterations": 1, "evaluate_every": 1, "evaluation_prompts": 2, "lora_rank": 2}
    common |= {"group_keep": 2, "splits": (0, 2)}
    for name, reward, advantage, selection, callbacks in (
        (
            "good",
            lambda images, prompts: images.clamp(0, 1).mean((1, 2, 3)),
            "depthwise",
            "best",
            (),
        ),
        ("rude", careless, "rude", "rude", (Meddling(),)),
    ):
        config = common | {
            "output": f"runs/{name}",
            "advantage": advantage,
            "group_selection": selection,
        }
        trainer = Trainer(TrainConfig.from_dict(config), reward=reward, callbacks=callbacks)
        run = trainer.fit()
        assert run.path == tmp_path / "runs" / name and run.finished
        seconds = ("seconds", "seconds_rollout", "seconds_update")
        rows[name] = [{k: v for k, v in row.items() if k not in seconds} for row in run.metrics]
        rows[name] += [
            {k: v for k, v in row.items() if k not in seconds} for row in run.evaluations
        ]
    assert rows["good"] == rows["rude"]
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "elsewhere"}
    assert not any((tmp_path / "elsewhere").iterdir())


def test_what_is_ours_is_called_without_a_copy(monkeypatch):
    "Its numbers stay those of before, to the bit, and cost nothing."
    for module in ("own_calls", "contracts"):
        monkeypatch.setattr(f"branchgrpo.{module}.copied", lambda value: 1 / 0)
    images, prompts = torch.rand(2, 3, 32, 32), list(load_prompts("digits").test[:2])
    assert len(load_reward("tiny-clip+tiny-geneval")(images, prompts)) == 2


def test_a_call_costs_milliseconds():
    reward = load_reward(lambda images, prompts: images.mean((1, 2, 3)))
    images = torch.zeros(8, 3, 32, 32)
    start = time.process_time()
    for _ in range(20):
        reward(images, ["a"] * 8)
    assert (time.process_time() - start) / 20 < 0.02


def test_an_import_that_fails_leaves_the_process_as_it_was(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\nos.environ['PATH'] = ''\nraise RuntimeError('no GPU')\n"
    )
    before = dict(os.environ)
    with pytest.raises(ValueError, match="importing .* failed .RuntimeError: no GPU"):
        import_own(f"{tmp_path}/broken.py:reward")
    assert dict(os.environ) == before
