"""Sessions that are still open when the interpreter ends.

A thread that lives on then is ended by the interpreter within whatever it does. Within a call into
C++, such as one to the store, that ends the whole process by SIGABRT, with the words "terminate
called without an active exception". So sessions are closed before, their threads with them.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Protocol
from weakref import WeakKeyDictionary

from offbeat.errors import OffbeatError


class Closeable(Protocol):
    """What a session offers here."""

    def close(self, *, average: bool) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


_open: WeakKeyDictionary[Closeable, int] = WeakKeyDictionary()
"""By session, the process that opened it: a forked child must not close its parent's."""


def remember(session: Closeable) -> None:
    """Close `session` at the interpreter's end, unless `forget` comes first."""
    _open[session] = os.getpid()


def forget(session: Closeable) -> None:
    """`session` is closed."""
    _open.pop(session, None)


def open_in_this_process() -> list[Closeable]:
    """What this process has opened and not closed yet."""
    return [session for session, pid in _open.items() if pid == os.getpid()]


def close_open_sessions() -> None:
    """Close what this process has left open, as the end of a `with` block does, which is left by
    the exception that ended the script if one did. So the peers hear of it.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    for session in open_in_this_process():
        with suppress(OffbeatError):
            if error is None:
                session.close(average=False)  # nobody looks at the model any more
            else:
                session.__exit__(type(error), error, error.__traceback__)


atexit.register(close_open_sessions)
