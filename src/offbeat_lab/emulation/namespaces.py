"""The kernel's emulation: each worker in a network namespace of its own, linked to its peers at
the rates asked for.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from offbeat.run.local_worker import Placement
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.quantities import display_duration, display_rate
from offbeat_lab.emulation import leftovers
from offbeat_lab.emulation.base import (
    Emulation,
    MissingMeansError,
)
from offbeat_lab.emulation.check import LEAST_SHARE, check_links
from offbeat_lab.emulation.commands import NAMESPACES, ask, call_in, path_of, run_batch
from offbeat_lab.emulation.delay_lines import PATH_S, DelayLines, tick_s
from offbeat_lab.emulation.plan import (
    DATA,
    HUB_CONTROL_ADDRESS,
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
# as hosts on long fat links are set up; the buffers are only used where they are needed
_WORKER_SETTINGS = {
    "tcp_rmem": "4096 131072 33554432",
    "tcp_wmem": "4096 65536 33554432",
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
        super().__init__(None)
        check_size(cluster)
        _require_means()
        self._cluster = cluster
        self._holder = os.getpid()
        self._lines: DelayLines | None = None
        self._closed = False
        self.store_address = HUB_CONTROL_ADDRESS
        self._name = leftovers.claim()
        atexit.register(self.close)
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

    def sent_bytes(self, worker: int) -> int | None:
        queues = json.loads(
            ask("tc", "qdisc", "show", "dev", DATA, "root", namespace=self._name.worker(worker))
        )
        return int(queues[0]["bytes"])

    def close(self) -> None:
        if self._closed or os.getpid() != self._holder:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._lines is not None:
            self._lines.close()
        leftovers.remove(self._name)

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
        compute = open_compute(cluster, lambda: str(name))
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
        parts = [
            f"a network namespace for each worker, packets of {mtu} bytes, TCP"
            f" {_congestion_control()}"
        ]
        rates = sorted({link.rate_bit_per_s for link in links if link.rate_bit_per_s is not None})
        if rates:
            parts.append(f"{_listed([display_rate(rate) for rate in rates])} each way by tbf")
        if self._delayed:
            shown = _listed([display_duration(s) for s in sorted(set(self._delayed.values()))])
            accuracy = display_duration(max(tick_s(s) for s in self._delayed.values()) / 2)
            parts.append(f"latency {shown} by timed queues and BPF, to within {accuracy}")
        elif has_netem:
            shown = _listed(
                [
                    display_duration(s)
                    for s in sorted({link.latency_s for link in links if link.latency_s})
                ]
            )
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


def _congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


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
                got, asked = (
                    display_duration(float(f"{s:.2g}")) for s in (check.round_trip_s, asked_s)
                )
                odd.append(
                    f"a round trip between workers {check.worker} and {check.peer} takes {got};"
                    f" asked for is {asked}"
                )
    return odd


def _listed(texts: list[str]) -> str:
    return ", ".join(texts)
