"""The ranks that hold one replica of the model together, and what they decide together.

Models that `fully_shard` has divided inside a node are trained by islands: the ranks of one shard
mesh. A session's driver connects a column, the ranks of one shard index, one of each island:

    world of 2 islands x 2 shards       columns {0, 2} and {1, 3}, islands {0, 1} and {2, 3}

What depends on a rank's own part of the model, or on a clock, would be decided in another way by
each column: whether a gradient is finite, a norm, which collective is the cheapest. So whoever
decides such a thing asks the island.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
import torch

from offbeat.collectives.dense import gather_values
from offbeat.collectives.weighted_mean import FRAGMENT_BYTES
from offbeat.errors import PeerError, PeerTimeoutError
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective, Recv, RecvAny, Send
from offbeat.transport.single_rank import SingleRank

T = TypeVar("T")


class Island:
    """The ranks that hold one replica together. As it is by default this rank holds all of it, and
    every question is answered at once. All ranks of an island ask the same questions in the same
    order.

    Args:
        driver: connects them.
    """

    def __init__(self, driver: Driver | None = None) -> None:
        self.driver = driver or SingleRank()
        self.rank, self.size = self.driver.rank, self.driver.world_size
        self._stream, self._stream_of_losses = Stream(0), Stream(2)

    def gather(self, value: T) -> list[T]:
        """Each rank's `value`, of JSON's kinds, in the order of shards."""
        if self.size == 1:
            return [value]
        return cast("list[T]", self.driver.run(gather_values(value), self._stream.next()))

    def largest(self, *values: int) -> list[int]:
        """The largest of each rank's values, one by one."""
        return [max(each) for each in zip(*self.gather(values), strict=True)]

    def hypot(self, norm: float) -> float:
        """The norm of a vector of whose parts each rank knows one's norm: the same number on every
        rank.
        """
        return math.hypot(*self.gather(norm)) if self.size > 1 else norm

    def loss(self, within_s: float) -> PeerError | None:
        """That a rank of the island has failed or is gone, if that is learnt within so long. No
        other rank need ask.
        """
        others = frozenset(range(self.size)) - {self.rank}
        if others:
            try:
                self.driver.run(_hear(others, within_s), self._stream_of_losses.next())
            except PeerTimeoutError:
                return None
            except PeerError as error:
                return error
        return None

    def first(self, value: T) -> T:
        """What the first rank says."""
        return self.gather(value)[0]

    def collect(self, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Bring other ranks' tensors to the first one.

        Args:
            tensors: on the first rank, by rank, where to write them; on another one, its own under
                its number, which must not change before the first rank has answered something.
        """
        self.driver.run(_move(tensors, to_first=True, is_first=not self.rank), self._stream.next())

    def spread(self, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Bring tensors back from the first rank; the inverse of `collect`."""
        self.driver.run(_move(tensors, to_first=False, is_first=not self.rank), self._stream.next())


def _move(
    tensors: Mapping[int, Sequence[torch.Tensor]], *, to_first: bool, is_first: bool
) -> Collective[None]:
    """Send this rank's tensors, or receive into them, a few MiB at a time."""
    for number, each in tensors.items():
        peer = number if is_first else 0
        for tensor in each:
            # A tensor's own memory where that can be.
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
            for begin in range(0, content.size, FRAGMENT_BYTES):
                part = content[begin : begin + FRAGMENT_BYTES]
                if to_first == is_first:
                    part[:] = np.frombuffer((yield Recv(peer)), np.uint8)
                else:
                    yield Send(peer, part.data)
            if to_first == is_first and flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _hear(peers: frozenset[int], within_s: float) -> Collective[None]:
    """Wait for a message that nobody sends."""
    yield RecvAny(peers, timeout_s=within_s)
