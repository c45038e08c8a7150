"""A run of every recipe that is killed twice, and started again, ends to the bit as one that was
never killed."""

import json

import pytest
from killing import KILLED, Attempt, outcome
from test_faults_kills import ONE, PLACES, lost, part

from branchgrpo import recipes

ITERATIONS = 3
# in the second iteration of the first start, and in the second one of the start after it
FIRST = PLACES["after the optimiser step"] | {"inside": part("update", 2)}
SECOND = PLACES["rollout"] | {"inside": part("collect", 2)}


def run_of(name):
    "A run of a recipe as it is, with one prompt an iteration and a checkpoint after each."
    run = {
        "recipe": name,
        "iterations": ITERATIONS,
        "prompts_per_iteration": 1,
        "checkpoint_every": 1,
    }
    run |= {
        "evaluate_every": 0,
        "tracker": "none",
        "ema_decay": 0.5,
        "learning_rate": 1e-4,
        "lora_rank": 2,
    }
    return run | {"backbone": "tiny-sd" if name.endswith("-sd") else "tiny-flux"}


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_that_is_killed(tmp_path, noted, name):
    "Killed in an update and in a rollout, and started again each time."
    never, killed, run = tmp_path / "never-killed", tmp_path / "killed", run_of(name)
    Attempt(never, ONE, run=run).ends_well()
    for fault in (FIRST, SECOND):
        code, _, _ = Attempt(killed, ONE, fault, run).ends_by_fault()
        assert code == KILLED["KILL"]
    Attempt(killed, ONE, run=run).ends_well()
    found = outcome(never)
    assert len(found["metrics"]) == ITERATIONS
    assert not lost(outcome(killed), json.loads(json.dumps(found)))
    what = f"SIGKILL: after an optimiser step, and in the rollout after the resume; recipe {name}"
    kept = "started again twice, it ends bit-equal"
    noted(what, "exit code -9, twice", kept, kind="kills", mode=ONE, signal="SIGKILL")
