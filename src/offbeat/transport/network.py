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
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from offbeat.errors import ConfigError, PeerError, WireError
from offbeat.transport.link import PeerLimits
from offbeat.transport.peers import Peers

OVER_KEY = "over"
"""Set in a network's store when its run has ended."""

MESH_LIMITS = PeerLimits(
    grace_s=1.0,
    heartbeat_interval_s=1.0,
    heartbeat_timeout_s=10.0,
    connect_timeout_s=15.0,
    linger_s=1.0,
)
"""For meshes that a death does not end: what is lost by holding a living rank dead is a generation,
not the run.
"""

STORE_TIMEOUT_S = 10.0
"""How long connecting to the store may take."""

_ENTRY_KEY = "offbeat/network"
_ENTRY_VERSION = 1
_KEY_LABEL = b"offbeat network secret 1"
_PROOF_LABEL = b"offbeat network proof 1"


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
    """

    store: Store
    rank: int
    world_size: int
    address: str
    secret: bytes

    def open(
        self, *, generation: int, position: int, size: int, limits: PeerLimits = MESH_LIMITS
    ) -> Peers:
        """A mesh of one generation that listens and is not connected yet. A size of 1 has no links,
        but is no special case.

        Args:
            generation: number of the membership, 0 <= generation < 2**32.
            position: this rank's among the members, 0 <= position < size.
            size: number of members.
            limits: the same at every member.
        """
        peers = Peers(
            position,
            size,
            address=self.address,
            secret=self.secret,
            generation=generation,
            limits=limits,
        )
        peers.watch_all = False
        return peers

    def own_store(self) -> Store:
        """The same store over a new connection, so that no other thread's wait for a key holds it
        up.

        Made when it is needed, since torch looks up the name of the store's host for each
        connection, which takes seconds where name servers are slow.

        Raises:
            PeerError: the store does not answer.
        """
        if not isinstance(bottom_of(self.store), TCPStore):
            return self.store
        try:
            # missing in torch's stubs
            mine: Store = self.store.clone()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PeerError(
                f"the run's store does not answer ({error}); has the process that serves it ended?"
            ) from error
        mine.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return mine

    def renewed_store(self) -> Store | None:
        """As `own_store`, after a connection was lost; None, soon and quietly, while nobody listens
        there.
        """
        bottom = bottom_of(self.store)
        return (
            self.own_store()
            if isinstance(bottom, TCPStore) and _listens(bottom.host, bottom.port)
            else None
        )


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


def create_network(
    store: Store, *, token: str, rank: int, world_size: int, address: str, secret: bytes
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
    """
    bottom = bottom_of(store)
    derived = _derived(secret, token)
    if rank == 0:
        entry = {
            "version": _ENTRY_VERSION,
            "token": token,
            "world_size": world_size,
            "proof": _proof(derived),
        }
        bottom.set(_ENTRY_KEY, json.dumps(entry))
    return Network(
        store=_part_of(bottom, token),
        rank=rank,
        world_size=world_size,
        address=address,
        secret=derived,
    )


def find_network(store: Store, *, rank: int, address: str, secret: bytes) -> Network:
    """The network whose entry is in `store`: of the session that was founded last.

    Args:
        store: the store of the run, without any prefix.
        rank: this rank, >= 0.
        address: numeric address of this host that its peers can route to.
        secret: the run's.

    Raises:
        ConfigError: no session was founded, it has ended, or it has another secret.
        WireError: the entry is damaged or of another version.
    """
    if not store.check([_ENTRY_KEY]):
        raise ConfigError(
            "this worker was told to join a run under way, but none has begun with this store;"
            " start it without OFFBEAT_RETURN, or wait until the others have attached"
        )
    token, world_size, proof = _read_entry(store.get(_ENTRY_KEY))
    derived = _derived(secret, token)
    if not hmac.compare_digest(proof, _proof(derived)):
        raise ConfigError(
            "OFFBEAT_RUN_SECRET is not the secret of the run that this worker is to join; the run"
            " was started with another one, or with none, and then nobody can join later"
        )
    part = _part_of(store, token)
    if part.check([OVER_KEY]):
        raise ConfigError(
            "the run that this worker is to join has ended; start a new one without OFFBEAT_RETURN"
        )
    return Network(store=part, rank=rank, world_size=world_size, address=address, secret=derived)


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
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
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
        socket.create_connection((host, port), timeout=STORE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _part_of(store: Store, token: str) -> Store:
    return PrefixStore(f"{_ENTRY_KEY}/{token}", store)


def _read_entry(raw: bytes) -> tuple[str, int, str]:
    try:
        entry = json.loads(raw)
        if entry["version"] != _ENTRY_VERSION:
            raise WireError(
                f"the run's entry in the store has version {entry['version']}, this program reads"
                f" {_ENTRY_VERSION}"
            )
        return str(entry["token"]), int(entry["world_size"]), str(entry["proof"])
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"the run's entry in the store is damaged: {raw[:80]!r}") from error


def _derived(secret: bytes, token: str) -> bytes:
    return hmac.digest(secret, _KEY_LABEL + token.encode(), hashlib.sha256)


def _proof(derived: bytes) -> str:
    """Shows that somebody has the secret without telling it."""
    return hmac.digest(derived, _PROOF_LABEL, hashlib.sha256).hex()
