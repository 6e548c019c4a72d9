"""The table of claims says what the figures say that it stands on."""

from __future__ import annotations

import pytest

from _results import DIRECTORY, Figure, ResultFile
from claims import CLAIMS, Finding, all_above, figure, once_measured, rows


def test_each_row_is_what_the_recorded_figures_say_now() -> None:
    recorded = [result.figure for result in ResultFile(DIRECTORY / "claims.jsonl").results]
    assert recorded == [figure for paper in CLAIMS for figure in rows(paper)]


def test_a_row_without_figures_says_what_measures_them() -> None:
    def find() -> Finding:
        figure("links", "cases", "nobody has measured this")
        raise AssertionError

    found = once_measured("python benchmarks/links.py", find)

    assert (found.ours, found.holds) == ("not measured", None)
    assert "`python benchmarks/links.py`" in found.why


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(1.2, 1.3), (1.1, 1.4)], True),
        ([(1.2, 1.3), (1.0, 1.4)], "undecided"),
        ([(1.0, 1.4), (0.9, 1.05)], False),
    ],
)
def test_a_claim_of_several_figures_holds_where_all_their_intervals_do(
    intervals: list[tuple[float, float]], verdict: object
) -> None:
    found = [Figure(case="a", value=1.2, interval=interval) for interval in intervals]
    assert all_above(1.1, found) == verdict
