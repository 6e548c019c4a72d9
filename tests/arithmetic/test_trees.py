"""Binomial trees pair up, reach everyone and take as many rounds as they must."""

from __future__ import annotations

from offbeat.arithmetic.trees import broadcast_rounds, num_rounds, reduce_rounds

WORLD_SIZES = [*range(1, 18), 64, 1024]


def test_every_send_has_its_receive() -> None:
    for world_size in WORLD_SIZES:
        rounds = {rank: reduce_rounds(rank, world_size) for rank in range(world_size)}
        sends = {(rank, peer) for rank in rounds for peer, is_send in rounds[rank] if is_send}
        receives = {
            (peer, rank) for rank in rounds for peer, is_send in rounds[rank] if not is_send
        }
        assert sends == receives


def test_everyone_but_the_root_sends_once_and_last() -> None:
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            directions = [is_send for _, is_send in reduce_rounds(rank, world_size)]
            assert directions.count(True) == (rank != 0)
            assert True not in directions[:-1]


def test_the_root_has_one_round_for_each_doubling() -> None:
    for world_size in WORLD_SIZES:
        assert len(reduce_rounds(0, world_size)) == num_rounds(world_size)


def test_broadcast_is_the_reduction_backwards() -> None:
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            down = [(peer, not is_send) for peer, is_send in broadcast_rounds(rank, world_size)]
            assert down[::-1] == reduce_rounds(rank, world_size)
