"""Training on tiny-flux: shared siblings, exact ratios, kills, processes."""

import contextlib
import fcntl
import json
import os
import random
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from commands import popen
from small import rows

from branchgrpo.training.config import TrainConfig
from branchgrpo.training.trainer import Trainer

SMALL = dict(
    steps=6,
    splits=(0, 2),
    prompts_per_iteration=2,
    evaluate_every=0,
    tracker="none",
    checkpoint_every=2,
)


def config(folder, **changes):
    return TrainConfig.from_dict(SMALL | {"output": str(folder), "iterations": 4} | changes)


START = """
import sys, json
from branchgrpo import TrainConfig, Trainer
Trainer(TrainConfig.from_dict(json.loads(sys.argv[1]))).fit()
"""


def start(folder, iterations=6, **changes):
    table = SMALL | {"output": str(folder), "iterations": iterations, "splits": [0, 2]} | changes
    with open(f"{folder}.log", "a") as log:
        return popen([sys.executable, "-c", START, json.dumps(table)], stdout=log, stderr=log)


def ends_well(process, folder):
    assert process.wait(timeout=200) == 0, Path(f"{folder}.log").read_text()[-2000:]


CLAIMED = []


def free_port():
    """A port for this process alone: nobody connects outwards from one below 32768, and a lock
    keeps it from others.

    A port that the system had just given could be taken again before the processes used it: two
    suites at once met."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        claim = open(Path(tempfile.gettempdir()) / f"branchgrpo-port-{port}", "w")  # noqa: SIM115 held to the end
        with contextlib.suppress(OSError), socket.socket() as found:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.bind(("127.0.0.1", port))
            CLAIMED.append(claim)
            return port
        claim.close()


def started(n, code, words, place, **variables):
    "Start `n` processes of one training, as torchrun does; their logs are `place`.log0, …"
    shared = {"LOCAL_WORLD_SIZE": n, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"ACCELERATE_USE_CPU": "true"} | ({"WORLD_SIZE": n} if n > 1 else {}) | variables
    found = []
    for rank in range(n):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank}
        env = os.environ | {key: str(value) for key, value in own.items()}
        with open(f"{place}.log{rank}", "w") as log:
            found.append(
                popen([sys.executable, "-c", code, *words], env=env, stdout=log, stderr=log)
            )
    return found


def together(n, code, *words):
    "Run `n` processes of one training to their end; return their exit codes and logs."
    codes = [process.wait(timeout=240) for process in started(n, code, words, words[-1])]
    return [
        (code, Path(f"{words[-1]}.log{rank}").read_text()[-3000:])
        for rank, code in enumerate(codes)
    ]


def test_prompts_that_come_again_are_encoded_as_the_first_time(tmp_path):
    """What a reward and the model see of a prompt does not depend on the prompts beside it, so
    resumed runs are equal."""
    (tmp_path / "prompts.txt").write_text("a red 3\ntwo blue 5s\na green 7\n")
    table = SMALL | {
        "prompts": str(tmp_path / "prompts.txt"),
        "prompts_per_iteration": 2,
        "evaluate_every": 0,
    }

    def trained(name, iterations):
        run = Trainer(
            TrainConfig.from_dict(
                table | {"output": str(tmp_path / name), "iterations": iterations}
            )
        ).fit()
        return rows(run.path)

    trained("stopped", 2)
    assert trained("stopped", 4) == trained("whole", 4)


def test_lost_metrics_stop_no_run(tmp_path):
    """Rows are lost, the checkpoint is not: the run goes on, and no row gets the evaluation of
    another iteration."""
    table = SMALL | {"output": str(tmp_path / "run"), "evaluate_every": 2, "checkpoint_every": 1}
    Trainer(TrainConfig.from_dict(table | {"iterations": 2})).fit()
    file = tmp_path / "run/metrics.jsonl"
    file.write_text(file.read_text().splitlines(True)[0])
    with pytest.warns(UserWarning):
        run = Trainer(TrainConfig.from_dict(table | {"iterations": 4})).fit()
    assert [row["iteration"] for row in run.metrics] == [1, 3, 4]
    assert "eval_reward" not in run.metrics[0]


@pytest.mark.parametrize(
    "reward", ["0.7*tiny-clip+0.3*tiny-hps", "norm(tiny-clip+2*tiny-pickscore)"]
)
def test_sums_of_rewards_are_logged_one_by_one(tmp_path, reward):
    evaluated = dict(held_out="tiny-aesthetic", evaluate_every=1, evaluation_prompts=4)
    run = Trainer(config(tmp_path / "run", reward=reward, iterations=1, **evaluated)).fit()
    row, evaluation = run.metrics[0], run.evaluations[-1]
    names = [n for n in row if n.startswith("reward/")]
    assert (
        len(names) == 2
        and {f"eval_{n}" for n in names} | {"eval_reward/tiny-aesthetic"} <= evaluation.keys()
    )
    if reward.startswith("norm"):
        assert abs(row["reward"]) < 1e-4 and row["reward_std"] > 0.5  # centred within each prompt
    else:
        assert (
            abs(0.7 * row["reward/tiny-clip"] + 0.3 * row["reward/tiny-hps"] - row["reward"]) < 1e-5
        )


def test_a_small_model_on_a_cpu_computes_in_one_thread(tmp_path, monkeypatch):
    "A number of one's own and a large model keep theirs."
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = {}
    try:
        for case, variables, small in (
            ("own", {"OMP_NUM_THREADS": "2"}, 1e8),
            ("large", {}, 10),
            ("small", {}, 1e8),
        ):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr("branchgrpo.training.speed.SMALL_MODEL", small)
            torch.set_num_threads(2)
            Trainer(config(tmp_path))
            threads[case] = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert threads == {"own": 2, "large": 2, "small": 1}
