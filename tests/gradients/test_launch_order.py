"""Whatever is ready first, messages are launched in the order that all ranks share."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from offbeat.gradients.exchange import LaunchKey, LaunchOrder

ORDER: list[LaunchKey] = [
    ("factors", 0),
    ("factors", 1),
    ("gradients", 0),
    ("factors", 2),
    ("gradients", 1),
]


@given(st.permutations(ORDER))
def test_messages_begin_in_order_whatever_is_ready_first(ready: list[LaunchKey]) -> None:
    begun: list[LaunchKey] = []
    order = LaunchOrder()
    order.follow(ORDER)
    for key in ready:
        order.launch(key, partial(begun.append, key))
    assert begun == ORDER


def test_what_is_not_in_the_order_begins_at_once() -> None:
    begun: list[int] = []
    order = LaunchOrder()
    order.launch(("gradients", 0), partial(begun.append, 0))
    order.follow([("factors", 0), ("gradients", 0)])
    order.launch(("gradients", 0), partial(begun.append, 1))
    assert begun == [0]
    order.launch(("factors", 0), partial(begun.append, 2))
    order.launch(("gradients", 0), partial(begun.append, 3))
    assert begun == [0, 2, 1, 3]
