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
