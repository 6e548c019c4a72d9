"""What a step takes under each strategy, on each cluster of a grid; what binds it; which strategy
is best where; and all that as rows of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import ALONE
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.cluster.quantities import display_duration, display_rate
from offbeat_lab.options import Recipe, build_strategy, parse_spec
from offbeat_lab.plan.methods.of_strategies import method_of
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.plan.steps_to_target import StepsToTarget

USUAL: Final = ("ddp", "ddp-fp16", "ddp-powersgd", "gtopk", "localsgd", "dpsgd", "wagma")
"""Strategies that are planned for where none are named."""

SLOWER_EXCHANGE: Final = 1.4
"""What published dense exchanges took over the ring model, at most, where the model holds (gTop-k's
VGG-16, AlexNet and ResNet-50 on 4 and 8 nodes: 1.2 to 1.4). The upper end of the band.
"""

COMPUTE_BAND: Final = 0.05
"""By which computing is taken to differ from the profile, either way."""

CLOSE: Final = 0.02
"""Steps that differ by less are as good as each other: then the simpler strategy is recommended."""

_SILENCE_S, _RESTART_S, _STEPS_BETWEEN_CHECKPOINTS = 5.0, 60.0, 100
_MODEL_COPIES = 2.0  # weights, gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """One strategy on one cluster.

    Attributes:
        strategy: with its options, as on the command line.
        workers: how many.
        rate_bit_per_s: of the links.
        step_s: mean step of a worker.
        low_s, high_s: the band in which it is expected.
        samples_per_s: of all workers.
        bytes_per_step: that a worker sends.
        share_of_ideal: of the speed of workers that exchange nothing.
        binds: what most of the time besides the ideal goes to; where that is less than 5% of the
            step "compute", or "cores" where workers that share them slow each other down.
        memory_bytes: of a worker, for weights, gradients, moments and what the strategy keeps.
        lost_to_deaths: share of the time that deaths of workers cost.
        by_events: whether every message was simulated.
        note: what should be known; empty: nothing.
        is_lower_limit: whether later steps take longer than those that were simulated, which end
            before the first averages do.
        time_to_target_s: as many steps as it took to a target; None: nobody measured how many.
    """

    strategy: str
    workers: int
    rate_bit_per_s: float
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    bytes_per_step: float
    share_of_ideal: float
    binds: str
    memory_bytes: float
    lost_to_deaths: float
    by_events: bool
    note: str
    is_lower_limit: bool = False
    time_to_target_s: float | None = None


def check_spec(spec: str, workers: int) -> tuple[str, Recipe]:
    """The strategy called `spec`, such as "gtopk:density=0.01", and its name.

    Raises:
        ConfigError: there is no such strategy, or it cannot run with so many workers.
    """
    name, options = parse_spec(spec)
    recipe = build_strategy(name, options)
    if isinstance(recipe, Strategy):
        recipe.check_world(workers)
    return name, recipe


def predict_step(spec: str, setting: Setting) -> StepPrediction:
    """One strategy on one cluster.

    Args:
        spec: the strategy with its options.
        setting: the model on the cluster.

    Raises:
        ConfigError: the strategy cannot run so, or cannot be predicted.
    """
    return predict_recipe(spec, *check_spec(spec, setting.world_size), setting)


def predict_recipe(label: str, name: str, recipe: Recipe, setting: Setting) -> StepPrediction:
    """One strategy on one cluster.

    Args:
        label: what it is called.
        name: of the strategy.
        recipe: with its options, which can run with so many workers.
        setting: the model on the cluster.

    Raises:
        ConfigError: the strategy cannot be predicted.
    """
    profile, cluster = setting.profile, setting.cluster
    method = method_of(name, recipe)
    survives = isinstance(recipe, Strategy) and recipe.survives_death
    simulated = method.simulate(setting)
    # What an exchange costs a world of one is not a cost of exchanging.
    step_s = max(simulated.step_s, profile.compute_s)
    ideal_s = setting.ideal_s
    waiting_s = 0.0
    encode_s = min(setting.crowding * simulated.encode_s, max(0.0, step_s - ideal_s))
    if not setting.is_steady:
        waiting_s = method_of(name, recipe).waiting_s(setting, encode_s)
    exchange_s = max(0.0, step_s - ideal_s - encode_s - waiting_s)
    parts = {
        "encode": encode_s,
        "waiting": waiting_s,
        "alpha": simulated.alpha_share * exchange_s,
        "beta": (1 - simulated.alpha_share) * exchange_s,
    }
    largest = max(parts, key=lambda name: parts[name])
    return StepPrediction(
        strategy=label,
        workers=setting.world_size,
        rate_bit_per_s=cluster.link.rate_bit_per_s or math.inf,
        step_s=step_s,
        low_s=(1 - COMPUTE_BAND) * (step_s - exchange_s) + exchange_s,
        high_s=(1 + COMPUTE_BAND) * (step_s - exchange_s) + SLOWER_EXCHANGE * exchange_s,
        samples_per_s=setting.world_size * profile.batch.batch_size / step_s,
        bytes_per_step=simulated.bytes_per_step,
        share_of_ideal=ideal_s / step_s,
        binds=largest
        if parts[largest] > 0.05 * step_s
        else "cores"
        if setting.crowding > 1
        else "compute",
        memory_bytes=(_MODEL_COPIES + profile.moments) * profile.num_bytes
        + max(method.extra_bytes * profile.num_bytes or -math.inf, simulated.kept_bytes),
        lost_to_deaths=_lost_to_deaths(cluster, step_s, survives=survives),
        by_events=simulated.by_events,
        note=simulated.note,
        is_lower_limit=simulated.is_lower_limit,
    )


def _lost_to_deaths(cluster: Cluster, step_s: float, *, survives: bool) -> float:
    """A survivor's peers wait for the limit of silence; a run that ends restarts from a checkpoint
    that is half an interval old.
    """
    lost_s = _SILENCE_S if survives else _RESTART_S + _STEPS_BETWEEN_CHECKPOINTS / 2 * step_s
    return min(1.0, cluster.deaths_per_hour * cluster.workers * lost_s / 3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        profile: of the model.
        clusters: for each rate, one for each number of workers.
        strategies: with their options.
        to_target: how many steps they take to a target; None: nobody measured that.
    """

    profile: ModelProfile
    clusters: Sequence[Cluster]
    strategies: Sequence[str]
    to_target: StepsToTarget | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All predictions, and what they come to.

    Attributes:
        request: what was asked for.
        predictions: by cluster, in the order of strategies.
        crossovers: where which strategy is best, in words.
        remarks: what should be known.
    """

    request: PlanRequest
    predictions: tuple[StepPrediction, ...]
    crossovers: tuple[str, ...]
    remarks: tuple[str, ...]

    def best(self, workers: int, rate_bit_per_s: float) -> StepPrediction:
        """The recommendation: of those within `CLOSE` of the fastest, the first that was named. Of
        which there is only a lower limit is not recommended where there is anything else.
        """
        return _best(self.at(workers, rate_bit_per_s))

    def at(self, workers: int, rate_bit_per_s: float) -> list[StepPrediction]:
        """The predictions for one cluster, in the order in which strategies were named."""
        return _at(self.predictions, workers, rate_bit_per_s)


def make_plan(request: PlanRequest) -> Plan:
    """Predict every strategy on every cluster.

    Raises:
        ConfigError: a strategy cannot run with so many workers, or cannot be predicted; a cluster
            has links without a rate.
    """
    for spec in request.strategies:
        for cluster in request.clusters:
            check_spec(spec, cluster.workers)
    predictions = []
    steps = {} if request.to_target is None else request.to_target.steps
    for cluster in request.clusters:
        setting = setting_of(request.profile, cluster)
        for spec in request.strategies:
            found = predict_step(spec, setting)
            if spec in steps:
                found = replace(found, time_to_target_s=steps[spec] * found.step_s)
            predictions.append(found)
    return Plan(
        request=request,
        predictions=tuple(predictions),
        crossovers=tuple(_crossovers(request, predictions)),
        remarks=tuple(_remarks(request, predictions)),
    )


def setting_of(profile: ModelProfile, cluster: Cluster) -> Setting:
    """`profile` on `cluster`, its passes padded if the cluster says so."""
    if cluster.step_s is not None:
        profile = profile.padded(cluster.step_s)
    return Setting(profile=profile, cluster=cluster)


def _best(predictions: Sequence[StepPrediction]) -> StepPrediction:
    # What exchanges nothing trains no common model: it is there to be compared with.
    several = [one for one in predictions if one.strategy != ALONE] or predictions
    several = [one for one in several if not one.is_lower_limit] or several
    fastest = max(one.samples_per_s for one in several)
    return next(one for one in several if one.samples_per_s >= (1 - CLOSE) * fastest)


def _crossovers(request: PlanRequest, predictions: Sequence[StepPrediction]) -> list[str]:
    """For each number of workers, between which rates which strategy is best."""
    sentences = []
    for workers in sorted({one.workers for one in predictions}):
        rates = sorted({one.rate_bit_per_s for one in predictions if one.workers == workers})
        at = partial(_at, predictions, workers)
        best = [_best(at(rate)) for rate in rates]
        changes = [
            (_crossing(at(low), at(high), first.strategy, second.strategy), second.strategy)
            for low, high, first, second in zip(rates, rates[1:], best, best[1:], strict=False)
            if first.strategy != second.strategy
        ]
        people = f"{workers} worker{'s' * (workers > 1)}"
        if not changes:
            where = f"at {display_rate(rates[0])}" + (
                f" to {display_rate(rates[-1])}" if len(rates) > 1 else ""
            )
            sentences.append(f"{people}: {best[0].strategy} {where}.")
            continue
        parts = [f"below {display_rate(changes[0][0])} {best[0].strategy}"]
        parts += [f"above {display_rate(rate)} {strategy}" for rate, strategy in changes]
        sentences.append(f"{people}: {', '.join(parts)}.")
    return sentences


def _at(predictions: Sequence[StepPrediction], workers: int, rate: float) -> list[StepPrediction]:
    return [one for one in predictions if (one.workers, one.rate_bit_per_s) == (workers, rate)]


def _crossing(
    low: Sequence[StepPrediction], high: Sequence[StepPrediction], first: str, second: str
) -> float:
    """The rate at which two strategies are equally fast: their steps are taken to change along
    straight lines in the logarithm of the rate, between two rates that were predicted.
    """
    gaps = [
        next(one.step_s for one in side if one.strategy == second)
        - next(one.step_s for one in side if one.strategy == first)
        for side in (low, high)
    ]
    limits = any(one.is_lower_limit for one in low if one.strategy == second) or any(
        one.is_lower_limit for one in high if one.strategy == first
    )
    share = (
        0.5 if limits or gaps[0] == gaps[1] else min(1.0, max(0.0, gaps[0] / (gaps[0] - gaps[1])))
    )
    rates = low[0].rate_bit_per_s, high[0].rate_bit_per_s
    return float(f"{rates[0] * (rates[1] / rates[0]) ** share:.2g}")


def _remarks(request: PlanRequest, predictions: Sequence[StepPrediction]) -> list[str]:
    profile = request.profile
    remarks = [
        f"The profile is of {profile.name} on {profile.device}, batches of"
        f" {profile.batch.batch_size}."
    ]
    first, *others = request.clusters
    if _is_special(first):
        which = "The first of these clusters" if others else "The cluster"
        remarks.append(f"{which}: {first.describe()}.")
    remarks += _checks(request)
    for cluster in request.clusters:
        link = cluster.link
        if link.window_bytes is not None and link.connection_bytes_per_s < link.bytes_per_s:
            remarks.append(
                f"A window of {link.window_bytes} bytes lets a connection carry"
                f" {display_rate(float(f'{8 * link.connection_bytes_per_s:.3g}'))} of"
                f" {display_rate(link.rate_bit_per_s or math.inf)}: round trip x rate is more."
            )
            break
    remarks += [
        f"{cluster.workers} workers share {cluster.cores} cores, so computing takes"
        f" {setting.crowding:.2g} times as long as alone."
        for cluster in request.clusters
        if (setting := setting_of(profile, cluster)).crowding > 1
    ]
    remarks += dict.fromkeys(f"{one.strategy}: {one.note}." for one in predictions if one.note)
    remarks.append(
        "A prediction is of time for a step: how many steps a strategy needs to a target only"
        " `offbeat compare` tells."
        if request.to_target is None
        else request.to_target.describe()
    )
    return [*remarks, *_earlier_at_target(predictions)]


def _earlier_at_target(predictions: Sequence[StepPrediction]) -> Iterator[str]:
    """Where another strategy than the recommended one comes to the target first."""
    for workers, rate in sorted({(one.workers, one.rate_bit_per_s) for one in predictions}):
        ones = _at(predictions, workers, rate)
        best = _best(ones)
        times = [(one.time_to_target_s, one.strategy) for one in ones if one.time_to_target_s]
        if best.time_to_target_s is None or not times:
            continue
        first_s, first = min(times)
        if first_s < (1 - CLOSE) * best.time_to_target_s:
            yield (
                f"{workers} worker{'s' * (workers > 1)}, {display_rate(rate)}: {first} comes to the"
                f" target first, {best.time_to_target_s / first_s:.2g} times faster than"
                f" {best.strategy}, which is fastest in samples a second."
            )


def _is_special(cluster: Cluster) -> bool:
    """Whether there is more to say of it than its number of workers and the rate of its links."""
    plain = Cluster(
        name=cluster.name,
        workers=cluster.workers,
        link=LinkSpec(rate_bit_per_s=cluster.link.rate_bit_per_s),
        seed=cluster.seed,
    )
    return cluster != plain


def _checks(request: PlanRequest) -> Iterator[str]:
    """How far predictions from this profile were held against measurements."""
    checked = request.profile.checked
    if not checked:
        yield (
            "No prediction from this profile has been held against a measurement: bands are those"
            " of published exchanges, and steps outside them are possible. `offbeat plan --check`"
            " holds them against a comparison."
        )
        return
    error, worst = (
        max(getattr(one, field) for one in checked) for field in ("median_error", "worst_error")
    )
    yield (
        f"Predictions from this profile were held against {len(checked)}"
        f" comparison{'s' * (len(checked) > 1)}: median error up to {error:.0%}, at most"
        f" {worst:.0%}."
    )
    outside = {
        words: None
        for cluster in request.clusters
        for spec in request.strategies
        if (
            words := request.profile.unchecked(
                workers=cluster.workers,
                rate_bit_per_s=cluster.link.rate_bit_per_s or math.inf,
                latency_s=cluster.most_latency_s,
                strategy=spec,
            )
        )
    }
    for words in outside:
        yield f"Outside of the range that was checked: {words}."


WORDS = (
    "Step: its mean, and the band in which it is expected. MB sent: by a worker in a step. Ideal:"
    " share of the speed of workers that exchange nothing. Binds: what most of the rest goes to,"
    " encode (selection, copies, factors), waiting for peers, alpha (latencies, messages) or beta"
    " (bytes). Memory: weights, gradients, the optimizer's and the strategy's; not activations."
)
"""What the columns mean."""

_LONG = ((172_800.0, "d"), (7200.0, "h"), (120.0, "min"))

TARGET_WORDS = "Target: time to it, measured steps x predicted step."

DEATH_WORDS = "Deaths: share of the time that is lost to deaths of workers."


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTable:
    """All strategies on one cluster.

    Attributes:
        title: the cluster, in short.
        heads: of the columns, strategies first.
        rows: of a strategy each, in the order in which they were named.
        best: the number of the row that is recommended.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int


def plan_tables(plan: Plan) -> Iterator[PlanTable]:
    """One for each rate and number of workers, ascending."""
    has_deaths, has_target = _has_deaths(plan), plan.request.to_target is not None
    for rate, workers in sorted({(p.rate_bit_per_s, p.workers) for p in plan.predictions}):
        ones = plan.at(workers, rate)
        columns = [_cells(one, has_deaths=has_deaths, has_target=has_target) for one in ones]
        yield PlanTable(
            title=f"{workers} worker{'s' * (workers > 1)}, {display_rate(rate)}",
            heads=list(columns[0]),
            rows=[list(one.values()) for one in columns],
            best=ones.index(plan.best(workers, rate)),
        )


def column_words(plan: Plan) -> str:
    """What the columns of its tables mean."""
    words = [WORDS]
    if plan.request.to_target is not None:
        words.append(TARGET_WORDS)
    if _has_deaths(plan):
        words.append(DEATH_WORDS)
    return " ".join(words)


def _has_deaths(plan: Plan) -> bool:
    return any(one.lost_to_deaths for one in plan.predictions)


def _cells(one: StepPrediction, *, has_deaths: bool, has_target: bool) -> dict[str, str]:
    """By head. The time to a target takes the place of samples a second."""
    limit = "> " if one.is_lower_limit else ""
    cells = {
        "strategy": one.strategy,
        "step": f"{limit}{display_duration(_three_digits(one.step_s))}",
        "band": band_text(one),
        **({} if has_target else {"samples/s": _number(one.samples_per_s)}),
        "MB sent": f"{one.bytes_per_step / 1e6:.3g}",
        "ideal": f"{one.share_of_ideal:.0%}",
        "binds": one.binds,
        "memory": _memory_text(one.memory_bytes),
    }
    if has_target:
        time = _time_text(one.time_to_target_s)
        cells["target"] = f"{limit}{time}" if time else ""
    if has_deaths:
        cells["deaths"] = f"{one.lost_to_deaths:.1%}"
    return cells


def band_text(one: StepPrediction) -> str:
    """`7.07 to 9.6`, in the unit of the step."""
    _, unit = display_duration(_three_digits(one.step_s)).split()
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return f"{_number(factor * one.low_s)} to {_number(factor * one.high_s)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time_text(seconds: float | None) -> str:
    """`2.5 h`; empty where it is unknown."""
    if seconds is None:
        return ""
    size, unit = next((one for one in _LONG if seconds >= one[0]), (1.0, "s"))
    return f"{_number(seconds / size)} {unit}"


def _memory_text(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
