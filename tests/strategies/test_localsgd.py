"""What LocalSGD says of itself when it begins, and how it is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from typing_extensions import override

import offbeat
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.errors import ConfigError
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import build_strategy, options_of, parse_spec, strategy_values
from thread_support.world import ThreadDriver, results_of, session_on


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "said"),
    [
        (offbeat.LocalSGD(period=7, warmup=20), 2, "only from step 140 on after every 7"),
        (offbeat.LocalSGD(period=7, warmup=0), 2, None),
        (offbeat.LocalSGD(period=1), 2, None),
        (offbeat.LocalSGD(outer="diloco"), 2, None),
        (offbeat.LocalSGD(), 1, None),
    ],
)
def test_a_period_that_grows_is_announced(
    strategy: offbeat.LocalSGD, num_ranks: int, said: str | None
) -> None:
    notices = Notices(rank=0)
    context = Context(
        parameters=dict(torch.nn.Linear(2, 1).named_parameters()),
        driver=SimpleNamespace(rank=0, world_size=num_ranks, name_of=int),  # type: ignore[arg-type]  # it builds
        new_stream=stream_counter(),
        notices=notices,
    )
    strategy.build(context)
    assert (notices.kept == []) if said is None else (said in notices.kept[0])


@pytest.mark.parametrize(
    ("strategy", "make", "is_said"),
    [
        (offbeat.LocalSGD(optimizer_state="local"), torch.optim.AdamW, True),
        (offbeat.LocalSGD(optimizer_state={"exp_avg": 2}), torch.optim.AdamW, True),
        (offbeat.LocalSGD(), torch.optim.AdamW, False),  # squares are corrected
        (offbeat.LocalSGD(outer="diloco"), torch.optim.AdamW, False),  # has a rate of its own
        (offbeat.LocalSGD(optimizer_state="local"), torch.optim.SGD, False),
        (offbeat.WAGMA(), torch.optim.Adam, True),
        (offbeat.WAGMA(), torch.optim.SGD, False),
    ],
)
def test_steps_that_noise_makes_short_are_announced(
    strategy: Strategy, make: type[torch.optim.Optimizer], is_said: bool
) -> None:
    net = torch.nn.Linear(2, 1)

    def job(driver: ThreadDriver) -> list[str]:
        mine = torch.nn.Linear(2, 1)
        mine.load_state_dict(net.state_dict())
        optimizer = make(mine.parameters(), lr=0.1)  # type: ignore[call-arg]  # all of them have it
        with session_on(driver, mine, optimizer, strategy) as session:
            return session.notices

    said = [one for one in results_of(4, job)[0] if "4 times the noise" in one]
    assert bool(said) is is_said
    assert all("1.4 to 2 times as high" in one for one in said)


class Quantised(torch.optim.SGD):
    """Keeps codes of a shape of their own."""

    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["codes"] = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("strategy", "num_said"),
    [
        (offbeat.LocalSGD(period=1), 1),
        (offbeat.LocalSGD(period=1, optimizer_state="local"), 0),
        (offbeat.AdaptiveSGD(mega_batch=1), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:no loader of this session feeds the run")
def test_a_state_that_cannot_be_averaged_is_said_once(
    strategy: offbeat.LocalSGD | offbeat.AdaptiveSGD, num_said: int
) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = Quantised(net.parameters(), lr=0.1, momentum=0.9)
    with offbeat.attach(net, optimizer, strategy) as session:
        for _ in range(3):
            net(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    said = [notice for notice in session.notices if "'codes' stay each rank's own" in notice]
    assert len(said) == num_said


def test_schedules_and_codecs_have_names_in_text() -> None:
    name, options = parse_spec("localsgd:period=adaptive:codec=sparseloco")
    assert build_strategy(name, options) == offbeat.LocalSGD(period="adaptive", codec="sparseloco")
    name, options = parse_spec("localsgd:optimizer_state=exp_avg=3+exp_avg_sq=6")
    in_text = build_strategy(name, options)
    as_mapping = offbeat.LocalSGD(optimizer_state={"exp_avg": 3, "exp_avg_sq": 6})
    assert isinstance(in_text, offbeat.LocalSGD)
    assert in_text.averages_state == as_mapping.averages_state
    assert build_strategy("localsgd", strategy_values(as_mapping)) == as_mapping
    shown = {option.name: option.allowed for option in options_of(offbeat.LocalSGD)}
    assert shown["period"] == "whole number of at least 1 | adaptive"
    assert shown["optimizer_state"] == "text | local | averaged | none"
    assert shown["codec"] == "linear8 | linear4 | e3m0 | sign | sparseloco | none"
    with pytest.raises(ConfigError, match=r"'sparse'; allowed is linear8 .* \| none"):
        build_strategy("localsgd", {"codec": "sparse"})
