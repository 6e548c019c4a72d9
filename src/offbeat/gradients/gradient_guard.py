"""No step with a gradient that is not finite: it would spoil this rank's weights and, once
averaged, everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.tally import all_finite
from offbeat.errors import NonFiniteError
from offbeat.torch_private import stored_entries

MAX_SKIPPED_STEPS: Final = 20
"""A session that has skipped more steps in a row for gradients that are not finite ends. A
GradScaler that begins with its usual scale skips fewer.
"""


class GradientGuard(Callback):
    """Before each optimizer step, takes away gradients that hold an infinity or a NaN, so that this
    rank's step does nothing.

    A rank decides alone: the others' steps and the exchange that follows go on. Cost: one pass over
    the gradients.

    Args:
        context: lent by the session.
    """

    state_key: ClassVar[str] = "gradient_guard"

    def __init__(self, context: Context) -> None:
        self._island, self._parameters = context.island, context.parameters
        self._notify = context.notices.notify
        self._rank = context.driver.name_of(context.driver.rank)
        self._num_steps = 0
        self._num_skipped = 0
        self._num_in_a_row = 0

    @override
    def on_before_update(self) -> None:
        self._num_steps += 1
        gradients = [
            _entries(p.grad.detach()) for p in self._parameters.values() if p.grad is not None
        ]
        is_good = all_finite(gradients)
        if self._island.size > 1:
            is_good = not any(self._island.largest(not is_good))
        if is_good:
            self._num_in_a_row = 0
            return
        for parameter in self._parameters.values():
            parameter.grad = None
        self._num_skipped += 1
        self._num_in_a_row += 1
        self._notify(
            f"step {self._num_steps}: skipped on rank {self._rank} alone, since its gradient was"
            " not finite"
        )
        if self._num_in_a_row > MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"rank {self._rank} skipped {self._num_in_a_row} steps in a row because of"
                f" non-finite gradients; at most {MAX_SKIPPED_STEPS} are allowed. Lower the"
                " learning rate or look at its data"
            )

    @override
    def counters(self) -> dict[str, float]:
        return {"skipped_steps": self._num_skipped}

    @override
    def state_dict(self) -> dict[str, dict[str, int]]:
        return {"local": {"num_steps": self._num_steps, "num_skipped": self._num_skipped}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._num_steps = int(state["local"]["num_steps"])
        self._num_skipped = int(state["local"]["num_skipped"])


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient holds: of a sparse one, the rows that it has."""
    return stored_entries(gradient)[1] if gradient.is_sparse else gradient
