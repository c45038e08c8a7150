"""What several files of tests need: the rows of a run, and a wait."""

import json
import time
from pathlib import Path


def rows(folder, file="metrics.jsonl"):
    "Return what a run has recorded, without seconds; nothing if there is no such file."
    path = Path(folder) / file
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in found]


def wait_for(condition, seconds=300):
    "Wait until a condition holds."
    until = time.time() + seconds
    while not condition():
        assert time.time() < until
        time.sleep(0.05)
