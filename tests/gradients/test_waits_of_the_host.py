"""How often the host asks for what a device has computed.

On a CPU that costs nothing, and it is the same code, so it is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offbeat
from conformance_support.lent import lent
from offbeat.codec.tally import Tally
from offbeat.strategies.base import Strategy

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
