"""The mean of all models when training is over: how a session ends where all ranks average at once.

    rank                                    every peer
      |  `Driver.end_training`  ------------>  |    no message of training will follow
      |  my weight, a digest of my model  <->  |    all have come to the end
      |  the models, where they differ    <->  |    one weighted mean, the same bits on all ranks

All of it travels as messages, and connections for dense collectives are given up first: a peer that
still trains, because its loop has more steps, waits in a collective for this rank. It then hears
that this rank has ended, and both raise. Were the mean a dense collective it would meet that one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from offbeat.codec.model_wire import Counters, Values
from offbeat.codec.tally import is_finite
from offbeat.collectives.gather import all_gather
from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.errors import NonFiniteError
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective, Payload
from offbeat.weights.model_weights import ModelWeights, Staging

_NOT_FINITE: Final = (
    " at the end of the session are not finite, so they have no mean with those of its peers. Lower"
    ' the learning rate or look at its data; with finish="keep" each rank keeps its own model'
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalModel:
    """One rank's model when its loop has ended.

    Attributes:
        values: parameters and statistics, shape (any,).
        counters: the integer buffers, shape (any,).
        weight: of the model in the mean, >= 0.
    """

    values: Values
    counters: Counters
    weight: float

    def digest(self) -> str:
        """Equal if, and only if, values and counters are equal to the bit."""
        digest = hashlib.sha256(self.values.view(np.uint8).data)
        digest.update(self.counters.tobytes())
        return digest.hexdigest()


def mean_of_final_models(rank: int, world_size: int, mine: FinalModel) -> Collective[FinalModel]:
    """The mean of all ranks' models; `mine` itself where all hold the same.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's model.

    Raises:
        NonFiniteError: a rank's model is not finite. On every rank.
    """
    summary = {
        "weight": mine.weight,
        "finite": is_finite(torch.from_numpy(mine.values)),
        "digest": mine.digest(),
    }
    summaries = yield from all_gather(rank, world_size, json.dumps(summary).encode(), _read)
    broken = [number for number, each in enumerate(summaries) if not each["finite"]]
    if broken:
        raise NonFiniteError(f"the weights of rank {broken[0]}{_NOT_FINITE}")
    if len({each["digest"] for each in summaries}) == 1:
        return mine
    values = yield from weighted_mean(
        rank,
        [float(each["weight"]) for each in summaries],
        mine.values,
        num_elements=mine.values.size,
        dtype=mine.values.dtype,
    )
    counters = mine.counters
    if counters.size:
        every = yield from all_gather(rank, world_size, counters.tobytes(), _read_counters)
        counters = np.maximum.reduce(every)
    return FinalModel(values=values, counters=counters, weight=mine.weight)


def average_at_the_end(
    weights: ModelWeights, *, driver: Driver, stream: Stream, weight: float
) -> None:
    """Replace this rank's model by the mean of all ranks' models. Collective; no training follows.

    Args:
        weights: of the model.
        driver: carries messages; it carries out no dense collective afterwards.
        stream: of channels; no part trains on it.
        weight: of this rank's model.

    Raises:
        NonFiniteError: a rank's model is not finite.
        PeerError: a rank has failed, or goes on training.
    """
    channel = stream.next()
    driver.end_training(channel)
    tensors = weights.tensors()
    staging = Staging(tensors)
    mine = FinalModel(values=staging.read(tensors), counters=weights.read_counters(), weight=weight)
    mean = driver.run(mean_of_final_models(driver.rank, driver.world_size, mine), channel)
    if mean is not mine:
        staging.write_(mean.values, tensors)
        weights.write_counters(mean.counters)


def _read(payload: Payload) -> dict[str, float | str | bool]:
    summary: dict[str, float | str | bool] = json.loads(bytes(payload))
    return summary


def _read_counters(payload: Payload) -> Counters:
    return np.frombuffer(payload, np.int64)
