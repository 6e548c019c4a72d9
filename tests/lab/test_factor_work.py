"""Time under way is hidden, shared or exposed, and nothing of it is counted twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.callbacks.profile import FactorAssignment, Span
from offbeat_lab.factor_work import factor_work, under_way
from offbeat_lab.records import Profiled

KINDS = st.sampled_from(
    ["sum", "broadcast", "wait for factors", "wait for gradients", "wait for inverses", "invert"]
)
TICKS = st.integers(0, 60)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    a, b = draw(TICKS), draw(TICKS)
    return Span(draw(KINDS), "", float(min(a, b)), float(max(a, b)))


@given(st.lists(spans(), max_size=12), st.sampled_from(["sum", "broadcast"]))
def test_every_moment_is_of_one_sort(noted: list[Span], kind: str) -> None:
    found = under_way(noted, kind)
    own = {"sum": "wait for factors", "broadcast": "wait for inverses"}[kind]
    for tick in range(60):
        moment = tick + 0.5
        during = {span.kind for span in noted if span.began_s < moment < span.ended_s}
        expected = [
            kind in during and not any(other.startswith("wait") for other in during),
            kind in during
            and own not in during
            and any(other.startswith("wait") for other in during),
            kind in during and own in during,
        ]
        assert [any(a < moment < b for a, b in intervals) for intervals in found] == expected


def step(number: int, *noted: Span, duties: tuple[FactorAssignment, ...] = ()) -> Profiled:
    return Profiled(attempt=0, step=number, spans=noted, duties=duties)


def duty(rows: int, owner: int | None, predicted_s: float | None) -> FactorAssignment:
    return FactorAssignment(
        factor=f"A of {rows}",
        rows=rows,
        matrices=1,
        message=0,
        owner=owner,
        sends=None,
        predicted_s=predicted_s,
    )


def test_a_run_is_judged_by_its_last_plan_without_the_step_that_brought_it() -> None:
    early, plan = (duty(9, None, 1.0),), (duty(5, 1, 2.0), duty(7, None, 0.5))
    waited = [step(n, Span("sum", "", 0, 4), Span("wait for factors", "", 3, 4)) for n in (3, 4)]
    inverted = [
        step(3, Span("invert", "", 0, 3)),
        step(4, Span("invert", "", 0, 5), Span("sum", "", 0, 6)),
    ]
    work = factor_work(
        {
            0: [
                step(1, Span("invert", "", 0, 50), duties=early),
                step(2, Span("invert", "", 0, 40), duties=plan),
                *waited,
            ],
            1: [step(1, duties=early), step(2, duties=plan), *inverted],
        }
    )
    assert work is not None
    assert work.duties == plan
    assert work.num_steps == 2
    assert math.isnan(work.invert_s[0])
    assert work.invert_s[1] == 4
    assert work.slowest == 1
    assert (work.predicted_s(0), work.predicted_s(1)) == (0.5, 2.5)
    assert work.sums is not None
    assert [work.sums.hidden_s, work.sums.exposed_s] == pytest.approx([(3 + 3 + 6) / 3, 2 / 3])
    assert work.broadcasts is None


def test_without_measured_costs_nothing_is_predicted() -> None:
    work = factor_work(
        {0: [step(1, Span("invert", "", 0, 1), duties=(duty(5, 0, None), duty(6, None, 1.0)))]}
    )
    assert work is not None
    assert work.predicted_s(0) is None
    assert factor_work({}) is None
