"""A run on several hosts, each with a supervisor for its share of the workers.

    offbeat run --rendezvous head:29500 --nodes 2 --node-rank 0 --workers 4 train.py  # on head
    offbeat run --rendezvous head:29500 --nodes 2 --node-rank 1 --workers 4 train.py

Starting these commands is the business of whoever places jobs. The first host serves the store, so
the run ends with its supervisor; any other host, and any worker, may die where the strategy goes on
without them.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from offbeat.errors import ConfigError
from offbeat.run.coordination import RunStore, serve_store, store_client
from offbeat.run.supervisor import HostShare
from offbeat.transport.connect import SECRET_VARIABLE
from offbeat.transport.interface import interface_of, listen_address

_PREFIX = "offbeat-hosts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the hosts of a run meet.

    Attributes:
        host, port: of the store, on the first of them.
        num_nodes: how many hosts there are.
        node_rank: which one this is, 0 <= node_rank < num_nodes.
    """

    host: str
    port: int
    num_nodes: int
    node_rank: int


def meeting(rendezvous: str | None, nodes: int | None, node_rank: int | None) -> Meeting | None:
    """What the flags of these names say; None where there is one host only. Raises
    `ConfigError`.
    """
    given = {"--rendezvous": rendezvous, "--nodes": nodes, "--node-rank": node_rank}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if rendezvous is None or nodes is None or node_rank is None:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{' and '.join(missing)} {verb} missing; a run on several hosts needs --rendezvous"
            " HOST:PORT of the first of them, --nodes and --node-rank"
        )
    host, colon, port = rendezvous.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--rendezvous is {rendezvous!r}; allowed is HOST:PORT, as head:29500")
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank is {node_rank}; allowed is 0 to {nodes - 1}")
    return Meeting(host=host.strip("[]"), port=int(port), num_nodes=nodes, node_rank=node_rank)


def meet(where: Meeting, workers: int) -> HostShare:
    """Wait for the other hosts, and divide ranks among all. Collective over hosts.

    Args:
        where: they meet.
        workers: of this host.

    Raises:
        ConfigError: no address of this host leads there, the port is taken, or the first host has a
            secret that this one lacks.
    """
    os.environ["MASTER_ADDR"] = where.host
    address = listen_address()
    if where.node_rank == 0:
        store = serve_store(address, where.port)
    else:
        try:
            found = store_client(where.host, where.port)
        except RuntimeError as error:
            raise ConfigError(
                f"no supervisor serves a store at {where.host} port {where.port} ({error}); start"
                " offbeat run --node-rank 0 there"
            ) from None
        store = RunStore(store=found, address=where.host, port=where.port)
    raw = store.store
    secret = os.environ.get(SECRET_VARIABLE, "")
    if where.node_rank == 0:
        # Anybody on this network can read the store, so a secret that the user chose stays out.
        drawn = "" if secret else secrets.token_hex(32)
        raw.set(f"{_PREFIX}/secret", drawn)
        secret = secret or drawn
    raw.set(f"{_PREFIX}/{where.node_rank}", str(workers))
    counts = [int(raw.get(f"{_PREFIX}/{node}")) for node in range(where.num_nodes)]
    secret = secret or raw.get(f"{_PREFIX}/secret").decode()
    if not secret:
        raise ConfigError(
            f"{SECRET_VARIABLE} is set on the first host, and not on this one; set the same on all"
        )
    interface = interface_of(address)
    return HostShare(
        first_rank=sum(counts[: where.node_rank]),
        num_workers=workers,
        num_of_all_hosts=sum(counts),
        store=store,
        secret=secret,
        environment={
            "OFFBEAT_INTERFACE": address,
            "GROUP_RANK": str(where.node_rank),
            "GROUP_WORLD_SIZE": str(where.num_nodes),
            **({} if interface is None else {"GLOO_SOCKET_IFNAME": interface}),
        },
    )
