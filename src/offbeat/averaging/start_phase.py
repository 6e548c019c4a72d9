"""Callbacks that take part in the first steps of training only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.errors import CheckpointError


class StartPhase(Callback):
    """Stands for `inner` in the first `num_steps` optimizer steps: hands every event on to it, and
    answers as it does. Then it closes `inner`, and gives back its memory.

    Args:
        inner: what exchanges gradients, or Kronecker factors beside them.
        num_steps: >= 1.
    """

    def __init__(self, inner: Callback, *, num_steps: int) -> None:
        self.inner = inner
        self.state_key = f"start_phase_of_{inner.state_key}"  # type: ignore[misc]  # each its own
        self._num_left = num_steps
        self._is_over = False
        self._counted: Mapping[str, float] = {}

    @override
    def on_after_step(self) -> None:
        self.inner.on_after_step()
        self._num_left = max(0, self._num_left - 1)
        if not self._num_left:
            self._end()

    def _end(self) -> None:
        # All ranks come to the end of the phase in the same step, and its last exchange is over by
        # then, so that closing waits for nobody. The exchange is closed before the part of the
        # factors hears of the end of the step, which needs it no more.
        if not self._is_over:
            self._is_over, self._counted = True, self.inner.counters()
            self.inner.close()
            self.inner = Callback()

    @override
    def counters(self) -> Mapping[str, float]:
        return self._counted if self._is_over else self.inner.counters()

    @override
    def state_dict(self) -> CallbackState:
        state = self.inner.state_dict()
        replicated = {**state.get("replicated", {}), "num_left": self._num_left}
        return {**state, "replicated": replicated}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        num_left = int(state["replicated"]["num_left"])
        if num_left and self._is_over:
            raise CheckpointError(
                f"the state was saved {num_left} steps before the end of the start phase, which is"
                " over in this session; load it into a session that has taken no steps"
            )
        self._num_left = num_left
        if num_left:
            self.inner.load_state_dict(state)
        else:
            self._end()


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: StartPhase, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name, _member in vars(Callback).items():
    if callable(_member) and not _name.startswith("_") and _name not in vars(StartPhase):
        setattr(StartPhase, _name, _handed_on(_name))
