"""What each strategy does in a step, and what it costs: generators of training where there are
messages, closed forms of the same collectives (`cost_s`) beyond `simulation.EVENTS_UP_TO` workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from offbeat.averaging.background import group_average, pair_average
from offbeat.averaging.background.interface import (
    ProtocolCounts,
    ProtocolPort,
    ProtocolSettings,
    VersionResult,
)
from offbeat.averaging.background.interval_choice import IntervalChoice
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.model_state import ModelState
from offbeat.averaging.background.protocol_member import arrive, finish
from offbeat.averaging.background.published_model import PublishedModel
from offbeat.averaging.periodic import last_average
from offbeat.codec.index_codecs import INDEX_CODECS, GapIndices, IndexCodec
from offbeat.codec.model_wire import scaled_bytes
from offbeat.codec.rounding import Rounding
from offbeat.codec.tally import NUM_COUNTERS, Tally
from offbeat.codec.value_codecs import VALUE_CODECS, Float32Values, ValueCodec
from offbeat.codec.weightless import WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.collectives import dense, gtopk_tree, sparse_reduce_scatter, topk_allgather
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.gossip import neighbour_mean, push_sum
from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.gradients.collective_choice import BY_ITSELF, COSTS, BucketKind, CheapestCollective
from offbeat.gradients.density_choice import affordable_density, warm_up_factor
from offbeat.gradients.reductions import JOINED_BYTES
from offbeat.megabatch.batch_sizes import Proportional
from offbeat.megabatch.part import MegaBatchPlan
from offbeat.plan.cores import Cores
from offbeat.plan.profile import FLOAT_BYTES
from offbeat.plan.simulation import (
    EVENTS_UP_TO,
    FEW_WORKERS,
    Method,
    Run,
    Setting,
    Simulated,
    StepMethod,
    confirmed_s,
    until_over,
)
from offbeat.planning.ceilings import on_first_call
from offbeat.planning.costs import LinkCost, NetworkCosts, cheapest
from offbeat.planning.dispatch import dispatch
from offbeat.planning.fusion import fuse
from offbeat.planning.groups import VersionGroup
from offbeat.planning.topologies import exponential_peers, ring_weights
from offbeat.transport.driver import Pending
from offbeat.transport.operations import AllReduceTensor, Collective, Payload, Post, Sleep
from offbeat.transport.virtual import VirtualCluster
from offbeat.transport.virtual_driver import SleepUntil

MIB: Final = 1 << 20

SPARSE: Final[dict[str, SparseCollective]] = {
    "reduce_scatter": sparse_reduce_scatter.sparse_reduce_scatter,
    "all_gather": topk_allgather.topk_sum,
    "tree": gtopk_tree.gtopk_tree,
}

_NAMED_CODECS: Final[dict[str, object]] = {**VALUE_CODECS, **INDEX_CODECS}

_MINIATURE: Final = 1024
"""Elements of a model that stands for the real one where protocols compute with their messages."""

_SERVE, _TRAIN = 1 << 32, 2 << 32
_LOOK_S: Final = 1e-3


class SoloSteps(StepMethod):
    """Nothing is exchanged: what every other strategy is held against."""

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        profile = run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        yield from run.compute(rank, number, profile.batch.backward_s + profile.optimizer_s)

    @override
    def encode_s(self, setting: Setting) -> float:
        return 0.0

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return 0.0


class PlannedBucket(NamedTuple):
    """Gradients that are exchanged together.

    Attributes:
        num_elements: of all of them.
        complete: when the last one is ready, as a share of the backward pass.
        tensors: their places in the model.
        carried: elements of each tensor that travels whole inside this one's messages.
        rides: whether this one travels inside another one's messages.
    """

    num_elements: int
    complete: float
    tensors: list[int]
    carried: tuple[int, ...] = ()
    rides: bool = False

    @property
    def num_counted(self) -> int:
        """Tensors of which the tally in its messages says whether they were used."""
        return len(self.tensors) + len(self.carried)


class GradientMethod(StepMethod):
    """Gradients leave in buckets while the backward pass goes on, and are waited for behind it.

    Args:
        bucket_mib: of a bucket; None: all gradients in one, behind the pass.
        first_bucket_mib: of the first one; None: as the others.
    """

    extra_bytes = 1.0

    def __init__(self, bucket_mib: float | None, first_bucket_mib: float | None = None) -> None:
        super().__init__()
        self._caps = [
            None if mib is None else int(mib * MIB) for mib in (bucket_mib, first_bucket_mib)
        ]

    def buckets(self, setting: Setting) -> list[PlannedBucket]:
        return self.remember((setting,), lambda: self._fused(setting))

    def small_below(self, setting: Setting) -> int:
        """Tensors of fewer elements share buckets with their like only."""
        return 0

    def _fused(self, setting: Setting) -> list[PlannedBucket]:
        tensors, small_below = setting.profile.tensors, self.small_below(setting)
        sizes = [FLOAT_BYTES * tensor.num_elements for tensor in tensors]
        kinds = [tensor.num_elements < small_below for tensor in tensors]
        groups = fuse(sizes, kinds, cap_bytes=self._caps[0], first_cap_bytes=self._caps[1])
        buckets = []
        complete = 0.0  # in one order on all ranks, so none leaves before those ahead of it
        for group in self._in_order(setting, groups):
            complete = max(complete, *(tensors[index].ready for index in group))
            num_elements = sum(tensors[index].num_elements for index in group)
            buckets.append(PlannedBucket(num_elements, complete, group))
        return buckets

    def _in_order(self, setting: Setting, groups: list[list[int]]) -> list[list[int]]:
        """Tensors of each bucket, as they are launched."""
        return groups

    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        """The exchange of one bucket."""
        raise NotImplementedError

    def stage_s(self, setting: Setting, bucket: PlannedBucket) -> float:
        """What a rank computes before a bucket leaves."""
        return setting.profile.bucket_copy_s_per_byte * FLOAT_BYTES * bucket.num_elements

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        setting, profile = run.setting, run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        done = 0.0
        pending: list[Pending[Any]] = []
        buckets = self.buckets(setting)
        for index, bucket in enumerate(buckets):
            work_s = (bucket.complete - done) * profile.batch.backward_s
            yield from run.compute(rank, number, work_s + self.stage_s(setting, bucket))
            done = bucket.complete
            reduction = self.reduce(run, rank, number, bucket)
            pending.append(run.begin(rank, reduction, number * len(buckets) + index))
        yield from run.compute(rank, number, (1 - done) * profile.batch.backward_s)
        yield until_over(*pending)
        written_s = profile.bucket_copy_s_per_byte * profile.num_bytes
        yield from run.compute(rank, number, written_s + profile.optimizer_s)

    @override
    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        """All ranks wait for the last one in each step."""
        return float(setting.durations_s.max(axis=1).mean()) - setting.ideal_s

    @override
    def encode_s(self, setting: Setting) -> float:
        staged_s = sum(self.stage_s(setting, bucket) for bucket in self.buckets(setting))
        return staged_s + setting.profile.bucket_copy_s_per_byte * setting.profile.num_bytes


class DenseGradients(GradientMethod):
    """All-reduce of buckets: AllReduce, DDP, and DDP with a float16 hook.

    Args:
        bucket_mib: of a bucket; None: all gradients in one, behind the pass.
        first_bucket_mib: of the first one; None: as the others.
        element_bytes: of an element as it travels.
    """

    def __init__(
        self,
        bucket_mib: float | None = 25.0,
        first_bucket_mib: float | None = 1.0,
        element_bytes: int = 4,
    ) -> None:
        super().__init__(bucket_mib, first_bucket_mib)
        self._element_bytes = element_bytes

    @override
    def is_like(self, other: StepMethod) -> bool:
        return (
            isinstance(other, DenseGradients)
            and self._caps == other._caps
            and self._element_bytes == other._element_bytes
        )

    @override
    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        yield from _all_reduce(run, rank, self._element_bytes * bucket.num_elements)

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return sum(
            dense.cost_s(
                world_size=setting.world_size,
                num_bytes=self._element_bytes * bucket.num_elements,
                network=network,
            )
            for bucket in self.buckets(setting)
        )


class LowRankGradients(GradientMethod):
    """PowerSGD: two factors of each matrix, the second of which waits for the first.

    All gradients are in one bucket, as in `offbeat.lab.native`.

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before the first approximation.
    """

    extra_bytes = 2.0

    def __init__(self, rank: int, start_step: int = 0) -> None:
        super().__init__(None)
        self._rank = rank
        self._start_step = start_step

    def _messages(self, setting: Setting, tensors: Sequence[int]) -> tuple[int, int, int]:
        """Elements: of what is not compressed, of the first factors, of the second ones."""
        whole = first = second = 0
        for index in tensors:
            tensor = setting.profile.tensors[index]
            rows, columns = tensor.rows, tensor.num_elements // tensor.rows
            rank = min(self._rank, rows, columns)
            if (rows + columns) * rank * 2 < tensor.num_elements:
                first, second = first + rows * rank, second + columns * rank
            else:
                whole += tensor.num_elements
        return whole, first, second

    @override
    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        if number < self._start_step:
            yield from _all_reduce(run, rank, FLOAT_BYTES * bucket.num_elements)
            return
        yield from run.compute(rank, number, self._approximating_s(run.setting, bucket))
        for num_elements in self._messages(run.setting, bucket.tensors):
            if num_elements:
                yield from _all_reduce(run, rank, FLOAT_BYTES * num_elements)

    def _approximating_s(self, setting: Setting, bucket: PlannedBucket) -> float:
        profile = setting.profile
        further = self._rank - 1
        return bucket.num_elements * (
            profile.low_rank_s_per_element + further * profile.low_rank_s_per_element_and_rank
        )

    @override
    def encode_s(self, setting: Setting) -> float:
        approximating_s = sum(
            self._approximating_s(setting, bucket) for bucket in self.buckets(setting)
        )
        return super().encode_s(setting) + approximating_s

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return sum(
            dense.cost_s(
                world_size=setting.world_size, num_bytes=FLOAT_BYTES * size, network=network
            )
            for bucket in self.buckets(setting)
            for size in self._messages(setting, bucket.tensors)
            if size
        )


class SparseGradients(GradientMethod):
    """The largest entries of residual + gradient: TopK and GTopK.

    Args:
        density: of what travels; "auto": what is affordable.
        collective: by name, or "auto".
        budget: of density "auto".
        bucket_mib: of a bucket; None: all gradients in one.
        values: how values travel.
        indices: likewise.
        among: what "auto" chooses among.
        small_below: tensors of fewer elements are sent whole; of all sizes.
        carries_small: whether these travel in the messages of the others; of all sizes and the
            number of workers. Else they have an exchange of their own.
        density_at: of an exchange, from its number and the density that follows the warm-up.
    """

    extra_bytes = 2.0

    def __init__(
        self,
        *,
        density: float | str,
        collective: str,
        budget: float = 0.1,
        bucket_mib: float | None = None,
        values: ValueCodec | None = None,
        indices: IndexCodec | None = None,
        among: frozenset[str] = BY_ITSELF,
        small_below: Callable[[Sequence[int]], int] = lambda sizes: 0,
        carries_small: Callable[[Sequence[int], int], bool] = lambda sizes, workers: False,
        density_at: Callable[[int, float], float] = lambda exchange, target: target,
    ) -> None:
        super().__init__(bucket_mib)
        self._density = density
        self._density_at = density_at
        self._warmup_densities: dict[Setting, float] = {}
        self._collective = collective
        self._budget = budget
        self._values = values or Float32Values()
        self._indices = indices or GapIndices()
        self._codec_names = [
            next((name for name, known in _NAMED_CODECS.items() if known == one), "")
            for one in (self._values, self._indices)
        ]
        self._small_below = small_below
        self._carries_small = carries_small
        self._among = among if collective == "auto" else frozenset({collective, "dense"})

    @override
    def simulate(self, setting: Setting) -> Simulated:
        target, steps = self.density(setting), setting.steps
        if setting in self._warmup_densities:
            return super().simulate(setting)
        if steps is None:
            found = super().simulate(setting)
            if self._density_at(0, target) == target:
                return found
            return replace(found, note="steps behind its warm-up are shown")
        densities = [self._density_at(step, target) for step in steps]
        if set(densities) == {target}:
            return super().simulate(setting)
        phases: list[tuple[Method, Setting]] = []
        begin = steps.start
        for density, alike in groupby(densities):
            end = begin + len(list(alike))
            there = replace(setting, steps=range(begin, end))
            self._warmup_densities[there] = density
            phases.append((self, there))
            begin = end
        return simulate_phases(phases)

    def _wire(self, bucket: PlannedBucket) -> Wire:
        return Wire(
            num_elements=bucket.num_elements,
            num_parameters=bucket.num_counted,
            num_whole=sum(bucket.carried),
            dtype=np.dtype(np.float32),
            values=self._values,
            indices=self._indices,
        )

    def _bucket_kind(self, num_elements: int) -> BucketKind:
        return BucketKind(
            num_elements=num_elements,
            element_bytes=FLOAT_BYTES,
            values=self._values,
            indices=self._indices,
        )

    def density(self, setting: Setting) -> float:
        """As a session would choose it."""
        if setting in self._warmup_densities:
            return self._warmup_densities[setting]
        if not isinstance(self._density, str):
            return self._density
        profile = setting.profile
        choice = CheapestCollective(
            setting.network, world_size=setting.world_size, among=self._among
        )
        small_below = self.small_below(setting)
        sizes = [tensor.num_elements for tensor in profile.tensors]
        num_apart = sum(size for size in sizes if size < small_below)
        bucket = self._bucket_kind(profile.num_elements - num_apart)
        if self.carries(setting):
            beside_s = self._carried_s(setting, setting.network, num_apart)
        else:
            apart = self._bucket_kind(num_apart)
            beside_s = choice.costs_s(apart, 1)["dense"] if num_apart else 0.0
        steps = setting.steps
        budget = self._budget * (1.0 if steps is None else warm_up_factor(steps.stop - 1))
        return affordable_density(
            lambda k: choice.costs_s(bucket, k),
            num_elements=bucket.num_elements,
            allowed_s=budget * profile.compute_s * float(setting.slowdowns.max()),
            beside_s=beside_s,
        )

    @override
    def small_below(self, setting: Setting) -> int:
        tensors = setting.profile.tensors
        return self.remember(
            (setting, "small"),
            lambda: self._small_below([tensor.num_elements for tensor in tensors]),
        )

    def carries(self, setting: Setting) -> bool:
        """Whether small tensors travel in the messages of the last bucket of others."""
        sizes = [tensor.num_elements for tensor in setting.profile.tensors]
        key = (setting, "carries")
        return self.remember(key, lambda: self._carries_small(sizes, setting.world_size))

    def _is_small(self, setting: Setting, group: Sequence[int]) -> bool:
        return setting.profile.tensors[group[0]].num_elements < self.small_below(setting)

    @override
    def _in_order(self, setting: Setting, groups: list[list[int]]) -> list[list[int]]:
        if not self.carries(setting):
            return groups
        (small,) = (group for group in groups if self._is_small(setting, group))
        others = [group for group in groups if group is not small]
        return [*others[:-1], small, others[-1]]

    @override
    def _fused(self, setting: Setting) -> list[PlannedBucket]:
        buckets = super()._fused(setting)
        if not self.carries(setting):
            return buckets
        *others, small, last = buckets
        tensors = setting.profile.tensors
        carried = tuple(tensors[index].num_elements for index in small.tensors)
        return [*others, small._replace(rides=True), last._replace(carried=carried)]

    def _carried_s(self, setting: Setting, network: NetworkCosts, num_elements: int) -> float:
        """What elements cost that travel whole inside messages: every rank's come to every rank."""
        num_bytes = (setting.world_size - 1) * FLOAT_BYTES * num_elements
        return network.messages.time_s(num_messages=0, num_bytes=num_bytes)

    def chosen(self, setting: Setting, bucket: PlannedBucket) -> tuple[str, int]:
        """The collective of a bucket, and k."""
        key = (setting, tuple(bucket.tensors))
        return self.remember(key, lambda: self._choose(setting, bucket))

    def _choose(self, setting: Setting, bucket: PlannedBucket) -> tuple[str, int]:
        num_elements = bucket.num_elements
        if self._is_small(setting, bucket.tensors):
            return "dense", num_elements
        density = self.density(setting)
        k = max(1, round(density * num_elements))
        if density == 1.0 and self._density != 1.0:
            return "dense", k
        if self._collective != "auto":
            return self._collective, k
        choice = CheapestCollective(
            setting.network, world_size=setting.world_size, among=self._among
        )
        return cheapest(choice.costs_s(self._bucket_kind(num_elements), k)), k

    @override
    def stage_s(self, setting: Setting, bucket: PlannedBucket) -> float:
        staged_s = super().stage_s(setting, bucket)
        name, k = self.chosen(setting, bucket)
        if name == "dense":
            return staged_s
        profile, num_elements = setting.profile, bucket.num_elements
        coding_s = profile.coding_s(num_elements, k, self._codec_names)
        return staged_s + profile.select_s_per_element * num_elements + coding_s

    @override
    def reduce(self, run: Run, rank: int, number: int, bucket: PlannedBucket) -> Collective[None]:
        if bucket.rides:
            return
        setting = run.setting
        name, k = self.chosen(setting, bucket)
        if name == "dense":
            yield from self._everything(run, rank, bucket)
        elif not setting.by_closed_forms:
            yield from self._entries(setting, rank, name, k, bucket)
        else:
            seconds, num_bytes = self._beyond(setting, name, k, bucket)
            yield from run.closed_form(seconds, num_bytes)

    def _everything(self, run: Run, rank: int, bucket: PlannedBucket) -> Collective[None]:
        """A gradient and its tally, in one sum where the gradient is small, else in two."""
        num_bytes = FLOAT_BYTES * bucket.num_elements
        num_beside = NUM_COUNTERS + bucket.num_counted + sum(bucket.carried)
        if num_bytes <= JOINED_BYTES:
            yield from _all_reduce(run, rank, num_bytes + FLOAT_BYTES * num_beside)
            return
        beside = run.begin(rank, _all_reduce(run, rank, 8 * num_beside), channel=0)
        yield from _all_reduce(run, rank, num_bytes)
        yield until_over(beside)

    def _entries(
        self, setting: Setting, rank: int, name: str, k: int, bucket: PlannedBucket
    ) -> Collective[None]:
        arithmetic = WeightlessWire(
            wire=self._wire(bucket), num_places=setting.num_places(k, bucket.num_elements)
        )
        whole = np.zeros(sum(bucket.carried), dtype=np.float32)
        yield from SPARSE[name](
            rank,
            setting.world_size,
            arithmetic.picked(k),
            replace(_TALLY, whole=whole),
            k,
            arithmetic,
        )

    def _beyond(
        self, setting: Setting, name: str, k: int, bucket: PlannedBucket
    ) -> tuple[float, float]:
        """Seconds of one exchange of many workers, and bytes that a rank sends."""
        pair_bytes = self._bucket_kind(bucket.num_elements).pair_bytes(k)

        def cost(world_size: int, network: NetworkCosts) -> float:
            return COSTS[name](world_size=world_size, k=k, pair_bytes=pair_bytes, network=network)

        def make() -> tuple[float, float]:
            num_few = min(setting.world_size, EVENTS_UP_TO)
            few = replace(setting, cluster=setting.cluster.left_with(num_few))
            cluster = VirtualCluster(
                num_few,
                link=few.links,
                racks=few.cluster.virtual_racks(),
                weightless=True,
            )
            cluster.run([self._entries(few, rank, name, k, bucket) for rank in range(num_few)])
            seconds = confirmed_s(
                setting, partial(cost, network=setting.network), lambda _: cluster.now_s
            )
            return seconds, cost(setting.world_size, _BYTES_ALONE)

        return self.remember((setting, name, k, tuple(bucket.tensors)), make)

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        total_s = 0.0
        for bucket in self.buckets(setting):
            if bucket.rides:
                continue
            num_elements = bucket.num_elements
            name, k = self.chosen(setting, bucket)
            total_s += self._carried_s(setting, network, sum(bucket.carried))
            if name == "dense":
                num_bytes = FLOAT_BYTES * num_elements
                total_s += dense.cost_s(
                    world_size=setting.world_size, num_bytes=num_bytes, network=network
                )
            else:
                pair_bytes = self._bucket_kind(num_elements).pair_bytes(k)
                total_s += COSTS[name](
                    world_size=setting.world_size, k=k, pair_bytes=pair_bytes, network=network
                )
        return total_s


_TALLY: Final = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))

_BYTES_ALONE: Final = NetworkCosts(
    messages=LinkCost(alpha_s=0.0, beta_s_per_byte=1.0),
    dense=LinkCost(alpha_s=0.0, beta_s_per_byte=1.0),
    select_s_per_element=0.0,
)
"""Costs that make closed forms count bytes."""


class PeriodicMean(StepMethod):
    """All models are averaged densely after every so many steps: LocalSGD, CROSSBOW.

    Args:
        period: steps between averages.
        warmup: the steps in which the period grows by one, from 1 on; 0: it does not.
        start_step: steps before the first local one, which `FirstSteps` does.
        averages_state: whether the optimizer's state is averaged with the models.
        extra_bytes: as of `Method`.
    """

    def __init__(
        self,
        period: int,
        *,
        warmup: int = 0,
        start_step: int = 0,
        averages_state: bool = False,
        extra_bytes: float = 1.0,
    ) -> None:
        super().__init__()
        self.steps_in_a_period = period
        self.extra_bytes = extra_bytes
        self._warmup = warmup
        self._start_step = start_step
        self._averages_state = averages_state

    def _averages_after(self, number: int) -> bool:
        local, period = number + 1 - self._start_step, self.steps_in_a_period
        return self.remember(
            (number,), lambda: last_average(local, period=period, warmup=self._warmup) == local
        )

    def _num_bytes(self, setting: Setting) -> int:
        return setting.profile.averaged_bytes(with_state=self._averages_state)

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        setting, profile = run.setting, run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        yield from run.compute(rank, number, profile.batch.backward_s + profile.optimizer_s)
        if self._averages_after(number):
            encode_s = self.encode_s(setting) * self.steps_in_a_period
            yield from run.compute(rank, number, encode_s)
            yield from _all_reduce(run, rank, self._num_bytes(setting))

    @override
    def encode_s(self, setting: Setting) -> float:
        copied_s = setting.profile.copy_s_per_byte * self._num_bytes(setting)
        return 2 * copied_s / self.steps_in_a_period

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        average_s = dense.cost_s(
            world_size=setting.world_size, num_bytes=self._num_bytes(setting), network=network
        )
        return average_s / self.steps_in_a_period


class FirstSteps(Method):
    """One method in the first steps of a run, and another one from then on.

    Args:
        num_steps: that are the first ones, >= 0.
        first: what they do.
        then: what the others do.
    """

    def __init__(self, num_steps: int, *, first: Method, then: Method) -> None:
        super().__init__()
        self.steps_in_a_period = then.steps_in_a_period
        self.extra_bytes = max(then.extra_bytes, first.extra_bytes if num_steps else 0.0)
        self._num_steps = num_steps
        self._first = first
        self._then = then

    @override
    def simulate(self, setting: Setting) -> Simulated:
        return simulate_phases(self._phases(setting))

    @override
    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        phases = self._phases(setting)
        return _mean(phases, [method.waiting_s(where, encode_s) for method, where in phases])

    def _phases(self, setting: Setting) -> list[tuple[Method, Setting]]:
        """The methods of the steps that are predicted, with their steps."""
        steps = setting.steps
        if steps is None:
            return [(self._then, setting)]
        first, then = (
            range(steps.start, min(steps.stop, self._num_steps)),
            range(max(steps.start, self._num_steps), steps.stop),
        )
        return [
            (method, replace(setting, steps=some))
            for method, some in ((self._first, first), (self._then, then))
            if some
        ]


def simulate_phases(phases: Sequence[tuple[Method, Setting]]) -> Simulated:
    """The mean step of a run that is one method after the other, each with the steps it does."""
    parts = [method.simulate(where) for method, where in phases]
    if len(parts) == 1:
        return parts[0]
    numbers = ("step_s", "bytes_per_step", "encode_s", "alpha_share")
    return Simulated(
        **{name: _mean(phases, [getattr(part, name) for part in parts]) for name in numbers},
        by_events=all(part.by_events for part in parts),
        note=parts[-1].note,
        is_lower_limit=parts[-1].is_lower_limit,
    )


def _mean(phases: Sequence[tuple[Method, Setting]], values: Sequence[float]) -> float:
    weights = [len(where.steps or (None,)) for _, where in phases]
    return float(np.average(values, weights=weights))


class Gossip(StepMethod):
    """Models are averaged with a few peers in every step, on a model of few elements each of which
    stands for many.

    Args:
        out_degree: of push-sum, behind the step (SGP); None: both neighbours on a ring, while
            gradients are computed (D-PSGD).
    """

    weightless = False
    extra_bytes = 3.0

    def __init__(self, out_degree: int | None = None) -> None:
        super().__init__()
        self._out_degree = out_degree

    @override
    def num_bytes(self, setting: Setting, payload: Payload) -> float:
        return len(payload) * setting.profile.num_elements / _MINIATURE

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        setting = run.setting
        profile, world_size = setting.profile, setting.world_size
        behind_s = profile.batch.backward_s + profile.optimizer_s
        mine = [np.zeros(_MINIATURE, dtype=np.float32)]
        copied_s = profile.publish_s / 2
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        if self._out_degree is None:
            yield from run.compute(rank, number, copied_s)
            average = neighbour_mean(rank, mine, ring_weights(rank, world_size))
            pending = run.begin(rank, average, number)
            yield from run.compute(rank, number, behind_s)
        else:
            yield from run.compute(rank, number, behind_s + copied_s)
            peers = exponential_peers(
                rank, world_size, round_number=number, out_degree=self._out_degree
            )
            pending = run.begin(rank, push_sum(peers, mine, 1.0), number)
        yield until_over(pending)
        yield from run.compute(rank, number, copied_s + self._mean_s(setting))

    def _degree(self, setting: Setting) -> int:
        """Peers that a rank sends to, and hears from."""
        return self._out_degree or min(2, setting.world_size - 1)

    def _mean_s(self, setting: Setting) -> float:
        profile = setting.profile
        return self._degree(setting) * profile.mean_s_per_byte * profile.num_bytes

    @override
    def encode_s(self, setting: Setting) -> float:
        return setting.profile.publish_s + self._mean_s(setting)

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        degree = self._degree(setting)
        return network.messages.time_s(num_messages=1, num_bytes=degree * setting.profile.num_bytes)


class Background(Method):
    """Models are averaged by a thread beside training, with the real protocols on a model of few
    elements: WAGMA and AD-PSGD.

    Args:
        group_of: the group of (a version, a rank, the number of ranks).
        pairs: whether ranks average in pairs.
        period: steps from one average of all ranks to the next.
        interval: steps from one version to the next.
        rounds: whether the values of a vector of so many elements travel in bfloat16.
        overlaps: whether a step is computed while an average travels.
        averages_momenta: whether averages of all ranks take along a momentum of each element.
    """

    def __init__(
        self,
        group_of: Callable[[int, int, int], VersionGroup],
        *,
        pairs: bool,
        period: int = 1,
        interval: int = 1,
        rounds: Callable[[int], bool] = lambda num_elements: False,
        overlaps: bool = True,
        averages_momenta: bool = False,
    ) -> None:
        super().__init__()
        self._overlaps = overlaps
        self._vectors = 1 + averages_momenta
        self.extra_bytes = 4.0 * self._vectors
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
        published_s = self._vectors * profile.publish_s
        miniature = max(_MINIATURE, 2 * world_size)
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
                num_elements=self._vectors * miniature,
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
        world_size, num_elements = setting.world_size, self._vectors * setting.profile.num_elements
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

    def _is_global(self, version: int) -> bool:
        return (version + 1) % (self.steps_in_a_period // self._interval) == 0

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
            num_elements=self._vectors * miniature,
            num_averaged=lambda version: (
                miniature * (self._vectors if self._is_global(version) else 1)
            ),
            group_of=partial(self._group, trainer.rank, world_size),
            rounding=(
                Rounding() if self._rounds(round(scale * self._vectors * miniature)) else None
            ),
        )
        settings = replace(settings, direct_bytes=int(settings.direct_bytes / scale))
        return serve(trainer.rank, settings, trainer.port)


_BACKGROUND_STEPS, _STEPS_OF_FEW = 20, 60
_STEPS_OF_AN_AVERAGE: Final = 10
"""Averages that take more look faster than they are."""


class _NotingPort:
    """A published model's port for the protocol. It notes which versions have their quorum."""

    def __init__(self, port: ProtocolPort, note: Callable[[int], None]) -> None:
        self._port = port
        self._note = note

    def quorum_arrived(self, version: int) -> None:
        self._port.quorum_arrived(version)
        self._note(version)

    def close(self, result: VersionResult) -> None:
        self._port.close(result)
        self._note(result.version)

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)


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
        self._published = PublishedModel(
            ModelState(partial(DeltaMerge, statistics=[])),
            one_at_a_time=not pairs,
            intervals=IntervalChoice.fixed(interval),
        )
        self._settled = -1
        noting = _NotingPort(self._published.protocol, self._note)
        self.port: ProtocolPort = noting  # type: ignore[assignment]  # the rest by __getattr__
        self._zeros = np.zeros(num_elements, dtype=np.float32)

    def _note(self, version: int) -> None:
        self._settled = max(self._settled, version)
        self._cluster.touch(self.rank)

    def train(self, group_of: Callable[[int], VersionGroup]) -> Collective[None]:
        setting, trainer = self._setting, self._published.trainer
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
                yield SleepUntil(over=self._is_free)
            version = trainer.arrive(lambda version: not self._overlaps)
            if version is None:
                continue
            driver.start(Post(arrive(version, generation=0)), _SERVE)
            if not self._overlaps:
                yield SleepUntil(over=lambda: self._published.arrival is None)
                trainer.wait()
            elif group_of(version).min_arrivals > 1:
                yield SleepUntil(over=partial(self._is_settled, version))
        trainer.take()
        self.ended_s = self._cluster.now_s
        driver.start(Post(finish(generation=0)), _SERVE)

    def _is_free(self) -> bool:
        """Whether no contribution of this rank is under way."""
        published = self._published
        return published.arrival is None and not (published.one_at_a_time and published.open)

    def _is_settled(self, version: int) -> bool:
        return self._settled >= version

    def _report_step(self) -> None:
        if (awaited := self._published.membership.take_awaited()) is not None:
            post = Post(arrive(awaited, generation=0))
            self._cluster.drivers[self.rank].start(post, _SERVE)


class PartialMean(Method):
    """Gradients are averaged by whoever has arrived: eager SGD. By the arithmetic of who waits for
    whom, and the closed form of the exchange.

    Args:
        quorum: of how many ranks an average waits for, of a number of ranks.
    """

    extra_bytes = 4.0

    def __init__(self, quorum: Callable[[int], int]) -> None:
        super().__init__()
        self._quorum = quorum

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        durations_s = np.tile(setting.durations_s, (max(1, 20 // setting.num_steps), 1))
        used = on_first_call(durations_s, period=1, quorum=self._quorum(world_size))
        network = setting.network
        bytes_sent = 2 * (world_size - 1) / world_size * profile.num_bytes
        exchange_s = network.messages.time_s(num_messages=2, num_bytes=bytes_sent)
        encode_s = 2 * profile.copy_s_per_byte * profile.num_bytes
        return Simulated(
            step_s=setting.ideal_s / used.mean
            + exchange_s * (world_size > 1)
            + encode_s * setting.crowding,
            bytes_per_step=bytes_sent,
            encode_s=encode_s,
            alpha_share=2 * network.messages.alpha_s / exchange_s if exchange_s else 0.0,
            by_events=False,
        )


class MegaBatches(Method):
    """Ranks share a mega-batch out, and merge: Adaptive SGD, elastic SGD. Where epochs end, which
    no profile knows, a mega-batch is of another size.

    Args:
        plan: how. A batch of its base size takes what the profile's batch takes.
    """

    extra_bytes = 3.0

    def __init__(self, plan: MegaBatchPlan) -> None:
        super().__init__()
        self._plan = plan

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        step = world_size * self._plan.base  # samples of all ranks
        whole = max(self._plan.mega_batch, step)
        if setting.steps is None:
            rounds, merges_per_step = [range(whole)], step / whole
            merged: Sequence[range] = rounds
        else:
            first, last = setting.steps.start * step, setting.steps.stop * step
            rounds = [one for one in self._rounds(last, whole, world_size) if one.stop > first]
            merged = [one for one in rounds if one.stop <= last]
            merges_per_step = len(merged) / len(setting.steps)
        computed_s = step * self._computed_s(setting, rounds) / sum(map(len, rounds))
        num_bytes = profile.averaged_bytes(with_state=self._plan.merges_optimizer_state)
        merge_s, merge_bytes = self._merge(setting, num_bytes)
        encode_s = 2 * profile.copy_s_per_byte * num_bytes
        messages_s = 2 * (world_size - 1) * setting.network.messages.alpha_s
        exposed_s = merge_s
        if merged:
            # One merge is under way at most.
            hidden_s = min(merge_s, computed_s / merges_per_step)
            exposed_s -= self._overlapped(merged, whole) * hidden_s
        return Simulated(
            step_s=computed_s + merges_per_step * (exposed_s + encode_s),
            bytes_per_step=merges_per_step * merge_bytes,
            encode_s=merges_per_step * encode_s,
            alpha_share=min(1.0, messages_s / merge_s) if merge_s else 0.0,
            by_events=world_size <= EVENTS_UP_TO,
        )

    def _overlapped(self, merged: Sequence[range], whole: int) -> float:
        """The share of the merges that end `merged` while which ranks go on training."""
        match self._plan.overlap:
            case "all":
                return 1.0
            case "whole":
                return sum(one.stop % whole == 0 for one in merged) / len(merged)
            case "none":
                return 0.0

    def _rounds(self, until: int, whole: int, world_size: int) -> Iterator[range]:
        """The samples between merges, as `megabatch.loader` cuts mega-batches of `whole` samples,
        until `until` are merged.
        """
        begin = 0
        while begin < until:
            size = self._plan.samples_of_round(begin, world_size)
            left = whole - begin % whole
            end = begin + (left if size is None or 2 * left < 3 * size else size)
            yield range(begin, end)
            begin = end

    def _computed_s(self, setting: Setting, rounds: Sequence[range]) -> float:
        """From the beginning of the first round to the end of the last, if merges took no time."""
        base, late_s = self._plan.base, setting.late_s
        computing_s = setting.durations_s - late_s
        num_claims = [0] * setting.world_size

        def claim_s(rank: int, samples: float) -> float:
            row = num_claims[rank] % setting.num_steps
            num_claims[rank] += 1
            return float(late_s[row, rank] + computing_s[row, rank] * samples / base)

        def share_s(rank: int, samples: float) -> float:
            """Of an equal share, in batches of the base size."""
            whole, rest = divmod(samples, base)
            return sum(claim_s(rank, base) for _ in range(int(whole))) + (
                claim_s(rank, rest) if rest else 0.0
            )

        if self._plan.rule is None:
            ranks = range(setting.world_size)
            return sum(
                max(share_s(rank, len(one) / setting.world_size) for rank in ranks)
                for one in rounds
            )
        # Batch sizes follow speeds, so that updates end together.
        speeds = (1 / setting.durations_s.mean(axis=0)).tolist()
        equal, bounds = [base] * len(speeds), [self._plan.bounds] * len(speeds)
        sizes = Proportional(base=base).resize(equal, speeds, bounds)
        return sum(dispatch(sizes, len(one), claim_s).duration_s for one in rounds)

    def _merge(self, setting: Setting, num_bytes: int) -> tuple[float, float]:
        """Seconds, and bytes that a rank sends, of a merge of `num_bytes`.

        Nobody computes meanwhile, so what encrypts messages is waited for: each is encrypted as a
        whole before it leaves.
        """
        world_size = setting.world_size
        num_messages = 2 * (world_size - 1)
        sent = num_messages / world_size * num_bytes
        work_s = (
            setting.factor_crowding * num_messages * setting.message_work_s(num_bytes / world_size)
        )
        if world_size > EVENTS_UP_TO:
            seconds = setting.network.messages.beta_s_per_byte * sent + work_s
            return seconds + 2 * setting.latency_s + num_messages * setting.message_s, sent
        scale = num_bytes / FLOAT_BYTES / _MINIATURE
        cluster = VirtualCluster(
            world_size,
            link=setting.links,
            racks=setting.cluster.virtual_racks(),
            num_bytes=lambda payload: len(payload) * scale,
        )
        zeros = np.zeros(_MINIATURE, dtype=np.float32)
        cluster.run(
            [
                weighted_mean(
                    rank, [1.0] * world_size, zeros, num_elements=_MINIATURE, dtype=zeros.dtype
                )
                for rank in range(world_size)
            ]
        )
        return cluster.now_s + work_s, sent


def _all_reduce(run: Run, rank: int, num_bytes: int) -> Collective[None]:
    """As `collectives.dense` does it, of a tensor without content."""
    operation = AllReduceTensor(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    yield from run.dense(rank, operation)
