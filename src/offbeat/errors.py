"""Every error that offbeat raises on purpose, as one tree, and its one kind of warning.

A message says what was got, what is allowed and the likely fix. `OffbeatError` catches them all;
the command line prints their text and exits non-zero, without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final


class OffbeatError(Exception):
    """Root of the tree."""


class ConfigError(OffbeatError, ValueError):
    """An argument, option or file written by the user cannot be used as it is."""


class UnsupportedError(ConfigError):
    """The model, optimizer or environment is of a kind that offbeat refuses, with the reason."""


class MismatchError(OffbeatError):
    """The ranks do not agree on the model, the optimizer, the strategy or the number of backward
    passes.
    """


class PeerError(OffbeatError):
    """Another rank failed. The message names the rank and what this rank was waiting for."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerTimeoutError(PeerError):
    """A receive that was given a time limit reached it. Nothing was lost: the message may still
    come and be received.
    """


class WireError(OffbeatError):
    """A message is truncated, corrupt, of a foreign run, or of another version."""


class NonFiniteError(OffbeatError):
    """Too many steps in a row were skipped because some rank's gradient was not finite."""


class DivergedError(OffbeatError):
    """Replicas that must be identical are not."""


class CheckpointError(OffbeatError):
    """A checkpoint is missing, truncated, altered, or does not fit what it is loaded into."""


class RecordError(OffbeatError):
    """A directory is no run record, or one of a newer version."""


class OffbeatWarning(UserWarning):
    """Something changes the meaning of a run, and training goes on. Issued once a session."""


MALFORMED: Final = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
"""What Python raises where data that came from elsewhere do not have the shape that is expected. A
reader turns them into an `OffbeatError`.
"""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'gtopk'?`` for a misspelt `name`, or an empty string when
    nothing is near.
    """
    close = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
