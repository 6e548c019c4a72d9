"""`offbeat plan --check`: predicted against measured steps of a comparison.

The profile is measured on this machine, or given. Its forward and backward pass are stretched so
that a step without exchange takes what `alone` took in the comparison: a machine that was busier is
not what is held against the prediction. What exchanging adds is. Where passes are padded, what a
step took beyond that counts as work between steps. All workers share the machine's cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from offbeat.errors import ConfigError, RecordError
from offbeat.strategies.registry import ALONE
from offbeat_lab.breakdown import Steps, read_steps
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.parts import PAYLOAD_SHARE
from offbeat_lab.comparison import Comparison, read_comparison
from offbeat_lab.config import recipe_of
from offbeat_lab.emulation.plan import WINDOW_BYTES
from offbeat_lab.plan.measure import measure_task
from offbeat_lab.plan.methods.of_strategies import method_of
from offbeat_lab.plan.predictions import predict_recipe, setting_of, with_windows
from offbeat_lab.plan.profile import Checked, ModelProfile
from offbeat_lab.plan.script_timing import measure_script
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.plan.steps_to_target import require_model
from offbeat_lab.records import Record

WITHIN: Final = 0.15
"""A prediction is good if it is no further from the measured step, and strategies that differ by
more should be in the right order.
"""

REPEATS_WITHIN: Final = 0.10
"""Where halves of a run, or runs, differ by more, a strategy is not judged; nor where there are no
two of them.
"""

_PROFILED_STEPS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedStep:
    """One strategy.

    Attributes:
        strategy: its label in the comparison.
        measured_s: mean step of a worker, without the first steps.
        predicted_s: None: it cannot be predicted.
        repeats_differ: by how much halves of its runs differ, as a share of the smaller one. None:
            there is one run, and no two whole periods of the strategy in it, so nobody knows.
        needs_steps: as many have two whole periods.
        why: it cannot be predicted; empty: it can.
    """

    strategy: str
    measured_s: float
    predicted_s: float | None
    repeats_differ: float | None
    needs_steps: int = 2
    why: str = ""

    @property
    def is_judged(self) -> bool:
        differ = self.repeats_differ
        return self.predicted_s is not None and differ is not None and differ <= REPEATS_WITHIN

    @property
    def ratio(self) -> float:
        """Predicted over measured; NaN where nothing was predicted."""
        return math.nan if self.predicted_s is None else self.predicted_s / self.measured_s

    @property
    def error(self) -> float:
        """How far off the prediction is: 0.1 for 10%, either way."""
        return exp(abs(log(self.ratio))) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a comparison says of predictions.

    Attributes:
        where: the cluster, for people.
        steps: of the strategies, worst prediction first; those that are not judged at the end.
        profile: that was predicted with, and what was checked of it.
    """

    where: str
    steps: tuple[CheckedStep, ...]
    profile: ModelProfile

    @property
    def judged(self) -> list[CheckedStep]:
        return [one for one in self.steps if one.is_judged]

    @property
    def median_error(self) -> float:
        return median(one.error for one in self.judged)

    @property
    def share_within(self) -> float:
        """Of judged strategies, those within `WITHIN`."""
        return sum(one.error <= WITHIN for one in self.judged) / len(self.judged)

    @property
    def apart(self) -> list[tuple[CheckedStep, CheckedStep]]:
        """Pairs whose measured steps differ by more than `WITHIN`, the slower one first."""
        return [
            (first, second)
            for first in self.judged
            for second in self.judged
            if first.measured_s > (1 + WITHIN) * second.measured_s
        ]

    @property
    def misplaced(self) -> list[tuple[CheckedStep, CheckedStep]]:
        """Those of `apart` that are predicted in the wrong order."""
        return [
            (slower, faster)
            for slower, faster in self.apart
            if (slower.predicted_s or 0.0) <= (faster.predicted_s or 0.0)
        ]


def check_comparison(directory: Path, profile: ModelProfile | None = None) -> Check:
    """Hold predictions against the comparison recorded in `directory`.

    Args:
        directory: of the comparison.
        profile: of what it trained; None: it is measured here.

    Raises:
        RecordError: there is no comparison, or it is damaged.
        ConfigError: it has not finished, the profile is of another model, or nothing can be
            predicted.
    """
    comparison = read_comparison(directory)
    if comparison.status != "finished":
        raise ConfigError(
            f"the comparison in {directory} has not finished (its status is {comparison.status!r}),"
            " so runs are missing or cut short; check one that has"
        )
    runs = {
        strategy.label: [Record(directory / run) for run in strategy.runs]
        for strategy in comparison.strategies
        if strategy.failure is None
    }
    if not runs:
        raise ConfigError(f"no strategy of {directory} has finished; there is nothing to check")
    cluster = comparison.cluster
    if any(cluster.link_of(worker).rate_bit_per_s is None for worker in range(cluster.workers)):
        raise ConfigError(
            f"the links of {directory} had no rate, which a prediction needs; check a comparison"
            " that was made with one, as by offbeat compare --link 1gbit"
        )
    model = _measured_profile(runs) if profile is None else profile
    require_model(comparison, directory, model)
    cluster = _on_one_machine(comparison)
    alone = [directory / f"runs/{ALONE}-seed-{seed}" for seed in comparison.seeds]
    fitted = _as_alone(model, cluster, [path for path in alone if path.exists()])
    setting = replace(setting_of(fitted, cluster), payload_share=_payload_share(comparison))
    steps = [_checked(label, records, setting) for label, records in runs.items()]
    steps.sort(key=lambda one: (not one.is_judged, -one.error if one.is_judged else 0.0))
    found = Check(where=cluster.describe(), steps=tuple(steps), profile=model)
    return replace(found, profile=_with_check(model, found, directory, comparison))


def _measured_profile(runs: Mapping[str, Sequence[Record]]) -> ModelProfile:
    """Of the task, or the script, that `runs` trained."""
    config = next(iter(runs.values()))[0].config
    if config.script is not None:
        return measure_script(config.script, steps=_PROFILED_STEPS)
    return measure_task(config.task, config.task_options, steps=_PROFILED_STEPS)


def _as_alone(model: ModelProfile, cluster: Cluster, alone: Sequence[Path]) -> ModelProfile:
    """`model` with the step that workers took which exchanged nothing."""
    if not alone:
        return model
    durations_s = np.concatenate(
        [_settled(Record(path)).duration_s.ravel() for path in alone], dtype=np.float64
    )
    measured_s = float(np.nanmean(durations_s))
    before = setting_of(replace(model, spread=0.0), cluster)
    if before.profile.padding_s:
        # What a step takes beyond its padding is work between steps.
        more_s = max(0.0, measured_s - before.ideal_s) / float(before.slowdowns.mean())
        return replace(model, optimizer_s=model.optimizer_s + more_s, spread=0.0)
    late_s = float(before.late_s.mean())
    slowdown = float(before.slowdowns.mean())
    computing_s = (measured_s - late_s) / slowdown - model.optimizer_s
    if computing_s <= 0:
        return model
    if not late_s:
        model = replace(model, spread=float(np.nanstd(durations_s)) / measured_s)
    return model.with_step(
        batch_size=model.batch.batch_size, forward_backward_s=computing_s, device=model.device
    )


def _on_one_machine(comparison: Comparison) -> Cluster:
    """The cluster, whose workers shared the cores of the machine that emulated it, over connections
    with the windows that they get there.
    """
    cluster = with_windows(comparison.cluster, WINDOW_BYTES)
    cores = comparison.environment.get("num_cpus")
    if cluster.cores is not None or not isinstance(cores, int) or cores < 1:
        return cluster
    return cluster.model_copy(update={"cores": cores})


def _payload_share(comparison: Comparison) -> float:
    """What the lab saw of the links' rates before it began; as usual where it saw nothing."""
    shares = [one.share for one in comparison.emulation.checks if one.share is not None]
    return min(1.0, float(np.mean(shares))) if shares else PAYLOAD_SHARE


def _checked(label: str, records: Sequence[Record], setting: Setting) -> CheckedStep:
    config = records[0].config
    recipe = recipe_of(config)
    why = ""
    predicted_s, period, kind_of = None, 1, None
    runs = [_settled(record) for record in records]
    first_steps = int(runs[0].step[0]) - 1
    try:
        if config.batch_shares:
            raise ConfigError("its batches are of different sizes")
        method = method_of(config.strategy, recipe)
        period, kind_of = method.period_of(setting.world_size), method.kind_of
        if kind_of is None:
            runs = [_whole_periods(run, period) for run in runs]
        numbers = runs[0].step  # counted from 1
        those = replace(setting, steps=range(int(numbers[0]) - 1, int(numbers[-1])))
        predicted_s = predict_recipe(label, config.strategy, recipe, those).step_s
    except ConfigError as error:
        why = str(error)
    halves = [
        seconds
        for run in runs
        for seconds in (
            map(_mean_s, _halves(run, period)) if kind_of is None else _alike_s(run, kind_of)
        )
    ]
    return CheckedStep(
        strategy=label,
        measured_s=float(np.mean([_mean_s(run) for run in runs])),
        predicted_s=predicted_s,
        repeats_differ=max(halves) / min(halves) - 1 if len(halves) > 1 else None,
        needs_steps=first_steps + 2 * period,
        why=why,
    )


def _whole_periods(steps: Steps, period: int) -> Steps:
    """The last whole periods of `steps`; all of them where there is not one."""
    whole = steps.num_steps // period * period or steps.num_steps
    return steps.window(steps.num_steps - whole)


def _halves(steps: Steps, period: int) -> list[Steps]:
    """The first and the last of whole periods, half of them each; the whole where there is but
    one.
    """
    # Of shared samples a period ends with a merge, wherever that is.
    inside = steps.merged[(steps.merged >= steps.step[0]) & (steps.merged <= steps.step[-1])]
    merges = [int(place) for place in np.searchsorted(steps.step, inside)]
    if pairs := max(0, len(merges) - 1) // 2:
        begin, middle, end = merges[0] + 1, merges[pairs] + 1, merges[2 * pairs] + 1
        return [steps.window(begin, middle), steps.window(middle, end)]
    half = steps.num_steps // 2 // period * period
    return [steps.window(0, half), steps.window(steps.num_steps - half)] if half else [steps]


def _alike_s(steps: Steps, kind_of: Callable[[int], Hashable]) -> list[float]:
    """The mean step of both halves, if each had as many of a kind as the whole run has; of kinds
    that both have.
    """
    kinds = [kind_of(int(number) - 1) for number in steps.step]
    half = steps.num_steps // 2
    halves = [range(half), range(half, steps.num_steps)]
    both = set.intersection(*({kinds[place] for place in some} for some in halves))
    if not both:
        return [_mean_s(steps)]
    means_s = np.nanmean(steps.duration_s, axis=0)
    return [
        sum(
            kinds.count(kind) * float(np.mean([means_s[p] for p in some if kinds[p] == kind]))
            for kind in both
        )
        for some in halves
    ]


def _settled(record: Record) -> Steps:
    """The steps of a run without the first ones. Raises `RecordError` where there are none."""
    steps = read_steps(record)
    if not steps.num_steps:
        raise RecordError(f"{record.path} has no steps, so nothing was measured")
    return steps.settled()


def _mean_s(steps: Steps) -> float:
    """Mean step over ranks."""
    return float(np.nanmean(steps.duration_s))


def _with_check(
    model: ModelProfile, found: Check, directory: Path, comparison: Comparison
) -> ModelProfile:
    """`model` that knows what was checked. A check of the same record is replaced."""
    if not found.judged:
        return model
    cluster = comparison.cluster
    name = directory.resolve().name
    checked = Checked(
        record=name,
        workers=cluster.workers,
        least_rate_bit_per_s=min(cluster.limited_rates),
        most_rate_bit_per_s=max(cluster.limited_rates),
        strategies=tuple(one.strategy.replace(" ", ":") for one in found.judged),
        median_error=found.median_error,
        worst_error=max(one.error for one in found.judged),
        most_latency_s=cluster.most_latency_s,
    )
    kept = [one for one in model.checked if one.record != name]
    return replace(model, checked=(*kept, checked))
