"""Parameters that `make test` tries, and those that are left to `make slow`."""

import pytest


def often(values, chosen):
    "Return parameters, of which those in `chosen` run always and the others with `--slow` only."
    values = list(values)
    assert set(chosen) <= set(values), set(chosen) - set(values)
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
