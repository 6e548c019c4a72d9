"""A part gets the events that it names, and no name is wrong without notice."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import offbeat
from offbeat.callbacks.callback import EVENTS, Callback
from offbeat.callbacks.context import Context
from offbeat.strategies.base import Strategy

ARGUMENTS: dict[str, Any] = {
    "num_samples": 3,
    "trains": True,
    "synchronised": True,
    "index": 1,
    "indices": [0, 1],
    "reason": "a test",
}


class Listen(Strategy):
    """A strategy of one callback."""

    name = "listen"

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def build(self, context: Context) -> list[Callback]:
        return [self._callback]


def listening_strategy() -> tuple[Strategy, list[str]]:
    """One whose callback overrides every event, and the events that it got."""
    heard: list[str] = []

    def note(name: str) -> Any:
        return lambda self, *args, **kwargs: heard.append(name)

    cls = type("Listening", (Callback,), {"state_key": "listening", **{n: note(n) for n in EVENTS}})
    return Listen(cls()), heard


def call(part: Callback, event: str) -> None:
    names = list(inspect.signature(getattr(Callback, event)).parameters)[1:]
    getattr(part, event)(**{name: ARGUMENTS[name] for name in names})


def test_an_event_that_does_not_exist_is_refused_when_the_class_is_defined() -> None:
    with pytest.raises(
        TypeError, match=r"on_before_setp is no event.*did you mean 'on_before_step'"
    ):
        type("Misspelt", (Callback,), {"on_before_setp": lambda self: None})


def test_private_helpers_and_other_methods_are_free() -> None:
    part = type("Free", (Callback,), {"_on_progress": lambda self: None, "once": lambda self: None})
    assert issubclass(part, Callback)


@pytest.mark.parametrize("event", EVENTS)
def test_a_part_may_ignore_every_event(event: str) -> None:
    call(Callback(), event)


def test_a_session_gives_the_events_of_a_step_in_order() -> None:
    listen, heard = listening_strategy()
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, listen) as session:
        session.weigh(2)
        net(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        session.finish()
    assert heard == [
        "on_batch_claimed",
        "on_parameters_needed",
        "on_forward_begins",
        "on_backward_begins",
        "on_gradient_ready",
        "on_gradient_ready",
        "on_backward_done",
        "on_before_step",
        "on_before_update",
        "on_after_step",
        "on_finish",
    ]
    heard.clear()
    with offbeat.attach(net, optimizer, listen):
        optimizer.step(lambda: net(torch.ones(2, 2)).sum().backward())
    assert heard[0] == "on_closure"
    assert heard[-3:] == ["on_before_update", "on_after_step", "on_finish"]
    assert "on_before_step" not in heard


def test_a_rank_rests_until_the_outermost_block_is_left() -> None:
    listen, heard = listening_strategy()
    net = torch.nn.Linear(2, 1)
    with offbeat.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), listen) as session:
        with session.resting():
            with session.resting():
                pass
            assert heard == ["on_rest"]
        assert heard == ["on_rest", "on_resume"]


@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_pass_says_whether_it_is_for_training(trains: bool) -> None:
    told: list[bool] = []

    class Forward(Callback):
        state_key = "forward"

        def on_forward_begins(self, *, trains: bool) -> None:
            told.append(trains)

    net = torch.nn.Linear(2, 1)
    with offbeat.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), Listen(Forward())):
        net.train(trains)
        net(torch.ones(2, 2))
        with torch.no_grad():
            net(torch.ones(2, 2))
    assert told == [trains, False]
