"""What a training loop has measured, on its way to the observers that keep it: `session.log`, and
`offbeat.log` where there is no session at hand. And the way back: `offbeat.step`.

`offbeat.log` tells the sessions of this process that are open. They are closed when the interpreter
ends: a thread that lives on then is ended within whatever it does. Within a call into C++, such as
one to the store, that ends the whole process by SIGABRT, with the words "terminate called without
an active exception".
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch

from offbeat.errors import ConfigError, OffbeatError

if TYPE_CHECKING:
    from offbeat.session.session import Session


class SessionObserver:
    """Hears what is logged, and of each step of a session that it was appended to; see
    `Session.observers`. Does nothing unless a subclass overrides it.
    """

    def logged(self, values: Mapping[str, float]) -> None:
        """The loop has measured `values`."""

    def asked_for_step(self) -> int:
        """The loop asks how many steps the run has done, as far as this observer knows."""
        return 0

    def step_ended(self, num_steps: int) -> None:
        """`optimizer.step()` is about to return, for the `num_steps`-th time."""

    def closed(self, error: BaseException | None) -> None:
        """The session has ended, by `error` if there was one. No exception may come out of this."""


_listeners: Final[list[SessionObserver]] = []
"""The listeners of the process, which hear what is logged whatever sessions there are."""

_open: Final[WeakKeyDictionary[Session, int]] = WeakKeyDictionary()
"""By session, the process that opened it: a forked child must not close its parent's."""


@contextmanager
def listening(listener: SessionObserver) -> Iterator[None]:
    """`listener` hears every `offbeat.log` of this process while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def session_opened(session: Session) -> None:
    """Close `session` at the interpreter's end, unless `session_closed` comes first."""
    _open[session] = os.getpid()


def session_closed(session: Session) -> None:
    """`session` is closed."""
    _open.pop(session, None)


def open_sessions() -> list[Session]:
    """What this process has opened and not closed yet."""
    return [session for session, pid in _open.items() if pid == os.getpid()]


@atexit.register
def close_open_sessions() -> None:
    """Close what this process has left open, as the end of a `with` block does, which is left by
    the exception that ended the script if one did. So the peers hear of it.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    for session in open_sessions():
        with suppress(OffbeatError):
            if error is None:
                session.close(average=False)  # nobody looks at the model any more
            else:
                session.__exit__(type(error), error, error.__traceback__)


def log(**values: float | torch.Tensor) -> None:
    """`Session.log` for code that has no session at hand, such as a script under `offbeat run`: all
    open sessions of this process, and the record of the run, are told.

        offbeat.log(loss=loss, accuracy=0.93)

    Without a record it does nothing, so that a script may keep it.

    Args:
        values: numbers, or tensors of one element, by name.

    Raises:
        ConfigError: a value is no number.
    """
    numbers = as_numbers(values)
    told = [*_listeners]
    for session in open_sessions():
        told += session.observers
    for listener in {id(listener): listener for listener in told}.values():
        listener.logged(numbers)


def step() -> int:
    """How many optimizer steps the run has done: those of this rank, and in a worker that comes
    back to a run, also before its first step, those that its peers have done without it.

        for step in range(offbeat.step(), num_steps):

    A script under `offbeat run --restarts` begins its counters and its schedule there. In all other
    workers it is 0 before the first step.
    """
    done = [session.steps_done for session in open_sessions()]
    return max([0, *done, *(listener.asked_for_step() for listener in _listeners)])


def as_numbers(values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    """Each of `values` as a float. Raises `ConfigError`."""
    try:
        return {
            name: float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in values.items()
        }
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"log takes numbers and tensors of one element, by name: {error}; such as"
            " log(loss=0.31, accuracy=0.93)"
        ) from error
