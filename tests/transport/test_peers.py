from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.averaging.periodic import EncodedChanges, Everyone, coded_changes
from offbeat.codec.topk_codec import AllChanges
from offbeat.errors import ConfigError, MismatchError, PeerError, PeerTimeoutError, UnsupportedError
from offbeat.transport.driver import Stream
from offbeat.transport.mesh import FINISHED
from offbeat.transport.operations import AllReduceTensor, Now, Payload, Recv, Send, Sleep
from offbeat.transport.peers import PeerLimits, Peers

OpenMesh = Callable[..., list[Peers]]

_streams = itertools.count(1)


def take(peers: Peers, peer: int, channel: int = 0, timeout_s: float | None = 60.0) -> bytes:
    payload: Payload = peers.start(Recv(peer, timeout_s), channel).wait()
    return bytes(payload)


def give(peers: Peers, peer: int, payload: Payload, channel: int = 0) -> None:
    peers.start(Send(peer, payload), channel).wait()


def num_native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def wait_for_native_threads(expected: int) -> None:
    """The kernel lists an ended thread for a moment longer; one that has not ended would be listed
    until the test times out.
    """
    while num_native_threads() > expected:
        os.sched_yield()


def test_a_message_arrives_as_it_was_sent(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    payloads = [b"", b"x", bytearray(b"changed"), memoryview(b"seen"), os.urandom(3_000_000)]
    for payload in payloads:
        give(first, 1, payload)
    assert [take(second, 0) for _ in payloads] == [bytes(payload) for payload in payloads]


def test_a_buffer_of_numbers_arrives_as_its_bytes(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    numbers = torch.arange(5, dtype=torch.float32).numpy()
    give(first, 1, memoryview(numbers))
    assert take(second, 0) == numbers.tobytes()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2)), max_size=12))
def test_messages_of_a_pair_and_channel_keep_their_order_however_they_are_mixed(
    lasting_mesh: list[Peers], sent: list[tuple[int, int, int]]
) -> None:
    channels = [next(_streams) << 32 for _ in range(3)]
    expected: dict[tuple[int, int, int], list[bytes]] = {}
    for number, (source, offset, channel) in enumerate(sent):
        target = (source + 1 + offset) % 3
        give(lasting_mesh[source], target, bytes([number]), channels[channel])
        expected.setdefault((source, target, channel), []).append(bytes([number]))
    for (source, target, channel), payloads in reversed(expected.items()):
        assert [take(lasting_mesh[target], source, channels[channel]) for _ in payloads] == payloads


def test_a_receive_that_times_out_names_the_peer_and_loses_nothing(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    with pytest.raises(
        PeerTimeoutError, match="rank 1 waited for rank 0's message of exchange 3, stream 0"
    ) as caught:
        take(second, 0, channel=3, timeout_s=0.01)
    assert caught.value.rank == 0
    give(first, 1, b"late", channel=3)
    assert take(second, 0, channel=3) == b"late"


def test_a_ticket_is_done_when_its_message_is_here_and_not_before(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    ticket = second.start(Recv(0), 1 << 32)
    assert not ticket.done()
    give(first, 1, b"other", 2 << 32)
    assert take(second, 0, 2 << 32) == b"other"
    assert not ticket.done()
    give(first, 1, b"this", 1 << 32)
    give(first, 1, b"last", 2 << 32)
    assert take(second, 0, 2 << 32) == b"last"
    assert ticket.done()
    assert bytes(ticket.wait()) == b"this"


def test_a_ticket_is_done_when_its_time_is_up(open_mesh: OpenMesh) -> None:
    ticket = open_mesh(2)[0].start(Recv(1, timeout_s=0.0), 0)
    assert ticket.done()
    with pytest.raises(PeerTimeoutError):
        ticket.wait()


def test_sleep_and_now_share_a_clock(open_mesh: OpenMesh) -> None:
    (alone,) = open_mesh(1)
    assert not alone.start(Sleep(1e6), 0).done()
    before_s = alone.start(Now(), 0).wait()
    nap = alone.start(Sleep(0.01), 0)
    nap.wait()
    assert nap.done()
    assert alone.start(Now(), 0).wait() - before_s >= 0.01


def test_a_dense_collective_is_refused_with_the_driver_to_use(open_mesh: OpenMesh) -> None:
    with pytest.raises(UnsupportedError, match=r"got AllReduceTensor.*c10d"):
        open_mesh(1)[0].start(AllReduceTensor(torch.zeros(1)), 0)


def test_threads_that_wait_do_not_stop_each_other(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    channels = [stream << 32 for stream in range(4)]
    with ThreadPoolExecutor(len(channels)) as pool:
        answers = [pool.submit(take, second, 0, channel) for channel in channels]
        give(second, 0, b"ready")
        assert take(first, 1) == b"ready"
        for channel in reversed(channels):
            give(first, 1, str(channel).encode(), channel)
        assert [answer.result() for answer in answers] == [
            str(channel).encode() for channel in channels
        ]


def test_a_rank_that_aborts_is_named_with_its_reason_to_everyone_who_waits_for_anyone(
    open_mesh: OpenMesh,
) -> None:
    first, second, third = open_mesh(3)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(take, first, 1)
        third.abort("ValueError: no data")
        with pytest.raises(
            PeerError, match=r"rank 2 aborted: ValueError: no data .*rank 0 waited for rank 1"
        ) as caught:
            blocked.result()
    assert caught.value.rank == 2
    with pytest.raises(PeerError, match="rank 2 aborted"):
        take(second, 0)
    assert first.dead() == {2: "aborted: ValueError: no data"}


def test_an_abort_that_blames_another_rank_names_that_one(open_mesh: OpenMesh) -> None:
    first, second, _ = open_mesh(3)
    second.abort("its gradient exploded", blame=2)
    with pytest.raises(
        PeerError, match="rank 2 failed, says rank 1: its gradient exploded"
    ) as caught:
        take(first, 1)
    assert caught.value.rank == 2
    assert list(first.dead()) == [2, 1]


def test_what_a_failed_rank_had_sent_before_can_still_be_taken(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    give(second, 0, b"last words")
    second.abort("done for")
    assert first.wait_for_death(60.0)
    assert take(first, 1) == b"last words"
    with pytest.raises(PeerError, match="done for"):
        take(first, 1)


def test_without_watch_all_a_death_fails_only_receives_from_the_dead(open_mesh: OpenMesh) -> None:
    first, second, third = open_mesh(3, watch_all=False)
    third.abort("gone")
    assert list(first.wait_for_death(60.0)) == [2]
    give(second, 0, b"alive")
    assert take(first, 1) == b"alive"
    with pytest.raises(PeerError, match="rank 2 aborted: gone"):
        take(first, 2)


def test_a_rank_that_closed_is_missed_only_by_who_still_waits_for_it(open_mesh: OpenMesh) -> None:
    first, second, third = open_mesh(3)
    give(third, 0, b"the end")
    third.close()
    give(second, 0, b"going on")
    assert take(first, 1) == b"going on"
    assert take(first, 2) == b"the end"
    with pytest.raises(PeerError, match="rank 2 finished and closed its connections"):
        take(first, 2)
    assert first.wait_for_death(0.15) == {}


def test_a_rank_that_failed_before_it_closed_has_not_left_in_good_order(
    open_mesh: OpenMesh,
) -> None:
    first, second, third = open_mesh(3)
    third.close()
    while first.left() != [2]:
        first.wait_for_death(0.02)
    assert first.departures() == {2: FINISHED}
    second.abort("its gradient exploded")
    second.close()
    while first.left() != [1, 2]:
        first.wait_for_death(0.02)
    assert first.departures() == {1: "aborted: its gradient exploded"}


def test_closing_at_once_still_delivers_everything_sent(
    open_mesh: OpenMesh, brisk: PeerLimits
) -> None:
    # Closing must wait, and the grace period last, for longer than a busy machine takes to encrypt
    # and decrypt the last messages. What is not sent never comes. Answers to many heartbeats are
    # under way while the connection closes.
    limits = replace(brisk, grace_s=60.0, linger_s=60.0, heartbeat_interval_s=0.001)
    first, second = open_mesh(2, limits)
    payloads = [bytes([number]) * 2_000_000 for number in range(8)]
    for payload in payloads:
        give(first, 1, payload)
    first.close()
    assert [take(second, 0) for _ in payloads] == payloads


def test_closing_delivers_what_takes_longer_than_a_silent_peer_is_waited_for(
    open_mesh: OpenMesh, brisk: PeerLimits
) -> None:
    first, second = open_mesh(2, replace(brisk, linger_s=0.5))
    give(second, 0, b"connected")
    assert take(first, 1) == b"connected"
    give(first, 1, b"before")
    assert take(second, 0) == b"before"
    long = np.zeros(100_000_000, np.uint8)
    give(first, 1, long.data)
    first.close()
    assert len(take(second, 0)) == long.size


def test_a_peer_that_is_further_on_the_same_stream_is_a_mismatch(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    stream = 4 << 32
    give(first, 1, b"", stream | 8)
    with pytest.raises(
        MismatchError, match="rank 0 is already at exchange 8 while rank 1 waits at 7"
    ):
        take(second, 0, stream | 7)
    with pytest.raises(PeerTimeoutError):
        take(second, 0, (3 << 32) | 7, timeout_s=0.0)
    assert take(second, 0, stream | 8) == b""


def test_closing_is_idempotent_and_ends_every_thread(secret: bytes, brisk: PeerLimits) -> None:
    python_threads, native_threads = threading.enumerate(), num_native_threads()
    mesh = [Peers(rank, 2, address="127.0.0.1", secret=secret, limits=brisk) for rank in range(2)]
    for peers in mesh:
        peers.connect([other.endpoint for other in mesh])
    give(mesh[0], 1, b"hello")
    assert take(mesh[1], 0) == b"hello"
    assert num_native_threads() > native_threads
    for peers in mesh * 2:
        peers.close()
    assert threading.enumerate() == python_threads
    wait_for_native_threads(native_threads)


def test_closing_frees_a_thread_that_waits(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(take, first, 1, timeout_s=None)
        give(second, 0, b"", channel=1 << 32)
        first.close()
        with pytest.raises(PeerError, match="rank 0 has closed"):
            blocked.result()
    with pytest.raises(PeerError, match="rank 0 has closed"):
        give(first, 1, b"too late")


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_only_the_other_ranks_can_be_sent_to(open_mesh: OpenMesh, peer: int) -> None:
    first, _ = open_mesh(2)
    for operation in (Send(peer, b""), Recv(peer)):
        with pytest.raises(ConfigError, match=f"with rank {peer}"):
            first.start(operation, 0)


def test_a_message_may_be_longer_than_two_gibibytes(secret: bytes) -> None:
    """As a whole model, which a member sends to a newcomer."""
    limits = PeerLimits(linger_s=0.01)
    peers = Peers(0, 2, address="127.0.0.1", secret=secret, limits=limits)
    peers.connect([peers.endpoint, "tcp://127.0.0.1:1"])
    try:
        # Zeros that nobody touches need no memory.
        give(peers, 1, np.zeros((1 << 31) + 1, np.uint8).data)
    finally:
        peers.close()


def test_ranks_that_tolerate_days_of_silence_are_connected(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2, PeerLimits.tolerating(1_000_000))
    give(first, 1, b"good morning")
    assert take(second, 0) == b"good morning"


@pytest.mark.parametrize("address", ["0.0.0.0", "203.0.113.1", "not an address"])  # noqa: S104 - refused
def test_an_address_that_peers_cannot_use_is_refused(secret: bytes, address: str) -> None:
    native_threads = num_native_threads()
    with pytest.raises(ConfigError, match="cannot listen on"):
        Peers(0, 1, address=address, secret=secret)
    wait_for_native_threads(native_threads)


def test_ipv6_works_where_there_is_any(secret: bytes, brisk: PeerLimits) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    mesh = [Peers(rank, 2, address="::1", secret=secret, limits=brisk) for rank in range(2)]
    for peers in mesh:
        peers.connect([other.endpoint for other in mesh])
    give(mesh[0], 1, b"six")
    assert take(mesh[1], 0) == b"six"
    for peers in mesh:
        peers.close()


@pytest.mark.parametrize(
    ("endpoints", "complaint"),
    [
        (["nonsense"] * 2, "cannot connect to 'nonsense'"),
        (["tcp://127.0.0.1:1", "tcp://127.0.0.1:port"], "cannot connect to .*port'"),
        (["tcp://127.0.0.1:1", "inproc://somewhere:1"], "cannot connect to 'inproc"),
    ],
)
def test_endpoints_that_cannot_be_right_are_refused(
    secret: bytes, endpoints: list[str], complaint: str
) -> None:
    peers = Peers(0, 2, address="127.0.0.1", secret=secret)
    with pytest.raises(ConfigError, match=complaint):
        peers.connect(endpoints)
    peers.close()


def test_a_peer_that_never_answers_is_given_up(secret: bytes) -> None:
    peers = Peers(
        0,
        2,
        address="127.0.0.1",
        secret=secret,
        limits=PeerLimits(connect_timeout_s=0.05, linger_s=0.01),
    )
    peers.connect([peers.endpoint, "tcp://127.0.0.1:1"])
    with pytest.raises(PeerError, match=r"rank 1 could not be reached within 0.05 s") as caught:
        take(peers, 1)
    assert caught.value.rank == 1
    peers.close()


def test_connections_to_many_peers_do_not_end_at_the_usual_limit_of_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, before[1]))
    try:
        limits = PeerLimits(linger_s=0.1)
        with closing(Peers(0, 200, address="127.0.0.1", secret=bytes(32), limits=limits)) as peers:
            peers.connect(["tcp://127.0.0.1:9"] * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def changes_of_two_types(peers: Peers) -> EncodedChanges:
    parameters = {
        "weight": torch.nn.Parameter(torch.zeros(4)),
        "scale": torch.nn.Parameter(torch.zeros((), dtype=torch.float64)),
    }
    changes = coded_changes(parameters, AllChanges("float32"), Everyone(peers, Stream(1)))
    assert changes is not None
    return changes


def test_changes_of_parameters_of_two_types_travel_at_once(open_mesh: OpenMesh) -> None:
    first, second = open_mesh(2)
    both = [changes_of_two_types(peers) for peers in (first, second)]
    both[0].launch([torch.full((4,), 2.0), torch.tensor(2.0).double()])
    give(first, 1, b"all is sent", 2 << 32)
    assert take(second, 0, 2 << 32) == b"all is sent"  # so what came before it is here, too
    both[1].launch([torch.full((4,), 4.0), torch.tensor(4.0).double()])
    for changes in both:
        assert [mean.reshape(-1)[0].item() for mean in changes.mean()] == [3.0, 3.0]
