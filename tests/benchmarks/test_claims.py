"""The table of claims says what the figures say that it stands on."""

from __future__ import annotations

from _results import DIRECTORY, ResultFile
from claims import CLAIMS, rows


def test_each_row_is_what_the_recorded_figures_say_now() -> None:
    recorded = [result.figure for result in ResultFile(DIRECTORY / "claims.jsonl").results]
    assert recorded == [figure for paper in CLAIMS for figure in rows(paper)]
