"""Eager-SGD and AD-PSGD under the virtual clock, against their papers' steps on simulated ranks,
with what training loops do: see `thread_support.habits`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import offbeat
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import GenerationHost
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.transport.operations import Collective, Sleep
from thread_support.habits import (
    NUM_STEPS,
    OPTIMIZERS,
    BranchedNet,
    SimulatedRanks,
    backward,
    vector_of,
)

SECONDS = (1.0, 1.13, 2.37, 0.77, 1.57)
"""Of a step, by rank: no two of them ever end together."""


class Trainer(VirtualThread):
    """One rank.

    Args:
        cluster, rank: where it is.
        strategy: of all ranks.
        kind: of its optimizer.
        begins_s: when its first step begins.
        step_s: how long a step takes.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        rank: int,
        *,
        strategy: AveragingStrategy,
        kind: str,
        begins_s: float,
        step_s: float,
    ) -> None:
        super().__init__(cluster.drivers[rank])
        self.held: list[torch.Tensor] = []
        self._strategy, self._kind = strategy, kind
        self._begins_s, self._step_s = begins_s, step_s

    def train(self) -> None:
        net = BranchedNet()
        optimizer = OPTIMIZERS[self._kind](net)
        _, average = self._strategy.build(
            Context(
                parameters=dict(net.named_parameters()),
                driver=self,
                new_stream=stream_counter(),
                notices=Notices(self.rank),
                enter=self._enter,
            )
        )
        self.run(_sleep(self._begins_s), 0)
        for step in range(NUM_STEPS):
            average.on_backward_begins(synchronised=True)
            self.run(_sleep(self._step_s), 0)
            with torch.enable_grad():
                backward(net, optimizer, self.rank, step)
            average.on_before_update()
            optimizer.step()
            average.on_after_step()
            self.held.append(vector_of(net))
        average.on_finish()
        average.close()

    def _enter(self, host: GenerationHost) -> None:
        host.begin(Generation.of_founders(self.world_size), self.rank, self)


def _sleep(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


def trained(
    strategy: AveragingStrategy,
    kind: str,
    num_ranks: int,
    *,
    begins_s: Callable[[int], float] = lambda rank: 0.0,
    step_s: Callable[[int], float] = lambda rank: 1.0,
) -> torch.Tensor:
    """What each rank holds after each step, shape (steps, ranks, elements)."""
    cluster = VirtualCluster(num_ranks, seed=0, link=VirtualLink(latency_s=1e-6))
    ranks = [
        Trainer(
            cluster,
            rank,
            strategy=strategy,
            kind=kind,
            begins_s=begins_s(rank),
            step_s=step_s(rank),
        )
        for rank in range(num_ranks)
    ]
    cluster.run([rank.carry(rank.train) for rank in ranks])
    return torch.stack([torch.stack(rank.held) for rank in ranks], dim=1)


KINDS = pytest.mark.parametrize("kind", ["SGD", "AdamW"])


@KINDS
@pytest.mark.parametrize(
    ("mode", "period", "num_ranks", "num_on_time"),
    [("solo", 100, 3, 1), ("majority", 100, 3, 2), ("majority", 3, 4, 2)],
)
def test_eager_sgd_steps_with_gradients_that_came_in_time_and_those_of_late_ranks_before(
    mode: str, period: int, num_ranks: int, num_on_time: int, kind: str
) -> None:
    """All ranks are equally fast, and the first ones have begun a little earlier."""
    ranks = SimulatedRanks(kind, num_ranks)
    owed: list[list[torch.Tensor | None]] = []
    expected = []
    for step in range(NUM_STEPS):
        gradients = ranks.backward(step)
        sent, owed = gradients[:num_on_time] + owed, gradients[num_on_time:]
        means = []
        for each in zip(*sent, strict=True):
            found = [gradient for gradient in each if gradient is not None]
            means.append(torch.stack(found).sum(0) / num_ranks if found else None)
        for rank in range(num_ranks):
            ranks.step_with(rank, means)
        expected.append(ranks.x)
    strategy = offbeat.EagerSGD(mode=mode, period=period)  # type: ignore[arg-type]  # one of both
    found = trained(strategy, kind, num_ranks, begins_s=lambda rank: rank / 100)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-9)


@KINDS
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_in_ad_psgd_two_models_become_their_mean_while_both_ranks_compute(
    num_ranks: int, kind: str
) -> None:
    """A step counts from what a rank held as it began, and is added to what it has become."""
    ranks = SimulatedRanks(kind, num_ranks)
    expected = torch.zeros(NUM_STEPS, *ranks.x.shape, dtype=torch.float64)
    x = ranks.x
    ends = [
        (SECONDS[r] * (step + 1), r, step) for r in range(num_ranks) for step in range(NUM_STEPS)
    ]
    for _, rank, step in sorted(ends):
        net, optimizer = ranks.nets[rank], ranks.optimizers[rank]
        before = vector_of(net)
        backward(net, optimizer, rank, step).step()
        x[rank] += vector_of(net) - before
        expected[step, rank] = x[rank]
        torch.nn.utils.vector_to_parameters(x[rank].clone(), net.parameters())
        draw = int(np.random.default_rng([rank, step]).integers(num_ranks - 1))
        pair = [rank, draw + (draw >= rank)]
        x[pair] = x[pair].mean(0)
    found = trained(offbeat.ADPSGD(), kind, num_ranks, step_s=lambda rank: SECONDS[rank])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
