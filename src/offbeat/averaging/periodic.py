"""All ranks' weights, averaged after every so many local steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.averaging.outer import OuterOptimizer
from offbeat.callbacks.callback import Callback
from offbeat.errors import CheckpointError
from offbeat.transport.driver import Driver, Stream
from offbeat.weights.model_weights import ModelWeights
from offbeat.weights.optimizer_state import average_optimizer_state_


def steps_between(num_local: int, *, period: int, warmup: int) -> int:
    """How many local steps may pass without an average, once there have been `num_local` of them.

    >>> [steps_between(n, period=4, warmup=10) for n in (5, 15, 25, 35, 45, 1000)]
    [1, 1, 2, 3, 4, 4]
    """
    return min(period, max(1, num_local // warmup)) if warmup else period


def last_average(num_local: int, *, period: int, warmup: int) -> int:
    """After how many of `num_local` local steps the last average was; 0: there was none.

    >>> [last_average(n, period=4, warmup=2) for n in range(11)]
    [0, 1, 2, 3, 3, 5, 5, 5, 5, 9, 9]
    """
    last = 0
    for step in range(1, num_local + 1):
        if step - last >= steps_between(step, period=period, warmup=warmup):
            last = step
    return last


class PeriodicAverage(Callback):
    """After every `period` optimizer steps from `start_step` on, and at first more often, replaces
    the weights by their mean.

    Args:
        weights: what is averaged.
        driver: carries collectives out.
        stream: this part's channels.
        period: local steps between averages, >= 1.
        warmup: the local steps in which the period grows by one, from 1 on, >= 0; 0: it is `period`
            from the beginning.
        start_step: steps before the first local one, >= 0; until then all ranks must hold the same
            weights.
        outer: what is done with the mean; None: it is taken as it is.
        optimizer: whose state is averaged with the weights; None: it stays local.
        weight: this rank's in the mean.
        notify: tells the user what of the optimizer's state is not averaged.
    """

    state_key: ClassVar[str] = "periodic_average"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        driver: Driver,
        stream: Stream,
        period: int,
        warmup: int = 0,
        start_step: int = 0,
        outer: OuterOptimizer | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        weight: float = 1.0,
        notify: Callable[[str], None] = lambda remark: None,
    ) -> None:
        self._notify, self._was_told = notify, False
        self._weights = weights
        self._driver = driver
        self._stream = stream
        self._period, self._warmup = period, warmup
        self._start_step = start_step
        self._outer = outer
        self._optimizer = optimizer
        self._weight = weight
        self._num_steps = 0
        self._averaged_at_step = start_step
        self._num_averages = 0
        self._encode_s = 0.0

    @override
    def averaging_weight(self) -> float:
        return self._weight

    @override
    def replicas_agree(self) -> bool:
        return self._num_steps <= self._averaged_at_step

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """The anchor is taken as late as can be: the user may load weights after attaching."""
        self._begin()

    @override
    def on_before_step(self) -> None:
        self._begin()

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        num_local = self._num_steps - self._start_step
        since = self._num_steps - self._averaged_at_step
        if since >= steps_between(num_local, period=self._period, warmup=self._warmup):
            self.average()
            self._averaged_at_step = self._num_steps

    def average(self) -> None:
        """Average now. Collective."""
        driver, stream, weight = self._driver, self._stream, self._weight
        self._encode_s += self._weights.average_(driver, stream, weight=weight)
        if self._outer is not None:
            begin_s = time.perf_counter()
            self._outer.step_()
            self._encode_s += time.perf_counter() - begin_s
        if self._optimizer is not None:
            parameters = self._weights.parameters
            self._encode_s += average_optimizer_state_(
                self._optimizer,
                parameters,
                driver=driver,
                stream=stream,
                weight=weight,
                notify=self._notify_once,
            )
        self._num_averages += 1

    def _notify_once(self, remark: str) -> None:
        if not self._was_told:
            self._was_told = True
            self._notify(remark)

    def _begin(self) -> None:
        if self._outer is not None and self._num_steps >= self._start_step:
            self._outer.begin()

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_averages, "encode_s": self._encode_s}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        outer = {} if self._outer is None else self._outer.state()
        return {
            "replicated": {
                "num_steps": self._num_steps,
                "num_averages": self._num_averages,
                **outer,
            }
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_steps" not in saved:
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        if self._outer is not None:
            self._outer.load(saved)
        self._num_steps = int(saved["num_steps"])
        self._num_averages = int(saved["num_averages"])
        num_local = max(0, self._num_steps - self._start_step)
        last = last_average(num_local, period=self._period, warmup=self._warmup)
        self._averaged_at_step = self._start_step + last

    @override
    def close(self) -> None:
        """The weights stay as they are: the user's."""
