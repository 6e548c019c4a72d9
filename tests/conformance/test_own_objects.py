"""A selector, codecs and a dense operation that offbeat does not know, each written as one class,
work wherever those of offbeat do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

import offbeat
from offbeat.arithmetic.costs import LinkCost
from offbeat.codec.index_codecs import CodedIndices, IndexCodec
from offbeat.codec.selectors import Selection, Selector
from offbeat.codec.sparse import Sparse, add_owed
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec, WireValues
from offbeat.codec.wire import Wire
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.errors import ConfigError, MismatchError, WireError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.backends import BackendWork
from offbeat.transport.connect import connect
from offbeat.transport.driver import Counting, Driver
from offbeat.transport.operations import AllReduceTensor, Collective, DenseOperation, Traffic
from offbeat.transport.routed import C10d
from offbeat_lab.emulation.delaying import Delaying
from ranks_support.launch import RunRanks
from transport_support.wrappers import Recorded, RecordingDriver

if TYPE_CHECKING:
    from fractions import Fraction


class RoundRobin(Selector):
    """About k entries at equal distances, one place further in each step."""

    @override
    def initial_state(self) -> Mapping[str, float]:
        return {"place": 0.0}

    @override
    def select(
        self,
        flat: torch.Tensor,
        residual: torch.Tensor,
        *,
        k: int,
        weight: float,
        state: Mapping[str, float],
    ) -> Selection:
        torch.add(residual, flat, alpha=weight, out=flat)
        if not bool(flat.isfinite().all()):
            return Selection(sparse=Sparse.empty(flat.numel(), flat.numpy().dtype), finite=False)
        stride, values = flat.numel() // k, flat.numpy()
        indices = np.arange(int(state["place"]), flat.numel(), stride)
        indices = indices[values[indices] != 0]
        picked = Sparse(indices=indices, values=values[indices], num_elements=flat.numel())
        values[indices] = 0
        return Selection(
            sparse=picked, finite=True, state={"place": float((state["place"] + 1) % stride)}
        )


class Float16(ValueCodec):
    """2 bytes a value."""

    code, bits = 130, 16

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        largest = float(np.finfo(np.float16).max)
        on_wire: WireValues = np.clip(values, -largest, largest).astype(np.float16)
        return on_wire

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        return coded.view(np.float16).astype(np.float32)


class Bitmap(IndexCodec):
    """A bit for each element."""

    usual_bytes = 1

    @override
    def encode(self, indices: NDArray[np.int64], num_elements: int) -> CodedIndices:
        marks = np.zeros(num_elements, dtype=np.bool_)
        marks[indices] = True
        return CodedIndices(128, np.packbits(marks))

    @override
    def decode(
        self, layout: int, coded: NDArray[np.uint8], count: int, num_elements: int
    ) -> NDArray[np.int64]:
        indices = np.flatnonzero(np.unpackbits(coded))
        if layout != 128 or indices.size != count:
            raise WireError("this is no bitmap of so many entries")
        return indices


@dataclass(frozen=True, slots=True)
class ReduceScatter(DenseOperation):
    """Give each rank its region of the sum, in `region`. Result: `region`.

    Attributes:
        regions: this rank's contribution to the region of each rank, by rank; all of one length.
        region: where to; of the same length.
    """

    regions: Sequence[torch.Tensor]
    region: torch.Tensor

    @property
    @override
    def num_bytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @override
    def traffic(self, result: Any, *, rank: int, world_size: int) -> Traffic:
        hops = self.num_hops(world_size)
        num_bytes = hops * self.region.nbytes
        return Traffic(
            bytes_sent=num_bytes,
            bytes_received=num_bytes,
            messages_sent=hops,
            messages_received=hops,
        )

    @override
    def num_hops(self, world_size: int) -> int:
        return world_size - 1

    @classmethod
    @override
    def combine(cls, operations: Sequence[Self]) -> list[Any]:
        return [
            operation.region.copy_(
                torch.stack([other.regions[rank] for other in operations]).sum(0)
            )
            for rank, operation in enumerate(operations)
        ]

    @override
    def begin(self, backends: C10d) -> BackendWork:
        backend = backends.backend_for(self.region)
        return backend.reduce_scatter(
            [self.region], [list(self.regions)], dist.ReduceScatterOptions()
        )

    @override
    def finish(self, backends: C10d) -> torch.Tensor:
        return self.region


def reduce_scatter(rank: int, world_size: int) -> Collective[list[float]]:
    """Rank r contributes the numbers 10 r + 0, 10 r + 1, ... to the regions of ranks 0, 1, ..."""
    regions = [torch.full((3,), 10.0 * rank + owner) for owner in range(world_size)]
    result: torch.Tensor = yield ReduceScatter(regions, torch.empty(3))
    return result.tolist()


def expected_region(rank: int, world_size: int) -> list[float]:
    return [sum(10.0 * other + rank for other in range(world_size))] * 3


LINK = VirtualLink(latency_s=1.0, bytes_per_s=12.0)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_dense_operation_runs_on_the_virtual_driver(world_size: int) -> None:
    cluster = VirtualCluster(world_size, link=LINK)
    results = cluster.run([reduce_scatter(rank, world_size) for rank in range(world_size)])
    assert results == [expected_region(rank, world_size) for rank in range(world_size)]
    # Each rank sends on what it got in two halves: the latency and half of the bytes in each round,
    # and in the end the other half.
    rounds = world_size - 1
    assert cluster.now_s == pytest.approx(rounds * (1.0 + 6 / 12.0) + min(rounds, 1) * 6 / 12.0)


def test_a_dense_operation_is_counted_delayed_and_recorded() -> None:
    cluster = VirtualCluster(3)
    counting: list[Counting] = []
    recordings: list[RecordingDriver] = []

    def wrap(driver: Driver) -> Driver:
        recordings.append(RecordingDriver(driver))
        link = LinkCost(alpha_s=0.0, beta_s_per_byte=1.0)
        counting.append(Counting(Delaying(recordings[-1], link)))
        return counting[-1]

    cluster.run([reduce_scatter(rank, 3) for rank in range(3)], channel=7, wrap=wrap)
    assert [driver.traffic.bytes_sent for driver in counting] == [24, 24, 24]
    assert [driver.traffic.messages_received for driver in counting] == [2, 2, 2]
    assert [arrival.operation for arrival in counting[0].take_arrivals()] == ["ReduceScatter"]
    assert Recorded("ReduceScatter", None, 36, 7) in recordings[0].operations
    assert cluster.now_s == 24.0


def test_ranks_that_begin_different_dense_operations_are_told() -> None:
    def odd() -> Collective[list[float]]:
        yield AllReduceTensor(torch.zeros(3))
        return []

    outcomes = VirtualCluster(2).outcomes([reduce_scatter(0, 2), odd()])
    assert any(
        isinstance(outcome, MismatchError) and "AllReduce, ReduceScatter" in str(outcome)
        for outcome in outcomes
    )


def gradient_of(rank: int, step: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (num_elements,), generator=generator).float()


def test_a_selector_and_codecs_lose_nothing_on_the_virtual_driver() -> None:
    world_size, n, k = 3, 60, 12
    wire = Wire(
        num_elements=n,
        num_parameters=1,
        dtype=np.dtype(np.float32),
        values=Float16(),
        indices=Bitmap(),
    )
    selector = RoundRobin()
    owed = [torch.zeros(n) for _ in range(world_size)]
    states = [selector.initial_state()] * world_size
    total, applied = torch.zeros(n), torch.zeros(n)
    for step in range(7):
        mine = []
        for rank, before in enumerate(owed):
            owed[rank] = gradient_of(rank, step, n)
            total += owed[rank]
            picked = selector.select(owed[rank], before, k=k, weight=1.0, state=states[rank])
            states[rank] = picked.state
            mine.append(picked.sparse)
        results = VirtualCluster(world_size, seed=step).run(
            [
                sparse_reduce_scatter(rank, world_size, mine[rank], tally_of_one(), k, wire)
                for rank in range(world_size)
            ]
        )
        for left, result in zip(owed, results, strict=True):
            add_owed(left, result.owed)
        applied += torch.from_numpy(results[0].kept.to_dense())
    assert states == [{"place": 7 % 5}] * world_size
    assert torch.equal(applied + sum(owed), total)


def tally_of_one() -> Tally:
    return Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))


OWN = offbeat.GTopK(
    density=0.2,
    collective="reduce_scatter",
    codec=offbeat.TopKCodec(selector=RoundRobin(), values=Float16(), indices=Bitmap()),
)


def train(rank: int, num_steps: int) -> dict[str, Any]:
    """A run in which gradients are whole numbers that do not depend on the parameters."""
    model = torch.nn.Linear(10, 6, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.attach(model, optimizer, OWN) as session:
        for step in range(num_steps):
            optimizer.zero_grad()
            (model.weight * gradient_of(rank, step, 60).view(6, 10)).sum().backward()
            optimizer.step()
        (state,) = (
            part for part in session.state_dict()["callbacks"].values() if part.get("additive")
        )
    return {
        "weight": model.weight.detach().flatten().tolist(),
        "owed": state["additive"]["residual/weight"].flatten().tolist(),
        "local": state["local"],
    }


def own_objects_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    driver = Counting(connect().driver)
    try:
        region = driver.run(reduce_scatter(rank, world_size), 0)
    finally:
        driver.close()
    return {
        "region": region,
        "bytes_sent": driver.traffic.bytes_sent,
        "run": train(rank, num_steps=7),
    }


@pytest.mark.ranks
def test_own_objects_work_in_a_real_run(run_ranks: RunRanks) -> None:
    world_size, num_steps = 3, 7
    results = run_ranks(own_objects_on_ranks, world_size)
    for rank, result in enumerate(results):
        assert result["region"] == expected_region(rank, world_size)
        assert result["bytes_sent"] == (world_size - 1) * 12
        assert result["run"]["local"]["place/weight"] == num_steps % 5
        assert result["run"]["weight"] == results[0]["run"]["weight"]
    total = sum(
        (gradient_of(rank, step, 60) for rank in range(world_size) for step in range(num_steps)),
        torch.zeros(60),
    )
    applied = -world_size * torch.tensor(results[0]["run"]["weight"])
    owed = torch.tensor([result["run"]["owed"] for result in results]).sum(0)
    torch.testing.assert_close(applied + owed, total)


def test_own_objects_work_in_a_world_of_one_and_resume() -> None:
    result = train(0, num_steps=7)
    total = sum((gradient_of(0, step, 60) for step in range(7)), torch.zeros(60))
    assert torch.equal(torch.tensor(result["owed"]) - torch.tensor(result["weight"]), total)
    assert result["local"]["place/weight"] == 2.0


def test_options_take_objects_and_names_alike() -> None:
    assert repr(OWN) == repr(
        offbeat.GTopK(
            density=0.2,
            collective="reduce_scatter",
            codec=offbeat.TopKCodec(selector=RoundRobin(), values=Float16(), indices=Bitmap()),
        )
    )
    by_name = offbeat.TopKCodec(selector="reuse", values="bfloat16", indices="gaps")
    assert offbeat.TopKCodec.of("bfloat16+reuse") == by_name == offbeat.TopKCodec.of(by_name)
    with pytest.raises(ConfigError, match="'exact', .*, or a Selector, got 'exat'; did you"):
        offbeat.TopKCodec(selector="exat")
    with pytest.raises(ConfigError, match="or a ValueCodec"):
        offbeat.TopKCodec(values=RoundRobin())  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["float23", "reuse+exact", "", "float8+", 8])
def test_a_codec_that_is_none_is_refused(codec: Any) -> None:
    for kind in (offbeat.GTopK, offbeat.TopK, offbeat.EF21):
        with pytest.raises(ConfigError, match="codec .*TopKCodec"):
            kind(codec=codec)


@dataclass(frozen=True, kw_only=True)
class TypedForCheckersAlone(offbeat.AllReduce):
    """A strategy whose option is of a type that its module holds for type checkers alone."""

    when: Fraction | None = None


def test_an_option_whose_type_is_imported_for_type_checkers_alone_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"names 'Fraction'.*import it there, and not under `if"):
        TypedForCheckersAlone()
