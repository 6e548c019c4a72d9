"""The interface of an emulation, and the one that emulates nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from offbeat.lab.emulation.report import EmulationReport

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How to start a worker in its place.

    Attributes:
        prefix: command to put before the worker's; it becomes the worker, so that the process id is the worker's own.
        environment: variables the worker needs.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Emulation(ABC):
    """A cluster, for as long as it is open.

    Attributes:
        report: what is emulated, and how.
        store_address: where workers reach what `call_inside` let listen there.
    """

    report: EmulationReport
    store_address: str = "127.0.0.1"

    def placement(self, worker: int) -> Placement:
        return Placement()

    def admit(self, worker: int, pid: int) -> None:  # noqa: B027 - nothing to do where compute is not emulated
        """Put a worker that has just been started under its quota."""

    def set_speed(self, worker: int, speed: float) -> None:  # noqa: B027
        """Change a worker's speed, where quotas make it."""

    def set_link(self, worker: int, *, up: bool) -> bool:
        """Cut a worker off, or mend its link. Returns whether that can be done here."""
        return False

    def call_inside(self, function: Callable[[], T]) -> T:
        """Run `function` where the workers can reach what it opens."""
        return function()

    def sent_bytes(self, worker: int) -> int | None:
        """What the worker's link has carried away, headers included; None where it is not the kernel's."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Plain(Emulation):
    """This machine as it is, or with its links delayed by the workers themselves."""

    def __init__(self, report: EmulationReport) -> None:
        self.report = report

    def close(self) -> None:
        pass
