"""Islands and columns: who holds one replica together, and who has the same part of each.

    rank            0  1    2  3        2 islands x 2 shards
    island          {0, 1}  {2, 3}      the shard mesh of each replica
    column          {0, 2}  {1, 3}      the same part of all replicas: who exchanges

All ranks meet here through the store before anything is connected: what one of them refuses is
raised on every rank of every island, and none is left waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore

from offbeat.errors import MALFORMED, MismatchError, OffbeatError, PeerError
from offbeat.transport.connect import connect, launched
from offbeat.transport.driver import Driver, Stream, Ticket, Underway, Wrapper
from offbeat.transport.interface import listen_address
from offbeat.transport.link import silence_s
from offbeat.transport.network import answering_within, serves, store_sockets
from offbeat.transport.operations import AllGather, Operation
from offbeat.transport.rendezvous import Presence, Rendezvous, lost_ranks, unreadable
from offbeat.transport.routed import Routed
from offbeat.transport.sockets import SocketAddresses, connections

_meetings: Final = count()
"""Of all ranks of the process group, who meet equally often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Where this rank stands. Ranks are those of the default process group.

    Attributes:
        rank: this one.
        column: those who have the same shard, one of each island.
        island: those who hold a replica together, by shard.
    """

    rank: int
    column: Sequence[int]
    island: Sequence[int]

    @property
    def world_size(self) -> int:
        """The ranks of all islands."""
        return len(self.column) * len(self.island)


def meet(
    island: dist.ProcessGroup | None,
    column: dist.ProcessGroup | None = None,
    *,
    refusal: OffbeatError | None = None,
) -> Grid:
    """Where this rank stands, once all ranks of the process group have come. Collective.

    Args:
        island: who holds a replica together.
        column: who has the same shard; None: the ranks of the same number in each island.
        refusal: this rank's, if it cannot take part; then the groups may be None.

    Raises:
        OffbeatError: this rank's own refusal, if it had one.
        MismatchError: another rank refused, or the places are those of no grid. On every rank.
        PeerError: a rank has ended.
    """
    assert dist.group.WORLD is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"offbeat/grid/{next(_meetings)}", dist.group.WORLD.get_group_store())
    rendezvous = Rendezvous(store, rank, range(world_size), lost=lost_ranks())
    try:
        if refusal is not None:
            raise refusal
        address, limit_s = listen_address(), silence_s()
    except OffbeatError as error:
        rendezvous.refuse(error)
        raise
    assert island is not None
    with answering_within(store, limit_s), closing(Presence(address)) as presence:
        said = rendezvous.register(
            {
                "island": dist.get_process_group_ranks(island),
                "column": None if column is None else dist.get_process_group_ranks(column),
            },
            presence=presence.address,
            serves_store=serves(store),
        )
        # Nobody may take its presence away while others still look for it.
        rendezvous.exchange("met", "", limit_s=limit_s)
    return _grid_of(rank, said)


def _grid_of(rank: int, said: Sequence[Mapping[str, Any]]) -> Grid:
    """The place of `rank`. Raises unless those of all ranks make a grid: every rank comes to the
    same.
    """
    try:
        islands = [tuple(map(int, each["island"])) for each in said]
        found = sorted(set(islands))
        columns = [
            tuple(other[place] for other in found if place < len(other))
            if each["column"] is None
            else tuple(map(int, each["column"]))
            for number, each in enumerate(said)
            for place in [islands[number].index(number)]
        ]
    except MALFORMED as error:
        raise unreadable("where the ranks stand", said) from error
    everyone = set(range(len(said)))
    for place, (column, island) in enumerate(zip(columns, islands, strict=True)):
        if not (
            set(column) | set(island) <= everyone
            and set(column) & set(island) == {place}
            and len(column) * len(island) == len(said)
            and all(columns[other] == column for other in column)
            and all(islands[other] == island for other in island)
            and {islands[other].index(other) for other in column} == {island.index(place)}
            and {columns[other].index(other) for other in island} == {column.index(place)}
        ):
            raise MismatchError(
                f"rank {place} shards its model among ranks {list(island)} and exchanges with ranks"
                f" {list(column)}, which is no place in a grid of all {len(said)} ranks; make one"
                " mesh = init_device_mesh(device, (islands, shards), mesh_dim_names=('replicate',"
                " 'shard')), call fully_shard(..., mesh=mesh['shard']), and pass"
                " mesh=mesh['replicate'] to attach"
            )
    return Grid(rank=rank, column=columns[rank], island=islands[rank])


def in_run(grid: Grid) -> Grid:
    """The place in the whole run of a rank whose process group is an island that comes back."""
    launch, num_shards = launched(), len(grid.island)
    assert launch is not None, "the process group was made of it"
    island, shard = divmod(launch.rank, num_shards)
    return Grid(
        rank=launch.rank,
        column=range(shard, launch.world_size, num_shards),
        island=range(island * num_shards, (island + 1) * num_shards),
    )


def connect_island(ranks: Sequence[int], names: Sequence[int]) -> Driver:
    """Connect the ranks of an island, which errors call `names`. Collective.

    FSDP waits on connections of its own, on gloo for as long as its process group says: for a rank
    that is frozen, and for one whose session has failed. When a rank of the island is dead, those
    that there are with any of them by now are ended, and what waits fails.
    """
    assert dist.group.WORLD is not None
    others = connections(but=store_sockets(dist.group.WORLD.get_group_store()))
    driver = connect(ranks, founds=False).driver
    if isinstance(driver, Routed):
        # An address is one process's alone, so a connection to one of theirs leads to them.
        mine = AllGather(json.dumps([here for here, _ in others]).encode())
        said = [json.loads(bytes(each)) for each in driver.start(mine, Stream(3).next()).wait()]
        theirs = frozenset((host, port) for each in said for host, port in each)
        there = frozenset(there for _, there in others)
        driver.tie(SocketAddresses(remote=there & theirs))
    return GlobalRanks(driver, names)


class GlobalRanks(Wrapper):
    """A driver of some ranks, whose errors have the ranks of the default process group.

    Args:
        inner: the driver.
        ranks: of each of its ranks the one that is meant.
    """

    def __init__(self, inner: Driver, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self._ranks = ranks

    def start(self, operation: Operation, channel: int) -> Ticket:
        with self.naming():
            ticket = self.inner.start(operation, channel)
        return Underway(ticket.done, self.naming()(ticket.wait))

    def name_of(self, rank: int) -> int:
        return self._ranks[rank]

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        place = self._ranks.index(blame) if blame in self._ranks else None
        self.inner.abort(reason, blame=place)

    def end_training(self, channel: int) -> None:
        with self.naming():
            self.inner.end_training(channel)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of the driver inside have the other ranks."""
        try:
            yield
        except PeerError as error:
            raise self._named(error) from error

    def _named(self, error: PeerError) -> PeerError:
        if error.rank is None:
            return error
        rank, me = self._ranks[error.rank], self._ranks[self.rank]
        text = str(error)
        reason = text.removeprefix(f"rank {error.rank} ")
        if reason != text:  # what stands at its end is how this driver's rank learnt of it
            text = f"rank {rank} {reason.rpartition(' (rank ')[0] or reason} (rank {me} waited)"
        return type(error)(text, rank=rank)
