"""What the strategies whose ranks answer beside training are built of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from offbeat.collectives.group_base import Terms
from offbeat.engine.membership import Generation
from offbeat.engine.progress import Progress, Service
from offbeat.engine.replica import Replica
from offbeat.exchange.weights import ModelWeights
from offbeat.exchange.weights_answered import Beside
from offbeat.exchange.weights_staging import Staging
from offbeat.planning.groups import Meeting
from offbeat.strategies.base import Workspace

R = TypeVar("R", bound=Replica)

Meetings: TypeAlias = Callable[[int, int, int], Meeting]
"""The meeting of (a version, this rank's position, the number of members)."""


def answer(
    workspace: Workspace,
    weights: ModelWeights,
    make_replica: Callable[[Staging], R],
    *,
    service: Service,
    meeting: Meetings,
    num_flags: int = 0,
) -> Beside[R]:
    """Begin to answer for this rank beside its training. Collective.

    Args:
        workspace: of the session.
        weights: what is averaged.
        make_replica: makes the model that the others see.
        service: the protocol.
        meeting: who meets.
        num_flags: counters that the replica adds to the model's own.
    """
    staging = Staging(weights.tensors())
    replica = make_replica(staging)
    buffers = weights.buffers()
    num_counters = num_flags + sum(buffers[name].numel() for name in weights.chosen.counters)

    def terms(generation: Generation, position: int) -> Terms:
        num_members = len(generation.members)
        return Terms(
            members=tuple(range(num_members)),
            generation=generation.number,
            num_elements=staging.num_elements,
            num_counters=num_counters,
            dtype=staging.dtype,
            meeting=lambda version: meeting(version, position, num_members),
        )

    progress = Progress(replica, service=service, terms=terms, count=workspace.count, notify=workspace.notify)
    return Beside(
        weights=weights,
        staging=staging,
        replica=replica,
        progress=progress,
        generations=workspace.enter(progress),
        rank=workspace.driver.rank,
        stood_still=workspace.stood_still,
    )
