"""A callback that takes part in the first steps only: until then nothing tells it from its inner
one, and afterwards nothing reaches that.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from offbeat.averaging.periodic import StartPhase
from offbeat.callbacks.callback import EVENTS, Callback

PUBLIC = [
    name
    for name, member in vars(Callback).items()
    if inspect.isfunction(member) and not name.startswith("_")
]
OF_ITS_OWN = {"state_dict", "load_state_dict"}


def listening() -> tuple[Callback, list[str]]:
    """A callback that overrides every method, and the names of those that were called."""
    heard: list[str] = []

    def note(name: str) -> Any:
        def call(self: Callback, *args: Any, **kwargs: Any) -> Any:
            heard.append(name)
            return {} if name == "state_dict" else name

        return call

    methods = {name: note(name) for name in PUBLIC}
    return type("Listening", (Callback,), {"state_key": "listening", **methods})(), heard


def call(part: Callback, name: str) -> Any:
    parameters = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
    return getattr(part, name)(**dict.fromkeys(parameters))


@pytest.mark.parametrize("name", sorted({*PUBLIC} - OF_ITS_OWN))
def test_until_its_end_it_hands_everything_on_and_answers_as_the_inner_one_does(name: str) -> None:
    inner, heard = listening()
    phase = StartPhase(inner, num_steps=2)
    answer = call(phase, name)
    assert heard == [name]
    assert answer in (name, None)
    assert (answer == name) == (name != "on_after_step")


def test_after_its_last_step_the_inner_one_is_closed_and_hears_nothing_more() -> None:
    inner, heard = listening()
    phase = StartPhase(inner, num_steps=2)
    phase.on_after_step()
    phase.on_after_step()
    assert heard == ["on_after_step", "on_after_step", "counters", "close"]
    for event in EVENTS:
        call(phase, event)
    assert len(heard) == 4
    assert phase.counters() == "counters"  # those that it had


def test_two_of_them_have_states_of_their_own() -> None:
    class Other(Callback):
        state_key = "other"

    one, two = StartPhase(listening()[0], num_steps=1), StartPhase(Other(), num_steps=1)
    assert one.state_key != two.state_key
    assert one.state_dict() == two.state_dict() == {"replicated": {"num_left": 1}}
