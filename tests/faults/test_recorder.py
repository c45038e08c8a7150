"""The suite's own record."""

import pytest


@pytest.mark.fast
def test_a_note_needs_a_kind(noted):
    with pytest.raises(AssertionError, match="no kind"):
        noted("no kind", "nothing", happened="", kept="")
