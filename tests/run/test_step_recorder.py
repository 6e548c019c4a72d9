"""What a step is divided into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.run.step_recorder import phases

SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, SECONDS)
def test_the_phases_of_a_step_add_up_to_it_whatever_was_counted(
    step_s: float, encode_s: float, wait_s: float
) -> None:
    """A rank may have waited within its encoding, or between two steps."""
    found = phases(step_s, encode_s, wait_s)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(step_s)
    assert found[1] <= encode_s
    assert found[2] <= wait_s


def test_what_was_counted_is_kept_where_it_fits() -> None:
    assert phases(8.0, 2.0, 1.0) == (5.0, 2.0, 1.0)
    assert phases(4.0, 3.0, 2.0) == (0.0, 2.0, 2.0)
    assert phases(4.0, 3.0, 9.0) == (0.0, 0.0, 4.0)
