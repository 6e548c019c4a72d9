"""Batch sizes end at equal updates, within bounds and with the sum that is documented; and how the
published rules fail to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from _ceilings import dispatch
from offbeat.megabatch.batch_sizes import (
    NO_LIMIT,
    BatchRule,
    Bounds,
    Proportional,
    PublishedRule,
    binding,
    square_root_rate,
)

EQUAL = (1.0, 1.0, 1.0, 1.0)
GAP_OF_32_PERCENT = (1.0, 0.92, 0.84, 0.76)
TWO_TO_ONE = (1.0, 1.0, 0.5, 0.5)
FOUR_TO_ONE = (1.0, 1.0, 0.25, 0.25)

PAPERS = [Bounds(smallest=128, largest=1024)] * 4


@st.composite
def workers(draw: st.DrawFn) -> tuple[list[int], list[int], list[Bounds]]:
    """(sizes, updates, bounds) of some workers; some were not there."""
    sizes, updates, bounds = [], [], []
    for _ in range(draw(st.integers(1, 8))):
        smallest = draw(st.integers(1, 64))
        largest = draw(st.just(NO_LIMIT) | st.integers(smallest, 2048))
        sizes.append(draw(st.integers(smallest, min(largest, 2048))))
        updates.append(draw(st.integers(0, 200)))
        bounds.append(Bounds(smallest=smallest, largest=largest))
    return sizes, updates, bounds


rules: st.SearchStrategy[BatchRule] = st.one_of(
    st.just(PublishedRule()), st.builds(Proportional, base=st.integers(1, 2048))
)
proportional = st.builds(Proportional, base=st.integers(1, 2048))


@given(rules, workers())
def test_sizes_stay_within_bounds_whatever_the_rule(
    rule: BatchRule, drawn: tuple[list[int], list[int], list[Bounds]]
) -> None:
    sizes, updates, bounds = drawn
    resized = rule.resize(sizes, updates, bounds)
    assert len(resized) == len(sizes)
    assert all(
        isinstance(size, int) and bound.clip(size) == size
        for size, bound in zip(resized, bounds, strict=True)
    )
    assert all(
        resized[rank] == bounds[rank].smallest
        for rank, which in binding(resized, bounds).items()
        if which == "smallest"
    )


@given(rules, workers(), st.integers(2, 50))
def test_nobody_changes_against_the_direction_of_the_updates(
    rule: BatchRule, drawn: tuple[list[int], list[int], list[Bounds]], made: int
) -> None:
    """Whoever made more updates than another of the same size and bounds gets at least as large a
    batch.
    """
    sizes, updates, bounds = drawn
    sizes, bounds = [*sizes, sizes[0]], [*bounds, bounds[0]]
    assume(updates[0] > 0)
    resized = rule.resize(sizes, [*updates, updates[0] + made], bounds)
    if not isinstance(
        rule, PublishedRule
    ):  # which makes no step where a step would lead out of bounds
        assert resized[-1] >= resized[0]


@given(
    proportional,
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 200)), min_size=1, max_size=8),
)
def test_without_upper_bounds_sizes_sum_to_the_base(
    rule: Proportional, drawn: list[tuple[int, int]]
) -> None:
    sizes, updates = [size for size, _ in drawn], [made for _, made in drawn]
    resized = rule.resize(sizes, updates, [Bounds()] * len(drawn))
    assert sum(resized) == rule.base * len(drawn)


@given(
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=8),
    st.lists(st.integers(64, 512), min_size=8, max_size=8),
)
def test_one_step_ends_at_sizes_in_proportion_to_speeds(
    speeds: list[float], sizes: list[int]
) -> None:
    sizes = sizes[: len(speeds)]
    updates = [1e6 * speed / size for speed, size in zip(speeds, sizes, strict=True)]
    resized = Proportional(base=256).resize(sizes, updates, [Bounds()] * len(speeds))
    for size, speed in zip(resized, speeds, strict=True):
        assert size == pytest.approx(256 * len(speeds) * speed / sum(speeds), abs=1)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), st.integers(100, 1000))
def test_an_upper_bound_that_binds_makes_the_others_smaller_and_updates_stay_equal(
    speeds: list[float], limit: int
) -> None:
    updates = [1e6 * speed for speed in speeds]
    bounds = [Bounds(largest=limit)] * len(speeds)
    resized = Proportional(base=limit).resize([limit] * len(speeds), updates, bounds)
    assert max(resized) == limit
    for size, speed in zip(resized, speeds, strict=True):
        assert size == pytest.approx(limit * speed / max(speeds), abs=1)


@given(proportional, workers(), st.floats(0.01, 100))
def test_only_ratios_of_updates_count(
    rule: Proportional, drawn: tuple[list[int], list[int], list[Bounds]], factor: float
) -> None:
    sizes, updates, bounds = drawn
    scaled = rule.resize(sizes, [made * factor for made in updates], bounds)
    assert all(
        abs(a - b) <= 1 for a, b in zip(scaled, rule.resize(sizes, updates, bounds), strict=True)
    )


@given(proportional, st.lists(st.integers(1, 2048), min_size=1, max_size=8), st.integers(0, 50))
def test_equal_updates_change_nothing(rule: Proportional, sizes: list[int], made: int) -> None:
    total = sum(sizes)
    assume(total % len(sizes) == 0)
    rule = Proportional(base=total // len(sizes))
    assert rule.resize(sizes, [made] * len(sizes), [Bounds()] * len(sizes)) == tuple(sizes)


def test_whoever_was_not_there_keeps_its_size() -> None:
    bounds = [Bounds(smallest=10, largest=1000)] * 3
    for rule in (PublishedRule(), Proportional(base=100)):
        assert rule.resize([100, 100, 100], [30, 30, 0], bounds) == (100, 100, 100)


def test_the_floor_binds_at_ratios_above_that_of_the_bounds() -> None:
    bounds = [Bounds(smallest=128, largest=1024)] * 2
    resized = Proportional(base=1024).resize([1024, 1024], [100, 5], bounds)
    assert resized == (1024, 128)
    assert binding(resized, bounds) == {0: "largest", 1: "smallest"}


def spread(updates: Sequence[float]) -> float:
    """How far workers' updates are apart: (largest - smallest) / mean; 0 where nobody made any."""
    return (max(updates) - min(updates)) * len(updates) / (sum(updates) or 1)


def spreads(
    rule: BatchRule,
    speeds: Callable[[int], Sequence[float]],
    bounds: Sequence[Bounds],
    *,
    base: int,
    num_rounds: int,
    batches_per_worker: int = 50,
) -> list[float]:
    """The spread of updates in each mega-batch, of workers whose batches take 5% more or less at
    random.
    """
    draw = np.random.default_rng(0)
    sizes: tuple[int, ...] = (base,) * len(bounds)
    found = []
    for number in range(num_rounds):
        now = speeds(number)
        made = dispatch(
            sizes,
            batches_per_worker * base * len(bounds),
            lambda rank, samples, now=now: (
                samples / now[rank] * (1 + 0.05 * draw.standard_normal())
            ),  # type: ignore[misc]
        ).updates
        found.append(spread(made))
        sizes = rule.resize(sizes, made, bounds)
    return found


def flipping(speeds: Sequence[float], at: int) -> Callable[[int], Sequence[float]]:
    return lambda number: speeds if number < at else tuple(reversed(speeds))


@pytest.mark.parametrize("speeds", [EQUAL, GAP_OF_32_PERCENT, TWO_TO_ONE, FOUR_TO_ONE])
@pytest.mark.parametrize(
    ("base", "bounds"), [(128, [Bounds()] * 4), (1024, PAPERS)], ids=["unbounded", "bounded"]
)
def test_proportional_finds_equal_updates_within_three_mega_batches_and_again_after_a_flip(
    speeds: Sequence[float], base: int, bounds: list[Bounds]
) -> None:
    found = spreads(
        Proportional(base=base),
        flipping(speeds, 10),
        bounds,
        base=base,
        num_rounds=20,
        batches_per_worker=100,
    )
    assert max(found[2:10]) <= 0.05
    assert max(found[12:]) <= 0.05


def test_the_published_rule_oscillates() -> None:
    """32% between the fastest and the slowest: the spread it begins with grows to several times as
    much.
    """
    found = spreads(
        PublishedRule(), flipping(GAP_OF_32_PERCENT, 99), PAPERS, base=1024, num_rounds=20
    )
    assert max(found[10:]) > 3 * found[0]


def test_the_published_rule_never_adapts_at_two_to_one() -> None:
    """Every step it would make leads out of bounds."""
    updates = dispatch(
        [1024] * 4, 200 * 1024, lambda rank, samples: samples / TWO_TO_ONE[rank]
    ).updates
    assert PublishedRule().resize([1024] * 4, updates, PAPERS) == (1024,) * 4
    found = spreads(PublishedRule(), flipping(TWO_TO_ONE, 99), PAPERS, base=1024, num_rounds=10)
    assert min(found) > 0.6


def test_where_noise_dominates_the_root_gives_adagrad_the_progress_of_s_sgd() -> None:
    """Ranks with batches of any size, merged with equal weights, against the mean gradient."""
    base, sizes = 32, (43, 43, 21, 21)
    draw = np.random.default_rng(1)
    signal, noise = 0.01, draw.standard_normal((20, len(sizes), 20_000))
    of_ranks = signal + noise / np.sqrt(sizes)[:, None]
    of_all = signal + noise.mean(axis=1) * np.sqrt(len(sizes)) / np.sqrt(len(sizes) * base)

    def progress(gradients: NDArray[np.float64]) -> float:
        return float((gradients / np.sqrt(np.cumsum(gradients**2, axis=0))).mean(axis=-1).sum())

    rates = [square_root_rate(1.0, size, base, len(sizes)) for size in sizes]
    merged = np.mean([rate * progress(of_ranks[:, rank]) for rank, rate in enumerate(rates)])
    assert merged == pytest.approx(progress(of_all), rel=0.1)
