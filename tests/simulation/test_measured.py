"""What strategies would take on what a run has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.gradients.collective_choice import probe_pairs
from offbeat.simulation.measured import MeasuredRun, Ports, predict, unlike_ports
from offbeat.simulation.training import TensorProfile
from offbeat.simulation.virtual import VirtualCluster, VirtualLink, VirtualRacks
from offbeat.strategies.base import Strategy

pytestmark = pytest.mark.usefixtures("as_much_as_users_send")

RATE = 125e6


def run_of(
    computed_s: Sequence[Sequence[float]], *, rate: float = RATE, ports: Ports | None = None
) -> MeasuredRun:
    link = LinkCost(alpha_s=1e-4, beta_s_per_byte=1 / rate)
    seconds = np.array(computed_s)
    mean_s = float(seconds.mean())
    return MeasuredRun(
        tensors=[TensorProfile(num_elements=250_000, ready=1 - n / 10) for n in range(10)],
        forward_s=mean_s / 3,
        backward_s=mean_s / 2,
        optimizer_s=mean_s / 6,
        computed_s=seconds,
        network=NetworkCosts(messages=link, dense=link, select_s_per_element=1e-9),
        copy_s_per_byte=0.0,
        multiply_s_per_element=0.0,
        ports=ports,
    )


def test_allreduce_takes_what_computing_and_the_links_take() -> None:
    """10 MB among 4 ranks at 125 MB/s: 120 ms on a ring, of which some hide behind 5 ms of
    backward.
    """
    run = run_of([[0.01] * 4] * 20)
    step_s = predict(offbeat.AllReduce(), run).step_s
    exchange_s = 2 * 3 / 4 * 10e6 / RATE
    assert exchange_s < step_s < exchange_s + 0.01 + 20 * 1e-4


def test_on_fast_links_allreduce_takes_what_the_slowest_rank_computes() -> None:
    late = [[0.01, 0.01, 0.01, 0.01 + 0.02 * (row % 2)] for row in range(20)]
    step_s = predict(offbeat.AllReduce(), run_of(late, rate=1e12)).step_s
    assert step_s == pytest.approx(0.02, rel=0.15)
    # Who averages rarely waits less: for the sum over ten steps, and not for each.
    steady = [[0.01, 0.03] if row % 2 else [0.03, 0.01] for row in range(20)]
    run = run_of(steady, rate=1e12)
    assert predict(offbeat.AllReduce(), run).step_s == pytest.approx(0.03, rel=0.1)
    assert predict(offbeat.LocalSGD(), run, period=10).step_s == pytest.approx(0.02, rel=0.1)


def test_fewer_bytes_are_predicted_to_take_less() -> None:
    run = run_of([[0.01] * 4] * 20, rate=12.5e6)
    dense, few = predict(offbeat.AllReduce(), run).step_s, predict(offbeat.GTopK(), run).step_s
    assert few < dense / 10


def test_gradients_of_half_precision_are_half_as_long_and_weights_that_are_averaged_are_not() -> (
    None
):
    whole = run_of([[0.01] * 4] * 20, rate=RATE / 10)
    half = replace(whole, dtype=torch.bfloat16)
    local = offbeat.LocalSGD(period=1, optimizer_state="local")
    assert predict(offbeat.AllReduce(), half).step_s == pytest.approx(
        predict(offbeat.AllReduce(), whole).step_s / 2, rel=0.05
    )
    assert predict(local, half).step_s == pytest.approx(predict(local, whole).step_s, rel=0.05)


def test_averages_beside_training_come_as_often_as_links_carry_them() -> None:
    """Of 10 MB, half of which travel: in 125 MB/s within a step of 200 ms, and else in several."""
    found = [
        predict(offbeat.WAGMA(), run_of([[0.2] * 4] * 20, rate=rate)).exchanges
        for rate in (RATE, RATE / 10, RATE / 100)
    ]
    assert found[0] > 0.9
    assert found[1] < found[0] / 2
    assert found[2] < found[1] / 2


@pytest.mark.parametrize(
    ("strategy", "period"), [(offbeat.AllReduce(), 1), (offbeat.LocalSGD(period=10), 10)]
)
def test_exchanges_are_counted_from_the_step_on_with_which_a_prediction_begins(
    strategy: Strategy, period: int
) -> None:
    found = predict(strategy, run_of([[0.2] * 4] * 20), period=period).exchanges
    assert found == pytest.approx(1 / period, rel=0.5)


# Unlike links

FAST = VirtualLink(latency_s=1e-4, bytes_per_s=RATE)
SLOW = VirtualLink(latency_s=1e-3, bytes_per_s=RATE / 10)


def probed(links: Sequence[VirtualLink], racks: VirtualRacks | None = None) -> Ports | None:
    """What ranks behind `links` find."""
    num_ranks = len(links)
    works = [probe_pairs(rank, num_ranks) for rank in range(num_ranks)]
    found = VirtualCluster(num_ranks, link=links, racks=racks).run(works)
    pairs = {
        (source, rank): cost for rank in range(num_ranks) for source, cost in found[rank].items()
    }
    return unlike_ports(pairs, num_ranks)


def rates(ports: Ports) -> list[float]:
    return [1 / cost.beta_s_per_byte for cost in ports.costs]


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_is_found(world_size: int, slow: int) -> None:
    links = [FAST] * world_size
    links[slow] = SLOW
    ports = probed(links)
    assert ports is not None
    assert ports.racks is None
    expected = [RATE / 10 if rank == slow else RATE for rank in range(world_size)]
    assert rates(ports) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("rack_of", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2)])
def test_islands_with_a_slow_line_between_are_found(rack_of: tuple[int, ...]) -> None:
    racks = VirtualRacks(rack_of=rack_of, bytes_per_s=RATE / 10, latency_s=5e-3)
    ports = probed([FAST] * len(rack_of), racks)
    assert ports is not None
    assert ports.racks is not None
    assert ports.racks.rack_of == rack_of
    assert ports.racks.bytes_per_s == pytest.approx(RATE / 10, rel=0.1)
    assert ports.racks.latency_s == pytest.approx(5e-3, rel=0.1)
    assert rates(ports) == pytest.approx([RATE] * len(rack_of), rel=0.1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_links_that_are_alike_are_said_once(world_size: int) -> None:
    assert probed([FAST] * world_size) is None


def test_what_islands_do_not_explain_is_taken_to_be_as_slow_as_the_slowest() -> None:
    """Between two islands, a rank that is slow itself."""
    racks = VirtualRacks(rack_of=(0, 0, 0, 1, 1, 1), bytes_per_s=RATE / 10)
    assert probed([FAST, SLOW, FAST, FAST, FAST, FAST], racks) is None


def seconds(strategy: Any, ports: Ports | None) -> float:
    run = run_of([[0.01] * 4] * 20, rate=RATE / 10, ports=ports)
    return predict(strategy, run).step_s


def test_what_messages_pass_is_what_counts() -> None:
    one_slow = probed([FAST, FAST, FAST, SLOW])
    apart = probed([FAST] * 4, VirtualRacks(rack_of=(0, 0, 1, 1), bytes_per_s=RATE / 10))
    tree, gather = (
        offbeat.GTopK(density=0.1, warmup=None, collective=name) for name in ("tree", "all_gather")
    )
    for ports in (one_slow, apart):
        # Of two rounds there and back again, one is between fast ranks.
        assert seconds(tree, ports) < 0.7 * seconds(tree, None)
        # A ring is as slow as its slowest hop.
        dense = seconds(offbeat.AllReduce(), ports)
        assert dense == pytest.approx(seconds(offbeat.AllReduce(), None))
    # Messages of two ranks pass the line at once.
    assert seconds(gather, apart) > 1.3 * seconds(gather, None)


def test_unlike_links_are_put_into_words() -> None:
    run = run_of([[0.01] * 4], rate=RATE / 10, ports=probed([FAST, FAST, SLOW, FAST]))
    assert run.links() == "links carry 100 Mbit/s at rank 2, up to 10 times as much at others"
    racks = VirtualRacks(rack_of=(0, 0, 1, 1), bytes_per_s=RATE / 10)
    run = run_of([[0.01] * 4], rate=RATE / 10, ports=probed([FAST] * 4, racks))
    assert run.links() == "links carry 100 Mbit/s between islands of ranks, (0, 0, 1, 1)"
