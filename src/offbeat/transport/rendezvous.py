"""Waits until all ranks have come to `attach`. The ranks tell each other through the store, since
there are no connections yet:

    here/<position>       this rank has come
    halted                a rank has come and refuses, or knows of a rank that will never come
    through/<position>    this rank has connected, or has failed to; a rank that says neither has
                          ended meanwhile

No rank can be left out here: ranks are compared and models copied from the first one, so a death
ends the start of the session on all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store

from offbeat.errors import MismatchError, OffbeatError, PeerError

GRACE_S: Final = 2.0
"""How long a rank that an earlier session has lost may take to show that it lives all the same."""

_LOOK_S: Final = 0.02
_HALTED: Final = "halted"

_lost: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


def lost_ranks() -> set[int]:
    """Ranks of the default process group with which a session of this process has lost its
    connection; to be added to.
    """
    world = dist.group.WORLD
    assert world is not None, "asked for before there is a process group"
    return _lost.setdefault(world, set())


def await_all(
    store: Store,
    position: int,
    ranks: Sequence[int],
    *,
    lost: AbstractSet[int],
    refusal: OffbeatError | None = None,
) -> None:
    """Return once all have come. Each may take as long as the store's time limit.

    Args:
        store: under a prefix of this session alone.
        position: of this rank in `ranks`.
        ranks: who takes part, by their number in the default process group.
        lost: those that are known to be dead.
        refusal: why this rank cannot take part.

    Raises:
        OffbeatError: `refusal`.
        MismatchError: another rank refuses.
        PeerError: a rank is dead, on every rank; or one has not come within the time limit.
    """
    if refusal is not None:
        _halt(store, f"rank {position} refused: {refusal}", None)
        raise refusal
    store.set(f"here/{position}", "")
    # missing in torch's stubs
    limit_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
    begin_s = time.monotonic()
    for other, rank in enumerate(ranks):
        while not store.check([f"here/{other}"]):
            _raise_if_halted(store)
            waited_s = time.monotonic() - begin_s
            if rank in lost and waited_s > GRACE_S:
                _halt(
                    store, _was_lost(rank, [living for living in ranks if living not in lost]), rank
                )
                continue
            if waited_s > limit_s:
                raise PeerError(
                    f"rank {rank} has not come to attach() within {limit_s:g} s, the time limit of"
                    " the process group; has it ended, or does it never get there? Start all"
                    " workers anew, with a longer timeout if they need it",
                    rank=rank,
                )
            time.sleep(min(_LOOK_S + waited_s / 50, 0.25))
    _raise_if_halted(store)  # a rank that was held dead and comes late must not go on alone


@contextmanager
def naming_failed_rank(
    store: Store, position: int, world_size: int, *, limit_s: float
) -> Iterator[None]:
    """Name the rank that ends while ranks connect, which its peers see only as a broken connection.

    Args:
        store: under a prefix of this session alone.
        position: of this rank, 0 <= position < world_size.
        world_size: number of ranks.
        limit_s: how long after one rank has failed to connect another may take to do so, > 0.

    Raises:
        PeerError: within `limit_s` of the failure.
    """
    try:
        yield
    except (PeerError, RuntimeError) as error:
        store.set(f"through/{position}", "")
        until_s = time.monotonic() + limit_s
        silent = list(range(world_size))
        while silent and time.monotonic() < until_s:
            silent = [other for other in silent if not store.check([f"through/{other}"])]
            time.sleep(_LOOK_S if silent else 0.0)
        reason = str(error).partition("\n")[0]
        if not silent:
            raise PeerError(
                f"the ranks could not be connected ({reason}); can all hosts reach each other?"
            ) from error
        raise PeerError(
            f"rank {silent[0]} ended while the ranks connected ({reason}); start all workers anew",
            rank=silent[0],
        ) from error
    except OffbeatError:
        store.set(f"through/{position}", "")
        raise
    store.set(f"through/{position}", "")


def _was_lost(rank: int, others: Sequence[int]) -> str:
    return (
        f"rank {rank} was lost in an earlier session of these processes, and no session can begin"
        " with it: start all workers anew, from a checkpoint, or go on without it by attach(...,"
        f" group=torch.distributed.new_group({list(others)}, use_local_synchronization=True))"
    )


def _halt(store: Store, why: str, lost: int | None) -> None:
    store.set(_HALTED, json.dumps([why, lost]))


def _raise_if_halted(store: Store) -> None:
    if store.check([_HALTED]):
        why, lost = json.loads(store.get(_HALTED))
        raise MismatchError(why) if lost is None else PeerError(why, rank=lost)
