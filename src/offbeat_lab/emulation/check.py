"""Whether the links carry what was asked for: all workers send to a neighbour at once, so that each
link is busy both ways.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

from offbeat.errors import ConfigError
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.quantities import display_rate, rounded
from offbeat_lab.emulation.commands import call_in
from offbeat_lab.emulation.plan import EmulationName, data_address
from offbeat_lab.records import LinkCheck

LEAST_SHARE = 0.85
"""Of the rate, in payload. Headers and acknowledgements take some 7%, so it is nine tenths of what
TCP can carry.
"""

_ROUNDS = 3  # a machine that was busy with something else for a moment gets another chance
_LONGER = 1.6  # times as long a round as the one before: more of such moments average out
_NUM_PINGS = 8
_PATIENCE_S = 20.0
_CHUNK = bytes(1024 * 1024)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # what is still queued is dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """One sender, one receiver: `allowed_bit_per_s` by the links at both ends, None where neither
    is limited.
    """

    sender: int
    receiver: int
    allowed_bit_per_s: float | None
    round_trip_s: float


def neighbours(cluster: Cluster) -> list[Flow]:
    """A ring through all workers, in the order of their rates, so that few links are held up by a
    slower neighbour.
    """
    rates = {
        worker: cluster.link_of(worker).rate_bit_per_s or float("inf")
        for worker in range(cluster.workers)
    }
    ring = sorted(rates, key=lambda worker: (rates[worker], worker))
    flows = []
    for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True):
        allowed = min(rates[sender], rates[receiver])
        flows.append(
            Flow(
                sender=sender,
                receiver=receiver,
                allowed_bit_per_s=None if allowed == float("inf") else allowed,
                round_trip_s=cluster.link_of(sender).latency_s
                + cluster.link_of(receiver).latency_s,
            )
        )
    return flows if len(flows) > 1 else []


def check_links(name: EmulationName, cluster: Cluster) -> list[LinkCheck]:
    """Measure every link both ways at once, all together; those that fall short once more, a pair
    by itself.

    Where links keep their rate only by themselves, it is the machine that cannot carry them all:
    the check says so (`together=False`), and measurements on it stay below the rate asked for.

    Raises:
        ConfigError: a link does not reach `LEAST_SHARE` of its rate even by itself.
    """
    try:
        return _check(name, cluster, neighbours(cluster))
    except TimeoutError as error:
        raise ConfigError(
            "the links between the workers carry nothing; does a firewall drop what is forwarded?"
        ) from error


def _check(name: EmulationName, cluster: Cluster, flows: Sequence[Flow]) -> list[LinkCheck]:
    latency_s = max(cluster.link_of(worker).latency_s for worker in range(cluster.workers))
    megabyte_s = 8e6 / min(cluster.limited_rates, default=float("inf"))
    # Before what is measured TCP finds the rate, and the bucket runs empty.
    best_of = partial(
        _best_of, name, warm_s=0.15 + megabyte_s + 20 * latency_s, measure_s=0.3 + megabyte_s
    )
    trips_s = _round_trips(name, flows)
    rates = best_of(flows)
    alone: set[Flow] = set()
    for flow in flows:
        if not _enough(flow, rates[flow]):
            back = replace(flow, sender=flow.receiver, receiver=flow.sender)
            pair = best_of([flow, back])
            slower = min(pair.values())
            if not _enough(flow, slower):
                raise ConfigError(_refusal(flow, slower))
            alone.add(flow)
    return [
        _summary(cluster, flows, rates, trips_s, worker, alone) for worker in range(cluster.workers)
    ]


def _summary(
    cluster: Cluster,
    flows: Sequence[Flow],
    rates: Mapping[Flow, float],
    trips_s: Mapping[Flow, float],
    worker: int,
    alone: set[Flow],
) -> LinkCheck:
    sent = next((flow for flow in flows if flow.sender == worker), None)
    received = next((flow for flow in flows if flow.receiver == worker), None)
    both = [flow for flow in (sent, received) if flow is not None]
    shares = [
        rates[flow] / flow.allowed_bit_per_s for flow in both if flow.allowed_bit_per_s is not None
    ]
    return LinkCheck(
        worker=worker,
        peer=sent.receiver if sent else None,
        asked_bit_per_s=cluster.link_of(worker).rate_bit_per_s,
        sent_bit_per_s=rates[sent] if sent else 0.0,
        received_bit_per_s=rates[received] if received else 0.0,
        share=min(shares, default=None),
        round_trip_s=trips_s[sent] if sent else 0.0,
        together=not alone.intersection(both),
    )


def _enough(flow: Flow, rate_bit_per_s: float) -> bool:
    return flow.allowed_bit_per_s is None or rate_bit_per_s >= LEAST_SHARE * flow.allowed_bit_per_s


def _refusal(flow: Flow, rate_bit_per_s: float) -> str:
    assert flow.allowed_bit_per_s is not None
    return (
        f"the link of worker {flow.sender} is to carry {display_rate(flow.allowed_bit_per_s)} to"
        f" worker {flow.receiver} and carries {display_rate(rounded(rate_bit_per_s))} both"
        f" ways at once; allowed is {LEAST_SHARE:.0%} or more, or results would be of another"
        " cluster. Ask for a lower rate, or stop what else runs on this machine"
    )


def _best_of(
    name: EmulationName, flows: Sequence[Flow], *, warm_s: float, measure_s: float
) -> dict[Flow, float]:
    """Rates in bit/s, of the round in which the worst flow did best."""
    best: dict[Flow, float] = {}
    worst = -1.0
    for attempt in range(_ROUNDS):
        rates = _measure(name, flows, warm_s, measure_s * _LONGER**attempt)
        share = min(
            (rates[flow] / flow.allowed_bit_per_s for flow in flows if flow.allowed_bit_per_s),
            default=1.0,
        )
        if share > worst:
            best, worst = rates, share
        if worst >= LEAST_SHARE:
            break
    return best


def _measure(
    name: EmulationName, flows: Sequence[Flow], warm_s: float, measure_s: float
) -> dict[Flow, float]:
    """Bits per second that each flow delivers while all run."""
    if not flows:
        return {}
    start, stop = threading.Barrier(2 * len(flows), timeout=_PATIENCE_S), threading.Event()
    with ExitStack() as stack:
        ends = {flow: _connect(name, flow, stack) for flow in flows}
        pool = stack.enter_context(
            ThreadPoolExecutor(2 * len(flows), thread_name_prefix="link-check")
        )
        stack.callback(_stop, stop, [near for near, _ in ends.values()])
        for near, _ in ends.values():
            pool.submit(_send, near, start, stop)
        receivers = {
            flow: pool.submit(_receive, far, start, warm_s, measure_s)
            for flow, (_, far) in ends.items()
        }
        return {flow: future.result() for flow, future in receivers.items()}


def _stop(stop: threading.Event, senders: Sequence[socket.socket]) -> None:
    stop.set()
    for sender in senders:
        with suppress(OSError):
            sender.shutdown(socket.SHUT_RDWR)  # frees one that waits for room


def _send(connection: socket.socket, start: threading.Barrier, stop: threading.Event) -> None:
    start.wait()
    connection.settimeout(None)
    with suppress(OSError):
        while not stop.is_set():
            connection.sendall(_CHUNK)


def _receive(
    connection: socket.socket, start: threading.Barrier, warm_s: float, measure_s: float
) -> float:
    buffer = bytearray(len(_CHUNK))
    start.wait()
    begun_s = time.perf_counter()
    total, since_s = 0, None
    while True:
        num_bytes = connection.recv_into(buffer, 0, socket.MSG_TRUNC)  # counts and drops
        if not num_bytes:
            raise ConnectionError("a connection between two workers was closed")
        now_s = time.perf_counter()
        if since_s is not None:
            total += num_bytes
            if now_s - since_s >= measure_s:
                return total * 8 / (now_s - since_s)
        elif now_s - begun_s >= warm_s:
            since_s = now_s


def _round_trips(name: EmulationName, flows: Sequence[Flow]) -> dict[Flow, float]:
    """The shortest of a few round trips of each flow, in seconds; one flow after the other."""
    trips_s = {}
    for flow in flows:
        with ExitStack() as stack:
            near, far = _connect(name, flow, stack)
            trips_s[flow] = min(_ping(near, far) for _ in range(_NUM_PINGS))
    return trips_s


def _ping(near: socket.socket, far: socket.socket) -> float:
    """This thread plays both ends: no other process has to wake up, so what is measured is the
    network's.
    """
    begun_s = time.perf_counter()
    near.sendall(b"?")
    far.recv(1)
    far.sendall(b"!")
    near.recv(1)
    return time.perf_counter() - begun_s


def _connect(
    name: EmulationName, flow: Flow, stack: ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from one worker's namespace to another's; closed with `stack`."""
    listener = stack.enter_context(
        call_in(
            name.worker(flow.receiver),
            lambda: socket.create_server((data_address(flow.receiver), 0)),
        )
    )
    port = listener.getsockname()[1]
    near = stack.enter_context(
        call_in(
            name.worker(flow.sender),
            lambda: socket.create_connection(
                (data_address(flow.receiver), port), timeout=_PATIENCE_S
            ),
        )
    )
    far, _ = listener.accept()
    stack.enter_context(far)
    for end in (near, far):
        end.settimeout(_PATIENCE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    return near, far
