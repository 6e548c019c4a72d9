"""What a bucket asks of its parameters' memory, and in which order messages are launched,
whatever is ready first.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.gradients.buckets import is_dense
from offbeat.gradients.exchange import LaunchKey, LaunchOrder


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(()), True),
    ],
    ids=["contiguous", "transposed", "channels last", "with gaps", "expanded", "scalar"],
)
def test_dense_is_what_decides_the_strides_of_a_gradient(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense
    weight = tensor.clone(memory_format=torch.preserve_format).requires_grad_()
    if dense:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.stride() == tensor.stride()


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


class Compared(tuple[str, int]):
    """A key that counts how often any of its kind is compared with another."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return super().__eq__(other)

    __hash__ = tuple.__hash__


def test_a_message_finds_its_place_without_a_search() -> None:
    begun: list[LaunchKey] = []
    order = LaunchOrder()
    order.follow([Compared(("factors", number)) for number in range(100)])
    keys = [Compared(("factors", number)) for number in reversed(range(100))]
    for key in keys:
        order.launch(key, partial(begun.append, key))
    assert Compared.comparisons <= 10 * len(keys)
    assert begun == keys[::-1]
