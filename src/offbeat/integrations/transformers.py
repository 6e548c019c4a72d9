"""A strategy of offbeat's in the Trainer of transformers.

    callback = OffbeatCallback(offbeat.GTopK(density=0.01))
    Trainer(model, arguments, ..., callbacks=[callback]).train()

Start the script as for several ranks, by torchrun for example. Gradients that are accumulated are
exchanged once; evaluations and saved models are the mean of all ranks'. Each checkpoint directory
gets each rank's part of the strategy's state, and a resumed training reads it. The Trainer's
`max_grad_norm` becomes `clip_norm` of a strategy that selects entries, which have to be clipped
before. With `fsdp` give `TrainingArguments` an `IslandsConfig`, as in `integrations.accelerate`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import torch
from typing_extensions import override

from offbeat.integrations.framework import FrameworkSession, as_strategy
from offbeat.integrations.state_files import load_state, save_state
from offbeat.session.attach import SessionRecorder
from offbeat.session.session import Session
from offbeat.strategies.base import Strategy

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

    from offbeat.integrations.accelerate import across_islands, refuse_mixed_files
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.transformers needs transformers and accelerate, which `pip install"
        " 'offbeat[transformers]'` installs"
    ) from error

STATE_DIRECTORY: Final = "offbeat"
"""In a directory of a checkpoint."""


class OffbeatCallback(TrainerCallback):
    """Attaches a session when training begins, and ends it when training does.

    Args:
        strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.
        resume_from: the directory of the checkpoint that training is resumed from; None: that of
            its step below the Trainer's `output_dir`.

    Raises:
        ConfigError: there is no such strategy.
    """

    def __init__(
        self,
        strategy: Strategy | str,
        *,
        recorder: SessionRecorder | None = None,
        resume_from: str | Path | None = None,
    ) -> None:
        self._strategy = as_strategy(strategy)
        self._recorder = recorder
        self._resume_from = resume_from
        self._running: FrameworkSession | None = None
        self._args: Any = None
        self._max_grad_norm: float | None = None

    @property
    def offbeat_session(self) -> Session | None:
        """The session, while training is under way."""
        return None if self._running is None else self._running.session

    @override
    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        **rest: Any,
    ) -> None:
        # Where one is running, an earlier training has failed.
        self._end(RuntimeError("training begins anew"))
        strategy = as_strategy(self._strategy, clip_norm=args.max_grad_norm or None)
        accelerate_state = AcceleratorState()
        mesh = across_islands(model, accelerate_state, strategy)
        if args.save_strategy != "no":
            refuse_mixed_files(accelerate_state, strategy)
        self._running = running = FrameworkSession(
            model, optimizer, strategy, mesh=mesh, recorder=self._recorder
        )
        self._args, self._max_grad_norm = args, args.max_grad_norm
        if state.global_step:
            directory = self._resume_from or _directory(args, state)
            directory = Path(directory) / STATE_DIRECTORY
            load_state(directory, running.session, tag=str(state.global_step))

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The Trainer clips, unless the strategy, which `Auto` may change, does it by itself."""
        if self._running is not None:
            args.max_grad_norm = 0.0 if self._clips() else self._max_grad_norm

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._clips()  # some clip the mean, which is there by now
        if self._running is not None:
            args.max_grad_norm = self._max_grad_norm  # a checkpoint may save the arguments next

    @override
    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        # Of a search nobody says in which directory a trial is, and none is resumed.
        if self._running is not None and not state.is_hyper_param_search:
            directory = _directory(args, state) / STATE_DIRECTORY
            save_state(directory, self._running.state_to_save(), tag=str(state.global_step))

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._end(None)

    def _clips(self) -> bool:
        """Clip as the strategy does it; False: that is left to the Trainer."""
        if self._running is None:
            return False
        # Without a limit the Trainer clips to infinity, for the norm: that it writes is no change.
        norm = self._max_grad_norm or math.inf
        return self._running.session.clip_as_loop_does(norm) is not None

    def _end(self, error: BaseException | None) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._args.max_grad_norm = self._max_grad_norm
            running.close(error)


def _directory(args: Any, state: Any) -> Path:
    """The directory of the checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
