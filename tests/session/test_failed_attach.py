"""What `attach` takes and refuses, and what the peers hear of a rank whose `attach` fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError, PeerError, UnsupportedError
from offbeat.session import attach as attach_module
from offbeat.session.agreement import describe
from offbeat.transport.connect import Connection
from offbeat.transport.driver import Driver, Finished, Ticket, Wrapper
from offbeat.transport.operations import DenseOperation, Operation, Recv
from offbeat.transport.peers import Peers

VICTIM = 1


class Broken(Wrapper):
    """Fails in the first dense collective because `VICTIM` is dead."""

    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, DenseOperation):
            return Finished(error=PeerError(f"rank {VICTIM} is dead", rank=VICTIM))
        return super().start(operation, channel)


@pytest.fixture
def mesh() -> Iterator[list[Peers]]:
    with ExitStack() as stack:
        mesh = [
            Peers(rank, 3, address="127.0.0.1", secret=b"a secret of this test")
            for rank in range(3)
        ]
        for peers in mesh:
            stack.callback(peers.close)
            peers.connect([other.endpoint for other in mesh])
        for peers in mesh:
            peers.await_connections(30)
        yield mesh


def test_a_slower_rank_hears_whose_fault_it_was(
    monkeypatch: pytest.MonkeyPatch, mesh: list[Peers]
) -> None:
    slower: Driver = mesh[0]
    broken = Connection(driver=Broken(mesh[2]), network=None)
    monkeypatch.setattr(attach_module, "connect", lambda *_, **__: broken)
    net = torch.nn.Linear(2, 1)
    with pytest.raises(PeerError, match=f"rank {VICTIM} is dead"):
        offbeat.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), offbeat.TopK())
    with pytest.raises(PeerError) as raised:
        slower.start(Recv(2), 0).wait()
    assert raised.value.rank == VICTIM


def test_ranks_whose_rates_are_on_devices_of_their_own_agree() -> None:
    net = torch.nn.Linear(2, 1)
    said = []
    for rate in (torch.tensor(0.5), 0.5):
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        said.append(describe(net, optimizer, offbeat.TopK(), session={}))
    assert said[0] == said[1]


def test_a_strategy_may_be_named_as_on_the_command_line() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, "gtopk:density=0.5:warmup=none") as session:
        assert session.strategy == offbeat.GTopK(density=0.5, warmup=None)


@pytest.mark.parametrize(
    ("named", "says"),
    [("gtopc", "gtopk"), ("gtopk:densty=0.5", "density"), ("gtopk:density=x", "x")],
)
def test_a_wrong_name_is_refused_with_the_right_one(named: str, says: str) -> None:
    net = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=says):
        offbeat.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), named)


def test_a_default_device_that_is_not_the_host_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedError, match=r"set_default_device\('cpu'\) before"),
    ):
        offbeat.attach(model, optimizer, offbeat.AllReduce())
