"""Steps of a strategy by its own callbacks, which know of no simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost
from offbeat.arithmetic.topologies import exponential_hops
from offbeat.arithmetic.trees import num_rounds
from offbeat.codec.index_codecs import INDEX_CODECS
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import SELECTORS, VALUE_CODECS, TopKCodec
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.weightless import WeightlessSparse, WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.collectives.base import Exchanged
from offbeat.errors import ConfigError
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.factors import factor_shape
from offbeat.simulation.measured import LATER
from offbeat.simulation.training import TensorProfile, carry_out, fused
from offbeat.simulation.virtual import DeadlockError, VirtualCluster, VirtualLink
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.sgp import SGP
from offbeat.transport.driver import Ticket, Underway, Wrapper
from offbeat.transport.operations import (
    Collective,
    DenseOperation,
    Operation,
    Recv,
    RecvAny,
    Send,
    Sleep,
)
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.plan.methods.planned_rank import PlannedMachine, PlannedRank, PlannedTimeline
from offbeat_lab.plan.profile import DTYPES, FLOAT_BYTES, Layer, ModelProfile
from offbeat_lab.plan.simulation import FEW_WORKERS, ClosedForm, Run, Setting, Simulated

_NAMES: Final[dict[Any, str]] = {
    one: name for name, one in {**SELECTORS, **VALUE_CODECS, **INDEX_CODECS}.items()
}

_LATE: Final = 1 << 40
"""A number of steps after which no period grows any more."""

_MUCH_LATER: Final = 100_000
"""A step behind long warm-ups too. Where samples are shared out it is `LATER`, since ranks remember
the order of all that come before.
"""

_MERGES: Final = 48
"""Of all ranks together, those that are simulated at most to see how long mega-batches take."""

LEAST_TENSORS: Final = 16
_MOST_TENSORS = 1024


class StrategySteps:
    """What the callbacks of `strategy` do in a step.

    Args:
        strategy: that all ranks train with.
        extra_bytes: memory for each byte of the model, besides weights, gradients, moments and what
            callbacks were seen to hold.
        by_tensor: whether tensors must not be fused, because their shapes count.

    Attributes:
        steps_in_a_period: steps after which its exchanges repeat.
        kind_of: as `Strategy.step_kinds` says.
        later: the first step that is simulated where none are asked for, or one soon after it.
        least_steps: as many are simulated at least, where none are asked for.
        most_tensors: of all simulated workers together.
        host_bytes: of `extra_bytes`, those that lie in the memory of a GPU's host.
    """

    least_steps = 1
    host_bytes = 0.0
    most_tensors = _MOST_TENSORS

    def __init__(self, strategy: Any, *, extra_bytes: float, by_tensor: bool = False) -> None:
        self._strategy = strategy
        self._by_tensor = by_tensor
        period = getattr(strategy, "period", 1)
        if not isinstance(period, int):  # a schedule, of which drift is not simulated
            period = strategy.schedule.period(_LATE, strategy.schedule.initial_state())
        if isinstance(intervals := getattr(strategy, "averages_state", None), Mapping):
            period *= math.lcm(*intervals.values())
        if isinstance(strategy, KFACStrategy):
            settings = strategy.settings()
            period = max(settings.factor_interval, settings.inverse_interval)
        self.steps_in_a_period, self.kind_of = period, strategy.step_kinds()
        self.later = LATER if strategy.shares_samples else _MUCH_LATER
        self.extra_bytes = extra_bytes

    def period_of(self, world_size: int) -> int:
        """Steps of a rank of so many, after which exchanges repeat."""
        if self._strategy.shares_samples:
            return max(1, round(int(self._strategy.mega_batch) / world_size))
        if isinstance(self._strategy, SGP) and world_size > 1:  # whose peers are nearer or further
            degree = self._strategy.out_degree
            num_hops = len(exponential_hops(world_size, degree))
            return num_hops // math.gcd(num_hops, degree)
        return self.steps_in_a_period

    def simulate(self, setting: Setting) -> Simulated:
        """A step on `setting`."""
        key = self._strategy, setting.key
        if key not in setting.simulated:
            setting.simulated[key] = self._simulate(setting)
        return setting.simulated[key]

    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        """How long a step is waited for peers, if messages took no time, where a rank encodes for
        `encode_s`.
        """
        quick_s = self.simulate(setting.without_network()).step_s
        return max(0.0, quick_s - setting.ideal_s - encode_s)

    def _simulate(self, setting: Setting) -> Simulated:
        if self._strategy.shares_samples and setting.world_size > FEW_WORKERS:
            return self._simulate_few(setting)
        # Workers that wait for each other in every step are as fast as the slowest in each.
        is_like_one = setting.is_steady or not self._strategy.replicas_differ
        if self._strategy.shares_samples or not (setting.is_apart and is_like_one):
            return self._simulate_workers(setting, setting.world_size)
        try:
            return self._simulate_workers(setting, 1)
        except DeadlockError:  # since its peers do not do as it does
            return self._simulate_workers(setting, setting.world_size)

    def _simulate_few(self, setting: Setting) -> Simulated:
        """Workers of whom each does as much between merges as each of all would."""
        cluster, pattern = setting.cluster, len(setting.cluster.speed_pattern)
        workers = max(1, FEW_WORKERS // pattern) * pattern
        size = max(1, round(self._strategy.mega_batch * workers / setting.world_size))
        method = StrategySteps(
            replace(self._strategy, mega_batch=size), extra_bytes=self.extra_bytes
        )
        few = replace(setting, cluster=_thinned(cluster, workers))
        found = method._simulate_workers(few, workers)
        # Where few workers cannot have the same share of late ones.
        later_s = 1 / setting.ideal_pace - 1 / few.ideal_pace
        return replace(
            found,
            step_s=found.step_s + later_s,
            pace=1 / (1 / found.pace + later_s),
            by_events=False,
            note=f"as of {workers} workers: a merge of more of them takes little longer",
        )

    def _simulate_workers(self, setting: Setting, num_workers: int) -> Simulated:
        profile = setting.profile
        run = Run(setting, self, num_workers)
        shares = self._strategy.shares_samples
        most = 1 if shares else max(LEAST_TENSORS, self.most_tensors // num_workers)
        steps: Collection[int] = run.weights
        tensors: Sequence[TensorProfile] = profile.tensors
        layers: Sequence[Layer] = ()
        if self._strategy.hooks_layers:
            tensors, layers = laid_out(profile)
        elif not self._by_tensor:
            tensors = fused(tensors, most)
        timeline = PlannedTimeline(
            tensors=tensors,
            forward_s=profile.batch.forward_s - profile.padding_s,
            earlier_s=profile.earlier_s,
            backward_s=profile.batch.backward_s,
            optimizer_s=profile.optimizer_s,
            moments=round(profile.moments),
            layers=layers,
            looks_s=profile.factors_s,
            batch_size=profile.batch.batch_size,
            dtype=DTYPES[profile.element_bytes],
        )
        machines: list[_Machine] = []
        if shares:
            steps = batches = self._batches(run)
            machines += [_SharingMachine(run, rank, batches) for rank in range(num_workers)]
        else:
            machines += [_Machine(run, rank) for rank in range(num_workers)]
        carry_out(
            run.cluster,
            [one.simulated.train(self._strategy, timeline, steps) for one in machines],
        )
        for one in machines:
            one.settle()
        is_exact = setting.is_steady or setting.by_closed_forms or not run.cluster.messages_sent[0]
        if num_workers < setting.world_size and not is_exact:
            # What the slowest receives is there before it has anything to send.
            return self._simulate_workers(setting, setting.world_size)
        exchange_s = sum(one.alpha_s + one.beta_s for one in machines)

        def mean(values: list[float]) -> float:
            return float(np.mean(values))

        return Simulated(
            step_s=mean([one.step_s for one in machines]),
            pace=setting.pace([one.step_s for one in machines]),
            bytes_per_step=mean([one.bytes_sent for one in machines]),
            encode_s=mean([one.encode_s for one in machines]),
            exchange_s=exchange_s / len(machines),
            alpha_share=sum(one.alpha_s for one in machines) / exchange_s if exchange_s else 0.0,
            by_events=not setting.by_closed_forms,
            kept_bytes=max(one.simulated.kept_bytes for one in machines),
        )

    def _batches(self, run: Run) -> range:
        """The batches of all ranks together in the steps that `run` looks at; whole mega-batches,
        where any will do.
        """
        workers, steps = run.setting.world_size, run.looked_at
        batches = range(workers * steps[0], workers * (steps[-1] + 1))
        if run.setting.steps is not None:
            return batches
        size = self._strategy.mega_batch
        first = -(-batches.start // size) * size
        count = min(-(-len(batches) // size), max(1, _MERGES // workers))
        return range(first, first + count * size)


def fewer_of(cluster: Cluster, workers: int) -> Cluster:
    """So many of its workers, in as many racks, each of which has its part of a rack's connection;
    as large a share has slower links, but of each kind one at least.
    """
    links: dict[int, LinkSpec] = {}
    # Of two links that fall to one worker it gets the slower one.
    for link in sorted(dict.fromkeys(cluster.links.values()), key=lambda one: -one.bytes_per_s):
        who = tuple(worker for worker, one in cluster.links.items() if one == link)
        links |= dict.fromkeys(_among_few(workers, cluster, who), link)
    racks = cluster.racks
    if racks is not None and racks.size < cluster.workers:
        size = min(workers - 1, max(1, round(racks.size * workers / cluster.workers)))
        rate_bit_per_s = racks.rate_bit_per_s * size / racks.size
        racks = racks.model_copy(update={"size": size, "rate_bit_per_s": rate_bit_per_s})
    return cluster.left_with(workers).changed(links=links, racks=racks)


def _among_few(workers: int, cluster: Cluster, who: tuple[int, ...]) -> tuple[int, ...]:
    """As many of so few workers as `who` are of all, but one at least, who keep their speeds."""
    most = max(1, round(len(who) * workers / cluster.workers))
    return tuple(sorted({worker % workers for worker in who})[:most])


def _thinned(cluster: Cluster, workers: int) -> Cluster:
    """So many of its workers, of whom as large a share is late, but of each kind one at least."""

    def among_few(who: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(who, int):
            return max(1, round(who * workers / cluster.workers))
        return _among_few(workers, cluster, who)

    late = [
        entry.model_copy(update={"workers": among_few(entry.workers)})
        for entry in cluster.straggling
    ]
    return fewer_of(cluster, workers).changed(straggling=tuple(late))


def laid_out(profile: ModelProfile) -> tuple[list[TensorProfile], list[Layer]]:
    """The parameters of `profile`, where the weight of each layer, its bias with it, is one of its
    own, and the layers.

    Raises:
        ConfigError: there are none, or nobody knows what inverting their factors takes.
    """
    if not profile.layers or profile.inversion is None:
        raise ConfigError(
            f"profile {profile.name!r} has no layers with Kronecker factors, or no cost of their"
            " inversion, so K-FAC cannot be planned; leave its strategies out"
        )
    found: list[TensorProfile] = []
    layers = list(profile.layers)
    borrowed = 0
    for number, tensor in enumerate(profile.tensors):
        left = tensor.num_elements - borrowed
        for place, layer in enumerate(profile.layers):
            if layer.tensor == number:
                layers[place] = replace(layer, tensor=len(found))
                size = layer.a_dim * layer.g_dim
                left -= size
                found.append(replace(tensor, num_elements=size, rows=layer.g_dim))
        # A bias that is with its weight comes out of what follows.
        borrowed = max(0, -left)
        if left > 0:
            found.append(TensorProfile(num_elements=left, ready=tensor.ready))
    return found, layers


class _Machine(Wrapper, PlannedMachine):
    """One rank's device and its links, as a profile and a cluster describe them. What it counts is
    the mean of the steps that `run` looks at.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__(run.cluster.drivers[rank])
        self.world_size = run.setting.world_size
        self.shared, self.profile = run.setting.shared, run.setting.profile
        self.simulated = PlannedRank(self, self)
        self.step_s = self.encode_s = self.bytes_sent = self.alpha_s = self.beta_s = 0.0
        self._run, self._weight = run, 0.0
        self._begun_s = self._encoded_s = self._forward_s = 0.0
        self._stands_for_all = run.cluster.world_size < self.world_size
        self.common = run.common
        # Of all gradients and inverses, as factors are cut.
        products = sum(
            each.a_dim * each.g_dim * (_rows_of_pieces(each.a_dim) + _rows_of_pieces(each.g_dim))
            for each in self.profile.layers
        )
        self._product_s = self.profile.precondition_s / (products or 1)

    def settle(self) -> None:
        """All that counts is over."""

    # What computes

    def asking(self) -> Collective[None]:
        yield Sleep(2 * self._run.setting.network.messages.alpha_s)

    def step_begins(self, step: int) -> Collective[None]:
        self._weight = self._run.weights[step]
        self._begun_s, self._encoded_s = self._run.cluster.now_s, self.simulated.encode_s
        yield from self._late(step)

    def _late(self, step: int) -> Collective[None]:
        yield from self._run.late(self.rank, step)
        self._forward_s = self._run.cluster.now_s

    def forward_ended(self, step: int, size: float, coming_s: float) -> Collective[None]:
        computed_s = self._run.cluster.now_s - self._forward_s
        return self._run.pad(self.rank, step, size, computed_s=computed_s, coming_s=coming_s)

    def computing(self, step: int, seconds: float) -> Collective[None]:
        return self._run.compute(self.rank, step, seconds)

    def copying_s(self, num_bytes: float) -> float:
        return (self.profile.bucket_s_per_byte or self.profile.copy_s_per_byte) * num_bytes

    def coding_s(self, num_elements: int, values: ValueCodec) -> float:
        return self.profile.value_coding_s(num_elements, _NAMES.get(values, ""))

    def multiplying_s(self, num_elements: int, rank: int) -> float:
        return self.profile.low_rank_s(num_elements, rank) / 4  # an exchange has four products

    def preconditioning_s(self, num_products: float) -> float:
        return self._product_s * num_products

    def inverting_s(self, dim: int) -> float:
        inversion = self.profile.inversion
        return 0.0 if inversion is None else inversion.time_s(dim)

    def publishing_s(self, num_bytes: float) -> float:
        profile = self.profile
        return (profile.publish_s_per_byte or 2 * profile.copy_s_per_byte) * num_bytes

    def adding_s(self, num_bytes: float) -> float:
        return self.profile.mean_s_per_byte * num_bytes

    def work_beside(self, seconds: float) -> None:
        self._run.cores.begin(self.rank, seconds)

    def selecting_s(self, num_elements: int, k: int, codec: TopKCodec) -> float:
        profile = self.profile
        selector, *codecs = (
            _NAMES.get(one, "") for one in (codec.selector, codec.values, codec.indices)
        )
        return (
            2 * self.copying_s(FLOAT_BYTES * num_elements)
            + profile.selection_s(num_elements, selector)
            + profile.coding_s(num_elements, k, codecs)
        )

    def step_ended(self, step: int) -> None:
        self.step_s += self._weight * (self._run.cluster.now_s - self._begun_s)
        self.encode_s += self._weight * (self.simulated.encode_s - self._encoded_s)

    def lay_out(self, wire: Wire) -> WeightlessWire:
        if self._run.setting.by_closed_forms:
            return _ClosedWire(wire=wire, num_places=wire.num_elements, machine=self)
        return super().lay_out(wire)

    # What sends

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        setting, network = self._run.setting, self._run.setting.network
        if isinstance(operation, Send):
            num_bytes = len(operation.payload)
            self._count(num_bytes, network.messages, num_messages=1, on_path=num_bytes)
        if isinstance(operation, RecvAny) and self._stands_for_all:
            raise DeadlockError("who sends first is not known of one rank that stands for all")
        if isinstance(operation, Send | Recv) and self._stands_for_all:
            operation = replace(operation, peer=self.rank)  # which does as its peers do
        if not isinstance(operation, DenseOperation) or isinstance(operation, ClosedForm):
            return self.inner.start(operation, channel)
        world_size = self.world_size
        traffic = operation.traffic(None, rank=self.rank, world_size=world_size)
        hops, hop_bytes = operation.num_hops(world_size), float(operation.num_bytes)
        if operation.root_rank is None:
            hop_bytes = operation.hop_bytes(hop_bytes, world_size)
        else:
            hops = num_rounds(world_size)
        self._count(traffic.bytes_sent, network.dense, num_messages=hops, on_path=hops * hop_bytes)
        copying = self._run.cores.begin(self.rank, setting.dense_work_s(traffic.bytes_sent))
        ticket = self.inner.start(operation, channel)
        return Underway(lambda: copying.over and ticket.done(), ticket.wait)

    def _count(
        self, num_bytes: float, cost: LinkCost, *, num_messages: float, on_path: float
    ) -> None:
        """Bytes that this rank sends; messages and bytes that follow each other."""
        if self.world_size > 1:
            self.bytes_sent += self._weight * num_bytes
            self.alpha_s += self._weight * num_messages * cost.alpha_s
            self.beta_s += self._weight * on_path * cost.beta_s_per_byte

    def exchange(self, make: Callable[[int], Collective[object]], key: object) -> Collective[None]:
        """What `make` gives each rank, as long as it takes where all of them begin it at once."""
        run, network = self._run, self._run.setting.network
        if key not in run.remembered:
            run.remembered[key] = _alone(run.setting, make)
        seconds, num_bytes, num_messages = run.remembered[key]
        self._count(num_bytes, network.messages, num_messages=num_messages, on_path=num_bytes)
        yield from run.closed_form(seconds, num_bytes)


def _rows_of_pieces(dim: int) -> int:
    """Of what a factor of `dim` rows is cut into."""
    shape = factor_shape(1, dim, Curvature().max_dim)
    return 1 if shape.is_diagonal else shape.dim


class _SharingMachine(_Machine):
    """One of ranks that share samples out, where a step is of all of them together: what counts is
    from the moment at which `batches` begin to be handed out to that at which all are, and another
    one is.
    """

    def __init__(self, run: Run, rank: int, batches: range) -> None:
        super().__init__(run, rank)
        self._batches, self._weight = batches, 1.0
        self._marks: list[tuple[float, tuple[float, ...]]] = []

    @override
    def batch_begins(self, done: float) -> None:
        so_far = self.simulated.encode_s, self.bytes_sent, self.alpha_s, self.beta_s
        self._marks.append((done, so_far))
        self._run.marks.append((done, self._run.cluster.now_s))

    @override
    def settle(self) -> None:
        bounds, per_step = (self._batches.start, self._batches.stop), self.world_size
        begun_s, ended_s = (
            next(now_s for done, now_s in self._run.marks if done >= bound) for bound in bounds
        )
        self.step_s = (ended_s - begun_s) / len(self._batches) * per_step
        first, last = (next(mark for mark in self._marks if mark[0] >= bound) for bound in bounds)
        if self._run.setting.steps is None:
            # Mega-batches are all alike, and a merge may lie on both sides of a batch.
            first, last = self._marks[0], self._marks[-1]
        share = per_step / ((last[0] - first[0]) or 1)
        self.encode_s, self.bytes_sent, self.alpha_s, self.beta_s = (
            share * (after - before) for before, after in zip(first[1], last[1], strict=True)
        )

    @override
    def step_begins(self, step: int) -> Collective[None]:
        return self._late(step)

    @override
    def step_ended(self, step: int) -> None:
        """What a step is depends on all ranks."""

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        self._run.sender = self.rank
        ticket = super().start(operation, channel)
        if not isinstance(operation, Send):
            return ticket
        # A part of a model is encrypted as a whole before the next one is.
        carrying = self._run.carrying
        return Underway(lambda: carrying.over and ticket.done(), ticket.wait)


def _alone(
    setting: Setting, make: Callable[[int], Collective[object]]
) -> tuple[float, float, float]:
    """Seconds of an exchange on the slowest link, bytes and messages of a rank: of one whose peers
    do as it does, or of all ranks where such a one would wait for ever.
    """
    link = VirtualLink(
        latency_s=setting.latency_s,
        bytes_per_s=1 / setting.network.messages.beta_s_per_byte,
        message_s=setting.message_s,
    )
    try:
        cluster = VirtualCluster(1, link=link, weightless=True)
        cluster.run([_with_itself(make(0))])
    except DeadlockError:
        cluster = VirtualCluster(setting.world_size, link=link, weightless=True)
        cluster.run([make(rank) for rank in range(setting.world_size)])
    return (
        cluster.now_s,
        sum(cluster.bytes_sent) / cluster.world_size,
        sum(cluster.messages_sent) / cluster.world_size,
    )


def _with_itself(work: Collective[object]) -> Collective[None]:
    outcome: object = None
    with suppress(StopIteration):
        while True:
            operation = work.send(outcome)
            if isinstance(operation, Send | Recv):
                operation = replace(operation, peer=0)
            outcome = yield operation


@dataclass(frozen=True, kw_only=True, slots=True)
class _ClosedWire(WeightlessWire):
    """Exchanges as a closed form says, whatever the collective."""

    machine: _Machine

    @override
    def carry(
        self,
        collective: Callable[..., Any],
        rank: int,
        world_size: int,
        mine: WeightlessSparse,
        tally: Tally,
        k: int,
    ) -> Collective[Exchanged[WeightlessSparse]]:
        plain = WeightlessWire(wire=self.wire, num_places=self.num_places)
        yield from self.machine.exchange(
            lambda each: collective(each, world_size, mine, tally, k, plain),
            (collective, self.wire.num_elements, k),
        )
        return Exchanged(kept=mine, owed=self.empty(), tally=replace(tally, weight=world_size))
