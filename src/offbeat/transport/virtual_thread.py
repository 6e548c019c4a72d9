"""Code that blocks, under a virtual clock: in a thread of its own, which runs only while the
virtual cluster waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.transport.driver import Driver, Pending, Ticket
from offbeat.transport.operations import Collective, Operation
from offbeat.transport.virtual_driver import SleepUntil


class VirtualThread(Driver):
    """A driver for code that waits for its collectives, as training does, and the thread that runs
    it. One thread of all is awake, so nothing depends on how an operating system schedules them.

    Args:
        inner: a driver of a virtual cluster, or a wrapper of one.

    Attributes:
        is_awake: whether the code runs, and does not wait for a collective.
    """

    def __init__(self, inner: Driver) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.is_awake = True
        self._inner = inner
        self._awaited: Pending[Any] | None = None
        self._error: BaseException | None = None
        self._is_over = self._is_dropped = False
        self._may_go_on, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    def start(self, operation: Operation, channel: int) -> Ticket:
        return self._inner.start(operation, channel)

    def now_s(self, channel: int) -> float:
        return self._inner.now_s(channel)

    def close(self) -> None:
        self._inner.close()

    def complete(self, pending: Pending[Any]) -> None:
        if not pending.poll():
            self._awaited, self.is_awake = pending, False
            self._has_stopped.release()
            self._may_go_on.acquire()
            self.is_awake = True
            if self._is_dropped:
                raise SystemExit

    def carry(self, job: Callable[[], None]) -> Collective[None]:
        """Run `job`, which uses this driver, for `VirtualCluster.run`. Raises what it raises."""
        thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        thread.start()
        try:
            while (awaited := self._next_awaited()) is not None:
                while not awaited.over:
                    yield SleepUntil(over=awaited.ready)
                    with suppress(OffbeatError):  # which `job` gets
                        awaited.advance()
                self._may_go_on.release()
        finally:
            if not self._is_over:
                self._is_dropped = True
                self._may_go_on.release()
            thread.join()
        if self._error is not None:
            raise self._error

    def _next_awaited(self) -> Pending[Any] | None:
        """What the thread waits for, once it does; None: its job is over."""
        self._has_stopped.acquire()
        return None if self._is_over else self._awaited

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - is raised where the cluster runs
            self._error = error
        self._is_over = True
        self._has_stopped.release()
