"""Ends dense collectives that wait for a rank that is dead.

gloo and NCCL notice a process that has ended, but not one that is frozen or cut off: they wait for
it for ever. The message side knows who is dead. So while this rank waits within a dense collective,
a thread asks who is, and then cuts the dense side's connections, which ends the wait with an error
that names that rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Protocol, Self

from offbeat.errors import OffbeatError, PeerError

LOOK_S: Final = 0.2
"""From one look to the next."""


class Waiting(Protocol):
    """What is watched; see `C10d`."""

    rank: int

    def waits_for_s(self) -> float: ...

    def cut(self, cause: PeerError) -> None: ...


class Watch:
    """A thread that looks now and then, until `close`.

    Args:
        dense: what is cut.
        dead: the dead ranks and why, the first to blame first. Asked only while `dense` waits; must
            not block for long.
        limit_s: the longest wait, where no work of the user's can lie behind one; None for any.
    """

    def __init__(
        self,
        dense: Waiting,
        dead: Callable[[], Mapping[int, str]],
        *,
        limit_s: float | None = None,
    ) -> None:
        self._dense = dense
        self._dead = dead
        self._limit_s = limit_s
        self._was_dead = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except OffbeatError:  # the message side is closed, and this will be in a moment
                return

    def _look(self) -> None:
        waits_for_s = self._dense.waits_for_s()
        dead = self._dead() if waits_for_s > LOOK_S else {}
        # What a rank sent before it died still counts: an operation to which all have contributed
        # ends between two looks.
        if dead and self._was_dead:
            rank, reason = next(iter(dead.items()))
            self._dense.cut(
                PeerError(
                    f"rank {rank} {reason} (rank {self._dense.rank} waited for it in a dense"
                    " collective)",
                    rank=rank,
                )
            )
        elif self._limit_s is not None and waits_for_s > self._limit_s:
            self._dense.cut(PeerError(f"no rank answered for {self._limit_s:g} s"))
        self._was_dead = bool(dead)
