"""What a training loop has measured, on its way to the listeners that keep it: `session.log`, and
`offbeat.log` where there is no session at hand. And the way back: `offbeat.step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

from offbeat.errors import ConfigError
from offbeat.session import at_exit


class MetricsListener:
    """Hears what is logged. Does nothing unless a subclass overrides it."""

    def logged(self, values: Mapping[str, float]) -> None:
        """The loop has measured `values`."""

    def asked_for_step(self) -> int:
        """The loop asks how many steps the run has done, as far as this listener knows."""
        return 0


class SessionObserver(MetricsListener):
    """Hears what is logged, and of each step of a session that it was appended to; see
    `Session.observers`.
    """

    def step_ended(self, num_steps: int) -> None:
        """`optimizer.step()` is about to return, for the `num_steps`-th time."""

    def closed(self, error: BaseException | None) -> None:
        """The session has ended, by `error` if there was one. No exception may come out of this."""


_listeners: Final[list[MetricsListener]] = []
"""Those of the process, which hear what is logged whatever sessions there are."""


@contextmanager
def listening(listener: MetricsListener) -> Iterator[None]:
    """`listener` hears every `offbeat.log` of this process while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


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
    for session in at_exit.open_in_this_process():
        told += getattr(session, "observers", ())
    for listener in {id(listener): listener for listener in told}.values():
        listener.logged(numbers)


def step() -> int:
    """How many optimizer steps the run has done: those of this rank, and in a worker that comes
    back to a run, also before its first step, those that its peers have done without it.

        for step in range(offbeat.step(), num_steps):

    A script under `offbeat run --restarts` begins its counters and its schedule there. In all other
    workers it is 0 before the first step.
    """
    sessions = at_exit.open_in_this_process()
    done = [int(getattr(session, "steps_done", 0)) for session in sessions]
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
