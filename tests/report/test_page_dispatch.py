"""How samples were shared out: every worker's line is its own, and rates are those of
the record.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat_lab.records import Record
from offbeat_lab.report.charts_dispatch import Dispatch, dispatches, own_speeds, reached
from offbeat_lab.report.data import PageContent, RunResults
from offbeat_lab.report.page import read_report, read_run
from report_support.synthetic import mega_batch_of

KEYS = ["batch", "updates", "weight", "idle", "rate"]


@pytest.fixture(scope="module")
def report(shared_out: Path) -> PageContent:
    return read_report(shared_out)


def dispatch_of(report: PageContent, **changes: object) -> Dispatch:
    (strategy,) = report.strategies
    run: RunResults = replace(strategy.runs[0], **changes)  # type: ignore[arg-type]
    (found,) = dispatches(replace(report, strategies=[replace(strategy, runs=[run])]))
    return found


def test_each_worker_has_a_line_over_all_mega_batches(report: PageContent) -> None:
    dispatch = dispatch_of(report)
    assert [chart.key for chart in dispatch.charts] == [f"dispatch-{key}-0" for key in KEYS]
    batch, *_, rate = dispatch.charts
    assert [series.y[-1] for series in batch.series] == [120, 60, 40, 30]
    assert batch.series[2].x == list(range(1, 21))
    assert all(chart.apart and chart.y.zero for chart in dispatch.charts)
    assert rate.legend == tuple(series.name for series in rate.series)
    assert dispatch.num_lines == 4


def test_rates_are_samples_over_time() -> None:
    mega_batch = mega_batch_of(1, step=10, workers=2)
    assert own_speeds(mega_batch) == pytest.approx(1200 + 600 / 0.99)
    assert reached(mega_batch) == pytest.approx(1800 / 1.05)


def test_the_sentence_says_where_the_rest_is(report: PageContent) -> None:
    sentence = dispatch_of(report).sentence
    share = reached(mega_batch_of(1, step=1, workers=4)) / own_speeds(
        mega_batch_of(1, step=1, workers=4)
    )
    assert f"Together the workers did {share:.0%} of the sum of their own speeds" in sentence
    assert "idle at merges for 1.4% of the time, and merging took 4.8%" in sentence
    assert sentence.endswith("were 0% of the mean apart.")


def test_the_first_mega_batches_are_not_counted(report: PageContent) -> None:
    slow = [mega_batch_of(number, step=number, workers=4, merge_s=9.0) for number in range(1, 4)]
    fast = [mega_batch_of(number, step=number, workers=4) for number in range(4, 6)]
    assert (
        dispatch_of(report, mega_batches=[*slow, *fast]).sentence
        == dispatch_of(report, mega_batches=fast).sentence
    )


def test_of_many_workers_the_mean_is_drawn(report: PageContent) -> None:
    (strategy,) = report.strategies
    steps = strategy.runs[0].steps
    wide = replace(steps, loss=steps.loss.repeat(3, axis=0))
    dispatch = dispatch_of(
        report, steps=wide, mega_batches=[mega_batch_of(n, step=n, workers=12) for n in range(1, 4)]
    )
    (series,) = dispatch.charts[0].series
    assert (series.low, series.high) == ([10.0] * 3, [120.0] * 3)
    assert dispatch.num_lines == 0


def test_a_worker_that_was_gone_has_a_gap(report: PageContent) -> None:
    whole = [mega_batch_of(number, step=number, workers=4) for number in range(1, 6)]
    gone = [replace(one, by_rank=one.by_rank[:3]) if one.number == 3 else one for one in whole]
    assert dispatch_of(report, mega_batches=gone).charts[0].series[3].y == [30, 30, None, 30, 30]


def test_workers_from_before_a_resume_with_fewer_have_lines(report: PageContent) -> None:
    more = [mega_batch_of(number, step=number, workers=6) for number in range(1, 3)]
    fewer = [mega_batch_of(number, step=number, workers=4) for number in range(3, 5)]
    dispatch = dispatch_of(report, mega_batches=[*more, *fewer])
    assert dispatch.num_lines == 6
    assert dispatch.charts[0].series[5].y == [20, 20, None, None]


def test_a_run_with_batches_of_its_own_has_none(run: Path) -> None:
    assert read_run(Record(run), name="run").mega_batches == []
    assert list(dispatches(read_report(run))) == []
