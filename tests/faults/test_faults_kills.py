"""A run that is killed anywhere, and started again, ends to the bit as one that was never
killed."""

import json
import os
import shutil
from fnmatch import fnmatch

import pytest
from filelock import FileLock
from killing import KILLED, MODES, Attempt, outcome

from branchgrpo.training.checkpoint_files import checkpoints_of, newest

TRAINING = "branchgrpo.training"
ONE, PASSES, TWO, SHARDED = MODES


def at(name, call=1, when="before", inside=None, **more):
    "A fault at a call of a function."
    return {"at": name, "call": call, "when": when} | ({"inside": inside} if inside else {}) | more


def part(name, n):
    "A part of the n-th iteration of a start."
    return [f"{TRAINING}.trainer:Iterations.{name}", n]


def evaluation(n):
    return [f"{TRAINING}.held_out:HeldOutEvaluator.__call__", n]


def saving(n):
    return [f"{TRAINING}.checkpoints:Saver.save", n]


EXPORT = [f"{TRAINING}.trainer:export", 1]
DENOISER = "diffusers.models.transformers.transformer_flux:FluxTransformer2DModel.forward"
PLACES = {  # of one iteration after the first checkpoint, and of the end
    "rollout": at("branchgrpo.rollouts:take_step", 3, inside=part("collect", 3)),
    "rollout, in the denoiser": at(DENOISER, 5, inside=[f"{TRAINING}.collection:roll", 3]),
    "decode": at("branchgrpo.backbones.flux:FluxPolicy.decode", 1, "before", part("collect", 3)),
    "reward": at("branchgrpo.rewards.scorer:score_parts", 1, "after", part("collect", 3)),
    "credit": at(f"{TRAINING}.credit:assign_credit", 1, "before", part("credit", 3)),
    "backward": at(
        "branchgrpo.samplers:Gaussian.log_prob", 2, "gradient", [f"{TRAINING}.update:train_step", 3]
    ),
    "backward, in the denoiser": at(DENOISER, 2, "gradient", [f"{TRAINING}.update:train_step", 4]),
    "between micro-batches": at(
        "accelerate:Accelerator.backward", 2, "after", [f"{TRAINING}.update:train_step", 4]
    ),
    "between optimiser steps": at(f"{TRAINING}.update:train_step", 1, "after", part("update", 3)),
    "between passes": at(f"{TRAINING}.update:train_step", 2, "before", part("update", 3)),
    "optimiser step": at("torch:Tensor.addcdiv_", 30, "before", part("update", 3)),
    "after the optimiser step": at("torch.optim:AdamW.step", 1, "after", part("update", 3)),
    "averaged weights": at(
        f"{TRAINING}.learner:AveragedWeights.step", 1, "after", part("update", 3)
    ),
    "before the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "before"),
    "after the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "after"),
    "check before a checkpoint": at(f"{TRAINING}.checkpoints:check_weights", 1, "after", saving(2)),
    "check before the first checkpoint": at(
        f"{TRAINING}.checkpoints:check_weights", 1, "after", saving(1)
    ),
    "first evaluation": at(f"{TRAINING}.held_out:draw_block", 1, "after", evaluation(1)),
    "evaluation": at(f"{TRAINING}.held_out:sample_held_out", 1, "after", evaluation(2)),
    "evaluation, before it is recorded": at(
        f"{TRAINING}.held_out:score_held_out", 1, "after", evaluation(2)
    ),
    "end, before the model is written": at(f"{TRAINING}.export:write_result", 1, "before"),
    "end, before the model is renamed": at(f"{TRAINING}.export:write_result", 1, "after"),
    "end, before the run is marked": at(f"{TRAINING}.trainer:export", 1, "after"),
    "start, before the folder is made": at(f"{TRAINING}.runs:open_run", 1, "before"),
    "start, before the first evaluation": at(
        f"{TRAINING}.trainer:Trainer.evaluate_reached", 1, "before"
    ),
}
# what the kernel ends in the middle of a write: the process has used up its quota of bytes
WRITES = {
    "a checkpoint's weights": at(
        f"{TRAINING}.checkpoints:check_weights", 1, "after", saving(2), limit=300_000
    ),
    "the exported model": at(f"{TRAINING}.export:write_result", 1, "before", limit=3_000_000),
    "the row of metrics": at(f"{TRAINING}.runs:Run.append", 2, "before", limit=900),
    "the table of evaluations": {
        "event": "open",
        "path": "evaluations.jsonl*",
        "call": 2,
        "limit": 500,
    },
    "the sheet of images": at(f"{TRAINING}.held_out:image_sheet", 2, "after", limit=1000),
}
STEPS = (
    "rollout",
    "reward",
    "backward, in the denoiser",
    "between optimiser steps",
    "optimiser step",
    "evaluation",
)
KILLS = [
    *(
        (ONE, place)
        for place in PLACES
        if place not in ("between passes", "rollout, in the denoiser")
    ),
    *(
        (PASSES, place)
        for place in ("between passes", "optimiser step", "end, before the model is renamed")
    ),
    *(
        (mode, place)
        for mode in (TWO, SHARDED)
        for place in (*STEPS, "end, before the model is written")
    ),
    (SHARDED, "check before a checkpoint"),
]
RANK_1 = {
    (TWO, "rollout"),
    (TWO, "backward, in the denoiser"),
    (TWO, "optimiser step"),
    (SHARDED, "reward"),
}
RANK_1 |= {
    (SHARDED, "between optimiser steps"),
    (SHARDED, "evaluation"),
    (SHARDED, "check before a checkpoint"),
}
FAST = {(ONE, "a checkpoint's weights"), (ONE, "between optimiser steps", "TERM", 0)}


def named(*kill):
    "Return the parameters of a test, with their words as its name."
    marks = [pytest.mark.fast] if kill in FAST else []
    return pytest.param(*kill, id="-".join(map(str, kill)), marks=marks)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """whole(mode): the outcome of a run that was never killed, and its operations on files; made
    once for the suite."""
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
        events = [
            tuple(json.loads(line))
            for line in target.with_suffix(".events").read_text().splitlines()
        ]
        return json.loads(kept.read_text()), events

    return make


def differing(found, never):
    "Return what differs of two values; of two tables, by key."
    if not isinstance(never, dict):
        return found, never
    return {
        key: (found.get(key), never.get(key))
        for key in found.keys() | never.keys()
        if found.get(key) != never.get(key)
    }


def lost(found, never):
    "Return what differs from a run that was never killed."
    found = json.loads(json.dumps(found))
    keys = [key for key in never if found[key] != never[key]]
    return {key: differing(found[key], never[key]) for key in keys}


def started_again(folder, mode, never, told=False):
    """Start a run again, to its end; it must be as one that was never killed.

    Told to stop, it has kept another one too.
    """
    Attempt(folder, mode).ends_well()
    found = outcome(folder)
    if told:
        assert (
            found["checkpoints"][-1] == never["checkpoints"][-1] and len(found["checkpoints"]) == 2
        )
        found["checkpoints"] = never["checkpoints"]
    assert not lost(found, never)


def last_kept(folder):
    "Return the name of the last checkpoint, which must be sound: what is in its place is whole."
    found = checkpoints_of(folder) if folder.exists() else []
    if not found:
        return "nothing yet: begins anew"
    assert newest(folder) == found[-1], "the last checkpoint is damaged"
    return f"checkpoint {int(found[-1].name)}"


def note_kill(noted, signal, place, mode, who, happened, kept):
    noted(
        f"{signal}: {place}; {mode}{who}",
        happened,
        kept,
        kind="kills",
        mode=mode,
        signal=signal,
        place=place,
    )


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
    note_kill(
        noted,
        number,
        place,
        mode,
        who,
        f"exit code {code}{end}",
        f"{kept}; started again, it ends bit-equal",
    )


@pytest.mark.parametrize("mode, place", [named(*kill) for kill in KILLS])
def test_killed(tmp_path, whole, noted, mode, place):
    fault = PLACES[place] | {"rank": int((mode, place) in RANK_1)}
    check_kill(tmp_path / "run", mode, fault, whole, noted, place)


TORN = [
    *((ONE, name) for name in WRITES),
    (TWO, "a checkpoint's weights"),
    (SHARDED, "a checkpoint's weights"),
]


@pytest.mark.parametrize("mode, name", [named(*torn) for torn in TORN])
def test_killed_within_a_write(tmp_path, whole, noted, mode, name):
    fault = WRITES[name] | {"rank": int(mode == SHARDED), "folder": str(tmp_path / "run")}
    check_kill(tmp_path / "run", mode, fault, whole, noted, f"within the write of {name}")


# of a run with a checkpoint each iteration, that keeps two: it deletes the first
LAST_SAVE = "checkpoints/000003*"


def operations(events, patterns):
    "Return the operations on some files, as faults: before each of them, and after each renaming."
    seen, faults = {}, []
    for event, path in events:
        call = seen[event, path] = seen.get((event, path), 0) + 1
        if any(fnmatch(path, pattern) for pattern in patterns):
            fault = {"event": event, "path": path, "call": call}
            faults += [fault] + ([fault | {"when": "after"}] if event == "os.rename" else [])
    return faults


def check_operations(tmp_path, mode, whole, noted, patterns, part, parts, what):
    "Kill a run at every operation of a part of those on some files, each in a folder of its own."
    faults = operations(whole(mode)[1], patterns)
    assert len(faults) >= parts, "nothing was recorded"
    for n, fault in list(enumerate(faults))[part::parts]:
        folder = tmp_path / f"run{n}"
        place = f"{what}, {fault.get('when', 'before')} {n + 1}: {fault['event']} {fault['path']}"
        check_kill(folder, mode, fault | {"folder": str(folder)}, whole, noted, place)
        shutil.rmtree(folder)


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("mode", [PASSES, SHARDED])
def test_killed_at_every_operation_of_a_checkpoint(tmp_path, whole, noted, mode, part):
    "In the folder that is written, at its renaming, and at each deletion of the oldest one."
    patterns = [LAST_SAVE, "checkpoints/000001/*", "checkpoints/000001", "checkpoints/000001.gone*"]
    events = whole(mode)[1]
    first = next(n for n, (event, path) in enumerate(events) if fnmatch(path, LAST_SAVE))
    removed = [
        path
        for event, path in events[first:]
        if event == "os.remove" and path.startswith("checkpoints/000001")
    ]
    assert removed, "the oldest checkpoint is deleted after the newest was saved"
    check_operations(tmp_path, mode, whole, noted, patterns, part, 8, "operation of a checkpoint")


@pytest.mark.parametrize("part", range(2))
def test_killed_at_operations_of_the_records(tmp_path, whole, noted, part):
    """run.json, metrics.jsonl, evaluations.jsonl and the sheets of images; the adapter that is
    written at the end."""
    patterns = ["run.json*", "evaluations.jsonl*", "samples/000003*", "lora.tmp", "lora"]
    check_operations(tmp_path, PASSES, whole, noted, patterns, part, 2, "operation of a record")


AGAIN = {  # a run that was killed is killed once more while it resumes
    "resume, in the reading of the checkpoint": at(
        f"{TRAINING}.checkpoints:load_checkpoint", 1, "after"
    ),
    "resume, before the metrics are cut back": at(f"{TRAINING}.trainer:rewind", 1, "before"),
    "resume, after the metrics were cut back": at(f"{TRAINING}.trainer:rewind", 1, "after"),
    "resume, before leftovers are deleted": at(f"{TRAINING}.trainer:remove_leftovers", 1, "before"),
}


@pytest.mark.parametrize("place", AGAIN)
def test_killed_again_while_it_resumes(tmp_path, whole, noted, place):
    first = Attempt(tmp_path / "run", ONE, WRITES["a checkpoint's weights"])
    assert first.ends_by_fault()[0] == KILLED["limit"]
    check_kill(tmp_path / "run", ONE, AGAIN[place], whole, noted, place)


SIGNALS = [
    (ONE, "rollout", "TERM", 0),
    (ONE, "reward", "USR2", 0),
    (ONE, "backward", "TERM", 0),
    (ONE, "between optimiser steps", "TERM", 0),
    (ONE, "evaluation", "USR2", 0),
    (ONE, "check before the first checkpoint", "TERM", 0),
    (ONE, "start, before the first evaluation", "USR2", 0),
    (PASSES, "between passes", "TERM", 0),
    (ONE, "between micro-batches", "USR2", 0),
    (TWO, "rollout", "TERM", 1),
    (TWO, "backward, in the denoiser", "USR2", 1),
    (TWO, "optimiser step", "TERM", 1),
    (SHARDED, "reward", "TERM", 1),
    (SHARDED, "between optimiser steps", "USR2", 1),
    (SHARDED, "first evaluation", "TERM", 0),
]


def iterations_of(folder):
    "Return the iterations of the newest checkpoint and of the metrics."
    kept = [int(path.name) for path in checkpoints_of(folder)] if folder.exists() else []
    metrics = folder / "metrics.jsonl"
    return max(kept, default=0), metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.parametrize("mode, place, number, rank", [named(*told) for told in SIGNALS])
def test_told_to_stop(tmp_path, whole, noted, mode, place, number, rank):
    "One process is told, or all; all save what is finished and ask to be started again."
    never, _ = whole(mode)
    folder, fault = tmp_path / "run", PLACES[place] | {"rank": rank, "signal": number}
    if mode != ONE and fault["inside"][0].startswith(f"{TRAINING}.trainer"):
        # these have three iterations; the last one would end the run
        fault["inside"] = [fault["inside"][0], 2]
    attempt = Attempt(folder, mode, fault)
    code, others, _ = attempt.ends_by_fault()
    assert [code, *others] == [75] * attempt.n, attempt.log()
    line = next(
        line for line in attempt.log().splitlines() if line.startswith("branchgrpo: stopped by ")
    )
    saved, finished = iterations_of(folder)
    assert saved == finished, "all finished iterations are in the checkpoint"
    started_again(folder, mode, never, told=True)
    who = f", process {rank}" if others else ""
    kept = f"checkpoint {saved}, 0 finished iterations lost; started again, it ends bit-equal"
    note_kill(
        noted,
        f"SIG{number}",
        place,
        mode,
        who,
        f"exit code 75; {line.removeprefix('branchgrpo: ')}",
        kept,
    )


ENDS = [
    (ONE, "end, before the model is written", 0),
    (ONE, "end, before the run is marked", 0),
    (PASSES, "between passes", 0),
    (SHARDED, "evaluation", "all"),
]


@pytest.mark.parametrize("mode, place, rank", [named(*end) for end in ENDS])
def test_told_to_stop_at_the_end_it_ends(tmp_path, whole, noted, mode, place, rank):
    "All is collected: the run is finished within the time that Slurm gives."
    folder = tmp_path / "run"
    code, others, _ = Attempt(
        folder, mode, PLACES[place] | {"rank": rank, "signal": "USR2"}
    ).ends_by_fault()
    assert not code and not any(others)
    assert not lost(outcome(folder), whole(mode)[0])
    note_kill(noted, "SIGUSR2", place, mode, "", "exit code 0", "everything; the run is finished")
