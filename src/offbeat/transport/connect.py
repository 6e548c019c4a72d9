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

import hashlib
import ipaddress
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, ConfigError, MismatchError, PeerError, UnsupportedError
from offbeat.torch_private import new_gloo_backend, new_nccl_backend
from offbeat.transport.backends import WAIT_LIMIT, Backend, GlooDevice, gloo_device
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.interface import listen_address
from offbeat.transport.link import SILENCE_VARIABLE, PeerLimits, silence_s
from offbeat.transport.mesh import allow_files
from offbeat.transport.network import (
    Network,
    answering_within,
    create_network,
    find_network,
    proof_of,
    serves,
    session_secret,
    store_client,
    store_sockets,
)
from offbeat.transport.operations import AllGather, Operation
from offbeat.transport.peers import Peers
from offbeat.transport.protection import CIPHER_VARIABLE, check_secret, cipher_from_environment
from offbeat.transport.rendezvous import Presence, Rendezvous, lost_ranks, unreadable
from offbeat.transport.routed import C10d, Routed, Watch
from offbeat.transport.single_rank import SingleRank
from offbeat.transport.sockets import Address, SocketAddresses, closed_in_children

SECRET_VARIABLE = "OFFBEAT_RUN_SECRET"
"""Environment variable with the run's secret, at least 16 characters, the same on every rank."""

RETURN_VARIABLE = "OFFBEAT_RETURN"
"""Environment variable of a worker that is to join a run under way; any value but 0."""

_WAIT_FOR_ISLAND: Final = timedelta(minutes=30)
"""How long a rank that comes back waits for the others of its island, as PyTorch does at first."""

MAX_ATTEMPTS = 10

_MEET_S = 3.0
"""How long for connections that a strategy may never need, since with them a death has a name."""

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
    launch = launched()
    if launch is None:
        return False
    require_address(launch)
    dist.init_process_group(usual_backend(), rank=launch.rank, world_size=launch.world_size)
    return True


def usual_backend() -> str:
    """What torch.distributed is initialised with: gloo, and NCCL beside it where there is CUDA."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process's place among those that torchrun or srun started."""

    rank: int
    world_size: int


def launched() -> Launch | None:
    """This process's place, when torchrun or srun started it; None when it was started alone."""
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
        if rank.isdigit() and size.isdigit() and (rank_name == "RANK" or int(size) > 1):
            return Launch(rank=int(rank), world_size=int(size))
    return None


def require_address(launch: Launch) -> None:
    """Raise `ConfigError` where nothing says at which address the ranks meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this is rank {launch.rank} of {launch.world_size}, but {' and '.join(missing)} must"
            " be set too; start with torchrun, or export the address and a free port of rank 0's"
            " host"
        )


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


def connect(
    group: dist.ProcessGroup | Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    founds: bool = True,
) -> Connection:
    """A driver over the ranks of `group` (default: all ranks), and their network. Collective: every
    rank of the group calls it.

    CUDA tensors travel by NCCL where the process group has it and each rank has a device of its
    own, which NCCL demands; else by gloo, which copies them through the host.

    Args:
        group: which ranks take part; it is only asked who they are, never used for communication.
            Or these ranks, as the default process group numbers them.
        device: of the tensors that will be reduced; None: the CPU.
        founds: whether those who come later are to find these ranks.

    Raises:
        PeerError: a rank has ended, on every rank that lives.
        ConfigError, MismatchError: a rank cannot take part, on every rank.
    """
    if not dist.is_initialized():
        return Connection(driver=SingleRank(), network=None)
    if isinstance(group, Sequence):
        ranks = list(group)
    else:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank, world_size = ranks.index(dist.get_rank()), len(ranks)
    generation = _generations[tuple(ranks)]
    _generations[tuple(ranks)] += 1
    # Keys of an earlier connection of the same ranks lead to sockets that are closed, so each gets
    # keys of its own. They are short, since each rank asks for those of all ranks, time and again.
    who = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]
    name = f"offbeat/{who}/{generation}"
    assert dist.group.WORLD is not None
    store = PrefixStore(name, dist.group.WORLD.get_group_store())
    lost = lost_ranks()
    rendezvous = Rendezvous(store, rank, ranks, lost=lost)
    try:
        address, limit_s, cipher = listen_address(), silence_s(), cipher_from_environment()
        presence = Presence(address) if world_size > 1 else None
    except ConfigError as refusal:
        # The others would wait for this rank.
        rendezvous.refuse(refusal)
        raise
    given = os.environ.get(SECRET_VARIABLE, "").encode()
    network_by = partial(
        create_network,
        store,
        rank=rank,
        world_size=world_size,
        address=address,
        cipher=cipher,
        founds=founds,
    )
    if presence is None:
        if given:
            check_secret(given)
        network = network_by(token=secrets.token_hex(8), secret=given or secrets.token_bytes(32))
        return Connection(driver=SingleRank(), network=network)
    allow_files(world_size)  # gloo opens some before the mesh does
    with answering_within(store, limit_s), ExitStack() as stack:
        stack.callback(presence.close)
        stack.callback(closed_in_children(store_sockets(store)))
        gloo = gloo_device(address)
        said = rendezvous.register(
            {
                "silence_s": limit_s,
                "cipher": cipher,
                "token": secrets.token_hex(8),
                "gloo": gloo.listens_at,
                "nccl": _nccl_device(device),
            },
            presence=presence.address,
            serves_store=serves(store),
        )
        entries = [_Entry.read(at, entry) for at, entry in enumerate(said)]
        token = entries[0].token
        _require_same(SILENCE_VARIABLE, [f"{entry.silence_s:g}" for entry in entries])
        _require_same(CIPHER_VARIABLE, [entry.cipher for entry in entries])
        proof = proof_of(given, token).decode() if given else ""
        _compare_secrets(given, rendezvous.exchange("secret", proof, limit_s=limit_s))
        try:
            backend = _connected_gloo(store, rendezvous, rank, world_size, gloo, limit_s=limit_s)
            devices = {entry.nccl for entry in entries} - {""}
            nccl = (
                new_nccl_backend(
                    PrefixStore("nccl", store), rank, world_size, wait_limit=WAIT_LIMIT
                )
                if len(devices) == world_size
                else None
            )
            dense = C10d(backend, nccl, sockets=_gloo_sockets(entries, rank))
            del backend, nccl  # the driver alone holds them, and a traceback does not
            stack.callback(dense.close)
            secret = given or _drawn_secret(dense, rendezvous, limit_s=limit_s)
            with rendezvous.naming_who_took_the_store():
                network = network_by(token=token, secret=secret)
            messages = Peers(
                rank,
                world_size,
                address=address,
                secret=session_secret(secret, token),
                generation=generation,
                limits=PeerLimits.tolerating(limit_s),
                cipher=cipher,
            )
            stack.callback(messages.close)
            messages.connect(
                rendezvous.exchange(
                    "endpoint", messages.endpoint, limit_s=limit_s + attempt_s(world_size)
                )
            )
            messages.await_connections(_MEET_S)
            rendezvous.exchange("connected", "", limit_s=limit_s + _MEET_S)
        except BaseException as error:
            rendezvous.fail(error)  # while this rank can still be seen to be there
            raise
        opened = stack.pop_all()

    def closed(peers: frozenset[int]) -> None:
        lost.update(ranks[peer] for peer in peers)
        opened.close()

    return Connection(driver=Routed(dense, messages, on_closed=closed), network=network)


def is_returning() -> bool:
    """Whether this process was started to join a run that is under way."""
    return os.environ.get(RETURN_VARIABLE, "0") not in ("", "0")


def reconnect(rank: int | None = None) -> Connection:
    """The network of the run that is under way, for a worker that comes back or comes new. Not
    collective; asks only the store.

    The environment is as it was at first: RANK (any number; a member's is taken over from that
    member), MASTER_ADDR and
    MASTER_PORT, which must lead to a TCPStore that still stands, and the run's secret.
    torch.distributed is not initialised: its process group cannot be joined later. So the
    connection's driver refuses every operation.

    Args:
        rank: among those that exchange; None: RANK.

    Raises:
        ConfigError: a variable is missing, no store answers, no run was begun there, or it has
            another secret.
    """
    launch, store = _run_under_way()
    address, cipher = listen_address(), cipher_from_environment()
    rank = launch.rank if rank is None else rank
    network = find_network(
        store,
        rank=rank,
        address=address,
        secret=os.environ[SECRET_VARIABLE].encode(),
        cipher=cipher,
    )
    driver = RejoinedDriver(
        rank, network.world_size, on_closed=closed_in_children(store_sockets(store))
    )
    return Connection(driver=driver, network=network)


def join_island(num_shards: int) -> None:
    """Initialise torch.distributed for the ranks of this worker's island alone, which comes back to
    a run under way. Returns once all of them have come. Raises as `reconnect`.

    They have the same value of `OFFBEAT_RETURN`, and another one each time that they come back.
    """
    launch, store = _run_under_way()
    island, shard = divmod(launch.rank, num_shards)
    store.set_timeout(_WAIT_FOR_ISLAND)
    name = f"offbeat/returning/{os.environ[RETURN_VARIABLE]}/{island}"
    dist.init_process_group(
        usual_backend(), store=PrefixStore(name, store), rank=shard, world_size=num_shards
    )


def _run_under_way() -> tuple[Launch, Store]:
    """This worker's place in a run, and the run's store."""
    launch = launched()
    if launch is None:
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
    port = os.environ["MASTER_PORT"]
    if not port.isdigit():
        raise ConfigError(f"MASTER_PORT is {port!r}, needed is the number of the store's port")
    return launch, store_client(os.environ["MASTER_ADDR"], int(port))


class RejoinedDriver(Driver):
    """The driver of a worker that came later: it knows its rank and refuses everything."""

    def __init__(self, rank: int, world_size: int, *, on_closed: Callable[[], None]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._on_closed = on_closed

    def start(self, operation: Operation, channel: int) -> Ticket:
        raise UnsupportedError(
            f"rank {self.rank} joined a run under way and cannot perform"
            f" {type(operation).__name__}: it has no connections but those of its generation, so"
            " there is no dense collective over all ranks"
        )

    def close(self) -> None:
        self._on_closed()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a rank says of itself when it has come.

    Attributes:
        silence_s: how long it tolerates silence.
        cipher: that of its messages.
        token: drawn by it; that of rank 0 is the session's.
        gloo: where its gloo device listens; None where it could not find out.
        nccl: the device that NCCL would use, by its UUID; empty where it may not.
    """

    silence_s: float
    cipher: str
    token: str
    gloo: Address | None
    nccl: str

    def __post_init__(self) -> None:
        self.token.encode()
        if self.gloo is not None:
            ipaddress.ip_address(self.gloo[0])

    @classmethod
    def read(cls, rank: int, said: Mapping[str, Any]) -> _Entry:
        """Raises `WireError` for what is no entry: on every rank, since all read the same."""
        try:
            return build(cls, said)
        except MALFORMED as error:
            raise unreadable(f"what rank {rank} says of itself", said) from error


def _nccl_device(device: torch.device | None) -> str:
    """What `_Entry.nccl` is here: the default process group says whether the user wants NCCL."""
    if device is None or device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _require_same(variable: str, values: Sequence[str]) -> None:
    """Raises `MismatchError`, on every rank alike, if not all ranks have the same value of an
    environment variable; `values` by rank.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise MismatchError(
                f"{variable} is {value} on rank {rank} and {values[0]} on rank 0; set the same on"
                " every rank"
            )


def _compare_secrets(given: bytes, proofs: Sequence[str]) -> None:
    """Raises `ConfigError`, on every rank alike, if not all have the same secret or all have none.

    Args:
        given: this rank's secret; empty if it has none.
        proofs: every rank's proof of its own; empty if it has none.
    """
    without = [rank for rank, proof in enumerate(proofs) if not proof]
    if len(without) == len(proofs):
        return
    if without:
        raise ConfigError(
            f"{SECRET_VARIABLE} is set on some ranks but not on {without}; set it on all of them or"
            " on none"
        )
    # Messages are refused with another one, but dense collectives go on without it.
    if others := [str(rank) for rank, proof in enumerate(proofs) if proof != proofs[0]]:
        raise ConfigError(
            f"{SECRET_VARIABLE} of rank{'s' * (len(others) > 1)} {', '.join(others)} is not that of"
            " rank 0; set the same on every rank"
        )
    check_secret(given)


def attempt_s(world_size: int) -> float:
    """How long one attempt of so many ranks to connect by gloo may take, once all of them have
    come. While it lasts nothing can tell gloo that a rank has ended, so it is short.

    But each rank asks the store for every other's address, one after the other, and all of them ask
    at the same time. So a question takes longer the more ranks there are, and so does the attempt.
    """
    return 3.0 + 0.02 * world_size


def _connected_gloo(
    store: Store,
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    device: GlooDevice,
    *,
    limit_s: float,
) -> Backend:
    """A gloo backend that has reached every rank."""
    why, within_s = "", attempt_s(world_size)
    for attempt in range(MAX_ATTEMPTS):
        backend: Backend | None = None
        mine = ""
        try:
            # Only connecting has a short limit: a wait that times out closes its pair for good.
            backend = new_gloo_backend(
                PrefixStore(f"gloo/{attempt}", store),
                rank,
                world_size,
                device=device.handle,
                connect_limit=timedelta(seconds=within_s),
                wait_limit=WAIT_LIMIT,
            )
        except RuntimeError as error:
            mine = str(error).partition("\n")[0] or "failed"
        failures = rendezvous.exchange(f"gloo-{attempt}", mine, limit_s=limit_s + within_s)
        if backend is not None and not any(failures):
            return backend
        why = next(filter(None, failures))
    raise PeerError(f"the ranks could not be connected ({why}); can all hosts reach each other?")


def _gloo_sockets(entries: Sequence[_Entry], rank: int) -> SocketAddresses:
    """The sockets of this rank's gloo backend: it accepts some peers' connections, and connects to
    the others.
    """
    mine = entries[rank].gloo
    if mine is None:
        return SocketAddresses()
    others = frozenset(entry.gloo for entry in entries if entry.gloo is not None)
    return SocketAddresses(local=frozenset([mine]), remote=others - {mine})


def _drawn_secret(dense: C10d, rendezvous: Rendezvous, *, limit_s: float) -> bytes:
    """The run's secret, drawn by rank 0 and sent over gloo.

    gloo is not encrypted: on a network that others can listen to, set the environment variable.
    """
    mine = AllGather(secrets.token_bytes(32) if dense.rank == 0 else b"")
    # There is no message side yet that knows who is dead.
    with closing(Watch(dense, rendezvous.ended, limit_s=limit_s)):
        try:
            drawn: bytes = dense.start(mine, 0).wait()[0]
        except PeerError as error:
            raise rendezvous.cause_of(error) from error
    return drawn
