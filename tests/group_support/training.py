"""Ranks that train a model with running statistics beside averages, under the virtual clock.

The published models, the merge rules and the protocols are the real ones. A trainer here sleeps,
changes parameters at random, and does to its statistics what BatchNorm does in a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background import group_average, pair_average
from offbeat.averaging.background.interface import ProtocolCounts, ProtocolSettings
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.protocol_member import arrive, finish
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import Counters, Values
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.codec.value_codecs import ValueCodec
from offbeat.transport.operations import Collective, Post, Sleep
from offbeat.transport.virtual import VirtualCluster, VirtualLink

SERVE, TRAIN = 1 << 32, 2 << 32
PARAMETERS, MEAN, VARIANCE = slice(0, 3), slice(3, 5), slice(5, 7)
STATISTICS = slice(3, 7)
NUM_ELEMENTS = 7
_LOOK_S = 0.05


@dataclass(kw_only=True)
class Training:
    """What happens. Times in seconds of the virtual clock.

    Attributes:
        group_of: the group of (a version, a rank).
        compute_s: how long (a rank, a step) computes.
        loudness: how many times as large as usual the inputs of (a rank, a step) are.
        momentum: of the running statistics; None: they are means over all batches.
        forwards: passes in each step.
        pairs: whether ranks average in pairs.
        rounds: whether parameters travel in bfloat16.
        values: writes differences of parameters in averages of groups; None: nothing does.
        interval: steps from one arrival of a rank to the next.
    """

    seed: int
    world_size: int
    num_steps: int
    group_of: Callable[[int, int], VersionGroup]
    compute_s: Callable[[int, int], float]
    loudness: Callable[[int, int], float] = lambda rank, step: 1.0
    momentum: float | None = 0.1
    forwards: int = 1
    pairs: bool = False
    rounds: bool = False
    values: ValueCodec | None = None
    interval: int = 1
    link: VirtualLink = field(default_factory=VirtualLink)


class Trainer:
    """One rank: its published model, and what its loop has seen of it."""

    def __init__(self, world: TrainingWorld, rank: int) -> None:
        plan = world.plan
        self.rank = rank
        self.step_ends_s: list[float] = []
        self.taken: list[tuple[Values, Counters]] = []
        self.pushes: list[Values] = []
        self.behind: list[int] = []
        self.published = SharedModel(
            partial(DeltaMerge, statistics=[STATISTICS], has_anchor=plan.values is not None),
            one_at_a_time=not plan.pairs,
            interval=plan.interval,
        )
        self._world = world
        self._draw = np.random.default_rng([plan.seed, rank])

    def train(self) -> Collective[None]:
        world, trainer = self._world, self.published
        plan, driver = world.plan, world.cluster.drivers[self.rank]
        trainer.begin(np.array([0.0, 0, 0, 0, 0, 1, 1]), np.array([0]), step=0)
        for step in range(plan.num_steps):
            held, counters, _ = trainer.take()
            self.taken.append((held, counters))
            self.behind.append(trainer.steps_behind)
            yield Sleep(plan.compute_s(self.rank, step))
            stepped = self._stepped(held.copy(), counters, plan.loudness(self.rank, step))
            assert trainer.advance([stepped[0]], stepped[1])
            self.step_ends_s.append(world.cluster.now_s)
            self._report_step()
            while trainer.held_by:
                yield Sleep(_LOOK_S)
                self._report_step()
            version = trainer.arrive(lambda version: False) if trainer.is_due else None
            if version is not None:
                driver.start(Post(arrive(version, generation=0)), SERVE)
        held, counters, _ = trainer.take()
        self.taken.append((held, counters))
        driver.start(Post(finish(generation=0)), SERVE)

    def _report_step(self) -> None:
        """Tell the protocol that this rank has ended a step, if peers await that."""
        if (awaited := self.published.take_awaited()) is not None:
            post = Post(arrive(awaited, generation=0))
            self._world.cluster.drivers[self.rank].start(post, SERVE)

    def _stepped(
        self, model: Values, counters: Counters, loudness: float
    ) -> tuple[Values, Counters]:
        push = self._draw.normal(size=3)
        self.pushes.append(push)
        model[PARAMETERS] += push
        for _ in range(self._world.plan.forwards):
            counters = counters + 1
            momentum = self._world.plan.momentum or 1 / counters[0]
            batch = self._draw.normal(size=(2, 8)) * loudness
            for place, statistic in ((MEAN, batch.mean(axis=1)), (VARIANCE, batch.var(axis=1))):
                model[place] = (1 - momentum) * model[place] + momentum * statistic
        return model, counters


class TrainingWorld:
    """Carries a `Training` out."""

    def __init__(self, plan: Training) -> None:
        self.plan = plan
        self.cluster = VirtualCluster(plan.world_size, seed=plan.seed, link=plan.link)
        self.ranks = [Trainer(self, rank) for rank in range(plan.world_size)]

    def run(self) -> None:
        for rank in self.ranks:
            self.cluster.run_in_background(rank.rank, rank.train(), channel=TRAIN)
        self.cluster.run([self._serve(rank) for rank in self.ranks], channel=SERVE)

    def _serve(self, rank: Trainer) -> Collective[ProtocolCounts]:
        serve = pair_average.serve if self.plan.pairs else group_average.serve
        settings = ProtocolSettings(
            members=tuple(range(self.plan.world_size)),
            generation=0,
            num_elements=NUM_ELEMENTS,
            num_counters=1,
            dtype=np.dtype(np.float64),
            rounding=Rounding((STATISTICS,)) if self.plan.rounds else None,
            changes=CodedChanges(values, (STATISTICS,)) if (values := self.plan.values) else None,
            group_of=lambda version: self.plan.group_of(version, rank.rank),
        )
        return serve(rank.rank, settings, rank.published)
