"""A script's process as `offbeat run` leaves it. Tests of scripts name parts of the package that
are not public here alone, since a command cannot be forked from a warm process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from offbeat.run.config import ScriptCommand
from offbeat.run.coordination import serve_store, store_environment
from offbeat.run.coupling import ScriptSessions
from offbeat.run.recording import ScriptRecorder
from offbeat.run.worker import patched_for, run_as_main
from offbeat_lab.attaching import script_recipe
from offbeat_lab.options import build_strategy, parse_spec
from ranks_support.launch import RunRanks


class Coupled(ScriptRecorder):
    """Counts the sessions of the block, once it has been left, and the passes of which a loss was
    seen.
    """

    num_attached = 0
    num_losses = 0

    @override
    def loss_seen(self, loss: torch.Tensor, scale: float | torch.Tensor) -> None:
        self.num_losses += 1


@contextmanager
def coupled_to(strategy: Any) -> Iterator[Coupled]:
    """DistributedDataParallel models of the block are trained with `strategy`, an object or what
    the command line calls it.
    """
    named = isinstance(strategy, str)
    recipe = script_recipe(build_strategy(*parse_spec(strategy)) if named else strategy)
    found = Coupled(lambda: None, lambda report: None, stop_after=None)
    sessions = ScriptSessions(recipe, found)
    with patched_for(recipe, sessions):
        yield found
        sessions.close(None)
    found.num_attached = sessions.num_attached


def run_coupled(strategy: str, script: str, arguments: list[str]) -> Coupled:
    """Run a script as the main module of a process that is coupled to `strategy`."""
    with coupled_to(strategy) as found:
        run_as_main(ScriptCommand(path=script, arguments=arguments))
    return found


def of_two_ranks(
    run_ranks: RunRanks,
    job: Callable[..., Any],
    strategies: Sequence[str],
    *,
    timeout_s: float,
    **arguments: Any,
) -> list[Any]:
    """What each of two ranks says of `job`, which trains with one of `strategies` after the other.
    In `stores` it gets for each the environment that `offbeat run` gives to rank 0.
    """
    servers = [serve_store() for _ in strategies]  # the keys of a group can be used once
    return run_ranks(
        job,
        2,
        timeout_s=timeout_s,
        strategies=list(strategies),
        stores=[store_environment(server, 0, 2) for server in servers],
        **arguments,
    )
