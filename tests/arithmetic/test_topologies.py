"""Mixing matrices are stochastic the way each method needs, partners agree, and everyone is
reached.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.arithmetic.topologies import exponential_hops, exponential_peers, ring_weights
from offbeat.arithmetic.trees import num_rounds

WORLD_SIZES = [*range(1, 18), 64]

graphs = st.integers(2, 40).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size), st.integers(1, world_size - 1), st.integers(0, 10_000)
    )
)


def ring_matrix(world_size: int) -> NDArray[np.float64]:
    matrix = np.zeros((world_size, world_size))
    for rank in range(world_size):
        for peer, weight in ring_weights(rank, world_size).items():
            matrix[rank, peer] = weight
    return matrix


def push_matrix(world_size: int, round_number: int, out_degree: int) -> NDArray[np.float64]:
    """What fraction of rank j's mass rank i holds after the round, at [i, j]."""
    matrix = np.zeros((world_size, world_size))
    for rank in range(world_size):
        targets = exponential_peers(
            rank, world_size, round_number=round_number, out_degree=out_degree
        ).targets
        for receiver in (rank, *targets):
            matrix[receiver, rank] = 1 / (1 + len(targets))
    return matrix


def test_the_ring_is_symmetric_and_doubly_stochastic() -> None:
    for world_size in WORLD_SIZES:
        matrix = ring_matrix(world_size)
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        assert (np.diag(matrix) > 0).all()


def test_the_ring_reaches_agreement() -> None:
    for world_size in WORLD_SIZES:
        magnitudes = np.sort(np.abs(np.linalg.eigvalsh(ring_matrix(world_size))))
        assert world_size == 1 or magnitudes[-2] < 1 - 1e-6


@given(graphs)
def test_whoever_is_sent_to_expects_it(graph: tuple[int, int, int]) -> None:
    world_size, out_degree, round_number = graph
    peers = [
        exponential_peers(r, world_size, round_number=round_number, out_degree=out_degree)
        for r in range(world_size)
    ]
    for rank, (targets, sources) in enumerate(peers):
        assert rank not in targets
        assert len(set(targets)) == len(set(sources)) == out_degree
        assert all(rank in peers[target].sources for target in targets)
        assert all(rank in peers[source].targets for source in sources)


@given(graphs)
def test_pushing_is_column_stochastic(graph: tuple[int, int, int]) -> None:
    world_size, out_degree, round_number = graph
    np.testing.assert_allclose(push_matrix(world_size, round_number, out_degree).sum(axis=0), 1)


def test_every_rank_hears_of_every_other_one_within_a_cycle() -> None:
    for world_size, out_degree in product((2, 3, 5, 6, 7, 8, 17), (1, 2, 4)):
        if out_degree >= world_size:
            continue
        reached = np.eye(world_size)
        for round_number in range(len(exponential_hops(world_size, out_degree))):
            reached = push_matrix(world_size, round_number, out_degree) @ reached
        assert (reached > 0).all()


def test_one_peer_and_a_power_of_two_average_exactly_in_log_rounds() -> None:
    for world_size in (2, 4, 8, 16, 32):
        shares = np.eye(world_size)
        for round_number in range(num_rounds(world_size)):
            shares = push_matrix(world_size, round_number, 1) @ shares
        np.testing.assert_allclose(shares, 1 / world_size)


def test_alone_there_is_nobody_to_send_to() -> None:
    assert exponential_peers(0, 1, round_number=3, out_degree=1) == ((), ())
