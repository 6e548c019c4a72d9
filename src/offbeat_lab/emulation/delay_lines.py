"""Latency on kernels without netem: packets circle between timed queues until they are due.

    hub --> a > b --> due? --> the worker's port
            ^          | not yet
            d < c <----+       (and from d to the port as well)

`a > b` and `c > d` are pairs of virtual Ethernet devices. A program of a dozen instructions at the
exit of `a` stamps each packet with the time it is due. Programs at `b` and `d` look at the stamp: a
packet that is due goes to the worker, any other into the other pair. `b` and `d` are polled by a
timer while there is something in them (the kernel's interrupt moderation, made for network cards),
so a circle costs one timer tick of waiting and next to no time of a processor. Two pairs, because a
packet put back into the queue that is being polled would be polled again at once, and circle
without rest.

The kernel's timers and packet processing do it all, so the latency is kept to while training
occupies every core, which a process in user space that passes packets on could not do. Packets are
never reordered. They are lost only when more than 256 circle, which takes a few hundred
milliseconds' worth.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from offbeat_lab.emulation.base import MissingMeansError
from offbeat_lab.emulation.commands import call_in, run_batch, run_shell
from offbeat_lab.emulation.plan import plug_in

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
    """The lines of one hub. They last until `close`, or until this process ends.

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
            call_in(hub, lambda: self._attach_all(latencies_s))
        except OSError as error:
            self.close()
            raise MissingMeansError(f"the kernel takes no delay line: {error}") from error

    def close(self) -> None:
        while self._links:
            os.close(self._links.pop())

    def _attach_all(self, latencies_s: Mapping[int, float]) -> None:
        for worker, latency_s in latencies_s.items():
            self._attach(worker, latency_s)

    def _attach(self, worker: int, latency_s: float) -> None:
        into, out, again, back = (f"{letter}{worker}" for letter in "abcd")
        for sender, receiver in ((into, out), (again, back)):
            _ethtool(sender, _SET_TSO, 0)  # only then
            _ethtool(
                receiver, _SET_GRO, 1
            )  # the receiver has a queue that can be polled by a timer
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
