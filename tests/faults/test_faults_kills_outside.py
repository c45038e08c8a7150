"""Killed outside of a training: in the run cache, in an evaluation at the shell, and while a page
is executed."""

import json
import shlex
import shutil
import sys
from fnmatch import fnmatch

import nbformat
import pytest
from killing import INJECTOR, RUN, command, digests, outcome

from branchgrpo.reproduction.pages import new_page, run_folder
from branchgrpo.training.config import TrainConfig

CACHED = RUN | {"iterations": 2, "evaluate_every": 0, "checkpoint_every": 1, "lora_rank": 2}
CACHE = "branchgrpo.reproduction.training"
CONFIG = TrainConfig.from_dict(CACHED | {"output": ""})
GET = """
import json, sys
from branchgrpo.reproduction.training import get_or_train
from branchgrpo.training.config import TrainConfig
config = TrainConfig.from_dict(json.loads(sys.argv[1]))
print(get_or_train(config, sys.argv[2], launch=sys.argv[3]).path)
"""


def get(root, fault=None, launch=""):
    """Return the exit code of a process that gets the run from the cache `root`, or trains it; and
    its log."""
    root.mkdir(exist_ok=True)
    log = root.with_name(f"{root.name}.log")
    begin = len(log.read_text()) if log.exists() else 0
    code = command(["-c", GET, json.dumps(CACHED), str(root), launch], log, fault).wait(timeout=300)
    return code, log.read_text()[begin:]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    "The outcome of the cached run, never killed."
    root = tmp_path_factory.mktemp("never") / "runs"
    code, log = get(root)
    assert code == 0, log
    return outcome(run_folder(CONFIG, root))


def got(root, cached, launch=""):
    """Get the run once more: it must be as one that was never killed.

    Returns the names in the cache.
    """
    code, log = get(root, launch=launch)
    assert code == 0, log
    found = outcome(run_folder(CONFIG, root))
    assert [key for key in cached if key != "files" and found[key] != cached[key]] == []
    return sorted(path.name for path in root.iterdir())


def note_kill(noted, place, kept, mode="run cache", happened="exit code -9"):
    noted(
        f"SIGKILL: {place}", happened, kept, kind="kills", mode=mode, signal="SIGKILL", place=place
    )


LOCKED = {
    "the run cache, with the lock held, before the training": {"at": f"{CACHE}:_find_or_train"},
    "the run cache, with the lock held, within the training": {
        "at": "branchgrpo.training.runs:Run.append",
        "call": 2,
    },
    "the run cache, when the training is done": {"at": f"{CACHE}:_find_or_train", "when": "after"},
}


@pytest.mark.parametrize("place", LOCKED)
def test_killed_with_the_lock_of_a_run(tmp_path, cached, noted, place):
    "The lock of a dead process holds nobody up."
    code, log = get(tmp_path / "runs", LOCKED[place])
    assert code == -9, log
    assert got(tmp_path / "runs", cached)[1:] == [run_folder(CONFIG, "").name]
    kept = "the lock is free at once; got again, the run is bit-equal"
    note_kill(noted, place, kept)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_a_damaged_run_is_set_aside(tmp_path, cached, noted, when):
    "The damaged run is kept under another name, and a new one is trained."
    root = tmp_path / "runs"
    folder = run_folder(CONFIG, root)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"settings": {')
    fault = {"event": "os.rename", "path": folder.name, "folder": str(root), "when": when}
    code, log = get(root, fault)
    assert code == -9, log
    assert folder.exists() == (when == "before")
    names = got(root, cached)
    assert [name for name in names if ".damaged-" in name] and len(names) == 3
    place = f"the run cache, {when} a damaged run is renamed"
    kept = "the damaged run, under another name; a new one is bit-equal"
    note_kill(noted, place, kept)


LAUNCH = shlex.join([sys.executable, str(INJECTOR)])
SECOND_ROW = {"at": "branchgrpo.training.runs:Run.append", "call": 2}


def test_killed_in_the_training_that_the_cache_launched(tmp_path, cached, noted):
    "The launched process is killed; the page that waits for it says so, and the next one goes on."
    code, log = get(tmp_path / "runs", SECOND_ROW, launch=LAUNCH)
    assert code == 1 and "RuntimeError" in log, log
    names = got(tmp_path / "runs", cached, launch=LAUNCH)
    assert names[1:] == [run_folder(CONFIG, "").name]
    place = "the run cache, in the process that it launched"
    kept = "checkpoint 1; got again, the run is bit-equal"
    note_kill(noted, place, kept, happened="exit code 1, RuntimeError with the end of its log")


def test_killed_after_the_cache_has_launched_a_training(tmp_path, cached, noted):
    "The launched process ends with its parent, and holds the lock until then."
    started = {"at": "branchgrpo.reproduction.launch:start_command", "when": "after"}
    code, log = get(tmp_path / "runs", started, launch=sys.executable)
    assert code == -9, log
    assert got(tmp_path / "runs", cached)[1:] == [run_folder(CONFIG, "").name]
    place = "the run cache, after it launched a training"
    kept = "the training ends with its parent; got again, the run is bit-equal"
    note_kill(noted, place, kept)


EVALUATE = [
    "-m",
    "branchgrpo.cli",
    "evaluate",
    "--steps",
    "2",
    "--block",
    "2",
    "--limit",
    "4",
    "--output",
]


def evaluate(folder, fault=None):
    log = folder.with_name(f"{folder.name}.log")
    code = command([*EVALUATE, str(folder)], log, fault).wait(timeout=200)
    return code, log.read_text()[-2000:]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    "The files of an evaluation that was never killed, and its operations on files as faults."
    folder = tmp_path_factory.mktemp("never") / "evaluation"
    record = folder.with_suffix(".events")
    code, log = evaluate(folder, {"record": str(record), "folder": str(folder)})
    assert code == 0, log
    seen, faults = {}, []
    for line in record.read_text().splitlines():
        event, path = json.loads(line)
        call = seen[event, path] = seen.get((event, path), 0) + 1
        if event != "os.mkdir":
            faults.append({"event": event, "path": path, "call": call})
    return digests(folder, "**/*"), [
        fault for fault in faults if not fnmatch(fault["path"], "images/00000[123]*")
    ]


@pytest.mark.parametrize("part", range(3))
def test_killed_in_an_evaluation_at_the_shell(tmp_path, evaluated, noted, part):
    "At each operation on its files: blocks, images, the table and the summary."
    never, faults = evaluated
    for n, fault in list(enumerate(faults))[part::3]:
        folder = tmp_path / f"evaluation{n}"
        code, log = evaluate(folder, fault | {"folder": str(folder)})
        assert code == -9, log
        done = len(list(folder.glob("blocks/*.jsonl")))
        code, log = evaluate(folder)
        assert code == 0, log
        assert digests(folder, "**/*") == never
        place = f"branchgrpo evaluate, before {fault['event']} {fault['path']}"
        kept = f"{done} of 2 blocks; started again, all files are equal to the byte"
        note_kill(noted, place, kept, "evaluate")
        shutil.rmtree(folder)


EXECUTION = "branchgrpo.reproduction.schedule"
PAGE = {
    "before the page is executed": {"at": f"{EXECUTION}:run_notebook"},
    "after the page was executed": {"at": f"{EXECUTION}:run_notebook", "when": "after"},
    "between the executed page and its renaming": {"at": f"{EXECUTION}:mark_done", "when": "after"},
    "after the executed page was renamed": {"at": f"{EXECUTION}:execute", "when": "after"},
}


def reproduce(folder, fault=None):
    words = [
        "-m",
        "branchgrpo.cli",
        "reproduce",
        "page",
        "--scale",
        "smoke",
        "--folder",
        str(folder / "pages"),
    ]
    log = folder / "log"
    code = command([*words, "--output", str(folder / "out")], log, fault, cwd=folder).wait(
        timeout=200
    )
    return code, log.read_text()[-2000:]


@pytest.mark.parametrize("place", PAGE)
def test_killed_while_a_page_is_executed(tmp_path, noted, place):
    "The page is there as a whole, with its mark, or not at all; a second call makes it once more."
    new_page(tmp_path / "pages/page.ipynb", "number: int = 7", "print(6 * number)")
    (tmp_path / "pages/scales.yaml").write_text("page: {smoke: {}}\n")
    code, log = reproduce(tmp_path, PAGE[place])
    assert code == -9, log
    executed, is_kept = (
        tmp_path / "out/smoke/page.ipynb",
        place == "after the executed page was renamed",
    )
    assert executed.exists() == is_kept
    code, log = reproduce(tmp_path)
    assert code == 0, log
    assert ("found" if is_kept else "done") in log
    outputs = [
        output for cell in nbformat.read(executed, 4).cells for output in cell.get("outputs", [])
    ]
    assert [output["text"] for output in outputs] == ["42\n"]
    assert [path.name for path in executed.parent.glob("[!.]*")] == ["page.ipynb"], (
        "nothing is left over"
    )
    kept = "the page: it is found" if is_kept else "no half page; a second call executes it"
    note_kill(noted, f"branchgrpo reproduce, {place}", kept, "reproduce")
