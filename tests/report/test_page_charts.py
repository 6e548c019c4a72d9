"""Lines keep their shape when they are binned, and the timeline keeps within what was recorded."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offbeat.run.records import WorkerLoss
from offbeat_lab.breakdown import Steps
from offbeat_lab.figures import Better
from offbeat_lab.report.charts import (
    MAX_BARS,
    bin_mean,
    line_charts,
    middle,
    phase_lengths_s,
    side_by_side,
    timelines,
    without_pauses,
)
from offbeat_lab.report.data import Curve, PageContent, RunResults, StrategyResults

VALUES = st.floats(-1e6, 1e6)


@given(
    arrays.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 200)), elements=VALUES),
    st.integers(1, 50),
)
def test_bins_hold_every_point(y: np.ndarray, max_points: int) -> None:
    x = np.arange(y.shape[1], dtype=np.float64)
    at, mean, low, high = bin_mean(x, y, max_points)
    assert at.size == mean.size == min(max_points, x.size)
    assert low.min() == y.min()
    assert high.max() == y.max()
    assert (low <= mean + 1e-6).all()
    assert (mean <= high + 1e-6).all()
    assert (np.diff(at) > 0).all()


def test_a_bin_leaves_out_what_is_not_finite() -> None:
    y = np.array([[1.0, np.nan, 3.0, np.inf], [np.nan, np.nan, 5.0, np.nan]])
    _, mean, low, high = bin_mean(np.arange(4.0), y)
    np.testing.assert_array_equal(mean, [1, np.nan, 4, np.nan])
    np.testing.assert_array_equal(low, [1, np.nan, 3, np.nan])
    np.testing.assert_array_equal(high, [1, np.nan, 5, np.nan])


def curve(
    steps: list[int],
    metric: list[float],
    *,
    seconds_per_step: float = 1.0,
    bytes_per_step: float = 10.0,
) -> Curve:
    at = np.array(steps, dtype=np.float64)
    return Curve(
        steps=at,
        seconds=at * seconds_per_step,
        bytes_sent=at * bytes_per_step,
        metric=np.array(metric),
    )


def some_steps(num_workers: int, num_steps: int, seed: int = 0) -> Steps:
    random = np.random.default_rng(seed)
    shape = (num_workers, num_steps)
    compute, encode, wait = random.random((3, *shape))
    began = np.cumsum(np.full(shape, 3.0), axis=1)
    ready = began + random.random(shape) * (compute + encode + wait)
    ready[:, random.random(num_steps) < 0.2] = np.nan
    return Steps(
        step=np.arange(1, num_steps + 1),
        loss=random.random(shape),
        batch_size=np.ones(shape),
        began_s=began,
        ready_s=ready,
        duration_s=compute + encode + wait,
        compute_s=compute,
        encode_s=encode,
        wait_s=wait,
        padded_s=compute * random.random(shape),
        bytes_sent=np.ones(shape),
        messages_sent=np.ones(shape),
        skipped=np.zeros(shape),
    )


def report_of(*strategies: list[RunResults]) -> PageContent:
    return PageContent(
        title="a title",
        verdict="a verdict",
        metric_name="accuracy",
        metric_better=Better.HIGHER,
        target=0.5,
        strategies=[
            StrategyResults(label=f"number {number}", strategy="gtopk", options={}, runs=runs)
            for number, runs in enumerate(strategies)
        ],
    )


def run_of(
    line: Curve, *, steps: Steps | None = None, seed: int = 0, last_start: int = 0
) -> RunResults:
    steps = some_steps(2, 5) if steps is None else steps
    return RunResults(
        seed=seed,
        directory="run",
        status="finished",
        curve=line,
        steps=steps,
        last_start=last_start,
    )


def test_the_thick_line_is_the_median_over_seeds_where_all_measured() -> None:
    runs = [
        run_of(curve([0, 1, 2], [0.1, 0.2, 0.3]), seed=0),
        run_of(curve([0, 1, 2], [0.1, 0.4, 0.5], seconds_per_step=2.0), seed=1),
        run_of(curve([0, 2], [0.1, 0.9], seconds_per_step=3.0), seed=2),
    ]
    charts = {
        chart.key: chart
        for chart in line_charts(report_of(runs, [run_of(curve([0, 4], [0.1, 0.2]))]))
    }
    median = next(
        series
        for series in charts["metric-seconds"].series
        if series.strategy == 0 and not series.thin
    )
    assert (median.x, median.y) == ([0.0, 4.0], [0.1, 0.5])
    assert sum(series.thin for series in charts["metric-steps"].series) == 3
    assert charts["metric-steps"].target == 0.5


def test_a_logarithmic_axis_only_where_strategies_lie_far_apart() -> None:
    near = line_charts(
        report_of(
            [run_of(curve([0, 9], [0, 1]))], [run_of(curve([0, 9], [0, 1], bytes_per_step=50.0))]
        )
    )
    far = line_charts(
        report_of(
            [run_of(curve([0, 9], [0, 1]))], [run_of(curve([0, 9], [0, 1], bytes_per_step=5000.0))]
        )
    )
    assert not any(chart.x.log for chart in near)
    assert all(chart.x.zero for chart in near)
    assert [chart.key for chart in far if chart.x.log] == ["metric-bytes_sent"]
    drawn = [
        x
        for chart in far
        if chart.x.log
        for series in chart.series
        for x in series.x
        if x is not None
    ]
    assert min(drawn) > 0


def test_one_measurement_makes_no_curve() -> None:
    assert line_charts(report_of([run_of(curve([9], [0.5]))], [run_of(curve([9], [0.5]))])) == []


@given(st.integers(1, 9), st.integers(1, 60), st.integers(0, 2**20))
def test_phases_are_not_negative_and_fit_into_the_step(
    num_workers: int, num_steps: int, seed: int
) -> None:
    steps = some_steps(num_workers, num_steps, seed)
    lengths = phase_lengths_s(steps)
    assert lengths.min() >= -1e-12
    assert (lengths.sum(axis=0) <= steps.duration_s + 1e-9).all()


def test_waiting_is_drawn_for_those_who_wait() -> None:
    steps = some_steps(2, 1)
    steps = replace(
        steps,
        began_s=np.array([[0.0], [0.0]]),
        ready_s=np.array([[1.0], [3.0]]),
        duration_s=np.array([[4.0], [4.0]]),
        compute_s=np.array([[1.0], [3.0]]),
        encode_s=np.zeros((2, 1)),
        wait_s=np.array([[3.0], [1.0]]),
        padded_s=np.array([[0.0], [2.0]]),
    )
    compute, padded, _, waiting, transfer, *_ = phase_lengths_s(steps)[:, :, 0]
    np.testing.assert_allclose(compute, [1, 1])
    np.testing.assert_allclose(padded, [0, 2])
    np.testing.assert_allclose(waiting, [2, 0])
    np.testing.assert_allclose(transfer, [1, 1])
    (window,) = timelines(report_of([run_of(curve([], []), steps=steps)]))
    assert (window.last, window.ready) == ([1], [3_000_000])


@pytest.mark.parametrize("num_workers", [1, 4, 64])
def test_the_window_is_in_the_middle_of_the_last_attempt_and_small(num_workers: int) -> None:
    run = run_of(curve([], []), steps=some_steps(num_workers, 1000), last_start=500)
    numbers = middle(run).step
    assert 500 < numbers[0] <= 750 <= numbers[-1] <= 1000
    assert numbers.size * num_workers * 7 <= max(MAX_BARS, 3 * num_workers * 7)


def test_a_run_without_steps_has_no_timeline() -> None:
    assert list(timelines(report_of([run_of(curve([], []), steps=some_steps(2, 0))]))) == []


def test_workers_that_do_not_keep_step_are_shown_for_the_time_that_one_of_them_takes() -> None:
    """Worker 1 takes twice as long, so that it is far behind in the middle; worker 2 died."""
    steps = some_steps(3, 40)
    began_s = np.arange(40) * np.array([[1.0], [2.0], [1.0]])
    alive = np.arange(40) < np.array([[40], [40], [15]])
    steps = replace(
        steps,
        began_s=np.where(alive, began_s, np.nan),
        ready_s=np.full((3, 40), np.nan),
        duration_s=np.where(alive, [[1.0], [2.0], [1.0]], np.nan),
    )
    window = steps.window(10, 20)
    drawn, numbers, reference = side_by_side(steps, window)
    assert reference == 0
    assert numbers[0][numbers[0] > 0].tolist() == list(range(11, 21))
    assert numbers[1][numbers[1] > 0].tolist() == list(
        range(6, 11)
    )  # from 10 s to 20 s, at 2 s each
    assert numbers[2][numbers[2] > 0].tolist() == list(range(11, 16))
    assert np.array_equal(drawn.done, numbers > 0)
    assert np.nanmin(drawn.began_s) >= 10.0


def test_a_death_is_marked_where_the_worker_ended_and_lies_in_the_window() -> None:
    steps = some_steps(2, 400)
    alive = np.arange(400) < np.array([[400], [37]])
    columns = {
        field.name: np.where(alive, getattr(steps, field.name), np.nan)
        for field in fields(steps)
        if field.name not in ("step", "merged")
    }
    loss = WorkerLoss(
        rank=1, step=37, seconds=1.0, cause="killed by SIGKILL", num_left=1, num_workers=2
    )
    run = replace(run_of(curve([], []), steps=replace(steps, **columns)), losses=[loss])
    (window,) = timelines(report_of([run]))
    ((worker, at_us),) = window.gone
    assert worker == 1
    last = max(k for k, cell in enumerate(window.cells[1]) if cell is not None)
    assert window.steps[1][last] == 37
    assert at_us == pytest.approx(sum(window.cells[1][last]), abs=10)  # type: ignore[arg-type]
    assert window.cells[1][last + 1] is None
    assert window.cells[0][last + 1] is not None


def test_a_pause_between_steps_is_left_out_of_the_timeline() -> None:
    steps = some_steps(2, 6)
    even = replace(steps, duration_s=np.full((2, 6), 3.0))
    pause_s = np.where(np.arange(6) < 3, 0.0, 500.0)
    paused = replace(even, began_s=even.began_s + pause_s, ready_s=even.ready_s + pause_s)
    closed = without_pauses(paused)
    np.testing.assert_allclose(closed.began_s, even.began_s)
    np.testing.assert_allclose(closed.ready_s, even.ready_s)


@pytest.mark.parametrize(
    ("metric", "whole", "least_missing"),
    [
        ([0.1, 0.983, 0.989], 1.0, 0.0055),
        ([10.0, 98.3, 98.9], 100.0, 0.55),
        ([0.5, 1.0], None, 0.0),  # half is missing wherever anything is
        ([0.1, 0.2, 0.4], None, 0.0),
        ([0.1, 0.9, 1.0], 1.0, 0.05),
        ([-0.1, 0.983], None, 0.0),
        ([1.0, 250.0], None, 0.0),
    ],
)
def test_a_share_near_its_best_is_shown_by_what_is_missing(
    metric: list[float], whole: float | None, least_missing: float
) -> None:
    (chart, *_) = line_charts(report_of([run_of(curve(list(range(len(metric))), metric))]))
    assert chart.y.whole == whole
    assert chart.y.least_missing == pytest.approx(least_missing)
    assert not chart.y.log


@pytest.mark.parametrize(("metric", "log"), [([2.3, 0.4], True), ([2.3, 1.9], False)])
def test_a_loss_that_falls_far_has_a_logarithmic_axis(metric: list[float], log: bool) -> None:
    report = report_of([run_of(curve([0, 9], metric))])
    (chart, *_) = line_charts(replace(report, metric_better=Better.LOWER))
    assert chart.y.log == log
    assert chart.y.whole is None
