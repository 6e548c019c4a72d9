"""From measured costs to seconds a step and to plain words, and to a cluster description for
`offbeat plan` and the lab. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from offbeat.arithmetic.costs import MESSAGE_S, LinkCost, NetworkCosts, cheapest
from offbeat.collectives import gtopk_tree
from offbeat.errors import ConfigError
from offbeat.gradients.collective_choice import BucketKind, CheapestCollective
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.cluster.quantities import display_duration, display_rate
from offbeat_lab.doctor.measure import Measurement
from offbeat_lab.doctor.pairs import PairLink

USUAL_SIZES = (1_000_000, 25_000_000, 100_000_000)
USUAL_DENSITY = 0.001

_FLOAT_BYTES = 4
_WORTH_RATIO = 2.0  # half of the bytes is what DDP's own fp16 hook saves
_WORTH_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Expected seconds of one step's exchange, if nothing of it hides behind the backward pass.

    Attributes:
        num_parameters: of the model, in float32.
        costs_s: by collective: "dense" (DDP), and gTop-k's "reduce_scatter", "all_gather" and
            "tree".
        best: the cheapest of those that gTop-k chooses among by itself, dense included.
        stay_on_ddp: whether the best gains too little over dense to be worth an approximation.
    """

    num_parameters: int
    costs_s: dict[str, float]
    best: str
    stay_on_ddp: bool


def predict(
    network: NetworkCosts, *, world_size: int, num_parameters: int, density: float = USUAL_DENSITY
) -> Prediction:
    """What one step's exchange of a model costs on `network`, by the alpha-beta model.

    Args:
        network: as measured.
        world_size: number of workers, >= 1.
        num_parameters: of the model, >= 1.
        density: share of the gradient that gTop-k sends, 0 < density <= 1.
    """
    k = max(1, round(density * num_parameters))
    bucket = BucketKind(
        num_elements=num_parameters,
        element_bytes=_FLOAT_BYTES,
    )
    choice = CheapestCollective(network, world_size=world_size)
    costs_s = choice.costs_s(bucket, k)
    best = cheapest(costs_s)
    tree_s = gtopk_tree.cost_s(
        world_size=world_size, k=k, pair_bytes=bucket.pair_bytes(k), network=network
    )
    saved_s = costs_s["dense"] - costs_s[best]
    return Prediction(
        num_parameters=num_parameters,
        costs_s=costs_s | {"tree": tree_s + network.select_s_per_element * num_parameters},
        best=best,
        stay_on_ddp=saved_s < _WORTH_S or costs_s["dense"] < _WORTH_RATIO * costs_s[best],
    )


def advise(prediction: Prediction, *, network: NetworkCosts, world_size: int) -> str:
    """One model's choice in a sentence or two."""
    size, dense_s = display_count(prediction.num_parameters), prediction.costs_s["dense"]
    if prediction.stay_on_ddp:
        return (
            f"{size} parameters: stay on DDP. Its all-reduce takes {display_seconds(dense_s)} a"
            " step, and "
            + (
                "gTop-k would save"
                f" {display_seconds(dense_s - prediction.costs_s[prediction.best])}, too little for"
                " sending less."
                if prediction.best != "dense"
                else "sending less would take longer."
            )
        )
    best_s = prediction.costs_s[prediction.best]
    return (
        f"{size} parameters: gTop-k ({prediction.best}) takes {display_seconds(best_s)} a step"
        f" where DDP's all-reduce takes {display_seconds(dense_s)}, {dense_s / best_s:.2g} times"
        f" less; {_bottleneck(network, world_size, prediction)}."
    )


QUESTION = (
    "All this is of the exchange of so many elements alone. DDP hides as much of it as its backward"
    " pass lasts, so where that is the longer of the two, DDP is the better choice whatever stands"
    " above. For your model: offbeat plan --script train.py --cluster cluster.toml, which --write"
    " writes, or --profile here."
)
"""What the advice is about, and what answers the other question."""


def verdict(predictions: Sequence[Prediction]) -> str:
    """All models together, at least one of them, in one sentence."""
    stay = [display_count(one.num_parameters) for one in predictions if one.stay_on_ddp]
    leave = [display_count(one.num_parameters) for one in predictions if not one.stay_on_ddp]
    if not leave:
        return (
            "Stay on DDP, going by the exchange alone: between these workers its all-reduce is"
            f" cheap enough for {_and(stay)} parameters."
        )
    if not stay:
        return (
            f"Try gTop-k for {_and(leave)} parameters, going by the exchange alone: it takes less"
            " than half of the all-reduce's time."
        )
    return (
        f"Stay on DDP for {_and(stay)} parameters; try gTop-k for {_and(leave)}, going by the"
        " exchange alone."
    )


def display_link(link: LinkCost) -> str:
    """`52 us a message, 940 Mbit/s`."""
    return (
        f"{display_seconds(link.alpha_s)} a message,"
        f" {display_rate(_three_digits(8 / link.beta_s_per_byte))}"
    )


def display_seconds(duration_s: float) -> str:
    """Three digits in a fitting unit."""
    return display_duration(_three_digits(duration_s))


def display_count(number: int) -> str:
    """`25 M`, `100 k`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bottleneck(network: NetworkCosts, world_size: int, prediction: Prediction) -> str:
    messages_s = 2 * (world_size - 1) * network.dense.alpha_s
    if messages_s > prediction.costs_s["dense"] / 2:
        return "most of that is the latency of messages, not the bytes"
    return "most of that is bytes on the wire"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


_APART: Final = 1.5
"""A worker whose rate is so many times lower or higher than most workers' has a link of its own."""


def cluster_of(measurement: Measurement) -> Cluster:
    """The cluster that was measured.

    A worker's rate is what the best of its links carried while both ends computed, and no more than
    gloo's all-reduce reached: a rate that a busy worker cannot use is none. Latencies are those of
    workers that compute nothing, since else they say how busy a processor is.

    Raises:
        ConfigError: nothing was measured between workers.
    """
    pairs = measurement.busy_pairs or measurement.pairs
    if not pairs:
        raise ConfigError(
            "nothing was measured between workers; start this command on every host as you start"
            " training, or give --workers"
        )
    by_worker = [
        [pair.cost for pair in pairs if rank in (pair.first, pair.second)]
        for rank in range(measurement.world_size)
    ]
    dense_rate = 1 / max(measurement.network.dense.beta_s_per_byte, 1e-13)
    rates = [1 / min(cost.beta_s_per_byte for cost in costs) for costs in by_worker]
    # The all-reduce waits for the slowest worker, so it says something of that one alone.
    slowest = min(range(len(rates)), key=lambda rank: rates[rank])
    rates = [
        min(rate, dense_rate) if rank == slowest or rate < _APART * rates[slowest] else rate
        for rank, rate in enumerate(rates)
    ]
    usual = median_low(rates)
    links = [
        LinkSpec(
            rate_bit_per_s=_rounded(
                8 * (usual if usual / _APART < rate < usual * _APART else rate)
            ),
            latency_s=_rounded(
                max(0.0, median_low(_alphas_s(measurement.pairs, rank)) - MESSAGE_S), digits=2
            ),
            window_bytes=measurement.window_bytes,
        )
        for rank, rate in enumerate(rates)
    ]
    rates_bit_per_s = [link.rate_bit_per_s for link in links]
    common = next(link for link in links if link.rate_bit_per_s == _rounded(8 * usual))
    computes_on_shared_cores = measurement.on_one_host and measurement.device == "cpu"
    return Cluster(
        name="probed",
        workers=measurement.world_size,
        link=common,
        links={
            rank: link
            for rank, link in enumerate(links)
            if rates_bit_per_s[rank] != common.rate_bit_per_s
        },
        cores=measurement.hosts[0].num_cores if computes_on_shared_cores else None,
    )


def _alphas_s(pairs: Sequence[PairLink], rank: int) -> list[float]:
    return [pair.cost.alpha_s for pair in pairs if rank in (pair.first, pair.second)]


def _rounded(value: float, *, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")
