"""What is owed follows the learning rate, and the watch at residuals follows both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch

import offbeat
from offbeat.errors import OffbeatWarning
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.group_ranges import GroupRanges, rates_of
from offbeat.gradients.owed_rate import OwedRate
from offbeat.gradients.residual_watch import LOOK_INTERVAL, ResidualWatch


def four_parameters() -> tuple[Bucket, torch.optim.Optimizer]:
    """Two elements each: one in either group, one in the second group again, one in none."""
    named = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abcd"}
    a, b, c, _ = named.values()
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b, c], "lr": 0.1}])
    return Bucket(named, [0, 1, 2, 3]), optimizer


def follower(bucket: Bucket, optimizer: torch.optim.Optimizer) -> OwedRate:
    return OwedRate(
        GroupRanges(bucket, optimizer),
        rates=lambda: rates_of(optimizer),
        leads_to_plain_steps=lambda: True,
    )


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def test_each_group_has_its_own_rate() -> None:
    """Rates that part, cross and meet again; and a group that comes later."""
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    assert owed.follow(residual) == 1.0
    set_rates(optimizer, [0.1, 0.05])
    assert owed.follow(residual) == 2.0
    assert residual.tolist() == [1, 1, 2, 2, 2, 2, 1, 1]
    set_rates(optimizer, [0.05, 0.1])
    assert owed.follow(residual) == 2.0
    assert residual.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    set_rates(optimizer, [0.1, 0.1])
    assert owed.follow(residual) == 1.0
    assert residual.tolist() == [1, 1, 1, 1, 1, 1, 1, 1]
    optimizer.add_param_group({"params": [bucket.parameters[3]], "lr": 0.2})
    set_rates(optimizer, [0.1, 0.1, 0.2])
    assert owed.follow(residual) == 1.0
    set_rates(optimizer, [0.1, 0.1, 0.1])
    assert owed.follow(residual) == 2.0
    assert residual.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]


def test_a_rate_of_zero_is_passed_over() -> None:
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    factors = []
    for rates in ([0.0, 0.4], [0.4, 0.0], [0.0, 0.2], [0.2, 0.2]):
        set_rates(optimizer, rates)
        factors.append(owed.follow(residual))
    assert factors == [1.0, 1.0, 2.0, 2.0]
    assert residual.tolist() == [2, 2, 2, 2, 2, 2, 1, 1]


def test_a_state_of_fewer_groups_may_be_loaded() -> None:
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    owed.load({"group_rate_0": 0.2})
    assert owed.follow(residual) == 2.0
    assert residual.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    again = follower(bucket, optimizer)
    again.load(owed.state())
    assert again.follow(residual) == 1.0


def test_what_has_grown_by_itself_is_no_runaway() -> None:
    said = list[str]()
    watch, residual = ResidualWatch(said.append, rank=0, clips=False), torch.ones(1000)
    for step in range(200):
        factor = 50.0 if step == 25 else 1.0
        watch.grow(factor)
        # What was owed goes in turns, a hundredth of it at a time.
        size = 1 + 49 * 0.99 ** (step - 25) if step >= 25 else 1.0
        watch.after_exchange(residual * size, 10, sent_norm=size)
    assert not said


def test_a_falling_rate_does_not_blind_the_watch() -> None:
    """Over a run the rate falls to a thousandth; what is owed is never older than a few steps."""
    said = list[str]()
    watch, residual = ResidualWatch(said.append, rank=0, clips=False), torch.ones(1000)
    for _ in range(50 * LOOK_INTERVAL):
        watch.grow(1000 ** (1 / (50 * LOOK_INTERVAL)))
        watch.after_exchange(residual, 100, sent_norm=1.0)
    assert not said
    watch.after_exchange(residual, 100, sent_norm=30.0)
    assert len(said) == 1
    for _ in range(LOOK_INTERVAL):
        watch.after_exchange(30 * residual, 100, sent_norm=1.0)
    assert len(said) == 2


def rates_of_sgd(momentum: float) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    "make",
    [
        rates_of_sgd(0.0),
        rates_of_sgd(0.9),
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    ],
    ids=["SGD", "momentum", "AdamW"],
)
def test_a_session_whose_units_change_warns_of_nothing_but_runaways(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
) -> None:
    """Adam's scaling makes small gradients large, momentum at once makes them ten times as large,
    and a rate that falls to a hundredth multiplies what is owed.
    """
    net = torch.nn.Linear(40, 25, bias=False)
    optimizer = make(net)
    strategy = offbeat.TopK(density=0.05, warmup=((0.2, 15),), dense_below=0)
    draw = torch.Generator().manual_seed(0)

    def step(size: float) -> None:
        gradient = size * torch.randn(net.weight.shape, generator=draw)
        (net.weight * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with offbeat.attach(net, optimizer, strategy):
        with warnings.catch_warnings():
            warnings.simplefilter("error", OffbeatWarning)
            for number in range(60):
                optimizer.param_groups[0]["lr"] = 1e-3 if number < 35 else 1e-5
                step(1e-3)
            for _ in range(100):
                step(1e-3)
        if isinstance(optimizer, torch.optim.SGD):  # Adam's scaling makes it a usual one
            with pytest.warns(OffbeatWarning, match="has sent entries far larger than ever"):
                step(1e3)


def test_ranges_with_equal_options_are_one() -> None:
    bucket, optimizer = four_parameters()
    places = GroupRanges(bucket, optimizer)

    def found(options: list[str], default: str) -> list[tuple[int, int, str]]:
        return [
            (here.start, here.stop, option)
            for here, option in places.merged(options, default=default)
        ]

    assert found(["x", "y"], "x") == [(0, 2, "x"), (2, 6, "y"), (6, 8, "x")]
    assert found(["y", "x"], "x") == [(0, 2, "y"), (2, 8, "x")]
    assert found(["x", "x"], "y") == [(0, 6, "x"), (6, 8, "y")]
    assert found(["x", "x"], "x") == [(0, 8, "x")]
