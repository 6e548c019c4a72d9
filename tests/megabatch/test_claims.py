"""Every sample is merged exactly once, whoever claims when, and whoever dies where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from offbeat.megabatch.claims import (
    Claim,
    ClaimLog,
    ClaimRound,
    MegaBatchShare,
    SampleRange,
    batches_at_once,
    num_positions,
    part_of,
    without,
)

disjoint_spans = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda cuts: tuple(
        SampleRange(*pair) for pair in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)
    )
)
any_spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(
        lambda pair: SampleRange(pair[0], sum(pair))
    ),
    max_size=6,
)


def positions(spans: tuple[SampleRange, ...] | list[SampleRange]) -> list[int]:
    return [position for span in spans for position in range(*span)]


@given(disjoint_spans, st.integers(0, 70), st.integers(0, 70))
def test_a_part_is_a_slice(spans: tuple[SampleRange, ...], begin: int, end: int) -> None:
    assert positions(part_of(spans, begin, end)) == positions(spans)[begin : max(begin, end)]
    assert num_positions(spans) == len(positions(spans))


@given(disjoint_spans, any_spans)
def test_what_is_left_is_a_difference(
    spans: tuple[SampleRange, ...], taken: list[SampleRange]
) -> None:
    gone = set(positions(taken))
    assert positions(without(spans, taken)) == [
        position for position in positions(spans) if position not in gone
    ]


@given(
    st.integers(0, 200),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.data(),
)
def test_every_sample_is_merged_exactly_once(
    num_samples: int, batch_sizes: list[int], data: st.DataObject
) -> None:
    """Workers claim in any order, die with a claim in hand or with its words half written, and come
    back.
    """
    store = HashStore()
    merged: Counter[int] = Counter()
    left = (SampleRange(0, num_samples),)
    number = 0
    while left:
        logs = [ClaimLog(store, prefix="test") for _ in batch_sizes]
        held: dict[int, list[Claim]] = {rank: [] for rank in range(len(batch_sizes))}
        for log in logs:
            log.open(number, left)
        free = list(held)
        while free:
            rank = data.draw(st.sampled_from(free))
            fate = (
                data.draw(st.sampled_from(["goes on"] * 6 + ["dies", "dies mute"]))
                if len(held) > 1
                else "goes on"
            )
            if fate == "dies mute":  # it raised the number and said nothing more
                store.add(f"test/given/{number}", batch_sizes[rank])
            if fate != "goes on":
                free.remove(rank)
                del held[rank]
            elif (claim := logs[rank].claim(batch_sizes[rank])) is None:
                free.remove(rank)
            else:
                held[rank].append(claim)
        final = [claim for claims in held.values() for claim in claims]
        merged.update(position for claim in final for position in positions(claim.spans))
        assert all(count == 1 for count in merged.values())
        left = without(left, [span for claim in final for span in claim.spans])
        number += 1
    assert sorted(merged) == list(range(num_samples))


@given(st.integers(1, 100), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_nobody_gets_more_than_asked_and_only_the_last_gets_less(
    num_samples: int, batch_sizes: list[int]
) -> None:
    store = HashStore()
    logs = [ClaimLog(store) for _ in batch_sizes]
    for log in logs:
        log.open(0, [SampleRange(0, num_samples)])
    taken: list[tuple[int, Claim]] = []
    turn = 0
    while (claim := logs[turn].claim(batch_sizes[turn])) is not None:
        taken.append((turn, claim))
        turn = (turn + 1) % len(logs)
    assert [claim.num_samples for _, claim in taken[:-1]] == [
        batch_sizes[rank] for rank, _ in taken[:-1]
    ]
    assert taken[-1][1].num_samples <= batch_sizes[taken[-1][0]]


@given(st.integers(1, 100), st.integers(1, 12), st.data())
def test_no_claim_is_smaller_than_the_smallest_unless_the_round_is(
    num_samples: int, smallest: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(smallest, 30), min_size=1, max_size=4))
    store = HashStore()
    logs = [ClaimLog(store) for _ in sizes]
    for log in logs:
        log.open(0, [SampleRange(0, num_samples)], smallest=smallest)
    taken: list[int] = []
    free = list(range(len(sizes)))
    while free:
        worker = data.draw(st.sampled_from(free))
        claim = logs[worker].claim(sizes[worker])
        if claim is None:
            free.remove(worker)
            continue
        taken += positions(claim.spans)
        assert claim.num_samples >= min(smallest, num_samples)
        assert claim.num_samples < sizes[worker] + smallest
    assert sorted(taken) == list(range(num_samples))


@given(disjoint_spans, st.integers(1, 30), st.integers(1, 4))
def test_where_each_has_a_share_of_its_own_all_of_them_have_everything(
    spans: tuple[SampleRange, ...], size: int, num_workers: int
) -> None:
    taken: list[int] = []
    shares: list[int] = []
    for place in range(num_workers):
        log = ClaimLog(HashStore())
        log.open(0, spans, share=(place, (1,) * num_workers), smallest=min(size, 2))
        before = len(taken)
        while batches := log.claim_batches(size, largest=size + 1, samples_of_all=size):
            taken += [p for batch in batches for p in positions(batch.spans)]
        shares.append(len(taken) - before)
    assert taken == positions(spans)
    assert max(shares) - min(shares) <= 1


@given(disjoint_spans.filter(bool), st.integers(1, 20))
def test_a_claim_is_split_evenly(spans: tuple[SampleRange, ...], largest: int) -> None:
    parts = list(Claim(spans).split(largest))
    assert [p for part in parts for p in positions(part.spans)] == positions(spans)
    sizes = [part.num_samples for part in parts]
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1


@given(disjoint_spans.filter(bool), st.integers(1, 20), st.integers(1, 20))
def test_a_claim_of_several_batches_is_divided_into_full_ones_but_for_the_last(
    spans: tuple[SampleRange, ...], size: int, smallest: int
) -> None:
    smallest = min(size, smallest)
    parts = Claim(spans).batches(size, smallest=smallest, largest=size + smallest)
    assert [p for part in parts for p in positions(part.spans)] == positions(spans)
    *full, last = (part.num_samples for part in parts)
    assert all(samples == size for samples in full)
    assert min(smallest, sum(full) + last) <= last < size + smallest


some_s = st.just(0.0) | st.floats(1e-6, 10)


@given(some_s, some_s, st.integers(0, 10_000), st.integers(1, 500))
def test_claims_take_a_twentieth_of_the_time_unless_that_is_too_much_of_what_is_left(
    claim_s: float, batch_s: float, left: int, of_all: int
) -> None:
    count = batches_at_once(
        claim_s=claim_s, batch_s=batch_s, samples_left=left, samples_of_all=of_all
    )
    assert count >= 1
    assert count == 1 or count * of_all <= left / 4
    is_enough = claim_s <= 0.0501 * count * batch_s
    assert is_enough or batch_s == 0 or (count + 1) * of_all > left / 4
    # No more than it takes.
    assert count == 1 or claim_s > 0.0499 * (count - 1) * batch_s


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 1.0, 0.05)])
@pytest.mark.parametrize("claim_s", [0.001, 0.1, 0.5, 2.0])
def test_claims_that_take_long_cost_little_however_unequal_workers_are(
    speeds: tuple[float, ...], claim_s: float
) -> None:
    """Under a virtual clock: a batch takes a second of a worker of speed 1, and a claim up to two,
    in which workers that claim one batch at a time would take three times as long.
    """
    size, total = 10, 10 * 400
    took_s = makespan(speeds, total, size, claim_s, several=True)
    one_by_one_s = makespan(speeds, total, size, claim_s, several=False)
    ideal_s = total / size / sum(speeds)
    last_batch_s = claim_s + 1 / min(speeds)
    assert took_s <= one_by_one_s + last_batch_s
    # The last eight batches of each are claimed one at a time, and what is left is known from the
    # worker's last claim, so that one for which batches take longer than claims may hold two.
    assert took_s <= 1.05 * ideal_s + 16 * claim_s + 2 * last_batch_s


def makespan(
    speeds: Sequence[float], total: int, size: int, claim_s: float, *, several: bool
) -> float:
    """When the last of some workers has computed its last batch of a round, in seconds."""
    store = HashStore()
    logs = [ClaimLog(store) for _ in speeds]
    for log in logs:
        log.open(0, [SampleRange(0, total)])
    free_at_s = dict.fromkeys(range(len(speeds)), 0.0)
    ended_s = 0.0
    while free_at_s:
        worker = min(free_at_s, key=lambda rank: free_at_s[rank])
        batch_s = 1 / speeds[worker]
        count = batches_at_once(
            claim_s=claim_s if several else 0.0,
            batch_s=batch_s,
            samples_left=logs[worker].num_left,
            samples_of_all=size * len(speeds),
        )
        claim = logs[worker].claim(count * size)
        if claim is None:
            ended_s = max(ended_s, free_at_s.pop(worker))
        else:
            free_at_s[worker] += claim_s + claim.num_samples / size * batch_s
    return ended_s


@pytest.mark.parametrize(
    ("sizes", "updates", "counted"),
    [
        ([10, 10], 2, 2.0),
        ([10, 1], 2, 1.1),
        ([10, 11], 2, 2.1),
        ([10] * 4, 2, 2.0),
        ([5, 5], 0, 0.0),
    ],
)
def test_updates_are_counted_by_their_samples(
    sizes: list[int], updates: int, counted: float
) -> None:
    """Full ones are whole numbers, also where several claims make one."""
    share = MegaBatchShare(
        rank=0,
        claims=tuple(Claim((SampleRange(0, size),)) for size in sizes),
        updates=updates,
        batch_size=10,
        busy_s=0.0,
    )
    assert share.full_updates == pytest.approx(counted)
    if set(sizes) == {10}:
        assert share.full_updates == updates


@given(st.integers(1, 60), st.integers(1, 4), st.data())
def test_rounds_lead_through_every_epoch(num_samples: int, count: int, data: st.DataObject) -> None:
    """Whatever part of each round is merged, and however a mega-batch is cut, epochs end when all
    of it is, and rounds have numbers of their own.
    """

    def whole(epoch: int, number: int) -> tuple[SampleRange, ...]:
        return (SampleRange(num_samples * number // count, num_samples * (number + 1) // count),)

    place = ClaimRound(epoch=0, mega_batch=0, round=0, retry=0, spans=whole(0, 0))
    merged: Counter[tuple[int, int]] = Counter()
    while place.epoch < 2:
        taken = (
            set(data.draw(st.sets(st.sampled_from(positions(place.spans) or [0]))))
            if place.retry < 3
            else None
        )
        claims = [
            Claim((SampleRange(p, p + 1),))
            for p in positions(place.spans)
            if taken is None or p in taken
        ]
        merged.update((place.epoch, p) for claim in claims for p in positions(claim.spans))
        following = place.after(claims, whole, count)
        assert following.round == place.round + 1
        assert (following.retry > 0) == (
            sum(claim.num_samples for claim in claims) < num_positions(place.spans)
        )
        if following.retry == 0:
            first = min((begin for begin, _ in following.spans), default=0)
            following = following.cut(first + data.draw(st.integers(1, 70)))
        place = following
    assert set(merged) == {
        (epoch, position) for epoch in range(2) for position in range(num_samples)
    }
    assert set(merged.values()) == {1}


@given(disjoint_spans, st.integers(0, 70))
def test_a_round_is_cut_at_a_position(spans: tuple[SampleRange, ...], end: int) -> None:
    place = ClaimRound(epoch=0, mega_batch=0, round=0, retry=0, spans=spans).cut(end)
    assert positions(place.spans) == [each for each in positions(spans) if each < end]
    assert positions(place.later) == [each for each in positions(spans) if each >= end]


def test_a_claim_may_lie_in_two_spans() -> None:
    store = HashStore()
    first, second = (ClaimLog(store) for _ in range(2))
    for log in (first, second):
        log.open(0, [SampleRange(0, 4), SampleRange(10, 14)])
    assert first.claim(3) == Claim((SampleRange(0, 3),))
    assert second.claim(3) == Claim((SampleRange(3, 4), SampleRange(10, 12)))
    assert first.claim(3) == Claim((SampleRange(12, 14),))
    assert second.claim(1) is None
    assert second.claim(1) is None


def test_rounds_do_not_meet() -> None:
    store = HashStore()
    log = ClaimLog(store)
    for number in range(3):
        log.open(number, [SampleRange(5, 7)])
        assert log.round == number
        assert log.claim(2) == Claim((SampleRange(5, 7),))
        assert log.claim(2) is None


def test_a_log_does_not_grow() -> None:
    store = HashStore()
    logs = [ClaimLog(store) for _ in range(3)]
    for number in range(4):
        for log in logs:
            log.open(number, [SampleRange(0, 9)], sweeps=log is logs[1])
        while any([log.claim(2) for log in logs]):  # noqa: C419 - everyone finds out that nothing is left
            pass
        assert store.num_keys() == 1


def test_an_empty_round_gives_nothing() -> None:
    log = ClaimLog(HashStore())
    assert log.claim(1) is None
    log.open(0, [])
    assert log.claim(1) is None
