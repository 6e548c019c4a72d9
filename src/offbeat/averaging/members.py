"""An average among the members of the run: workers die, come back and join, and it goes on.

    each member, after its local steps:
        change_i = x_i - anchor
        anchor   = the outer optimizer's step from the anchor with
                   sum over members of w_i change_i / sum of w_i
        x_i      = anchor

w_i is what the member has computed since it was in an average: samples, where all members were told
of theirs (`Session.weigh`, or a loader), and else steps.

An average is final for all that are in it or for none (`membership.atomic_group`). When a member
dies before, it is made again of the same models, in the next generation, without the dead: they
lose what they had done since their last average, and their peers nothing but the time.

One that is *behind* is sent, by a member that is not, the anchor, the outer optimizer's state, and
where the schedule stands. One that joins, or comes back after it was given up, has weight 0. One
that was late, where there is a quorum, has missed some averages only: its change since the last
that it was in is owed, and counts in the next one, as a late learner's does in Decoupled DiLoCo
(arXiv 2604.21428). It waits for that one, so that a slow member is in every other average at least
and none trains on a model that is older than that.

Cost per average: 2(P-1)/P n elements sent by each member and a few short messages, as they go
between two ranks; of one that is behind the anchor and the outer optimizer's state besides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from typing_extensions import override

from offbeat.averaging.outer import OuterOptimizer
from offbeat.averaging.periodic import (
    AveragingSchedule,
    EncodedChanges,
    Everyone,
    PeriodicAverage,
    WeightExchange,
    coded_changes,
)
from offbeat.callbacks.callback import CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.json_objects import Count, build
from offbeat.codec.model_wire import Counters
from offbeat.codec.tensor_bytes import packed, unpacked
from offbeat.codec.topk_codec import WeightCodec
from offbeat.collectives.gather import all_gather, gather_largest
from offbeat.errors import MALFORMED, CheckpointError, ConfigError, PeerError, WireError
from offbeat.membership.agreement import Generation
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.membership.quorum import Quorum
from offbeat.transport.driver import Driver, Pending, Stream, Ticket
from offbeat.transport.operations import Collective, Operation, Payload, Recv, Send
from offbeat.weights.model_weights import (
    ModelWeights,
    empty_means,
    mean_of_tensors,
    require_finite,
)

T = TypeVar("T")

Purpose: TypeAlias = Literal["average", "copy", "finish"]
"""What a member meets the others for: an average, the mean for a copy of its model, or the mean at
the end of its training. As long as any of them comes for an average, all make that one.
"""
_NUMBERS: Final = "numbers"
"""Under this name what is no tensor travels to a member that is behind."""
_PURPOSES: Final[tuple[Purpose, ...]] = ("average", "copy", "finish")


class Coming(NamedTuple):
    """What a member says of itself as it comes to an average.

    Attributes:
        purpose: what it comes for.
        is_new: whether it has nothing that its peers could use.
        num_averages: that its anchor has been through.
        samples, steps: it has computed since.
    """

    purpose: Purpose
    is_new: bool
    num_averages: Count
    samples: Count
    steps: Count

    @classmethod
    def from_bytes(cls, data: Payload) -> Coming:
        """What `json.dumps` made bytes of. Raises `WireError`."""
        try:
            return build(cls, json.loads(bytes(data)))
        except MALFORMED as error:
            raise WireError(f"a word before an average is damaged: {bytes(data[:80])!r}") from error


def weights_of(coming: Sequence[Coming]) -> list[float]:
    """Of each member's change in the mean of all."""
    knowing = [each for each in coming if not each.is_new]
    # Samples count only where each member that has taken steps was told of them.
    told = all(each.samples for each in knowing if each.steps)
    counts = [(each.samples if told else each.steps) * (not each.is_new) for each in coming]
    return [float(n) for n in (counts if any(counts) else [not each.is_new for each in coming])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Average:
    """An average that is final, in memory of its own.

    Attributes:
        purpose: what it was made for.
        generation: whose members are in it.
        changes: the mean of those of parameters; None: the codec has it.
        statistics: the means of them.
        counters: the largest of all members.
        was_new: whether this member has brought nothing.
        standing: of the run, for a member that was behind; else None.
    """

    purpose: Purpose
    generation: Generation
    changes: Sequence[torch.Tensor] | None
    statistics: Sequence[torch.Tensor]
    counters: Counters
    was_new: bool
    standing: Payload | None


class _Within(Driver):
    """Has collectives carried out as parts of the work of a group, among those who do it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._begun: list[_Part[Any]] = []

    @override
    def launch(self, collective: Collective[T], channel: int) -> Pending[T]:
        part = _Part(self, collective, channel)
        self._begun.append(part)
        return part

    def carry_out(self) -> Collective[None]:
        """What was launched, one after the other."""
        begun, self._begun = self._begun, []
        for part in begun:
            yield from part.carry_out()

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        raise AssertionError("the work's own driver starts operations")

    @override
    def close(self) -> None:
        self._begun = []


class _Part(Pending[T]):
    def carry_out(self) -> Collective[None]:
        self._end(result=(yield from self._collective))


class MeanOfMembers(WeightExchange):
    """The mean of the members' changes since the last average, each by what it has computed.

    Args:
        weights: what is averaged.
        rule: as of `WeightExchange`.
        group: the members.
        quorum: who is waited for.
        codec: how changes travel; None: as they are.
        context: of the session.

    Attributes:
        samples, steps: that this member has computed since it was in an average.
        average: that was made, until it is merged.
        standing: says where the run stands, to one that is behind.
    """

    state_key = "average_of_members"

    standing: Callable[[], Payload]

    def __init__(
        self,
        weights: ModelWeights,
        rule: OuterOptimizer,
        *,
        group: AtomicGroup,
        quorum: Quorum,
        codec: WeightCodec | None = None,
        context: Context,
    ) -> None:
        driver = context.driver
        self._within = _Within(driver.rank, driver.world_size)
        self._is_encoded = False
        peers = Everyone(self._within, Stream(0))
        super().__init__(rule=rule, changes=coded_changes(context.parameters, codec, peers))
        self.weights, self.group = weights, group
        self.quorum, self._rank = quorum, context.driver.rank
        self._record_wait = context.record_wait
        self.samples = self.steps = 0
        self.average: Average | None = None

    @override
    def merge(self) -> None:
        average, self.average = self.average, None
        assert average is not None, "members have met"
        self.write_buffers(average, self.weights)
        changes = average.changes
        if changes is None:
            assert self._changes is not None, "it has encoded them"
            changes, self._is_encoded = self._changes.mean(), False
        self.rule.merge_(changes)
        self.samples = self.steps = 0

    def meet(self, purpose: Purpose, number: int) -> Average:
        """Come together with the other members. Collective; changes no weights.

        Args:
            purpose: what for.
            number: of averages before.

        Raises:
            PeerError: no member has a model, or this rank can take part no more.
            NonFiniteError: this rank's weights hold an infinity or a NaN.
        """
        is_new = self.group.is_new
        if not is_new:
            self.begin()
        begin_s, encode_s = time.monotonic(), self.encode_s
        average = self.group.run(
            partial(self._work, purpose, number),
            quorum=self.quorum,
            counts=purpose == "average" and not is_new,
        )
        if purpose == "copy":
            self.encode_s = encode_s  # only training counts
        else:
            self._record_wait(begin_s, time.monotonic() - (self.encode_s - encode_s))
        if average is None:
            raise PeerError("no member of the run has a model to give to this worker")
        self.group.caught_up(average.generation)
        return average

    def _work(
        self, purpose: Purpose, number: int, generation: Generation, position: int
    ) -> Collective[Average | None]:
        mine = Coming(purpose, self.group.is_new, number, self.samples, self.steps)
        word = json.dumps(mine).encode()
        coming = yield from all_gather(position, generation.size, word, Coming.from_bytes)
        # All members hold the same words, so that they conclude the same.
        knowing = [place for place, each in enumerate(coming) if not each.is_new]
        if not knowing:
            return None
        latest = max(coming[place].num_averages for place in knowing)
        current = [place for place in knowing if coming[place].num_averages == latest]
        purposes = {coming[place].purpose for place in knowing}
        behind = [place for place in range(generation.size) if place not in current]
        standing: Payload | None = None
        if position in behind:
            standing = yield Recv(current[0])
        elif behind and position == current[0]:
            told = self.standing()
            for place in behind:
                yield Send(place, told)
        agreed = next(each for each in _PURPOSES if each in purposes)
        weights = weights_of(coming)
        # Statistics travel as they are: a difference could take them out of their range.
        changes, statistics = [*self.rule.changes()], self.weights.statistics()
        whole = [*changes, *statistics]
        if weights[position]:
            # Checked before anything is sent: one bad model would spoil the models of all peers.
            require_finite(whole, rank=self._rank)
        codec = self._changes if agreed == "average" else None
        if codec is not None:
            yield from self._encode(codec, position, weights, changes)
            whole = statistics
        means = empty_means(whole)
        yield from mean_of_tensors(position, weights, whole, means)
        first = len(means) - len(statistics)
        counters = self.weights.own_counters()
        if counters.size:
            parties = [not each.is_new for each in coming]
            counters = yield from gather_largest(position, parties, counters)
        return Average(
            purpose=agreed,
            generation=generation,
            changes=means[:first] if codec is None else None,
            statistics=means[first:],
            counters=counters,
            was_new=mine.is_new,
            standing=standing,
        )

    def _encode(
        self,
        codec: EncodedChanges,
        position: int,
        weights: Sequence[float],
        changes: Sequence[torch.Tensor],
    ) -> Collective[None]:
        if self._is_encoded:
            codec.discard()  # that work was void
        self._within.rank, self._within.world_size = position, len(weights)
        # About 1, so that what is owed is of the size of changes.
        weight = weights[position] * len(weights) / sum(weights)
        encode_s, self._is_encoded = codec.encode_s, True
        codec.launch(changes, weight=weight)
        yield from self._within.carry_out()
        self.encode_s += codec.encode_s - encode_s

    def write_mean(self, average: Average, weights: ModelWeights) -> None:
        """Let `weights`, this rank's own or a copy, hold the mean of all members' models."""
        assert average.changes is not None, "a codec is for averages of the models themselves"
        for (name, anchor), mean in zip(self.rule.anchor.items(), average.changes, strict=True):
            weights.parameters[name].detach().copy_(anchor.detach() + mean)
        self.write_buffers(average, weights)

    def write_buffers(self, average: Average, weights: ModelWeights) -> None:
        """The same of buffers alone."""
        for buffer, mean in zip(weights.statistics(), average.statistics, strict=True):
            buffer.copy_(mean)
        weights.write_counters(average.counters)

    @override
    def state(self) -> CallbackState:
        state, counts = super().state(), {"samples": self.samples, "steps": self.steps}
        state["local"] |= counts | self.weights.counter_state()
        return state

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        local = state.get("local", {})
        if "steps" not in local:  # what a peer has said of where the run stands
            self.rule.load(state["replicated"])
            return
        super().load(state)
        self.samples, self.steps = int(local["samples"]), int(local["steps"])
        self.weights.load_counter_state(local)


class AverageOfMembers(PeriodicAverage):
    """An average of all that are members of the run, after the optimizer steps that a schedule
    says.

    Args:
        exchange: with whom.
        schedule: after which steps.
        context: of the session.
    """

    averages_models = True

    def __init__(
        self, exchange: MeanOfMembers, schedule: AveragingSchedule, *, context: Context
    ) -> None:
        super().__init__(exchange, schedule)
        self._members = exchange
        self._claimed = 0  # samples of the coming backward pass
        exchange.standing = self._standing
        exchange.group.enter(context.enter, partial(self._come, "average"))

    @override
    def replicas_agree(self) -> bool:
        # With a quorum a late member does not hold what the others do.
        return (
            self._members.quorum.fraction == 1
            and not self._members.group.is_new
            and self._num_steps <= self._averaged_at_step
        )

    @override
    def on_batch_claimed(self, num_samples: int) -> None:
        self._claimed = num_samples

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        # A batch without a backward pass, as of an evaluation, is in no step.
        self._members.samples += self._claimed
        self._claimed = 0
        super().on_backward_begins(synchronised=synchronised)

    @override
    def on_after_step(self) -> None:
        self._members.steps += 1
        super().on_after_step()

    @override
    def on_finish(self) -> None:
        """Take part in the averages of the peers until they have come to the end too, and in a mean
        of what all have.
        """
        while (average := self._come("finish")).purpose != "finish":
            pass
        self._members.write_mean(average, self._members.weights)
        self._members.group.has_finished = True

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        members = self._members
        if members.group.has_finished or self.replicas_agree():
            return frozenset()  # All members hold the same model, and the copy is one of it.
        average = self._come("copy")
        if average.purpose == "copy":
            members.write_mean(average, weights)
        else:  # all that were in the average hold the same now
            weights.write(members.weights.tensors(), members.weights.read_counters())
        return frozenset()

    @override
    def on_abandon(self, reason: str) -> None:
        self._members.group.abort(reason)

    @override
    def close(self) -> None:
        self._members.group.leave()

    @override
    def _launch(self, due: int) -> None:
        self._come("average")

    @torch.no_grad()
    def _come(self, purpose: Purpose) -> Average:
        """Meet the other members, and take over what they make if any comes for an average."""
        average = self._members.meet(purpose, self._num_averages)
        if average.was_new and average.purpose == "finish" != purpose:
            raise ConfigError("the run ended while this worker was on its way in; start a new one")
        if average.standing is not None:
            self.catch_up(average, average.standing)
        if average.purpose == "average":
            self._members.average, self._launched_for = average, self._num_steps
            self._merge()
        return average

    def _standing(self) -> Payload:
        """What a member that is behind has to know before the next average."""
        replicated = self.state_dict()["replicated"]
        tensors = {key: each for key, each in replicated.items() if isinstance(each, torch.Tensor)}
        numbers = {key: each for key, each in replicated.items() if key not in tensors}
        return packed({**tensors, _NUMBERS: torch.tensor([*json.dumps(numbers).encode()])})

    def catch_up(self, average: Average, standing: Payload) -> None:
        """Stand where the peers do before this average, and keep what is owed to it."""
        members, num_steps = self._members, self._num_steps
        changes = [*members.rule.changes()]
        try:
            state: dict[str, Any] = dict(unpacked(standing, "where the run stands"))
            state |= json.loads(bytes(state.pop(_NUMBERS).tolist()))
            self.load_state_dict({"replicated": state})
        except (*MALFORMED, CheckpointError) as error:
            raise WireError("what a peer says of where the run stands does not fit") from error
        for (name, anchor), change in zip(members.rule.anchor.items(), changes, strict=True):
            model = anchor.detach() if average.was_new else anchor.detach() + change
            members.weights.parameters[name].detach().copy_(model)
        if average.was_new:
            members.write_buffers(average, members.weights)
            members.samples = members.steps = 0
            self.start_step = self.start_step if num_steps else self._num_steps
