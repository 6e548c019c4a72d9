"""Deadlines follow the waits that were seen and do not follow outliers; and how long ranks wait for
a peer that does not answer, with the default deadlines. Models and links are scaled down together:
what counts is how long a model takes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from group_support.world import Model, Schedule, World
from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.deadlines import DeadlineRule, deadline_s
from offbeat.averaging.background.interface import ProtocolSettings
from offbeat.simulation.virtual import VirtualLink

waits = st.lists(st.floats(0, 1e4), max_size=300)


@given(waits)
def test_a_deadline_lies_between_floor_and_cap(waits_s: list[float]) -> None:
    rule = DeadlineRule(floor_s=0.5, cap_s=20.0)
    assert 0.5 <= deadline_s(waits_s, rule) <= 20.0


@given(waits, st.floats(0.01, 100.0))
def test_a_deadline_scales_with_the_waits(waits_s: list[float], factor: float) -> None:
    rule = DeadlineRule(floor_s=1e-300, cap_s=1e300, min_samples=1)
    if waits_s and np.median(waits_s) > 1e-6:
        scaled = deadline_s([wait_s * factor for wait_s in waits_s], rule)
        assert scaled == pytest.approx(factor * deadline_s(waits_s, rule), rel=1e-6)


def test_median_and_deviation_by_hand() -> None:
    rule = DeadlineRule(num_mads=2.0, floor_s=0.1, cap_s=100.0, min_samples=5)
    assert deadline_s([1.0, 2.0, 3.0, 4.0, 10.0], rule) == 3.0 + 2.0 * 1.0


def test_before_enough_waits_are_known_the_deadline_is_the_first_one() -> None:
    rule = DeadlineRule(min_samples=3, cap_s=7.0)
    assert deadline_s([0.1, 0.1], rule) == 7.0
    assert deadline_s([0.1, 0.1, 0.1], rule) < 7.0


@pytest.mark.parametrize(("initial_s", "deadline"), [(0.01, 0.25), (2.0, 2.0), (9.0, 7.0)])
def test_the_first_deadline_is_as_told_within_floor_and_cap(
    initial_s: float, deadline: float
) -> None:
    rule = DeadlineRule(min_samples=3, initial_s=initial_s, cap_s=7.0)
    assert deadline_s([], rule) == deadline_s([3.0, 3.0], rule) == deadline
    assert deadline_s([3.0, 3.0, 3.0], rule) == pytest.approx(3.0 + 8 * 0.05 * 3.0)


@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=60), st.integers(1, 9))
def test_a_suspended_rank_does_not_lengthen_the_deadline(
    usual_s: list[float], num_outliers: int
) -> None:
    rule = DeadlineRule(num_mads=4.0, cap_s=1e6)
    with_outliers_s = deadline_s(usual_s + [1e5] * num_outliers, rule)
    assert with_outliers_s <= 1.1 + 4.0 * max(0.2, 0.05 * 1.1)


def test_the_first_slow_steps_are_forgotten() -> None:
    rule = DeadlineRule(window=10, floor_s=0.01)
    assert deadline_s([30.0] * 50 + [0.1] * 10, rule) == deadline_s([0.1] * 10, rule)


def test_a_network_that_became_slower_is_believed() -> None:
    rule = DeadlineRule(window=10, floor_s=0.01)
    assert deadline_s([0.1] * 50 + [2.0] * 10, rule) > 2.0


def test_equal_waits_leave_room_for_the_next() -> None:
    assert deadline_s([1.0] * 20, DeadlineRule(num_mads=8.0, min_spread=0.05)) == pytest.approx(1.4)


DEFAULTS = ProtocolSettings(
    members=(0,), generation=0, num_elements=1, group_of=lambda _: VersionGroup(ranks=(0,))
)
NUM_ELEMENTS = 500
MODEL_BYTES = NUM_ELEMENTS * 8
BOTH_WAYS = pytest.mark.parametrize("direct_bytes", [0, 1 << 20], ids=["scattered", "direct"])


def waited_s(model: Model) -> float:
    return sum(wait_s for _, wait_s in model.waits_s)


def cluster(*, model_s: float = 0.032, **changes: object) -> World:
    """Four ranks whose links take `model_s` for a model."""
    options: dict[str, object] = {
        "seed": 1,
        "world_size": 4,
        "group_size": 4,
        "num_elements": NUM_ELEMENTS,
        "num_steps": 4,
        "quorum": 0.75,
        "link": VirtualLink(latency_s=0.001, bytes_per_s=MODEL_BYTES / model_s),
        "reply_deadline": DEFAULTS.reply_deadline,
        "arrival_deadline": DEFAULTS.arrival_deadline,
        "compute_s": lambda rank, step: 1.0 + 0.02 * rank,
    }
    # tests name fields that exist
    world = World(Schedule(**(options | changes)))  # type: ignore[arg-type]
    world.run()
    return world


@BOTH_WAYS
@pytest.mark.parametrize("period", [None, 1])
def test_a_rank_killed_in_a_first_version_delays_its_peers_for_a_second_at_most(
    direct_bytes: int, period: int | None
) -> None:
    """Models of 4 MB at 1 Gbit/s take 32 ms; and here it takes five seconds until a
    death is known.
    """
    undisturbed_s = max(map(waited_s, cluster(direct_bytes=direct_bytes, period=period).models))
    for kill_ms in range(990, 1200, 10):
        killed = kill_ms % 4
        world = cluster(
            direct_bytes=direct_bytes,
            period=period,
            death_notice_s=5.0,
            kills=[(killed, kill_ms / 1000)],
        )
        for model in world.models:
            assert model.rank == killed or waited_s(model) <= undisturbed_s + 1.0


@BOTH_WAYS
def test_slow_links_are_taken_for_what_they_are_before_long(direct_bytes: int) -> None:
    world = cluster(
        model_s=1.0,
        num_steps=16,
        direct_bytes=direct_bytes,
        compute_s=lambda rank, step: 1.0 + 0.1 * rank,
    )
    for model, counts in zip(world.models, world.counts, strict=True):
        assert counts.suspicions > 0
        assert not counts.suspected
        last = max(model.closed, key=lambda outcome: outcome.version)
        assert last.members.keys() == {0, 1, 2, 3}


def test_a_quorum_that_takes_long_to_arrive_is_waited_for_before_long() -> None:
    world = cluster(
        period=1, num_steps=12, compute_s=lambda rank, step: 20.0 + (rank if step == 0 else 0.0)
    )
    by_version = {outcome.version: outcome for outcome in world.models[0].closed}
    num_fresh = [
        sum(note.fresh for note in by_version[version].members.values())
        for version in sorted(by_version)
    ]
    assert num_fresh[0] == 1
    assert min(num_fresh[-3:]) >= 3
