"""A run that is killed anywhere, and started again, ends to the bit as one that was never killed."""

import json
import os
import shutil

import pytest
from filelock import FileLock
from killing import KILLED, MODES, Attempt, checkpoints, outcome

TRAINING = "branchgrpo.training"
ONE, PASSES, THREAD, TWO, SHARDED, SHARDED_THREAD = MODES


def at(name, call=1, when="before", inside=None, **more):
    "A fault at a call of a function."
    return {"at": name, "call": call, "when": when} | ({"inside": inside} if inside else {}) | more


def step(n):
    "The n-th iteration of a start."
    return [f"{TRAINING}.trainer:step", n]


def evaluation(n):
    return [f"{TRAINING}.trainer:evaluate", n]


def saving(n):
    return [f"{TRAINING}.checkpoints:Saver.save", n]


EXPORT = [f"{TRAINING}.lifetime:export", 1]
DENOISER = "diffusers.models.transformers.transformer_flux:FluxTransformer2DModel.forward"
PLACES = {  # of one iteration after the first checkpoint, and of the end
    "rollout": at("branchgrpo.rollout:take_step", 3, inside=step(3)),
    "rollout, in the denoiser": at(DENOISER, 5, inside=[f"{TRAINING}.collection:roll", 3]),
    "decode": at("branchgrpo.backbones.flux:decode_flux", 1, "before", step(3)),
    "reward": at("branchgrpo.rewards.scorer:score_parts", 1, "after", step(3)),
    "credit": at(f"{TRAINING}.rolled:assign_credit", 1, "before", step(3)),
    "backward": at("branchgrpo.rollout:edge_log_probs", 2, "gradient", [f"{TRAINING}.update:train_step", 3]),
    "backward, in the denoiser": at(DENOISER, 2, "gradient", [f"{TRAINING}.update:train_step", 4]),
    "between micro-batches": at("accelerate:Accelerator.backward", 2, "after", [f"{TRAINING}.update:train_step", 4]),
    "between optimiser steps": at(f"{TRAINING}.update:train_step", 1, "after", step(3)),
    "between passes": at(f"{TRAINING}.update:train_step", 2, "before", step(3)),
    "optimiser step": at("torch:Tensor.addcdiv_", 30, "before", step(3)),
    "after the optimiser step": at("torch.optim:AdamW.step", 1, "after", step(3)),
    "averaged weights": at(f"{TRAINING}.averages:AveragedWeights.step", 1, "after", step(3)),
    "before the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "before"),
    "after the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "after"),
    "check before a checkpoint": at(f"{TRAINING}.checkpoints:check_weights", 1, "after", saving(2)),
    "evaluation": at(f"{TRAINING}.held_out:draw_block", 1, "after", evaluation(2)),
    "evaluation, before it is recorded": at(f"{TRAINING}.held_out:evaluate", 1, "after", evaluation(2)),
    "end, before the model is written": at(f"{TRAINING}.export:write_result", 1, "before"),
    "end, before the model is renamed": at(f"{TRAINING}.export:write_result", 1, "after"),
    "end, before the run is marked": at(f"{TRAINING}.lifetime:export", 1, "after"),
    "start, before the folder is made": at(f"{TRAINING}.runs:open_run", 1, "before"),
    "start, before the first evaluation": at(f"{TRAINING}.trainer:evaluate", 1, "before"),
}
WRITES = {  # what the kernel ends in the middle of a write: the process has used up its quota of bytes
    "a checkpoint's weights": at(f"{TRAINING}.checkpoints:check_weights", 1, "after", saving(2), limit=300_000),
    "the exported model": at(f"{TRAINING}.export:write_result", 1, "before", limit=3_000_000),
    "the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "before", limit=900),
    "the table of evaluations": at(f"{TRAINING}.held_out:write_jsonl", 2, "before", limit=500),
    "the sheet of images": at(f"{TRAINING}.held_out:image_sheet", 2, "after", limit=1000),
}
KILLS = [
    *((ONE, place) for place in PLACES if place not in ("between passes", "rollout, in the denoiser")),
    *((PASSES, place) for place in ("between passes", "optimiser step", "end, before the model is renamed")),
    *((mode, place) for mode in (TWO, SHARDED) for place in ("rollout", "reward", "backward, in the denoiser")),
    *((mode, place) for mode in (TWO, SHARDED) for place in ("between optimiser steps", "optimiser step", "evaluation")),
    *((mode, "end, before the model is written") for mode in (TWO, SHARDED)),
    (SHARDED, "check before a checkpoint"),
]
RANK_1 = {(TWO, "rollout"), (TWO, "backward, in the denoiser"), (TWO, "optimiser step"), (SHARDED, "reward")}
RANK_1 |= {(SHARDED, "between optimiser steps"), (SHARDED, "evaluation"), (SHARDED, "check before a checkpoint")}
FAST = {(ONE, "reward"), (ONE, "backward, in the denoiser"), (ONE, "optimiser step"), (ONE, "a checkpoint's weights")}


def named(mode, place):
    marks = [pytest.mark.fast] if (mode, place) in FAST else []
    return pytest.param(mode, place, id=f"{mode}-{place}", marks=marks)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    "whole(mode): the outcome of a run that was never killed, and its operations on files; made once for the suite."
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "never-killed"
    folder.mkdir(exist_ok=True)

    def make(mode):
        target, record = folder / mode.replace(", ", "-").replace(" ", "-"), {}
        kept = target.with_suffix(".json")
        with FileLock(target.with_suffix(".lock")):
            if not kept.exists():
                record = {"record": str(target.with_suffix(".events")), "folder": str(target)}
                Attempt(target, mode, record).ends_well()
                kept.write_text(json.dumps(outcome(target)))
                shutil.rmtree(target)
        events = [tuple(json.loads(line)) for line in target.with_suffix(".events").read_text().splitlines()]
        return json.loads(kept.read_text()), events

    return make


def lost(found, never):
    "Return the names of what differs."
    return [key for key in never if json.loads(json.dumps(found[key])) != never[key]]


def started_again(folder, mode, never):
    "Start a run again, to its end; it must be as one that was never killed."
    Attempt(folder, mode).ends_well()
    assert lost(outcome(folder), never) == []


def last_kept(folder):
    names = [path.name for path in checkpoints(folder)] if folder.exists() else []
    return f"checkpoint {int(names[-1])}" if names else "nothing yet: begins anew"


def check_kill(folder, mode, fault, whole, noted, place):
    "Kill a run with a fault, start it again, compare, and note it."
    never, _ = whole(mode)
    code, others, late = Attempt(folder, mode, fault).ends_by_fault()
    assert code == KILLED["limit" if "limit" in fault else "KILL"]
    assert all(other != 0 for other in others), others
    assert late < 120, f"the other process ended {late:.0f} s after the one that was killed"
    kept = last_kept(folder)
    started_again(folder, mode, never)
    who = f", process {fault.get('rank', 0)} of {len(others) + 1}" if others else ""
    number = "SIGXFSZ" if "limit" in fault else "SIGKILL"
    end = f"; the other process ended with code {others[0]}, {late:.0f} s later" if others else ""
    noted(
        "kills",
        f"{number}: {place}; {mode}{who}",
        happened=f"exit code {code}{end}",
        kept=f"{kept}; started again, it ends bit-equal",
        mode=mode,
        signal=number,
        place=place,
    )


@pytest.mark.parametrize("mode, place", [named(*kill) for kill in KILLS])
def test_killed(tmp_path, whole, noted, mode, place):
    fault = PLACES[place] | {"rank": int((mode, place) in RANK_1)}
    check_kill(tmp_path / "run", mode, fault, whole, noted, place)


TORN = [*((ONE, name) for name in WRITES), (TWO, "a checkpoint's weights"), (SHARDED, "a checkpoint's weights")]


@pytest.mark.parametrize("mode, name", [named(*torn) for torn in TORN])
def test_killed_within_a_write(tmp_path, whole, noted, mode, name):
    fault = WRITES[name] | {"rank": int(mode == SHARDED)}
    check_kill(tmp_path / "run", mode, fault, whole, noted, f"within the write of {name}")
