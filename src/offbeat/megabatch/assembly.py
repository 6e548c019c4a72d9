"""The members of the newest generation, as a trainer meets them: what they do together is done for
all of them or for none.

    the trainer:                 run(work), again in the next generation when a member was lost
    `membership.generations`:        begin, expelled, lost_store, retired, from a thread of its own

A worker that comes back, or was left out while it was stopped, is *new*: it knows nothing of what
the others have done, and is so until it says `caught_up`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation, StoreLostError, changes, store_errors
from offbeat.membership.commit import all_or_none
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PATIENCE_S = 60.0
"""How long a trainer waits for a generation in which it can go on. A death is noticed, and the next
one met, long before.
"""

_DONE, _VOID = "done", "void"


class Work(Protocol[T_co]):
    """One member's part in what all do together. Begun anew in each generation in which it is
    tried.
    """

    def __call__(self, generation: Generation, position: int) -> Collective[T_co]: ...


class Assembly:
    """One rank's view of the members. The host of `membership.generations`.

    Args:
        store: over a connection of the trainer's own.
        count: puts a wrapper that counts around a generation's driver.
        notify: for remarks.
        patience_s: how long to wait for a generation, > 0.

    Attributes:
        is_new: whether this rank knows nothing of what the others have done.
        has_finished: whether all have come to the end of their training, so that who leaves is
            worth no remark.
    """

    def __init__(
        self,
        store: Store,
        *,
        count: Callable[[Driver], Driver],
        notify: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.is_new = self.has_finished = False
        self._store = store
        self._count = count
        self._notify = notify
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._running: _Running | None = None
        self._left_out = False
        self._error: PeerError | None = None
        self._lost_store: str | None = None
        self._closed = False

    # The trainer's side

    def run(self, work: Work[T]) -> T:
        """What comes of `work`, carried out by all members of a generation: by the same one at all
        of them.

        All members that are not new call this equally often. It waits for all that live.

        Raises:
            PeerError: this rank can take part no more.
            StoreLostError: the store is gone.
        """
        tried = -1
        while True:
            running = self._generation_after(tried)
            tried = running.generation.number
            try:
                return running.attempt(work, self._store)
            except StoreLostError:
                raise
            except PeerError:
                self._check()

    def caught_up(self, generation: Generation) -> None:
        """This rank knows all that the others do, by what was done in `generation`; unless it was
        left out since.
        """
        with self._changed:
            self.is_new = self._left_out or (
                self._running is not None and self._running.begun_as_new_after(generation)
            )

    def abort(self, reason: str) -> None:
        """Tell the others that this rank has failed, and why."""
        with self._changed:
            if self._running is not None:
                self._running.driver.abort(reason)

    def closes_last(self) -> bool:
        """Say that this rank is about to close. Whether all other members of its
        generation have.
        """
        with self._changed:
            running = self._running
        if running is None:
            return False
        with store_errors():
            return (
                self._store.add(f"closing/{running.generation.number}", 1)
                >= running.generation.size
            )

    def close(self) -> None:
        """Give the mesh back. Idempotent."""
        with self._changed:
            self._closed = True
            running, self._running = self._running, None
            self._changed.notify_all()
        if running is not None:
            running.driver.close()

    # What `membership.generations` asks for

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        counted = self._count(driver)
        with self._changed:
            if self._closed:
                counted.close()
                return
            old = self._running
            is_new = position in generation.newcomers
            self._running = _Running(generation, position, counted, is_new=is_new)
            self.is_new = self.is_new or is_new
            self._left_out, self._lost_store = False, None
            self._changed.notify_all()
        if old is None and generation.number and not is_new:
            self._notify(
                f"generation {generation.number}: {generation.size} workers; whoever else was to"
                " begin has ended"
            )
        if old is not None:
            old.driver.close()  # whoever waits there hears of it, and goes over too
            if not self.has_finished:
                self._notify(changes(old.generation, generation))

    def unreachable(self) -> frozenset[int]:
        with self._changed:
            return frozenset() if self._running is None else self._running.driver.gone()

    def expelled(self) -> None:
        with self._changed:
            self._left_out = self.is_new = True
        self._notify(
            "this worker was away for so long that the others went on without it; it joins them"
            " again"
        )

    def lost_store(self, reason: str) -> None:
        with self._changed:
            self._lost_store = reason
            self._changed.notify_all()

    def retired(self, reason: str) -> None:
        with self._changed:
            self._error = PeerError(reason)
            if self._running is not None:
                self._running.driver.close()
            self._changed.notify_all()

    def _generation_after(self, number: int) -> _Running:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_after(number) or self._cannot_go_on, self._patience_s
            )
            self._check()
            running = self._running
            if running is None or not self._is_after(number):
                lost = self._lost_store
                if lost is not None:
                    raise StoreLostError(
                        "a worker was lost, and the others cannot be met without the run's store:"
                        f" {lost}"
                    )
                raise PeerError(
                    f"a worker was lost, and no next generation was met within {self._patience_s:g}"
                    " s; do others run, and can they and the run's store be reached?"
                )
            return running

    @property
    def _cannot_go_on(self) -> bool:
        return self._error is not None or self._closed or self._lost_store is not None

    def _is_after(self, number: int) -> bool:
        return (
            self._running is not None
            and self._running.generation.number > number
            and not self._left_out
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise PeerError("this session is closed; nothing can be exchanged any more")


@dataclass(eq=False)
class _Running:
    """A generation at work here."""

    generation: Generation
    position: int
    driver: Driver
    is_new: bool

    def __post_init__(self) -> None:
        self._channels = Stream(1)
        self._num_attempts = 0

    def begun_as_new_after(self, generation: Generation) -> bool:
        return self.is_new and self.generation.number > generation.number

    def attempt(self, work: Work[T], store: Store) -> T:
        number, size = self._num_attempts, self.generation.size
        self._num_attempts += 1
        prefix = f"settled/{self.generation.number}"
        if (
            self.position == 0 and number >= 2
        ):  # all have begun the one after it, so nobody asks for it any more
            with store_errors():
                store.delete_key(f"{prefix}/{number - 2}")

        def verdict(*, done: bool) -> bool:
            word = _DONE if done else _VOID
            with store_errors():
                return bool(store.compare_set(f"{prefix}/{number}", "", word) == _DONE.encode())

        together = all_or_none(self.position, size, work(self.generation, self.position), verdict)
        return self.driver.run(together, self._channels.next())
