"""Running statistics and counters under random schedules: fast and slow ranks, slow links, one
rank whose inputs are a hundred times as loud in bursts. Each is replayed by its seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from group_support.training import PARAMETERS, VARIANCE, Training, TrainingWorld
from offbeat.arithmetic.groups import VersionGroup, group_of_version
from offbeat.codec.few_bits import E3M0Values, LinearValues
from offbeat.codec.value_codecs import ValueCodec
from offbeat.transport.virtual import VirtualLink


def draw_training(seed: int, *, rounds: bool, values: ValueCodec | None = None) -> Training:
    draw = random.Random(seed)
    world_size = draw.randint(2, 8)
    pairs = draw.random() < 0.3 and values is None
    means_s = [draw.choice([0.05, 0.1, 0.2, 0.4]) for _ in range(world_size)]
    loud = draw.randrange(world_size)
    forwards = draw.choice([1, 1, 4])

    def group_of(version: int, rank: int) -> VersionGroup:
        if pairs:
            others = [other for other in range(world_size) if other != rank]
            return VersionGroup(
                ranks=(rank, random.Random(f"{seed} {rank} {version}").choice(others))
            )
        return group_of_version(version, rank, range(world_size), group_size=2 + seed % 3, period=7)

    return Training(
        seed=seed,
        world_size=world_size,
        num_steps=30,
        group_of=group_of,
        compute_s=lambda rank, step: (
            means_s[rank] * random.Random(f"{seed} {rank} {step}").expovariate(1.0)
        ),
        loudness=lambda rank, step: 100.0 if rank == loud and step % 10 < 2 else 1.0,
        momentum=draw.choice([0.1, 0.1, 0.9, None]),
        forwards=forwards,
        pairs=pairs,
        rounds=rounds,
        values=values,
        link=VirtualLink(latency_s=draw.choice([0.001, 0.05, 0.2]), jitter_s=0.01),
    )


@pytest.mark.parametrize(
    ("rounds", "values"),
    [(False, None), (True, None), (True, LinearValues(4)), (True, E3M0Values())],
    ids=["whole", "bfloat16", "linear4", "e3m0"],
)
@pytest.mark.parametrize("seed", range(16))
def test_statistics_stay_in_their_range_and_parameters_keep_their_mean(
    seed: int, rounds: bool, values: ValueCodec | None
) -> None:
    plan = draw_training(seed, rounds=rounds, values=values)
    world = TrainingWorld(plan)
    world.run()
    most = plan.num_steps * plan.forwards
    for rank in world.ranks:
        for step, (model, counters) in enumerate(rank.taken):
            assert model[VARIANCE].min() >= 0
            # The variance of one batch is at most that of the loudest; so no mean is larger.
            assert model[VARIANCE].max() < 100**2 * 10
            assert counters.tolist() == [step * plan.forwards]
        assert counters.max() <= most
    moved = np.mean([np.sum(rank.pushes, axis=0) for rank in world.ranks], axis=0)
    end = np.mean([rank.published.own_model().values for rank in world.ranks], axis=0)
    np.testing.assert_allclose(end[PARAMETERS], moved, atol=1e-9)
