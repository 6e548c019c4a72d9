"""Fits find the costs that the durations were made from; hiccups and nonsense do not get in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _models.kfac_iteration import fit_inversion
from _models.kfac_published import ExponentialInversion
from offbeat.arithmetic.costs import Channel, LinkCost, fit_link
from offbeat.errors import ConfigError
from offbeat.kfac.placement import InversionCost, TabledInversion, slowest
from offbeat_lab.plan.profile import PolynomialInversion

sizes = st.lists(st.integers(1, 10**8), min_size=2, max_size=20, unique=True)
coefficients = st.floats(1e-9, 1.0)
dims = st.lists(st.integers(1, 5000), min_size=3, max_size=20, unique=True)


@given(sizes, coefficients, coefficients)
def test_the_fit_of_an_exact_link_repeats_its_durations(
    sizes: list[int], alpha_s: float, beta_s: float
) -> None:
    link = LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s)
    timed = [(size, link.time_s(num_messages=1, num_bytes=size)) for size in sizes]
    fitted = fit_link(timed)
    for size, seconds in timed:
        assert fitted.time_s(num_messages=1, num_bytes=size) == pytest.approx(seconds, rel=1e-6)


@given(dims, coefficients, coefficients, coefficients)
def test_the_fit_of_an_exact_polynomial_repeats_its_durations(
    dims: list[int], a: float, b: float, c: float
) -> None:
    cost = PolynomialInversion(constant_s=a, square_s=b, cube_s=c)
    fitted = fit_inversion([(dim, cost.time_s(dim)) for dim in dims])
    for dim in dims:
        assert fitted.time_s(dim) == pytest.approx(cost.time_s(dim), rel=1e-5)


@given(st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 1e3), min_size=3, max_size=12))
def test_a_fitted_cost_is_positive_and_grows(timed: dict[int, float]) -> None:
    fitted = fit_inversion(timed.items())
    times_s = [fitted.time_s(dim) for dim in (1, 10, 100, 1000, 10_000)]
    assert times_s == sorted(times_s)
    assert times_s[-1] > 0


def test_a_hiccup_among_repetitions_does_not_tilt_the_fit() -> None:
    calm = [(size, 1e-3 + 1e-8 * size) for size in (1_000, 100_000, 10_000_000)]
    hiccup = [*calm * 3, (1_000, 5.0)]
    assert fit_link(hiccup).alpha_s == pytest.approx(1e-3)


def test_short_durations_count_as_much_as_long_ones() -> None:
    """Least squares of absolute errors would let the 2% error of the largest matrix swallow the
    smallest.
    """
    fitted = fit_inversion(
        [(64, 1e-4), (512, 1e-4 + 1e-11 * 512**3), (4096, 1.02 * 1e-11 * 4096**3)]
    )
    assert fitted.time_s(64) == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize(
    ("timed", "complaint"),
    [
        ([(10, 1.0), (10, 2.0)], "1 sizes were timed"),
        ([(10, 0.0), (20, 1.0)], "size 10 took 0.0 s"),
    ],
)
def test_what_cannot_be_fitted_is_refused(timed: list[tuple[int, float]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fit_link(timed)


@given(
    st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 1e3), min_size=1, max_size=12),
    st.integers(1, 20_000),
)
def test_a_table_says_what_was_measured_and_stays_between(
    timed: dict[int, float], dim: int
) -> None:
    known = sorted(timed)
    table = TabledInversion(dims=tuple(known), seconds=tuple(timed[size] for size in known))
    assert all(table.time_s(size) == pytest.approx(timed[size]) for size in known)
    if known[0] <= dim <= known[-1]:
        neighbours = [
            timed[max(size for size in known if size <= dim)],
            timed[min(size for size in known if size >= dim)],
        ]
        assert min(neighbours) * (1 - 1e-9) <= table.time_s(dim) <= max(neighbours) * (1 + 1e-9)


def test_beyond_the_table_cubes_take_over() -> None:
    assert TabledInversion(dims=(10, 100), seconds=(1.0, 2.0)).time_s(200) == 16.0


@pytest.mark.parametrize(
    ("dims", "seconds"), [((), ()), ((5, 5), (1.0, 1.0)), ((5, 6), (1.0,)), ((5,), (0.0,))]
)
def test_tables_that_are_none_are_refused(
    dims: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError, match="of the table are"):
        TabledInversion(dims=dims, seconds=seconds)


@given(st.lists(st.dictionaries(st.integers(1, 9), st.floats(1e-6, 1.0)), min_size=1, max_size=5))
def test_ranks_agree_whatever_they_measured(samples: list[dict[int, float]]) -> None:
    agreed = slowest(samples)
    assert slowest(reversed(samples)) == agreed
    assert all(agreed[dim] >= seconds for measured in samples for dim, seconds in measured.items())


def test_every_kind_of_cost_can_stand_for_another() -> None:
    costs: list[InversionCost] = [
        ExponentialInversion(alpha_s=1.0, beta_per_row=0.0),
        PolynomialInversion(constant_s=1.0, square_s=0.0, cube_s=0.0),
        TabledInversion(dims=(1, 2), seconds=(1.0, 1.0)),
    ]
    assert [cost.time_s(2) for cost in costs] == [1.0, 1.0, 1.0]


messages = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100)), min_size=1, max_size=10)


@given(messages, st.floats(0, 1))
def test_a_channel_lies_between_messages_in_sequence_and_bare_bytes(
    messages: list[tuple[float, int]], part: float
) -> None:
    link = LinkCost(alpha_s=0.5, beta_s_per_byte=0.01)
    in_sequence, overlapping, between = (
        Channel(link=link, gap_s=gap_s).last_arrival_s(messages)
        for gap_s in (link.alpha_s, 0.0, part * link.alpha_s)
    )
    assert overlapping - 1e-9 <= between <= in_sequence + 1e-9
    last_ready_s = max(ready_s for ready_s, _ in messages)
    bytes_s = 0.01 * sum(num_bytes for _, num_bytes in messages)
    assert max(last_ready_s, bytes_s) + link.alpha_s <= overlapping + 1e-9
    assert in_sequence <= last_ready_s + bytes_s + link.alpha_s * len(messages) + 1e-9


def test_a_gap_is_a_part_of_alpha() -> None:
    with pytest.raises(ConfigError, match="gap_s is 2.0"):
        Channel(link=LinkCost(alpha_s=1.0, beta_s_per_byte=0.0), gap_s=2.0)
