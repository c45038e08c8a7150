"""The whole suite runs by `make faults`, which also writes its tables; `make test` runs the part
marked `fast`.

A test notes what it tried with the fixture `noted`; with `--faults` the notes of all tests become
one table a kind in `figures/faults/`, which `nbs/faults.ipynb` shows.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTES = ROOT / ".pytest_cache" / "faults"
TABLES = ROOT / "figures" / "faults"
KINDS = ("kills", "faults", "inputs", "properties", "load")


def pytest_configure(config):
    config.addinivalue_line("markers", "fast: a test of tests/faults that `make test` runs too")


@pytest.hookimpl(trylast=True)  # after `-k` and `-m` have chosen
def pytest_collection_modifyitems(config, items):
    """Leave out what is not fast, unless the whole suite is asked for; then old notes of the same
    tests go."""
    if config.getoption("--faults"):
        forget_notes({item.nodeid for item in items})
        return
    slow = [
        item
        for item in items
        if HERE in item.path.parents and item.get_closest_marker("fast") is None
    ]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def forget_notes(nodes):
    "Delete the notes of some tests; those of others stay, so a part of the suite can be run again."
    for path in NOTES.glob("*/*.json"):
        with contextlib.suppress(FileNotFoundError):  # another worker does the same
            if json.loads(path.read_text()).get("node") in nodes:
                path.unlink()


@pytest.fixture
def noted(request):
    """Note what was tried: `noted(what, happened, kept, **more)`, at the end of a test that passed.

    `what` is one line that names the fault: one row of the table of its `kind`, which is one of
    KINDS. What was kept may stand in the test's docstring: "Kept: …."
    """
    words = " ".join((request.function.__doc__ or "").split()).removeprefix("Kept: ").rstrip(".")

    def note(what, happened, kept=words, kind="faults", **more):
        assert kind in KINDS and kept, (kind, kept)
        name = re.sub(r"[^a-z0-9]+", "-", what.lower())[:100]
        # texts that differ in signs only
        digest = hashlib.blake2b(what.encode(), digest_size=4).hexdigest()
        path = NOTES / kind / f"{name}-{digest}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"what": what, "happened": happened, "kept": kept} | more
        row |= {"test": request.node.nodeid.split("::")[0], "node": request.node.nodeid}
        path.write_text(json.dumps(row, ensure_ascii=False))

    return note


def commit():
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip()


def runs_everything(config):
    "Return whether a call asks for the whole folder."
    asked = [Path(argument).resolve() for argument in config.args]
    return (
        asked == [Path(__file__).parent]
        and not config.option.keyword
        and not config.option.markexpr
    )


def pytest_sessionfinish(session):
    """Write the tables of the kinds that were noted, after a run of the whole folder: a part would
    replace them."""
    if not session.config.getoption("--faults") or hasattr(session.config, "workerinput"):
        return
    if not runs_everything(session.config):
        return
    machine = f"{os.cpu_count()} CPU cores, {platform.system()}"
    head = {"date": str(date.today()), "commit": commit(), "machine": machine}
    for kind in KINDS:
        rows = [json.loads(path.read_text()) for path in sorted((NOTES / kind).glob("*.json"))]
        rows = [{key: value for key, value in row.items() if key != "node"} for row in rows]
        if rows:
            TABLES.mkdir(parents=True, exist_ok=True)
            text = json.dumps(head | {"rows": rows}, indent=1, ensure_ascii=False)
            (TABLES / f"{kind}.json").write_text(text + "\n", encoding="utf-8")
