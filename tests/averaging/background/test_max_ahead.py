"""How many steps fast ranks make within one step of a slow one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import offbeat
from group_support.training import Trainer, Training, trained
from offbeat.averaging.background import averager
from offbeat.simulation.virtual import VirtualLink

PERIOD, ANY = 10, 100


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


def ahead(periods: int, **options: Any) -> offbeat.WAGMA:
    """Of whose ranks one may be so many periods ahead."""
    kind = type("WAGMA", (offbeat.WAGMA,), {"periods_ahead": periods})
    strategy: offbeat.WAGMA = kind(**options)
    return strategy


def train(
    world_size: int, *, periods: int, slow_s: float, steps: int = 60, seed: int = 0
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
            strategy=ahead(periods, period=PERIOD),
            compute_s=compute_s,
            link=VirtualLink(latency_s=1e-3),
        )
    )


@pytest.mark.parametrize(("world_size", "periods"), [(2, 1), (3, 2), (8, 3)])
def test_no_rank_gets_further_ahead_than_it_may(world_size: int, periods: int) -> None:
    ranks = train(world_size, periods=periods, slow_s=50.0)
    within = most_steps_within_one(ranks, slow=1)
    assert (periods - 1) * PERIOD < within <= periods * PERIOD


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_it_nothing_bounds_how_far_a_rank_gets_ahead(world_size: int) -> None:
    """A quorum of three quarters, which two ranks reach with one, does not wait for the last."""
    ranks = train(world_size, periods=ANY, slow_s=50.0)
    assert most_steps_within_one(ranks, slow=1) > 40


def test_a_rank_that_is_less_late_than_that_delays_nobody() -> None:
    bounded, free = (train(4, periods=bound, slow_s=9.0) for bound in (2, ANY))
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
            strategy=ahead(1 + seed % 2, group_size=2, period=3),
            compute_s=lambda rank, step: 40.0 if (rank, step) in late else 0.5 + rank / 10,
            link=VirtualLink(latency_s=0.01, jitter_s=0.01),
        )
    )
    assert all(len(rank.step_ends_s) == 30 for rank in ranks)
