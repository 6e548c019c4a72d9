"""Binomial trees pair up, reach everyone and take as many rounds as they must."""

from __future__ import annotations

import pytest

from offbeat.arithmetic.trees import broadcast_rounds, num_rounds, reduce_rounds

WORLD_SIZES = [*range(1, 18), 64, 1024]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_send_has_its_receive(world_size: int) -> None:
    rounds = {rank: reduce_rounds(rank, world_size) for rank in range(world_size)}
    sends = {(rank, peer) for rank in rounds for peer, is_send in rounds[rank] if is_send}
    receives = {(peer, rank) for rank in rounds for peer, is_send in rounds[rank] if not is_send}
    assert sends == receives


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_everyone_but_the_root_sends_once_and_last(world_size: int) -> None:
    for rank in range(world_size):
        directions = [is_send for _, is_send in reduce_rounds(rank, world_size)]
        assert directions.count(True) == (rank != 0)
        assert True not in directions[:-1]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_root_has_one_round_for_each_doubling(world_size: int) -> None:
    assert len(reduce_rounds(0, world_size)) == num_rounds(world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_is_the_reduction_backwards(world_size: int) -> None:
    for rank in range(world_size):
        down = broadcast_rounds(rank, world_size)
        assert [(peer, not is_send) for peer, is_send in reversed(down)] == reduce_rounds(
            rank, world_size
        )
