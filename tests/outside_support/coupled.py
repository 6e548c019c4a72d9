"""A script's process as `offbeat run` leaves it. Of what the oracles import this file alone names
parts of the package that are not public, since a command cannot be forked from a warm process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat.run.coupling import ModelListener, ScriptSessions
from offbeat.run.recipes import StrategyRecipe
from offbeat.run.worker import patched_for


@dataclass
class Coupled:
    """Counts the sessions of the block, once it has been left."""

    num_attached: int = 0


@contextmanager
def coupled_to(strategy: Any) -> Iterator[Coupled]:
    """DistributedDataParallel models of the block are trained with `strategy`."""
    recipe = StrategyRecipe(strategy)
    sessions = ScriptSessions(recipe, ModelListener())
    found = Coupled()
    with patched_for(recipe, sessions):
        yield found
    sessions.close(None)
    found.num_attached = sessions.num_attached
