"""The order in which the dense collectives of several systems are launched, the same on all ranks.

A dense collective has no name on the wire: the first one that a rank launches meets the first one
of every other rank, the second meets the second, and so on. What is ready first may differ from
rank to rank, because hooks need not fire alike. So whoever launches something hands it to the
`LaunchOrder`, which holds it back until everything before it in the order has been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

LaunchKey: TypeAlias = tuple[str, int]
"""What is launched: ("gradients", number of a bucket) or ("factors", number of a message)."""


class LaunchOrder:
    """Goes once through a sequence of keys each time that one is set.

    What is not in the sequence, or was launched already, is launched at once. A new `LaunchOrder`
    has an empty sequence.
    """

    def __init__(self) -> None:
        self._sequence: Sequence[LaunchKey] = ()
        self._next = 0
        self._waiting: dict[LaunchKey, Callable[[], None]] = {}

    def follow(self, sequence: Sequence[LaunchKey]) -> None:
        """Go through `sequence` from now on. Everything of the sequence before that was handed over
        must have been launched.
        """
        assert not self._waiting, f"{list(self._waiting)} still wait in the sequence before"
        self._sequence, self._next = sequence, 0

    def launch(self, key: LaunchKey, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as everything before `key` has been launched, which may be now."""
        if key not in self._sequence[self._next :]:
            begin()
            return
        self._waiting[key] = begin
        while (
            self._next < len(self._sequence)
            and (ready := self._waiting.pop(self._sequence[self._next], None)) is not None
        ):
            # The position moves on first: `ready` may itself hand something over.
            self._next += 1
            ready()
