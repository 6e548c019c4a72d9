"""One merge of all members' models: propose, agree, average, commit.

Adaptive SGD (arXiv 2110.07029) merges the workers' models after every mega-batch, each with a
weight of its own. Here a worker may die, fall behind or join the run while that happens. So a merge
is a transaction of the members of one generation:

    propose     Every member tells its peers what it wants to do, what it has computed since the
                last merge, and how its model is laid out (`MergeProposal`).
    agree       Each member concludes from these proposals, without another message, what all of
                them do, and with which weights.
    average     The weighted mean of the models, into memory of its own. Where few rows of a sparse
                parameter have changed, members first exchange which, and average their union alone.
    commit      The outcome is final for all members or for none (`AtomicGroup.run`). Only then is
                the model written. An outcome that is void is dropped, and everything is done again
                with those that are left, in the next generation.

At the start of a run models stay the same: what is averaged is gradients, before each optimizer
step (`step`), by the same pipeline.

A member that is new has weight 0, and holds its peers' model afterwards. One that has come to the
end of its training goes on to take part, also with weight 0, until all have, since the collectives
need every member. What members agree on without averaging, such as the place at which a loader
begins, they put into their proposals.

What is merged is a snapshot of the model (`freeze`, `merge_snapshot`). The trainer waits for it, or
goes on meanwhile; either way it adds to the outcome what it has done since (`take`), which is exact
whatever the weights of later merges are: model = merged + (model - snapshot). A merge that is void
is made again from the same snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.index_codecs import RowSet, decode_rows, encode_rows
from offbeat.codec.jit import kernel
from offbeat.codec.model_wire import Counters, no_counters
from offbeat.collectives.gather import all_gather, gather_largest
from offbeat.errors import ConfigError, PeerError
from offbeat.megabatch.coded_merge import MergedChanges, Owed
from offbeat.megabatch.merge_momentum import MergeMomentum
from offbeat.megabatch.proposal import (
    MergeProposal,
    ProposalKind,
    TrainerReport,
    agreed_kind,
    hold_the_same,
)
from offbeat.membership.agreement import Generation
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.transport.operations import Collective, Recv, Send
from offbeat.weights.model_weights import (
    ModelWeights,
    dense_gradient,
    empty_means,
    mean_of_tensors,
    require_finite,
)
from offbeat.weights.optimizer_state import (
    OptimizerStates,
    is_sum,
    names_of_merged,
    packed,
    shares_of_states,
)
from offbeat.weights.statistics import merge_running_average_, merge_statistics, merge_sums_
from offbeat.xmc.row_gradients import RowGradient, as_sparse

_NEARLY_ALL: Final = 0.95
_GRADIENT: Final = "gradient"

Weigh: TypeAlias = Callable[[Sequence[MergeProposal]], Sequence[float]]
"""The merge weights of the members that propose to merge, in the order of their proposals."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelMean:
    """The mean of models, in memory of its own until it is committed.

    Attributes:
        merged: the mean, as tensors like `tensors`, in float32 or wider.
        tensors: of which this member's are; those of parameters in `rows` are copies of these rows.
        rows: of the parameters of which only some rows are merged, and of their optimizer's states:
            which rows, by the tensor's position.
        whole: the tensors that `tensors` are, or are rows of, by position.
        states: the optimizer's states among `whole`, by name, one a parameter.
        shares: of states, as `shares_of_states`.
        counters: the largest that any member has counted in each integer buffer.
        weights: of each member's model in the mean, by position in the generation.
        encode_s: seconds that were spent on laying vectors out.
        owed: what this member owes then, where changes are coded.
        copies: of the sparse parameters, as the merge left them, by position; once it is laid out
            for the trainer.
    """

    merged: list[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    rows: Mapping[int, torch.Tensor]
    whole: Sequence[torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]]
    shares: Mapping[str, Sequence[float]]
    counters: Counters
    weights: Sequence[float]
    encode_s: float
    owed: Owed | None = None
    copies: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergeOutcome:
    """What comes of the members' proposals.

    Attributes:
        kind: what was done; None: nothing, since all members are new.
        mine: this member's proposal.
        generation: of the members.
        proposals: of all members, by position in the generation.
        mean: of their models; None where nobody needs it.
        snapshot: of this member, once the merge of it is laid out for the trainer.
    """

    kind: ProposalKind | None
    mine: MergeProposal
    generation: Generation
    proposals: tuple[MergeProposal, ...]
    mean: ModelMean | None = None
    snapshot: ModelSnapshot | None = None

    @property
    def parties(self) -> list[bool]:
        """By position: whether the member's own model is in what was done."""
        return [proposal.is_party_to(self.kind) for proposal in self.proposals]

    @property
    def reference_member(self) -> int:
        """The position of the first member that goes on, and whose model is in what was done. Where
        members must take something from one of them, they take it from this one.
        """
        goes_on = [each.kind == self.kind and not each.is_new for each in self.proposals]
        return goes_on.index(True)

    @property
    def reference(self) -> MergeProposal:
        """The proposal of `reference_member`."""
        return self.proposals[self.reference_member]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelSnapshot:
    """A rank's model as it was when its trainer let it be merged.

    Attributes:
        report: what the trainer had done.
        tensors: copies of what is averaged of the model.
        states: copies of the states of the optimizer that are merged with it, by name.
        presence: of these states, as `packed` writes it.
        counters: what the rank had counted itself in its integer buffers.
        counted: what these buffers held.
        num_merges: number of merges in the run so far.
        rows_known_since: number of the merge that `copies` are from; None: there are none.
        copies: of the sparse parameters, as the last merge left them, by position.
        sparse: positions of the parameters whose gradient has been sparse here.
        frozen: positions of the parameters that do not train.
    """

    report: TrainerReport
    tensors: Sequence[torch.Tensor]
    presence: tuple[tuple[str, str], ...]
    num_merges: int
    rows_known_since: int | None
    copies: Mapping[int, torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    counters: Counters = field(default_factory=no_counters)
    counted: Counters = field(default_factory=no_counters)
    sparse: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()


class MergeProtocol:
    """One rank's model, and how it is merged with its peers' models.

    Args:
        weights: what is merged.
        group: the members with which it is merged.
        weigh: says with which weights.
        momentum: added in each merge; None: none.
        rank: this rank.
        states: of the optimizer, merged with the model.
        changes: in place of which models travel; None: they travel whole. Needs a momentum, which
            may be 0, for the model that they begin with.

    Attributes:
        rows: those that have changed since the last merge.
        num_merges: number of merges in the run so far.
        num_exchanges: number of merges that this rank took part in.
        encode_s: seconds that the trainer spent on laying vectors out and writing results.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        group: AtomicGroup,
        weigh: Weigh,
        momentum: MergeMomentum | None,
        rank: int,
        states: OptimizerStates,
        changes: MergedChanges | None = None,
    ) -> None:
        self._parameters = list(weights.parameters.values())
        self.rows = TouchedRows(self._parameters)
        self.num_merges = self.num_exchanges = 0
        self.encode_s = 0.0
        self._weights, self._group, self._weigh = weights, group, weigh
        self._momentum, self._rank = momentum, rank
        self._states, self._changes = states, changes

    # What a trainer can ask for

    def merge(self, report: TrainerReport) -> MergeOutcome:
        """Merge this rank's model with those of all members. A rank that is new comes back with
        the first merge that its peers make.

        Raises:
            PeerError: no member has a model, or this rank can take part no more.
            ConfigError: its peers have ended their training while this rank was joining.
            MismatchError: the members' proposals do not go together.
            NonFiniteError: this rank's weights hold an infinity or a NaN.
        """
        return self._take_at_once(self.freeze(report), "merge")

    def step(self, report: TrainerReport, *, takes_step: bool) -> MergeOutcome:
        """Average gradients over samples, before a step that all members take. A rank that is new
        merges instead.

        Args:
            report: of this rank; its share says how many samples its gradient is of.
            takes_step: whether this rank has a gradient, and takes the step.
        """
        self.rows.note_sparse_gradients()
        sparse = sorted(self.rows.sparse)
        # What a loop has left without a step is nobody's, and need not be finite.
        gradients = [
            dense_gradient(each) if takes_step else torch.zeros_like(each)
            for each in self._parameters
        ]
        has_gradient = [takes_step and p.grad is not None for p in self._parameters]
        snapshot = ModelSnapshot(
            report=report,
            tensors=gradients,
            presence=packed({_GRADIENT: has_gradient}) if any(has_gradient) else (),
            num_merges=self.num_merges,
            rows_known_since=0,
            # All rows of a sparse gradient differ from these but those that nobody has changed.
            copies={number: torch.zeros_like(gradients[number]) for number in sparse},
        )

        def propose() -> _OwnProposal:
            # One that was left out needs the model.
            if self._group.is_new:
                return self._propose(self.freeze(report), "merge")
            return self._propose(snapshot, "step")

        outcome = self._join_merge(propose)
        mean = outcome.mean
        assert mean is not None, "gradients or models"
        self.encode_s += mean.encode_s
        if outcome.kind == "merge":
            self.take(self._laid_out(self.freeze(report), outcome), num_steps=0)
            return outcome  # which `take` has counted
        self.num_exchanges += 1
        if takes_step:
            shares = mean.shares.get(_GRADIENT, [0.0] * len(self._parameters))
            for number, (parameter, gradient, share) in enumerate(
                zip(self._parameters, mean.merged, shares, strict=True)
            ):
                if not share:
                    continue  # no rank has one
                values, rows = gradient.to(parameter.dtype), mean.rows.get(number)
                if number in sparse and rows is None:
                    rows = values.unsqueeze(1).flatten(1).any(dim=1).nonzero().squeeze(1)
                    values = values.index_select(0, rows)
                if rows is not None:
                    values = as_sparse(RowGradient(rows, values), parameter.shape)
                parameter.grad = values
        return outcome

    def agree(self, report: TrainerReport, payload: str) -> MergeOutcome:
        """Exchange `payload`, JSON, with all members. A rank that is new merges instead."""
        return self._take_at_once(self.freeze(report), "agree", payload)

    def finish(self, report: TrainerReport) -> None:
        """Take part until all members have come to the end of their training, and merge what any of
        them has computed since the last merge. All hold the same model then.
        """
        while True:
            outcome = self._take_at_once(self.freeze(report), "finish")
            if outcome.kind == "finish":
                break
            # By either, what it has done is in all models, or a loader gives it out again.
            if outcome.kind in ("merge", "step"):
                report = replace(report, since_merge=0)
        # All members hold the same proposals, so that they conclude the same.
        # One that is new and has not finished is not among them: it hears that the run is over.
        finished = [each for each in outcome.proposals if each.kind == "finish"]
        if any(each.is_new or each.report.since_merge for each in finished):
            self.merge(report)

    def mean_into(self, weights: ModelWeights, report: TrainerReport) -> MergeOutcome:
        """Write the mean of all members' models into `weights`, a copy of this rank's model, which
        may be from before a merge that it has taken over. A rank that is new merges first, and then
        has the mean.
        """
        outcome = self._take_at_once(self.freeze(report), "mean")
        # Without one all members hold the same.
        if outcome.kind == "merge" or outcome.mean is None:
            weights.write(self._weights.tensors(), self._weights.read_counters())
        else:
            weights.write(outcome.mean.merged, outcome.mean.counters)
        return outcome

    def _take_at_once(
        self, snapshot: ModelSnapshot, kind: ProposalKind, payload: str = ""
    ) -> MergeOutcome:
        """Propose to do `kind`, wait for what comes of it, and take over what was merged."""
        outcome = self._join_merge(partial(self._propose, snapshot, kind, payload))
        if outcome.mean is not None:
            self.encode_s += outcome.mean.encode_s
        if outcome.kind == "merge":
            self.take(self._laid_out(snapshot, outcome), num_steps=0)
        return outcome

    # The three steps of a merge, of which the second may go on beside training

    def freeze(self, report: TrainerReport) -> ModelSnapshot:
        """A copy of this rank's model, for `merge_snapshot`."""
        begin_s = time.perf_counter()
        presence = self._states.presence()
        snapshot = ModelSnapshot(
            report=report,
            tensors=[tensor.detach().clone() for tensor in self._weights.tensors()],
            states={
                name: [state.clone() for state in self._states.tensors(name)] for name in presence
            },
            presence=packed(presence),
            counters=self._weights.own_counters().copy(),
            counted=self._weights.read_counters(),
            num_merges=self.num_merges,
            rows_known_since=self.rows.known_since,
            copies=self.rows.copies,
            sparse=tuple(sorted(self.rows.sparse)),
            frozen=tuple(n for n, p in enumerate(self._parameters) if not p.requires_grad),
        )
        _synchronize(snapshot.tensors)
        self.encode_s += time.perf_counter() - begin_s
        return snapshot

    def merge_snapshot(self, snapshot: ModelSnapshot) -> MergeOutcome:
        """As `merge`, of the snapshot. Changes nothing that a trainer uses, so that another thread
        may call it; until it has returned, no other method that communicates is called.
        """
        outcome = self._join_merge(partial(self._propose, snapshot, "merge"))
        return self._laid_out(snapshot, outcome)

    def _laid_out(self, snapshot: ModelSnapshot, outcome: MergeOutcome) -> MergeOutcome:
        """The same for `take`: with the rows that momentum has moved, and copies to compare with at
        the next merge.
        """
        mean = outcome.mean
        assert mean is not None
        before, rows, whole, merged = [*mean.tensors], dict(mean.rows), mean.whole, mean.merged
        if self._momentum is not None:
            # It moves all rows, the merged ones and the others.
            for number in rows.keys() & range(len(self._parameters)):
                some, merged[number] = merged[number], whole[number].to(merged[number].dtype)
                merged[number] = merged[number].index_copy(0, rows.pop(number), some)
                before[number] = whole[number]
            merged = [*self._momentum.added_to(merged), *merged[len(self._parameters) :]]
        copies = {}
        for number in {number for each in outcome.proposals for number in each.sparse}:
            if number in rows:
                # The snapshot's memory, since of these rows `before` has a copy.
                some = merged[number].to(whole[number].dtype)
                copies[number] = whole[number].index_copy_(0, rows[number], some)
            else:
                copies[number] = merged[number].to(whole[number].dtype, copy=True)
        _synchronize(merged)
        mean = replace(mean, tensors=before, merged=merged, rows=rows, copies=copies)
        return replace(outcome, mean=mean, snapshot=snapshot)

    def take(self, outcome: MergeOutcome, *, num_steps: int) -> None:
        """The model of a merge that is final, and what this rank has done since the snapshot, are
        its model now. A rank that is new has the merged model alone.

        Parameters and sums of squares take over the rank's progress as a difference. Of momenta and
        second moments, of which a part is left after each step, the same part is taken over of the
        merged ones, and all of those that no step has changed: they are what they would be if the
        rank had had these when it went on. Where that part is unknown, and of buffers such as a
        running variance, what both sides have changed is averaged (`weights.statistics`).

        Args:
            outcome: of `merge_snapshot`.
            num_steps: that this rank has taken since the snapshot.
        """
        begin_s = time.perf_counter()
        mean, snapshot = outcome.mean, outcome.snapshot
        assert mean is not None
        assert snapshot is not None, "it is laid out"
        # A trainer that waited holds the snapshot, so that nothing is to be added to what became of
        # it.
        has_gone_on = snapshot.report.following is not None and not outcome.mine.is_new
        live = self._weights.tensors()
        statistics = set(self._weights.positions_of_statistics())
        states: dict[str, list[torch.Tensor]] = {}
        kept: dict[int, float] = {}
        for name in mean.states:
            parts = self._states.kept(name, num_steps) if num_steps else ()
            kept |= {n: part for n, part in enumerate(parts, start=len(live)) if part is not None}
            if not is_sum(name):
                statistics |= {len(live) + number for number in range(len(self._parameters))}
            states[name] = _shared(self._states.tensors(name), mean.shares[name])
            live = [*live, *states[name]]
        for number, (tensor, before, theirs) in enumerate(
            zip(live, mean.tensors, mean.merged, strict=True)
        ):
            rows, target = mean.rows.get(number), tensor.detach()
            mine = target if rows is None else target.index_select(0, rows)
            if not has_gone_on:
                mine.copy_(theirs)
            elif number in kept:
                merge_running_average_(
                    mine, theirs, before, kept=kept[number], only_grows=number in statistics
                )
            elif number in statistics:
                wide = mine.to(theirs.dtype), theirs, before.to(theirs.dtype)
                mine.copy_(merge_statistics(*wide))
            else:
                merge_sums_(mine, theirs, before)
            if rows is not None:
                target.index_copy_(0, rows, mine)
        self._states.take(states, mean.shares)
        counters = mean.counters
        if not outcome.mine.is_new and counters.size:
            counters = counters + (self._weights.read_counters() - snapshot.counted)
        self._weights.write_counters(counters)
        if self._momentum is not None:
            self._momentum.move_to(mean.merged)
        if self._changes is not None and mean.owed is not None:
            self._changes.owed = mean.owed
        self.num_merges = outcome.reference.num_merges + 1
        self.num_exchanges += 1
        self.rows.keep(mean.copies, self.num_merges)
        self._group.caught_up(outcome.generation)
        self.encode_s += time.perf_counter() - begin_s

    # The pipeline

    def _join_merge(self, propose: Callable[[], _OwnProposal]) -> MergeOutcome:
        """Run the pipeline until it has done something for this rank. One that is new has to wait
        for the first merge, since nothing else brings it the model.
        """
        while True:
            outcome = self._run(propose)
            own = outcome.mine
            if outcome.kind == "merge" or not own.is_new or own.kind == "finish":
                return outcome
            if outcome.kind == "finish":
                raise ConfigError(
                    "the run ended while this worker was on its way in; start a new one"
                )

    def _run(self, propose: Callable[[], _OwnProposal]) -> MergeOutcome:
        """Propose, agree, average, commit."""

        def work(generation: Generation, position: int) -> Collective[MergeOutcome]:
            # 1. Propose. The proposal is made anew in each try: this rank may be new by now.
            own = propose()
            proposals = yield from all_gather(
                position, len(generation.members), own.proposal.to_bytes(), MergeProposal.from_bytes
            )
            # 2. Agree. All members hold the same proposals, so that they conclude the same.
            outcome = MergeOutcome(
                kind=agreed_kind(proposals),
                mine=own.proposal,
                generation=generation,
                proposals=tuple(proposals),
            )
            if outcome.kind not in ("merge", "step", "mean") or (
                outcome.kind == "mean" and hold_the_same(proposals)
            ):
                return outcome
            if outcome.kind == "merge" and not own.proposal.is_new and self._momentum is not None:
                # Without a batch this rank has not yet noted where the first mega-batch began.
                self._momentum.begin()
            # 3. Average. Nothing that this rank trains with is changed: the outcome may be void.
            mean = yield from self._average(outcome, own, position)
            return replace(outcome, mean=mean)

        # 4. Commit: `run` returns what is final for all members.
        outcome = self._group.run(work)
        if outcome.kind is None:
            raise PeerError("no member of the run has a model to give to this worker")
        return outcome

    def _propose(
        self, snapshot: ModelSnapshot, kind: ProposalKind, payload: str = ""
    ) -> _OwnProposal:
        """Step 1: this rank's proposal, and what of it stays here.

        Args:
            snapshot: of this rank's model.
            kind: what this rank wants to do.
            payload: what it tells its peers, as JSON.
        """
        is_new = self._group.is_new
        if is_new and kind in ("mean", "agree"):
            # It has nothing to contribute, and must be given the run's model first.
            kind = "merge"
        touched = {} if is_new else touched_rows(snapshot.copies, snapshot.tensors)
        proposal = MergeProposal(
            kind=kind,
            is_new=is_new,
            report=snapshot.report,
            num_merges=snapshot.num_merges,
            rows_known_since=None if is_new else snapshot.rows_known_since,
            sparse=snapshot.sparse,
            touched=tuple((number, int(rows.sum())) for number, rows in touched.items()),
            states=snapshot.presence if kind in ("merge", "step", "finish") else (),
            payload=payload,
        )
        return _OwnProposal(proposal=proposal, model=snapshot, touched=touched)

    def _average(
        self, outcome: MergeOutcome, own: _OwnProposal, position: int
    ) -> Collective[ModelMean]:
        """Step 3: the weighted mean of the members' models."""
        proposals, parties = outcome.proposals, outcome.parties
        merging = [each for each, is_party in zip(proposals, parties, strict=True) if is_party]
        of_parties = iter(self._weights_of(outcome.kind, merging))
        weights = [next(of_parties) if is_party else 0.0 for is_party in parties]
        rows: dict[int, torch.Tensor] = {}
        states: dict[str, list[torch.Tensor]] = {}
        shares = shares_of_states(
            [each.states for each in proposals], weights, num_parameters=len(self._parameters)
        )
        if outcome.kind in ("merge", "step") and self._changes is None:
            rows = yield from self._union_of_rows(outcome, own.touched, position)
        begin_s = time.perf_counter()
        whole = own.model.tensors
        if outcome.kind == "step" and own.proposal.kind != "step":
            whole = self._parameters  # of the shapes of gradients, of which this member has none
        for name in names_of_merged(shares) if outcome.kind == "merge" else ():
            mine = own.model.states.get(name) or self._states.zeros(name)
            states[name] = _shared(mine, shares[name])
            # Of a state the same rows are merged as of its parameter. A single number, such as
            # that of steps, has no rows, and Adafactor's means of columns are of all rows.
            rows |= {
                len(whole) + number: rows[number]
                for number, state in enumerate(states[name])
                if number in rows and state.shape[:1] == whole[number].shape[:1]
            }
            whole = [*whole, *states[name]]
        tensors = [
            tensor.detach().index_select(0, rows[number]) if number in rows else tensor
            for number, tensor in enumerate(whole)
        ]
        if weights[position]:
            # Checked before anything is sent: one bad model would spoil the models of all peers.
            require_finite(tensors, rank=self._rank)
        encode_s = time.perf_counter() - begin_s
        yield from self._tell_joiners(outcome, position)
        owed: Owed | None = None
        if outcome.kind == "merge" and self._changes is not None:
            merged, owed = yield from self._merge_changes(
                position, weights, own.model, tensors, is_new=own.proposal.is_new
            )
        else:
            merged = empty_means(tensors)
            yield from mean_of_tensors(position, weights, tensors, merged)
        first = len(whole) - sum(map(len, states.values()))
        for mean, share in zip(
            merged[first:], chain(*(shares[name] for name in states)), strict=True
        ):
            # Of the mean over all members, in which missing states are zeros, that over the members
            # that have them.
            if 0 < share < 1:
                mean.div_(share)
        counters = own.model.counters
        if counters.size and outcome.kind != "step":
            counters = yield from gather_largest(position, parties, counters)
        return ModelMean(
            merged=merged,
            tensors=tensors,
            rows=rows,
            whole=whole,
            states=states,
            shares=shares,
            counters=counters,
            weights=weights,
            encode_s=encode_s,
            owed=owed,
        )

    def _weights_of(
        self, kind: ProposalKind | None, merging: Sequence[MergeProposal]
    ) -> Sequence[float]:
        """Of the members whose tensors are averaged."""
        if kind == "merge":
            return self._weigh(merging)
        samples = [float(each.report.share.samples) if each.states else 0.0 for each in merging]
        return samples if kind == "step" and any(samples) else [1.0] * len(merging)

    def _merge_changes(
        self,
        position: int,
        weights: Sequence[float],
        model: ModelSnapshot,
        tensors: Sequence[torch.Tensor],
        *,
        is_new: bool,
    ) -> Collective[tuple[list[torch.Tensor], Owed]]:
        """The mean by changes of parameters, and what this member owes then. What else is merged
        travels whole.

        Args:
            position: of this member.
            weights: of each member's model.
            model: this member's.
            tensors: its own, and the optimizer's states.
            is_new: whether the model counts for nothing.
        """
        assert self._changes is not None, "asked before"
        assert self._momentum is not None, "it has the model that changes begin with"
        number = len(self._parameters)
        merged, owed = yield from self._changes.merged(
            position,
            weights,
            base=self._momentum.latest,
            mine=None if is_new else model.tensors[:number],
            frozen=model.frozen,
        )
        others = [*model.frozen, *range(number, len(tensors))]
        whole = [tensors[other] for other in others]
        means = empty_means(whole)
        yield from mean_of_tensors(position, weights, whole, means)
        for frozen, mean in zip(model.frozen, means, strict=False):
            merged[frozen] = mean
        return [*merged, *means[len(model.frozen) :]], owed

    def _union_of_rows(
        self, outcome: MergeOutcome, touched: Mapping[int, RowSet], position: int
    ) -> Collective[dict[int, torch.Tensor]]:
        """The rows that any member has changed, by the parameter's position, of those parameters of
        which it is cheaper to merge these rows alone. All other parameters are merged whole.
        """
        proposals = outcome.proposals
        # Rows that nobody has changed are equal only if all members compare with the same merge.
        if len({proposal.rows_known_since for proposal in proposals}) > 1:
            return {}
        if outcome.reference.rows_known_since is None:
            return {}
        union: dict[int, torch.Tensor] = {}
        for number, _ in outcome.reference.touched:
            if any(number not in dict(each.touched) for each in proposals):
                continue  # of gradients: not all have a sparse one
            parameter = self._parameters[number]
            counts = [dict(proposal.touched)[number] for proposal in proposals]
            row_bytes = parameter[:1].numel() * max(parameter.element_size(), 4)
            if rows_are_cheaper(counts, num_rows=len(parameter), row_bytes=row_bytes):
                read = partial(decode_rows, num_rows=len(parameter))
                sets = yield from all_gather(
                    position, len(proposals), encode_rows(touched[number]), read
                )
                rows = np.flatnonzero(np.logical_or.reduce(sets))
                # Gathering nearly all rows costs more than sending the others.
                if rows.size < _NEARLY_ALL * len(parameter):
                    union[number] = torch.from_numpy(rows).to(parameter.device)
        return union

    def _tell_joiners(self, outcome: MergeOutcome, position: int) -> Collective[None]:
        """The reference member sends the state of the momentum to the members that are new, which
        have none of their own that anybody could miss.
        """
        joiners = [number for number, each in enumerate(outcome.proposals) if each.is_new]
        if outcome.kind != "merge" or self._momentum is None or not joiners:
            return
        if position == outcome.reference_member:
            payload = self._momentum.to_bytes()
            for joiner in joiners:
                yield Send(joiner, payload)
        if position in joiners:
            self._momentum.from_bytes((yield Recv(outcome.reference_member)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OwnProposal:
    """A proposal, and what of it stays with the member that makes it.

    Attributes:
        proposal: that is sent.
        model: that it is of.
        touched: the rows that have changed, by the parameter's position.
    """

    proposal: MergeProposal
    model: ModelSnapshot
    touched: Mapping[int, RowSet]


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until they are written: another thread reads them, in a stream of its own."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _shared(states: Sequence[torch.Tensor], shares: Sequence[float]) -> list[torch.Tensor]:
    """The states, and zeros for one that nobody with a weight has, which is left as it is."""
    return [
        state if share else torch.zeros_like(state)
        for state, share in zip(states, shares, strict=True)
    ]


# Which rows have changed, and whether it is cheaper to merge those rows alone.
#
# After a merge all ranks hold the same bits. A row that no rank has changed since then is the same
# everywhere, and is its own mean. Whether a row has changed is found by comparing its bits with a
# copy, so it does not matter who changed it: an optimizer with momentum, or the user. What is
# computed from replicated numbers after a merge, such as the momentum of merges, changes rows alike
# on all ranks, and it does so before the copy is made.
#
# Cost: a copy of the parameters whose gradients have been sparse, and one pass over them in each
# merge.

# Bits are compared as integers: as floating-point numbers, -0.0 would equal 0.0, and a NaN would
# not equal itself.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

INDEX_BYTES = 4


class TouchedRows:
    """Compares the parameters whose gradients have been sparse with a copy from the last merge.

    Args:
        parameters: in the model's order.

    Attributes:
        known_since: number of the merge whose result was copied; None: there is no copy.
        copies: by the parameter's position.
        sparse: positions of the parameters whose gradient has been sparse on this rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.copies: Mapping[int, torch.Tensor] = {}
        self.known_since: int | None = None
        self.sparse: set[int] = set()

    def note_sparse_gradients(self) -> None:
        """An optimizer step is about to be taken: note which gradients are sparse."""
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.dtype in _BITS:
                self.sparse.add(position)

    def keep(self, copies: Mapping[int, torch.Tensor], merge: int) -> None:
        """`copies`, by position, are the result of merge number `merge`. The parameters may be
        ahead of it.
        """
        self.sparse.update(copies)
        self.copies = dict(sorted(copies.items()))
        self.known_since = merge

    def forget(self) -> None:
        """The parameters hold something else, which other ranks may not hold."""
        self.copies, self.known_since = {}, None


def touched_rows(
    copies: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> dict[int, RowSet]:
    """The rows in which `parameters` differ from their copies, by the parameter's position."""
    found = {}
    for position, copy in copies.items():
        bits = _BITS[copy.dtype]
        now, then = (
            tensor.detach().view(bits).unsqueeze(1).flatten(1)
            for tensor in (parameters[position], copy)
        )
        if copy.device.type == "cpu":
            found[position] = np.zeros(len(copy), np.bool_)
            _note_changed(now.numpy(), then.numpy(), found[position])
        else:
            found[position] = (now != then).any(dim=1).cpu().numpy()
    return found


@kernel
def _note_changed(
    now: NDArray[np.integer], then: NDArray[np.integer], changed: NDArray[np.bool_]
) -> None:
    # In most rows that an optimizer has changed, the first element has.
    for row in range(changed.size):
        for column in range(now.shape[1]):
            if now[row, column] != then[row, column]:
                changed[row] = True
                break


def index_bytes(num_touched: int, num_rows: int) -> int:
    """How many bytes it takes to say which rows: a list of numbers, or a bit for each row.

    >>> index_bytes(10, 1000), index_bytes(900, 1000)
    (40, 125)
    """
    return min(INDEX_BYTES * num_touched, -(-num_rows // 8))


def rows_are_cheaper(num_touched: Sequence[int], *, num_rows: int, row_bytes: int) -> bool:
    """Whether to exchange sets of touched rows, and then to merge their union alone: 2(P-1)/P of
    the values, and P-1 sets.

    The union has at least as many rows as the largest set; how many it has is known only after the
    sets were exchanged. It never has more than all rows, so that what can be lost is the sets.

    Args:
        num_touched: how many rows each rank has changed, >= 0.
        num_rows: of the matrix.
        row_bytes: size of one row, in bytes.

    >>> rows_are_cheaper([2_000, 3_000], num_rows=135_909, row_bytes=512)
    True
    >>> rows_are_cheaper([135_909, 3_000], num_rows=135_909, row_bytes=512)
    False
    >>> rows_are_cheaper([10], num_rows=1000, row_bytes=512)
    False
    """
    num_ranks = len(num_touched)
    hops = num_ranks - 1
    sets = hops * max(index_bytes(count, num_rows) for count in num_touched)
    return (
        2 * hops / num_ranks * max(num_touched) * row_bytes + sets
        < 2 * hops / num_ranks * num_rows * row_bytes
    )
