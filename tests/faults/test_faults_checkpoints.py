"""Damaged, foreign and malicious checkpoints: named, set aside or refused; nothing that is loaded
runs code."""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from small import rows
from test_sharding import BEGIN, END, FIT, FULL, processes, settings
from test_training import config

from branchgrpo.backbones.loading import load_backbone
from branchgrpo.backbones.names import folder_of
from branchgrpo.files import append_jsonl, read_jsonl, write_jsonl, write_text
from branchgrpo.policy import GaussianFlow
from branchgrpo.reproduction.cache import is_readable
from branchgrpo.training import checkpoint_files
from branchgrpo.training.checkpoint_files import (
    described,
    newest,
    read_saved_table,
    remove_leftovers,
    seal_of,
)
from branchgrpo.training.checkpoints import Progress, Saver, load_checkpoint
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.export import export
from branchgrpo.training.learner import make_learner
from branchgrpo.training.resolve import resolve
from branchgrpo.training.runs import Run, rewind
from branchgrpo.training.trainer import Trainer

ONE = ["000002", "000004"]  # the checkpoints of `saved`


def learner(mean=0.0, shape=(1,), recipe="branchgrpo", backbone="tiny-flux", **changes):
    "A learner of the smallest model, under the name `backbone`."
    policy = GaussianFlow(mean, shape=shape)
    s = resolve(TrainConfig(recipe=recipe), policy=policy)
    return make_learner(
        policy, dataclasses.replace(s, backbone=backbone, **changes), Accelerator(cpu=True)
    )


def saved(run, **changes):
    "Write the checkpoints of iterations 2 and 4, whose weights are 2 and 4."
    for iteration in (2, 4):
        one = learner(float(iteration), **changes)
        Saver(run, one.settings, one.accelerator).save(one, Progress(iteration))
    return run


def loaded(run, **changes):
    "Load a run; return the iteration, the weight, and the lines that the user sees."
    into = learner(-1.0, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        progress = load_checkpoint(run, into)
    lines = [str(warning.message) for warning in caught if "checkpoint:" in str(warning.message)]
    return progress.iteration, into.parameters["mean"][0].item(), lines


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def tensors(folder):
    return next(folder.glob("*.safetensors"))


def flip(path, place=-3):
    "Change one bit of a file."
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def to_file(folder):
    shutil.rmtree(folder)
    folder.write_text("no folder")


def reseal(folder):
    "Let a manifest describe the files as they are, as somebody who means harm would."
    path = folder / "progress.json"
    there = [p.name for p in folder.iterdir() if p.is_file() and p != path]
    table = json.loads(path.read_text()) | {"files": described(folder, there)}
    path.write_text(json.dumps(table | {"sha256": seal_of(table)}))


def manifest(folder, content):
    (folder / "progress.json").write_bytes(content)


def whole_manifest(folder):
    return (folder / "progress.json").read_bytes()


DAMAGE = {
    "one bit of the weights is flipped": (
        lambda f: flip(tensors(f)),
        "has other content than was written",
    ),
    "one bit of the weights' header is flipped": (
        lambda f: flip(tensors(f), 30),
        "has other content than was written",
    ),
    "the weights' file is cut short": (lambda f: os.truncate(tensors(f), 100), "has 100 bytes of"),
    "the weights' file is empty": (lambda f: os.truncate(tensors(f), 0), "has 0 bytes of"),
    "the weights' file is gone": (lambda f: tensors(f).unlink(), "safetensors is missing"),
    "a file of weights is too many": (
        lambda f: shutil.copy(tensors(f), f / "another.safetensors"),
        "another.safetensors is not in progress.json",
    ),
    "the manifest's iteration is changed": (
        lambda f: manifest(f, whole_manifest(f).replace(b'"iteration": 4', b'"iteration": 5')),
        "progress.json has other content than was written",
    ),
    "the manifest is cut short": (lambda f: manifest(f, b'{"iter'), "progress.json cannot be read"),
    "the manifest is binary": (
        lambda f: manifest(f, b"\xff\x00" * 9),
        "progress.json cannot be read",
    ),
    "the manifest is a list": (lambda f: manifest(f, b"[4]"), "progress.json cannot be read"),
    "the manifest is gone": (lambda f: (f / "progress.json").unlink(), "progress.json is missing"),
    "the folder is empty": (
        lambda f: [path.unlink() for path in f.iterdir()],
        "progress.json is missing",
    ),
    "the folder is a file": (to_file, "it is not a folder"),
}


@pytest.mark.fast
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(tmp_path, noted, kind):
    run = saved(tmp_path / "run")
    damage, message = DAMAGE[kind]
    damage(run / "checkpoints/000004")
    iteration, weight, lines = loaded(run)
    assert (iteration, weight) == (2, 2.0)
    assert (
        len(lines) == 1
        and message in lines[0]
        and "000004'" in lines[0]
        and "'000004.damaged'" in lines[0]
    )
    assert names(run) == ["000002", "000004.damaged"]
    remove_leftovers(run)
    saved(run)  # trained again, and cleaned up as every start does
    assert names(run) == ["000002", "000004", "000004.damaged"]
    assert loaded(run) == (4, 4.0, [])
    noted(
        f"Newest checkpoint: {kind}",
        lines[0].replace(str(tmp_path), "…"),
        "checkpoint 2 is used; 4 is set aside",
    )


def test_all_checkpoints_damaged_starts_from_the_beginning_and_says_so(tmp_path, noted):
    run = saved(tmp_path / "run")
    for name in ONE:
        flip(tensors(run / "checkpoints" / name))
    iteration, weight, lines = loaded(run)
    assert (iteration, weight) == (0, -1.0)
    assert names(run) == ["000002.damaged", "000004.damaged"]
    assert len(lines) == 3 and lines[-1].endswith(
        "has no sound one; the run starts from the beginning"
    )
    saved(run)
    flip(tensors(run / "checkpoints/000004"))
    loaded(run)
    assert names(run) == ["000002", "000002.damaged", "000004.damaged", "000004.damaged2"]
    noted(
        "All checkpoints damaged",
        lines[-1].replace(str(tmp_path), "…"),
        "the damaged folders, set aside",
    )


@pytest.mark.fast
def test_who_only_looks_at_a_run_renames_nothing(tmp_path, noted):
    "Kept: the one before is read, nothing renamed."
    run = saved(tmp_path / "run")
    write_text(run / "run.json", json.dumps({"settings": {"iterations": 9}, "state": "started"}))
    flip(tensors(run / "checkpoints/000004"))
    with pytest.warns(UserWarning, match="other content than was written.*left out"):
        assert newest(run, contents=True).name == "000002"
    (run / "checkpoints/000004/progress.json").unlink()
    with pytest.warns(UserWarning, match="progress.json is missing"):
        assert is_readable(Run(run))
    assert names(run) == ONE
    noted("Evaluation and run cache meet a damaged checkpoint", "one warning")


# ---- of another run


def refused(run, noted, what, tmp_path, **changes):
    into = learner(-1.0, **changes)
    with pytest.raises(ValueError, match="^checkpoint: ") as error:
        load_checkpoint(run, into)
    line = str(error.value)
    assert "\n" not in line and "000004" in line
    assert names(run) == ONE and into.parameters["mean"].detach().eq(-1.0).all(), (
        "nothing is renamed or half loaded"
    )
    noted(what, line.replace(str(tmp_path), "…"), "the checkpoints, as they were")
    return line


FOREIGN = {
    "recipe": (
        {"recipe": "dancegrpo"},
        "was written for recipe 'branchgrpo', this run has 'dancegrpo'",
    ),
    "adapter strength": ({"lora_alpha": 7}, "was written for lora_alpha"),
    "model": (
        {"backbone": "tiny-sd3"},
        "was written for backbone 'tiny-flux', this run has 'tiny-sd3'",
    ),
    "width": (
        {"shape": (3,)},
        "'averages.mean' as torch.float32 [1], this run trains torch.float32 [3]",
    ),
    "version": ({}, "); this is "),
}


@pytest.mark.fast
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_another_run_says_what_differs(tmp_path, noted, monkeypatch, kind):
    changes, message = FOREIGN[kind]
    run = saved(tmp_path / "run")
    if kind == "version":
        monkeypatch.setattr(checkpoint_files, "NUMBERS", checkpoint_files.NUMBERS + 1)
    assert message in refused(run, noted, f"Checkpoint of another {kind}", tmp_path, **changes)


def to_old(folder):
    "Make a checkpoint of the format before December 2026, with its index in a pickle."
    tensors(folder).rename(folder / "__0_0.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    table = {
        "iteration": 4,
        "seconds": 1.0,
        "counts": {},
        "averaging_steps": 4,
        "processes": 1,
        "scaler": None,
    }
    table["files"] = {
        p.name: p.stat().st_size for p in folder.iterdir() if p.name != "progress.json"
    }
    (folder / "progress.json").write_text(json.dumps(table, indent=1))


@pytest.mark.fast
def test_an_old_format_is_refused_in_one_line(tmp_path, noted):
    run = saved(tmp_path / "run")
    to_old(run / "checkpoints/000004")
    line = refused(run, noted, "Checkpoint of the older format, with a pickled index", tmp_path)
    assert "in format 1" in line and "reads format 2" in line
    for state, readable in (("finished", True), ("started", False)):
        write_text(run / "run.json", json.dumps({"settings": {"iterations": 0}, "state": state}))
        assert is_readable(Run(run)) == readable, (
            "a finished run of the cache stays; another is trained anew"
        )


# ---- what is loaded runs no code


class Harmful:
    "What a pickle can be: it makes a file when it is loaded."

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def harmful(marker, kind):
    return pickle.dumps(Harmful(marker)) if kind == "pickle" else _zipped(Harmful(marker), marker)


def _zipped(value, marker):
    path = Path(f"{marker}.pt")
    torch.save({"weights": value}, path)
    return path.read_bytes()


def test_the_harmful_file_would_run(tmp_path):
    pickle.loads(harmful(tmp_path / "one", "pickle")).close()
    (tmp_path / "file").write_bytes(harmful(tmp_path / "two", "torch"))
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()


PLACES = (
    ".metadata",
    "__0_0.distcp",
    "model.safetensors.index.json",
    "optimizer.bin",
    "weights.pt",
    "another.safetensors",
    "progress.json",
    "the tensors",
)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, noted, kind):
    "Whatever its name, described in the manifest or not."
    marker = tmp_path / "marker"
    data = harmful(marker, kind)
    for place in PLACES:
        for sealed in (False, True):
            run = saved(tmp_path / f"run-{place}-{sealed}")
            folder = run / "checkpoints/000004"
            (tensors(folder) if place == "the tensors" else folder / place).write_bytes(data)
            if sealed and place != "progress.json":
                reseal(folder)
            for read in (
                lambda run=run: loaded(run),
                lambda folder=folder: read_saved_table(folder, "averages"),
            ):
                with contextlib.suppress(ValueError, OSError):
                    read()
            assert not marker.exists(), place
    noted(
        f"A harmful {kind} file in the place of any file of a checkpoint, its digest right or"
        " wrong",
        f"{len(PLACES)} names tried; none ran",
        "the checkpoint before is used, or one line says what is wrong",
    )


CODE = "open({marker!r}, 'w').close()\nclass Mine:\n    pass\n"


def model_with(tmp_path, part, change):
    "A copy of tiny-flux, changed."
    folder = tmp_path / "model"
    shutil.copytree(folder_of("tiny-flux"), folder, symlinks=False)
    change(folder / part if part else folder)
    return folder


def pickled_weights(marker, kind, name):
    def change(folder):
        for path in folder.glob("*.safetensors"):
            path.unlink()
        (folder / name).write_bytes(harmful(marker, kind))

    return change


def own_code(marker, table, **changes):
    "Let a table of a model's folder name a class of a file that lies beside it."

    def change(folder):
        found = json.loads((folder / table).read_text()) | changes
        (folder / table).write_text(json.dumps(found))
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            (place / "mine.py").write_text(CODE.format(marker=str(marker)))

    return change


AUTO = {
    "auto_map": {"AutoModel": "mine.Mine", "AutoConfig": "mine.Mine"},
    "trust_remote_code": True,
}
MODELS = {
    "pickled transformer": (
        "transformer",
        lambda m: pickled_weights(m, "pickle", "diffusion_pytorch_model.bin"),
    ),
    "torch transformer": (
        "transformer",
        lambda m: pickled_weights(m, "torch", "diffusion_pytorch_model.bin"),
    ),
    "pickled text encoder": (
        "text_encoder",
        lambda m: pickled_weights(m, "pickle", "pytorch_model.bin"),
    ),
    "torch text encoder": (
        "text_encoder",
        lambda m: pickled_weights(m, "torch", "pytorch_model.bin"),
    ),
    "pipeline's own class": (
        "",
        lambda m: own_code(m, "model_index.json", _class_name=["mine", "Mine"]),
    ),
    "part's own class": (
        "",
        lambda m: own_code(m, "model_index.json", transformer=["mine", "Mine"]),
    ),
    "scheduler's own class": (
        "",
        lambda m: own_code(m, "model_index.json", scheduler=["mine", "Mine"]),
    ),
    "encoder's own code": ("text_encoder", lambda m: own_code(m, "config.json", **AUTO)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_folder_of_a_model_runs_code(tmp_path, noted, kind):
    marker = tmp_path / "marker"
    part, make = MODELS[kind]
    folder = model_with(tmp_path, part, make(marker))
    try:
        load_backbone(str(folder))
        happened = "loaded, without the code"
    except ValueError as error:
        happened = str(error).replace(str(tmp_path), "…")
        assert happened.startswith("backbone: ") and "\n" not in happened
    assert not marker.exists()
    noted(f"A model's folder with harmful code: {kind}", happened, "the code did not run")


# ---- whole runs


def fit(folder, **changes):
    return Trainer(
        config(folder, **{"iterations": 3, "checkpoint_every": 1, "keep_checkpoints": 3} | changes)
    ).fit()


def test_a_run_with_a_damaged_checkpoint_ends_as_one_without(tmp_path, noted):
    whole = fit(tmp_path / "whole", iterations=4)
    run = fit(tmp_path / "run")
    flip(tensors(run.path / "checkpoints/000003"))
    with pytest.warns(UserWarning, match="000003' is damaged .*other content"):
        fit(tmp_path / "run", iterations=4)
    assert rows(tmp_path / "whole") == rows(tmp_path / "run")
    one, two = (read_saved_table(newest(path.path), "weights") for path in (whole, run))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert names(run.path) == ["000002", "000003", "000003.damaged", "000004"]
    noted(
        "A training with a damaged newest checkpoint is continued", "one warning", "ends bit-equal"
    )


def test_all_ranks_agree_which_checkpoint_is_used(tmp_path, noted):
    "Kept: both go on from checkpoint 1; bit-equal."
    changes = FULL | {"checkpoint_every": 1, "keep_checkpoints": 4, "prompts_per_iteration": 2}
    whole, run = (settings(tmp_path / name, **changes, iterations=3) for name in ("whole", "run"))
    processes(2, BEGIN + FIT + END, whole, tmp_path / "end")
    processes(2, BEGIN + FIT + END, run | {"iterations": 2}, tmp_path / "end1")
    second = sorted((tmp_path / "run/checkpoints/000002").glob("*.safetensors"))
    assert len(second) == 2, "each rank has written its slices"
    flip(second[1])
    processes(
        2,
        BEGIN.replace('warnings.filterwarnings("ignore")', "") + FIT + END,
        run,
        tmp_path / "end2",
    )
    logs = [Path(f"{tmp_path / 'end2'}.log{rank}").read_text() for rank in (0, 1)]
    assert [log.count("000002' is damaged") for log in logs] == [1, 0], "it is said once"
    assert rows(tmp_path / "whole") == rows(tmp_path / "run")
    one, two = (read_saved_table(newest(tmp_path / name), "weights") for name in ("whole", "run"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert names(tmp_path / "run") == ["000001", "000002", "000002.damaged", "000003"]
    noted("One rank's slices are damaged, 2 processes, sharded", "one warning")


# ---- an export that is killed


def export_killed(run, step):
    """Export in a fork that SIGKILL ends before its `step`-th operation on the run's files; return
    its exit code."""
    pid, operations = os.fork(), itertools.count(1)
    if not pid:

        def watch(event, args):
            if event in CHANGES and str(run) in str(args) and next(operations) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        export(learner(7.0), run)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "open")


def test_an_export_killed_at_any_file_operation_leaves_the_old_or_the_new_result(tmp_path, noted):
    found, code, step = [], -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        step += 1
        run = tmp_path / f"run{step}"
        export(learner(3.0), run)
        code = export_killed(run, step)
        remove_leftovers(run)
        assert [p.name for p in run.iterdir()] == ["model"]
        found.append(load_file(run / "model/model.safetensors")["mean"].item())
    assert code == 0 and step > 6
    assert set(found) == {3.0, 7.0} and found == sorted(found), (
        "the old one, and from some step on the new one"
    )
    what = "SIGKILL before each file operation of an export over an earlier one"
    noted(what, f"{step - 1} kills", "the old result or the new one, never neither", kind="kills")


# ---- rows


@pytest.mark.fast
def test_rows_cut_at_any_byte_are_continued_on_a_line_of_their_own(tmp_path, noted):
    "Kept: all rows before; the next row has its own line."
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [{"reward": 0.5}, {"reward": 0.25, "name": "é\u2028"}])
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        before = read_jsonl(path)
        append_jsonl(path, {"iteration": 3})
        assert read_jsonl(path) == [*before, {"iteration": 3}], data[:size]
    path.write_bytes('{"prompt": "a\u2028b"}\n\n{"prompt": "\xff'.encode("utf-8")[:-1])
    assert read_jsonl(path) == [{"prompt": "a\u2028b"}], (
        "not split within a text, nor stopped by an empty line"
    )
    noted(
        "SIGKILL within a row of metrics.jsonl, at each byte", "the row is left out", kind="kills"
    )


def test_evaluations_are_rewound_with_the_metrics(tmp_path):
    run = Run(tmp_path)
    write_jsonl(tmp_path / "metrics.jsonl", [{"iteration": n} for n in (1, 2, 3)])
    write_jsonl(tmp_path / "evaluations.jsonl", [{"iteration": n} for n in (0, 2, 3)])
    rewind(run, 2)
    assert [row["iteration"] for row in run.metrics] == [1, 2]
    assert [row["iteration"] for row in run.evaluations] == [0, 2]
    with pytest.warns(UserWarning, match="lost the metrics of iterations 3 to 5"):
        rewind(run, 5)


@pytest.mark.fast
def test_two_that_write_one_file_do_not_disturb_each_other(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    texts = [letter * 100_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda text: write_text(tmp_path / "file", text), texts * 8))
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
