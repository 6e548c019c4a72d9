"""Checkpoints of a run: who writes one, and what is read from one.

    ranks that come in time agree on who writes           the other ranks are too late, or dead
    each of them writes its part                          the writers are numbered anew, from 0
    the first of them writes the manifest

Where ranks do not keep step none waits long for a late one, and one that dies while it writes
takes the checkpoint with it; the one before stays. A resume with as many workers as there are parts
goes on as if nothing had been; with another number each begins from the mean of all parts, if the
models differ on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import torch

from offbeat.errors import CheckpointError, PeerError
from offbeat.run.coordination import Coordinator
from offbeat.run.step_recorder import Position
from offbeat.session.checkpoint import (
    Manifest,
    Tree,
    latest,
    naming_misfit,
    read_shard,
    write_checkpoint,
)
from offbeat.session.session import Session
from offbeat.session.state import reshard
from offbeat_lab.attaching import TaskModel
from offbeat_lab.records import Record
from offbeat_lab.schedule import position_from_json
from offbeat_lab.task_recorder import TaskRun

LATE_S: Final = 0.5
"""Where ranks do not keep step: for how long ranks wait for a late one before they write
without it.
"""

_HANGS_S: Final = 60.0
"""And after what time one that was to write is taken to hang."""


class _State(TypedDict):
    """What a rank's part of a checkpoint holds."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    session: dict[str, Any]
    weight: float
    random: torch.Tensor


def save(run: TaskRun, name: str, *, patience_s: float = LATE_S) -> None:
    """Write a checkpoint together with those who are there.

    It is of the first writer's step: where ranks do not keep step, other ranks may be at another
    one.

    Args:
        run: of this rank.
        name: of the occasion, the same on all ranks.
        patience_s: how long to wait for late ones, where ranks do not keep step.
    """
    coordinator, position, session = run.coordinator, run.schedule.position, run.attached.session
    apart = session.averages_alone
    positions = coordinator.gather_living(
        f"{name}/writers",
        json.dumps(asdict(position)),
        step=position.step,
        patience_s=patience_s if apart else None,
    )
    writers = list(positions)
    of_first = position_from_json(json.loads(positions[writers[0]]))
    if coordinator.rank not in writers or (
        apart and _is_past(run.record.checkpoint_root, of_first.step)
    ):
        return
    place = {"world_size": len(writers), "rank": writers.index(coordinator.rank)}
    tree = _State(
        model=run.attached.model.state_dict(),
        optimizer=run.attached.optimizer.state_dict(),
        session=session.state_dict() | place,
        weight=session.averaging_weight,
        random=torch.get_rng_state(),
    )
    moments = iter(("written", "complete"))
    try:
        write_checkpoint(
            run.record.checkpoint_root,
            cast(Tree, tree),
            step=of_first.step,
            rank=writers.index(coordinator.rank),
            world_size=len(writers),
            barrier=lambda: coordinator.barrier(
                f"{name}/{next(moments)}", writers, patience_s=_HANGS_S if apart else None
            ),
            metadata={"position": asdict(of_first), "task": run.record.config.task},
        )
    except PeerError as error:
        if not (isinstance(session, Session) and session.strategy.survives_death):
            raise
        run.notices.append(f"the checkpoint of step {of_first.step} was given up: {error}")


def _is_past(root: Path, step: int) -> bool:
    """Whether a later checkpoint is there: a worker that came back may come to an occasion that it
    has been at before.
    """
    try:
        return latest(root).step > step
    except CheckpointError:
        return False


def restore(record: Record, coordinator: Coordinator, attached: TaskModel) -> Position:
    """Load what this rank needs of the newest checkpoint, and say where the run stands. Raises
    `CheckpointError`.
    """
    manifest, start_step = latest(record.checkpoint_root), record.attempts[-1].start_step
    if manifest.step != start_step:
        raise CheckpointError(
            f"the checkpoint is of step {manifest.step}, the run was to go on from step"
            f" {start_step}; start it again"
        )
    tree = _part(manifest, coordinator.rank % manifest.world_size)
    with naming_misfit(f"the checkpoint {manifest.path}"):
        _load(tree, manifest, coordinator, attached)
    return position_from_json(manifest.metadata.get("position"))


def _load(tree: _State, manifest: Manifest, coordinator: Coordinator, attached: TaskModel) -> None:
    """Load this rank's part, and of the other parts what another number of ranks needs.

    Args:
        tree: this rank's part.
        manifest: of the checkpoint.
        coordinator: knows this rank.
        attached: what is loaded into.
    """
    model = attached.model
    attached.optimizer.load_state_dict(tree["optimizer"])
    session = attached.session if isinstance(attached.session, Session) else None
    if manifest.world_size == coordinator.world_size:
        model.load_state_dict(tree["model"])
        if session is not None:
            session.load_state_dict(tree["session"])
        torch.set_rng_state(tree["random"])
        return
    parts = [_part(manifest, rank) for rank in range(manifest.world_size)]
    differ = session is not None and session.strategy.replicas_differ
    model.load_state_dict(mean_of_models(parts) if differ else tree["model"])
    if session is not None:
        session.load_state_dict(
            reshard([part["session"] for part in parts], coordinator.world_size, coordinator.rank)
        )


def mean_of_models(parts: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The mean of the parts' models by their weights: of integers the maximum, of truth values the
    first part's.

    Sums are in float64 and rounded once. A tensor in which some part is not finite, such as a mask
    to add, is the first part's.
    """
    total = sum(part["weight"] for part in parts)
    if not total > 0:
        raise CheckpointError(
            "the parts of the checkpoint weigh nothing together, so they have no mean; resume with"
            " as many workers"
        )
    mean = {}
    for name, first in parts[0]["model"].items():
        tensors = [part["model"][name] for part in parts]
        if first.dtype == torch.bool or not all(
            bool(torch.isfinite(tensor).all()) for tensor in tensors
        ):
            mean[name] = first
        elif first.is_floating_point() or first.is_complex():
            exact = torch.complex128 if first.is_complex() else torch.float64
            terms = [
                part["weight"] / total * tensor.to(exact)
                for part, tensor in zip(parts, tensors, strict=True)
            ]
            mean[name] = torch.stack(terms).sum(dim=0).to(first.dtype)
        else:
            mean[name] = torch.stack(tensors).amax(dim=0)
    return mean


def _part(manifest: Manifest, number: int) -> _State:
    tree = read_shard(manifest, number)
    if isinstance(tree, dict):
        tree.setdefault("weight", 1.0)  # checkpoints of earlier versions say nothing of it
    if not isinstance(tree, dict) or tree.keys() != _State.__annotations__.keys():
        raise CheckpointError(
            f"{manifest.path} was not written by offbeat train; use a checkpoint of this run"
        )
    return cast(_State, tree)
