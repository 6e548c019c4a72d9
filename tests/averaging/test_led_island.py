"""An island whose first rank takes part in averages for all of it."""

from __future__ import annotations

import torch
from typing_extensions import override

from offbeat.averaging.led_island import led_by_first_rank
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.membership.island import Island
from offbeat.transport.single_rank import SingleRank
from offbeat.weights.model_weights import BufferNames, ModelWeights
from thread_support.world import ThreadDriver, results_of


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
        context = Context(
            parameters=parameters,
            driver=SingleRank(),
            new_stream=stream_counter(),
            notices=Notices(driver.rank),
            island=Island(driver),
        )
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
