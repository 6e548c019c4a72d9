"""What the charts draw, as values for the page's script. Long lines are binned here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from offbeat_lab.breakdown import Steps
from offbeat_lab.figures import BYTES, COUNT, NUMBER, SECONDS, Better, Unit, capital, write
from offbeat_lab.report.data import Curve, Floats, PageContent, RunResults, StrategyResults

MAX_POINTS = 600
_LOG_FROM = 8.0
"""A logarithmic axis where strategies end further apart than this factor: on a plain one all but
the last would be a smear.
"""

_LOG_Y_FROM = 20.0
_LOG_METRIC_FROM = 3.0
_NEAR_ONE = 0.3
"""A share is shown by what is missing if less than this part of the whole is missing somewhere."""

Line = list[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        title: what it shows.
        unit: the scales that its numbers may be written in.
        log: whether it is logarithmic.
        zero: whether it begins at zero.
        whole: where set, the axis is logarithmic in what is missing from this value, such as
            1 - accuracy, and its numbers are still the values themselves.
        least_missing: less than this is drawn as this.
    """

    title: str
    unit: Sequence[tuple[float, float, str]]
    log: bool = False
    zero: bool = False
    whole: float | None = None
    least_missing: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line.

    Attributes:
        strategy: its number, which gives it colour, dash and marker.
        name: for the pointer.
        x, y: points; null breaks the line.
        low, high: a band around the line, or nothing.
        thin: whether it is one seed among several.
    """

    strategy: int
    name: str
    x: Line
    y: Line
    low: Line | None = None
    high: Line | None = None
    thin: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """One chart.

    Attributes:
        key: its name in the page.
        heading: above it.
        summary: what it shows, in words, for those who cannot see it.
        target: where a dashed line crosses it.
        changes: where upright ones do, and what they are called: from there on another strategy was
            at work.
        apart: whether its lines are no strategies, so that hiding these leaves it as it is.
        legend: names of its lines, where nothing else on the page tells them.
    """

    key: str
    heading: str
    summary: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    target: float | None = None
    changes: Sequence[tuple[int, str]] = ()
    apart: bool = False
    legend: Sequence[str] = ()


def line_charts(report: PageContent) -> list[LineChart]:
    """The metric against time, steps and bytes; for a run alone also loss, step time
    and traffic. The first one is what the page begins with.
    """
    charts = list(_metric_charts(report))
    if not report.compares and report.strategies[0].runs:
        charts += _step_charts(report.strategies[0].runs[0])
    return charts


def bin_mean(
    x: Floats, y: Floats, max_points: int = MAX_POINTS
) -> tuple[Floats, Floats, Floats, Floats]:
    """At most `max_points` points of a long line: x, mean, least and greatest of each bin, shape
    (bins,).

    Args:
        x: shape (points,), ascending.
        y: shape (rows, points); all rows go into one bin. NaN values are left out; a bin without
            others is NaN.
        max_points: at least 1.
    """
    starts = np.unique(
        np.linspace(0, x.size, min(max_points, x.size), endpoint=False).astype(np.int64)
    )
    counts = np.add.reduceat(np.isfinite(y).sum(axis=0), starts)
    sums = np.add.reduceat(np.where(np.isfinite(y), y, 0.0).sum(axis=0), starts)
    mean = np.divide(sums, counts, out=np.full(starts.size, np.nan), where=counts > 0)
    finite = np.where(np.isfinite(y), y, np.nan)
    low = np.fmin.reduceat(np.fmin.reduce(finite), starts)
    high = np.fmax.reduceat(np.fmax.reduce(finite), starts)
    lengths = np.diff([*starts, x.size])
    return np.add.reduceat(x, starts) / lengths, mean, low, high


def _metric_charts(report: PageContent) -> Iterator[LineChart]:
    if not any(
        run.curve.metric.size > 1 for strategy in report.strategies for run in strategy.runs
    ):
        return
    metric = report.metric_name
    y = _metric_axis(report)
    for key, title, unit in (
        ("seconds", "training time", SECONDS),
        ("steps", "steps", COUNT),
        ("bytes_sent", "bytes sent by a worker", BYTES),
    ):
        ends = [
            getattr(run.curve, key)[-1]
            for c in report.strategies
            for run in c.runs
            if run.curve.metric.size > 1
        ]
        log = bool(min(ends) > 0 and max(ends) / min(ends) > _LOG_FROM)
        series = [
            line
            for number, strategy in enumerate(report.strategies)
            for line in _curves(number, strategy, key, log=log)
        ]
        if any(line.x for line in series):
            yield LineChart(
                key=f"metric-{key}",
                heading=f"{capital(metric)} against {title}",
                summary=f"{metric} against {title}. {_ends(report, key, unit)}",
                x=Axis(title=title, unit=unit.scales, log=log, zero=True),
                y=y,
                series=series,
                target=report.target,
            )


def _metric_axis(report: PageContent) -> Axis:
    """Near its best value differences of a metric are small, and they are what readers look for: a
    share that comes near to one is shown by what is missing, a loss that falls far by its
    logarithm.
    """
    found = [run.curve.metric for strategy in report.strategies for run in strategy.runs]
    values = np.concatenate(found)
    values = values[np.isfinite(values)]
    title, unit = report.metric_name, NUMBER.scales
    if not values.size or values.min() < 0:
        return Axis(title=title, unit=unit)
    if report.metric_better is Better.LOWER:
        return Axis(title=title, unit=unit, log=_wide(values, _LOG_METRIC_FROM))
    whole = 1.0 if values.max() <= 1 else 100.0
    missing = whole - values[values < whole]
    is_share = whole == 1.0 or "acc" in title.lower()
    if not is_share or not missing.size or missing.min() < 0:
        return Axis(title=title, unit=unit)
    if missing.min() > _NEAR_ONE * whole:
        return Axis(title=title, unit=unit)
    return Axis(title=title, unit=unit, whole=whole, least_missing=float(missing.min()) / 2)


def _curves(number: int, strategy: StrategyResults, key: str, *, log: bool) -> Iterator[Series]:
    """The seeds as thin lines and the median over them; a strategy of one seed is its median."""
    runs = [run for run in strategy.runs if run.curve.metric.size > 1]
    if len(runs) > 1:
        for run in runs:
            name, x = f"{strategy.label}, seed {run.seed}", getattr(run.curve, key)
            yield replace(line(number, name, x, run.curve.metric, log=log), thin=True)
    if runs:
        x, y = _median([run.curve for run in runs], key)
        yield line(number, strategy.label, x, y, log=log)


def _median(curves: Sequence[Curve], key: str) -> tuple[Floats, Floats]:
    """Median over seeds at the steps at which all of them measured."""
    shared = curves[0].steps
    for curve in curves[1:]:
        shared = np.intersect1d(shared, curve.steps)
    places = [np.searchsorted(curve.steps, shared) for curve in curves]
    along = [getattr(curve, key)[place] for curve, place in zip(curves, places, strict=True)]
    metric = [curve.metric[place] for curve, place in zip(curves, places, strict=True)]
    return np.median(along, axis=0), np.median(metric, axis=0)


def _step_charts(run: RunResults) -> Iterator[LineChart]:
    """What changes from step to step, mean over workers, with a band from the least to the greatest
    of any worker.
    """
    steps = run.steps
    if steps.num_steps < 2:
        return
    for key, heading, values, unit in (
        ("loss", "Loss", steps.loss, NUMBER),
        ("duration", "Time of a step", steps.duration_s, SECONDS),
        ("traffic", "Sent by a worker in a step", steps.bytes_sent, BYTES),
    ):
        if not np.isfinite(values).any() or (
            key == "traffic" and np.nanmin(values) == np.nanmax(values)
        ):
            continue  # what never changes stands in the table
        x = steps.step.astype(np.float64)
        yield LineChart(
            key=f"step-{key}",
            heading=heading,
            summary=(
                f"{heading} against steps: mean over workers, and a band from the least to the"
                " greatest."
            ),
            x=Axis(title="steps", unit=COUNT.scales),
            y=Axis(
                title=heading.lower(),
                unit=unit.scales,
                log=_wide(bin_mean(x, values)[1]),
                zero=key != "loss",
            ),
            series=[mean_line(x, values)],
            changes=[(one.step, one.after) for one in run.decisions if one.after != one.before],
        )


def mean_line(x: Floats, values: Floats) -> Series:
    """The mean over workers, with a band from the least to the greatest of any of them.

    Args:
        x: shape (points,), ascending.
        values: shape (workers, points).
    """
    at, mean, low, high = map(rounded, bin_mean(x, values))
    return Series(strategy=0, name="mean over workers", x=at, y=mean, low=low, high=high)


def line(number: int, name: str, x: Floats, y: Floats, *, log: bool = False) -> Series:
    """One line, of as many points as can be seen."""
    if log:
        x, y = x[x > 0], y[x > 0]
    if x.size > MAX_POINTS:
        x, y, _, _ = bin_mean(x, y[None])
    return Series(strategy=number, name=name, x=rounded(x), y=rounded(y))


def rounded(values: Floats) -> Line:
    """As many digits as can be seen; null for what is not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _wide(values: Floats, factor: float = _LOG_Y_FROM) -> bool:
    """Whether a logarithmic axis is needed to see anything of the smaller values."""
    seen = values[np.isfinite(values)]
    return bool(seen.min() > 0 and seen.max() / seen.min() > factor)


def _ends(report: PageContent, key: str, unit: Unit) -> str:
    """Where each line ends, in words."""
    parts = []
    for strategy in report.strategies:
        curves = [run.curve for run in strategy.runs if run.curve.metric.size > 1]
        if curves:
            x, y = _median(curves, key)
            if x.size:
                after = f"{write(float(x[-1]), unit)}{' steps' if key == 'steps' else ''}"
                parts.append(
                    f"{strategy.label} ends at {write(float(y[-1]), NUMBER)} after {after}"
                )
    return "; ".join(parts) + "."


PHASES = ("compute", "padded", "encode", "waiting", "transfer")
_DRAWN = (*PHASES, "encode", "compute")
"""Order of the phases of a step; the last two are what is left of them after the exchange."""

MAX_BARS = 2000
_MOST_STEPS = 40
_FEWEST_STEPS = 3
_BEFORE_DEATH = 4
_PAUSE_STEPS = 5.0
"""All workers standing between two steps for longer than so many usual steps is a pause."""


Numbers = NDArray[np.int64]
Cell = list[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """One run's window: what every worker does in some steps, so that one sees who waits for whom.

    The beginning and the end of a step and the moment a worker came to wait are as recorded, and so
    is how long each phase took. Their order between these moments is drawn as it is in nearly all
    steps: computing, sleeping and encoding before the worker is ready; then waiting for late ones,
    transfer, and what is left of encoding and computing.

    Pauses between steps, in which other strategies had their turn, are left out.

    Where workers keep step, a window is some steps; where they do not, it is the time that some
    steps of one worker take, and what its peers did in it. A window that a worker's death falls
    into is the one to look at.

    Attributes:
        strategy, run: numbers, by which the page's filters find it.
        steps: for each worker the numbers of its steps; 0 where it has none.
        reference: the worker by whose steps the window goes.
        apart: whether workers do not keep step, so that a column is not one step.
        phases: the phase of each length in `cells`.
        cells: for each worker and step: the beginning, then the length of each phase, in
            microseconds from the window's start; null where the worker has no such step.
        last: for each step the worker that was ready last, or -1.
        ready: for each step when it was, in microseconds from the window's start.
        gone: (worker, when) for those that died, likewise.
    """

    strategy: int
    run: int
    steps: list[list[int]]
    reference: int
    apart: bool
    phases: Sequence[str]
    cells: list[list[Cell]]
    last: list[int]
    ready: list[int]
    gone: list[tuple[int, int]]


def timelines(report: PageContent) -> Iterator[TimelineChart]:
    """The window of every run that has steps."""
    for number, strategy in enumerate(report.strategies):
        for position, run in enumerate(strategy.runs):
            window = middle(run)
            if window.num_steps:
                yield _timeline(number, position, run, window)


def middle(run: RunResults) -> Steps:
    """A window of steps from the middle of the last attempt, or around the first death in it, few
    enough to be drawn.
    """
    steps = run.steps
    first = int(np.searchsorted(steps.step, run.last_start, side="right"))
    wanted = int(
        np.clip(MAX_BARS // (len(_DRAWN) * max(1, steps.num_ranks)), _FEWEST_STEPS, _MOST_STEPS)
    )
    available = steps.num_steps - first
    start = first + max(0, available - wanted) // 2
    if run.losses:
        death = int(np.searchsorted(steps.step, run.losses[0].step))
        start = int(np.clip(death - _BEFORE_DEATH, first, first + max(0, available - wanted)))
    return steps.window(start, start + min(wanted, available))


def side_by_side(steps: Steps, window: Steps) -> tuple[Steps, Numbers, int]:
    """`window` by time: what every worker did while one worker did the window's steps.

    Args:
        steps: of the whole run.
        window: some of its columns.

    Returns:
        Steps whose columns no longer are of one number, the numbers of steps, shape (ranks,
        columns), and that one worker: the one that did most of the window, of several the first.
        Where workers keep step, that is the window as it is.
    """
    reference = int(window.done.sum(axis=1).argmax())
    if window.in_step().all():
        return window, np.where(window.done, window.step, 0), reference
    from_s = np.nanmin(window.began_s[reference])
    until_s = np.nanmax(window.began_s[reference] + window.duration_s[reference])
    inside = steps.done & (steps.began_s + steps.duration_s > from_s) & (steps.began_s < until_s)
    chosen = [np.flatnonzero(row)[: 2 * window.num_steps] for row in inside]
    columns = max(row.size for row in chosen)
    places = np.array([np.pad(row, (0, columns - row.size), constant_values=-1) for row in chosen])
    none = places < 0
    matrices = {
        field.name: np.where(
            none,
            np.nan,
            np.take_along_axis(getattr(steps, field.name), np.maximum(places, 0), axis=1),
        )
        for field in fields(Steps)
        if field.name not in ("step", "merged")
    }
    return (
        Steps(step=np.arange(columns), merged=steps.merged, **matrices),
        np.where(none, 0, steps.step[places]),
        reference,
    )


def without_pauses(steps: Steps) -> Steps:
    """`steps` with times as if the pauses between them had not been."""
    began_s = steps.began_s[steps.done]
    ended_s = (steps.began_s + steps.duration_s)[steps.done]
    if not began_s.size:
        return steps
    order = np.argsort(began_s, kind="stable")
    began_s, so_far_s = began_s[order], np.maximum.accumulate(ended_s[order])
    gaps_s = np.concatenate([[0.0], np.maximum(0.0, began_s[1:] - so_far_s[:-1])])
    usual_s = float(np.median(steps.duration_s[steps.done]))
    left_out_s = np.cumsum(np.where(gaps_s > _PAUSE_STEPS * usual_s, gaps_s, 0.0))

    def shifted(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        place = np.searchsorted(began_s, np.nan_to_num(times_s), side="right") - 1
        shifted_s: NDArray[np.float64] = times_s - left_out_s[np.maximum(place, 0)]
        return shifted_s

    return replace(steps, began_s=shifted(steps.began_s), ready_s=shifted(steps.ready_s))


def phase_lengths_s(steps: Steps) -> NDArray[np.float64]:
    """How long each phase of `_DRAWN` lasts, in seconds, shape (phases, workers, steps). They add
    up to at most the step.

    Waiting that happened while this worker was still computing has no place of its own and is left
    out.
    """
    ready_s = np.where(np.isnan(steps.ready_s), steps.began_s + steps.duration_s, steps.ready_s)
    before = np.clip(ready_s - steps.began_s, 0.0, steps.duration_s)
    after = steps.duration_s - before
    padded = np.minimum(steps.padded_s, before)
    encode = np.minimum(steps.encode_s, before - padded)
    compute = before - padded - encode
    for_others = np.maximum(steps.waiting_for_others_s(), 0.0)
    waiting = np.minimum(for_others, after)
    transfer = np.minimum(steps.wait_s - for_others, after - waiting)
    left = after - waiting - transfer
    encode_after = np.minimum(steps.encode_s - encode, left)
    return np.stack([compute, padded, encode, waiting, transfer, encode_after, left - encode_after])


def _timeline(strategy: int, run: int, of: RunResults, window: Steps) -> TimelineChart:
    drawn, numbers, reference = side_by_side(of.steps, window)
    apart = drawn is not window
    steps = without_pauses(drawn)
    origin_s = float(np.nanmin(steps.began_s))
    cells = np.concatenate([(steps.began_s - origin_s)[None], phase_lengths_s(steps)]).transpose(
        1, 2, 0
    )
    exchanged = ~np.isnan(steps.ready_s).any(axis=0) & (steps.num_ranks > 1) & (not apart)
    ready_s = np.where(exchanged, np.fmax.reduce(steps.ready_s) - origin_s, 0.0)
    return TimelineChart(
        strategy=strategy,
        run=run,
        steps=numbers.tolist(),
        reference=reference,
        apart=apart,
        phases=_DRAWN,
        cells=[
            [_microseconds(cell) if there else None for cell, there in zip(*row, strict=True)]
            for row in zip(cells, steps.done, strict=True)
        ],
        last=np.where(exchanged, np.nan_to_num(steps.ready_s).argmax(axis=0), -1).tolist(),
        ready=_microseconds(ready_s),
        gone=[
            (loss.rank, _microseconds(ended_s - origin_s)[0])
            for loss in of.losses
            for ended_s in _ends_of_step(steps, numbers, loss.rank, loss.step)
        ],
    )


def _ends_of_step(steps: Steps, numbers: Numbers, worker: int, step: int) -> NDArray[np.float64]:
    """When `worker` ended `step`, shape (1,); shape (0,) where it did not, or somewhere else."""
    here = np.flatnonzero((numbers[worker] == step) & (step > 0))
    ended_s: NDArray[np.float64] = steps.began_s[worker, here] + steps.duration_s[worker, here]
    return ended_s


def _microseconds(seconds: NDArray[np.float64] | np.float64) -> list[int]:
    return [int(value) for value in np.rint(np.atleast_1d(seconds) * 1e6)]
