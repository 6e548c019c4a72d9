"""Numbers of entries follow what real entries do, in the same generators."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally, is_finite
from offbeat.codec.weightless import WeightlessSparse, WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.gtopk_tree import gtopk_tree
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.collectives.topk_allgather import clipped_sum, global_topk, topk_sum
from offbeat.simulation.virtual import VirtualCluster
from offbeat.torch_private import WeightlessReads

WORLD_SIZE, NUM_ELEMENTS, K = 6, 1_000_000, 20_000
TALLY = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(3, dtype=np.bool_))
WIRE = Wire(num_elements=NUM_ELEMENTS, num_parameters=3, dtype=np.dtype(np.float32))


def picked(rank: int, num_places: int) -> Sparse:
    """K entries among the first places of a permutation that all ranks share."""
    places = np.random.default_rng(0).permutation(NUM_ELEMENTS)[:num_places]
    generator = np.random.default_rng([1, rank])
    indices = np.sort(generator.choice(places, K, replace=False))
    values = (3 + generator.exponential(0.3, K)).astype(np.float32)  # the tail of a gradient
    return Sparse(indices=indices, values=values, num_elements=NUM_ELEMENTS)


COLLECTIVES = [
    gtopk_tree,
    partial(gtopk_tree, variant="paper"),
    topk_sum,
    clipped_sum,
    global_topk,
    sparse_reduce_scatter,
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_bucket_without_elements_is_simulated(
    collective: SparseCollective, world_size: int
) -> None:
    wire = Wire(num_elements=0, num_parameters=3, dtype=np.dtype(np.float32))
    arithmetic = WeightlessWire(wire=wire, num_places=0)
    results = VirtualCluster(world_size, weightless=True).run(
        [
            collective(rank, world_size, WeightlessSparse(0.0, 0), TALLY, 1, arithmetic)
            for rank in range(world_size)
        ]
    )
    assert [(each.kept.num_pairs, each.owed.num_pairs) for each in results] == [(0, 0)] * world_size


@pytest.mark.parametrize("num_places", [NUM_ELEMENTS, 2 * K])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_each_rank_sends_the_bytes_of_a_real_exchange(
    collective: SparseCollective, num_places: int
) -> None:
    real = VirtualCluster(WORLD_SIZE)
    real.run(
        [
            collective(rank, WORLD_SIZE, picked(rank, num_places), TALLY, K, WIRE)
            for rank in range(WORLD_SIZE)
        ]
    )
    arithmetic = WeightlessWire(wire=WIRE, num_places=num_places)
    simulated = VirtualCluster(WORLD_SIZE, weightless=True)
    simulated.run(
        [
            collective(rank, WORLD_SIZE, WeightlessSparse(K, num_places), TALLY, K, arithmetic)
            for rank in range(WORLD_SIZE)
        ]
    )
    assert simulated.messages_sent == real.messages_sent
    assert simulated.bytes_sent == pytest.approx(real.bytes_sent, rel=0.07)


@pytest.mark.parametrize("num_pairs", [10, 1000, 20_000])
def test_a_message_has_the_length_of_a_real_one(num_pairs: int) -> None:
    wire = Wire(num_elements=10**8, num_parameters=3, dtype=np.dtype(np.float32))
    generator = np.random.default_rng(2)
    indices = np.unique(generator.integers(0, wire.num_elements, num_pairs))
    entries = Sparse(
        indices=indices,
        values=np.ones(indices.size, dtype=np.float32),
        num_elements=wire.num_elements,
    )
    arithmetic = WeightlessWire(wire=wire, num_places=wire.num_elements)
    simulated, _ = arithmetic.encode(WeightlessSparse(indices.size, wire.num_elements), TALLY)
    assert len(simulated) == pytest.approx(len(wire.encode(entries, TALLY)[0]), rel=0.05)


def test_a_vector_without_content_is_finite_for_whoever_asks_the_opposite() -> None:
    with WeightlessReads():
        assert not int(~is_finite(torch.empty(3, device="meta")))
