import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes run the suite
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden():
    "Values computed with published implementations: golden(name) -> dict."
    return lambda name: json.loads((HERE / "golden" / f"{name}.json").read_text())


HEAVY = (
    "test_every_notebook_executes",
    "test_killed_in_the_middle",
    "test_lessons_run",
    "test_two_notebooks_at_once",
)  # minutes each


def pytest_collection_modifyitems(items):
    "The longest tests first, dealt to the two processes in turn: each starts on one half of the list, and what is left at the end is short."
    items.sort(key=lambda item: next((n for n, name in enumerate(HEAVY) if item.name.startswith(name)), len(HEAVY)))
    items[:] = items[::2] + items[1::2]
