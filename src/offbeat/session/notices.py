"""What a user should know of a run: kept for the record, logged, and, where it changes what the run
means, issued as a Python warning.
"""

from __future__ import annotations

import logging
import warnings
from typing import Final

from offbeat.errors import OffbeatWarning

MAX_NOTICES: Final = 100

LOGGER: Final = logging.getLogger("offbeat")


class Notices:
    """The notices of one session. Any thread may add one.

    Args:
        rank: this rank, which log records name.

    Attributes:
        kept: the first notices, at most 100, in order.
    """

    def __init__(self, rank: int) -> None:
        self.kept: list[str] = []
        self._rank = rank
        self._warned: set[str] = set()
        self._due: list[str] = []

    def inform(self, remark: str) -> None:
        """Say what was chosen or counted, where all goes as it should."""
        self._add(remark, logging.INFO)

    def notify(self, remark: str) -> None:
        """Say what went another way than it was asked for."""
        self._add(remark, logging.WARNING)

    def warn(self, remark: str) -> None:
        """Say what changes the meaning of the run, the same words once a session."""
        if remark in self._warned:
            return
        self._warned.add(remark)
        self._add(remark, logging.WARNING)
        self._due.append(remark)

    def issue_warnings(self) -> None:
        """Issue the Python warnings that are due. For the trainer's thread, between two events.

        They wait for this because a filter may turn a warning into an exception: in a thread of the
        library, or in the middle of an exchange, that would leave the peers waiting.
        """
        while self._due:
            warnings.warn(self._due.pop(0), OffbeatWarning, stacklevel=2)

    def _add(self, remark: str, level: int) -> None:
        if len(self.kept) < MAX_NOTICES:
            self.kept.append(remark)
        LOGGER.log(level, "rank %d: %s", self._rank, remark)
