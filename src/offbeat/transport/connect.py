"""From an initialised torch.distributed (or an environment that can initialise it) to a driver of
one's own.

`connect` opens what a session needs and shares with nobody: a gloo backend for dense collectives on
CPU, an NCCL one where the model is on CUDA, and a mesh of authenticated ZeroMQ sockets for
messages.

The ranks find each other through the store of the process group that the user initialised.
`torch.distributed.new_group` would do, but it gives a group that is made after another one of the
same ranks was destroyed the same name, and with it the dead one's addresses.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from offbeat.errors import ConfigError, PeerError, UnsupportedError
from offbeat.transport.backends import gloo_backend, nccl_backend
from offbeat.transport.c10d import C10d
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.interface import listen_address
from offbeat.transport.network import Network, create_network, find_network, store_client
from offbeat.transport.operations import AllGather, Operation
from offbeat.transport.peers import Peers
from offbeat.transport.rendezvous import await_all, lost_ranks, naming_failed_rank
from offbeat.transport.routed import Routed
from offbeat.transport.single_rank import SingleRank

SECRET_VARIABLE = "OFFBEAT_RUN_SECRET"
"""Environment variable with the run's secret, at least 16 characters, the same on every rank."""

RETURN_VARIABLE = "OFFBEAT_RETURN"
"""Environment variable of a worker that is to join a run under way; any value but 0."""

CONNECT_LIMIT_S = 30.0
"""How long the ranks may take to connect by gloo, once all of them have come."""

_MEET_S = 5.0
"""How long for connections that a strategy may never need, since with them a death has a name."""

Gather: TypeAlias = Callable[[bytes], list[bytes]]
"""Gives every rank's payload to every rank, by rank."""

_generations: Counter[tuple[int, ...]] = Counter()
"""How often each set of ranks has connected; its members agree on it."""


def join_process_group() -> bool:
    """Initialise torch.distributed from the environment of torchrun, or of SLURM's srun, unless
    that has been done.

    Returns whether there is a process group afterwards. Under srun, MASTER_ADDR and MASTER_PORT
    must be set, as for torch.distributed itself.
    """
    if dist.is_initialized():
        return True
    environment = _launch_environment()
    if environment is None:
        return False
    rank, world_size = environment
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this is rank {rank} of {world_size}, but {' and '.join(missing)} must be set too; "
            "start with torchrun, or export the address and a free port of rank 0's host"
        )
    backend = (
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    )
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    return True


def _launch_environment() -> tuple[int, int] | None:
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank_name in os.environ and size_name in os.environ:
            rank, world_size = int(os.environ[rank_name]), int(os.environ[size_name])
            if world_size > 1 or rank_name == "RANK":
                return rank, world_size
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Connection:
    """What `connect` opened.

    Attributes:
        driver: carries collectives out between the ranks that connected; the caller closes it.
        network: what it takes to open meshes later, for other members. None in a world of one
            process that nobody launched.
    """

    driver: Driver
    network: Network | None


def connect(group: dist.ProcessGroup | None = None, *, cuda: bool = False) -> Connection:
    """A driver over the ranks of `group` (default: all ranks), and their network. Collective: every
    rank of the group calls it.

    Args:
        group: which ranks take part; it is only asked who they are, never used for communication.
        cuda: whether CUDA tensors will be reduced, so that an NCCL backend is worth making.

    Raises:
        PeerError: a rank has ended, on every rank that lives.
        ConfigError, MismatchError: a rank cannot take part, on every rank.
    """
    if not dist.is_initialized():
        return Connection(driver=SingleRank(), network=None)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank, world_size = dist.get_rank(group), len(ranks)
    generation = _generations[tuple(ranks)]
    _generations[tuple(ranks)] += 1
    # Keys of an earlier connection of the same ranks lead to sockets that are closed, so each gets
    # keys of its own.
    name = f"offbeat/{'-'.join(map(str, ranks))}/{generation}"
    assert dist.group.WORLD is not None
    store = PrefixStore(name, dist.group.WORLD.get_group_store())
    lost = lost_ranks()
    address = _agree_to_listen(store, rank, ranks, lost)
    with naming_failed_rank(store, rank, world_size, limit_s=1.5 * CONNECT_LIMIT_S):
        dense = _dense(store, rank, world_size, address=address, cuda=cuda)
        try:
            gather: Gather = lambda payload: dense.start(AllGather(payload), 0).wait()  # noqa: E731
            secret = _agree_on_secret(rank, gather)
            token = gather(secrets.token_hex(8).encode())[0].decode()
            network = create_network(
                store, token=token, rank=rank, world_size=world_size, address=address, secret=secret
            )
            if isinstance(dense, SingleRank):
                return Connection(driver=dense, network=network)
            messages = _mesh(dense, address, generation, secret, gather)
        except BaseException:
            dense.close()
            raise

    def remember(peers: frozenset[int]) -> None:
        lost.update(ranks[peer] for peer in peers)

    return Connection(driver=Routed(dense, messages, on_lost=remember), network=network)


def is_returning() -> bool:
    """Whether this process was started to join a run that is under way."""
    return os.environ.get(RETURN_VARIABLE, "0") not in ("", "0")


def reconnect() -> Connection:
    """The network of the run that is under way, for a worker that comes back or comes new. Not
    collective; asks only the store.

    The environment is as it was at first: RANK (any number; a member's is taken over from that
    member), MASTER_ADDR and
    MASTER_PORT, which must lead to a TCPStore that still stands, and the run's secret.
    torch.distributed is not initialised: its process group cannot be joined later. So the
    connection's driver refuses every operation.

    Raises:
        ConfigError: a variable is missing, no store answers, no run was begun there, it has ended,
            or has another secret.
    """
    environment = _launch_environment()
    if environment is None:
        raise ConfigError(
            f"{RETURN_VARIABLE} is set, but not RANK and WORLD_SIZE; set them as for the worker"
            " that it replaces"
        )
    missing = [
        name for name in ("MASTER_ADDR", "MASTER_PORT", SECRET_VARIABLE) if not os.environ.get(name)
    ]
    if missing:
        raise ConfigError(
            f"{RETURN_VARIABLE} is set, but not {' and '.join(missing)}; a worker can join only a"
            f" run that was started with {SECRET_VARIABLE} on every rank, by the same address and"
            " port"
        )
    rank, _ = environment
    port = os.environ["MASTER_PORT"]
    if not port.isdigit():
        raise ConfigError(f"MASTER_PORT is {port!r}, needed is the number of the store's port")
    address = listen_address()
    store = store_client(os.environ["MASTER_ADDR"], int(port))
    network = find_network(
        store, rank=rank, address=address, secret=os.environ[SECRET_VARIABLE].encode()
    )
    return Connection(driver=RejoinedDriver(rank, network.world_size), network=network)


class RejoinedDriver(Driver):
    """The driver of a worker that came later: it knows its rank and refuses everything."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def start(self, operation: Operation, channel: int) -> Ticket:
        raise UnsupportedError(
            f"rank {self.rank} joined a run under way and cannot perform"
            f" {type(operation).__name__}: it has no connections but those of its generation, so"
            " there is no dense collective over all ranks"
        )

    def close(self) -> None:
        pass


def _dense(
    store: Store, rank: int, world_size: int, *, address: str, cuda: bool
) -> C10d | SingleRank:
    if world_size == 1:
        return SingleRank()
    nccl = (
        nccl_backend(PrefixStore("nccl", store), rank, world_size)
        if cuda and dist.is_nccl_available()
        else None
    )
    gloo = gloo_backend(
        PrefixStore("gloo", store),
        rank,
        world_size,
        address=address,
        connect_limit_s=CONNECT_LIMIT_S,
    )
    return C10d(gloo, nccl)


def _agree_to_listen(store: Store, rank: int, ranks: Sequence[int], lost: AbstractSet[int]) -> str:
    """This rank's address. Raises on every rank if one of them has none, since the others would
    wait for it.
    """
    refusal: ConfigError | None = None
    address = ""
    try:
        address = listen_address()
    except ConfigError as error:
        refusal = error
    await_all(store, rank, ranks, lost=lost, refusal=refusal)
    return address


def _mesh(dense: C10d, address: str, generation: int, secret: bytes, gather: Gather) -> Peers:
    """Open this rank's sockets, learn everybody's endpoints, and connect."""
    messages = Peers(
        dense.rank, dense.world_size, address=address, secret=secret, generation=generation
    )
    try:
        messages.connect([endpoint.decode() for endpoint in gather(messages.endpoint.encode())])
        messages.await_connections(_MEET_S)
        gather(b"connected")
    except BaseException:
        messages.close()
        raise
    return messages


def _agree_on_secret(rank: int, gather: Gather) -> bytes:
    """The run's secret: from the environment if every rank has it there, else drawn by rank 0 and
    sent over gloo.

    gloo is not encrypted: on a network that others can listen to, set the environment variable.
    """
    given = os.environ.get(SECRET_VARIABLE, "").encode()
    have = gather(b"\1" if given else b"\0")
    if len(set(have)) > 1:
        without = [r for r, answer in enumerate(have) if answer == b"\0"]
        raise ConfigError(
            f"{SECRET_VARIABLE} is set on some ranks but not on {without}; set it on all of them or"
            " on none"
        )
    if given:
        return given
    drawn = gather(secrets.token_bytes(32) if rank == 0 else b"")[0]
    if not drawn:
        raise PeerError("rank 0 sent no secret", rank=0)
    return drawn
