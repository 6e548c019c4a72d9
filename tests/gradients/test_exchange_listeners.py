"""Listeners hear of sealed buckets in order, and then how the exchange of gradients was settled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typing_extensions import override

from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.errors import NonFiniteError
from offbeat.gradients.buckets import make_buckets
from offbeat.gradients.exchange import (
    ExchangeListener,
    GradientExchange,
    LaunchOrder,
)
from offbeat.gradients.reductions import DenseReduction, WeightedGradient
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank


class Noting(ExchangeListener):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    @override
    def on_bucket_sealed(self, number: int, *, is_last: bool, failed: bool) -> None:
        self.heard.append(("sealed", number, is_last, failed))

    @override
    def on_exchange_settled(self, *, good: bool) -> None:
        self.heard.append(("settled", good))


class NotingReduction(DenseReduction):
    """Notes when it is launched, in the list of a listener."""

    heard: list[tuple[object, ...]]

    @override
    def launch(self, given: WeightedGradient) -> None:
        self.heard.append(("launched",))
        super().launch(given)


def made(
    launch_order: LaunchOrder | None = None,
) -> tuple[nn.Module, GradientExchange, Noting]:
    """A model of two parameters, each with a bucket of its own."""
    model = nn.Linear(2, 3)
    listener = Noting()
    pairs = []
    for bucket in make_buckets(dict(model.named_parameters()), cap_bytes=1):
        reduction = NotingReduction(bucket, SingleRank(), Stream(1))
        reduction.heard = listener.heard
        pairs.append((bucket, reduction))
    context = Context(
        parameters=dict(model.named_parameters()),
        driver=SingleRank(),
        new_stream=stream_counter(),
        notices=Notices(0),
    )
    exchange = GradientExchange(context, pairs, launch_order=launch_order)
    exchange.add_listener(listener)
    return model, exchange, listener


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_each_bucket_is_sealed_before_it_is_launched_and_then_all_is_settled() -> None:
    model, exchange, listener = made()
    fill(model, 1.0)
    exchange.on_join()
    assert listener.heard == [
        ("sealed", 0, False, False),
        ("launched",),
        ("sealed", 1, True, False),
        ("launched",),
        ("settled", True),
    ]


def test_a_step_that_is_skipped_is_settled_as_bad_also_when_it_is_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.gradients.exchange.MAX_SKIPPED_STEPS", 0)
    model, exchange, listener = made()
    fill(model, float("nan"))
    with pytest.raises(NonFiniteError):
        exchange.on_join()
    assert listener.heard[-1] == ("settled", False)


def test_a_rank_that_failed_says_so_with_each_bucket() -> None:
    _, exchange, listener = made()
    exchange.on_backward_begins(synchronised=True)
    exchange.on_backward_failed()
    sealed = [heard for heard in listener.heard if heard[0] == "sealed"]
    assert sealed == [("sealed", 0, False, True), ("sealed", 1, True, True)]
    assert listener.heard[-1] == ("settled", False)


def test_a_bucket_waits_for_what_stands_before_it_in_the_launch_order() -> None:
    class Sending(ExchangeListener):
        """Hands something over when the last bucket is sealed."""

        @override
        def on_bucket_sealed(self, number: int, *, is_last: bool, failed: bool) -> None:
            if is_last:
                order.launch(("factors", 0), lambda: listener.heard.append(("factors",)))

    order = LaunchOrder()
    order.follow([("factors", 0), ("gradients", 0), ("gradients", 1)])
    model, exchange, listener = made(order)
    exchange.add_listener(Sending())
    fill(model, 1.0)
    exchange.on_join()
    assert [heard[0] for heard in listener.heard] == [
        "sealed",
        "sealed",
        "factors",
        "launched",
        "launched",
        "settled",
    ]
