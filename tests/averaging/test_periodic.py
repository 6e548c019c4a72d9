"""`PeriodicAverage` with another schedule, codec or rule than the usual ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typing_extensions import override

import offbeat
from offbeat import TopKCodec, WeightCodec
from offbeat.averaging.adaptive_period import AdaptivePeriod
from offbeat.averaging.outer import OuterOptimizer
from offbeat.averaging.periodic import (
    AveragingSchedule,
    Drift,
    Everyone,
    GrowingPeriod,
    MeanOfAll,
    PeriodicAverage,
    WeightExchange,
    coded_changes,
)
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.value_codecs import ValueCodec, WireValues
from offbeat.errors import CheckpointError, ConfigError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.weights.model_weights import ModelWeights
from thread_support.nets import make_model, parameters_of, step_of, trained
from thread_support.world import ThreadDriver, results_of, session_on


class Halves(ValueCodec):
    """Multiples of 1/2 alone, up to 4, in 4 bits."""

    code, bits = 131, 4

    @override
    def encode(self, values: NDArray[np.floating]) -> WireValues:
        codes = (np.round(2 * values) + 8).astype(np.uint8)
        codes = np.append(codes, np.zeros(codes.size % 2, np.uint8))
        return codes[::2] | codes[1::2] << 4

    @override
    def decode(self, coded: NDArray[np.uint8], count: int) -> NDArray[np.floating]:
        codes = np.stack([coded & 15, coded >> 4], axis=1).reshape(-1)[:count]
        return (codes.astype(np.float32) - 8) / 2


HALVES = WeightCodec(density=1.0, entries=TopKCodec(values=Halves()))


class OnSteps(AveragingSchedule):
    """After the steps that are named, and remembers how many of them are over."""

    measures_drift = True

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    @override
    def initial_state(self) -> Mapping[str, float]:
        return {"num": 0}

    @override
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        return 1 if self.steps[int(state["num"]) :][:1] == (num_steps,) else num_steps + 1

    @override
    def after_average(self, state: Mapping[str, float], drift: Drift) -> Mapping[str, float]:
        assert drift == (0.0, 1.0), "a rank alone is where the mean is"
        return {"num": state["num"] + 1}


@dataclass(frozen=True, kw_only=True)
class Composed(AveragingStrategy):
    """A periodic average of the objects that are given."""

    name = "composed"
    schedule: AveragingSchedule = GrowingPeriod(1)  # noqa: RUF009 - it holds no state
    codec: WeightCodec | None = HALVES

    @override
    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        peers = Everyone(context.driver, context.new_stream())
        rule = OuterOptimizer(context.parameters, make=partial(torch.optim.SGD, lr=1.0))
        changes = coded_changes(context.parameters, self.codec, peers)
        mean = MeanOfAll(weights, peers, changes=changes, optimizer=context.optimizer, rule=rule)
        average = PeriodicAverage(mean, self.schedule)
        made.append(average)
        return [average]


made: list[PeriodicAverage] = []


def train(
    strategy: AveragingStrategy, steps: Sequence[float], state: Any = None
) -> tuple[torch.nn.Linear, Any]:
    """In a world of one: the weight begins with 0, and each step adds one of `steps`."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with offbeat.attach(net, optimizer, strategy, finish="keep") as session:
        if state is not None:
            session.load_state_dict(state)
        for step in steps:
            net.weight.grad = torch.full_like(net.weight, -step)
            optimizer.step()
        return net, copy.deepcopy(session.state_dict())


def test_a_codec_that_drops_something_is_given_changes_and_its_rest_arrives_later() -> None:
    net, state = train(Composed(), [0.75, 0.75, 0.125])
    # 0.75 is sent as 1.0, which leaves -0.25; then 0.75 - 0.25 as 0.5; then 0.125 as 0.
    assert net.weight.item() == 1.5
    (owed,) = state["callbacks"]["periodic_average"]["additive"].values()
    assert net.weight.item() + owed.item() == 0.75 + 0.75 + 0.125


def test_the_anchor_is_where_the_last_average_left_the_weights() -> None:
    net, _ = train(Composed(schedule=OnSteps(1), codec=None), [2.0, 3.0])
    assert net.weight.item() == 5.0
    mean = made[-1].exchange
    assert isinstance(mean, MeanOfAll)
    assert mean.rule.anchor["weight"].item() == 2.0


def test_weights_are_averaged_after_the_steps_of_the_schedule_and_no_others() -> None:
    train(Composed(schedule=OnSteps(2, 3, 7)), [1.0] * 6)
    assert made[-1].counters()["exchanges"] == 2


def test_what_a_schedule_remembers_is_resumed() -> None:
    strategy = Composed(schedule=OnSteps(2, 3, 7))
    _, state = train(strategy, [1.0] * 4)
    train(strategy, [1.0] * 2, state)
    assert made[-1].counters()["exchanges"] == 2
    train(strategy, [1.0] * 3, state)
    assert made[-1].counters()["exchanges"] == 3


def test_a_state_that_does_not_say_when_the_last_average_was_follows_the_schedule() -> None:
    strategy = Composed(schedule=GrowingPeriod(4, warmup=2), codec=None)
    _, state = train(strategy, [1.0] * 7)
    saved = state["callbacks"]["periodic_average"]["replicated"]
    assert saved.pop("averaged_at_step") == 5
    train(strategy, [], state)
    assert made[-1].state_dict()["replicated"]["averaged_at_step"] == 5


def test_a_run_goes_on_with_the_start_phase_that_it_was_saved_with() -> None:
    """By another one ranks would exchange neither gradients nor weights for a while."""

    def begun(driver: ThreadDriver) -> tuple[dict[str, Any], dict[str, Any]]:
        model, strategy = make_model(), offbeat.LocalSGD(period=2, start_step=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy) as session:
            step_of(model, optimizer, driver.rank, 0)
            return copy.deepcopy(model.state_dict()), session.state_dict()

    saved = results_of(2, begun)

    def resumed(driver: ThreadDriver) -> list[torch.Tensor]:
        model, strategy = make_model(), offbeat.LocalSGD(period=2, start_step=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, strategy) as session:
            model.load_state_dict(saved[driver.rank][0])
            session.load_state_dict(saved[driver.rank][1])
            for step in range(1, 4):  # one of the phase, and a period
                step_of(model, optimizer, driver.rank, step)
            return parameters_of(model, optimizer)

    for one, other in zip(*results_of(2, resumed), strict=True):
        assert torch.equal(one, other)


def test_what_is_owed_fades_by_the_decay() -> None:
    codec = WeightCodec(density=1.0, decay=0.5, entries=HALVES.entries)
    net, state = train(Composed(codec=codec), [0.75, 1.0])
    # 0.75 is sent as 1.0, which leaves -0.25, of which -0.125 is left; then 0.875 is sent as 1.0.
    assert net.weight.item() == 2.0
    (owed,) = state["callbacks"]["periodic_average"]["additive"].values()
    assert owed.item() == -0.125 / 2


def test_the_state_of_another_codec_is_refused() -> None:
    _, state = train(Composed(), [1.0])
    with pytest.raises(CheckpointError, match="another model or codec"):
        train(Composed(codec=None), [], state)


def test_a_period_grows_where_ranks_stay_near_and_shrinks_where_they_do_not() -> None:
    schedule = AdaptivePeriod(first=4, num_measured=2)
    state = schedule.initial_state()
    periods = []
    for drift in [(2.0, 1.0), (4.0, 1.0), (3.0, 1.0), (2.0, 1.0), (2.0, 0.1), (0.0, 0.1)]:
        state = schedule.after_average(state, Drift(*drift))
        periods.append(schedule.period(10, state))
    # The usual drift is 3 times the learning rate.
    assert periods == [4, 4, 4, 5, 4, 5]


def test_averages_at_a_rate_of_zero_are_not_measured() -> None:
    schedule = AdaptivePeriod(first=4, num_measured=2)
    state = schedule.initial_state()
    for drift in [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (2.0, 1.0), (4.0, 1.0), (3.0, 1.0)]:
        state = schedule.after_average(state, Drift(*drift))
        assert schedule.period(10, state) == 4


class Watching(AveragingSchedule):
    measures_drift = True

    def __init__(self) -> None:
        self.rates: list[float] = []

    @override
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        return 1

    @override
    def after_average(self, state: Mapping[str, float], drift: Drift) -> Mapping[str, float]:
        self.rates.append(drift.lr)
        return state


def test_of_several_rates_the_highest_counts() -> None:
    """The first group often is one that rests."""
    net, schedule = torch.nn.Linear(2, 2), Watching()
    groups = [{"params": [net.weight], "lr": 0.0}, {"params": [net.bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    with offbeat.attach(net, optimizer, offbeat.LocalSGD(period=schedule)):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    assert schedule.rates == [0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "sparselocos"}, "did you mean 'sparseloco'"),
        ({"codec": offbeat.TopKCodec()}, "allowed is WeightCodec"),
        ({"period": "adaptiv"}, "did you mean 'adaptive'"),
        ({"period": 0}, "at least 1"),
        ({"period": "adaptive", "warmup": 3}, "says it itself"),
    ],
)
def test_objects_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offbeat.LocalSGD(**options)


@pytest.mark.parametrize("options", [{"density": 0.0}, {"density": 2.0}, {"decay": 0.0}])
def test_a_codec_of_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"in \(0, 1\]"):
        offbeat.WeightCodec(**({"density": 0.5} | options))


@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.LocalSGD(period=2, warmup=0, codec="linear8"),
        offbeat.LocalSGD(period=2, exchange="1x1"),
        offbeat.DEFSGD(ratio=4),
        offbeat.Crossbow(alpha=0.3, codec="linear8"),
    ],
    ids=str,
)
def test_a_parameter_with_gaps_in_memory_moves_as_one_without(strategy: Any) -> None:
    def model_of(rank: int, *, has_gaps: bool) -> torch.nn.Module:
        model = make_model()
        weight = model[2].weight.detach().repeat(1, 2)[:, :6]
        model[2].weight = torch.nn.Parameter(weight if has_gaps else weight.contiguous())
        return model

    with_gaps, without = (
        trained(
            3,
            strategy,
            8,
            model_of=partial(model_of, has_gaps=has_gaps),
            optimizer_of=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
            held=parameters_of,
        )
        for has_gaps in (True, False)
    )
    for one, other in zip(with_gaps, without, strict=True):
        torch.testing.assert_close(one, other)


class LeavesAtBackward(WeightExchange):
    """As D-PSGD's weights do."""

    state_key = "leaves_at_backward"
    leaves_at = "backward"

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    @override
    def launch(self, number: int) -> None:
        self.did.append("launch")

    @override
    def merge(self) -> None:
        self.did.append("merge")

    @override
    def close(self) -> None:
        self.did.append("close")


def test_what_has_left_for_a_step_that_is_not_taken_is_waited_for_by_nobody() -> None:
    """One rank alone may run a backward pass after the last step, as for an evaluation."""
    exchange = LeavesAtBackward()
    average = PeriodicAverage(exchange, GrowingPeriod(1))
    average.on_backward_begins(synchronised=True)
    average.on_before_step()
    average.on_after_step()
    average.on_backward_begins(synchronised=True)
    average.on_finish()
    assert exchange.did == ["launch", "merge", "launch", "close"]
