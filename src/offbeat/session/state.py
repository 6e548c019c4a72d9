"""The state of a session, which is that of its callbacks, by `state_key`: how it is written, read
and shared out anew. And which tensors of the model have to do with other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import naming_misfit
from offbeat.weights.shard import local_of


def state_of(callbacks: Sequence[Callback]) -> dict[str, CallbackState]:
    """The state of each callback. Tensors are copies."""
    return {callback.state_key: _copied(callback.state_dict()) for callback in callbacks}


def load_state_of(callbacks: Sequence[Callback], saved: Mapping[str, CallbackState]) -> None:
    """Inverse of `state_of`.

    Raises:
        CheckpointError: the state of a callback is missing or does not fit.
    """
    for callback in callbacks:
        if callback.state_key not in saved and not callback.may_begin_anew:
            raise CheckpointError(
                f"the state lacks {callback.state_key!r}; it was saved with other options of the"
                " strategy"
            )
    for callback in callbacks:
        if callback.state_key in saved:
            with naming_misfit(f"the state of {callback.state_key!r}"):
                callback.load_state_dict(saved[callback.state_key])


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
        callbacks = {
            name: reshard_callback([each["callbacks"][name] for each in states], world_size, rank)
            for name in states[0]["callbacks"]
        }
        return {
            "strategy": states[0]["strategy"],
            "world_size": world_size,
            "rank": rank,
            "callbacks": callbacks,
        }


def reshard_callback(states: Sequence[CallbackState], world_size: int, rank: int) -> CallbackState:
    """`reshard` of one callback. States of which `rank` needs nothing may be empty."""
    mine, first = states[rank::world_size], states[rank % len(states)]
    additive = {
        name: (
            torch.stack([state["additive"][name] for state in mine]).sum(dim=0)
            if mine
            else torch.zeros_like(tensor)
        )
        for name, tensor in first.get("additive", {}).items()
    }
    found: CallbackState = {
        "additive": additive,
        "local": first.get("local", {}),
        "replicated": first.get("replicated", {}),
    }
    if any("owned" in state for state in states):
        owners = [first] if len(states) == world_size else states
        found["owned"] = {k: kept for each in owners for k, kept in each.get("owned", {}).items()}
    return found


def _copied(state: CallbackState) -> CallbackState:
    return {
        kind: {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }
        for kind, entries in {"additive": {}, **state}.items()
    }


def digest_of_frozen(model: torch.nn.Module, ignored: Collection[str] = ()) -> str:
    """A digest of what is not averaged and yet has to be the same on all ranks, but for those of
    the names `ignored`.
    """
    return digest_of(
        (plain_name(name), parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name not in ignored
    )


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        content = local_of(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy())
    return digest.hexdigest()


def persistent_buffers(model: torch.nn.Module, ignored: Collection[str] = ()) -> frozenset[str]:
    """The names of the buffers that belong to the model's state, but for those `ignored`; the
    others are derived from something else.

    Not to be called within a backward pass: FSDP divides its parameters where state is asked for.
    """
    saved = model.state_dict(keep_vars=True).keys() - set(ignored)
    return frozenset(name for name, _ in model.named_buffers() if name in saved)


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile's wrapper puts in front."""
    return name.replace("_orig_mod.", "")
