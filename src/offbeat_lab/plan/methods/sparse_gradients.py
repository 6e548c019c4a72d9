"""The largest entries of gradients: TopK, GTopK and EF21."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Final, Literal

import numpy as np
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost, NetworkCosts, cheapest
from offbeat.codec.index_codecs import INDEX_CODECS
from offbeat.codec.tally import NUM_COUNTERS, Tally
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.value_codecs import VALUE_CODECS
from offbeat.codec.weightless import WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.collectives import dense, gtopk_tree, sparse_reduce_scatter, topk_allgather
from offbeat.collectives.base import SparseCollective
from offbeat.gradients.collective_choice import BY_ITSELF, COSTS, BucketKind, CheapestCollective
from offbeat.gradients.density import BUDGET, Warmup, affordable_density, warm_up_factor
from offbeat.gradients.reductions import JOINED_BYTES
from offbeat.transport.operations import Collective
from offbeat.transport.virtual import VirtualCluster
from offbeat_lab.plan.methods.gradients import GradientMethod, PlannedBucket
from offbeat_lab.plan.methods.phases import simulate_phases
from offbeat_lab.plan.methods.stand_ins import all_reduce
from offbeat_lab.plan.profile import FLOAT_BYTES
from offbeat_lab.plan.simulation import (
    EVENTS_UP_TO,
    Method,
    Run,
    Setting,
    Simulated,
    confirmed_s,
    until_over,
)

SPARSE: Final[dict[str, SparseCollective]] = {
    "reduce_scatter": sparse_reduce_scatter.sparse_reduce_scatter,
    "all_gather": topk_allgather.topk_sum,
    "global": topk_allgather.global_topk,
    "tree": gtopk_tree.gtopk_tree,
    "paper": gtopk_tree.gtopk_tree,
}

_NAMED_CODECS: Final[dict[str, object]] = {**VALUE_CODECS, **INDEX_CODECS}


class SparseGradients(GradientMethod):
    """The largest entries of residual + gradient: TopK and GTopK.

    Args:
        density: of what travels; "auto": what is affordable.
        collective: by name, or "auto".
        bucket_mib: of a bucket; None: all gradients in one.
        codec: how entries travel.
        warmup: its stages, where they are named.
    """

    extra_bytes = 2.0

    def __init__(
        self,
        *,
        density: float | str,
        collective: str,
        bucket_mib: float | None = None,
        codec: TopKCodec | None = None,
        warmup: Warmup | Literal["auto"] | None = None,
    ) -> None:
        super().__init__(bucket_mib)
        self._density = density
        self._warmup = warmup
        self._warmup_densities: dict[Setting, float] = {}
        self._collective = collective
        self._codec = codec or TopKCodec()
        self._codec_names = [
            next((name for name, known in _NAMED_CODECS.items() if known == one), "")
            for one in (self._codec.values, self._codec.indices)
        ]
        self._among = BY_ITSELF if collective == "auto" else frozenset({collective, "dense"})

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
        return self._codec.wire(
            bucket.num_elements, num_parameters=len(bucket.tensors), dtype=np.dtype(np.float32)
        )

    def _density_at(self, exchange: int, target: float) -> float:
        """Of an exchange, where `target` follows the warm-up."""
        if isinstance(self._warmup, Warmup):
            return self._warmup.density_at(exchange, target)
        return target

    def _bucket_kind(self, num_elements: int) -> BucketKind:
        return BucketKind(num_elements=num_elements, element_bytes=FLOAT_BYTES, codec=self._codec)

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
        bucket = self._bucket_kind(profile.num_elements)
        steps = setting.steps
        budget = BUDGET * (1.0 if steps is None else warm_up_factor(steps.stop - 1))
        return affordable_density(
            lambda k: choice.costs_s(bucket, k),
            num_elements=bucket.num_elements,
            allowed_s=budget * profile.compute_s * float(setting.slowdowns.max()),
        )

    def chosen(self, setting: Setting, bucket: PlannedBucket) -> tuple[str, int]:
        """The collective of a bucket, and k."""
        key = (setting, tuple(bucket.tensors))
        return self.remember(key, lambda: self._choose(setting, bucket))

    def _choose(self, setting: Setting, bucket: PlannedBucket) -> tuple[str, int]:
        num_elements = bucket.num_elements
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
        num_beside = NUM_COUNTERS + len(bucket.tensors)
        if num_bytes <= JOINED_BYTES:
            yield from all_reduce(run, rank, num_bytes + FLOAT_BYTES * num_beside)
            return
        beside = run.begin(rank, all_reduce(run, rank, 8 * num_beside), channel=0)
        yield from all_reduce(run, rank, num_bytes)
        yield until_over(beside)

    def _entries(
        self, setting: Setting, rank: int, name: str, k: int, bucket: PlannedBucket
    ) -> Collective[None]:
        arithmetic = WeightlessWire(
            wire=self._wire(bucket), num_places=setting.num_places(k, bucket.num_elements)
        )
        yield from SPARSE[name](
            rank, setting.world_size, arithmetic.picked(k), _TALLY, k, arithmetic
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
            num_elements = bucket.num_elements
            name, k = self.chosen(setting, bucket)
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
