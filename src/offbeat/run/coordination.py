"""A run's store, and what its ranks agree on through it besides training: who lives, who leads,
when all are done. The supervisor serves the store, on loopback where the run has one host; ranks
that torchrun or srun has started use that of torch.distributed.

Where a strategy survives the death of a worker, the supervisor records deaths in the store, and a
rank that waits, waits for the living ones only. A worker that comes back counts again from the step
at which it joins, so what is waited for is named by its step. Under torchrun no one records deaths,
and every rank waits for all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Final, TypeAlias

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from offbeat.transport.connect import RETURN_VARIABLE, launched
from offbeat.transport.interface import ADDRESS_VARIABLE, bound_socket

LOOPBACK: Final = "127.0.0.1"
ON_LOOPBACK: Final = {
    "OFFBEAT_INTERFACE": LOOPBACK,
    ADDRESS_VARIABLE: "",  # nobody comes to loopback by the address that other hosts know
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
"""Environment variables of workers of one host."""

SUPERVISED_VARIABLE: Final = "OFFBEAT_STORE_PORT"
"""Environment variable of a worker whose supervisor serves the store, and records deaths in it."""

PATIENCE: Final = timedelta(minutes=30)
"""Slowness is no failure: a dead worker is noticed by the process that started it."""

RunStore: TypeAlias = TCPStore
"""The store of a run, which workers reach at its `host` and `port`."""

_PREFIX: Final = "offbeat-run"
_LONGEST_PAUSE_S: Final = 0.02
_never: Final = threading.Event()


def serve_store(address: str = LOOPBACK, port: int = 0) -> RunStore:
    """The store, in this process and as long as it lives, on a socket that listens on `address`
    only.

    Args:
        address: of this host.
        port: 0 takes a free one.
    """
    with bound_socket(address, port) as listener:
        # Given only an address, the store would listen on every interface.
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=PATIENCE,
            master_listen_fd=os.dup(listener.fileno()),
        )


def store_client(address: str, port: int) -> RunStore:
    """A connection to the store that a supervisor serves at `address`. Waits for it. Raises
    `RuntimeError` where nobody serves one.
    """
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)


def store_environment(store: RunStore, rank: int, world_size: int) -> dict[str, str]:
    """What worker `rank` needs to find `store`, in variables that torch.distributed knows too."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        SUPERVISED_VARIABLE: str(store.port),
    }


def text_in_time(store: Store, key: str) -> str | None:
    """The text of `key`; None where nobody has set it within `PATIENCE`. A wait of the store's own
    does not hear Ctrl-C.
    """
    until_s, pauses = time.monotonic() + PATIENCE.total_seconds(), _pauses(1e-3)
    while not store.check([key]):
        if time.monotonic() > until_s:
            return None
        next(pauses)
    return store.get(key).decode()


def record_death(store: Store, rank: int, *, deaths: int) -> None:
    """Tell all ranks that the process of `rank` has died, for the `deaths`-th time. The supervisor
    calls this.
    """
    store.set(_key("deaths", rank), str(deaths))


def publish_step(store: Store, rank: int, step: int) -> None:
    """Tell ranks that come back how many steps `rank` has done. The supervisor calls this, which
    hears of it anyway.
    """
    store.set(_key("step", rank), str(step))


def only_returned_ranks_step(store: Store, world_size: int) -> bool:
    """Whether some ranks have never died, and all of them take no more steps."""
    originals = [rank for rank in range(world_size) if not store.check([_key("deaths", rank)])]
    return bool(originals) and store.check([_key("no more steps", rank) for rank in originals])


@dataclass(frozen=True, eq=False)
class Coordinator:
    """One rank's view of what is agreed on.

    Attributes:
        store: of this run.
        rank, world_size: this rank's place, as the run was begun.
        restart: how many processes have had this rank before this one.
        supervised: whether a supervisor records deaths in the store.
    """

    store: Store
    rank: int
    world_size: int
    _: KW_ONLY
    restart: int = 0
    supervised: bool = False

    def publish(self, name: str, text: str) -> None:
        """Store `text` under `name` for all ranks, those that join later included. It replaces what
        was published under that name before.
        """
        self.store.set(_key(name), text)

    def published(self, name: str) -> str | None:
        """What has been published under `name`; None if nothing has."""
        key = _key(name)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def rejoin_at(self, first_step: int) -> None:
        """From `first_step` on, this rank takes part in what is waited for."""
        self.publish(f"back/{self.rank}/{self.restart}", str(first_step))

    def all_gather(self, name: str, text: str) -> list[str]:
        """Every rank's `text`, by rank. Waits for all of them, dead or alive. A name serves
        once.
        """
        self.publish(f"{name}/{self.rank}", text)
        return [self.store.get(_key(name, rank)).decode() for rank in range(self.world_size)]

    def gather_living(
        self, name: str, text: str, *, step: int | None = None, patience_s: float | None = None
    ) -> dict[int, str]:
        """Wait for the living ranks and return each one's `text`, by rank, ascending. All get the
        same answer.

        Args:
            name: of this exchange; serves once.
            text: this rank's.
            step: a rank that came back is waited for if it took part in this step; None: in any
                case.
            patience_s: how long to wait for late ranks before they are left out, this rank too if
                it is one; None: for ever.
        """
        self.publish(f"{name}/{self.rank}", text)
        decided = _key(name)
        if not self.store.check([decided]):
            until_s = None if patience_s is None else time.monotonic() + patience_s
            texts = {
                rank: self.text_of(name, rank, step, until_s, decided)
                for rank in range(self.world_size)
            }
            here = {rank: found for rank, found in texts.items() if found is not None}
            # Two ranks may have left out different late ones; the first to write decides for all.
            self.store.compare_set(decided, "", json.dumps(list(here.items())))
        return dict(json.loads(self.store.get(decided)))

    def take_no_more_steps(self) -> None:
        """No rank is to wait for another step of this one."""
        self.publish(f"no more steps/{self.rank}", "")

    def has_taken_last_step(self, rank: int) -> bool:
        """Whether `rank` has said `take_no_more_steps`."""
        return self.published(f"no more steps/{rank}") is not None

    @property
    def step(self) -> int:
        """How many steps the rank that is furthest had done about half a second ago; 0 where no
        supervisor says it.
        """
        return max(int(self.published(f"step/{rank}") or 0) for rank in range(self.world_size))

    @property
    def leader(self) -> int:
        """The rank that measures and writes for all: of the living ranks, the one that has died
        least often, and the lowest of those. So another rank leads only once the leader is dead.
        """
        return self._leader_among(range(self.world_size))

    def _leader_among(self, ranks: Collection[int]) -> int:
        if not self.supervised:
            return 0
        deaths = {rank: self._deaths(rank) for rank in ranks}
        living = [rank for rank in deaths if rank == self.rank or self.is_alive(rank, None)]
        return min(living, key=lambda rank: (deaths[rank], rank))

    def must_perform(self, name: str, among: Collection[int]) -> bool:
        """Whether this rank must do `name` for all, as the leader. Elsewhere False, once the leader
        has published that it did.

        If the leader dies before that, the next leader must do it. Where no one records deaths,
        ranks that do not lead do not wait.

        Args:
            name: of what is to be done.
            among: ranks that may lead: those known to have come this far, this rank among them.
        """
        pauses = _pauses(1e-3)
        while True:
            # Before looking: what a dead leader has not published by now it never will.
            leads = self._leader_among(among) == self.rank
            if self.published(name) is not None or not (leads or self.supervised):
                return False
            if leads:
                return True
            next(pauses)

    def text_of(
        self,
        name: str,
        rank: int,
        step: int | None,
        until_s: float | None,
        decided: str | None = None,
    ) -> str | None:
        """The text of `rank`; None once it is clear that none will come in time, or that the
        answer has been decided without it.
        """
        key, pauses = _key(name, rank), _pauses(2e-4)
        if not self.supervised and until_s is None:
            return self.store.get(key).decode()
        while True:
            # Before looking: what a dead rank has not said by now it will never say.
            lives = self.is_alive(rank, step)
            if self.store.check([key]):
                return self.store.get(key).decode()
            if not lives or (until_s is not None and time.monotonic() > until_s):
                return None
            if decided is not None and self.store.check([decided]):
                return None
            next(pauses)

    def is_alive(self, rank: int, step: int | None) -> bool:
        """Whether `rank` lives, as far as deaths are recorded; with `step`, whether it takes part
        in that step.
        """
        deaths = self._deaths(rank)
        if deaths == 0 or rank == self.rank:
            return True
        back = self.published(f"back/{rank}/{deaths}")
        return back is not None and (step is None or int(back) <= step)

    def _deaths(self, rank: int) -> int:
        return int(self.published(f"deaths/{rank}") or 0)


def _pauses(pause_s: float) -> Iterator[None]:
    """Each `next` waits, for twice as long as the one before."""
    while True:
        _never.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield


def _key(*parts: object) -> str:
    return "/".join(map(str, (_PREFIX, *parts)))


def supervised_coordinator() -> Coordinator:
    """The view of a worker which a supervisor of offbeat's has started, and which makes a process
    group by itself.
    """
    launch = launched()
    assert launch is not None, "the supervisor says which rank this is"
    return Coordinator(
        store_client(os.environ["MASTER_ADDR"], int(os.environ[SUPERVISED_VARIABLE])),
        launch.rank,
        launch.world_size,
        restart=int(os.environ.get(RETURN_VARIABLE) or 0),
        supervised=True,
    )


def group_store(key: str) -> Store:
    """Of torch.distributed's default group, or of this process alone; each `key` has its own."""
    if not dist.is_initialized():
        return dist.HashStore()
    assert dist.group.WORLD is not None
    return dist.PrefixStore(f"offbeat-record-{key}", dist.group.WORLD.get_group_store())


def group_coordinator() -> Coordinator:
    """One of the ranks of torch.distributed's default group, or of this process alone."""
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Coordinator(group_store("run"), *place)
