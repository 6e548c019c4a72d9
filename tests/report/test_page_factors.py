"""Second-order work: what is drawn lies where it was recorded, and what is said of it are the
record's figures.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat_lab.records import Record
from offbeat_lab.report.data import PageContent
from offbeat_lab.report.page import read_report, read_run, write_report
from offbeat_lab.report.page_factors import (
    KINDS,
    MAX_SPANS,
    factor_timelines,
    message_bars,
    placements,
    sentences,
)
from report_support.synthetic import Made, write_run


@pytest.fixture(scope="module")
def report(second_order: Path) -> PageContent:
    return read_report(second_order)


def test_every_run_that_was_looked_at_has_its_steps(report: PageContent) -> None:
    timelines = list(factor_timelines(report))
    assert [(one.contestant, one.run) for one in timelines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for timeline in timelines:
        assert timeline.numbers == [1, 6, 11, 16, 21, 26, 31, 36]
        assert timeline.messages == (0, 1)
        assert {len(rows) for rows in timeline.steps} == {4}


def test_work_and_messages_lie_within_the_step(report: PageContent) -> None:
    timeline = next(factor_timelines(report))
    for rows in timeline.steps:
        assert min(row.whole[0] for row in rows) == 0
        for row in rows:
            bars = [*row.work, *(bar for some in row.messages for bar in some)]
            assert all(
                row.whole[0] - 1 <= begin <= end <= row.whole[1] + 1 for _, begin, end, _ in bars
            )
        inverting = [any(kind == KINDS.index("invert") for kind, *_ in row.work) for row in rows]
        assert inverting == [True, False, False, False]


def test_parts_of_a_message_are_drawn_one_after_the_other(report: PageContent) -> None:
    row = next(factor_timelines(report)).steps[0][0]
    sums, broadcasts = row.messages
    assert [part for part, *_ in sums] == [0, 1, 2]
    assert all(before[2] == after[1] for before, after in pairwise(sums))
    assert [part for part, *_ in broadcasts] == [2]


def test_of_many_spans_the_last_steps_are_drawn(tmp_path: Path) -> None:
    run = read_run(
        Record(write_run(tmp_path / "run", Made(second_order=True, steps=40, workers=2))),
        name="run",
    )
    crowded = {
        rank: [replace(one, spans=list(one.spans) * (MAX_SPANS // 40)) for one in some]
        for rank, some in run.profiles.items()
    }
    report = read_report(tmp_path / "run")
    (contestant,) = report.contestants
    many = replace(report, contestants=[replace(contestant, runs=[replace(run, profiles=crowded)])])
    (timeline,) = factor_timelines(many)
    assert timeline.numbers == [31, 36]


def test_the_sentence_says_what_was_hidden_and_who_inverted(report: PageContent) -> None:
    (label, sentence), other = sentences(report)
    assert (label, other[0]) == ("spdkfac", "mpdkfac")
    assert "hidden behind computing" in sentence
    assert "Worker 0 inverted for longest" in sentence
    assert "1.77 ms were predicted" in sentence


def test_bars_add_up_to_the_time_under_way(report: PageContent) -> None:
    sums, broadcasts = message_bars(report)
    assert (
        [bar.label for bar in sums.bars]
        == [bar.label for bar in broadcasts.bars]
        == ["spdkfac", "mpdkfac"]
    )
    for bar in (*sums.bars, *broadcasts.bars):
        assert sum(percent for _, percent, _ in bar.parts) == pytest.approx(100)
    assert [part for part, percent, _ in broadcasts.bars[0].parts if percent > 1] == ["exposed"]


def test_the_placement_shows_predicted_beside_measured(report: PageContent) -> None:
    placement = next(placements(report))
    assert placement.columns == [
        "Worker",
        "Factors of its own",
        "Of all the work",
        "Predicted",
        "Measured",
    ]
    assert placement.rows[0][:4] == ("worker 0", "1", "100%", "1.77 ms")
    assert placement.rows[1][:4] == ("worker 1", "0", "1.1%", "320 µs")
    assert [row[4] for row in placement.rows[1:]] == ["–"] * 3
    assert placement.duties == [
        ("A of 'conv'", "145", "0", "worker 0"),
        ("G of 'conv'", "32", "0", "all"),
    ]


def test_what_was_not_looked_at_is_not_on_the_page(
    comparison: Path, run: Path, tmp_path: Path
) -> None:
    for directory in (comparison, run):
        text = (directory / "report.html").read_text()
        assert 'id="second-order"' not in text
        assert 'id="divided"' not in text
    page = write_report(write_run(tmp_path / "run", Made(second_order=True, steps=6))).read_text()
    assert 'id="second-order"' in page
