"""Members that come and go: real sockets on loopback, a real store, and for one test real
processes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch.distributed import PrefixStore, TCPStore

from offbeat.errors import ConfigError, MismatchError, PeerError
from offbeat.membership.agreement import Generation, Member, Membership
from offbeat.membership.generations import Generations
from offbeat.transport.link import PeerLimits
from offbeat.transport.network import Network
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from rank_jobs.membership import PREFIX, be_a_member, has_begun
from ranks_support.process import StartProcess, start_process

if TYPE_CHECKING:
    from torch.distributed import Store

    from offbeat.transport.driver import Driver

__all__ = ["start_process"]

SECRET = b"a secret of this test run only"
PATIENCE_S = 60.0
BRISK = PeerLimits(
    grace_s=0.1,
    heartbeat_interval_s=0.1,
    heartbeat_timeout_s=20.0,
    connect_timeout_s=60.0,
    linger_s=1.0,
)
LONG_S = 20.0
"""Longer than a thread may wait for a busy machine to let it beat."""


class Worker:
    """The host of one rank's generations, which writes down what it is told."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        silence_s: float = LONG_S,
        limits: PeerLimits = BRISK,
    ) -> None:
        self.network = Network(
            store=store, rank=rank, world_size=world_size, address="127.0.0.1", secret=SECRET
        )
        self.generations = Generations(
            self.network, self, interval_s=0.01, silence_s=silence_s, limits=limits
        )
        self.begun: list[tuple[Generation, int]] = []
        self.told: list[str] = []
        self.stopped_seeing: set[Member] = set()
        self.is_busy, self.times_asked = False, 0
        self._driver: Peers | None = None
        self._news = threading.Condition()

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        assert isinstance(driver, Peers)
        old = self._driver
        with self._news:
            self._driver = driver
            self.begun.append((generation, position))
            self._news.notify_all()
        if old is not None:
            old.close()

    def unreachable(self) -> frozenset[int]:
        assert self._driver is not None
        hidden = [
            position
            for position, member in enumerate(self.generation.members)
            if member in self.stopped_seeing
        ]
        return frozenset([*self._driver.dead(), *self._driver.left(), *hidden])

    def expelled(self) -> None:
        self._hear("expelled")

    def may_return(self) -> bool:
        with self._news:
            self.times_asked += 1
            self._news.notify_all()
            return not self.is_busy

    def lost_store(self, reason: str) -> None:
        self._hear(f"lost store: {reason}")

    def found_store(self) -> None:
        self._hear("found store")

    def run_over(self) -> None:
        self._hear("run over")

    def retired(self, reason: str) -> None:
        self._hear(f"retired: {reason}")

    @property
    def generation(self) -> Generation:
        return self.begun[-1][0]

    @property
    def driver(self) -> Peers:
        assert self._driver is not None
        return self._driver

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S), (self.begun, self.told)

    def reaches(self, members: set[Member]) -> Generation:
        """Waits for a generation of exactly `members`."""
        self.wait_until(lambda: bool(self.begun) and set(self.generation.members) == members)
        return self.generation

    def leave(self, *, over: bool = False) -> None:
        self.generations.close(over=over)
        if self._driver is not None:
            self._driver.close()

    def _hear(self, what: str) -> None:
        with self._news:
            self.told.append(what)
            self._news.notify_all()


def all_at_once(*calls: Callable[[], object]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def await_condition(holds: Callable[[], bool]) -> bool:
    """Whether `holds` comes true in time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if holds():
            return True
    return False


class Run:
    """Workers that meet in one store."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.serving: TCPStore | None = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.port = self.serving.port
        self._shared = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def client(self) -> Store:
        """A view of the store; each worker makes a connection of its own."""
        return PrefixStore(PREFIX, self._shared)

    def worker(
        self, rank: int, world_size: int, *, silence_s: float = LONG_S, limits: PeerLimits = BRISK
    ) -> Worker:
        worker = Worker(self.client(), rank, world_size, silence_s=silence_s, limits=limits)
        self._stack.callback(worker.leave)
        return worker

    def founded(self, world_size: int, *, silence_s: float = LONG_S) -> list[Worker]:
        workers = [self.worker(rank, world_size, silence_s=silence_s) for rank in range(world_size)]
        all_at_once(*(lambda worker=worker: worker.generations.start("{}") for worker in workers))
        return workers


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


def founders(*ranks: int) -> set[Member]:
    return {Member(rank, 0) for rank in ranks}


def everyone_can_talk(workers: list[Worker]) -> None:
    """Each sends its rank to all others over the newest mesh, and hears theirs."""
    for worker in workers:
        for position in range(worker.driver.world_size):
            if position != worker.driver.rank:
                worker.driver.start(
                    Send(position, bytes([worker.generation.members[worker.driver.rank].rank])), 0
                )
    for worker in workers:
        for position, member in enumerate(worker.generation.members):
            if position != worker.driver.rank:
                assert bytes(worker.driver.start(Recv(position, PATIENCE_S), 0).wait()) == bytes(
                    [member.rank]
                )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_founders_begin_together(run: Run, world_size: int) -> None:
    workers = run.founded(world_size)
    for rank, worker in enumerate(workers):
        assert worker.begun == [(workers[0].generation, rank)]
    assert workers[0].generation == Generation(
        number=0,
        members=tuple(Member(rank, 0) for rank in range(world_size)),
        newcomers=frozenset(),
        tickets=0,
    )
    everyone_can_talk(workers)


def test_when_one_leaves_the_others_agree_on_the_next_generation(run: Run) -> None:
    first, gone, third = run.founded(3)
    gone.leave()
    assert first.reaches(founders(0, 2)) == third.reaches(founders(0, 2))
    assert (first.begun[-1][1], third.begun[-1][1]) == (0, 1)
    assert gone.generation.number == 0
    everyone_can_talk([first, third])


def test_two_that_leave_at_once_are_no_more_than_two_generations(run: Run) -> None:
    workers = run.founded(5)
    all_at_once(workers[1].leave, workers[3].leave)
    staying = [workers[0], workers[2], workers[4]]
    after = {worker.reaches(founders(0, 2, 4)) for worker in staying}
    assert len(after) == 1
    assert after.pop().number in (1, 2)
    everyone_can_talk(staying)


def test_the_younger_half_continues_when_the_older_half_has_left(run: Run) -> None:
    first, second = run.founded(2)
    first.leave()
    assert second.reaches(founders(1)).number == 1


def test_a_newcomer_is_let_in_and_all_are_in_the_same_generation(run: Run) -> None:
    workers = run.founded(2)
    newcomer = run.worker(7, 2)
    newcomer.generations.join("{}", timeout_s=PATIENCE_S)
    members = founders(0, 1) | {Member(7, 1)}
    assert {worker.reaches(members) for worker in [*workers, newcomer]} == {newcomer.generation}
    assert newcomer.generation.newcomers == {2}
    assert newcomer.begun[-1][1] == 2
    everyone_can_talk([*workers, newcomer])


def test_a_rank_that_returns_replaces_its_old_self_which_is_told(run: Run) -> None:
    stays, old = run.founded(2)
    back = run.worker(1, 2)
    back.generations.join("{}", timeout_s=PATIENCE_S)
    assert stays.reaches({Member(0, 0), Member(1, 1)}) == back.generation
    old.wait_until(lambda: bool(old.told))
    assert old.told == [
        "retired: another process has joined the run as rank 1, and takes this one's place"
    ]
    everyone_can_talk([stays, back])


def test_one_that_was_left_out_while_it_lived_asks_again_and_comes_back_as_a_newcomer(
    run: Run,
) -> None:
    workers = run.founded(3)
    for worker in workers[:2]:
        worker.stopped_seeing = founders(2)
    members = founders(0, 1) | {Member(2, 1)}
    assert len({worker.reaches(members) for worker in workers}) == 1
    assert workers[2].told == ["expelled"]
    assert workers[2].generation.newcomers == {2}
    everyone_can_talk(workers)


def test_one_that_was_left_out_asks_again_when_it_has_time_and_its_peers_go_on_until_then(
    run: Run,
) -> None:
    workers = run.founded(3)
    workers[2].is_busy = True
    for worker in workers[:2]:
        worker.stopped_seeing = founders(2)
    without = {worker.reaches(founders(0, 1)) for worker in workers[:2]}
    workers[2].wait_until(lambda: workers[2].times_asked > 3)
    assert Membership(run.client()).waiting(without.pop()) == ()
    everyone_can_talk(workers[:2])
    workers[2].is_busy = False
    assert len({worker.reaches(founders(0, 1) | {Member(2, 1)}) for worker in workers}) == 1
    everyone_can_talk(workers)


def test_one_that_is_busy_when_the_run_ends_without_it_is_told(run: Run) -> None:
    first, second, busy = run.founded(3)
    busy.is_busy = True
    for worker in (first, second):
        worker.stopped_seeing = founders(2)
    assert len({worker.reaches(founders(0, 1)) for worker in (first, second)}) == 1
    busy.wait_until(lambda: busy.times_asked > 0)
    first.leave()
    second.leave(over=True)
    busy.wait_until(lambda: len(busy.told) > 1)
    assert busy.told[0] == "expelled"
    assert "the run ended while this worker was on its way in" in busy.told[1]


def test_the_last_survivor_goes_on_once_the_others_are_silent(run: Run) -> None:
    survivor = run.worker(0, 3, silence_s=2.0)
    others = [run.worker(rank, 3) for rank in (1, 2)]
    all_at_once(
        *(lambda worker=worker: worker.generations.start("{}") for worker in [survivor, *others])
    )
    survivor.stopped_seeing = founders(1, 2)
    assert survivor.generation.number == 0  # the others go on beating, and it is one of three
    all_at_once(*(other.leave for other in others))
    assert survivor.reaches(founders(0)).number in (1, 2)


def test_a_founder_that_is_dead_before_anybody_has_a_connection_to_it_is_left_out_once_it_is_silent(
    run: Run,
) -> None:
    here = run.worker(0, 2, silence_s=1.0, limits=replace(BRISK, connect_timeout_s=1000.0))
    mesh = here.network.open(generation=0, position=1, size=2, limits=BRISK)
    store = Membership(run.client())
    store.publish_endpoint(store.create_run(2, "{}"), 1, mesh.endpoint)
    mesh.close()
    here.generations.start("{}")
    assert here.reaches(founders(0)).number == 1


def test_a_member_of_the_next_generation_that_departs_before_it_begins_leads_to_the_one_after(
    run: Run,
) -> None:
    workers = run.founded(2, silence_s=2.0)
    Membership(run.client()).request(9)  # and is never heard of again
    for worker in workers:
        worker.wait_until(lambda worker=worker: worker.generation.number > 0)  # type: ignore[misc]
        assert worker.generation == Generation(
            number=2, members=workers[0].generation.members, newcomers=frozenset(), tickets=1
        )
        assert set(worker.generation.members) == founders(0, 1)
        assert worker.told == []
    everyone_can_talk(workers)


def test_a_rank_that_has_skipped_a_generation_does_not_take_members_that_began_it_for_departed(
    run: Run,
) -> None:
    """They have left the mesh that it still is in, and are slower than it to come to the newest
    one.
    """
    store = Membership(run.client())
    here = run.worker(0, 3)
    with ExitStack() as stack:
        meshes = [
            here.network.open(generation=0, position=position, size=3, limits=BRISK)
            for position in (1, 2)
        ]
        founding = store.create_run(3, "{}")
        for mesh in meshes:
            stack.callback(mesh.close)
            store.publish_endpoint(founding, mesh.rank, mesh.endpoint)
        here.generations.start("{}")
        for mesh in meshes:
            mesh.connect([endpoint or "" for endpoint in store.endpoints(founding)])

        skipped, newest = replace(founding, number=1), replace(founding, number=2)
        assert [store.propose(generation) for generation in (skipped, newest)] == [skipped, newest]
        meshes[0].close()
        assert await_condition(
            lambda: store.endpoints(newest)[0] is not None and here.driver.left() == [1]
        )
        beats = run.client().add("beat/0/0", 0)
        assert await_condition(
            lambda: run.client().add("beat/0/0", 0) > beats
        )  # it has looked around since
        assert store.next_of(newest) is None
        for position in (1, 2):
            store.publish_endpoint(newest, position, meshes[1].endpoint)
        here.wait_until(lambda: here.generation == newest)


def test_heartbeats_of_many_members_are_read_seldom_until_one_cannot_be_reached(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.membership.generations.READ_S", 1000.0)
    workers = run.founded(2, silence_s=2.0)
    read: list[Generation] = []
    silent_s = Membership.silent_s

    def counted(membership: Membership, generation: Generation) -> tuple[float, ...]:
        read.append(generation)
        return silent_s(membership, generation)

    monkeypatch.setattr(Membership, "silent_s", counted)
    before = run.client().add("beat/0/0", 0)
    assert await_condition(lambda: run.client().add("beat/0/0", 0) >= before + 4)
    assert len(read) <= len(workers)
    workers[1].stopped_seeing |= founders(0)
    assert await_condition(lambda: len(read) > 2 * len(workers))


def test_when_the_run_is_over_nobody_is_replaced_and_nobody_joins(run: Run) -> None:
    first, second = run.founded(2)
    first.leave(over=True)
    late = run.worker(5, 2)
    with pytest.raises(ConfigError, match="the run ended while this worker was on its way in"):
        late.generations.join("{}", timeout_s=PATIENCE_S)
    second.leave()
    assert second.generation.number == 0
    assert set(second.told) <= {"run over"}
    assert late.told == []


def test_a_member_that_has_not_finished_is_told_before_it_does_that_the_run_is_over(
    run: Run,
) -> None:
    """Its peers took it for dead, and ended the run."""
    first, second, third = run.founded(3)
    first.leave(over=True)
    second.leave(over=True)
    third.generations.confirm()
    assert third.told == ["run over"]


def test_a_worker_that_trains_something_else_is_not_let_in(run: Run) -> None:
    founder = run.worker(0, 1)
    founder.generations.start(json.dumps({"strategy": {"options": "WAGMA(period=10)"}}))
    other = run.worker(1, 1)
    with pytest.raises(
        MismatchError,
        match=r"its 'strategy', 'options': WAGMA\(period=5\) here, WAGMA\(period=10\) there",
    ):
        other.generations.join(json.dumps({"strategy": {"options": "WAGMA(period=5)"}}))
    with pytest.raises(MismatchError, match="its description: 'else' here"):
        other.generations.join("else")


def test_joining_nothing_and_nobody_are_clear_errors(run: Run) -> None:
    with pytest.raises(ConfigError, match="has founded no generation"):
        run.worker(1, 2).generations.join("{}")
    Membership(run.client()).create_run(1, "{}")
    with pytest.raises(PeerError, match="no member of the run let this worker in"):
        run.worker(1, 2).generations.join("{}", timeout_s=0.05)


def test_when_the_store_ends_the_members_are_told_once_and_go_on(run: Run) -> None:
    workers = run.founded(2)
    run.serving = None
    for worker in workers:
        worker.wait_until(lambda worker=worker: bool(worker.told))  # type: ignore[misc]
        assert len(worker.told) == 1
        assert worker.told[0].startswith("lost store: the run's store cannot be asked any more")
    everyone_can_talk(workers)
    for worker in workers:
        worker.leave()
        assert len(worker.told) == len(worker.begun) == 1


def test_when_the_store_is_back_the_members_are_told(run: Run) -> None:
    (worker,) = run.founded(1)
    run.serving = None
    worker.wait_until(lambda: bool(worker.told))
    run.serving = TCPStore("127.0.0.1", run.port, is_master=True, wait_for_workers=False)
    Membership(PrefixStore(PREFIX, run.serving)).create_run(1, "{}")
    worker.wait_until(lambda: len(worker.told) > 1)
    assert worker.told[1:] == ["found store"]


@pytest.mark.ranks
def test_a_killed_process_leaves_the_membership_and_the_one_that_takes_its_place_joins(
    run: Run, start_process: StartProcess
) -> None:
    orders = {
        "port": run.port,
        "secret": SECRET.decode(),
        "limits": BRISK,
        "silence_s": LONG_S,
    }
    here = run.worker(0, 3)
    start_process(be_a_member, 1, 3, joins=False, **orders)
    doomed = start_process(be_a_member, 2, 3, joins=False, **orders)
    here.generations.start("{}")
    # Until then a death would end the founding for the one that is not yet ready, and whoever has
    # no connection yet would go on trying for long.
    run.client().wait([has_begun(1), has_begun(2)], timedelta(seconds=PATIENCE_S))
    here.driver.await_connections(PATIENCE_S)
    doomed.kill()
    assert here.reaches(founders(0, 1)).number == 1
    start_process(be_a_member, 2, 3, joins=True, **orders)
    assert here.reaches(founders(0, 1) | {Member(2, 1)}).newcomers == {2}


def test_a_member_without_a_heartbeat_is_waited_for_while_it_is_connected(run: Run) -> None:
    """As one that is stopped for a while, or reads a large file in C."""
    store = Membership(run.client())
    here = run.worker(0, 3, silence_s=1.0)
    with ExitStack() as stack:
        meshes = [
            here.network.open(generation=0, position=position, size=3, limits=BRISK)
            for position in (1, 2)
        ]
        founding = store.create_run(3, "{}")
        for mesh in meshes:
            stack.callback(mesh.close)
            store.publish_endpoint(founding, mesh.rank, mesh.endpoint)
        here.generations.start("{}")
        for mesh in meshes:
            mesh.connect([endpoint or "" for endpoint in store.endpoints(founding)])
        assert await_condition(lambda: not here.driver.unreached())

        following = store.propose(replace(founding, number=1))
        assert await_condition(lambda: store.endpoints(following)[0] is not None)
        beats = run.client().add("beat/0/0", 0)
        # Six in a second, after which they are silent.
        assert await_condition(lambda: run.client().add("beat/0/0", 0) >= beats + 12)
        assert store.next_of(following) is None
        for mesh in meshes:
            store.publish_endpoint(following, mesh.rank, mesh.endpoint)
        here.wait_until(lambda: here.generation == following)
