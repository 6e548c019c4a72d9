"""What is owed follows the learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.parameter_groups import GroupRanges, OwedRate


def four_parameters() -> tuple[Bucket, torch.optim.Optimizer]:
    """Two elements each: one in either group, one in the second group again, one in none."""
    named = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abcd"}
    a, b, c, _ = named.values()
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b, c], "lr": 0.1}])
    return Bucket(named, [0, 1, 2, 3]), optimizer


def follower(bucket: Bucket, optimizer: torch.optim.Optimizer) -> OwedRate:
    return OwedRate(GroupRanges(bucket, optimizer), GradientTransform(optimizer))


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def test_each_group_has_its_own_rate() -> None:
    """Rates that part, cross and meet again; and a group that comes later."""
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    owed.follow(residual, torch.ones(8))
    set_rates(optimizer, [0.1, 0.05])
    owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [1, 1, 2, 2, 2, 2, 1, 1]
    set_rates(optimizer, [0.05, 0.1])
    owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    set_rates(optimizer, [0.1, 0.1])
    owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [1, 1, 1, 1, 1, 1, 1, 1]
    optimizer.add_param_group({"params": [bucket.parameters[3]], "lr": 0.2})
    set_rates(optimizer, [0.1, 0.1, 0.2])
    owed.follow(residual, torch.ones(8))
    set_rates(optimizer, [0.1, 0.1, 0.1])
    owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]


def test_a_rate_of_zero_is_passed_over() -> None:
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    for rates in ([0.0, 0.4], [0.4, 0.0], [0.0, 0.2], [0.2, 0.2]):
        set_rates(optimizer, rates)
        owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [2, 2, 2, 2, 2, 2, 1, 1]


def test_a_group_at_rest_owes_nothing_of_its_gradients_unless_all_are() -> None:
    bucket, optimizer = four_parameters()
    owed = follower(bucket, optimizer)
    found = []
    for rates in ([0.0, 0.1], [0.1, 0.0], [0.0, 0.0]):
        set_rates(optimizer, rates)
        owed.follow(torch.zeros(8), gradient := torch.ones(8))
        found.append(gradient.tolist())
    assert found == [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 1, 1], [1] * 8]


def test_a_state_of_fewer_groups_may_be_loaded() -> None:
    bucket, optimizer = four_parameters()
    owed, residual = follower(bucket, optimizer), torch.ones(8)
    owed.load({"group_rate_0": 0.2})
    owed.follow(residual, torch.ones(8))
    assert residual.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    again = follower(bucket, optimizer)
    again.load(owed.state())
    again.follow(residual, torch.ones(8))
    assert residual.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]


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
