"""Running statistics and counters under random schedules: fast and slow ranks, slow links, one
rank whose inputs are a hundred times as loud in bursts. Each is replayed by its seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import offbeat
from group_support.training import PARAMETERS, VARIANCE, Training, trained
from offbeat.simulation.virtual import VirtualLink

ADPSGD_VALUES = ("float32", "bfloat16")


def draw_training(seed: int, values: str) -> Training:
    draw = random.Random(seed)
    world_size = draw.randint(2, 8)
    pairs = draw.random() < 0.3 and values in ADPSGD_VALUES
    means_s = [draw.choice([0.05, 0.1, 0.2, 0.4]) for _ in range(world_size)]
    loud = draw.randrange(world_size)
    forwards = draw.choice([1, 1, 4])

    return Training(
        seed=seed,
        world_size=world_size,
        num_steps=30,
        strategy=offbeat.ADPSGD(values=values)
        if pairs
        else offbeat.WAGMA(
            group_size=min(world_size, 2 + seed % 3),
            period=7,
            values=values,
        ),
        compute_s=lambda rank, step: (
            means_s[rank] * random.Random(f"{seed} {rank} {step}").expovariate(1.0)
        ),
        loudness=lambda rank, step: 100.0 if rank == loud and step % 10 < 2 else 1.0,
        momentum=draw.choice([0.1, 0.1, 0.9, None]),
        forwards=forwards,
        link=VirtualLink(latency_s=draw.choice([0.001, 0.05, 0.2]), jitter_s=0.01),
    )


@pytest.mark.parametrize(
    ("seed", "values"),
    list(enumerate(4 * ["float32", "bfloat16", "linear4", "e3m0"])),
)
def test_statistics_stay_in_their_range_and_parameters_keep_their_mean(
    seed: int, values: str
) -> None:
    plan = draw_training(seed, values)
    ranks = trained(plan)
    most = plan.num_steps * plan.forwards
    for rank in ranks:
        for step, (model, counters) in enumerate(rank.taken):
            assert model[VARIANCE].min() >= 0
            # The variance of one batch is at most that of the loudest; so no mean is larger.
            assert model[VARIANCE].max() < 100**2 * 10
            assert counters.tolist() == [step * plan.forwards]
        assert counters.max() <= most
    moved = np.mean([np.sum(rank.pushes, axis=0) for rank in ranks], axis=0)
    end = np.mean([rank.model for rank in ranks], axis=0)
    np.testing.assert_allclose(end[PARAMETERS], moved, atol=1e-9)
