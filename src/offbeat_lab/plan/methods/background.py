"""Averages beside training, by the real protocols on a model of few elements: WAGMA and AD-PSGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from typing_extensions import override

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background import group_average, pair_average
from offbeat.averaging.background.interface import (
    ProtocolCounts,
    ProtocolSettings,
    VersionResult,
)
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.protocol_member import arrive, finish
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import scaled_bytes
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.codec.value_codecs import ValueCodec
from offbeat.transport.operations import Collective, Payload, Post, Sleep
from offbeat.transport.virtual import VirtualCluster
from offbeat.transport.virtual_driver import SleepUntil
from offbeat_lab.plan.cores import Cores
from offbeat_lab.plan.profile import FLOAT_BYTES
from offbeat_lab.plan.simulation import (
    EVENTS_UP_TO,
    FEW_WORKERS,
    MINIATURE,
    Method,
    Setting,
    Simulated,
)

_SERVE, _TRAIN = 1 << 32, 2 << 32
_LOOK_S: Final = 1e-3
_BACKGROUND_STEPS, _STEPS_OF_FEW = 20, 60
_STEPS_OF_AN_AVERAGE: Final = 10
"""Averages that take more look faster than they are."""


class Background(Method):
    """Models are averaged by a thread beside training, with the real protocols on a model of few
    elements: WAGMA and AD-PSGD.

    Args:
        group_of: the group of (a version, a rank, the number of ranks).
        pairs: whether ranks average in pairs.
        period: steps from one average of all ranks to the next.
        interval: steps from one version to the next.
        rounds: whether the values of a vector of so many elements travel in bfloat16.
        values: what writes differences in averages of groups; None: they are like others.
        overlaps: whether a step is computed while an average travels.
    """

    def __init__(
        self,
        group_of: Callable[[int, int, int], VersionGroup],
        *,
        pairs: bool,
        period: int = 1,
        interval: int = 1,
        rounds: Callable[[int], bool] = lambda num_elements: False,
        values: ValueCodec | None = None,
        overlaps: bool = True,
    ) -> None:
        self._changes = None if values is None else CodedChanges(values)
        self._overlaps = overlaps
        self.extra_bytes = 4.0
        self.steps_in_a_period = period
        self._interval = interval
        self._group_of = group_of
        self._pairs = pairs
        self._rounds = rounds

    @override
    def simulate(self, setting: Setting) -> Simulated:
        note = ""
        if setting.world_size > EVENTS_UP_TO:
            note = f"as of {EVENTS_UP_TO} workers: its groups average independently of each other"
            setting = replace(setting, cluster=setting.cluster.left_with(EVENTS_UP_TO))
        profile, world_size = setting.profile, setting.world_size
        published_s = profile.publish_s
        miniature = max(MINIATURE, 2 * world_size)
        scale = profile.num_elements / miniature
        few = _STEPS_OF_FEW if world_size <= FEW_WORKERS else _BACKGROUND_STEPS
        least = max(setting.num_steps, few)
        num_steps = -(-least // self.steps_in_a_period) * self.steps_in_a_period
        cluster = VirtualCluster(
            world_size,
            seed=setting.cluster.seed,
            link=setting.links,
            racks=setting.cluster.virtual_racks(),
            num_bytes=lambda payload: carry(payload),
        )
        cores = Cores(cluster, setting.cluster.cores)

        def carry(payload: Payload) -> float:
            num_bytes = scaled_bytes(payload, scale)
            added_s = profile.mean_s_per_byte * num_bytes
            cores.begin(0, setting.message_work_s(num_bytes) + added_s)
            return num_bytes

        trainers = [
            _BackgroundTrainer(
                cluster,
                cores,
                rank,
                setting,
                num_steps,
                num_elements=miniature,
                published_s=published_s,
                pairs=self._pairs,
                interval=self._interval,
                overlaps=self._overlaps,
            )
            for rank in range(world_size)
        ]
        for trainer in trainers:
            group_of = partial(self._group, trainer.rank, world_size)
            cluster.run_in_background(trainer.rank, trainer.train(group_of), channel=_TRAIN)
        serve = pair_average.serve if self._pairs else group_average.serve
        cluster.run(
            [self._serve(serve, trainer, world_size, miniature, scale) for trainer in trainers],
            channel=_SERVE,
        )
        step_s = float(np.mean([trainer.ended_s for trainer in trainers])) / num_steps
        alpha_s, beta = setting.network.messages.alpha_s, setting.network.messages.beta_s_per_byte
        bytes_per_step = sum(cluster.bytes_sent) / world_size / num_steps
        messages = sum(cluster.messages_sent) / world_size / num_steps
        exchange_s = messages * alpha_s + bytes_per_step * beta
        slow_note = self._slow_note(setting)
        return Simulated(
            step_s=step_s,
            bytes_per_step=bytes_per_step,
            encode_s=published_s,
            alpha_share=messages * alpha_s / exchange_s if exchange_s else 0.0,
            by_events=not note,
            note="; ".join(filter(None, [note, slow_note])),
            is_lower_limit=bool(slow_note),
        )

    def _slow_note(self, setting: Setting) -> str:
        """Averages that take many steps are not over in those that are simulated."""
        world_size, num_elements = setting.world_size, setting.profile.num_elements
        element_bytes = FLOAT_BYTES // 2 if self._rounds(num_elements) else FLOAT_BYTES
        sent = 1.0 if self._pairs else 2 * (world_size - 1) / world_size
        average_s = setting.network.messages.time_s(
            num_messages=2, num_bytes=sent * element_bytes * num_elements
        )
        num_steps = average_s / setting.ideal_s
        if world_size == 1 or num_steps <= max(self.steps_in_a_period, _STEPS_OF_AN_AVERAGE):
            return ""
        return (
            f"an average takes about {num_steps:.0f} steps on the slowest link here, so its"
            " step is a lower limit: later steps wait for averages. It is recommended only where"
            " nothing else is planned for"
        )

    def _group(self, rank: int, world_size: int, version: int) -> VersionGroup:
        return self._group_of(version, rank, world_size)

    def _serve(
        self,
        serve: Callable[..., Collective[ProtocolCounts]],
        trainer: _BackgroundTrainer,
        world_size: int,
        miniature: int,
        scale: float,
    ) -> Collective[ProtocolCounts]:
        settings = ProtocolSettings(
            members=tuple(range(world_size)),
            generation=0,
            num_elements=miniature,
            group_of=partial(self._group, trainer.rank, world_size),
            rounding=Rounding() if self._rounds(round(scale * miniature)) else None,
            changes=self._changes,
        )
        settings = replace(settings, direct_bytes=int(settings.direct_bytes / scale))
        return serve(trainer.rank, settings, trainer.model)


class _NotingModel(SharedModel):
    """Notes which versions have their quorum."""

    def __init__(self, note: Callable[[int], None], *, one_at_a_time: bool, interval: int) -> None:
        rule = partial(DeltaMerge, statistics=[])
        super().__init__(rule, one_at_a_time=one_at_a_time, interval=interval)
        self._note = note

    @override
    def quorum_arrived(self, version: int) -> None:
        super().quorum_arrived(version)
        self._note(version)

    @override
    def close_version(self, result: VersionResult) -> None:
        super().close_version(result)
        self._note(result.version)


class _BackgroundTrainer:
    """One rank beside its protocol, as `averaging.background.averager` has it."""

    def __init__(
        self,
        cluster: VirtualCluster,
        cores: Cores,
        rank: int,
        setting: Setting,
        num_steps: int,
        *,
        num_elements: int,
        published_s: float,
        pairs: bool,
        interval: int,
        overlaps: bool,
    ) -> None:
        self.rank = rank
        self.ended_s = 0.0
        self._cluster = cluster
        self._cores = cores
        self._setting = setting
        self._num_steps = num_steps
        self._published_s = published_s
        self._overlaps = overlaps
        self.model = _NotingModel(self._note, one_at_a_time=not pairs, interval=interval)
        self._settled = -1
        self._zeros = np.zeros(num_elements, dtype=np.float32)

    def _note(self, version: int) -> None:
        self._settled = max(self._settled, version)
        self._cluster.touch(self.rank)

    def train(self, group_of: Callable[[int], VersionGroup]) -> Collective[None]:
        setting, trainer = self._setting, self.model
        profile, driver = setting.profile, self._cluster.drivers[self.rank]
        copied_s = self._published_s
        trainer.begin(self._zeros, np.zeros(0, np.int64), step=0)
        for step in range(self._num_steps):
            row = step % setting.num_steps
            held, counters, _ = trainer.take()
            factor = float(setting.factors[row, self.rank])
            yield Sleep(float(setting.late_s[row, self.rank]))
            duration_s = (profile.compute_s + copied_s) * factor
            work_s = (setting.work_s + copied_s) * factor * setting.cluster.speeds[self.rank]
            yield from self._cores.compute(self.rank, duration_s, work_s)
            trainer.advance([held], counters)
            self._report_step()
            while trainer.held_by:
                yield Sleep(_LOOK_S)
                self._report_step()
            if not trainer.is_due:
                continue
            if not self._overlaps or group_of(trainer.upcoming).min_arrivals > 1:
                yield SleepUntil(over=lambda: trainer.is_free)
            version = trainer.arrive(lambda version: not self._overlaps)
            if version is None:
                continue
            driver.start(Post(arrive(version, generation=0)), _SERVE)
            if not self._overlaps:
                yield SleepUntil(over=lambda: trainer.arrival is None)
                trainer.wait()
            elif group_of(version).min_arrivals > 1:
                yield SleepUntil(over=partial(self._is_settled, version))
        trainer.take()
        self.ended_s = self._cluster.now_s
        driver.start(Post(finish(generation=0)), _SERVE)

    def _is_settled(self, version: int) -> bool:
        return self._settled >= version

    def _report_step(self) -> None:
        if (awaited := self.model.take_awaited()) is not None:
            post = Post(arrive(awaited, generation=0))
            self._cluster.drivers[self.rank].start(post, _SERVE)
