"""Steps of a training run under a virtual clock: computing is sleep, and what is exchanged has the
real protocols' messages.

    for each step, on each rank
        sleep for as long as this rank is late, computes, and encodes
        run the generators that training runs, with lengths in the place of payloads

`plan.methods` says what each strategy does in a step.

Workers may share the cores of one machine: whoever computes has a core for a slice of time, as an
operating system gives it, and then it is the turn of whoever has waited longest.

So a step takes longer the more of the other workers compute at the same time, and no longer where
they wait for messages. Whoever needs less than a slice is not interrupted, so workers that were
held up by each other once begin their next steps one after the other, and hold each other up no
more. What carries messages takes cores too.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.arithmetic.costs import MESSAGE_S, LinkCost, NetworkCosts
from offbeat.errors import ConfigError
from offbeat.simulation.training import LEAD_IN, with_lead_in
from offbeat.simulation.virtual import DenseLinks, Tree, VirtualCluster, VirtualLink, VirtualRacks
from offbeat.simulation.virtual_driver import SleepUntil
from offbeat.transport.operations import Collective, DenseOperation, Payload, Sleep
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.parts import PAYLOAD_SHARE
from offbeat_lab.plan.methods.planned_rank import Common
from offbeat_lab.plan.profile import ModelProfile

if TYPE_CHECKING:
    from offbeat_lab.plan.methods.strategy_steps import StrategySteps

EVENTS_UP_TO: Final = 64
"""Workers up to which every message of every exchange of entries is simulated. Beyond that all
such exchanges of a kind take as long as one where all workers begin at once, whose messages are
simulated of one worker. So they do with fewer workers, but more than `FEW_WORKERS`, where links are
equal and many steps are needed.
"""

FEW_WORKERS: Final = 16

GLOO_S_PER_BYTE: Final = 0.6e-9
"""What copying and adding takes of a processor for each byte that gloo sends, while nothing is on
its way: public all-reduces over 10 Gbit/s and more took so much longer than their links need.
`offbeat doctor --write` measures it.
"""

NCCL: Final = DenseLinks(
    hop_s=9.6e-6,
    in_rack_s=3.4e-6,
    trees=(
        Tree(hop_s=28e-6, in_rack_s=28e-6, share=0.9),
        Tree(hop_s=8.5e-6, in_rack_s=1.2e-6, share=0.82),
        Tree(hop_s=5e-6, in_rack_s=0.94e-6, share=0.24),
    ),
)
"""What NCCL itself takes rings and trees to cost when it chooses between them, for its protocols
Simple, LL128 and LL between nodes and over NVLink (its `src/graph/tuning.cc`, 2.8 to 2.10; there
for InfiniBand: what a link takes longer is its latency).
"""

_STEADY_STEPS, _STEPS, _FEWER_STEPS = 2, 24, 8
_MOST_STEPS = 200
_FEW_OF_A_KIND = 2
_TRIED_STEPS, _ALIKE = 4096, 0.01
_FIRST_SPECIAL_STEPS = 4  # by which what is chosen when some have been measured has been chosen
_KINDS_AMONG = 10_000  # steps, of which as many are of each kind as of all later ones


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A model on a cluster.

    Attributes:
        profile: of the model.
        cluster: how many workers, and what connects them.
        message_s: what a message occupies a port for besides its bytes.
        payload_share: what headers leave of a link's rate, in (0, 1].
        shared: which part of one rank's largest entries another rank has too, 0 to 1.
        steps: of a run that are predicted, counted from 0; None: those that follow when whatever
            is done in the first ones only is over.
        free_messages: whether what carries messages takes neither time nor cores, but for the
            cluster's links.
        simulated: what was simulated so far, in this setting and in others.
    """

    profile: ModelProfile
    cluster: Cluster
    message_s: float = MESSAGE_S
    payload_share: float = PAYLOAD_SHARE
    shared: float = 0.2
    steps: range | None = None
    free_messages: bool = False
    simulated: dict[Hashable, Simulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(self.cluster.link_of(w).rate_bit_per_s is None for w in range(self.world_size)):
            raise ConfigError(
                f"cluster {self.cluster.name!r} says no rate for some of its links; a prediction"
                ' needs one, such as link = "1gbit/0.2ms" or --link 1gbit'
            )

    @property
    def world_size(self) -> int:
        return self.cluster.workers

    @cached_property
    def links(self) -> list[VirtualLink]:
        return [
            VirtualLink(
                latency_s=link.latency_s + self._or_free(MESSAGE_WAKE_S),
                # Headers are none of what a window holds.
                bytes_per_s=min(
                    self.payload_share * self.cluster.link_of(worker).bytes_per_s, link.bytes_per_s
                ),
                message_s=self.message_s,
            )
            for worker, link in enumerate(self.cluster.virtual_links())
        ]

    @cached_property
    def racks(self) -> VirtualRacks | None:
        """Whose connections carry headers as links do."""
        racks = self.cluster.virtual_racks()
        return racks and replace(racks, bytes_per_s=self.payload_share * racks.bytes_per_s)

    @property
    def shares_cores(self) -> bool:
        """Whether workers are processes of one machine."""
        return self.cluster.cores is not None

    @property
    def dense_announced(self) -> bool:
        """Whether receivers of dense operations say that they are ready, as gloo's do."""
        return self.shares_cores or not self.profile.on_gpu

    @property
    def latency_s(self) -> float:
        """Of the longest way between two workers."""
        return self.cluster.most_latency_s + self._or_free(MESSAGE_WAKE_S)

    @property
    def dense_round_s(self) -> float:
        """What a round of a dense operation takes besides the ways of its messages."""
        return self._or_free(DENSE_WAKE_S - 2 * MESSAGE_WAKE_S)

    @property
    def dense_hop_s(self) -> float:
        """What a message of a ring occupies ports for besides its bytes."""
        return self.message_s if self.dense_announced else min(self.message_s, NCCL.hop_s or 0.0)

    @property
    def gloo_s_per_byte(self) -> float:
        """What processors add to each byte of gloo's; of shared cores the work is simulated."""
        if not self.dense_announced or self.shares_cores:
            return 0.0
        measured_ns = self.cluster.gloo_ns_per_byte
        return GLOO_S_PER_BYTE if measured_ns is None else 1e-9 * measured_ns

    @property
    def dense_links(self) -> DenseLinks:
        """Those of the backend."""
        if self.dense_announced:
            return DenseLinks(
                round_s=self.dense_round_s,
                announced=True,
                ranks=self.world_size,
                s_per_byte=self.gloo_s_per_byte,
            )
        return replace(NCCL, hop_s=self.dense_hop_s, ranks=self.world_size)

    def message_work_s(self, num_bytes: float) -> float:
        """What encrypting and carrying a message takes of a core."""
        return self._or_free(MESSAGE_CPU_S + MESSAGE_CPU_S_PER_BYTE * num_bytes)

    def dense_work_s(self, num_bytes: float) -> float:
        """What a rank's part of a dense operation takes of a core, of which it sends so much."""
        return self._or_free(DENSE_CPU_S_PER_BYTE * num_bytes)

    def _or_free(self, seconds: float) -> float:
        """What carrying a message costs where workers share cores."""
        return seconds if self.shares_cores and not self.free_messages else 0.0

    @cached_property
    def network(self) -> NetworkCosts:
        """The slowest worker's costs, as `GTopK(collective="auto")` measures them."""
        alpha_s = self.latency_s + self.message_s
        rate = ring_rate = min(link.bytes_per_s for link in self.links)
        racks = self.racks
        if racks is not None and len(set(racks.rack_of)) > 1:
            # All of a rack's workers may send out of it at once.
            rate = min(rate, racks.bytes_per_s / racks.rack_of.count(0))
            ring_rate = min(ring_rate, racks.bytes_per_s)
        return NetworkCosts(
            messages=LinkCost(alpha_s=alpha_s, beta_s_per_byte=1 / rate),
            dense=LinkCost(
                # The slowest word that a receiver is ready is on its way before.
                alpha_s=(1 + self.dense_announced) * self.latency_s
                + self.dense_hop_s
                + self.dense_round_s,
                beta_s_per_byte=1 / ring_rate + self.gloo_s_per_byte,
            ),
            select_s_per_element=self.profile.select_s_per_element,
        )

    @cached_property
    def is_steady(self) -> bool:
        """Whether all steps take the same time on all ranks."""
        cluster = self.cluster
        return not (cluster.straggling or self.profile.spread or set(cluster.speeds) != {1.0})

    @property
    def by_closed_forms(self) -> bool:
        """Whether symmetric collectives take their closed forms."""
        if self.world_size > EVENTS_UP_TO:
            return True
        return self._is_even and not self.is_steady and self.world_size > FEW_WORKERS

    @property
    def _is_even(self) -> bool:
        """Whether all workers' links are alike."""
        return len(set(self.links)) == 1 and self.cluster.racks is None

    @property
    def is_apart(self) -> bool:
        """Whether workers have like links, and cores of their own."""
        return self._is_even and self.cluster.cores is None

    @cached_property
    def num_steps(self) -> int:
        """As many as the mean needs."""
        if self.steps is not None:
            return min(len(self.steps), _MOST_STEPS)
        if self.is_steady:
            return _STEADY_STEPS
        return _STEPS if self.world_size <= EVENTS_UP_TO else _FEWER_STEPS

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """By what computing takes longer than the profile says, shape (steps, ranks)."""
        speeds = np.array(self.cluster.speeds)
        generator = np.random.default_rng([self.cluster.seed, 2])
        shape = (self.num_steps, self.world_size)
        spread = self.profile.spread
        drawn = generator.lognormal(0.0, spread, shape) if spread else np.ones(shape)
        factors: NDArray[np.float64] = drawn / drawn.mean() / speeds
        return factors

    @cached_property
    def late_s(self) -> NDArray[np.float64]:
        """How long ranks sleep besides, shape (steps, ranks). Of steps that nobody has named those
        are taken which are late as all are in the long run, and made so: a delay that is rare is
        else in none of so few, or in too many.
        """
        if self.steps is not None:
            # Counted from 1, as the lab draws for steps.
            return self._late_from(self.steps[-self.num_steps] + 1)
        mean_s = self.cluster.mean_delay_s
        if not mean_s:
            return self._late_from(1)
        nearest, apart = self._late_from(1), math.inf
        for number in range(_TRIED_STEPS // self.num_steps):
            late = self._late_from(1 + number * self.num_steps)
            if late.any() and (distance := abs(math.log(late.mean() / mean_s))) < apart:
                nearest, apart = late, distance
            if apart < _ALIKE:
                break
        return nearest * (mean_s / (nearest.mean() or mean_s))

    def _late_from(self, first_step: int) -> NDArray[np.float64]:
        late = np.zeros((self.num_steps, self.world_size))
        for row in range(self.num_steps):
            for rank, delay_s in self.cluster.delayed_ranks(first_step + row).items():
                late[row, rank] = delay_s
        return late

    @property
    def work_s(self) -> float:
        """Of a step that exchanges nothing, what takes a core."""
        return self.profile.compute_s - self.profile.padding_s

    @cached_property
    def crowding(self) -> float:
        """How much longer a worker of speed 1 computes since all of them share cores, >= 1, when
        all compute at once. All get equal shares of the cores, but nobody gets more than its speed.
        """
        if self.cluster.cores is None:
            return 1.0
        # A worker of speed 1 that is alone keeps a core for this part of its time.
        busy = self.work_s / self.profile.compute_s
        left = self.cluster.cores / busy
        for number, speed in enumerate(sorted(self.cluster.speeds)):
            share = left / (self.world_size - number)
            if share < speed:
                return 1 / share
            left -= speed
        return 1.0

    @property
    def slowdowns(self) -> NDArray[np.float64]:
        """By what each rank computes longer than the profile says, shape (ranks,)."""
        speeds = np.array(self.cluster.speeds)
        slowdowns: NDArray[np.float64] = np.maximum(self.crowding, 1 / speeds)
        return slowdowns

    @cached_property
    def durations_s(self) -> NDArray[np.float64]:
        """Of a step that exchanges nothing, shape (steps, ranks)."""
        drawn: NDArray[np.float64] = self.factors * np.array(self.cluster.speeds)
        return self.late_s + self.profile.compute_s * drawn * self.slowdowns

    @property
    def key(self) -> Hashable:
        """The same where simulations come to the same."""
        shown = [repr(getattr(self, one.name)) for one in fields(self) if one.name != "simulated"]
        return tuple(shown)

    def without_network(self) -> Setting:
        """The same, but messages take no time."""
        fast = self.cluster.link.model_copy(update={"rate_bit_per_s": 1e13, "latency_s": 0.0})
        cluster = self.cluster.changed(link=fast, links={}, racks=None)
        return replace(self, cluster=cluster, message_s=0.0, free_messages=True)

    @property
    def ideal_s(self) -> float:
        """The mean step of a rank that exchanges nothing."""
        return float(self.durations_s.mean())

    @property
    def ideal_pace(self) -> float:
        """As `pace`, of ranks that exchange nothing."""
        return self.pace(self.durations_s.mean(axis=0).tolist())

    def pace(self, steps_s: Sequence[float]) -> float:
        """Steps of a rank in a second, mean over ranks, whose mean steps are `steps_s`. Of ranks
        that are late by chance alone the mean step counts, since each has another one meanwhile.
        """
        alike: defaultdict[Hashable, list[float]] = defaultdict(list)
        for rank, step_s in enumerate(steps_s):
            always_late_s = float(self.late_s[:, rank].min())
            alike[self.cluster.speeds[rank], always_late_s].append(step_s)
        return sum(len(some) ** 2 / sum(some) for some in alike.values()) / len(steps_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What a simulation says.

    Attributes:
        step_s: mean over ranks and steps.
        pace: steps of a rank in a second, mean over ranks: what they take together in a second is
            more than `step_s` says where some do not wait for slower ones.
        bytes_per_step: that a rank sends in a step.
        encode_s: of a step, on a rank of speed 1.
        exchange_s: what a rank's exchanges take of a step on links that carry nothing else, hidden
            behind computing or not.
        alpha_share: which part of it is that of latencies and messages.
        by_events: whether every message was simulated.
        note: what should be known; empty: nothing.
        is_lower_limit: whether the simulated steps end before their first averages do.
        kept_bytes: memory that the strategy's callbacks hold, as far as they were simulated.
    """

    step_s: float
    pace: float
    bytes_per_step: float
    encode_s: float
    exchange_s: float
    alpha_share: float
    by_events: bool = True
    note: str = ""
    is_lower_limit: bool = False
    kept_bytes: float = 0.0


class Run:
    """One simulation of a method.

    Args:
        setting: where.
        method: what all workers do.
        num_workers: how many are simulated, where the others are like them.

    Attributes:
        weights: the steps that are taken, in their order, and how much each counts: 0 for those
            that are taken because others depend on them.
        looked_at: those that count.
    """

    def __init__(self, setting: Setting, method: StrategySteps, num_workers: int) -> None:
        self.setting = setting
        self.method = method
        self.cluster = VirtualCluster(
            num_workers,
            seed=setting.cluster.seed,
            link=setting.links[:num_workers],
            racks=setting.racks,
            weightless=True,
            num_bytes=self._carry,
            dense=setting.dense_links,
        )
        self.cores = Cores(self.cluster, setting.cluster.cores)
        # Who is woken when a message was carried, and the work of the last one.
        self.sender, self.carrying = 0, Work(0, 0.0)
        self.weights = self._weights()
        self.looked_at = [step for step, weight in self.weights.items() if weight]
        self._rows = {step: row for row, step in enumerate(self.looked_at)}
        self.remembered: dict[object, tuple[float, float, float]] = {}
        self.common = Common(num_workers)
        # When how many batches of a common loader had been handed out.
        self.marks: list[tuple[float, float]] = []

    def _weights(self) -> dict[int, float]:
        setting, method = self.setting, self.method
        kind_of, period = method.kind_of, method.period_of(setting.world_size)
        if kind_of is None:
            if setting.steps is not None:
                steps = setting.steps[-setting.num_steps :]
            else:
                first = -(-method.later // period) * period
                least = max(setting.num_steps, method.least_steps)
                steps = range(first, first + -(-least // period) * period)
            return dict.fromkeys(with_lead_in(steps), 0.0) | dict.fromkeys(steps, 1 / len(steps))
        steps_of: dict[Hashable, list[int]] = {}
        all_steps = setting.steps or range(method.later, method.later + _KINDS_AMONG)
        for step in all_steps:
            steps_of.setdefault(kind_of(step), []).append(step)
        usual = max(steps_of, key=lambda kind: len(steps_of[kind]))
        special = (s for s in range(all_steps.stop) if len(steps_of) == 1 or kind_of(s) != usual)
        lead_in = range(max(0, all_steps.start - LEAD_IN), all_steps.start)
        weights = dict.fromkeys([*islice(special, _FIRST_SPECIAL_STEPS), *lead_in], 0.0)
        for kind, some in steps_of.items():
            most = setting.num_steps if kind == usual else _FEW_OF_A_KIND
            taken = some[:most]
            weights |= dict.fromkeys(taken, len(some) / len(all_steps) / len(taken))
        return dict(sorted(weights.items()))

    def _carry(self, payload: Payload) -> float:
        """What a message weighs. What encrypts and carries it takes cores meanwhile."""
        num_bytes = len(payload)
        self.carrying = self.cores.begin(self.sender, self.setting.message_work_s(num_bytes))
        return num_bytes

    def pad(
        self, rank: int, number: int, size: float, *, computed_s: float, coming_s: float
    ) -> Collective[None]:
        """Sleep behind a forward pass, if the cluster wants it to be longer.

        Args:
            rank, number: of the worker and of the step.
            size: of the batch, as a multiple of the profile's.
            computed_s: how long the forward pass took.
            coming_s: what will be computed in the backward pass besides it.
        """
        profile, cluster = self.setting.profile, self.setting.cluster
        if profile.padding_s:
            # What computing takes longer once, padding takes less.
            speed = cluster.speeds[self._slowest(rank, number)]
            whole_s = size * profile.batch.forward_s / speed
            yield Sleep(max(0.0, whole_s - computed_s - coming_s * self.factor(rank, number)))

    def compute(self, rank: int, number: int, seconds: float) -> Collective[None]:
        """Compute what takes `seconds` on a worker of speed 1, alone."""
        seconds *= self.factor(rank, number)
        # A slow worker has a part of a core.
        speed = self.setting.cluster.speeds[self._slowest(rank, number)]
        yield from self.cores.compute(rank, seconds, seconds * speed)

    def factor(self, rank: int, number: int) -> float:
        """By what step `number` of `rank` computes longer than the profile says."""
        return float(self.setting.factors[self._row(number), self._slowest(rank, number)])

    def late(self, rank: int, number: int) -> Collective[None]:
        """Sleep for as long as `rank` is late."""
        seconds = float(self.setting.late_s[self._row(number), self._slowest(rank, number)])
        if seconds:
            yield Sleep(seconds)

    def _slowest(self, rank: int, number: int) -> int:
        """`rank`; where one is simulated in the place of all, who takes longest for step
        `number`.
        """
        if self.cluster.world_size == self.setting.world_size:
            return rank
        return int(self.setting.durations_s[self._row(number)].argmax())

    def _row(self, number: int) -> int:
        """Of what is drawn for each step."""
        return self._rows.get(number, number - self.looked_at[0]) % self.setting.num_steps

    def closed_form(self, seconds: float, num_bytes: float) -> Collective[None]:
        """All ranks together, for as long as a closed form says."""
        self.cores.begin(0, self.setting.message_work_s(num_bytes))
        yield ClosedForm(seconds, self.setting)


class ClosedForm(DenseOperation):
    """What takes `seconds` from the moment at which the last rank has begun it. Simulated only."""

    __slots__ = ("_num_bytes",)

    def __init__(self, seconds: float, setting: Setting) -> None:
        slowest = min(setting.links, key=lambda link: link.bytes_per_s)
        fixed_s = slowest.latency_s + setting.dense_hop_s + setting.dense_round_s
        rate = 1 / (1 / slowest.bytes_per_s + setting.gloo_s_per_byte)
        racks = setting.racks
        if racks is not None and len(set(racks.rack_of)) > 1:
            rate = min(rate, racks.bytes_per_s)
            fixed_s += racks.latency_s
        self._num_bytes = round(max(0.0, seconds - fixed_s) * rate)

    @property
    @override
    def num_bytes(self) -> int:
        return self._num_bytes

    @override
    def num_hops(self, world_size: int) -> int:
        return 1

    @override
    def hop_bytes(self, num_bytes: float, world_size: int) -> float:
        return num_bytes

    @override
    def traffic(self, result: Any, *, rank: int, world_size: int) -> Any:
        raise NotImplementedError("a closed form counts its bytes itself")

    @classmethod
    @override
    def combine(cls, operations: Any) -> list[Any]:
        return [None] * len(operations)

    @override
    def finish(self, backends: Any) -> Any:
        raise NotImplementedError("a closed form is simulated only")


DENSE_CPU_S_PER_BYTE: Final = 0.32e-9
"""gloo's all-reduce on loopback, CPU time of a rank for each byte that it sends: 0.29 to 0.36 ns
for 20 MB among 2 and 4 ranks.
"""

MESSAGE_CPU_S_PER_BYTE: Final = 2.6e-9
"""ZeroMQ with CURVE on loopback, CPU time of sender and receiver together: 2.4 to 2.9 ns (0.2 to
0.3 without encryption).
"""

MESSAGE_CPU_S: Final = 25e-6
"""Likewise for a message of 200 bytes: 22 to 29 us."""

MESSAGE_WAKE_S: Final = 0.4e-3
"""How long a message takes to come from one process to another where both wait on cores that they
share: what `GTopK(collective="auto")` probed on emulated links with 2 to 8 workers on 2 cores was
0.3 to 0.66 ms.
"""

DENSE_WAKE_S: Final = 1e-3
"""Likewise of a round of gloo's all-reduce, whose threads hand each message on: SPD-KFAC's sums of
a few hundred bytes beside training took 0.3 to 2.6 ms a round there.
"""

SLICE_S: Final = 4e-3
"""A tick of a kernel that has 250 of them a second, as most do: it looks who is next at a tick."""

_LEAST_S: Final = 1e-9


class Work:
    """Something that a core is needed for.

    Attributes:
        over: whether it is done.
    """

    __slots__ = ("left_s", "over", "rank")

    def __init__(self, rank: int, work_s: float) -> None:
        self.rank = rank
        self.left_s = work_s
        self.over = work_s <= 0


class Cores:
    """The cores that all ranks of `cluster` share.

    Args:
        cluster: has the clock.
        number: of them, >= 1; None: each rank has enough of its own.
    """

    def __init__(self, cluster: VirtualCluster, number: int | None) -> None:
        self.number = number
        self._cluster = cluster
        self._waiting: deque[Work] = deque()
        self._num_busy = 0
        self._left_of_slice_s: dict[int, float] = {}

    def begin(self, rank: int, work_s: float) -> Work:
        """Begin something that takes a core `work_s` seconds, on behalf of `rank`."""
        work = Work(rank, 0.0 if self.number is None else work_s)
        if not work.over:
            # Whoever goes on at once keeps its core.
            if rank in self._left_of_slice_s:
                self._waiting.appendleft(work)
            else:
                self._waiting.append(work)
            self._cluster.at(self._cluster.now_s, self._assign)
        return work

    def compute(self, rank: int, duration_s: float, work_s: float) -> Collective[None]:
        """Compute for `duration_s` at least, of which `work_s` take a core."""
        if self.number is None:
            yield Sleep(duration_s)
            return
        begun_s = self._cluster.now_s
        work = self.begin(rank, work_s)
        yield SleepUntil(over=lambda: work.over)
        left_s = begun_s + duration_s - self._cluster.now_s
        if left_s > 0:
            yield Sleep(left_s)

    def _assign(self) -> None:
        """Give free cores to those who wait."""
        assert self.number is not None
        while self._waiting and self._num_busy < self.number:
            work = self._waiting.popleft()
            slice_s = self._left_of_slice_s.pop(work.rank, SLICE_S)
            self._run(work, min(work.left_s, slice_s), slice_s)
        self._left_of_slice_s.clear()

    def _run(self, work: Work, duration_s: float, slice_s: float) -> None:
        self._num_busy += 1

        def stop() -> None:
            self._num_busy -= 1
            work.left_s -= duration_s
            if work.left_s <= _LEAST_S:
                work.over = True
                self._cluster.touch(work.rank)
                if slice_s - duration_s > _LEAST_S:
                    self._left_of_slice_s[work.rank] = slice_s - duration_s
            else:
                self._waiting.append(work)
            # Behind what the rank does next at this moment.
            self._cluster.at(self._cluster.now_s, self._assign)

        self._cluster.at(self._cluster.now_s + duration_s, stop)
