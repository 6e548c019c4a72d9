"""How many steps fast ranks make within one step of a slow one."""

from __future__ import annotations

import itertools
import random

import pytest

import offbeat
from group_support.training import Trainer, Training, trained
from offbeat.averaging.background import averager
from offbeat.simulation.virtual import VirtualLink

PERIOD, ANY = 10, 1000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is waited for is waited for as long as it takes."""
    monkeypatch.setattr(averager, "HOLD_S", 1e3)


def most_steps_within_one(ranks: list[Trainer], slow: int) -> int:
    """Of any rank, within any step of rank `slow`."""
    ends_s = ranks[slow].step_ends_s
    return max(
        sum(begin_s < end_s < until_s for end_s in rank.step_ends_s)
        for begin_s, until_s in itertools.pairwise([0.0, *ends_s])
        for rank in ranks
        if rank.rank != slow
    )


def train(
    world_size: int, *, max_ahead: int, slow_s: float, steps: int = 60, seed: int = 0
) -> list[Trainer]:
    """Rank 1 computes for `slow_s` in its third step, and all others for about 1 s in each."""

    def compute_s(rank: int, step: int) -> float:
        usual_s = 0.8 + 0.4 * random.Random(f"{seed} {rank} {step}").random()
        return slow_s if (rank, step) == (1, 2) else usual_s

    return trained(
        Training(
            seed=seed,
            world_size=world_size,
            num_steps=steps,
            strategy=offbeat.WAGMA(period=PERIOD, max_ahead=max_ahead),
            compute_s=compute_s,
            link=VirtualLink(latency_s=1e-3),
        )
    )


@pytest.mark.parametrize(
    ("world_size", "max_ahead"), [(2, PERIOD), (3, 2 * PERIOD), (8, 3 * PERIOD + 5)]
)
def test_no_rank_gets_further_ahead_than_max_ahead(world_size: int, max_ahead: int) -> None:
    ranks = train(world_size, max_ahead=max_ahead, slow_s=50.0)
    periods = max_ahead // PERIOD
    within = most_steps_within_one(ranks, slow=1)
    assert (periods - 1) * PERIOD < within <= periods * PERIOD


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_it_nothing_bounds_how_far_a_rank_gets_ahead(world_size: int) -> None:
    """A quorum of three quarters, which two ranks reach with one, does not wait for the last."""
    ranks = train(world_size, max_ahead=ANY, slow_s=50.0)
    assert most_steps_within_one(ranks, slow=1) > 40


def test_a_rank_that_is_less_late_than_that_delays_nobody() -> None:
    bounded, free = (train(4, max_ahead=bound, slow_s=9.0) for bound in (2 * PERIOD, ANY))
    for rank in (0, 2, 3):
        assert bounded[rank].step_ends_s == free[rank].step_ends_s


@pytest.mark.parametrize("seed", range(6))
def test_several_that_are_late_in_turn_never_block_each_other(seed: int) -> None:
    draw = random.Random(seed)
    world_size = draw.randint(2, 6)
    late = {(draw.randrange(world_size), draw.randrange(30)) for _ in range(6)}
    ranks = trained(
        Training(
            seed=seed,
            world_size=world_size,
            num_steps=30,
            strategy=offbeat.WAGMA(group_size=2, period=3, max_ahead=3 + 3 * (seed % 2)),
            compute_s=lambda rank, step: 40.0 if (rank, step) in late else 0.5 + rank / 10,
            link=VirtualLink(latency_s=0.01, jitter_s=0.01),
        )
    )
    assert all(len(rank.step_ends_s) == 30 for rank in ranks)
