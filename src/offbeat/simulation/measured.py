"""How long a step takes under a strategy, on the ranks and links that a run has just measured.

    the ranks of a virtual cluster take the steps that were seen, as long as each rank computed
    in each of them
    links and dense operations cost what was measured between the ranks, each rank's and each line
        between islands of ranks its own where they are unlike
    callbacks are the strategy's own, and what they copy, select and multiply takes what that was
    measured to take

What ranks compute for is a table of observed steps, so a rank that is late steadily and one that is
late by chance both are late in the simulation as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.arithmetic.costs import MESSAGE_S, LinkCost, NetworkCosts
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.value_codecs import ValueCodec
from offbeat.simulation.training import (
    Buildable,
    Machine,
    SimulatedRank,
    Timeline,
    carry_out,
    fused,
    with_lead_in,
)
from offbeat.simulation.virtual import (
    DeadlockError,
    DenseLinks,
    VirtualCluster,
    VirtualLink,
    VirtualRacks,
)
from offbeat.transport.driver import Driver, Ticket, Wrapper
from offbeat.transport.operations import (
    Collective,
    Operation,
    Payload,
    Recv,
    RecvAny,
    Send,
    Sleep,
)

LATER: Final = 10_000
"""A step behind everything that is done in the first steps only."""

UNLIKE: Final = 1.5
"""How many times as fast one link is as another for them to be unlike."""

USUAL_CODING_S: Final = 4e-9
"""Seconds in which an element is coded in few bits and read again: on one core of an AMD EPYC, 2 to
5 ns, by bits.
"""

_LEAST_STEPS, _LEAST_TENSORS, _MOST_TENSORS = 20, 16, 512


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Timeline):
    """What was measured of a run. Times are the mean of all ranks, without waiting for peers;
    whatever is neither backward pass nor optimizer's step is in those of the forward pass.

    Attributes:
        computed_s: what each rank computed for in each step that was seen, shape (steps, ranks).
        network: what messages and dense operations cost between the slowest ranks.
        ports: of each rank, where they are unlike.
        copy_s_per_byte: copying a gradient into a bucket, or out of it.
        multiply_s_per_element: multiplying a matrix, for each element and each column of the thin
            matrix that it is multiplied by.
    """

    moments: int = 1
    computed_s: NDArray[np.float64]
    network: NetworkCosts
    copy_s_per_byte: float
    multiply_s_per_element: float
    ports: Ports | None = None

    @property
    def world_size(self) -> int:
        return int(self.computed_s.shape[1])

    def links(self) -> str:
        """What they carry, in words."""
        said = f"links carry {8e-6 / self.network.dense.beta_s_per_byte:,.0f} Mbit/s"
        if self.ports is None:
            return said
        betas = [cost.beta_s_per_byte for cost in self.ports.costs]
        if self.ports.racks is not None:
            return f"{said} between islands of ranks, {self.ports.racks.rack_of}"
        slowest = betas.index(max(betas))
        return (
            f"{said} at rank {slowest}, up to {max(betas) / min(betas):.2g} times as much at others"
        )


class Ports(NamedTuple):
    """Unlike links.

    Attributes:
        costs: of messages to and from each rank.
        racks: islands of ranks with a slower line to all others; None: there are none.
    """

    costs: Sequence[LinkCost]
    racks: VirtualRacks | None = None


def unlike_ports(costs: Mapping[tuple[int, int], LinkCost], world_size: int) -> Ports | None:
    """What explains the `costs` of messages from one rank to another, of which those over the same
    distance were under way at once. None: the links are much alike, or nothing simple explains
    them.

    A rank's link is as fast as the fastest message over it. Where messages between fast ranks are
    slow, the ranks between which they are not are an island, whose line carries as much as all
    messages over it did at once.
    """
    rates = {pair: 1 / cost.beta_s_per_byte for pair, cost in costs.items()}
    if not rates or max(rates.values()) < UNLIKE * min(rates.values()):
        return None
    own = [max(_of(rank, rates)) for rank in range(world_size)]
    islands, is_divided = list(range(world_size)), False
    for (source, target), rate in rates.items():
        if UNLIKE * rate < min(own[source], own[target]):
            is_divided = True
        else:
            ours, theirs = islands[source], islands[target]
            islands = [ours if island == theirs else island for island in islands]
    racks, latencies_s = None, {pair: cost.alpha_s for pair, cost in costs.items()}
    if is_divided:
        inside = {pair for pair in costs if islands[pair[0]] == islands[pair[1]]}
        if len(inside) == len(costs):
            return None
        carried: dict[tuple[int, int], list[float]] = defaultdict(list)
        for source, target in costs.keys() - inside:
            carried[islands[source], (target - source) % world_size].append(rates[source, target])
        numbers = {island: number for number, island in enumerate(dict.fromkeys(islands))}
        later_s = median(latencies_s[pair] for pair in costs.keys() - inside)
        latencies_s = {pair: latencies_s[pair] for pair in inside}
        racks = VirtualRacks(
            rack_of=tuple(numbers[island] for island in islands),
            # Whether messages share a line or wait for each other: the last one is there after all.
            bytes_per_s=max(len(at_once) * min(at_once) for at_once in carried.values()),
            latency_s=max(0.0, later_s - median(latencies_s.values())),
        )
    ports = [
        LinkCost(alpha_s=min(_of(rank, latencies_s)), beta_s_per_byte=1 / own[rank])
        for rank in range(world_size)
    ]
    return Ports(ports, racks)


def _of(rank: int, values: Mapping[tuple[int, int], float]) -> list[float]:
    """Of all pairs that have `rank`."""
    return [value for pair, value in values.items() if rank in pair]


class Predicted(NamedTuple):
    """What a strategy would do.

    Attributes:
        step_s: the mean step of all ranks, in seconds, when whatever is done in the first steps
            only is over.
        exchanges: those that end in a step, in the mean of all ranks and steps.
    """

    step_s: float
    exchanges: float


def predict(strategy: Buildable, run: MeasuredRun, *, period: int = 1) -> Predicted:
    """What the ranks of `run` would do with `strategy`.

    Args:
        strategy: that all ranks train with.
        run: as it was measured.
        period: steps after which exchanges repeat.
    """
    if not strategy.replicas_differ:
        # Ranks that wait for each other in every step are as fast as the slowest in each. If they
        # have dense operations only, one stands for all.
        with suppress(DeadlockError):
            return _simulate(strategy, run, period=period, num_ranks=1)
    return _simulate(strategy, run, period=period, num_ranks=run.world_size)


def _simulate(strategy: Buildable, run: MeasuredRun, *, period: int, num_ranks: int) -> Predicted:
    messages, dense = run.network.messages, run.network.dense
    # Messages weigh as much more as a byte of theirs takes longer than one of a dense operation.
    weight = messages.beta_s_per_byte / dense.beta_s_per_byte
    # Who stands for all ranks waits for the slowest.
    ports = run.ports if num_ranks > 1 else None
    costs = [messages] * num_ranks if ports is None else ports.costs
    racks = None if ports is None else ports.racks
    message_s = min(MESSAGE_S, *(cost.alpha_s for cost in costs))
    links = [
        VirtualLink(
            latency_s=cost.alpha_s - message_s,
            bytes_per_s=weight / cost.beta_s_per_byte,
            message_s=message_s,
        )
        for cost in costs
    ]

    def weighed(payload: Payload) -> float:
        return weight * len(payload)

    cluster = VirtualCluster(
        num_ranks,
        link=links,
        racks=racks and replace(racks, bytes_per_s=weight * racks.bytes_per_s),
        weightless=True,
        num_bytes=weighed,
        dense=DenseLinks(round_s=max(0.0, dense.alpha_s - messages.alpha_s), ranks=run.world_size),
    )
    first = -(-LATER // period) * period
    steps = range(first, first + -(-max(_LEAST_STEPS, len(run.computed_s)) // period) * period)
    most_tensors = max(_LEAST_TENSORS, _MOST_TENSORS // num_ranks)
    timeline = replace(run, tensors=fused(run.tensors, most_tensors))
    machines = [_Machine(run, cluster, rank, steps) for rank in range(num_ranks)]
    programs = [one.rank.train(strategy, timeline, with_lead_in(steps)) for one in machines]
    carry_out(cluster, programs)
    return Predicted(
        step_s=float(np.mean([one.ended_s - one.begun_s for one in machines])) / len(steps),
        exchanges=float(np.mean([one.rank.exchanges for one in machines])),
    )


class _Alone(Wrapper):
    """The driver of a rank that stands for all `world_size` of them."""

    def __init__(self, inner: Driver, world_size: int) -> None:
        super().__init__(inner)
        self.world_size = world_size

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, Send | Recv | RecvAny):
            raise DeadlockError("nobody is there to send to, or to receive from")
        return super().start(operation, channel)


class _Machine(Machine):
    """One rank's device, as it was measured. What a strategy of layers or of shared samples would
    compute is not known.
    """

    shared = 0.2

    def __init__(self, run: MeasuredRun, cluster: VirtualCluster, rank: int, steps: range) -> None:
        self.begun_s = self.ended_s = 0.0
        driver: Driver = cluster.drivers[rank]
        computed_s = run.computed_s[:, rank]
        if cluster.world_size < run.world_size:
            driver, computed_s = _Alone(driver, run.world_size), run.computed_s.max(axis=1)
        self.rank = SimulatedRank(driver, self)
        self._run, self._cluster, self._steps = run, cluster, steps
        self._factors = computed_s / (run.forward_s + run.backward_s + run.optimizer_s)

    def step_begins(self, step: int) -> Collective[None]:
        if step == self._steps.start:
            self.begun_s = self._cluster.now_s
        yield Sleep(0.0)

    def computing(self, step: int, seconds: float) -> Collective[None]:
        yield Sleep(seconds * float(self._factors[step % len(self._factors)]))

    def copying_s(self, num_bytes: float) -> float:
        return self._run.copy_s_per_byte * num_bytes

    def selecting_s(self, num_elements: int, k: int, codec: TopKCodec) -> float:
        network = self._run.network  # whose costs are what a simulated rank measures again
        return network.select_s_per_element * num_elements + network.entries_s(k, read_again=0)

    def coding_s(self, num_elements: int, values: ValueCodec) -> float:
        return USUAL_CODING_S * num_elements

    def multiplying_s(self, num_elements: int, rank: int) -> float:
        return self._run.multiply_s_per_element * rank * num_elements

    def step_ended(self, step: int) -> None:
        if step == self._steps[-1]:
            self.ended_s = self._cluster.now_s
