"""What an emulated cluster offers to the supervisor of its workers, and what it says about itself
in a record.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar
from weakref import finalize

from offbeat.run.local_worker import Placement
from offbeat_lab.emulation import leftovers
from offbeat_lab.emulation.plan import EmulationName
from offbeat_lab.emulation.quotas import Quotas
from offbeat_lab.records import EmulationReport

T = TypeVar("T")


class Emulation(AbstractContextManager["Emulation"]):
    """An emulated cluster; a context manager that leaves nothing behind.

    Attributes:
        report: what was emulated, and how.
        store_address: address at which workers reach what listens within `call_inside`.
    """

    report: EmulationReport
    store_address: str

    def __init__(self) -> None:
        self._quotas: Quotas | None = None
        self._release: Callable[[], object] = lambda: None

    def _claim(self) -> EmulationName:
        """A name; what is called so is removed when this closes, or when this process ends."""
        name = leftovers.claim()
        self._release = finalize(self, leftovers.release, name)
        return name

    @abstractmethod
    def placement(self, worker: int) -> Placement:
        """Where to start `worker`."""

    def admit(self, worker: int, pid: int) -> None:
        """Give the process `pid`, just started, the share of the processors that `worker` has."""
        if self._quotas is not None:
            self._quotas.admit(worker, pid)

    def set_speed(self, worker: int, speed: float) -> None:
        """Change the share of `worker` while it runs; `speed` as in the cluster description.
        Nothing without quotas.
        """
        if self._quotas is not None:
            self._quotas.set_speed(worker, speed)

    @abstractmethod
    def set_link(self, worker: int, *, up: bool) -> bool:
        """Cut the link of `worker`, or mend it. Returns False where that cannot be done."""

    @abstractmethod
    def call_inside(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run where servers for all workers must listen."""

    def close(self) -> None:
        """Take everything down. Idempotent."""
        self._release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
