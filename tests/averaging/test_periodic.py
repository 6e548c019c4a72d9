"""`PeriodicAverage` with another schedule, codec or rule than the usual ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from typing_extensions import override

import offbeat
from offbeat.averaging.outer import OuterOptimizer
from offbeat.averaging.periodic import (
    Dense,
    Everyone,
    GrowingPeriod,
    PeriodicAverage,
    TakeMean,
    WeightCodec,
)
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.weights.model_weights import ModelWeights


class Halves:
    """Sends multiples of 1/2 alone, and owes the rest."""

    of_changes: ClassVar[bool] = True

    def __init__(self) -> None:
        self.owed: list[torch.Tensor] = []

    def mean_(self, tensors: Sequence[torch.Tensor], peers: Everyone, *, weight: float) -> float:
        for tensor, owed in zip(tensors, self.owed or [0.0] * len(tensors), strict=True):
            tensor.add_(owed)
        whole = [torch.round(2 * tensor) / 2 for tensor in tensors]
        self.owed = [tensor - sent for tensor, sent in zip(tensors, whole, strict=True)]
        for tensor, sent in zip(tensors, whole, strict=True):
            tensor.copy_(sent)
        return Dense().mean_(tensors, peers, weight=weight)

    def state(self) -> Mapping[str, Any]:
        return {str(place): owed for place, owed in enumerate(self.owed)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.owed = list(state.values())


@dataclass(frozen=True, kw_only=True)
class OnSteps:
    """After the steps that are named."""

    steps: tuple[int, ...]
    start_step: int = 0

    def is_due(self, num_steps: int, last: int) -> bool:
        return num_steps in self.steps

    def last(self, num_steps: int) -> int:
        return max((step for step in self.steps if step <= num_steps), default=0)


EACH_STEP = GrowingPeriod(period=1)


@dataclass(frozen=True, kw_only=True)
class Composed(AveragingStrategy):
    """A periodic average of the objects that are given."""

    name = "composed"
    schedule: Any = EACH_STEP
    lossy: bool = True
    keeps_anchor: bool = True

    @override
    def parts(self, context: Context, weights: ModelWeights) -> list[Callback]:
        plain = partial(torch.optim.SGD, lr=1.0)
        codec: WeightCodec = Halves() if self.lossy else Dense()
        average = PeriodicAverage(
            weights,
            schedule=self.schedule,
            peers=Everyone(context.driver, context.new_stream()),
            codec=codec,
            rule=OuterOptimizer(context.parameters, make=plain)
            if self.keeps_anchor
            else TakeMean(),
        )
        made.append(average)
        return [average]


made: list[PeriodicAverage] = []


def train(strategy: Composed, steps: Sequence[float]) -> tuple[torch.nn.Linear, Any]:
    """In a world of one: the weight begins with 0, and each step adds one of `steps`."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with offbeat.attach(net, optimizer, strategy, finish="keep") as session:
        for step in steps:
            net.weight.grad = torch.full_like(net.weight, -step)
            optimizer.step()
        return net, session.state_dict()


def test_a_codec_that_drops_something_is_given_changes_and_its_rest_arrives_later() -> None:
    net, state = train(Composed(), [0.75, 0.75, 0.125])
    # 0.75 is sent as 1.0, which leaves -0.25; then 0.75 - 0.25 as 0.5; then 0.125 as 0.
    assert net.weight.item() == 1.5
    (owed,) = state["callbacks"]["periodic_average"]["additive"].values()
    assert net.weight.item() + owed.item() == 0.75 + 0.75 + 0.125


def test_the_anchor_is_where_the_last_average_left_the_weights() -> None:
    net, _ = train(Composed(schedule=OnSteps(steps=(1,)), lossy=False), [2.0, 3.0])
    assert net.weight.item() == 5.0
    assert made[-1].rule.anchor["weight"].item() == 2.0


def test_weights_are_averaged_after_the_steps_of_the_schedule_and_no_others() -> None:
    train(Composed(schedule=OnSteps(steps=(2, 3, 7))), [1.0] * 6)
    assert made[-1].counters()["exchanges"] == 2


def test_a_codec_that_drops_something_needs_an_anchor() -> None:
    with pytest.raises(ConfigError, match="needs a rule that keeps an anchor"):
        train(Composed(keeps_anchor=False), [])
