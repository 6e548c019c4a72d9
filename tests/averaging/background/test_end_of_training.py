"""When the quorum of ranks has taken all its steps, those of the others do not count any more."""

from __future__ import annotations

import random

import numpy as np
import pytest

from group_support.training import PARAMETERS, Training, TrainingWorld
from offbeat.arithmetic.groups import group_of_version
from offbeat.transport.virtual import VirtualLink

NUM_STEPS = 24
LATENCY_S = 1e-3


def train(*, ends_with: int | None, seed: int, rounds: bool = False) -> TrainingWorld:
    """Of four ranks the last takes twice as long, and the third half as long again."""

    def compute_s(rank: int, step: int) -> float:
        usual_s = 0.8 + 0.4 * random.Random(f"{seed} {rank} {step}").random()
        return usual_s * (1, 1, 1.5, 2)[rank]

    world = TrainingWorld(
        Training(
            seed=seed,
            world_size=4,
            num_steps=NUM_STEPS,
            group_of=lambda version, rank: group_of_version(
                version, rank, range(4), group_size=2, period=5, max_ahead=10
            ),
            compute_s=compute_s,
            rounds=rounds,
            ends_with=ends_with,
            link=VirtualLink(latency_s=LATENCY_S),
        )
    )
    world.run()
    return world


def final_mean(world: TrainingWorld) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    finals = [rank.published.membership.own_model().values for rank in world.ranks]
    return np.mean(finals, axis=0)[PARAMETERS]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("ends_with", [2, 3, 4, None])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_all_models_has_the_steps_that_were_made_until_then(
    ends_with: int | None, seed: int, rounds: bool
) -> None:
    world = train(ends_with=ends_with, seed=seed, rounds=rounds)
    lasts_s = sorted(rank.step_ends_s[-1] for rank in world.ranks)
    end_s = lasts_s[(ends_with or 4) - 1] + LATENCY_S
    counted = [
        [push for push, when_s in zip(rank.pushes, rank.step_ends_s, strict=True) if when_s < end_s]
        for rank in world.ranks
    ]
    num_left_out = sum(NUM_STEPS - len(pushes) for pushes in counted)
    assert (num_left_out > 5) == (ends_with in (2, 3))
    np.testing.assert_allclose(
        final_mean(world),
        np.sum([push for pushes in counted for push in pushes], axis=0) / 4,
        atol=1e-9,
    )


def test_a_trainer_whose_steps_count_no_more_begins_each_with_the_model_of_all() -> None:
    world = train(ends_with=2, seed=0)
    late = world.ranks[3]
    values, _ = late.taken[-1]
    final = late.published.membership.own_model().values
    np.testing.assert_array_equal(values, final)
    assert late.published.trainer.is_final
    assert late.published.trainer.step == NUM_STEPS


def test_a_rank_knows_how_many_steps_half_of_the_ranks_are_ahead_of_it() -> None:
    world = train(ends_with=None, seed=0)
    assert [rank.behind[0] for rank in world.ranks] == [0] * 4
    assert max(world.ranks[0].behind + world.ranks[1].behind) <= 2
    # The third makes 16 steps while the first two make 24, and the last one 12.
    assert 5 <= max(world.ranks[2].behind) <= 9
    assert 8 <= max(world.ranks[3].behind) <= 13
    assert world.ranks[3].behind[-1] < max(world.ranks[3].behind)


def test_without_it_no_step_is_left_out_and_no_rank_is_told() -> None:
    world = train(ends_with=None, seed=0)
    assert not any(rank.published.trainer.is_final for rank in world.ranks)
