"""From measured costs to a cluster description for `offbeat plan` and the lab. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Final

from offbeat.arithmetic.costs import MESSAGE_S, LinkCost
from offbeat.errors import ConfigError
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.cluster.quantities import display_duration, display_rate
from offbeat_lab.doctor.measure import Measurement
from offbeat_lab.doctor.pairs import PairLink


def display_link(link: LinkCost) -> str:
    """`52 us a message, 940 Mbit/s`."""
    return (
        f"{display_seconds(link.alpha_s)} a message,"
        f" {display_rate(_three_digits(8 / link.beta_s_per_byte))}"
    )


def display_seconds(duration_s: float) -> str:
    """Three digits in a fitting unit."""
    return display_duration(_three_digits(duration_s))


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
