"""Sparse collectives: what they come to, and the exact messages of each."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import BFloat16Values, Float32Values, ValueCodec
from offbeat.codec.wire import Wire
from offbeat.collectives.base import Exchanged, SparseCollective
from offbeat.collectives.gtopk_tree import gtopk_tree
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.collectives.topk_allgather import clipped_sum, global_topk, topk_sum
from offbeat.errors import PeerError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.driver import Driver
from offbeat.transport.operations import Recv
from transport_support.wrappers import Failing, RecordingDriver, ScriptedFault

# What every sparse collective promises, for 1 to 17 ranks, under random schedules.


CONSERVING: dict[str, SparseCollective] = {
    "tree": gtopk_tree,
    "reduce_scatter": sparse_reduce_scatter,
    "all_gather": global_topk,
    "topk": topk_sum,
}
FLOAT32 = Float32Values()
PAPER: SparseCollective = partial(gtopk_tree, variant="paper")


def wire_for(num_elements: int, values: ValueCodec = FLOAT32) -> Wire:
    return Wire(
        num_elements=num_elements,
        num_parameters=3,
        dtype=np.dtype(np.float32),
        values=values,
    )


def contributions(world_size: int, num_elements: int, k: int, seed: int) -> list[Sparse]:
    """Each rank's k largest of a shared signal plus noise of its own, scaled differently."""
    draw = np.random.default_rng(seed)
    signal = draw.standard_normal(num_elements)
    mine = []
    for _ in range(world_size):
        dense = (draw.exponential() * (signal + draw.standard_normal(num_elements))).astype(
            np.float32
        )
        smallest = np.argsort(-np.abs(dense), kind="stable")[k:]
        dense[smallest] = 0
        mine.append(Sparse.from_dense(dense))
    return mine


def tally_of(rank: int) -> Tally:
    return Tally(
        weight=1.0 + rank,
        num_nonfinite=0,
        num_failed=0,
        used=np.array([rank == 0, rank == 1, False]),
    )


def exchange(
    collective: SparseCollective,
    mine: list[Sparse],
    k: int,
    *,
    seed: int = 0,
    values: ValueCodec = FLOAT32,
) -> list[Exchanged]:
    world_size, wire = len(mine), wire_for(mine[0].num_elements, values)
    cluster = VirtualCluster(world_size, seed=seed, link=VirtualLink(latency_s=1e-3, jitter_s=1e-2))
    return cluster.run(
        [
            collective(rank, world_size, mine[rank], tally_of(rank), k, wire)
            for rank in range(world_size)
        ]
    )


def dense_sum(parts: list[Sparse]) -> NDArray[np.float64]:
    return np.sum([part.to_dense().astype(np.float64) for part in parts], axis=0)


def imbalance(mine: list[Sparse], results: list[Exchanged]) -> float:
    """How much of the contributions is neither applied nor owed, relative to all of them."""
    accounted = results[0].kept.to_dense().astype(np.float64) + dense_sum(
        [result.owed for result in results]
    )
    scale = np.sum([np.abs(part.values).sum() for part in mine])
    return float(np.abs(dense_sum(mine) - accounted).sum() / scale)


cases = st.tuples(
    st.integers(1, 17), st.integers(1, 300), st.floats(0.01, 1.0), st.integers(0, 2**32 - 1)
)


@given(case=cases)
def test_no_contribution_counts_for_more_than_the_median(case: tuple[int, int, float, int]) -> None:
    world_size, num_elements, density, seed = case
    k = max(1, round(density * num_elements))
    mine = contributions(world_size, num_elements, k, seed)
    results = exchange(clipped_sum, mine, k, seed=seed)
    vectors = [part.to_dense().astype(np.float64) for part in mine]
    norms = [float(np.linalg.norm(vector)) for vector in vectors]
    expected = sum(
        vector * min(1.0, float(np.median(norms)) / norm) if norm else vector
        for vector, norm in zip(vectors, norms, strict=True)
    )
    tolerance = 1e-6 * world_size * (max(norms) + 1)
    for result in results:
        assert result.kept.values.tobytes() == results[0].kept.values.tobytes()
        np.testing.assert_allclose(result.kept.to_dense(), expected, rtol=0, atol=tolerance)
        assert len(result.owed) == 0


RESOLUTION = {"all_gather": 0.0, "reduce_scatter": 2**-8}
"""Of those that keep the largest entries of the sum: by how much what is left out may be larger."""


@pytest.mark.parametrize(
    ("name", "values"),
    [*product(CONSERVING, (FLOAT32, BFloat16Values())), ("paper", FLOAT32)],
)
@given(case=cases)
def test_every_rank_keeps_the_same_which_is_largest_and_nothing_is_lost(
    name: str, values: ValueCodec, case: tuple[int, int, float, int]
) -> None:
    world_size, num_elements, density, seed = case
    k = max(1, round(density * num_elements))
    mine = contributions(world_size, num_elements, k, seed)
    results = exchange(CONSERVING.get(name, PAPER), mine, k, seed=seed, values=values)
    kept = results[0].kept
    for result in results[1:]:
        assert result.kept.indices.tobytes() == kept.indices.tobytes()
        assert result.kept.values.tobytes() == kept.values.tobytes()
    expected = tally_of(0)
    for rank in range(1, world_size):
        expected = expected.merge(tally_of(rank))
    assert all(result.tally.to_bytes() == expected.to_bytes() for result in results)
    if name != "paper":
        assert imbalance(mine, results) <= 1e-6
    if name != "topk":
        assert len(kept) <= k
    if name in RESOLUTION and values is FLOAT32:
        total = np.abs(dense_sum(mine))
        assert len(kept) == min(k, np.count_nonzero(total))
        left_out = np.delete(total, kept.indices)
        assert (
            left_out.size == 0
            or len(kept) == 0
            or total[kept.indices].min() >= left_out.max() * (1 - RESOLUTION[name]) * (1 - 1e-6)
        )


@pytest.mark.parametrize("name", [*CONSERVING, "paper"])
@given(case=cases)
def test_density_1_is_the_sum(name: str, case: tuple[int, int, float, int]) -> None:
    world_size, num_elements, _, seed = case
    mine = contributions(world_size, num_elements, num_elements, seed)
    result = exchange(CONSERVING.get(name, PAPER), mine, num_elements, seed=seed)[0]
    np.testing.assert_allclose(result.kept.to_dense(), dense_sum(mine), rtol=1e-4, atol=1e-5)
    assert len(result.owed) == 0


def test_the_published_merge_loses_mass_from_four_ranks_on() -> None:
    """An entry dropped on one branch whose index survives through another is put back by nobody."""
    lost = dict.fromkeys((2, 4, 8, 16), 0.0)
    for world_size in lost:
        for seed in range(20):
            mine = contributions(world_size, 200, 10, seed)
            lost[world_size] += imbalance(mine, exchange(PAPER, mine, 10)) / 20
    assert lost[2] <= 1e-6
    assert lost[4] > 1e-3
    assert lost[4] < lost[8] < lost[16]


@pytest.mark.parametrize("name", CONSERVING)
def test_the_order_of_events_does_not_matter(name: str) -> None:
    mine = contributions(7, 400, 40, seed=1)
    results = [exchange(CONSERVING[name], mine, 40, seed=seed) for seed in range(20)]
    outcomes = {
        tuple((r.kept.values.tobytes(), r.owed.values.tobytes()) for r in result)
        for result in results
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("name", CONSERVING)
@pytest.mark.parametrize("victim", range(5))
def test_a_failing_rank_leaves_nobody_waiting(name: str, victim: int) -> None:
    world_size, wire = 5, wire_for(400)
    mine = contributions(world_size, 400, 40, seed=2)
    faults = [ScriptedFault(rank=victim, step=0, operation=Recv, action="raise")]
    outcomes = VirtualCluster(world_size).outcomes(
        [
            CONSERVING[name](rank, world_size, mine[rank], tally_of(rank), 40, wire)
            for rank in range(world_size)
        ],
        wrap=lambda driver: Failing(driver, faults),
    )
    assert isinstance(outcomes[victim], PeerError)
    for outcome in outcomes:
        assert isinstance(outcome, Exchanged | PeerError)


# The exact messages of each sparse collective, by rank: who sends to whom, in which order.


TREE_OF_5 = {
    0: "<1 <2 <4 >4 >2 >1",
    1: ">0 <0",
    2: "<3 >0 <0 >3",
    3: ">2 <2",
    4: ">0 <0",
}
ALL_GATHER_OF_5 = {
    0: ">4 <1 >3 <2 >1 <4",
    1: ">0 <2 >4 <3 >2 <0",
    2: ">1 <3 >0 <4 >3 <1",
    3: ">2 <4 >1 <0 >4 <2",
    4: ">3 <0 >2 <1 >0 <3",
}
REDUCE_SCATTER_OF_5 = {
    rank: " ".join(
        [f">{(rank + distance) % 5}" for distance in range(1, 5)]
        + [f"<{(rank - distance) % 5}" for distance in range(1, 5)]
        + [ALL_GATHER_OF_5[rank]] * 2
    )
    for rank in range(5)
}


@pytest.mark.parametrize(
    ("collective", "golden"),
    [
        (gtopk_tree, TREE_OF_5),
        (partial(gtopk_tree, variant="paper"), TREE_OF_5),
        (global_topk, ALL_GATHER_OF_5),
        (sparse_reduce_scatter, REDUCE_SCATTER_OF_5),
    ],
)
def test_who_sends_to_whom_in_which_order(
    collective: SparseCollective, golden: dict[int, str]
) -> None:
    wire = Wire(num_elements=1000, num_parameters=1, dtype=np.dtype(np.float32))
    tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))
    mine = Sparse(
        indices=np.arange(0, 1000, 50), values=np.ones(20, dtype=np.float32), num_elements=1000
    )
    recordings: list[RecordingDriver] = []

    def record(driver: Driver) -> Driver:
        recordings.append(RecordingDriver(driver))
        return recordings[-1]

    VirtualCluster(5).run(
        [collective(rank, 5, mine, tally, 20, wire) for rank in range(5)], wrap=record
    )
    for rank, recording in enumerate(recordings):
        messages = [f"{'>' if op.kind == 'Send' else '<'}{op.peer}" for op in recording.operations]
        assert " ".join(messages) == golden[rank], f"rank {rank}"
