"""What a broken dense collective says of the rank that broke it."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NoReturn

import pytest
import torch

from offbeat.errors import PeerError
from offbeat.transport.operations import AllReduceTensor
from offbeat.transport.routed import Routed


class Broken:
    """The dense side, whose connections have just ended; and the ticket of each collective."""

    rank, world_size = 0, 3

    def start(self, operation: object, channel: int) -> Broken:
        return self

    def wait(self) -> NoReturn:
        raise PeerError("a connection failed during AllReduce")

    def waits_for_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Messages:
    """The message side: rank 2 has left in good order, and nobody is dead."""

    rank = 0
    lost: frozenset[int] = frozenset()

    def dead(self) -> dict[int, str]:
        return {}

    def ended(self) -> list[int]:
        return []

    def left(self) -> list[int]:
        return [2]

    def wait_for_death(self, timeout_s: float) -> dict[int, str]:
        raise AssertionError("nobody has died: this would wait for nothing")

    def close(self) -> None:
        pass


def test_a_rank_that_has_left_early_is_named_at_once() -> None:
    dense: Any = Broken()
    messages: Any = Messages()
    with closing(Routed(dense, messages)) as routed:
        ticket = routed.start(AllReduceTensor(torch.zeros(1)), 0)
        with pytest.raises(PeerError, match="rank 2 finished and closed its connections") as raised:
            ticket.wait()
    assert raised.value.rank == 2
