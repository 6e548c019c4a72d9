"""Ranks that end one after the other: every step of every rank counts."""

from __future__ import annotations

import random

import numpy as np
import pytest

import offbeat
from group_support.training import PARAMETERS, Trainer, Training, trained
from offbeat.codec.model_wire import Values
from offbeat.simulation.virtual import VirtualLink

NUM_STEPS = 24
LATENCY_S = 1e-3


def train(
    *, seed: int, rounds: bool = False, interval: int = 1, latency_s: float = LATENCY_S
) -> list[Trainer]:
    """Of four ranks the last takes twice as long, and the third half as long again."""

    def compute_s(rank: int, step: int) -> float:
        usual_s = 0.8 + 0.4 * random.Random(f"{seed} {rank} {step}").random()
        return usual_s * (1, 1, 1.5, 2)[rank]

    return trained(
        Training(
            seed=seed,
            world_size=4,
            num_steps=NUM_STEPS,
            strategy=offbeat.WAGMA(
                period=5,
                interval=interval,
                values="bfloat16" if rounds else "float32",
            ),
            compute_s=compute_s,
            link=VirtualLink(latency_s=latency_s),
        )
    )


def final_mean(ranks: list[Trainer]) -> Values:
    mean: Values = np.mean([rank.model for rank in ranks], axis=0)
    return mean[PARAMETERS]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_all_models_has_all_steps(interval: int, seed: int, rounds: bool) -> None:
    ranks = train(seed=seed, rounds=rounds, interval=interval)
    pushes = [push for rank in ranks for push in rank.pushes]
    assert len(pushes) == 4 * NUM_STEPS
    np.testing.assert_allclose(final_mean(ranks), np.sum(pushes, axis=0) / 4, atol=1e-9)


def test_no_average_is_lost_that_takes_longer_than_the_training() -> None:
    ranks = train(seed=0, latency_s=3 * NUM_STEPS)
    for rank in ranks:
        assert rank.exchanges[:NUM_STEPS] == [0] * NUM_STEPS
        assert rank.exchanges[-1] > 0
    pushes = [push for rank in ranks for push in rank.pushes]
    np.testing.assert_allclose(final_mean(ranks), np.sum(pushes, axis=0) / 4, atol=1e-9)


def test_a_rank_knows_how_many_steps_half_of_the_ranks_are_ahead_of_it() -> None:
    ranks = train(seed=0)
    assert [rank.behind[0] for rank in ranks] == [0] * 4
    assert max(ranks[0].behind + ranks[1].behind) <= 2
    # The third makes 16 steps while the first two make 24, and the last one 12.
    assert 5 <= max(ranks[2].behind) <= 9
    assert 8 <= max(ranks[3].behind) <= 13
    assert ranks[3].behind[-1] < max(ranks[3].behind)
