"""Measures the network between the workers that this command was started on. Collective: every
worker calls it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.gradients.collective_choice import measured_costs
from offbeat.transport.connect import connect, usual_backend
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.host import usable_cores
from offbeat_lab.doctor.pairs import PairLink, measure_pairs
from offbeat_lab.joining import join, leave

_RECEIVE, _SEND = Path("/proc/sys/net/ipv4/tcp_rmem"), Path("/proc/sys/net/ipv4/tcp_wmem")
_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Where one rank runs, and with what."""

    name: str
    torch: str
    num_threads: int
    num_cores: int | None = None
    window_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What the workers found together; the same on every rank.

    Attributes:
        world_size: number of workers.
        device: of the tensors that were reduced, "cpu" or "cuda".
        hosts: one a rank.
        network: what messages and dense all-reduces cost the slowest rank, and selection.
        pairs: what messages between any two of them cost.
        listening: sockets that accept connections, of all ranks, while they train.
        busy_pairs: as `pairs`, while all workers compute; empty: not measured.
    """

    world_size: int
    device: str
    hosts: list[HostFacts]
    network: NetworkCosts
    pairs: list[PairLink]
    listening: list[Listening]
    busy_pairs: list[PairLink] = field(default_factory=list)

    @property
    def window_bytes(self) -> int | None:
        """How many bytes TCP lets be under way between any two workers; None: unknown."""
        windows = [host.window_bytes for host in self.hosts if host.window_bytes is not None]
        return min(windows, default=None)

    @property
    def on_one_host(self) -> bool:
        return len({host.name for host in self.hosts}) == 1


def measure() -> Measurement:
    """Join the other workers, open what a session opens, measure, look at what listens, and part.

    Raises:
        OffbeatError: the workers cannot find or reach each other.
    """
    opened: dict[str, frozenset[tuple[str, int]]] = {"before": own_sockets()}
    coordinator = join(usual_backend())
    opened["process group"] = own_sockets()
    local_rank = int(os.environ.get("LOCAL_RANK", coordinator.rank))
    said = coordinator.all_gather("cuda", str(local_rank < torch.cuda.device_count()))
    device = torch.device("cpu")
    if set(said) == {"True"}:
        device = torch.device("cuda", local_rank)  # NCCL demands one for each rank of a host
        torch.cuda.set_device(device)
    driver = connect(device=device).driver
    try:
        opened["offbeat"] = own_sockets()
        network, pairs, busy_pairs = _probe(driver, device)
    finally:
        driver.close()
    host = HostFacts(
        name=platform.node(),
        torch=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        num_cores=usable_cores(),
        window_bytes=tcp_window_bytes(),
    )
    sockets = _by_owner(opened, coordinator.rank)
    hosts = [
        HostFacts(**json.loads(said))
        for said in coordinator.all_gather("host", json.dumps(asdict(host)))
    ]
    found = coordinator.all_gather("sockets", json.dumps([asdict(socket) for socket in sockets]))
    leave()
    return Measurement(
        world_size=coordinator.world_size,
        device=device.type,
        hosts=hosts,
        network=network,
        pairs=pairs,
        listening=[Listening(**socket) for said in found for socket in json.loads(said)],
        busy_pairs=busy_pairs,
    )


def _probe(
    driver: Driver, device: torch.device
) -> tuple[NetworkCosts, list[PairLink], list[PairLink]]:
    stream = Stream(0)
    sample = torch.zeros(1, device=device)
    network = measured_costs(driver, stream, sample=sample)
    pairs = driver.run(measure_pairs(driver.rank, driver.world_size), stream.next())
    with _computing():
        busy = driver.run(measure_pairs(driver.rank, driver.world_size), stream.next())
    return network, pairs, busy


@contextmanager
def _computing() -> Iterator[None]:
    """This rank computes in a thread beside the block, as it does in training."""
    over = threading.Event()
    matrix = torch.randn(_ROWS, _ROWS)

    def compute() -> None:
        while not over.is_set():
            torch.mm(matrix, matrix)  # lets go of the interpreter's lock

    thread = threading.Thread(target=compute, name="offbeat-computing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def tcp_window_bytes() -> int | None:
    """How many bytes this host lets be under way on a connection; None where it does not say.

    Half of the receive buffer is for the kernel's own, as tcp_adv_win_scale has it by default.
    """
    try:
        receive, send = (int(path.read_text().split()[2]) for path in (_RECEIVE, _SEND))
    except (OSError, ValueError, IndexError):
        return None
    return max(1024, min(receive // 2, send))


def _by_owner(opened: Mapping[str, frozenset[tuple[str, int]]], rank: int) -> list[Listening]:
    """What was opened after each step belongs to whom the step is named after; on rank 0 the
    store's, whoever runs it.
    """
    port = int(os.environ.get("MASTER_PORT", "0"))
    stores = sockets_at(port) if rank == 0 else frozenset()
    owners = dict.fromkeys(stores, "rendezvous store")
    known = opened["before"]
    for owner in ("process group", "offbeat"):
        owners = dict.fromkeys(opened[owner] - known, owner) | owners
        known |= opened[owner]
    return sorted(
        Listening(address=address, port=port, owner=owner, rank=rank)
        for (address, port), owner in owners.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Listening:
    """A TCP socket that accepts connections.

    Attributes:
        address: numeric.
        port: 1 to 65535.
        owner: who opened it: "offbeat", "process group" (PyTorch's), "rendezvous store" (PyTorch's)
            or "unknown".
        rank: whose process it is in.
    """

    address: str
    port: int
    owner: str = "unknown"
    rank: int = 0

    @property
    def is_open_to_all(self) -> bool:
        """Whether it accepts connections from every network that this host is on."""
        return ipaddress.ip_address(self.address).is_unspecified


def own_sockets() -> frozenset[tuple[str, int]]:
    """(address, port) of everything that this process listens on."""
    return _listening(psutil.Process().net_connections(kind="tcp"))


def sockets_at(port: int) -> frozenset[tuple[str, int]]:
    """(address, port) of every socket of this host's that listens at `port`, whoever owns it; empty
    where the system tells only the administrator, as macOS does.
    """
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return frozenset()
    return frozenset(found for found in _listening(connections) if found[1] == port)


def _listening(connections: Iterable[Any]) -> frozenset[tuple[str, int]]:
    return frozenset(
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    )
