"""What a rank needs to open meshes later, without a collective call: the store, its address and the
secret.

The store is the one through which torch.distributed was initialised, under a prefix that belongs to
this session alone. Rank 0 writes an entry into the store itself that says where that prefix is, so
that a worker that comes later can find it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partialmethod
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from offbeat.errors import MALFORMED, ConfigError, PeerError, WireError
from offbeat.transport.link import PeerLimits, silence_s
from offbeat.transport.peers import Peers
from offbeat.transport.protection import CIPHER_VARIABLE, Cipher
from offbeat.transport.sockets import (
    SocketAddresses,
    ends_towards,
    keep_alive,
    limit_answers,
    of_service,
    shut_down,
)

_ENTRY_KEY = "offbeat/network"

_ENTRY_VERSION = 1

_KEY_LABEL = b"offbeat network secret 1"

_PROOF_LABEL = b"offbeat network proof 1"

_SESSION_LABEL = b"offbeat session secret 1"

_opening = threading.Lock()


def mesh_limits() -> PeerLimits:
    """The limits of meshes that a death does not end: what is lost by holding a living rank dead
    is a generation, not the run. Raises `ConfigError` where `OFFBEAT_SILENCE_S` is no time.
    """
    tolerated_s = silence_s()
    return replace(
        PeerLimits.tolerating(tolerated_s),
        grace_s=min(1.0, tolerated_s / 4),
        connect_timeout_s=min(15.0, tolerated_s),
        linger_s=1.0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A session's own part of the store, and what it takes to listen and be known.

    Attributes:
        store: under this session's prefix. Its connection may be shared with others; see
            `own_store`.
        rank: this process's. One that came later may have any rank >= 0.
        world_size: number of ranks when the session was founded.
        address: numeric address of this host that its peers can route to.
        secret: of this session's meshes, 32 bytes.
        cipher: of this session's meshes.
    """

    store: Store
    rank: int
    world_size: int
    address: str
    secret: bytes
    cipher: Cipher = "curve"

    def open(
        self, *, generation: int, position: int, size: int, limits: PeerLimits | None = None
    ) -> Peers:
        """A mesh of one generation that listens and is not connected yet. A size of 1 has no links,
        but is no special case.

        Args:
            generation: number of the membership, 0 <= generation < 2**32.
            position: this rank's among the members, 0 <= position < size.
            size: number of members.
            limits: the same at every member; `mesh_limits` if None.
        """
        return Peers(
            position,
            size,
            address=self.address,
            secret=self.secret,
            generation=generation,
            limits=limits if limits is not None else mesh_limits(),
            cipher=self.cipher,
            watch_all=False,
        )

    def own_store(self) -> Store:
        """The same store over a new connection, so that no other thread's wait for a key holds it
        up.

        Made when it is needed, since torch looks up the name of the store's host for each
        connection, which takes seconds where name servers are slow.

        Raises:
            PeerError: the store does not answer.
        """
        bottom = bottom_of(self.store)
        if not isinstance(bottom, TCPStore):
            return self.store
        try:
            # missing in torch's stubs
            clone: Callable[[], Store] = self.store.clone  # type: ignore[attr-defined]
            return OwnStore(clone, port=bottom.port, limit_s=silence_s())
        except RuntimeError as error:
            raise PeerError(
                f"the run's store does not answer ({error}); has the process that serves it ended?"
            ) from error

    def renewed_store(self) -> Store | None:
        """What `own_store` returns, after a connection was lost; None, soon and quietly, while
        nobody listens there.
        """
        bottom = bottom_of(self.store)
        return (
            self.own_store()
            if isinstance(bottom, TCPStore) and _listens(bottom.host, bottom.port)
            else None
        )


def proof_of(secret: bytes, token: str) -> bytes:
    """Shows, as text, that somebody has the secret of the session of `token`, without telling
    it.
    """
    return hmac.digest(_derived(secret, token), _PROOF_LABEL, hashlib.sha256).hex().encode()


def store_of(network: Network | None) -> Store:
    """A store that a session's ranks share, over a connection of its own; in a world of one that
    nobody launched, a new one.
    """
    return HashStore() if network is None else network.own_store()


def bottom_of(store: Store) -> Store:
    """The store itself, without the prefixes put around it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def store_sockets(store: Store) -> SocketAddresses:
    """This process's sockets to the server of `store`, or of that server."""
    bottom = bottom_of(store)
    return of_service(bottom.port) if isinstance(bottom, TCPStore) else SocketAddresses()


def serves(store: Store) -> bool:
    """Whether this process is the server of `store`, for other processes too."""
    return bool(store_sockets(store).local)


@contextmanager
def answering_within(store: Store, limit_s: float) -> Iterator[None]:
    """Within the block, calls of `store` raise `RuntimeError` when its server is silent for
    `limit_s`. Its connection ends then, because a late answer would be taken for a later call's.
    """
    bottom = bottom_of(store)
    if not isinstance(bottom, TCPStore):
        yield
        return
    limited = limit_answers(SocketAddresses(local=ends_towards(bottom.port)), limit_s)
    try:
        yield
    except PeerError as error:
        if isinstance(error.__cause__, dist.DistNetworkError):
            shut_down(limited)
        raise
    finally:
        limit_answers(limited, 0.0)


def create_network(
    store: Store,
    *,
    token: str,
    rank: int,
    world_size: int,
    address: str,
    secret: bytes,
    cipher: Cipher = "curve",
    founds: bool = True,
) -> Network:
    """The network of a session whose ranks agreed on `token`; rank 0 leaves its entry for those who
    come later.

    Args:
        store: any view of the store that all ranks use.
        token: drawn by rank 0 for this session, the same on every rank.
        rank: this rank.
        world_size: number of ranks.
        address: this rank's.
        secret: the run's.
        cipher: the run's.
        founds: whether that entry is left.
    """
    bottom = bottom_of(store)
    if rank == 0 and founds:
        entry = {
            "version": _ENTRY_VERSION,
            "token": token,
            "world_size": world_size,
            "proof": proof_of(secret, token).decode(),
            "cipher": cipher,
        }
        bottom.set(_ENTRY_KEY, json.dumps(entry))
    return Network(
        store=PrefixStore(f"{_ENTRY_KEY}/{token}", bottom),
        rank=rank,
        world_size=world_size,
        address=address,
        secret=_derived(secret, token),
        cipher=cipher,
    )


def find_network(
    store: Store, *, rank: int, address: str, secret: bytes, cipher: Cipher = "curve"
) -> Network:
    """The network whose entry is in `store`: of the session that was founded last.

    Args:
        store: the store of the run, without any prefix.
        rank: this rank, >= 0.
        address: numeric address of this host that its peers can route to.
        secret: the run's.
        cipher: the run's.

    Raises:
        ConfigError: no session was founded, or it has another secret or cipher.
        WireError: the entry is damaged or of another version.
    """
    if not store.check([_ENTRY_KEY]):
        raise ConfigError(
            "this worker was told to join a run under way, but none has begun with this store;"
            " start it without OFFBEAT_RETURN, or wait until the others have attached"
        )
    token, world_size, proof, used = _read_entry(store.get(_ENTRY_KEY))
    if not hmac.compare_digest(proof.encode(), proof_of(secret, token)):
        raise ConfigError(
            "OFFBEAT_RUN_SECRET is not the secret of the run that this worker is to join; the run"
            " was started with another one, or with none, and then nobody can join later"
        )
    if used != cipher:
        raise ConfigError(
            f"{CIPHER_VARIABLE} is {cipher} for this worker, and the run that it is to join uses"
            f" {used}; set that"
        )
    return create_network(
        store,
        token=token,
        rank=rank,
        world_size=world_size,
        address=address,
        secret=secret,
        cipher=cipher,
        founds=False,
    )


def store_client(host: str, port: int) -> Store:
    """A connection to the TCPStore at `host` and `port`. Raises `ConfigError`, within seconds, when
    there is none.
    """
    if _listens(host, port):
        try:
            return TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=silence_s()),
            )
        except RuntimeError as error:
            raise ConfigError(
                f"what listens at {host} port {port} is no store of torch.distributed: {error}"
            ) from error
    raise ConfigError(
        f"no store answers at {host} port {port} (MASTER_ADDR and MASTER_PORT); it ends with the"
        " process that serves it, which is the launcher's or rank 0's: is the run still going?"
    )


def _listens(host: str, port: int) -> bool:
    """Whether somebody accepts connections there; torch's own attempt retries and complains on
    standard error.
    """
    try:
        socket.create_connection((host, port), timeout=silence_s()).close()
    except OSError:
        return False
    return True


def _read_entry(raw: bytes) -> tuple[str, int, str, str]:
    try:
        entry = json.loads(raw)
        if entry["version"] != _ENTRY_VERSION:
            raise WireError(
                f"the run's entry in the store has version {entry['version']}, this program reads"
                f" {_ENTRY_VERSION}"
            )
        token, world_size, proof = entry["token"], entry["world_size"], entry["proof"]
        token.encode(), proof.encode()
        if type(world_size) is not int:
            raise TypeError(f"world_size is {world_size!r}")
        return token, world_size, proof, str(entry["cipher"])
    except MALFORMED as error:
        raise WireError(f"the run's entry in the store is damaged: {raw[:80]!r}") from error


def session_secret(secret: bytes, token: str) -> bytes:
    """Of a session's own connections: no other session has it, and none of its generations."""
    return hmac.digest(secret, _SESSION_LABEL + token.encode(), hashlib.sha256)


def _derived(secret: bytes, token: str) -> bytes:
    return hmac.digest(secret, _KEY_LABEL + token.encode(), hashlib.sha256)


class StoreLostError(PeerError):
    """The run's store does not answer any more."""


class OwnStore(Store):
    """A connection to the run's store, used by nobody else, whose calls always end: they raise
    `StoreLostError` after `limit_s` without an answer, and from then on.

    PyTorch's client waits without end for an answer when the process that serves the store is
    frozen or cut off. The kernel can limit that wait. After it the connection has to go: the answer
    may still come, and would be taken for that of the next call.
    """

    def __init__(self, open_client: Callable[[], Store], *, port: int, limit_s: float) -> None:
        """Open the connection.

        Args:
            open_client: makes the client.
            port: of the server.
            limit_s: how long the server may be silent, > 0.

        Raises:
            RuntimeError: the store does not answer.
        """
        super().__init__()
        with _opening:  # else the connection of another thread would look like this one
            before = ends_towards(port)
            self._client = open_client()
            self._sockets = SocketAddresses(local=ends_towards(port) - before)
        self._client.set_timeout(timedelta(seconds=limit_s))
        limit_answers(self._sockets, limit_s)
        keep_alive(self._sockets)

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._client, name)(*args)
        except RuntimeError as error:  # torch has several classes for these failures
            if isinstance(error, dist.DistNetworkError):
                shut_down(self._sockets)
            reason = str(error).partition("\n")[0]
            raise StoreLostError(
                f"the run's store cannot be asked any more ({reason}); has the process that serves"
                " it ended?"
            ) from error


# All that offbeat asks of a store.
for _name in ("set", "get", "add", "check", "compare_set", "delete_key", "multi_get"):
    setattr(OwnStore, _name, partialmethod(OwnStore._ask, _name))
