"""An island whose first rank takes part in averages for all of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from typing_extensions import override

from offbeat.averaging.led_island import LedIsland, led_by_first_rank
from offbeat.averaging.outer import OuterFactory, OuterOptimizer
from offbeat.averaging.periodic import Everyone, GrowingPeriod, MeanOfAll, PeriodicAverage
from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.membership.island import Island
from offbeat.strategies.localsgd import Outer
from offbeat.transport.single_rank import SingleRank
from offbeat.weights.model_weights import BufferNames, ModelWeights
from thread_support.world import ThreadDriver, results_of


def context_of(driver: ThreadDriver, parameters: Mapping[str, torch.nn.Parameter]) -> Context:
    """Of one rank of an island that is alone."""
    return Context(
        parameters=parameters,
        driver=SingleRank(),
        new_stream=stream_counter(),
        notices=Notices(driver.rank),
        island=Island(driver),
    )


class MovesWhatTrains(Callback):
    """As an outer optimizer with momentum does."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    @override
    @torch.no_grad()
    def on_after_step(self) -> None:
        for parameter in self._weights.parameters.values():
            if parameter.requires_grad:
                parameter.add_(1)


def test_a_frozen_parameter_stays_where_it_is_in_all_shards() -> None:
    def job(driver: ThreadDriver) -> list[list[float]]:
        parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
        weights = ModelWeights(parameters=parameters, buffers=dict, chosen=BufferNames())
        context = context_of(driver, parameters)
        led = led_by_first_rank(
            context, weights, lambda _, whole: [MovesWhatTrains(whole)], changes_gradients=False
        )
        held = []
        for step in range(5):
            parameters["b"].requires_grad_(step != 3)
            led.on_before_step()
            led.on_after_step()
            held.append([float(each.detach()[0]) for each in parameters.values()])
        return held

    assert results_of(2, job) == [[[1, 1], [2, 2], [3, 3], [4, 3], [5, 4]]] * 2


@pytest.mark.parametrize("name", ["a", "glue/sst2.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "outer", [Outer(), partial(torch.optim.Adam, lr=0.01)], ids=["SGD", "Adam"]
)
def test_a_run_goes_on_from_a_saved_state(
    outer: OuterFactory, dtype: torch.dtype, name: str
) -> None:
    """Anchors are wider than half precision, Adam counts steps, and names may hold slashes."""

    def build(context: Context, whole: ModelWeights) -> list[Callback]:
        rule = OuterOptimizer(context.parameters, make=outer)
        average = MeanOfAll(whole, Everyone(context.driver, context.new_stream()), rule=rule)
        return [PeriodicAverage(average, GrowingPeriod(2))]

    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        def make() -> tuple[torch.nn.Parameter, LedIsland]:
            shard = torch.nn.Parameter(torch.arange(4.0 + driver.rank).to(dtype))
            context = context_of(driver, {name: shard})
            weights = ModelWeights(
                parameters=context.parameters, buffers=dict, chosen=BufferNames()
            )
            led = led_by_first_rank(context, weights, build, changes_gradients=False)
            assert isinstance(led, LedIsland)
            return shard, led

        @torch.no_grad()
        def steps(shard: torch.nn.Parameter, led: LedIsland, count: int) -> None:
            for _ in range(count):
                led.on_before_step()
                shard.add_(1)
                led.on_after_step()

        shard, led = make()
        steps(shard, led, 3)
        kept = shard.detach().clone()
        state = {
            kind: {k: v.clone() if torch.is_tensor(v) else v for k, v in entries.items()}
            for kind, entries in led.state_dict().items()
        }
        steps(shard, led, 4)
        resumed, again = make()
        resumed.data.copy_(kept)
        again.load_state_dict(state)
        steps(resumed, again, 4)
        return shard.detach(), resumed.detach()

    for went_on, resumed in results_of(2, job):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


def test_a_model_that_is_loaded_before_a_step_with_a_closure_is_where_all_shards_begin() -> None:
    def build(context: Context, whole: ModelWeights) -> list[Callback]:
        rule = OuterOptimizer(context.parameters, make=Outer())
        average = MeanOfAll(whole, Everyone(context.driver, context.new_stream()), rule=rule)
        return [PeriodicAverage(average, GrowingPeriod(1))]

    @torch.no_grad()
    def job(driver: ThreadDriver) -> torch.Tensor:
        shard = torch.nn.Parameter(torch.zeros(2))
        context = context_of(driver, {"a": shard})
        weights = ModelWeights(parameters=context.parameters, buffers=dict, chosen=BufferNames())
        led = led_by_first_rank(context, weights, build, changes_gradients=False)
        shard.fill_(5)
        led.on_closure()
        led.on_backward_begins(synchronised=True)
        shard.add_(1)
        led.on_after_step()
        return shard.detach()

    for found in results_of(2, job):
        # Nesterov's momentum of 0.9 at a rate of 0.7, in its first step.
        torch.testing.assert_close(found, torch.full((2,), 5 + 0.7 * 1.9))


class GivesGradients(Callback):
    """To all that is not frozen, as an average of gradients does."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    @override
    def on_before_update(self) -> None:
        for parameter in self._weights.parameters.values():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None


def test_a_parameter_that_is_frozen_in_a_step_gets_a_gradient_in_no_shard() -> None:
    def job(driver: ThreadDriver) -> list[list[bool]]:
        parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
        weights = ModelWeights(parameters=parameters, buffers=dict, chosen=BufferNames())
        context = context_of(driver, parameters)
        led = led_by_first_rank(
            context, weights, lambda _, whole: [GivesGradients(whole)], changes_gradients=True
        )
        have = []
        for step in range(3):
            parameters["b"].requires_grad_(step != 1)
            led.on_before_step()
            led.on_before_update()
            have.append([parameter.grad is not None for parameter in parameters.values()])
            led.on_after_step()
        return have

    assert results_of(2, job) == [[[True, True], [True, False], [True, True]]] * 2


class CountsBatches(Callback):
    """As a mean of members does, of whom each counts by itself."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    @override
    def state_dict(self) -> CallbackState:
        return {"local": self._weights.counter_state()}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._weights.load_counter_state(state["local"])


def test_what_members_have_counted_is_saved() -> None:
    def job(driver: ThreadDriver) -> tuple[CallbackState, CallbackState]:
        buffers = {"n": torch.tensor(driver.rank)}
        weights = ModelWeights(
            parameters={"a": torch.nn.Parameter(torch.zeros(2))},
            buffers=lambda: buffers,
            chosen=BufferNames(counters=("n",)),
        )
        context = context_of(driver, {})
        led = led_by_first_rank(
            context, weights, lambda _, whole: [CountsBatches(whole)], changes_gradients=False
        )
        saved = led.state_dict()
        led.load_state_dict({"local": {"counters/own": [5, 6], "counters/seen": [0, 1]}})
        return saved, led.state_dict()

    saved = {"local": {"counters/own": [0, 1], "counters/seen": [0, 1]}}
    loaded = {"local": {"counters/own": [5, 6], "counters/seen": [0, 1]}}
    assert results_of(2, job) == [(saved, loaded)] * 2


class AveragesWhenAsked(Callback):
    """As a mean of members does, one of whom has come for an average."""

    averages_models = True

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        for own, mean in zip(self._weights.tensors(), weights.tensors(), strict=True):
            own.detach().fill_(7)
            mean.detach().fill_(9)
        return frozenset()


def test_an_average_that_a_mean_was_asked_for_has_become_is_in_all_shards() -> None:
    @torch.no_grad()
    def job(driver: ThreadDriver) -> tuple[float, float]:
        parameters = {"a": torch.nn.Parameter(torch.zeros(2))}
        weights = ModelWeights(parameters=parameters, buffers=dict, chosen=BufferNames())
        led = led_by_first_rank(
            context_of(driver, parameters),
            weights,
            lambda _, whole: [AveragesWhenAsked(whole)],
            changes_gradients=False,
        )
        mean = {"a": torch.zeros(2)}
        led.average_into(ModelWeights(parameters=mean, buffers=dict, chosen=BufferNames()))
        return float(parameters["a"][0]), float(mean["a"][0])

    assert results_of(2, job) == [(7.0, 9.0)] * 2
