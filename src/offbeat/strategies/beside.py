"""What the strategies whose ranks answer beside training are built of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch

from offbeat.averaging.background.averager import Beside, averaged_tensors
from offbeat.averaging.background.group_base import Terms
from offbeat.averaging.background.progress import Progress, Service
from offbeat.averaging.background.published_model import Replica
from offbeat.errors import UnsupportedError
from offbeat.membership.agreement import Generation
from offbeat.parts.workspace import Workspace
from offbeat.planning.groups import Meeting
from offbeat.weights.model_weights import ModelWeights
from offbeat.weights.momenta import Momenta
from offbeat.weights.staging import Staging

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
    momenta: Momenta | None = None,
    averages_momenta: Callable[[int], bool] = lambda version: False,
) -> Beside[R]:
    """Begin to answer for this rank beside its training. Collective.

    Args:
        workspace: of the session.
        weights: what is averaged.
        make_replica: makes the model that the others see.
        service: the protocol.
        meeting: who meets.
        num_flags: counters that the replica adds to the model's own.
        momenta: of the optimizer, to be averaged in some versions.
        averages_momenta: in which.
    """
    staging = Staging(averaged_tensors(weights, momenta))
    if momenta is not None and not staging.in_order:
        raise UnsupportedError(
            "momenta='averaged' needs all parameters and buffers of one type on one device; pass"
            " 'local'"
        )
    num_weights = sum(_num_reals(tensor) for tensor in weights.tensors())
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
            num_averaged=lambda version: (
                staging.num_elements if averages_momenta(version) else num_weights
            ),
            dtype=staging.dtype,
            meeting=lambda version: meeting(version, position, num_members),
        )

    progress = Progress(
        replica, service=service, terms=terms, count=workspace.count, notify=workspace.notify
    )
    generations = None
    try:
        generations = workspace.enter(progress)
        progress.wait_for_model()
    except BaseException:
        if generations is not None:
            generations.close()
        progress.close()
        raise
    return Beside(
        weights=weights,
        momenta=momenta,
        staging=staging,
        replica=replica,
        progress=progress,
        generations=generations,
        rank=workspace.driver.rank,
        notify=workspace.notify,
        stood_still=workspace.stood_still,
    )


def _num_reals(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)
