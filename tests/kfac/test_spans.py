"""Few steps are looked at, what is noted in one stays apart from the next, and a step that came to
nothing leaves nothing.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac.curvature import has_few_digits
from offbeat.kfac.spans import MAX_SPANS, SpanRecorder


@given(st.integers(0, 1 << 40), st.integers(1, 4))
def test_rounds_are_those_with_few_digits(number: int, digits: int) -> None:
    assert has_few_digits(number, digits) == (len(f"{number:b}".strip("0")) <= digits)


def test_rounds_get_rarer() -> None:
    assert sum(has_few_digits(number, 3) for number in range(100_000)) <= 4 * math.log2(100_000) + 4


def test_a_step_is_taken_when_the_next_has_begun() -> None:
    spans = SpanRecorder()
    spans.add("factor", "before any", 0.0)
    spans.begin(on=True)
    with spans.timed("invert", "two"):
        pass
    spans.begin(on=False)
    spans.add("factor", "not looked at", 0.0)
    spans.begin(on=True)
    spans.add("factor", "of the next", 0.0)
    (span,) = spans.take()
    assert (span.kind, span.what) == ("invert", "two")
    assert span.began_s <= span.ended_s
    assert spans.take() == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_that_came_to_nothing_is_forgotten(keep: bool) -> None:
    spans = SpanRecorder()
    spans.begin(on=True)
    spans.add("factor", "", 0.0)
    spans.begin(on=True, keep=keep)
    assert len(spans.take()) == keep


def test_what_is_noted_of_a_step_is_bounded() -> None:
    spans = SpanRecorder()
    spans.begin(on=True)
    for _ in range(MAX_SPANS + 10):
        spans.add("factor", "", 0.0)
    spans.begin(on=False)
    assert len(spans.take()) == MAX_SPANS
