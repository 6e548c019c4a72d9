"""Ranks that train a model with running statistics, and average it beside that, under the virtual
clock.

The callbacks are those of the strategy, as a session has them. A trainer here sleeps, changes
parameters at random, and does to its statistics what BatchNorm does in a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from offbeat.averaging.background.averager import BackgroundWeightAverage
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.model_wire import Counters, Values
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import GenerationHost
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.transport.operations import Collective, Sleep

PARAMETERS, VARIANCE = slice(0, 3), slice(5, 7)


@dataclass(kw_only=True)
class Training:
    """What happens. Times in seconds of the virtual clock.

    Attributes:
        strategy: which averages.
        compute_s: how long (a rank, a step) computes.
        loudness: how many times as large as usual the inputs of (a rank, a step) are.
        momentum: of the running statistics; None: they are means over all batches.
        forwards: passes in each step.
    """

    seed: int
    world_size: int
    num_steps: int
    strategy: AveragingStrategy
    compute_s: Callable[[int, int], float]
    loudness: Callable[[int, int], float] = lambda rank, step: 1.0
    momentum: float | None = 0.1
    forwards: int = 1
    link: VirtualLink = field(default_factory=VirtualLink)


class Trainer(VirtualThread):
    """One rank: its model, and what its loop has seen of it."""

    def __init__(self, plan: Training, cluster: VirtualCluster, rank: int) -> None:
        super().__init__(cluster.drivers[rank])
        self.step_ends_s: list[float] = []
        self.taken: list[tuple[Values, Counters]] = []
        self.pushes: list[Values] = []
        self.behind: list[int] = []
        self.exchanges: list[float] = []
        self._plan = plan
        self._draw = np.random.default_rng([plan.seed, rank])
        self._model = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self._mean, self._variance = torch.zeros(2).double(), torch.ones(2).double()
        self._count = torch.tensor(0)

    @property
    def model(self) -> Values:
        """Parameters, means and variances."""
        values: Values = torch.cat([self._model.detach(), self._mean, self._variance]).numpy()
        return values

    def train(self) -> None:
        plan = self._plan
        buffers = {"mean": self._mean, "variance": self._variance, "count": self._count}
        _, average = plan.strategy.build(
            Context(
                parameters={"model": self._model},
                buffers=lambda: buffers,
                driver=self,
                new_stream=stream_counter(),
                notices=Notices(self.rank),
                enter=self._enter,
            )
        )
        assert isinstance(average, BackgroundWeightAverage)
        for step in range(plan.num_steps):
            self._note()
            self.behind.append(average.steps_behind())
            average.on_backward_begins(synchronised=True)
            self.run(_sleep(plan.compute_s(self.rank, step)), 0)
            self._step(plan.loudness(self.rank, step))
            self.step_ends_s.append(self.now_s(0))
            average.on_before_update()
            average.on_after_step()
            self.exchanges.append(average.counters()["exchanges"])
        average.on_finish()
        self.exchanges.append(average.counters()["exchanges"])
        self._note()
        average.close()

    def _enter(self, host: GenerationHost) -> None:
        host.begin(Generation.of_founders(self.world_size), self.rank, self)

    def _note(self) -> None:
        self.taken.append((self.model, np.array([int(self._count)])))

    @torch.no_grad()
    def _step(self, loudness: float) -> None:
        push = self._draw.normal(size=3)
        self.pushes.append(push)
        self._model.add_(torch.from_numpy(push))
        for _ in range(self._plan.forwards):
            self._count += 1
            momentum = self._plan.momentum or 1 / int(self._count)
            batch = self._draw.normal(size=(2, 8)) * loudness
            for place, statistic in (
                (self._mean, batch.mean(axis=1)),
                (self._variance, batch.var(axis=1)),
            ):
                place.lerp_(torch.from_numpy(statistic), momentum)


def _sleep(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


def trained(plan: Training) -> list[Trainer]:
    """Carry `plan` out. A deadlock raises."""
    cluster = VirtualCluster(plan.world_size, seed=plan.seed, link=plan.link)
    ranks = [Trainer(plan, cluster, rank) for rank in range(plan.world_size)]
    cluster.run([rank.carry(rank.train) for rank in ranks])
    return ranks
