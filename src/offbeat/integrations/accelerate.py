"""A session in a loop with Accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with attach(accelerator, model, optimizer, offbeat.GTopK(density=0.01)) as accelerated:
        ...

The loop inside stays as it is, `accelerator.backward` and `accelerator.accumulate` included.
`accelerator.save_state` writes each rank's part of the strategy's state with the rest, and
`accelerator.load_state` reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import offbeat
from offbeat.integrations.framework import FrameworkSession, as_strategy
from offbeat.integrations.state_files import load_state, save_state
from offbeat.session.attach import SessionRecorder
from offbeat.session.session import Session
from offbeat.strategies.base import Strategy

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.accelerate needs accelerate, which `pip install"
        " 'offbeat[transformers]'` installs"
    ) from error

STATE_DIRECTORY = "offbeat"
"""In a directory that Accelerate saves its state in."""


class AcceleratedSession(FrameworkSession):
    """A session in such a loop.

    Args:
        accelerator: that has prepared the model.
        session: just attached.
        model: the attached module.
        optimizer: that steps it.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        session: Session,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(session, model, optimizer)
        self._handles: list[Any] = [
            accelerator.register_save_state_pre_hook(self._saves),
            accelerator.register_load_state_pre_hook(self._loads),
        ]

    @override
    def close(self, error: BaseException | None = None) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().close(error)

    def _saves(self, models: object, weights: object, directory: str) -> None:
        save_state(Path(directory) / STATE_DIRECTORY, self.session.state_dict(), tag="")

    def _loads(self, models: object, directory: str) -> None:
        load_state(Path(directory) / STATE_DIRECTORY, self.session, tag="")


def attach(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str,
    *,
    recorder: SessionRecorder | None = None,
) -> AcceleratedSession:
    """Attach a strategy to what `accelerator.prepare` has returned. Collective.

    Args:
        accelerator: the loop's.
        model: prepared, so perhaps wrapped in DistributedDataParallel, which exchanges nothing any
            more until the session is closed.
        optimizer: prepared.
        strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.

    Raises:
        ConfigError, UnsupportedError: this cannot work; see `offbeat.attach`.
    """
    inner = accelerator.unwrap_model(model)
    session = offbeat.attach(
        inner,
        optimizer,
        as_strategy(strategy),
        scaler=getattr(optimizer, "scaler", None),
        recorder=recorder,
    )
    stepped = getattr(optimizer, "optimizer", optimizer)
    accelerated = AcceleratedSession(accelerator, session, inner, stepped)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            accelerated.silence(module)
    return accelerated
