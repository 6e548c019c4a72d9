"""Options that change with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import ConfigError
from offbeat.kfac.callback import KFACCallback
from offbeat.kfac.curvature import StepsApart


def test_values_are_held_or_lie_between_two_points() -> None:
    points = ((10, 4.0), (20, 1.0))
    for between, half in (("hold", 4.0), ("linear", 2.5), ("geometric", 2.0)):
        schedule = offbeat.Schedule(points, between=between)  # type: ignore[arg-type]
        assert [schedule(step) for step in (0, 10, 15, 20, 99)] == [4.0, 4.0, half, 1.0, 1.0]


@pytest.mark.parametrize(
    ("points", "between", "said"),
    [
        ((), "hold", "ascending steps"),
        (((5, 1.0), (5, 2.0)), "hold", "ascending steps"),
        (((-1, 1.0),), "hold", "ascending steps"),
        (((0, float("nan")),), "hold", "must be finite"),
        (((0, 1.0), (9, 0.0)), "geometric", "greater than 0"),
        (((0, 1.0),), "cubic", "between must be"),
    ],
)
def test_what_makes_no_schedule_is_refused(points: Any, between: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offbeat.Schedule(points, between=between)


def test_an_interval_that_grows_is_counted_from_step_to_step() -> None:
    interval = offbeat.Schedule(((0, 2), (5, 4)))
    steps = StepsApart("factor_interval", interval)
    assert [step for step in range(20) if steps.index(step) is not None] == [0, 2, 4, 6, 10, 14, 18]
    assert steps.index(14) == 5
    constant, same = (StepsApart("factor_interval", each) for each in (3, lambda step: 3.0))
    assert [constant.index(step) for step in range(10)] == [same.index(step) for step in range(10)]


@pytest.mark.parametrize("option", ["damping", "kl_clip", "factor_interval", "inverse_interval"])
def test_a_schedule_with_a_value_that_is_not_allowed_is_refused_before_training(
    option: str,
) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be .*got -0.1 of its schedule at step 7"):
        offbeat.SPDKFAC(**{option: offbeat.Schedule(((0, 5.0), (7, -0.1)))})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option} must be .* of its schedule at step 0"):
        offbeat.SPDKFAC(**{option: lambda step: -0.1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option} must be .*got None of its schedule at step 0"):
        offbeat.SPDKFAC(**{option: lambda step: None})  # type: ignore[arg-type]


def trained(num_steps: int, **options: Any) -> tuple[list[torch.Tensor], KFACCallback, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    with offbeat.attach(net, optimizer, offbeat.SPDKFAC(**options)) as session:
        for _ in range(num_steps):
            x = torch.randn(5, 4, generator=generator).double()
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        (part,) = (part for part in session.callbacks if isinstance(part, KFACCallback))
        return [p.detach().clone() for p in net.parameters()], part, session.state_dict()


def test_a_function_returns_below_zero_only_later_and_the_step_that_asks_says_so() -> None:
    with pytest.raises(ConfigError, match=r"damping must be .*got -1.0 of its schedule at step 4"):
        trained(5, damping=lambda step: 0.1 if step < 3 else -1.0)


def test_each_step_is_that_of_its_own_numbers() -> None:
    """Constant schedules are numbers, and with others it is the later numbers that count later."""

    def always(value: float) -> Callable[[int], float]:
        return lambda step: value

    numbers: dict[str, Any] = {
        "damping": 0.1,
        "kl_clip": 1e-3,
        "factor_interval": 2,
        "inverse_interval": 4,
    }
    expected, _, _ = trained(9, **numbers)
    found, _, _ = trained(9, **{name: always(value) for name, value in numbers.items()})
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    for name, later in (("damping", 0.5), ("kl_clip", 1e-5)):
        schedule = offbeat.Schedule(((0, numbers[name]), (8, later)))
        changed, _, _ = trained(9, **(numbers | {name: schedule}))
        assert not torch.equal(changed[0], expected[0])
        before, _, _ = trained(8, **(numbers | {name: schedule}))
        for mine, theirs in zip(before, trained(8, **numbers)[0], strict=True):
            assert torch.equal(mine, theirs)
