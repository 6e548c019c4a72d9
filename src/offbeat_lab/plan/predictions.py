"""What a step takes under each strategy on a cluster, what binds it, what memory it needs, and how
sure that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offbeat.errors import ConfigError
from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import ALONE
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.plan.bands import Band, band_of
from offbeat_lab.plan.methods.of_strategies import method_of
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.simulation import Setting

USUAL_WINDOW_BYTES: Final = 3 << 20
"""What Linux lets be under way on a connection, as it comes: half of `tcp_rmem`'s 6 MiB."""

_SILENCE_S, _RESTART_S, _STEPS_BETWEEN_CHECKPOINTS = 5.0, 60.0, 100
_MODEL_COPIES = 2.0  # weights, gradients
_USABLE: Final = 0.92
"""Of a device's memory: the rest is the driver's, and between what was allocated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """One strategy on one cluster.

    Attributes:
        strategy: with its options, as on the command line.
        workers: how many.
        rate_bit_per_s: of the links.
        step_s: mean step of a worker.
        low_s, high_s: the band in which it is expected.
        exposed: which part of the simulated step is exchange that nothing hides.
        overlapped: which part of it is exchange beside computing.
        samples_per_s: of all workers.
        bytes_per_step: that a worker sends.
        share_of_ideal: of the speed of workers that exchange nothing.
        binds: what most of the time besides the ideal goes to; where that is less than 5% of the
            step "compute", or "cores" where workers that share them slow each other down.
        memory_bytes: of a device, for weights, gradients, moments, what the strategy keeps, and
            activations where they are known.
        fits: whether its device has so much; true where nobody knows what it has.
        lost_to_deaths: share of the time that deaths of workers cost.
        goodput_per_s: samples a second of all workers, with what deaths cost.
        how_sure: what predictions like this one were held against, in words.
        checked_cells: how many of them there were; 0: none.
        checked_within: what most of them were off at most, as a share; None: there are none.
        by_events: whether every message was simulated.
        note: what should be known; empty: nothing.
        is_lower_limit: whether later steps take longer than those that were simulated, which end
            before the first averages do.
        time_to_target_s: as many steps as it took to a target, with what deaths cost; None: nobody
            measured how many, or it never ends.
        time_s: to the samples that are asked for, with what deaths cost; None: nobody asked, or it
            never ends.
        cost: of that time, in the price's money; None: there is no price, or no such time.
    """

    strategy: str
    workers: int
    rate_bit_per_s: float
    step_s: float
    low_s: float
    high_s: float
    exposed: float
    overlapped: float
    samples_per_s: float
    bytes_per_step: float
    share_of_ideal: float
    binds: str
    memory_bytes: float
    fits: bool
    lost_to_deaths: float
    goodput_per_s: float
    how_sure: str
    checked_cells: int
    checked_within: float | None
    by_events: bool
    note: str
    is_lower_limit: bool = False
    time_to_target_s: float | None = None
    time_s: float | None = None
    cost: float | None = None

    @property
    def is_eligible(self) -> bool:
        """Whether it may be recommended: it fits, comes to an end, and is no lower limit."""
        return self.fits and not (self.is_lower_limit or self.never_ends)

    @property
    def never_ends(self) -> bool:
        """Whether workers die before what the death before them has cost is made up for."""
        return self.lost_to_deaths >= 1


def check_spec(spec: str, workers: int) -> tuple[str, Strategy]:
    """The strategy called `spec`, such as "gtopk:density=0.01", and its name.

    Raises:
        ConfigError: there is no such strategy, or it cannot run with so many workers.
    """
    name, options = parse_spec(spec)
    recipe = build_strategy(name, options)
    recipe.check_world(workers)
    return name, recipe


def predict_step(spec: str, setting: Setting, band: Band | None = None) -> StepPrediction:
    """One strategy on one cluster.

    Args:
        spec: the strategy with its options.
        setting: the model on the cluster.
        band: as of `predict_recipe`.

    Raises:
        ConfigError: the strategy cannot run so, or cannot be predicted.
    """
    return predict_recipe(spec, *check_spec(spec, setting.world_size), setting, band)


def predict_recipe(
    label: str, name: str, recipe: Strategy, setting: Setting, band: Band | None = None
) -> StepPrediction:
    """One strategy on one cluster.

    Args:
        label: what it is called.
        name: of the strategy.
        recipe: with its options, which can run with so many workers.
        setting: the model on the cluster.
        band: what steps measure, as factors of simulated ones; None: as was found for such devices.

    Raises:
        ConfigError: the strategy cannot be predicted.
    """
    profile, cluster = setting.profile, setting.cluster
    _require_sense(label, name, recipe, profile)
    method = method_of(name, recipe)
    simulated = method.simulate(setting)
    # What an exchange costs a world of one is not a cost of exchanging.
    simulated_s = max(simulated.step_s, profile.compute_s)
    ideal_s = setting.ideal_s
    if name == ALONE or setting.world_size == 1:
        band = Band()
    elif band is None:
        band = band_of("gpu" if profile.on_gpu else "cpu")
    exchange = min(1.0, simulated.exchange_s / simulated_s)
    exposed = min(exchange, max(0.0, 1 - ideal_s / simulated_s))
    low_s, step_s, high_s = (
        factor.of(exposed=exposed, overlapped=exchange - exposed) * simulated_s
        for factor in (band.low, band.middle, band.high)
    )
    waiting_s = 0.0
    encode_s = min(setting.crowding * simulated.encode_s, max(0.0, step_s - ideal_s))
    if not setting.is_steady:
        waiting_s = method.waiting_s(setting, encode_s)
    exchange_s = max(0.0, step_s - ideal_s - encode_s - waiting_s)
    parts = {
        "encode": encode_s,
        "waiting": waiting_s,
        "alpha": simulated.alpha_share * exchange_s,
        "beta": (1 - simulated.alpha_share) * exchange_s,
    }
    largest = max(parts, key=lambda name: parts[name])
    pace = min(simulated.pace, 1 / profile.compute_s) * simulated_s / step_s
    samples_per_s = setting.world_size * profile.batch.batch_size * pace
    copies = _MODEL_COPIES + profile.moments + method.extra_bytes
    if profile.on_gpu:
        copies -= method.host_bytes
    states_bytes = copies * profile.num_bytes + simulated.kept_bytes + profile.frozen_bytes
    memory_bytes = states_bytes / profile.devices + profile.activation_bytes
    if profile.devices > 1:  # what is gathered of two layers, while the next one is
        memory_bytes += 2 * profile.element_bytes * max(one.num_elements for one in profile.tensors)
    lost = _lost_to_deaths(cluster, step_s, survives=recipe.survives_death)
    rate_bit_per_s = cluster.link.rate_bit_per_s or max(cluster.limited_rates)
    cells, within, words = _how_sure(profile, band, name, setting)
    return StepPrediction(
        strategy=label,
        workers=setting.world_size,
        rate_bit_per_s=rate_bit_per_s,
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        exposed=exposed,
        overlapped=exchange - exposed,
        samples_per_s=samples_per_s,
        bytes_per_step=simulated.bytes_per_step,
        share_of_ideal=pace / setting.ideal_pace,
        binds=largest
        if parts[largest] > 0.05 * step_s
        else "cores"
        if setting.crowding > 1
        else "compute",
        memory_bytes=memory_bytes,
        fits=not profile.device_bytes or memory_bytes <= _USABLE * profile.device_bytes,
        lost_to_deaths=lost,
        goodput_per_s=(1 - lost) * samples_per_s,
        how_sure=words,
        checked_cells=cells,
        checked_within=within,
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


def _require_sense(label: str, name: str, recipe: Strategy, profile: ModelProfile) -> None:
    """Raise `ConfigError` where a strategy cannot train such a model."""
    if profile.devices > 1 and name != ALONE and not recipe.trains_islands:
        raise ConfigError(
            f"{label} does not train a model that the devices of a node divide (--island); leave it"
            " out"
        )
    if profile.element_bytes == 2 and name in ("ddp-fp16", "ddp-bf16"):
        raise ConfigError(f"gradients are in bfloat16, and {label} would halve them; leave it out")


def _how_sure(
    profile: ModelProfile, band: Band, name: str, setting: Setting
) -> tuple[int, float | None, str]:
    """How many cells like this one were checked, what most of them were off at most, and both in
    words.
    """
    workers, cluster = setting.world_size, setting.cluster
    rate_bit_per_s = cluster.between_workers_bit_per_s
    own = profile.checked_like(
        workers=workers,
        rate_bit_per_s=rate_bit_per_s,
        latency_s=cluster.most_latency_s,
        strategy=name,
    )
    seen = band.like(name, workers, rate_bit_per_s)
    guess = ""
    if "batches" in profile.unmeasured:
        guess = "; computing is derived from the device's arithmetic, and may be off by more"
    if own:
        within = max(one.worst_error for one in own)
        return len(own), within, f"checked on {_cells(len(own))} like yours, within {within:.0%}"
    if seen:
        cells, within = sum(one.cells for one in seen), max(one.within for one in seen)
        words = f"checked on {_cells(cells)} like yours with other models, most of them within"
        return cells, within, f"{words} {within:.0%}{guess}"
    return 0, None, f"nothing like this was ever measured{guess}"


def _cells(number: int) -> str:
    return f"{number} cell{'s' * (number > 1)}"


def setting_of(profile: ModelProfile, cluster: Cluster) -> Setting:
    """`profile` on `cluster`, its passes padded if the cluster says so, over connections with a
    window as hosts usually have it where none is known.
    """
    if cluster.step_s is not None:
        profile = profile.padded(cluster.step_s)
    return Setting(profile=profile, cluster=with_windows(cluster))


def with_windows(cluster: Cluster, window_bytes: int = USUAL_WINDOW_BYTES) -> Cluster:
    """`cluster` whose connections have such a window where none is known."""

    def with_one(link: LinkSpec) -> LinkSpec:
        return link.model_copy(update={"window_bytes": link.window_bytes or window_bytes})

    links = {worker: with_one(link) for worker, link in cluster.links.items()}
    return cluster.model_copy(update={"link": with_one(cluster.link), "links": links})
