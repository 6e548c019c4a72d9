"""Which strategy is best where: all of them on all clusters of a grid, and what follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

from offbeat.errors import ConfigError
from offbeat.strategies.registry import ALONE
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.cluster.quantities import display_rate, rounded
from offbeat_lab.plan.language_models import PCIE_BYTES_PER_S, node_bytes_per_s
from offbeat_lab.plan.predictions import (
    StepPrediction,
    check_spec,
    predict_step,
    setting_of,
    with_windows,
)
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.simulation import Simulated
from offbeat_lab.plan.steps_to_target import StepsToTarget

USUAL: Final = ("ddp", "ddp-fp16", "ddp-powersgd", "gtopk", "localsgd", "dpsgd", "wagma")
"""Strategies that are planned for where none are named."""

USUAL_ON_ISLANDS: Final = ("allreduce", "powersgd", "gtopk", "localsgd")
"""Likewise of those that train models which the devices of a node divide."""

CLOSE: Final = 0.02
"""Steps that differ by less are as good as each other: then the simpler strategy is recommended."""

_NOISY: Final = 0.05


def usual_strategies(profile: ModelProfile) -> tuple[str, ...]:
    """Of those that are planned for where none are named, those that train `profile`."""
    usual: tuple[str, ...] = USUAL_ON_ISLANDS if profile.devices > 1 else USUAL
    if profile.element_bytes == 2:
        usual = tuple(one for one in usual if one != "ddp-fp16")
    return usual


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        profile: of the model.
        clusters: for each rate, one for each number of workers.
        strategies: with their options.
        to_target: how many steps they take to a target; None: nobody measured that.
        samples: that are to be trained on, of all workers; None: nobody asked.
        price: of a device for an hour; None: nobody asked.
    """

    profile: ModelProfile
    clusters: Sequence[Cluster]
    strategies: Sequence[str]
    to_target: StepsToTarget | None = None
    samples: float | None = None
    price: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All predictions, and what they come to.

    Attributes:
        request: what was asked for.
        predictions: by cluster, in the order of strategies.
    """

    request: PlanRequest
    predictions: tuple[StepPrediction, ...]

    @property
    def crossovers(self) -> tuple[str, ...]:
        """Where which strategy is best, in words."""
        return tuple(_crossovers(self))

    @property
    def remarks(self) -> tuple[str, ...]:
        """What should be known."""
        return tuple(_remarks(self))

    def best(self, workers: int, rate_bit_per_s: float) -> StepPrediction:
        """The recommendation: of those within `CLOSE` of the fastest, with what deaths cost, the
        first that was named. What does not fit, or is only a lower limit, is not recommended
        where there is anything else.
        """
        ones = self.at(workers, rate_bit_per_s)
        # What exchanges nothing trains no common model: it is there to be compared with.
        several = [one for one in ones if one.strategy != ALONE] or ones
        several = [one for one in several if one.is_eligible] or several
        fastest = max(one.goodput_per_s for one in several)
        return next(one for one in several if one.goodput_per_s >= (1 - CLOSE) * fastest)

    def at(self, workers: int, rate_bit_per_s: float) -> list[StepPrediction]:
        """The predictions for one cluster, in the order in which strategies were named."""
        place = workers, rate_bit_per_s
        return [one for one in self.predictions if (one.workers, one.rate_bit_per_s) == place]


def make_plan(request: PlanRequest, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Predict every strategy on every cluster.

    Args:
        request: what is asked for.
        progress: is told what is predicted next.

    Raises:
        ConfigError: a strategy cannot run with so many workers, or cannot be predicted; a cluster
            has links without a rate; no strategy fits into a device's memory.
    """
    for spec in request.strategies:
        for cluster in request.clusters:
            check_spec(spec, cluster.workers)
    predictions = []
    # What adds to computing is simulated of a few of many workers: once for all their numbers.
    simulated: dict[Hashable, Simulated] = {}
    for number, cluster in enumerate(request.clusters):
        setting = replace(setting_of(request.profile, cluster), simulated=simulated)
        for spec in request.strategies:
            progress(f"cluster {number + 1} of {len(request.clusters)}: {spec}")
            predictions.append(_as_asked(request, predict_step(spec, setting)))
    _require_fit(request.profile, predictions)
    return Plan(request=request, predictions=tuple(predictions))


def _as_asked(request: PlanRequest, found: StepPrediction) -> StepPrediction:
    """With the time and the money that `request` asks for."""
    if found.never_ends:
        return found
    steps = {} if request.to_target is None else request.to_target.steps
    if found.strategy in steps:
        trained_s = steps[found.strategy] * found.step_s
        found = replace(found, time_to_target_s=trained_s / (1 - found.lost_to_deaths))
    if request.samples is not None:
        found = replace(found, time_s=request.samples * _sample_s(found))
    hours_s = found.time_s if found.time_s is not None else found.time_to_target_s
    if request.price is not None and hours_s is not None:
        devices = found.workers * request.profile.devices
        found = replace(found, cost=request.price * devices * hours_s / 3600)
    return found


def _sample_s(one: StepPrediction) -> float:
    """Of all workers together, with what deaths cost."""
    return 1 / max(one.goodput_per_s, 1e-12)


def _require_fit(profile: ModelProfile, predictions: Sequence[StepPrediction]) -> None:
    """Raise `ConfigError` where none fits."""
    if any(one.fits for one in predictions):
        return
    least = min(predictions, key=lambda one: one.memory_bytes)
    raise ConfigError(
        f"no strategy fits into the {memory_text(profile.device_bytes)} of {profile.device}:"
        f" {least.strategy} needs {memory_text(least.memory_bytes)}, of which activations take"
        f" {memory_text(profile.activation_bytes)}; give a smaller --batch-size,"
        f"{' --dtype bfloat16,' * (profile.element_bytes > 2)} or a larger --island, a node whose"
        " devices divide the model"
    )


def plan_as_json(plan: Plan) -> dict[str, object]:
    """All of it, for programs."""
    profile = plan.request.profile
    places = dict.fromkeys((one.workers, one.rate_bit_per_s) for one in plan.predictions)
    return {
        "profile": {
            "name": profile.name,
            "device": profile.device,
            "devices_per_worker": profile.devices,
            "parameters": profile.num_elements,
            "batch_size": profile.batch.batch_size,
            "tokens_per_sample": profile.tokens_per_sample,
            "not_measured": sorted(profile.unmeasured),
        },
        "samples": plan.request.samples,
        "price": plan.request.price,
        "predictions": [asdict(one) for one in plan.predictions],
        "recommended": [
            {
                "workers": workers,
                "rate_bit_per_s": rate,
                "strategy": plan.best(workers, rate).strategy,
            }
            for workers, rate in places
        ],
        "crossovers": plan.crossovers,
        "remarks": plan.remarks,
    }


def _crossovers(plan: Plan) -> list[str]:
    """For each number of workers, between which rates which strategy is best."""
    sentences = []
    for workers in sorted({one.workers for one in plan.predictions}):
        rates = sorted({one.rate_bit_per_s for one in plan.predictions if one.workers == workers})
        at = partial(plan.at, workers)
        best = [plan.best(workers, rate) for rate in rates]
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


def _crossing(
    low: Sequence[StepPrediction], high: Sequence[StepPrediction], first: str, second: str
) -> float:
    """The rate at which two strategies are equally fast: their times for a sample are taken to
    change along straight lines in the logarithm of the rate, between two rates that were predicted.
    """
    gaps = [
        next(_sample_s(one) for one in side if one.strategy == second)
        - next(_sample_s(one) for one in side if one.strategy == first)
        for side in (low, high)
    ]
    limits = any(one.is_lower_limit for one in low if one.strategy == second) or any(
        one.is_lower_limit for one in high if one.strategy == first
    )
    share = (
        0.5 if limits or gaps[0] == gaps[1] else min(1.0, max(0.0, gaps[0] / (gaps[0] - gaps[1])))
    )
    rates = low[0].rate_bit_per_s, high[0].rate_bit_per_s
    return rounded(rates[0] * (rates[1] / rates[0]) ** share, digits=2)


def _remarks(plan: Plan) -> list[str]:
    request, predictions, profile = plan.request, plan.predictions, plan.request.profile
    remarks = [
        f"The profile is of {profile.name} on {profile.device}, batches of"
        f" {profile.batch.batch_size}."
    ]
    first, *others = request.clusters
    if _is_special(first):
        which = "The first of these clusters" if others else "The cluster"
        remarks.append(f"{which}: {first.describe()}.")
    remarks += _how_sure(predictions)
    if profile.spread > _NOISY:
        remarks.append(
            f"Steps of the profile differ by {profile.spread:.0%} on one device, which is planned"
            " as workers that are late by chance. If it was other work on that machine, time it"
            " again."
        )
    for cluster in request.clusters:
        link = with_windows(cluster).link
        bytes_per_s = link.connection_bytes_per_s(cluster.between_racks_s)
        if bytes_per_s < link.bytes_per_s:
            whose = "" if cluster.link.window_bytes else " as Linux has it, which is assumed here,"
            remarks.append(
                f"A window of {link.window_bytes} bytes{whose} lets a connection carry"
                f" {display_rate(rounded(8 * bytes_per_s))} of"
                f" {display_rate(link.rate_bit_per_s or math.inf)}: round trip x rate is more."
                " A cluster file may say `window`; `offbeat doctor --write` measures it."
            )
            break
    remarks += [
        f"{cluster.workers} workers share {cluster.cores} cores, so computing takes"
        f" {setting.crowding:.2g} times as long as alone."
        for cluster in request.clusters
        if (setting := setting_of(profile, cluster)).crowding > 1
    ]
    remarks += dict.fromkeys(f"{one.strategy}: {one.note}." for one in predictions if one.note)
    if too_large := dict.fromkeys(one.strategy for one in predictions if not one.fits):
        limit = memory_text(profile.device_bytes)
        remarks.append(f"{', '.join(too_large)}: does not fit into {limit}.")
    if endless := dict.fromkeys(one.strategy for one in predictions if one.never_ends):
        remarks.append(
            f"{', '.join(endless)}: such a run never ends, since workers die again before it has"
            " made up for the death before."
        )
    if profile.devices > 1:
        remarks.append(
            f"A worker is a node of {profile.devices} devices that divide the model by FSDP; its"
            " link is the node's, and memory is a device's."
        )
        if node_bytes_per_s(profile.device) is None:
            remarks.append(
                f"Nothing is known of what connects {profile.device}:"
                f" {PCIE_BYTES_PER_S / 1e9:g} GB/s between two of them are assumed, as over PCIe."
            )
    remarks.append(
        "A prediction is of time for a step: how many steps a strategy needs to a target only"
        " `offbeat compare` tells."
        if request.to_target is None
        else request.to_target.describe()
    )
    return [*remarks, *_earlier_at_target(plan)]


def _earlier_at_target(plan: Plan) -> Iterator[str]:
    """Where another strategy than the recommended one comes to the target first."""
    for workers, rate in sorted({(one.workers, one.rate_bit_per_s) for one in plan.predictions}):
        ones, best = plan.at(workers, rate), plan.best(workers, rate)
        times = [
            (one.time_to_target_s, one.strategy)
            for one in ones
            if one.time_to_target_s and one.is_eligible
        ]
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


def _how_sure(predictions: Sequence[StepPrediction]) -> Iterator[str]:
    """For each sentence, of which strategies it is true, and on how many clusters if not on all."""
    found: dict[str, Counter[str]] = {}
    clusters = Counter(one.strategy for one in predictions)
    for one in predictions:
        if one.strategy != ALONE:
            found.setdefault(one.how_sure, Counter())[one.strategy] += 1
    for words, times in found.items():
        names = [
            name if number == clusters[name] else f"{name} on {number} of {clusters[name]} clusters"
            for name, number in times.items()
        ]
        yield f"How sure: {', '.join(names)}: {words}."


def memory_text(num_bytes: float) -> str:
    """`1.5 GB`."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
