"""Layers whose weights get gradients while K-FAC sees nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.errors import OffbeatWarning, UnsupportedError
from offbeat.strategies.kfac import KFACStrategy
from thread_support.world import ThreadDriver, in_threads, session_on

KINDS = [offbeat.DKFAC, offbeat.SPDKFAC, offbeat.DPKFAC]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Its middle layer's weight is used without calling the layer; the last one is not used."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.first, self.middle = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.last, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(F.linear(hidden, self.middle.weight)))  # type: ignore[no-any-return]


def x(rank: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> list[torch.Tensor]:
    """The gradients of a step, which was taken with a learning rate of 0."""
    net(x(rank)).square().mean().backward()
    optimizer.step()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    optimizer.zero_grad()
    return gradients


def compiled(net: nn.Module) -> nn.Module:
    """Compiled and called, so that hooks which are added from now on are passed over."""
    made = torch.compile(net, backend="eager")
    made(x()).sum().backward()
    net.zero_grad()
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_not_called_is_named_and_the_others_are_preconditioned(
    kind: type[KFACStrategy],
) -> None:
    net, plain = Net(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with offbeat.attach(net, optimizer, kind(kl_clip=None)) as session:
        with pytest.warns(OffbeatWarning, match=r"not seen 'middle' at work.*F\.linear"):
            found = step(net, optimizer)
        step(net, optimizer)
        assert sum("at work" in notice for notice in session.notices) == 1
    expected = step(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    first, middle = 0, 2
    assert torch.equal(found[middle], expected[middle])
    assert not torch.allclose(found[first], expected[first])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("attached_to", ["compiled", "inner"])
def test_a_model_that_was_compiled_and_called_before_is_refused_until_it_is_compiled_anew(
    attached_to: str,
) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    called = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.clone() for p in net.parameters()]
    model = called if attached_to == "compiled" else net
    with (
        pytest.raises(UnsupportedError, match=r"compiled and called before attach"),
        offbeat.attach(model, optimizer, offbeat.SPDKFAC()),
    ):
        step(called, optimizer)
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    optimizer.zero_grad()
    with offbeat.attach(model, optimizer, offbeat.SPDKFAC()):
        torch.compiler.reset()
        step(called, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_raises_the_same_and_none_hangs(kind: type[KFACStrategy]) -> None:
    def job(driver: ThreadDriver) -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, kind()):
            F.linear(x(driver.rank), net.weight, net.bias).sum().backward()
            optimizer.step()

    outcomes = in_threads(2, job)
    assert [type(outcome) for outcome in outcomes] == [UnsupportedError] * 2
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_without_a_batch_in_the_first_step_the_next_one_is_looked_at() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DKFAC()):
        optimizer.step()
        F.linear(x(), net.weight).sum().backward()
        with pytest.raises(UnsupportedError, match="seen no layer"):
            optimizer.step()
