"""A strategy's own callbacks, with tensors without content under a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
import torch
from typing_extensions import override

import offbeat
from conformance_support.lent import lent
from offbeat import TopKCodec
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.weightless import WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.collectives.dense import dense_all_reduce
from offbeat.errors import WireError
from offbeat.simulation.training import REMEMBERED_STEPS, carry_out, with_lead_in
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.transport.driver import Driver
from offbeat.transport.operations import Collective, Sleep
from offbeat_lab.plan.methods.planned_rank import Common, PlannedRank, PlannedTimeline
from offbeat_lab.plan.profile import Layer

NUM_ELEMENTS, MIB = 1 << 20, 1 << 20


@dataclass(frozen=True)
class Tensor:
    ready: float
    num_elements: int = NUM_ELEMENTS
    rows: int = 1


TIMELINE = PlannedTimeline(
    tensors=[Tensor(1.0), Tensor(0.5)],
    forward_s=1.0,
    backward_s=2.0,
    optimizer_s=0.25,
    moments=1,
    batch_size=12,
)


class Device:
    """Computes as long as it is told to, and copies a gigabyte a second."""

    shared = 0.0

    def __init__(self, cluster: VirtualCluster, rank: int, common: Common, speed: float) -> None:
        self.cluster, self.rank, self.common, self.speed = cluster, rank, common, speed
        self.ends_s: dict[int, float] = {}
        self.beside_s = 0.0
        self.begun: list[tuple[float, float]] = []

    def batch_begins(self, done: float) -> None:
        self.begun.append((done, self.cluster.now_s))

    def asking(self) -> Collective[None]:
        yield Sleep(2**-10)

    def step_begins(self, step: int) -> Collective[None]:
        yield Sleep(0.0)

    def forward_ended(self, step: int, size: float, coming_s: float) -> Collective[None]:
        yield Sleep(0.0)

    def computing(self, step: int, seconds: float) -> Collective[None]:
        yield Sleep(seconds / self.speed)

    def copying_s(self, num_bytes: float) -> float:
        return num_bytes / 1e9

    def publishing_s(self, num_bytes: float) -> float:
        return num_bytes / 2e9

    def adding_s(self, num_bytes: float) -> float:
        return num_bytes / 1e9

    def work_beside(self, seconds: float) -> None:
        self.beside_s += seconds

    def selecting_s(self, num_elements: int, k: int, codec: TopKCodec) -> float:
        return 0.125

    def multiplying_s(self, num_elements: int, rank: int) -> float:
        return 0.0

    def preconditioning_s(self, num_products: float) -> float:
        return num_products / 1e12

    def inverting_s(self, dim: int) -> float:
        return 0.5

    def step_ended(self, step: int) -> None:
        self.ends_s[step] = self.cluster.now_s

    def lay_out(self, wire: Wire) -> WeightlessWire:
        return WeightlessWire(wire=wire, num_places=wire.num_elements)


def trained(
    strategy: Strategy,
    steps: range,
    *,
    workers: int = 2,
    link: VirtualLink | None = None,
    timeline: PlannedTimeline = TIMELINE,
    speeds: Sequence[float] = (1.0,) * 4,
) -> tuple[list[PlannedRank], VirtualCluster]:
    cluster = VirtualCluster(workers, link=link, weightless=True)
    common = Common(workers)
    ranks = [
        PlannedRank(driver, Device(cluster, driver.rank, common, speeds[driver.rank]))
        for driver in cluster.drivers
    ]
    taken = steps if strategy.shares_samples else with_lead_in(steps)
    carry_out(cluster, [rank.train(strategy, timeline, taken) for rank in ranks])
    return ranks, cluster


@dataclass(frozen=True, kw_only=True)
class Own(Strategy):
    """A strategy that nobody knows but this test: it sums a tensor when half of the backward pass
    is over, and waits for the sum before the step.
    """

    name = "own"
    seen: list[tuple[str, float]] = field(default_factory=list)

    def build(self, context: Context) -> Sequence[Callback]:
        return [_Summing(context.driver, self.seen)]


class _Summing(Callback):
    def __init__(self, driver: Driver, seen: list[tuple[str, float]]) -> None:
        self.driver, self.seen = driver, seen

    def note(self, what: str) -> None:
        if self.driver.rank == 0:
            self.seen.append((what, self.driver.now_s(1)))

    @override
    def on_forward_begins(self, *, trains: bool) -> None:
        self.note("forward")

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        self.note(f"gradient {index}")
        if index == 1:
            vector = torch.empty(25_000_000, device="meta")  # 0.1 s there and 0.1 s back
            self.pending = self.driver.launch(dense_all_reduce(vector), 2)

    @override
    def on_before_step(self) -> None:
        self.note("backward is over")
        self.pending.wait()
        self.note("summed")

    @override
    def on_after_step(self) -> None:
        self.note("stepped")


def test_a_strategy_of_ones_own_gets_the_events_of_training_at_their_times() -> None:
    own = Own()
    trained(own, range(1), link=VirtualLink(bytes_per_s=1e8 / 3))  # 3 s for the sum
    assert own.seen == [
        ("forward", 0.0),
        ("gradient 1", 2.0),
        ("gradient 0", pytest.approx(3.1)),
        ("backward is over", pytest.approx(3.1)),
        ("summed", pytest.approx(5.2)),
        ("stepped", pytest.approx(5.45)),
    ]


def test_what_a_callback_raises_ends_the_simulation() -> None:
    class Failing(Callback):
        @override
        def on_after_step(self) -> None:
            raise WireError("as a damaged message does")

    class Strange(Own):
        def build(self, context: Context) -> Sequence[Callback]:
            return [Failing()]

    with pytest.raises(WireError, match="damaged"):
        trained(Strange(), range(1))


@pytest.mark.parametrize("kind", [offbeat.TopK, offbeat.EF21])
def test_entries_travel_as_numbers_and_selecting_takes_its_time(
    kind: type[offbeat.TopK | offbeat.EF21],
) -> None:
    strategy = lent(kind(density=0.01), replica_check_interval=0)
    ranks, cluster = trained(strategy, range(4))
    expected = ranks[0].machine
    assert isinstance(expected, Device)
    assert expected.ends_s[3] == pytest.approx(4 * (1.0 + 2.0 + 0.25 + 0.125))
    # An entry takes a value of 4 bytes and a gap of 1 or 2.
    entries = 0.01 * 2 * NUM_ELEMENTS
    assert 4 * 5 * entries < cluster.bytes_sent[0] < 4 * 6.1 * entries


@pytest.mark.parametrize(
    ("strategy", "num_peers"),
    [(offbeat.DPSGD(), 2), (offbeat.SGP(), 1), (offbeat.SGP(out_degree=2), 2)],
)
def test_vectors_are_published_once_and_added_by_each_who_receives_them(
    strategy: Strategy, num_peers: int
) -> None:
    ranks, cluster = trained(strategy, range(2), workers=4)
    num_bytes = 2 * NUM_ELEMENTS * 4
    assert ranks[0].encode_s == pytest.approx(2 * (0.5 + num_peers) * num_bytes / 1e9, rel=1e-3)
    assert cluster.bytes_sent[0] == pytest.approx(2 * num_peers * num_bytes, rel=1e-5)
    device = ranks[0].machine
    assert isinstance(device, Device)
    assert device.ends_s[1] == pytest.approx(2 * 3.25 + ranks[0].encode_s)


NUM_BYTES = 2 * NUM_ELEMENTS * 4
PUBLISHED_S = NUM_BYTES / 2e9
"""A model is that large, and takes that long to be published."""


def test_models_are_averaged_beside_training_by_the_threads_that_do_so_in_training() -> None:
    """Each rank asks one other in each step, and answers one in the mean, with whole models."""
    steps = range(10)
    ranks, cluster = trained(offbeat.ADPSGD(), steps, workers=4, link=VirtualLink(bytes_per_s=1e9))
    num_sent = sum(cluster.bytes_sent) / NUM_BYTES
    assert num_sent == pytest.approx(2 * 4 * len(steps), rel=0.15)  # asked at once: one declines
    assert round(num_sent) == pytest.approx(num_sent, abs=0.01)
    for rank in ranks:
        device = rank.machine
        assert isinstance(device, Device)
        # The first step publishes what it begins with.
        assert device.ends_s[9] == pytest.approx(10 * 3.25 + 11 * PUBLISHED_S)
    assert sum(rank.machine.beside_s for rank in ranks) == pytest.approx(  # type: ignore[attr-defined]
        num_sent * NUM_BYTES / 1e9, rel=1e-3
    )


@pytest.mark.parametrize(
    ("values", "element_bytes"), [("auto", 2), ("float32", 4)], ids=["rounded", "whole"]
)
def test_a_miniature_travels_as_the_model_that_it_stands_for(
    values: Literal["auto", "float32"], element_bytes: int
) -> None:
    """Two regions of a model, there and back, in each version."""
    strategy = offbeat.WAGMA(period=2, quorum=1.0, values=values)
    _, cluster = trained(strategy, range(4))
    assert cluster.bytes_sent[0] == pytest.approx(4 * 2 * NUM_ELEMENTS * element_bytes, rel=0.01)


def test_ranks_that_wait_for_an_average_are_as_late_as_the_network() -> None:
    """Half of a vector goes to its owner, and half of the average comes back, at 100 MB/s."""
    ranks, _ = trained(
        offbeat.EagerSGD(mode="majority", period=100),
        range(4),
        workers=4,
        link=VirtualLink(bytes_per_s=1e8),
    )
    device = ranks[0].machine
    assert isinstance(device, Device)
    # Gradients are brought to where messages leave from, and weights published.
    steps_s = np.diff(list(device.ends_s.values()))
    exchanged_s = 2 * 3 / 4 * NUM_BYTES / 1e8
    assert steps_s.max() == pytest.approx(3.25 + 2 * PUBLISHED_S + exchanged_s, rel=1e-3)
    # A rank whose gradient was taken before it had arrived waits for no average once.
    assert steps_s.min() == pytest.approx(3.25 + 2 * PUBLISHED_S)


def test_a_late_step_is_reached_without_all_those_before_it() -> None:
    """Averages come after steps 10,000, 10,010 and so on, counted from 1."""
    late = range(10_000, 10_010)
    assert late.start > REMEMBERED_STEPS
    local = offbeat.LocalSGD(period=10, warmup=0, optimizer_state="local")
    ranks, _ = trained(local, late)
    device = ranks[0].machine
    assert isinstance(device, Device)
    assert sorted(device.ends_s) == list(range(9_997, 10_010))
    durations_s = [device.ends_s[n] - device.ends_s[n - 1] for n in late]
    copied_s = 2 * (2 * NUM_ELEMENTS * 4) / 1e9
    assert durations_s[-1] == pytest.approx(3.25 + copied_s, rel=1e-3)
    assert durations_s[:-1] == pytest.approx([3.25] * 9)


def test_changes_of_weights_travel_as_the_codec_writes_them() -> None:
    strategy = offbeat.LocalSGD(period=1, warmup=0, optimizer_state="local", codec="sparseloco")
    _, cluster = trained(strategy, range(2))
    # One in 64 travels: 12 bits for the place and 2 for the value.
    assert cluster.bytes_sent[0] / 2 == pytest.approx(2 * NUM_ELEMENTS / 64 * 14 / 8, rel=0.1)


def test_a_schedule_that_follows_drift_is_simulated() -> None:
    """It begins with averages after every fourth step."""
    ranks, _ = trained(offbeat.LocalSGD(period="adaptive", optimizer_state="local"), range(8))
    device = ranks[0].machine
    assert isinstance(device, Device)
    durations_s = np.diff([0.0, *device.ends_s.values()])
    assert np.flatnonzero(durations_s > 3.26).tolist() == [3, 7]


TWO_LAYERS = PlannedTimeline(
    tensors=[Tensor(1.0, 200, rows=10), Tensor(1.0, 10), Tensor(0.5, 600, rows=20)],
    forward_s=1.0,
    backward_s=2.0,
    optimizer_s=0.25,
    moments=1,
    layers=[Layer(tensor=0, a_dim=20, g_dim=10), Layer(tensor=2, a_dim=30, g_dim=20)],
    looks_s=0.3,
    batch_size=4,
)


@pytest.mark.parametrize(
    ("kind", "num_inverted"),
    [(offbeat.DKFAC, 4), (offbeat.MPDKFAC, 2), (offbeat.SPDKFAC, 2), (offbeat.DPKFAC, 2)],
)
def test_factors_take_their_time_where_layers_are_seen(
    kind: type[KFACStrategy], num_inverted: int
) -> None:
    """Of four factors every rank inverts all, or its own. An inversion takes 0.5 s, and a rank that
    keeps to its own layer looks at that one alone.
    """
    strategy = kind(factor_interval=2, inverse_interval=4)
    ranks, _ = trained(strategy, range(8), timeline=TWO_LAYERS)
    device = ranks[0].machine
    assert isinstance(device, Device)
    durations_s = np.diff([device.ends_s[step] for step in range(3, 8)])
    squares = [20**2 + 10**2, 30**2 + 20**2]
    own = squares[1] / sum(squares) if kind is offbeat.DPKFAC else 1.0
    looked_s = 0.3 * own
    inverted_s = 0.5 * num_inverted
    expected_s = [3.25 + looked_s + inverted_s, 3.25, 3.25 + looked_s, 3.25]
    assert durations_s == pytest.approx(expected_s, abs=1e-3)


def _handed_out(ranks: Sequence[PlannedRank]) -> list[list[float]]:
    """When each rank was handed a batch, or came to the end, since the last mega-batches began."""
    devices = [rank.machine for rank in ranks]
    return [
        [when_s for done, when_s in device.begun if done >= 4000]
        for device in devices
        if isinstance(device, Device)
    ]


def test_batches_and_merges_of_a_simulation_are_those_of_the_loader() -> None:
    """A rank of three times the speed has batches of 18 samples where the other one has 6."""
    steps, speeds = range(4000, 4004), (3.0, 1.0)
    strategy = offbeat.AdaptiveSGD(mega_batch=4, warmup=0, overlap=False, optimizer_state="local")
    link = VirtualLink(bytes_per_s=2**22)  # 2 s for a merge of 8 MiB
    fast, slow = _handed_out(trained(strategy, steps, speeds=speeds, link=link)[0])
    # Two batches each, then a merge. A step of the optimizer takes as long for any batch.
    assert np.diff(slow) == pytest.approx([1.75, 1.75 + 2.0] * 2, rel=0.02)
    assert np.diff(fast) == pytest.approx([4.75 / 3, 5.5 - 4.75 / 3] * 2, rel=0.02)


def test_a_merge_that_is_overlapped_goes_on_beside_batches() -> None:
    steps, link = range(4000, 4004), VirtualLink(bytes_per_s=2**22)
    strategy = offbeat.AdaptiveSGD(mega_batch=4, warmup=0, optimizer_state="local")
    ranks, cluster = trained(strategy, steps, link=link)
    *begun, end = _handed_out(ranks)[0]
    assert np.diff(begun) == pytest.approx([3.25] * 3, rel=0.02)
    assert end - begun[-1] == pytest.approx(3.25 + 2.0, rel=0.02)  # it waits for the last one
    assert cluster.bytes_sent[0] == pytest.approx(4 * 2 * NUM_ELEMENTS * 4, rel=0.01)


def test_equal_shares_wait_for_the_slowest_at_each_merge() -> None:
    strategy = offbeat.ElasticSGD(mega_batch=4)
    begun = _handed_out(trained(strategy, range(4000, 4004), speeds=(3.0, 1.0))[0])
    assert np.diff(begun[1]) == pytest.approx([3.25] * 4, rel=0.02)
    assert np.diff(begun[0])[:2] == pytest.approx([3.25 / 3, 6.5 - 3.25 / 3], rel=0.02)
