"""`RecvAny` and `Post`: the same on the virtual driver, over sockets, alone, and inside every
wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from offbeat.arithmetic.costs import LinkCost
from offbeat.errors import ConfigError, PeerError, PeerTimeoutError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.driver import Counting, Driver, total_of
from offbeat.transport.operations import Collective, Now, Post, Recv, RecvAny, Send, Sleep, Traffic
from offbeat.transport.peers import Peers
from offbeat.transport.single_rank import SingleRank
from offbeat_lab.emulation.delaying import Delaying
from transport_support.wrappers import Failing, Recorded, RecordingDriver

OpenMesh = Callable[..., list[Peers]]
EVERYONE = frozenset({0, 1, 2})


def collect(count: int) -> Collective[list[tuple[int, bytes]]]:
    received = []
    for _ in range(count):
        sender, payload = yield RecvAny(EVERYONE, timeout_s=60.0)
        received.append((sender, bytes(payload)))
    return received


def tell(peer: int, payloads: list[bytes]) -> Collective[list[tuple[int, bytes]]]:
    for payload in payloads:
        yield Send(peer, payload)
    return []


def post_and_collect(count: int) -> Collective[list[tuple[int, bytes]]]:
    yield Post(b"mine")
    received = yield from collect(count)
    return received


def check_collected(received: list[tuple[int, bytes]]) -> None:
    """All is there, from whom it was, and each sender's messages are in order."""
    assert [payload for sender, payload in received if sender == 1] == [b"a", b"b", b"c"]
    assert [payload for sender, payload in received if sender == 2] == [b"d", b"e"]
    assert [payload for sender, payload in received if sender == 0] == [b"mine"]


def all_tell_the_first() -> list[Collective[list[tuple[int, bytes]]]]:
    return [post_and_collect(6), tell(0, [b"a", b"b", b"c"]), tell(0, [b"d", b"e"])]


LINK = LinkCost(alpha_s=0.01, beta_s_per_byte=1e-3)


WRAPPINGS: dict[str, Callable[[Driver], Driver]] = {
    "bare": lambda driver: driver,
    "counting": Counting,
    "delaying": lambda driver: Delaying(driver, LINK),
    "recording": RecordingDriver,
    "all": lambda driver: Counting(Delaying(Failing(RecordingDriver(driver), []), LINK)),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_virtual_driver_collects_from_everybody(
    wrap: Callable[[Driver], Driver], seed: int
) -> None:
    cluster = VirtualCluster(3, seed=seed, link=VirtualLink(latency_s=0.01, jitter_s=0.1))
    check_collected(cluster.run(all_tell_the_first(), wrap=wrap)[0])


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_sockets_collect_from_everybody(
    open_mesh: OpenMesh, wrap: Callable[[Driver], Driver]
) -> None:
    drivers = [wrap(peers) for peers in open_mesh(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(
            pool.map(lambda driver, work: driver.run(work, 7), drivers, all_tell_the_first())
        )
    check_collected(results[0])


def test_who_is_alone_has_only_itself_to_hear() -> None:
    solo = SingleRank()
    assert solo.run(post_and_collect(1), 3) == [(0, b"mine")]
    with pytest.raises(PeerTimeoutError):
        solo.start(RecvAny(frozenset({0}), timeout_s=0.0), 3).wait()


def test_nobody_is_heard_before_his_turn_comes_again(open_mesh: OpenMesh) -> None:
    first, second, third = open_mesh(3)
    for number in range(3):
        second.start(Send(0, bytes([number])), 0)
    third.start(Send(0, b"3"), 0)
    for peer in (1, 2):
        (first, second, third)[peer].start(Send(0, b"end"), 1 << 32)
        first.start(Recv(peer, 60.0), 1 << 32).wait()
    senders = [first.start(RecvAny(EVERYONE), 0).wait()[0] for _ in range(4)]
    assert senders.index(2) <= 1


def test_a_post_wakes_the_thread_that_waits(open_mesh: OpenMesh) -> None:
    first, _ = open_mesh(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.start(RecvAny(frozenset({0, 1}), timeout_s=60.0), 5).wait)
        first.start(Post(b"wake"), 5).wait()
        assert waiting.result() == (0, b"wake")


def test_channels_and_strangers_are_kept_apart(open_mesh: OpenMesh) -> None:
    first, second, third = open_mesh(3)
    second.start(Send(0, b"other channel"), 1 << 32)
    third.start(Send(0, b"not asked for"), 0)
    first.start(Recv(1, 60.0), 1 << 32).wait()
    with pytest.raises(PeerTimeoutError):
        first.start(RecvAny(frozenset({1}), timeout_s=0.0), 0).wait()
    assert first.start(RecvAny(frozenset({2}), timeout_s=60.0), 0).wait() == (2, b"not asked for")
    with pytest.raises(ConfigError, match="with rank 3"):
        first.start(RecvAny(frozenset({0, 3})), 0)


def hear_of_the_gone() -> Collective[list[object]]:
    """All messages, then who is gone; the rest goes on being heard."""
    heard: list[object] = []
    peers = EVERYONE
    while len(heard) < 3:
        try:
            heard.append((yield RecvAny(peers, timeout_s=60.0))[0])
        except PeerError as error:
            heard.append(("gone", error.rank))
            peers = frozenset(peer for peer in peers if peer != error.rank)
    return heard


def test_the_dead_are_named_when_their_last_words_are_read(open_mesh: OpenMesh) -> None:
    first, second, third = open_mesh(3, watch_all=False)
    second.start(Send(0, b"last words"), 0)
    second.abort("gone")
    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(first.run, hear_of_the_gone(), 0)
        while ("gone", 1) not in [("gone", rank) for rank in first.wait_for_death(60.0)]:
            pass
        third.start(Send(0, b"alive"), 0)
        heard = hearing.result()
    assert [entry for entry in heard if entry != 2] == [1, ("gone", 1)]
    assert 2 in heard


@pytest.mark.parametrize("goes", ["kill", "leave", "raise"])
def test_the_virtual_driver_names_who_is_gone(goes: str) -> None:
    cluster = VirtualCluster(3, link=VirtualLink(latency_s=0.5), watch_all=False)

    def go() -> Collective[list[object]]:
        yield Send(0, b"last words")
        if goes == "raise":
            raise PeerError("disk full")
        if goes == "leave":
            cluster.leave(1)
        yield Sleep(100.0)
        return []

    def stay() -> Collective[list[object]]:
        yield Sleep(2.0)
        yield Send(0, b"alive")
        return []

    if goes == "kill":
        cluster.at(0.1, partial(cluster.kill, 1))
    outcome = cluster.outcomes([hear_of_the_gone(), go(), stay()])[0]
    assert outcome == [1, ("gone", 1), 2]


def test_what_had_not_left_a_killed_rank_is_lost_and_its_death_is_known_later() -> None:
    cluster = VirtualCluster(
        2, link=VirtualLink(bytes_per_s=100.0), watch_all=False, death_notice_s=3.0
    )

    def send() -> Collective[object]:
        yield Send(1, bytes(50))
        yield Send(1, bytes(100))
        yield Sleep(100.0)
        return None

    def hear() -> Collective[object]:
        yield RecvAny(frozenset({0}))
        with pytest.raises(PeerError, match="was killed"):
            yield RecvAny(frozenset({0}))
        return (yield Now())

    cluster.at(1.0, partial(cluster.kill, 0))
    assert cluster.outcomes([send(), hear()])[1] == 4.0


def test_a_frozen_rank_goes_on_where_it_was() -> None:
    cluster = VirtualCluster(2)

    def echo() -> Collective[float]:
        yield Recv(1)
        yield Send(1, b"")
        return float((yield Now()))

    def ask() -> Collective[float]:
        yield Sleep(1.0)
        yield Send(0, b"")
        yield Recv(0)
        return float((yield Now()))

    cluster.at(0.5, partial(cluster.freeze, 0, 4.0))
    cluster.at(0.6, partial(cluster.freeze, 0, 1.0))
    assert cluster.run([echo(), ask()]) == [4.5, 4.5]


def test_two_collectives_of_one_rank_talk_by_posting() -> None:
    cluster = VirtualCluster(1)

    def train() -> Collective[None]:
        yield Sleep(1.0)
        cluster.drivers[0].start(Post(b"done"), 5)
        yield RecvAny(frozenset({0}))

    def serve() -> Collective[tuple[int, bytes]]:
        sender, payload = yield RecvAny(frozenset({0}))
        return sender, payload

    cluster.begin(0, train(), channel=6)
    assert cluster.run([serve()], channel=5) == [(0, b"done")]


def test_posts_are_no_traffic() -> None:
    counted: list[Counting] = []

    def wrap(driver: Driver) -> Driver:
        counted.append(Counting(driver))
        return counted[-1]

    VirtualCluster(3).run(all_tell_the_first(), wrap=wrap)
    sums = Traffic()
    for driver in counted:
        sums = total_of(sums, driver.traffic)
    assert (sums.bytes_sent, sums.bytes_received, sums.messages_sent, sums.messages_received) == (
        5,
        5,
        5,
        5,
    )


def test_a_recording_names_senders_as_they_come() -> None:
    recorded: list[RecordingDriver] = []

    def wrap(driver: Driver) -> Driver:
        recorded.append(RecordingDriver(driver))
        return recorded[-1]

    VirtualCluster(3).run([post_and_collect(1), tell(0, []), tell(0, [])], wrap=wrap)
    assert recorded[0].operations == [Recorded("Post", 0, 4, 0), Recorded("RecvAny", 0, 4, 0)]


def test_a_delayed_message_of_anybody_is_due_when_its_link_has_carried_it() -> None:
    def ask() -> Collective[list[tuple[int, float]]]:
        heard = []
        with pytest.raises(PeerTimeoutError):
            yield RecvAny(EVERYONE, timeout_s=0.5)
        for _ in range(3):
            sender, _ = yield RecvAny(EVERYONE)
            heard.append((sender, (yield Now())))
        return heard

    def late(delay_s: float, count: int) -> Collective[list[tuple[int, float]]]:
        yield Sleep(delay_s)
        for _ in range(count):
            yield Send(0, b"")
        return []

    cluster = VirtualCluster(3)
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=0.0)
    heard = cluster.run(
        [ask(), late(0.0, 2), late(0.25, 1)], wrap=lambda driver: Delaying(driver, link)
    )[0]
    assert heard == [(1, 1.0), (2, 1.25), (1, 2.0)]
