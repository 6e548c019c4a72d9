"""The state of a session: that of its parts, by `state_key`, and how it is shared out anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import naming_misfit


def state_of(parts: Sequence[Callback]) -> dict[str, CallbackState]:
    """The state of each part. Tensors are copies."""
    return {part.state_key: _copied(part.state_dict()) for part in parts}


def load_state_of(parts: Sequence[Callback], saved: Mapping[str, CallbackState]) -> None:
    """Inverse of `state_of`.

    Raises:
        CheckpointError: the state of a part is missing or does not fit.
    """
    with naming_misfit("the session's state"):
        by_key = dict(saved)
    for part in parts:
        if part.state_key not in by_key and not part.may_begin_anew:
            raise CheckpointError(
                f"the state lacks {part.state_key!r}; it was saved with other options of the"
                " strategy"
            )
    for part in parts:
        if part.state_key not in by_key:
            continue
        with naming_misfit(f"the state of {part.state_key!r}"):
            part.load_state_dict(by_key[part.state_key])


def reshard(states: Sequence[Mapping[str, Any]], world_size: int, rank: int) -> dict[str, Any]:
    """The state of `rank` in a world of `world_size`, made of the states of all ranks of an older
    world.

    What is additive (residuals) is shared out so that its sum over ranks stays the same:
    rank r takes the old ranks r, r + world_size, ...; a rank beyond the old ones starts with zeros.
    What is owned is handed to all. With the same world size nothing changes.

    Args:
        states: `Session.state_dict()` of every old rank, by rank.
        world_size: of the new world, >= 1.
        rank: in the new world.
    """
    if not states:
        raise CheckpointError("there is no state to share out")
    with naming_misfit("the state to share out"):
        parts = {
            name: _reshard_part([state["parts"][name] for state in states], world_size, rank)
            for name in states[0]["parts"]
        }
        return {
            "strategy": states[0]["strategy"],
            "world_size": world_size,
            "rank": rank,
            "parts": parts,
        }


def _reshard_part(states: Sequence[CallbackState], world_size: int, rank: int) -> CallbackState:
    mine = states[rank::world_size]
    additive = {
        name: (
            torch.stack([state["additive"][name] for state in mine]).sum(dim=0)
            if mine
            else torch.zeros_like(tensor)
        )
        for name, tensor in states[0].get("additive", {}).items()
    }
    found: CallbackState = {
        "additive": additive,
        "local": states[rank % len(states)].get("local", {}),
        "replicated": states[0].get("replicated", {}),
    }
    if "owned" in states[0]:
        owners = [states[rank]] if len(states) == world_size else states
        found["owned"] = {name: kept for state in owners for name, kept in state["owned"].items()}
    return found


def _copied(state: CallbackState) -> CallbackState:
    return {
        kind: {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }
        for kind, entries in {"additive": {}, **state}.items()
    }
