"""The kernel's emulation: each worker in a network namespace of its own, linked to its peers at
the rates asked for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from offbeat.run.local_worker import Placement
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.quantities import display_duration, display_rate, rounded
from offbeat_lab.emulation.base import Emulation
from offbeat_lab.emulation.check import LEAST_SHARE, check_links
from offbeat_lab.emulation.commands import (
    NAMESPACES,
    MissingMeansError,
    call_in,
    path_of,
    run_batch,
    run_shell,
)
from offbeat_lab.emulation.plan import (
    DATA,
    HUB_CONTROL_ADDRESS,
    WINDOW_BYTES,
    EmulationName,
    check_size,
    choose_mtu,
    create_links,
    create_namespaces,
    data_address,
    hub_queues,
    plug_in,
    set_up_hub,
    set_up_worker,
    shape,
    worker_queue,
)
from offbeat_lab.emulation.quotas import open_compute
from offbeat_lab.records import EmulationReport, LinkCheck

T = TypeVar("T")

_HUB_SETTINGS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}
# The buffers are only used where they are needed.
_WORKER_SETTINGS = {
    "tcp_rmem": f"4096 131072 {2 * WINDOW_BYTES}",
    "tcp_wmem": f"4096 65536 {2 * WINDOW_BYTES}",
}


class NamespaceEmulation(Emulation):
    """An emulation by the kernel. It is checked: links that do not carry what was asked for are
    refused.

    Raises:
        MissingMeansError: this machine, or this user on it, cannot do it. Nothing is left.
        ConfigError: a link does not reach its rate here, or the cluster is too large. Nothing is
            left.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        check_size(cluster)
        _require_means()
        self._cluster = cluster
        self._lines: DelayLines | None = None
        self.store_address = HUB_CONTROL_ADDRESS
        self._name = self._claim()
        try:
            self._set_up()
        except OSError as error:
            self.close()
            raise MissingMeansError(
                f"cannot set up network namespaces: {error.strerror or error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def placement(self, worker: int) -> Placement:
        namespace = NAMESPACES / self._name.worker(worker)
        return Placement(
            prefix=(path_of("nsenter"), f"--net={namespace}", "--"),
            namespace=namespace,
            environment={
                "OFFBEAT_INTERFACE": data_address(worker),
                "GLOO_SOCKET_IFNAME": DATA,
                "MASTER_ADDR": self.store_address,
            },
        )

    def set_link(self, worker: int, *, up: bool) -> bool:
        through = f"a{worker}" if worker in self._delayed else None
        run_batch(
            "ip",
            plug_in(worker, through) if up else [f"link set w{worker} down"],
            namespace=self._name.hub,
        )
        return True

    def call_inside(self, function: Callable[[], T]) -> T:
        return call_in(self._name.hub, function)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        super().close()

    def _set_up(self) -> None:
        cluster, name, workers = self._cluster, self._name, range(self._cluster.workers)
        run_batch("ip", create_namespaces(name, cluster.workers))
        call_in(name.hub, lambda: _set(_HUB_SETTINGS))
        latencies_s = {
            w: latency_s for w in workers if (latency_s := cluster.link_of(w).latency_s) > PATH_S
        }
        has_netem = bool(latencies_s) and _has_netem(name)
        self._delayed = {} if has_netem else latencies_s
        mtu = choose_mtu(cluster)
        shapes = {worker: shape(cluster.link_of(worker), mtu) for worker in workers}
        run_batch("ip", create_links(name, cluster.workers, mtu))
        run_batch("ip", set_up_hub(cluster.workers), namespace=name.hub)
        for worker in workers:
            inside = name.worker(worker)
            call_in(inside, lambda: _set(_WORKER_SETTINGS))
            run_batch("ip", set_up_worker(worker), namespace=inside)
            run_batch("tc", [worker_queue(shapes[worker])], namespace=inside)
        queues = [
            line
            for worker in workers
            for line in hub_queues(
                worker, shapes[worker], latencies_s.get(worker, 0.0) if has_netem else 0.0
            )
        ]
        run_batch("tc", queues, namespace=name.hub)
        notices = self._open_delay_lines(mtu)
        compute = open_compute(cluster, lambda: name)
        self._quotas = compute.quotas
        checks = check_links(name, cluster)
        trips = [] if notices else _odd_trips(cluster, checks)
        self.report = EmulationReport(
            kind="namespaces",
            network=self._describe(mtu, has_netem),
            compute=compute.words,
            speeds=compute.speeds,
            checks=checks,
            notices=[*notices, *_shortfalls(checks), *trips, *compute.notices],
        )

    def _open_delay_lines(self, mtu: int) -> list[str]:
        if not self._delayed:
            return []
        try:
            self._lines = DelayLines(self._name.hub, self._delayed, mtu)
        except MissingMeansError as error:
            longest_s = max(self._delayed.values())
            run_batch(
                "ip",
                [line for worker in self._delayed for line in plug_in(worker)],
                namespace=self._name.hub,
            )
            self._delayed = {}
            asked = display_duration(longest_s)
            return [
                f"latency of {asked} is not emulated (this kernel has no netem, and {error});"
                " messages take what they take here"
            ]
        return []

    def _describe(self, mtu: int, has_netem: bool) -> str:
        links = {self._cluster.link_of(worker) for worker in range(self._cluster.workers)}
        tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        parts = [f"a network namespace for each worker, packets of {mtu} bytes, TCP {tcp}"]
        rates = sorted({link.rate_bit_per_s for link in links if link.rate_bit_per_s is not None})
        if rates:
            parts.append(f"{', '.join(map(display_rate, rates))} each way by tbf")
        if self._delayed:
            shown = ", ".join(map(display_duration, sorted(set(self._delayed.values()))))
            accuracy = display_duration(max(tick_s(s) for s in self._delayed.values()) / 2)
            parts.append(f"latency {shown} by timed queues and BPF, to within {accuracy}")
        elif has_netem:
            latencies_s = sorted({link.latency_s for link in links if link.latency_s})
            shown = ", ".join(map(display_duration, latencies_s))
            parts.append(f"latency {shown} by netem")
        return "; ".join(parts)


def _require_means() -> None:
    if not Path("/proc/self/ns/net").exists():
        raise MissingMeansError("network namespaces are a feature of Linux, which this is not")
    if os.geteuid() != 0:
        raise MissingMeansError(
            "network namespaces need root, and this user is not root; run with sudo"
        )
    for program in ("ip", "tc", "nsenter"):
        path_of(program)


def _has_netem(name: EmulationName) -> bool:
    """Whether the kernel has the queue that delays packets; tried on the hub's own loopback."""
    try:
        run_batch(
            "tc",
            ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"],
            namespace=name.hub,
        )
    except MissingMeansError:
        return False
    return True


def _set(settings: dict[str, str]) -> None:
    """Write settings of IPv4 for the calling thread's namespace."""
    for key, value in settings.items():
        (Path("/proc/sys/net/ipv4") / key).write_text(value)


def _shortfalls(checks: list[LinkCheck]) -> list[str]:
    short = [check for check in checks if not check.together]
    if not short:
        return []
    worst = min(short, key=lambda check: check.share or 1.0)
    assert worst.asked_bit_per_s is not None
    assert worst.share is not None
    notice = (
        "each link reaches its rate by itself, but with all workers sending at once that of worker"
        f" {worst.worker} reaches {worst.share:.0%} (wanted {LEAST_SHARE:.0%}): this machine is too"
        " slow or too busy for so much traffic, so exchanges among all workers take longer than on"
        " such a network"
    )
    return [notice]


def _odd_trips(cluster: Cluster, checks: list[LinkCheck]) -> list[str]:
    """Round trips that are far from twice the latency."""
    odd = []
    for check in checks:
        if check.peer is not None:
            asked_s = (
                cluster.link_of(check.worker).latency_s + cluster.link_of(check.peer).latency_s
            )
            if abs(check.round_trip_s - asked_s) > max(asked_s / 4, 2 * PATH_S):
                odd.append(
                    f"a round trip between workers {check.worker} and {check.peer} takes"
                    f" {display_duration(rounded(check.round_trip_s, digits=2))}; asked for is"
                    f" {display_duration(rounded(asked_s, digits=2))}"
                )
    return odd


PATH_S = 25e-6
"""What a packet needs from worker to worker anyway; measured, and part of the latency asked for."""

_MIN_TICK_S, _MAX_TICK_S, _TICKS = 25e-6, 1e-3, 8

_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
_PROG_LOAD, _LINK_CREATE = 5, 28  # linux/bpf.h
_SCHED_CLS, _TCX_INGRESS, _TCX_EGRESS = 3, 46, 47
_KTIME_GET_NS, _REDIRECT = 5, 23
_MARK = 8  # offset of `mark` in struct __sk_buff
_SIOCETHTOOL, _SET_TSO, _SET_GRO = 0x8946, 0x1F, 0x2C  # linux/sockios.h, linux/ethtool.h

Program = Sequence[bytes]


class DelayLines:
    """Latency on kernels without netem: packets circle between timed queues until they are due.
    These are the lines of one hub. They last until `close`, or until this process ends.

        hub --> a > b --> due? --> the worker's port
                ^          | not yet
                d < c <----+       (and from d to the port as well)

    `a > b` and `c > d` are pairs of virtual Ethernet devices. A program of a dozen instructions at
    the exit of `a` stamps each packet with the time it is due. Programs at `b` and `d` look at the
    stamp: a packet that is due goes to the worker, any other into the other pair. `b` and `d` are
    polled by a timer while there is something in them (the kernel's interrupt moderation, made for
    network cards), so a circle costs one timer tick of waiting and next to no time of a processor.
    Two pairs, because a packet put back into the queue that is being polled would be polled again
    at once, and circle without rest.

    The kernel's timers and packet processing do it all, so the latency is kept to while training
    occupies every core, which a process in user space that passes packets on could not do. Packets
    are never reordered. They are lost only when more than 256 circle, which takes a few hundred
    milliseconds' worth.

    Args:
        hub: its namespace.
        latencies_s: one way, by worker; those without any get no line.
        mtu: of the links.

    Raises:
        MissingMeansError: the kernel cannot do it.
    """

    def __init__(self, hub: str, latencies_s: Mapping[int, float], mtu: int) -> None:
        self._links: list[int] = []
        run_batch(
            "ip", [line for worker in latencies_s for line in _devices(worker, mtu)], namespace=hub
        )
        try:
            _set_polling(hub, latencies_s)
            for worker, latency_s in latencies_s.items():
                call_in(hub, partial(self._attach, worker, latency_s))
        except OSError as error:
            self.close()
            raise MissingMeansError(f"the kernel takes no delay line: {error}") from error

    def close(self) -> None:
        while self._links:
            os.close(self._links.pop())

    def _attach(self, worker: int, latency_s: float) -> None:
        into, out, again, back = (f"{letter}{worker}" for letter in "abcd")
        for sender, receiver in ((into, out), (again, back)):
            # Only then the receiver has a queue that can be polled by a timer.
            _ethtool(sender, _SET_TSO, 0)
            _ethtool(receiver, _SET_GRO, 1)
        delay_s = max(0.0, latency_s - PATH_S - tick_s(latency_s) / 2)
        port, circle, first = (
            socket.if_nametoindex(device) for device in (f"w{worker}", again, into)
        )
        for program, device, hook in (
            (_stamp(delay_s), into, _TCX_EGRESS),
            (_gate(port, otherwise=circle), out, _TCX_INGRESS),
            (_gate(port, otherwise=first), back, _TCX_INGRESS),
        ):
            self._links.append(_link(program, socket.if_nametoindex(device), hook))


def tick_s(latency_s: float) -> float:
    """How often a line is polled. A packet is up to half of it early or late."""
    return min(_MAX_TICK_S, max(_MIN_TICK_S, latency_s / _TICKS))


def _devices(worker: int, mtu: int) -> list[str]:
    pairs = [(f"a{worker}", f"b{worker}"), (f"c{worker}", f"d{worker}")]
    lines = [
        f"link add {one} mtu {mtu} type veth peer name {other} mtu {mtu}" for one, other in pairs
    ]
    lines += [f"link set {device} addrgenmode none up" for pair in pairs for device in pair]
    return lines + plug_in(worker, through=f"a{worker}")


def _set_polling(hub: str, latencies_s: Mapping[int, float]) -> None:
    """Two numbers a device."""
    lines = []
    for worker, latency_s in latencies_s.items():
        for device in (f"b{worker}", f"d{worker}"):
            place = f"/sys/class/net/{device}"
            lines += [
                f"echo {tick_s(latency_s) * 1e9:.0f} > {place}/gro_flush_timeout",
                f"echo 2 > {place}/napi_defer_hard_irqs",  # idle ticks before the timer rests
            ]
    run_shell(hub, lines)


def _stamp(delay_s: float) -> Program:
    """Mark a packet that has no mark with the low bits of the time it is due, in units of 1024 ns;
    never 0, which is none.
    """
    return [
        _op(0xBF, 6, 1),  # r6 = the packet
        _op(0x61, 7, 6, _MARK),  # r7 = its mark
        _op(0x55, 7, 0, 5),  # if r7 != 0: over the next five
        _op(0x85, number=_KTIME_GET_NS),
        _op(0x77, 0, 0, 0, 10),  # r0 >>= 10
        _op(0x04, 0, 0, 0, round(delay_s * 1e9 / 1024)),  # r0 += delay, in 32 bits
        _op(0x44, 0, 0, 0, 1),  # r0 |= 1
        _op(0x63, 6, 0, _MARK),  # its mark = r0
        _op(0xB4, 0, 0, 0, -1),  # r0 = TCX_NEXT, go on
        _op(0x95),  # return
    ]


def _gate(port: int, *, otherwise: int) -> Program:
    """Send a packet that is due on to device `port`, without its mark, and any other to device
    `otherwise`.
    """
    return [
        _op(0xBF, 6, 1),
        _op(0x85, number=_KTIME_GET_NS),
        _op(0x77, 0, 0, 0, 10),
        _op(0x61, 7, 6, _MARK),
        _op(0x1C, 7, 0),  # r7 -= r0, in 32 bits
        _op(0x66, 7, 0, 3, 0),  # if r7 > 0, as a signed number: over the next three
        _op(0x62, 6, 0, _MARK, 0),  # its mark = 0
        _op(0xB4, 1, 0, 0, port),
        _op(0x05, 0, 0, 1),  # over the next
        _op(0xB4, 1, 0, 0, otherwise),
        _op(0xB4, 2, 0, 0, 0),
        _op(0x85, number=_REDIRECT),
        _op(0x95),
    ]


def _op(code: int, target: int = 0, source: int = 0, offset: int = 0, number: int = 0) -> bytes:
    """One instruction of BPF (kernel documentation, bpf/standardization/instruction-set.rst)."""
    return struct.pack("=BBhi", code, target | source << 4, offset, number)


def _link(program: Program, interface: int, hook: int) -> int:
    """Load `program` and attach it; it stays while the descriptor that is returned is open."""
    code = ctypes.create_string_buffer(b"".join(program))
    licence = ctypes.create_string_buffer(b"Apache-2.0")
    loaded = _bpf(
        _PROG_LOAD,
        struct.pack(
            "=IIQQIIQII",
            _SCHED_CLS,
            len(program),
            ctypes.addressof(code),
            ctypes.addressof(licence),
            0,
            0,
            0,
            0,
            0,
        ),
    )
    with ExitStack() as stack:
        stack.callback(os.close, loaded)
        return _bpf(_LINK_CREATE, struct.pack("=IIIIIIQ", loaded, interface, hook, 0, 0, 0, 0))


def _bpf(command: int, attributes: bytes) -> int:
    number = _BPF_SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"unknown processor {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(
        number, command, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes)
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return descriptor


def _ethtool(device: str, command: int, value: int) -> None:
    data = ctypes.create_string_buffer(struct.pack("=II", command, value))
    request = struct.pack("@16sP", device.encode(), ctypes.addressof(data)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
