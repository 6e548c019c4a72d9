"""The strategies that torch ships."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.arithmetic.costs import LinkCost
from offbeat.codec.described_options import first_sentence
from offbeat.errors import ConfigError
from offbeat.run.recipes import SCRIPT_STRATEGIES, NoExchange
from offbeat.strategies import REGISTRY
from offbeat.strategies.by_name import strategy_values
from offbeat.transport.operations import AllReduceTensor
from offbeat_lab.attaching import attach_recipe
from offbeat_lab.config import Request, resolve, resolve_resume
from offbeat_lab.native import NATIVE, CommunicationMeter, Native, NativeSession
from offbeat_lab.native import session as native_session
from offbeat_lab.native.ddp import PostLocalSGD, PowerSGDHook
from offbeat_lab.options import RECIPES, build_strategy, strategy_options
from offbeat_lab.tasks import TASKS

# torch's own strategies as the command line sees them: named, listed, checked, and resumed only
# where torch allows it.


def test_they_stand_beside_offbeats_own_and_not_in_their_place() -> None:
    assert not NATIVE.keys() & REGISTRY.keys()
    assert RECIPES.keys() == NATIVE.keys() | SCRIPT_STRATEGIES.keys()
    assert all(kind.name == name for name, kind in NATIVE.items())


@pytest.mark.parametrize("name", NATIVE)
def test_each_can_be_listed_and_built_from_its_own_values(name: str) -> None:
    built = build_strategy(name, {})
    assert isinstance(built, Native)
    assert build_strategy(name, strategy_values(built)) == built
    assert len(first_sentence(type(built).__doc__)) > 20
    for option in strategy_options(name):
        assert option.help, f"option {option.name} is not documented"


def test_no_option_of_a_strategy_hides_behind_one_of_a_task() -> None:
    """`--set` gives options to the task first."""
    of_tasks = {option for task in TASKS.values() for option in task.options_type.model_fields}
    for name in RECIPES:
        assert not of_tasks & set(strategy_values(build_strategy(name, {})))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ddp-powersgd", {"rank": "0"}, "rank .*got .0.; allowed is .*at least 1"),
        ("ddp-powersgd", {"start_step": "1"}, "start_step .*got .1.; allowed is .*at least 2"),
        ("ddp-powersgd", {"rank": "low"}, "got 'low'; allowed is whole number"),
        ("ddp-powersgd", {"ranks": "1"}, "no option 'ranks'.*did you mean 'rank'"),
        ("post-localsgd", {"period": "0"}, "period .*got .0.; allowed is .*at least 1"),
        ("post-localsgd", {"start_step": "-1"}, "start_step .*got .-1.; allowed is .*at least 0"),
        ("ddpp", {}, "no strategy 'ddpp'.*did you mean 'ddp'"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategy(name, options)


@pytest.mark.parametrize("name", NATIVE)
def test_what_torch_does_not_let_anybody_save_is_not_resumed(name: str) -> None:
    stored = resolve(Request(task="digits", strategy=name, workers=2, steps=4))
    if NATIVE[name].resumable:
        assert resolve_resume(stored, Request(steps=8), steps_done=4, epochs_done=0).steps == 8
    else:
        with pytest.raises(
            ConfigError,
            match=f"{name} keeps state that torch does not let anybody save; start a new run",
        ):
            resolve_resume(stored, Request(steps=8), steps_done=4, epochs_done=0)


def test_state_that_would_be_lost_is_known() -> None:
    """Error feedback and the averager's count are the hooks' own; plain reductions keep nothing."""
    assert not PowerSGDHook.resumable
    assert not PostLocalSGD.resumable
    assert [name for name in NATIVE if NATIVE[name].resumable] == [
        "ddp",
        "ddp-fp16",
        "ddp-bf16",
    ]


def test_alone_leaves_the_model_and_the_network_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach_recipe(NoExchange(), model, optimizer, world_size=1)
    with attached.session as session:
        assert attached.module is attached.averaged_model() is model
        attached.backward(attached.module(torch.ones(1, 2)).sum())
        attached.optimizer.step()
        assert (session.stats.bytes_sent, session.stats.messages_sent, session.stats.wait_s) == (
            0,
            0,
            0.0,
        )
        assert session.take_ready_at_s() is None
        assert session.take_arrivals() == []


# The meter in torch's hooks: it counts as offbeat's own transport does, and knows waiting from
# computing.


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(native_session, "time", clock)
    return clock


@given(num_elements=st.integers(1, 1_000), world_size=st.integers(1, 9))
def test_dense_bytes_count_as_they_do_for_offbeat(num_elements: int, world_size: int) -> None:
    tensor = torch.zeros(num_elements)
    operation = AllReduceTensor(tensor)
    expected = operation.traffic(tensor, rank=0, world_size=world_size)
    meter = CommunicationMeter(world_size)
    meter.reduced(tensor.nbytes)
    assert (meter.bytes_sent, meter.messages_sent) == (expected.bytes_sent, expected.messages_sent)
    meter.reduced(tensor.nbytes, num_collectives=3)
    assert meter.messages_sent == 4 * expected.messages_sent


def hook(
    meter: CommunicationMeter,
    clock: Clock,
    channel: int,
    *,
    duration_s: float,
    num_bytes: int | None,
) -> None:
    """One call of a communication hook; None exchanges nothing."""
    begun_s = clock.now_s
    clock.sleep(duration_s)
    if num_bytes is not None:
        meter.reduced(num_bytes)
    meter.launched(begun_s, channel)


def test_a_step_is_encoding_in_the_hooks_and_waiting_after_the_last(clock: Clock) -> None:
    meter = CommunicationMeter(2)
    hook(meter, clock, 0, duration_s=0.25, num_bytes=100)
    clock.sleep(1.0)  # the backward pass goes on
    hook(meter, clock, 1, duration_s=0.5, num_bytes=100)
    clock.sleep(2.0)
    meter.backward_done()
    assert (meter.encode_s, meter.wait_s) == (0.75, 2.0)
    assert meter.take_ready_at_s() == 101.75
    assert meter.take_ready_at_s() is None
    arrivals = meter.take_arrivals()
    assert [(a.step, a.channel, a.operation, a.arrived_at_s, a.waited_s) for a in arrivals] == [
        (0, 0, "AllReduce", 100.0, 3.75),
        (0, 1, "AllReduce", 101.25, 2.5),
    ]
    assert meter.take_arrivals() == []


def test_a_backward_pass_that_exchanges_nothing_waits_for_nobody(clock: Clock) -> None:
    meter = CommunicationMeter(2)
    hook(meter, clock, 0, duration_s=0.25, num_bytes=None)
    clock.sleep(1.0)
    meter.backward_done()
    meter.backward_done()
    assert (meter.wait_s, meter.take_ready_at_s(), meter.take_arrivals()) == (0.0, None, [])


def test_an_average_after_a_local_step_is_what_was_waited_for(clock: Clock) -> None:
    meter = CommunicationMeter(2)
    for _ in range(2):
        hook(meter, clock, 0, duration_s=0.0, num_bytes=None)
        clock.sleep(1.0)
        meter.backward_done()
        begun_s = clock.now_s
        meter.reduced(100)
        clock.sleep(0.5)
        meter.waited(begun_s)
        assert meter.take_ready_at_s() == begun_s
    assert meter.wait_s == 1.0


def test_an_imitated_link_carries_one_message_after_the_other(clock: Clock) -> None:
    """4 ranks send 1.5 n bytes each in 6 messages; this link takes 1 ms a message and 1 kB a
    second.
    """
    meter = CommunicationMeter(4, LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-3))
    for channel in range(2):
        hook(meter, clock, channel, duration_s=0.0, num_bytes=1_000)
    assert clock.now_s == 100.0  # the backward pass goes on meanwhile
    clock.sleep(2.0)
    assert (meter.bytes_sent, meter.messages_sent) == (3_000, 12)
    meter.backward_done()
    assert clock.now_s == pytest.approx(103.012)
    assert (meter.encode_s, meter.wait_s) == (0.0, pytest.approx(3.012))
    clock.sleep(10.0)
    meter.reduced(0)
    meter.hold_back()
    assert clock.now_s == pytest.approx(113.018)  # an idle link has not saved anything up


def test_without_an_imitated_link_nothing_is_held_back(clock: Clock) -> None:
    meter = CommunicationMeter(4)
    hook(meter, clock, 0, duration_s=0.0, num_bytes=10**9)
    meter.backward_done()
    meter.reduced(10**9)
    meter.hold_back()
    assert clock.now_s == 100.0


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another, as torch's for post-local SGD is."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optim.step()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapping])
def test_steps_are_counted_until_it_is_closed(wrap: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    meter = CommunicationMeter(2)
    with NativeSession(model, optimizer, meter) as session:
        for _ in range(3):
            session.module(torch.ones(1, 2)).sum().backward()
            session.optimizer.step()
        session.meter.reduced(1_000)
        stats = session.stats
        assert (stats.steps, stats.exchanges, stats.bytes_sent, stats.messages_sent) == (
            3,
            3,
            1_000,
            2,
        )
        assert (stats.wait_s, stats.encode_s, stats.skipped_steps) == (0.0, 0.0, 0)
        assert (session.notices, session.state_dict()) == ([], {})
    optimizer.step()
    assert session.stats.steps == 3
