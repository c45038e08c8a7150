"""What several files of tests need: the rows of a run, a wait, and the package's metadata."""

import json
import time
from configparser import ConfigParser
from pathlib import Path


def rows(folder, file="metrics.jsonl"):
    "Return what a run has recorded, without seconds; nothing if there is no such file."
    path = Path(folder) / file
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds")} for row in found
    ]


def wait_for(condition, seconds=300):
    "Wait until a condition holds."
    until = time.time() + seconds
    while not condition():
        assert time.time() < until
        time.sleep(0.05)


def package_settings():
    "Return the fields of settings.ini, the one record of the package's metadata."
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read_string((Path(__file__).parents[1] / "settings.ini").read_text(encoding="utf-8"))
    return dict(parser["DEFAULT"])


def entries(text):
    "Return the entries of a field of settings.ini that has one on each line."
    return [line.strip() for line in text.splitlines() if line.strip()]


def requirements():
    """Return the requirements of settings.ini: of the package under '', and of each extra under its
    name."""
    fields = {
        key: value for key, value in package_settings().items() if key.endswith("requirements")
    }
    return {
        key.removesuffix("requirements").removesuffix("_"): entries(text)
        for key, text in fields.items()
    }
