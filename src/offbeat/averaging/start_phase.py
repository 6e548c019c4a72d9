"""A part that takes part in the first steps of training only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from offbeat.parts.part import Part, PartState, WrappedPart


class StartPhase(WrappedPart):
    """Hands events on to `inner` in the first `num_steps` optimizer steps, and none afterwards.

    Args:
        inner: the part that exchanges gradients.
        num_steps: >= 1.
    """

    state_key: ClassVar[str] = "start_phase"

    def __init__(self, inner: Part, *, num_steps: int) -> None:
        super().__init__(inner)
        self._num_left = num_steps

    @property
    @override
    def forwards_events(self) -> bool:
        return self._num_left > 0

    @override
    def on_after_step(self) -> None:
        super().on_after_step()
        self._num_left = max(0, self._num_left - 1)

    @override
    def state_dict(self) -> PartState:
        state = self.inner.state_dict()
        return {**state, "replicated": {**state["replicated"], "num_left": self._num_left}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.inner.load_state_dict(state)
        self._num_left = int(state["replicated"]["num_left"])
