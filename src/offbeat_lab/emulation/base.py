"""What an emulated cluster offers to the supervisor of its workers, and what it says about itself
in a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from offbeat.errors import ConfigError
from offbeat_lab.emulation.quotas import Quotas

T = TypeVar("T")
Speeds: TypeAlias = Literal["equal", "quotas", "padded", "sleeping", "ignored"]


class MissingMeansError(ConfigError):
    """This machine, or this user on it, lacks something without which the kernel cannot emulate a
    network.
    """


class LinkCheck(BaseModel):
    """What a worker's link carried before it was handed out.

    Attributes:
        worker: whose link.
        peer: the worker it sent to; None where there is no other.
        asked_bit_per_s: rate asked for, each way; None where it is not limited.
        sent_bit_per_s, received_bit_per_s: payload, measured both ways at once.
        share: the worse direction over what the links at both its ends allow; None where neither is
            limited.
        round_trip_s: the shortest of a few, to `peer` and back, of a byte while nothing else was
            sent.
        together: whether all workers were sending meanwhile; False where the link keeps its rate
            only by itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: int
    peer: int | None
    asked_bit_per_s: float | None
    sent_bit_per_s: float
    received_bit_per_s: float
    share: float | None
    round_trip_s: float
    together: bool = True

    @property
    def measured_bit_per_s(self) -> float:
        """The worse of the two directions."""
        return min(self.sent_bit_per_s, self.received_bit_per_s)


class EmulationReport(BaseModel):
    """What was emulated, and how. It belongs into the record and on the page.

    Attributes:
        kind: by what means the network is emulated.
        network, compute: a sentence each.
        speeds: what makes workers of different speeds: the kernel's quotas, steps padded to a fixed
            time, or workers that sleep after they computed; "equal" where there is no difference,
            "ignored" where no emulation was asked for.
        checks: of each worker's link, by worker; empty where the kernel emulates none.
        notices: what was asked for and could not be emulated, why, and what stands in for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none", "namespaces", "delaying"]
    network: str
    compute: str
    speeds: Speeds = "equal"
    checks: list[LinkCheck] = []
    notices: list[str] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a worker is to run.

    Attributes:
        prefix: words to put before its command; what they name turns into the worker, so that its
            pid stays the same.
        namespace: file of the network namespace that `prefix` enters; None where it enters none.
        environment: variables to add to its own.
    """

    prefix: tuple[str, ...] = ()
    namespace: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Emulation(ABC):
    """An emulated cluster; a context manager that leaves nothing behind.

    Attributes:
        report: what was emulated, and how.
        store_address: address at which workers reach what listens within `call_inside`.
    """

    report: EmulationReport
    store_address: str

    def __init__(self, quotas: Quotas | None) -> None:
        self._quotas = quotas

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

    @abstractmethod
    def sent_bytes(self, worker: int) -> int | None:
        """Bytes that have gone through the worker's link so far, headers included; None where the
        kernel has no such link.
        """

    @abstractmethod
    def close(self) -> None:
        """Take everything down. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
