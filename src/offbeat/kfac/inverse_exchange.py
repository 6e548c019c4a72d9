"""How every rank gets the inverses it needs. Each is made by its owner as soon as its factors have
arrived, and is broadcast while the owner makes the next one; or every rank makes it.

1. `start` is called when gradients are final.
2. `advance` is called whenever another message of factors has been taken in. What that completes is
   inverted by its owners and sent, in the order that was planned (`kfac.plans`).
   Messages are launched in this order on every rank.
3. `fill` is called while the next message is still under way, and makes some of what every rank
   inverts.
4. `finish` makes the rest of it, and waits for the peers' inverses.

No thread inverts beside the backward pass: on a CPU it would take its cores from that pass. What
could be gained by it is what remains exposed of broadcasts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from offbeat.collectives.dense import dense_broadcast
from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.inverses import MOST_AT_ONCE, InversionTask, Inverter, is_asynchronous
from offbeat.kfac.plans import InverseBatch
from offbeat.transport.driver import Driver, Pending, Stream


class InverseExchange:
    """Where all inverses that this rank has are kept, and how they get there.

    Args:
        order: who inverts what, and when.
        slots: all factors of the model.
        dtypes: in what dtype the inverse of each is kept.
        travels: whether owners send inverses. False: a rank has what it owns, and what every rank
            inverts.
        driver: carries broadcasts out.
        stream: of the broadcasts.
        inverter: inverts.

    Attributes:
        packed: what stands for the inverse of each slot; zeros stand for none. None where this rank
            needs none.
        invert_s: seconds spent so far on computing inverses.
        wait_s: seconds spent so far on waiting for the other ranks' inverses.
    """

    def __init__(
        self,
        order: Sequence[InverseBatch],
        slots: Sequence[FactorSlot],
        dtypes: Sequence[torch.dtype],
        *,
        travels: bool,
        driver: Driver,
        stream: Stream,
        inverter: Inverter,
    ) -> None:
        self.invert_s = self.wait_s = 0.0
        self._driver, self._stream, self._inverter = driver, stream, inverter
        self._travels, self._slots = travels, slots
        self.packed: list[torch.Tensor | None] = [None] * len(slots)
        # What an owner inverts in one go, and where these inverses lie side by side.
        self._messages: list[tuple[InverseBatch, int, torch.Tensor]] = []
        self._by_all = [batch for batch in order if batch.owner is None]
        for batch in order:
            if batch.owner is None or travels or batch.owner == driver.rank:
                flat = self._make_room([slots[slot] for slot in batch.slots], dtypes)
                if batch.owner is not None:
                    self._messages.append((batch, batch.owner, flat))
        self._task_of: Callable[[int], InversionTask] | None = None
        self._num_messages: float = 0
        self._to_send: deque[tuple[InverseBatch, int, torch.Tensor]] = deque()
        self._to_fill: deque[InverseBatch] = deque()
        self._pending: list[Pending[torch.Tensor]] = []

    def _make_room(
        self, slots: Sequence[FactorSlot], dtypes: Sequence[torch.dtype]
    ) -> torch.Tensor:
        """For the inverses of `slots`, one after the other in one tensor."""
        kept = [self._inverter.stored_shape(slot.shape) for slot in slots]
        sizes = [rows * columns for rows, columns in kept]
        first = slots[0]
        flat = torch.zeros(sum(sizes), dtype=dtypes[first.index], device=first.device)
        for slot, part, shape_kept in zip(slots, flat.split(sizes), kept, strict=True):
            self.packed[slot.index] = part.view(shape_kept)
        return flat

    def take_over(self, before: InverseExchange) -> None:
        """Go on where `before` stopped, whose inverses lay side by side in another order."""
        self.invert_s, self.wait_s = before.invert_s, before.wait_s
        for old, new in zip(before.packed, self.packed, strict=True):
            if old is not None and new is not None:
                new.copy_(old)

    def start(self, task_of: Callable[[int], InversionTask]) -> None:
        """From now on every inverse is brought up to date. `task_of` says what to invert for a slot
        that this rank inverts.
        """
        self._task_of, self._num_messages = task_of, 0
        self._to_send, self._to_fill, self._pending = deque(self._messages), deque(self._by_all), []

    def advance(self, num_messages: float) -> None:
        """The first `num_messages` messages of factors have been taken in: owners invert and send
        what needs no more.
        """
        self._num_messages = num_messages
        while self._to_send and self._to_send[0][0].num_messages <= num_messages:
            batch, owner, flat = self._to_send.popleft()
            if owner == self._driver.rank:
                self._invert(batch.slots)
            if self._travels:
                # Every rank launches every broadcast here, in the planned order: one that inverts
                # nothing waits for its peers' inverses already while they are being made.
                broadcast = dense_broadcast(flat, owner)
                self._pending.append(self._driver.launch(broadcast, self._stream.next()))

    def fill(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, invert of what every rank inverts whatever has arrived.

        Ranks may get differently far here: that changes neither what is inverted together nor the
        order of messages.
        """
        while (
            self._to_fill and self._to_fill[0].num_messages <= self._num_messages and not is_over()
        ):
            self._invert(self._to_fill.popleft().slots)

    def finish(self) -> None:
        """Until all inverses are there."""
        self.advance(math.inf)
        self.fill(lambda: False)
        begin_s = time.perf_counter()
        for broadcast in self._pending:
            broadcast.wait()
        self.wait_s += time.perf_counter() - begin_s
        self._pending = []

    def _invert(self, slots: Sequence[int]) -> None:
        assert self._task_of is not None
        begin_s = time.monotonic()
        for some in self._portions(slots):
            rooms = [room for slot in some if (room := self.packed[slot]) is not None]
            tasks = [self._task_of(slot) for slot in some]
            inverses = self._inverter.invert(tasks, rooms=rooms)
            for room, inverse in zip(rooms, inverses, strict=True):
                room.copy_(inverse)
        self.invert_s += time.monotonic() - begin_s

    def _portions(self, slots: Sequence[int]) -> Iterator[list[int]]:
        """`slots`, as many at a time as are inverted in one call."""
        portion: list[int] = []
        num_elements = 0
        for slot in slots:
            shape = self._slots[slot].shape
            num_elements += shape.groups * (1 if shape.is_diagonal else shape.dim**2)
            # A CPU gains nothing by further ones in one call, and needs memory for all of them.
            is_too_much = num_elements > MOST_AT_ONCE
            if portion and is_too_much and not is_asynchronous(self._slots[slot].device):
                yield portion
                portion, num_elements = [], shape.groups * shape.dim**2
            portion.append(slot)
        yield portion
