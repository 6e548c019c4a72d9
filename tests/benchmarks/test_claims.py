"""The table of claims says what the figures say that it stands on."""

from __future__ import annotations

from pathlib import Path

import pytest

from _results import DIRECTORY, STUDIES, Figure, ResultFile
from claims import (
    CLAIMS,
    LATE,
    PUBLISHED_LOCALSGD,
    WAITING,
    Finding,
    all_above,
    figure,
    once_measured,
    rows,
    wagma_groups,
    wagma_steps,
)


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


def figures_of(path: Path) -> dict[tuple[str, str], Figure]:
    return {
        (one.figure.case, one.figure.column): one.figure
        for one in ResultFile(path).results
        if one.figure.table in (LATE, "cases")
    }


def test_more_steps_than_local_sgd_are_undecided_where_intervals_overlap() -> None:
    found = figures_of(DIRECTORY / "stragglers.jsonl")
    local, ours = (found[name, "of the ideal"].interval for name in (PUBLISHED_LOCALSGD, WAITING))
    assert local is not None
    assert ours is not None
    assert local[0] < ours[0] < local[1]

    finding = wagma_steps()

    assert finding.holds == "undecided"
    assert "0.883 (0.865 to 0.898)" in finding.ours  # of the larger model


def test_groups_are_undecided_where_one_of_two_tasks_leaves_it_open() -> None:
    found = figures_of(STUDIES / "group_ablation.jsonl")
    verdicts = {
        task: found[f"{task}, wagma:groups=off worse than wagma", ""].holds
        for task in ("images", "sequences")
    }
    assert verdicts == {"images": True, "sequences": "undecided"}

    finding = wagma_groups()

    assert finding.holds == "undecided"
    assert "sequences" in finding.ours
