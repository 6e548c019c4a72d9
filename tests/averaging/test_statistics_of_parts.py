"""What strategies that move weights by differences do to BatchNorm's running variance: it stays a
mean of variances that ranks have held.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import offbeat
from offbeat.averaging.gossip import NeighbourMean
from offbeat.averaging.periodic import Everyone, GrowingPeriod, PeriodicAverage
from offbeat.transport.driver import Driver, Finished, Stream, Ticket
from offbeat.transport.operations import Operation, Recv
from offbeat.weights.model_weights import BufferNames, ModelWeights
from thread_support.world import ThreadDriver, results_of, session_on


class FixedPeer(Driver):
    """A world of two, in which the peer sends the same vector in every round."""

    def __init__(self, vector: list[float]) -> None:
        self.rank, self.world_size = 0, 2
        self._vector = np.array(vector, np.float32)

    def start(self, operation: Operation, channel: int) -> Ticket:
        return Finished(self._vector.tobytes() if isinstance(operation, Recv) else None)

    def close(self) -> None:
        pass


def make_net() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, momentum=0.9))


def test_neighbours_that_meet_while_batches_are_accumulated() -> None:
    """The variance falls by several passes between sending and hearing."""
    variance = torch.tensor([100.0])
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    weights = ModelWeights(
        parameters={"weight": weight},
        buffers=lambda: {"variance": variance},
        chosen=BufferNames(("variance",)),
    )
    peers = Everyone(FixedPeer([3.0, 2.0]), Stream(1))
    mean = NeighbourMean(weights, peers, row={0: 0.5, 1: 0.5})
    part = PeriodicAverage(mean, GrowingPeriod(1))
    part.on_backward_begins(synchronised=True)
    variance.fill_(4.0)
    with torch.no_grad():
        weight.add_(0.5)
        part.on_before_step()
        part.on_after_step()
    assert weight.item() == 2.0 + 0.5
    assert variance.item() == (51.0 + 4.0) / 2


def test_push_sum_with_a_weight_below_one_holds_the_variance_itself() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with offbeat.attach(net, optimizer, offbeat.SGP()) as session:
        net[1].running_var.fill_(100.0)
        state = session.state_dict()
        names = [*(name for name, _ in net.named_parameters()), "1.running_mean", "1.running_var"]
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())
        beyond = {f"beyond/{name}": -0.5 * tensors[name].detach() for name in names}
        state["callbacks"]["push_sum"]["local"] = {"weight": 0.5, **beyond}
        session.load_state_dict(state)
        net(torch.randn(8, 3)).sum().backward()
        held = net[1].running_var.clone()
        optimizer.step()
        torch.testing.assert_close(net[1].running_var, held, rtol=0, atol=0)


@pytest.mark.parametrize("codec", [None, "linear8"])
def test_statistics_are_drawn_to_the_mean_of_what_ranks_hold_now(codec: str | None) -> None:
    """Those of a period ago, at first of a model without a batch, would be half of them."""

    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        net = copy.deepcopy(begun)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(driver.rank)
        with session_on(driver, net, optimizer, offbeat.Crossbow(period=4, alpha=0.5, codec=codec)):
            for _ in range(4):
                net(5 + torch.randn(8, 3, generator=draw)).sum().backward()
                held = net[1].running_var.clone()
                optimizer.step()
            return held, net[1].running_var.clone()

    begun = make_net()
    results = results_of(2, job)
    mean = torch.stack([held for held, _ in results]).mean(0)
    for held, drawn in results:
        assert not torch.allclose(held, mean)
        torch.testing.assert_close(drawn, (held + mean) / 2)
