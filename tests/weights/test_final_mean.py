"""When training is over all ranks get the same mean, or the same error."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from offbeat.errors import NonFiniteError
from offbeat.transport.virtual import VirtualCluster
from offbeat.weights.final_mean import FinalModel, mean_of_final_models


def final(values: list[float], *, weight: float = 1.0, counter: int = 0) -> FinalModel:
    return FinalModel(
        values=np.array(values, np.float32), counters=np.array([counter]), weight=weight
    )


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_mean_follows_weights_and_is_the_same_on_every_rank(world_size: int) -> None:
    models = [
        final([rank, -rank, 1.0], weight=rank + 1.0, counter=rank) for rank in range(world_size)
    ]
    means = VirtualCluster(world_size, seed=1).run(
        [mean_of_final_models(rank, world_size, model) for rank, model in enumerate(models)]
    )
    weights = np.arange(1, world_size + 1)
    expected = np.average([model.values for model in models], axis=0, weights=weights)
    for mean in means:
        np.testing.assert_allclose(mean.values, expected, rtol=1e-6)
        assert mean.values.tobytes() == means[0].values.tobytes()
        assert mean.counters.tolist() == [world_size - 1]


def test_equal_models_stay_what_they_are_to_the_bit() -> None:
    # A seventh of the sum of seven of these is another number.
    models = [final([0.1, 1 / 3, 1e-30]) for _ in range(7)]
    means = VirtualCluster(7, seed=1).run(
        [mean_of_final_models(rank, 7, model) for rank, model in enumerate(models)]
    )
    assert all(mean is model for mean, model in zip(means, models, strict=True))


def test_every_rank_refuses_the_mean_with_a_model_that_is_not_finite() -> None:
    models = [final([1.0]), final([float("nan")]), final([2.0])]
    refused = 0

    def refusing(rank: int) -> Generator[Any, Any, None]:
        nonlocal refused
        try:
            yield from mean_of_final_models(rank, 3, models[rank])
        except NonFiniteError as error:
            refused += "rank 1 at the end" in str(error)

    VirtualCluster(3, seed=1).run([refusing(rank) for rank in range(3)])
    assert refused == 3
