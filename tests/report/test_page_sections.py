"""The best is marked only when it is, and the slow worker is named only when there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from offbeat_lab.breakdown import Steps, lateness
from offbeat_lab.comparison import Difference
from offbeat_lab.figures import Better
from offbeat_lab.report.data import Curve, PageContent, RunResults, StrategyResults
from offbeat_lab.report.page import render
from offbeat_lab.report.page_sections import (
    Row,
    difference_rows,
    lateness_bars,
    lateness_sentence,
    rows,
    step_bars,
    traffic_bars,
)
from offbeat_lab.report.page_summary import key_numbers
from offbeat_lab.statistics import Estimate

NOTHING = np.empty(0)
NO_CURVE = Curve(steps=NOTHING, seconds=NOTHING, bytes_sent=NOTHING, metric=NOTHING)


def estimated(
    median: float | None, *, low: float | None = None, high: float | None = None
) -> Estimate:
    return Estimate(values=[median], median=median, low=low, high=high)


def strategy(label: str, step_s: float | None, **more: object) -> StrategyResults:
    measures = {
        "step_s": estimated(step_s, low=step_s, high=step_s),
        "bytes_per_step": estimated(8.0),
    }
    return replace(
        StrategyResults(label=label, strategy=label, options={}, measures=measures), **more
    )  # type: ignore[arg-type]


def difference(a: str, b: str, *, decided: bool) -> Difference:
    return Difference(measure="step_s", a=a, b=b, ratio=2.0, low=1.9, high=2.1, decided=decided)


def report(strategies: list[StrategyResults], differences: list[Difference]) -> PageContent:
    return PageContent(
        title="a title",
        verdict="a verdict",
        metric_name="accuracy",
        metric_better=Better.HIGHER,
        strategies=strategies,
        differences=differences,
    )


def step_row(strategies: list[StrategyResults], differences: list[Difference]) -> Row:
    return next(
        row for row in rows(report(strategies, differences)) if row.title == "Time of a step"
    )


def test_the_best_is_marked_when_it_is_ahead_of_all() -> None:
    three = [strategy("a", 3.0), strategy("b", 1.0), strategy("c", 2.0)]
    row = step_row(three, [difference("a", "b", decided=True), difference("b", "c", decided=True)])
    assert [cell.best for cell in row.cells] == [False, True, False]
    assert row.note == ""


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_marked_when_one_difference_is_none(known: bool) -> None:
    three = [strategy("a", 3.0), strategy("b", 1.0), strategy("c", 2.0)]
    undecided = [difference("c", "b", decided=False)] if known else []
    row = step_row(three, [difference("a", "b", decided=True), *undecided])
    assert not any(cell.best for cell in row.cells)
    assert row.note == "no difference beyond the spread between b and c."


def test_of_one_run_each_nothing_is_said_about_the_spread() -> None:
    two = [strategy("a", 3.0), strategy("b", 1.0)]
    single = difference("a", "b", decided=False).model_copy(update={"low": None, "high": None})
    row = step_row(two, [single])
    assert row.note == ""
    assert not any(cell.best for cell in row.cells)
    (found,) = difference_rows(report(two, [single]))
    assert found == ("Time of a step", "a", "b", "2", "", "not known: one run of each")


def test_who_failed_is_said_to_have() -> None:
    row = step_row(
        [strategy("a", 3.0), strategy("b", None, failure="out of memory", measures={})], []
    )
    assert [cell.text for cell in row.cells] == ["3 s", "failed"]


def test_a_target_nobody_reached_is_no_row_and_one_not_reached_is_said() -> None:
    reached = strategy("a", 1.0, measures={"time_to_target_s": estimated(4.0)})
    missed = strategy("b", 1.0, measures={"time_to_target_s": estimated(None)})
    (row,) = rows(report([reached, missed], []))
    assert [cell.text for cell in row.cells] == ["4 s", "not reached"]
    assert list(rows(report([missed], []))) == []


def test_who_misses_the_target_in_some_runs_is_not_the_best_and_the_table_says_so() -> None:
    some = Estimate(values=[None, 1.0, 1.1], median=1.05, low=1.0, high=1.1)
    all_runs = Estimate(values=[2.0, 2.0, 2.1], median=2.0, low=2.0, high=2.1)
    slowest = Estimate(values=[3.0, 3.0, 3.1], median=3.0, low=3.0, high=3.1)
    three = [
        strategy(label, 1.0, measures={"time_to_target_s": found})
        for label, found in (("a", some), ("b", all_runs), ("c", slowest))
    ]
    decided = Difference(
        measure="time_to_target_s", a="b", b="c", ratio=0.67, low=0.6, high=0.7, decided=True
    )
    (row,) = rows(report(three, [decided]))
    assert [cell.best for cell in row.cells] == [False, True, False]
    assert row.cells[0].interval == "in 2 of 3 runs"
    assert row.note == ""


def test_bars_are_as_long_as_the_values() -> None:
    shares = {"share_compute": estimated(0.75), "share_transfer": estimated(0.25)}
    two = [strategy("a", 4.0), strategy("b", 1.0)]
    two = [replace(one, measures={**one.measures, **shares}) for one in two]
    found = step_bars(report(two, []))
    assert found
    assert [bar.percent for bar in found.bars] == [100, 25]
    assert [(phase, percent) for phase, percent, _ in found.bars[0].parts] == [
        ("compute", 75),
        ("transfer", 25),
    ]
    (traffic,) = traffic_bars(report(two, []))
    assert [bar.text for bar in traffic.bars] == ["8 B", "8 B"]


def run_with(ready_s: np.ndarray) -> RunResults:
    shape = ready_s.shape
    zero, one = np.zeros(shape), np.ones(shape)
    steps = Steps(
        step=np.arange(1, shape[1] + 1),
        loss=one,
        batch_size=one,
        began_s=zero,
        ready_s=ready_s,
        duration_s=one,
        compute_s=one,
        encode_s=zero,
        wait_s=zero,
        padded_s=zero,
        bytes_sent=zero,
        messages_sent=zero,
        skipped=zero,
    )
    return RunResults(seed=0, directory="run", status="finished", curve=NO_CURVE, steps=steps)


def test_the_slow_worker_is_named() -> None:
    ready = np.zeros((4, 60))
    ready[3] = 0.21
    ready[1, 30] = 0.5
    ready[2, :5] = 9.0  # while starting up
    late = lateness([run_with(ready).steps])
    assert late
    assert late.slow_worker == 3
    assert (
        lateness_sentence(late)
        == "Worker 3 was last in 98% of steps, 210 ms behind the first on average."
    )
    (bars,) = lateness_bars(report([strategy("a", 1.0, runs=[run_with(ready)])], []))
    assert [bar.mark for bar in bars.bars] == [False, False, False, True]


def test_of_many_workers_the_latest_are_shown() -> None:
    ready = np.tile(np.arange(40.0)[:, None], 5)
    (bars,) = lateness_bars(report([strategy("a", 1.0, runs=[run_with(ready)])], []))
    assert [bar.label for bar in bars.bars] == [f"worker {worker}" for worker in range(39, 27, -1)]
    assert bars.left_out == 28


def test_lateness_that_goes_round_has_no_slow_worker() -> None:
    ready = 0.3 * np.tile(np.eye(4), 13)[:, :50]
    late = lateness([run_with(ready).steps])
    assert late
    assert late.slow_worker is None
    assert lateness_sentence(late).startswith(
        "Workers take turns at coming last: none was last in more than 25% of steps."
    )


def test_who_comes_together_is_not_called_late() -> None:
    ready = np.zeros((2, 20))
    ready[1] = 0.001
    late = lateness([run_with(ready).steps])
    assert late
    assert late.slow_worker is None
    assert (
        lateness_sentence(late)
        == "Workers come together: the last one 1 ms after the first on average."
    )


@pytest.mark.parametrize("ready", [np.zeros((1, 5)), np.full((3, 5), np.nan), np.empty((3, 0))])
def test_no_lateness_without_an_exchange(ready: np.ndarray) -> None:
    assert lateness([run_with(ready).steps]) is None


def test_the_open_table_and_the_numbers_say_which_runs_missed_the_target() -> None:
    some = Estimate(values=[None, 1.0, 1.1], median=1.05, low=1.0, high=1.1)
    all_runs = Estimate(values=[2.0, 2.0, 2.1], median=2.0, low=2.0, high=2.1)
    two = [
        replace(strategy(label, 1.0, measures={"time_to_target_s": found}), runs=[])
        for label, found in (("a", some), ("b", all_runs))
    ]
    content = replace(report(two, []), winner="b")
    assert key_numbers(content)[0].beside == "b; a 1.05 s in 2 of 3 runs"
    table = render(content).partition('<table class="main">')[2].partition("</table>")[0]
    assert "in 2 of 3 runs" in table
