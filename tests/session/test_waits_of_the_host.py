"""How often the host asks for what a device has computed.

On a CPU that costs nothing, and it is the same code, so it is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import offbeat
from conformance_support.lent import lent
from offbeat.averaging.periodic import Everyone, MeanOfAll
from offbeat.codec.tally import Tally
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank
from offbeat.weights.model_weights import BufferNames, ModelWeights

_ASK = {
    f"aten.{name}.default"
    for name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select")
}


class Asked(TorchDispatchMode):
    """Counts operations whose result the host needs, while `counts`."""

    counts = False
    num_asked = num_seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_seen += self.counts
        self.num_asked += self.counts and str(func) in _ASK
        return func(*args, **(kwargs or {}))


class AskedForMany(TorchFunctionMode):
    """Counts what gives the host all elements of a tensor, which is no operation on a CPU."""

    num_asked = 0

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_asked += func in (torch.Tensor.tolist, torch.Tensor.numpy)
        return func(*args, **(kwargs or {}))


@contextmanager
def asked_in_backward(model: torch.nn.Module) -> Iterator[Asked]:
    """What is asked between the first gradient and the last one."""
    parameters, mode = list(model.parameters()), Asked()
    first = parameters[-1].register_hook(lambda gradient: setattr(mode, "counts", True))
    last = parameters[0].register_hook(lambda gradient: setattr(mode, "counts", False))
    with mode:
        yield mode
    first.remove()
    last.remove()


def test_the_tallies_of_all_buckets_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read_from = [], Tally.read_from

    def noting(tails: Sequence[torch.Tensor]) -> list[Tally]:
        asked.append(len(tails))
        return read_from(tails)

    monkeypatch.setattr(Tally, "read_from", noting)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = lent(offbeat.AllReduce(), bucket_mib=1e-3)
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(3):
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
    (num_buckets,) = set(asked)
    assert len(asked) == 3
    assert num_buckets > 3


@pytest.mark.parametrize(
    "strategy",
    [
        lent(offbeat.AllReduce(), bucket_mib=1e-3),
        lent(offbeat.PowerSGD(rank=1), bucket_mib=1e-3),
        lent(offbeat.GTopK(density=1.0, collective="dense", warmup=None), bucket_mib=1e-3),
    ],
    ids=["allreduce", "powersgd", "gtopk, densely"],
)
def test_nothing_is_asked_within_backward(strategy: Strategy) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(3):
            with asked_in_backward(model) as asked:
                model(torch.randn(4, 32)).square().mean().backward()
            assert asked.num_seen > 0
            assert asked.num_asked == 0
            optimizer.step()
            optimizer.zero_grad()


class SilentPeer(SingleRank):
    """A rank whose only peer contributes nothing."""

    world_size = 2


def asked_in_average(num_parameters: int, *, fragment_bytes: int) -> int:
    """How often, in an average of weights, of an optimizer's state and of its numbers of steps, of
    a model of 12,000 numbers.
    """
    parameters = {
        str(number): torch.nn.Parameter(torch.randn(12_000 // num_parameters))
        for number in range(num_parameters)
    }
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    weights = ModelWeights(
        parameters=parameters,
        buffers=lambda: {"mean": torch.ones(2)},
        chosen=BufferNames(("mean",)),
    )
    exchange = MeanOfAll(
        weights, Everyone(SilentPeer(), Stream(0)), optimizer=optimizer, averages_state=True
    )
    exchange.begin()
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    exchange.launch(0)
    before = [parameter.detach().clone() for parameter in parameters.values()]
    with Asked() as asked, AskedForMany() as asked_for_many, pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.weights.model_weights.FRAGMENT_BYTES", fragment_bytes)
        asked.counts = True
        exchange.measures_drift = True
        exchange.merge()
    torch.testing.assert_close([*parameters.values()], before, rtol=0, atol=0)
    assert asked.num_seen > num_parameters
    return asked.num_asked + asked_for_many.num_asked


def test_an_average_asks_as_often_whatever_the_number_of_parameters_and_of_fragments() -> None:
    few = asked_in_average(10, fragment_bytes=1 << 20)
    assert 0 < few <= 12
    assert asked_in_average(100, fragment_bytes=1 << 20) == few
    assert asked_in_average(100, fragment_bytes=1 << 10) == few
