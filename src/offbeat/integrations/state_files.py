"""A session's state beside the checkpoint of a framework: a file of each rank's.

A framework's checkpoint is written by one rank, and what a session owes, the residuals of gTop-k
for example, is different on each. So every rank writes a file of its own, and nothing travels:

    CHECKPOINT.offbeat/rank-00000.safetensors
    CHECKPOINT.offbeat/rank-00001.safetensors

With another number of ranks the states are shared out anew (`offbeat.reshard`), where each rank
sees all files. Either all ranks take their state up again or none does, and then all say so.

Over islands the state is made of DTensors, and `torch.distributed.checkpoint` writes and reads the
directory, into whatever number of islands and shards.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from offbeat.errors import CheckpointError, OffbeatWarning
from offbeat.session import checkpoint
from offbeat.session.session import Session
from offbeat.session.state import reshard


def state_directory(path: str | Path) -> Path:
    """Where ranks' states lie beside the checkpoint at `path`."""
    path = Path(path)
    return path.with_name(f"{path.name}.offbeat")


def save_state(directory: Path, state: Mapping[str, Any], *, tag: str) -> None:
    """Write this rank's `state`, of `Session.state_dict`, into `directory`. Collective over
    islands.

    Args:
        directory: is made.
        state: of this rank.
        tag: of the framework's checkpoint, the same on all ranks.

    Raises:
        CheckpointError: the disk does not take it.
    """
    if directory.parts[0].endswith(":"):  # what pathlib leaves of s3://
        _say(
            f"{directory} is no path of a file system, so the state of {state['strategy']} is not"
            " saved with the checkpoint; save checkpoints on a disk"
        )
        return
    directory.mkdir(parents=True, exist_ok=True)
    if _is_of_island(state):
        dcp.save({"tag": tag, "session": dict(state)}, checkpoint_id=directory)
        return
    rank, world_size = int(state["rank"]), int(state["world_size"])
    metadata: dict[str, checkpoint.Json] = {"tag": tag, "world_size": world_size}
    checkpoint.save(directory, _name(rank), dict(state), metadata=metadata)
    if rank == 0:
        # An earlier run of more ranks may have saved here, and each would find its own file again.
        names = {f"{_name(each)}.safetensors" for each in range(world_size)}
        for path in directory.glob("rank-*.safetensors"):
            if path.name not in names:
                path.unlink()


def load_state(directory: Path, session: Session, *, tag: str) -> bool:
    """Give `session` the state that was saved. Collective; False where it begins without, on all
    ranks and with a warning.

    Args:
        directory: of `save_state`.
        session: just attached.
        tag: of the framework's checkpoint.
    """
    problem, state = "", None
    try:
        if _is_of_island(session.state_dict()):
            state = _read_islands(directory, session, tag)
        else:
            state = _read(directory, session, tag)
    except CheckpointError as error:
        problem = str(error)
    problems = session.gather(problem)
    if state is not None and not any(problems):
        session.load_state_dict(state)
        return True
    _say(
        f"{session.strategy.name} begins without the state that it had at the checkpoint:"
        f" {next(filter(None, problems))}"
    )
    return False


def remove_state(directory: Path) -> None:
    """Remove what `save_state` wrote."""
    shutil.rmtree(directory, ignore_errors=True)


def _read(directory: Path, session: Session, tag: str) -> dict[str, Any]:
    """This rank's state, made of those of an older world if that was of another size."""
    states: list[Mapping[str, Any]] = []
    rank = session.rank if (directory / f"{_name(session.rank)}.safetensors").exists() else 0
    read = {rank: checkpoint.load(directory, _name(rank))}
    size = read[rank].metadata.get("world_size")
    if not isinstance(size, int):
        raise CheckpointError(f"{directory} does not say of how many ranks it is")
    for rank in [session.rank] if size == session.world_size else range(size):
        each = read.get(rank) or checkpoint.load(directory, _name(rank))
        if each.metadata.get("tag") != tag or not isinstance(each.tree, dict):
            raise CheckpointError(f"rank {rank}'s file in {directory} is of another checkpoint")
        if each.tree.get("strategy") != session.strategy.name:
            raise CheckpointError(f"{directory} was saved with {each.tree.get('strategy')!r}")
        states.append(cast(Mapping[str, Any], each.tree))
    if size == session.world_size:
        return dict(states[0])
    return reshard(states, session.world_size, session.rank)


def _is_of_island(state: Mapping[str, Any]) -> bool:
    return "num_islands" in state


def _read_islands(directory: Path, session: Session, tag: str) -> dict[str, Any]:
    """This rank's state over islands. Collective: all raise if one cannot read."""
    wanted: dict[str, Any] = {}
    problem = ""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
        wanted = {"tag": "", "session": session.state_to_load(metadata)}
    except (OSError, CheckpointError) as error:
        problem = f"{directory} has no state of a session over islands: {error}"
    if problem := next(filter(None, session.gather(problem)), ""):
        raise CheckpointError(problem)
    dcp.load(wanted, checkpoint_id=directory)
    state: dict[str, Any] = wanted["session"]
    if wanted["tag"] != tag:
        raise CheckpointError(f"{directory} is of another checkpoint")
    if state["strategy"] != session.strategy.name:
        raise CheckpointError(f"{directory} was saved with {state['strategy']!r}")
    return state


def make_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of a model that is divided have its state before a framework loads it.

    `torch.distributed.checkpoint` steps an optimizer that has none, which the session would take
    for a step of training. A copy of an optimizer has the same state and groups, and no hooks.
    """
    get_optimizer_state_dict(model, copy.copy(optimizer))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _say(message: str) -> None:
    warnings.warn(message, OffbeatWarning, stacklevel=3)
