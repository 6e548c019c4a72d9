"""A session's state in the checkpoint that a script writes by itself.

Scripts save `model.state_dict()` and `optimizer.state_dict()`. What a strategy owes, such as the
residual of gTop-k, has to come along, or it is lost when the script resumes:

    optimizer.state_dict()        has one entry more, "offbeat": this rank's state
    optimizer.load_state_dict()   keeps that entry for the session that is attached later

Nothing is exchanged for that, since scripts often save on one rank alone. Then all ranks find that
rank's state: what is the same on all of them is complete, and what each rank owes is there for that
one rank only. The others begin owing nothing, and that is said.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from offbeat.errors import CheckpointError
from offbeat.session.session import Session
from offbeat.session.state import reshard
from offbeat.transport.connect import is_returning

KEY: Final = "offbeat"
"""The key of the entry in the optimizer's state."""

LOGGER = logging.getLogger("offbeat")


class CarriedStates:
    """The states of the sessions of one script, by optimizer."""

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[torch.optim.Optimizer, Mapping[str, Any]] = (
            WeakKeyDictionary()
        )
        self._sessions: WeakKeyDictionary[torch.optim.Optimizer, Session] = WeakKeyDictionary()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Carry state in what `optimizer` saves, and take it out of what it loads."""
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def attached(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """Give `session` what the script has loaded. Collective."""
        self._sessions[optimizer] = session
        if is_returning():  # it takes its peers' model, and has no part in what they do together
            return
        carried = self._loaded.pop(optimizer, None)
        said = session.gather(None if carried is None else _owner(carried))
        if not any(said):
            return
        name = session.strategy.name
        if carried is None or {each and each["strategy"] for each in said} != {name}:
            LOGGER.warning(
                "%s begins without the state that a checkpoint holds: not every rank has loaded"
                " one of this strategy",
                name,
            )
            return
        found = {each["rank"] for each in said}
        if session.rank == 0 and _owes(carried) and found != {*range(carried["world_size"])}:
            LOGGER.warning(
                "the checkpoint holds what rank %s owed, and what the others of %s owed is lost;"
                " let every rank save its optimizer.state_dict() in a file of its own",
                ", ".join(map(str, sorted(found))),
                name,
            )
        try:
            session.load_state_dict(share_of(carried, session.rank, session.world_size))
        except CheckpointError as error:
            LOGGER.warning("%s begins without the state of the checkpoint: %s", name, error)

    def detached(self, optimizer: torch.optim.Optimizer) -> None:
        """The session has ended."""
        self._sessions.pop(optimizer, None)

    def _saved(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if (session := self._sessions.get(optimizer)) is not None:
            state[KEY] = session.state_dict()

    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if KEY not in state:
            return state
        if optimizer in self._sessions:
            LOGGER.warning(
                "the script loads an optimizer's state in the middle of training; the state of the"
                " strategy stays as it is"
            )
        else:
            self._loaded[optimizer] = state[KEY]
        return {key: value for key, value in state.items() if key != KEY}


def share_of(carried: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """What `rank` takes up of the state that it has found: all of its own; of another rank's all
    but what that one owed.

    Args:
        carried: of `Session.state_dict`.
        rank: of this process.
        world_size: of this run.
    """
    owed = reshard([carried], 2, 0 if carried["rank"] == rank else 1)
    return {**owed, "rank": rank, "world_size": world_size}


def _owner(carried: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": int(carried["rank"]), "strategy": str(carried["strategy"])}


def _owes(carried: Mapping[str, Any]) -> bool:
    return any(state.get("additive") for state in carried["callbacks"].values())
