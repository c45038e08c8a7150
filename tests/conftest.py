import gc
import itertools
import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes run the suite
# the suite compares bits of a CPU; tests/gpu_bench.py uses a GPU
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
HERE = Path(__file__).parent
gc.set_threshold(20_000, 20, 20)  # tests make many objects and little garbage


@pytest.fixture(scope="session")
def golden():
    "Values computed with published implementations: golden(name) -> dict."

    def read(name):
        return json.loads((HERE / "golden" / f"{name}.json").read_text())

    return read


def pytest_addoption(parser):
    parser.addoption(
        "--slow",
        action="store_true",
        help="run the tests marked slow too: every parameter (`make slow`)",
    )
    parser.addoption(
        "--faults",
        action="store_true",
        help="run the whole suite of tests/faults and write its tables",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: one more parameter of a property that `make test` tries; by `make slow`"
    )


# the longest tests, and those that mostly wait
HEAVY = (
    "test_every_notebook_executes",
    "test_near_its_time_limit",
    "test_lesson[nbs/originals",
    "test_a_checkpoint_is_read_by",
    "test_lesson[nbs/reproduction/15_training",
    "test_lesson[",
)


def weight(item):
    "The place of a test's name in HEAVY."
    return next((n for n, name in enumerate(HEAVY) if item.name.startswith(name)), len(HEAVY))


def pytest_collection_modifyitems(config, items):
    """Leave out what is slow; order the others: the longest first, dealt to the processes in turn.

    Each process starts on its part of the list, and what is left at the end is short.
    """
    if not config.getoption("--slow"):
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("slow")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=weight)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = list(itertools.chain(*(items[first::processes] for first in range(processes))))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Look for no garbage while the tests import the libraries, nor among what these hold.

    They make a million objects that live to the end; looking among them took a sixth of the
    imports' processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
