"""`attach(..., recorder=offbeat.Recorder("runs/mine"))`: a session's steps are recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.run.config import RunConfig, ScriptCommand, script_run
from offbeat.run.recording import ScriptRecorder, shared_record
from offbeat.run.run_summary import HANGS_S
from offbeat.session.session import Session
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import strategy_values


class Recorder:
    """Writes a session's steps down as `offbeat train` does, for `offbeat report` and `offbeat
    trace`; what `Session.log` is told is in it.

    Args:
        directory: of the record; it must not exist yet, or be empty. The same on every rank; on
            several hosts a file system that all of them share.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def begin(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the steps of `session`, which was just attached, until it is closed. Collective.

        Args:
            session: whose steps they are.
            model, optimizer: that it was attached to.

        Raises:
            RecordError: the directory is in use; on every rank.
        """
        config = _config(session.strategy)
        recorder = _ClosingRecorder(
            lambda: shared_record(config, self.directory),
            lambda report: None,
            stop_after=None,
            patience_s=HANGS_S,
        )
        recorder.attached(session, model, optimizer)

        def forward_begins(module: torch.nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                recorder.samples_seen(args)

        recorder.forward_hook = model.register_forward_pre_hook(ModuleHook(model, forward_begins))


class _ClosingRecorder(ScriptRecorder):
    """Ends its record with the session, and takes its hook out of the model."""

    forward_hook: RemovableHandle | None = None

    @override
    def closed(self, error: BaseException | None) -> None:
        if self.forward_hook is not None:
            self.forward_hook.remove()
        if error is None:
            self.end(finished=True)
        else:
            self.abandon()


def _config(strategy: Strategy) -> RunConfig:
    words = sys.argv or [""]
    script = ScriptCommand(path=words[0] or "session", arguments=words[1:])
    values = strategy_values(strategy).items()
    options = {name: _as_json(value) for name, value in values}
    return script_run(script, strategy.name, options, workers=1)


def _as_json(value: Any) -> object:
    """An option as it stands in a record: objects of Python by what they print."""
    try:
        found: object = json.loads(json.dumps(value))
        return found
    except (TypeError, ValueError):
        return repr(value)
