"""Parameters that `make test` tries, and those that are left to `make slow`."""

import pytest


def often(values, chosen):
    "Return parameters, of which those in `chosen` run always and the others with `--slow` only."
    values = list(values)
    assert set(chosen) <= set(values), set(chosen) - set(values)
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if value in chosen else [pytest.mark.slow] for value in values]
    return [pytest.param(*each, marks=mark) for each, mark in zip(several, marks)]
