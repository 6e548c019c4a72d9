"""Gradients exchanged in the first steps of training only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.gradients.exchange import GradientExchange


class GradientPhase:
    """`exchange`, for the first `num_steps` optimizer steps; afterwards gradients are
    left alone.
    """

    def __init__(self, exchange: GradientExchange, *, num_steps: int) -> None:
        self._exchange = exchange
        self._num_left = num_steps

    def on_backward_begins(self, *, synchronised: bool) -> None:
        if self._num_left:
            self._exchange.on_backward_begins(synchronised=synchronised)

    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        if self._num_left:
            self._exchange.on_gradient_ready(index, synchronised=synchronised)

    def on_backward_done(self, *, synchronised: bool) -> None:
        if self._num_left:
            self._exchange.on_backward_done(synchronised=synchronised)

    def on_backward_failed(self) -> None:
        if self._num_left:
            self._exchange.on_backward_failed()

    def on_join(self) -> None:
        if self._num_left:
            self._exchange.on_join()

    def on_before_step(self) -> None:
        if self._num_left:
            self._exchange.on_before_step()

    def on_after_step(self) -> None:
        if self._num_left:
            self._exchange.on_after_step()
            self._num_left -= 1

    def counters(self) -> dict[str, float]:
        return self._exchange.counters()

    def state_dict(self) -> dict[str, dict[str, object]]:
        state = self._exchange.state_dict()
        return {**state, "replicated": {**state["replicated"], "num_left": self._num_left}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._exchange.load_state_dict(state)
        self._num_left = int(state["replicated"]["num_left"])

    def close(self) -> None:
        self._exchange.close()
