"""How long ranks wait for a peer that does not answer, with the default deadlines.

Models and links are scaled down together: what counts is how long a model takes.
"""

from __future__ import annotations

import pytest

from group_support.world import Model, Schedule, World
from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.interface import ProtocolSettings
from offbeat.simulation.virtual import VirtualLink

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
