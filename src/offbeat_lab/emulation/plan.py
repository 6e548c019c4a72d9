"""What the emulated network looks like, and the commands that make it so. Pure: names, addresses
and numbers in, text out.

    worker 0 [eth0 ctl0]   worker 1 [eth0 ctl0]   ...      a namespace each
               |    |                 |    |
    hub       w0    |                w1    |               a namespace: routes between the ports w0,
    w1, ...
                  [ctl, a bridge with the store on it]

Both ends of eth0 - w0 send at the worker's rate, so each direction of each link has its own limit.
`ctl0` has none: rendezvous and barriers go over it, and what is measured is not disturbed. The hub
routes instead of bridging because a packet then no longer counts as its sender's: TCP keeps but a
millisecond's worth of those in flight, too few for a link with latency.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbeat.errors import ConfigError
from offbeat_lab.cluster import Cluster, LinkSpec

DATA, CONTROL = "eth0", "ctl0"
MAX_WORKERS = 1000
"""A bridge has 1024 ports."""

MIN_RATE_BIT_PER_S = 1e6
WINDOW_BYTES = 1 << 24
"""That a connection may have under way, as on hosts that are set up for long fat links. A buffer is
twice as large, since half of it is the kernel's own.
"""
_ETHERNET_MTU, _LARGEST_MTU = 1500, 60_000
_QUEUED_MS = 64
_QUEUED_PACKETS, _QUEUED_BYTES = 24, 150_000
"""A queue holds so many packets, or so many bytes if that is less, however slow the link: TCP needs
them to find the rate.
"""

_FRAME, _HEADERS = 14, 52
"""Bytes of a packet of TCP besides its payload: outside of what the MTU counts, and inside."""

_HUB_HOST = "255.254"
_NAME = re.compile(r"offbeat-(?P<pid>\d+)-(?P<number>\d+)(?:-(?P<part>hub|w\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationName:
    """Of an emulation: the process that holds it, and which of that process's it is."""

    pid: int
    number: int

    def __str__(self) -> str:
        return f"offbeat-{self.pid}-{self.number}"

    @property
    def hub(self) -> str:
        return f"{self}-hub"

    def worker(self, worker: int) -> str:
        return f"{self}-w{worker}"

    @classmethod
    def parse(cls, text: str) -> EmulationName | None:
        """Whose namespace or group `text` is, if it is one of an emulation."""
        match = _NAME.fullmatch(text)
        return cls(pid=int(match["pid"]), number=int(match["number"])) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBucket:
    """A token bucket, which lets `burst_bytes` pass at once and then keeps to the rate, with a
    queue at each end of a link.
    """

    rate_bit_per_s: float
    burst_bytes: int
    queue_bytes: int

    def __str__(self) -> str:
        """For `tc`."""
        return (
            f"tbf rate {self.rate_bit_per_s:.0f}bit burst {self.burst_bytes}"
            f" limit {self.queue_bytes}"
        )


def shape(link: LinkSpec, mtu: int) -> TokenBucket | None:
    """How to keep to the rate of `link`; None where it has none.

    The rate is that of the wire, and large packets would leave more of it to the payload than
    Ethernet does. They get so much less of it that TCP's payload is 95.6% of the rate asked for,
    whatever the size of packets.

    The bucket holds a millisecond's worth: with less, timers that fire late cost throughput; with
    more, short messages pay no bandwidth. Queues hold what TCP's windows send at once to or from a
    handful of peers: a large packet that is dropped is forty of Ethernet's, its sender hears of it
    by a timeout of 200 ms only, and no host drops what it sends itself.
    """
    if link.rate_bit_per_s is None:
        return None
    per_ms = link.rate_bit_per_s / 8 / 1000
    least = min(_QUEUED_PACKETS * mtu, _QUEUED_BYTES)
    return TokenBucket(
        rate_bit_per_s=link.rate_bit_per_s * _payload_share(_ETHERNET_MTU) / _payload_share(mtu),
        burst_bytes=round(max(per_ms, 2 * (mtu + _FRAME))),
        queue_bytes=round(max(_QUEUED_MS * per_ms, least)),
    )


def choose_mtu(cluster: Cluster) -> int:
    """Largest packet of every link, in bytes: half a millisecond's worth of the slowest, and at
    least Ethernet's.

    With small packets the kernel hands over up to a millisecond's worth at a time as well, but
    takes it apart at every limit. Large ones cost the processors, which have training to do, a
    fraction of that.
    """
    slowest = min(cluster.limited_rates, default=float("inf"))
    return round(max(_ETHERNET_MTU, min(_LARGEST_MTU, slowest / 8 / 2000)))


def _payload_share(mtu: int) -> float:
    return (mtu - _HEADERS) / (mtu + _FRAME)


def data_address(worker: int) -> str:
    return f"10.201.{(worker + 1) >> 8}.{(worker + 1) & 255}"


def control_address(worker: int) -> str:
    return f"10.202.{(worker + 1) >> 8}.{(worker + 1) & 255}"


HUB_DATA_ADDRESS = f"10.201.{_HUB_HOST}"
HUB_CONTROL_ADDRESS = f"10.202.{_HUB_HOST}"


def check_size(cluster: Cluster) -> None:
    """Refuse what cannot be laid out. Raises `ConfigError`."""
    if cluster.workers > MAX_WORKERS:
        raise ConfigError(
            f"{cluster.workers} workers; the lab emulates {MAX_WORKERS} at most, since each is a"
            " process"
        )
    for worker in range(cluster.workers):
        rate = cluster.link_of(worker).rate_bit_per_s
        if rate is not None and rate < MIN_RATE_BIT_PER_S:
            raise ConfigError(
                f"the link of worker {worker} has {rate:g} bit/s; the lab emulates 1mbit or more"
            )


def create_namespaces(name: EmulationName, num_workers: int) -> list[str]:
    """For `ip`, outside of all namespaces."""
    return [
        f"netns add {name.hub}",
        *(f"netns add {name.worker(worker)}" for worker in range(num_workers)),
    ]


def create_links(name: EmulationName, num_workers: int, mtu: int) -> list[str]:
    """For `ip`, outside of all namespaces; both ends are made where they belong."""
    lines = []
    for worker in range(num_workers):
        inside, hub = name.worker(worker), name.hub
        near = f"{DATA} address {_mac(worker, 1)} mtu {mtu} netns {inside}"
        far = f"w{worker} address {_mac(worker, 2)} mtu {mtu} netns {hub}"
        lines += [
            f"link add {near} type veth peer name {far}",
            (
                f"link add {CONTROL} netns {inside} type veth peer name {CONTROL}-w{worker} netns"
                f" {hub}"
            ),
        ]
    return lines


def set_up_worker(worker: int) -> list[str]:
    """For `ip` in the worker's namespace."""
    return [
        "link set lo up",
        # No IPv6, which would send of itself.
        *(f"link set {device} addrgenmode none" for device in (DATA, CONTROL)),
        f"addr add {data_address(worker)}/32 dev {DATA}",
        f"link set {DATA} up",
        f"route add 10.201.0.0/16 via {HUB_DATA_ADDRESS} dev {DATA} onlink",
        f"neigh add {HUB_DATA_ADDRESS} lladdr {_mac(worker, 2)} dev {DATA}",
        f"addr add {control_address(worker)}/16 dev {CONTROL}",
        f"link set {CONTROL} up",
    ]


def set_up_hub(num_workers: int) -> list[str]:
    """For `ip` in the hub."""
    lines = [
        "link set lo up",
        f"addr add {HUB_DATA_ADDRESS}/32 dev lo",
        "route add blackhole 10.201.0.0/16",  # who sends to a worker that is cut off hears nothing
        "link add ctl type bridge",
        f"addr add {HUB_CONTROL_ADDRESS}/16 dev ctl",
        "link set ctl addrgenmode none",
        "link set ctl up",
    ]
    for worker in range(num_workers):
        lines += [
            f"link set w{worker} addrgenmode none",
            *plug_in(worker),
            f"link set {CONTROL}-w{worker} addrgenmode none",
            f"link set {CONTROL}-w{worker} master ctl up",
        ]
    return lines


def plug_in(worker: int, through: str | None = None) -> list[str]:
    """For `ip` in the hub: let the worker's port go, and find the worker behind it or behind the
    device `through`.
    """
    device = through or f"w{worker}"
    return [
        f"link set w{worker} up",
        f"route replace {data_address(worker)}/32 dev {device}",
        f"neigh replace {data_address(worker)} lladdr {_mac(worker, 1)} dev {device}",
    ]


def worker_queue(bucket: TokenBucket | None) -> str:
    """For `tc` in the worker's namespace. Without limit too there is a queue, because it counts
    bytes.
    """
    return f"qdisc add dev {DATA} root {bucket or 'pfifo limit 10000'}"


def hub_queues(worker: int, bucket: TokenBucket | None, netem_latency_s: float) -> list[str]:
    """For `tc` in the hub: the latency first where netem is to make it, then the rate."""
    lines, where = [], "root"
    if netem_latency_s:
        lines.append(
            f"qdisc add dev w{worker} root handle 1: netem delay {netem_latency_s * 1e6:.0f}us"
            " limit 1000000"
        )
        where = "parent 1:1"
    if bucket is not None:
        lines.append(f"qdisc add dev w{worker} {where} {bucket}")
    return lines


def _mac(worker: int, end: int) -> str:
    """A locally administered address; `end` is 1 at the worker, 2 at the hub."""
    return f"02:00:0a:{end:02x}:{worker >> 8:02x}:{worker & 255:02x}"
