"""Whatever is ready first, messages begin in the order that all ranks share."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac.exchange.launch_order import Turns
from offbeat.kfac.planning.factor_plan import Turn

ORDER: list[Turn] = [
    ("factors", 0),
    ("factors", 1),
    ("gradients", 0),
    ("factors", 2),
    ("gradients", 1),
]


@given(st.permutations(ORDER))
def test_messages_begin_in_order_whatever_is_ready_first(ready: list[Turn]) -> None:
    begun: list[Turn] = []
    turns = Turns()
    turns.set(ORDER)
    for turn in ready:
        turns.take(turn, partial(begun.append, turn))
    assert begun == ORDER


def test_what_is_not_in_the_order_begins_at_once() -> None:
    begun: list[int] = []
    turns = Turns()
    turns.take(("gradients", 0), partial(begun.append, 0))
    turns.set([("factors", 0), ("gradients", 0)])
    turns.take(("gradients", 0), partial(begun.append, 1))
    assert begun == [0]
    turns.take(("factors", 0), partial(begun.append, 2))
    turns.take(("gradients", 0), partial(begun.append, 3))
    assert begun == [0, 2, 1, 3]
