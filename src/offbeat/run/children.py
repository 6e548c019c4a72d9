"""Processes that a script starts: those that are fresh interpreters, as
`torch.multiprocessing.spawn` makes them, get what their parent got.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from offbeat.run import patches

CHILD_VARIABLE: Final = "OFFBEAT_SCRIPT_CONFIG"
"""Environment variable with the run's configuration, for processes that the script starts."""

_patched_here: list[int] = []
"""The number of the process that was patched, in it and in those that are forked from it."""


class ChildFunction:
    """The function of such a process, with the same strategy put into it. Can be pickled if the
    function can.

    Args:
        function: what the script wants to be run.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        if not _patched_here:
            _patched_here.append(os.getpid())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = patches.functions_in_place()
        if _patched_here:
            # One that was forked has the sessions, the record and the connections of its parent.
            with patches.no_group(None if _patched_here[0] == os.getpid() else patches.FORKED):
                patches.renew_names(named)
                return self._function(*args, **kwargs)
        # What is imported here takes a while, and processes that are forked need none of it.
        from offbeat.run.config import RunConfig
        from offbeat.run.coupling import ScriptSessions
        from offbeat.run.recipes import recipe_for
        from offbeat.run.recording import ScriptRecorder
        from offbeat.run.worker import patched_for

        _patched_here.append(os.getpid())
        # The script says who its ranks are; the supervisor's store is for its own workers.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        config = RunConfig.from_json(os.environ[CHILD_VARIABLE])
        recipe = recipe_for(config)
        # Whose steps are in no record.
        recorder = ScriptRecorder(lambda: None, lambda report: None, stop_after=None)
        sessions = ScriptSessions(recipe, recorder)
        refusal = None if config.workers == 1 else patches.STARTED_TWICE
        with patched_for(recipe, sessions), patches.no_group(refusal):
            patches.renew_names(named)
            try:
                result = self._function(*args, **kwargs)
            except BaseException as error:
                sessions.close(error)
                raise
            sessions.close(None)
        if sessions.num_ddp_models and (complaint := sessions.complaint(sys.argv[0])) is not None:
            raise complaint
        return result
