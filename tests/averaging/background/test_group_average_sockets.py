"""The same collective over real sockets, beside threads that train."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from group_support.own_messages import arrive, fetch_model, finish
from offbeat.arithmetic.groups import group_of_version
from offbeat.averaging.background.group_average import RoundManager
from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolSettings,
    VersionResult,
)
from offbeat.averaging.background.merge_rules import merge_delta
from offbeat.codec.model_wire import Values
from offbeat.transport.operations import Post
from offbeat.transport.peers import PeerLimits, Peers

CHANNEL = 9 << 32


class Trainer:
    """A rank whose training thread changes its model and arrives, and whose other thread serves."""

    def __init__(self, peers: Peers, num_elements: int) -> None:
        self.peers = peers
        self.values: Values = np.full(num_elements, float(peers.rank))
        self.lock = threading.Lock()
        self.closed = threading.Condition(self.lock)
        self.newest = -1
        self.newest_closed = -1
        self.step = 0
        self.waits = False
        self.received: dict[int, Contribution | None] = {}
        self.num_finals = 0

    def contribute(self, version: int) -> Contribution | None:
        with self.lock:
            self.newest = max(self.newest, version)
            return Contribution(values=self.values.copy(), step=self.step, fresh=self.waits)

    def invite(self, version: int) -> None:
        pass

    def quorum_arrived(self, version: int) -> None:
        pass

    def close_version(self, outcome: VersionResult) -> None:
        for piece in outcome.pieces:
            self.merge_late(outcome.version, piece)
        with self.closed:
            self.newest_closed = max(self.newest_closed, outcome.version)
            self.closed.notify_all()

    def merge_late(self, version: int, piece: Piece) -> None:
        with self.lock:
            self.values[piece.begin : piece.end] = merge_delta(
                self.values[piece.begin : piece.end], piece
            )

    def snapshot(self) -> Contribution | None:
        with self.lock:
            return Contribution(values=self.values.copy(), step=self.step, fresh=self.waits)

    def receive_model(self, sender: int, state: Contribution | None) -> None:
        self.received[sender] = state

    def finalize_version(self, version: int) -> None:
        pass

    def mark_dead(self, rank: int) -> None:
        raise AssertionError(f"rank {rank} is not dead")

    def mark_final(self) -> None:
        self.num_finals += 1

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            with self.closed:
                self.values += self.peers.rank
                self.step += 1
                self.waits = True
                version = self.newest + 1
                self.peers.start(Post(arrive(version, generation=0)), CHANNEL)
                self.closed.wait_for(lambda version=version: self.newest_closed >= version)  # type: ignore[misc]
                self.waits = False
        self.peers.start(Post(fetch_model(None, generation=0)), CHANNEL)
        self.peers.start(Post(finish(generation=0)), CHANNEL)


@pytest.fixture
def mesh() -> Iterator[list[Peers]]:
    with ExitStack() as stack:
        ranks = [
            Peers(
                rank,
                5,
                address="127.0.0.1",
                secret=b"a secret of this test run only",
                limits=PeerLimits(grace_s=0.5),
                watch_all=False,
            )
            for rank in range(5)
        ]
        for peers in ranks:
            stack.callback(peers.close)
            peers.connect([other.endpoint for other in ranks])
        yield ranks


@pytest.mark.parametrize("num_elements", [3, 50_000])
def test_five_ranks_keep_their_mean(mesh: list[Peers], num_elements: int) -> None:
    trainers = [Trainer(peers, num_elements) for peers in mesh]
    members = tuple(range(5))
    threads = []
    for rank, trainer in enumerate(trainers):
        settings = ProtocolSettings(
            members=members,
            generation=0,
            num_elements=num_elements,
            dtype=np.dtype(np.float64),
            group_of=partial(group_of_version, rank=rank, members=members, group_size=3, period=4),
        )
        threads.append(
            threading.Thread(
                target=mesh[rank].run, args=(RoundManager(rank, settings, trainer).serve(), CHANNEL)
            )
        )
        threads.append(threading.Thread(target=trainer.train, args=(6,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(
        sum(trainer.values for trainer in trainers), sum(range(5)) * 7.0, rtol=1e-9
    )
    for rank, trainer in enumerate(trainers):
        assert trainer.received.keys() == set(members) - {rank}
        assert all(
            state is not None and state.values.shape == (num_elements,)
            for state in trainer.received.values()
        )
        assert trainer.num_finals == 1
