"""Notices a GradScaler of which the session was not told."""

from __future__ import annotations

import inspect

import torch

from offbeat.errors import UnsupportedError


def refuse_unknown_scaler() -> None:
    """To be called while an optimizer is being stepped, where `attach` was given no GradScaler.

    Raises:
        UnsupportedError: a GradScaler steps it: the loss is scaled by a factor that changes, and
            some steps are left out, both on each rank by itself.
    """
    step = getattr(torch.amp.GradScaler.step, "__code__", None)
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is step and frame.f_locals["self"].is_enabled():
            raise UnsupportedError(
                "a GradScaler steps the optimizer and this session was not told of it, so ranks"
                " would skip different steps, and what is owed would be scaled by a factor that"
                " changes; pass it: offbeat.attach(..., scaler=scaler)"
            )
        frame = frame.f_back
