"""The callback of a strategy with mega-batches: it merges models after each of them, and lets batch
sizes and learning rates follow the workers' speeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.topk_codec import WeightCodec, another_codec
from offbeat.errors import CheckpointError, ConfigError
from offbeat.megabatch.batch_sizes import (
    NO_LIMIT,
    BatchRule,
    Bounds,
    Proportional,
    PublishedRule,
    RateScaling,
    binding,
    merge_weights,
    perturbed,
    square_root_rate,
)
from offbeat.megabatch.claims import ClaimRound, MegaBatchShare, MergedRound
from offbeat.megabatch.coded_merge import MergedChanges
from offbeat.megabatch.merge import MergeOutcome, MergeProtocol, ModelSnapshot
from offbeat.megabatch.merge_momentum import GAMMA, MergeMomentum
from offbeat.megabatch.proposal import MergeProposal, Pace, TrainerReport
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.transport.driver import Driver
from offbeat.weights.model_weights import ModelWeights
from offbeat.weights.optimizer_state import (
    OptimizerStates,
    decays_apart,
    divides_by_squares,
    notice_of_local_states,
)
from offbeat.weights.statistics import warm

Rule: TypeAlias = Literal["equal", "proportional", "published"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatchPlan:
    """How mega-batches are shared out and merged.

    Attributes:
        mega_batch: number of batches between merges, of all ranks together, >= 1.
        rule: what follows from the ranks' updates. "equal": nothing, and each rank gets an equal
            share; "proportional": batch sizes and merge weights; "published": by the paper's rule,
            with its perturbation of the weights and its momentum of merges.
        smallest: batch, in samples, >= 1; None: an eighth of the base size, at least 2.
        merges_optimizer_state: whether momenta and second moments are merged as the weights are.
        rate_scaling: how learning rates follow batch sizes.
        warmup: so many steps of all ranks together let the updates that a rank makes between merges
            grow by one, from 1 on, until a merge ends a whole mega-batch; 0: it always does. With
            the rule "proportional" and no codec, the first 2 `warmup` of them are steps with the
            mean of all ranks' gradients, in the place of merges after one update and after two.
        overlap: the merges while which ranks go on training: all of them, those of whole
            mega-batches, or none.
        codec: how changes of weights travel; None: weights travel whole.
    """

    mega_batch: int
    rule: Rule
    smallest: int | None = None
    merges_optimizer_state: bool = False
    rate_scaling: RateScaling = "auto"
    warmup: int = 0
    overlap: Literal["all", "whole", "none"] = "none"
    codec: WeightCodec | None = None

    def bounds(self, base: int, memory_limit: int | None = None) -> Bounds:
        """Of the batch size of a rank with this memory limit, where the base size is `base`."""
        smallest = min(base, max(2, base // 8)) if self.smallest is None else self.smallest
        return Bounds(smallest=smallest, largest=memory_limit or NO_LIMIT)

    def batch_rule(self, base: int) -> BatchRule | None:
        """How batch sizes follow speeds; None: they stay what they are."""
        if self.rule == "equal":
            return None
        return PublishedRule() if self.rule == "published" else Proportional(base=base)

    def samples_of_round(self, samples_before: int, num_ranks: int, base: int) -> int | None:
        """How many samples are merged together after `samples_before` have been; None: a whole
        mega-batch.

        >>> plan = MegaBatchPlan(mega_batch=25, rule="equal", warmup=10)
        >>> [plan.samples_of_round(steps * 2 * 4, 2, base=4) for steps in (0, 9, 10, 200)]
        [8, 8, 16, None]
        """
        if not self.warmup:
            return None
        step = num_ranks * base
        updates = 1 + samples_before // (self.warmup * step)
        is_step = self.averages_gradients(samples_before, num_ranks, base)
        samples = step if is_step else updates * step
        return samples if samples < self.mega_batch * base else None

    def averages_gradients(self, samples_before: int, num_ranks: int, base: int) -> bool:
        """Whether the round after `samples_before` is a step with the mean of all gradients."""
        if self.rule != "proportional" or self.codec is not None:
            return False
        return samples_before < 2 * self.warmup * num_ranks * base

    def smallest_claim(self, base: int) -> int:
        """In samples. A layer that normalises over the batch cannot train on a single one."""
        return max(self.bounds(base).smallest, min(2, base))


class ScaledLearningRate:
    """Sets learning rates, as batch sizes say, for one optimizer step at a time. Before and after
    the step they are what the user has set, so that schedulers see no other ones.

    Args:
        optimizer: the user's.
        by: "linear", eta_0 b_i / b_base; "sqrt", eta_0 sqrt(n b_i / b_base); "auto": "sqrt" where
            the optimizer divides by the root of squared gradients. Decoupled weight decay, which no
            noise makes shorter, stays what it is with eta_0 then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, by: RateScaling) -> None:
        self._optimizer = optimizer
        self._before: list[dict[str, Any]] = []
        self.is_linear = by == "linear" or (by == "auto" and not divides_by_squares(optimizer))

    def scale(self, num_samples: float, num_ranks: int, base: int) -> None:
        """The coming step is taken with batches of `num_samples`."""
        self.restore()  # A step that raised was not followed by it.
        for group in self._optimizer.param_groups:
            before: dict[str, Any] = {"lr": group["lr"]}
            self._before.append(before)
            factor = num_samples / base
            if not self.is_linear:
                factor = square_root_rate(1.0, num_samples, base, num_ranks)
                if decays_apart(self._optimizer, group):
                    before["weight_decay"] = group["weight_decay"]
                    group["weight_decay"] = before["weight_decay"] / factor
            group["lr"] = before["lr"] * factor

    def restore(self) -> None:
        """The step is over."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            group.update(before)
        self._before = []


class MegaBatchCallback(Callback):
    """Merges models when the loader says that a mega-batch was computed, with all that are members
    of the run then.

    Without a loader the user's loop feeds each rank. Then models are merged after every
    `mega_batch / ranks` steps, and more often at first as with one, with equal weights, and batch
    sizes stay what they are.

    Args:
        context: of the session.
        weights: what is merged.
        plan: how.
        group: the members.

    Attributes:
        group: the members, as given; one that `group.is_new` is left out: its peers went on without
            it, and what it has computed since the last merge is lost.
        device: that this rank trains on.
        ranks: who takes part, ascending.
        base: b_base, the batch size that the learning rate is for; None until a loader has said so.
        batch_sizes: how many samples each rank claims at a time; without a loader nobody does.
        batch_size: how many this rank claims at a time.
        largest_batch: how many samples a batch of this rank may have.
        smallest_claim: no claim has fewer samples, where there are as many; the same on all ranks.
        samples_of_mega_batch: how many samples a mega-batch has, about.
        joined_by: the merge by which this rank has joined the run, until its loader has taken note
            of it; None: it was there.
        start_step: the step at which this rank joined.
    """

    state_key: ClassVar[str] = "mega_batches"

    averages_models = True

    def __init__(
        self,
        context: Context,
        weights: ModelWeights,
        *,
        plan: MegaBatchPlan,
        group: AtomicGroup,
    ) -> None:
        assert context.optimizer is not None, "its learning rates are scaled"
        optimizer, rank = context.optimizer, context.driver.rank
        world_size = context.driver.world_size
        self.shares_equally = plan.rule == "equal"
        self.ranks: tuple[int, ...] = tuple(range(world_size))
        self.base: int | None = None
        self.joined_by: MergedRound | None = None
        self.start_step = 0
        self._weights, self._plan, self._rank = weights, plan, rank
        self._notices, self._optimizer = context.notices, optimizer
        self.group, self._record_wait, self._driver = group, context.record_wait, context.driver
        self.device = next((p.device for p in weights.parameters.values()), torch.device("cpu"))
        self._on_merge = context.on_merge
        self._memory_limit: int | None = None
        self._set_batch_sizes([1] * world_size)
        self._learning_rate = ScaledLearningRate(optimizer, plan.rate_scaling)
        # Samples of each batch since the last step, or before it until there is a further one.
        self._claimed: list[int] = []
        self._has_stepped = False
        self._has_loader = self._has_newcomers = False
        self._num_steps = self._merged_at_step = 0
        self._steps_before = 0  # of the run, without `_num_steps`: it may be a resumed one
        self._under_way: _MergeUnderWay | None = None
        self._taken: MergedRound | None = None
        # Whether members went on beside the latest merge, so that peers may have taken steps since
        # their snapshots where this rank has not.
        self._went_on = False
        self._pace, self._missed_rounds = Pace(), False
        self._pace_before = Pace()  # without what is being merged
        self._binding: Mapping[int, str] = {}
        self._said_that_rates_differ = self._said_what_stays_local = False
        gamma = GAMMA if plan.rule == "published" else 0.0
        has_codec = plan.codec is not None
        self._momentum = (
            MergeMomentum(weights.parameters, gamma=gamma) if gamma or has_codec else None
        )
        self._changes = (
            None if plan.codec is None else MergedChanges(weights.parameters, plan.codec)
        )
        self._protocol = MergeProtocol(
            weights,
            group=group,
            weigh=self._merge_weights,
            momentum=self._momentum,
            rank=rank,
            # Of those that it does not list, states stay each rank's own.
            states=OptimizerStates(
                optimizer, [*weights.parameters.values()] if plan.merges_optimizer_state else []
            ),
            changes=self._changes,
        )
        if plan.overlap != "none":
            # On other devices the arithmetic is torch's.
            warm(p.dtype for p in weights.parameters.values() if p.device.type == "cpu")
        group.enter(context.enter, self._merge_now)

    # What the loader calls

    @property
    def _base(self) -> int:
        return self.base or 1

    def _set_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Of all ranks; what the loader has to know follows from them."""
        self.batch_sizes = tuple(sizes)
        mine = dict(zip(self.ranks, self.batch_sizes, strict=True)).get(self._rank, self._base)
        bounds = self._plan.bounds(self._base, self._memory_limit)
        self.batch_size, self.largest_batch = bounds.clip(mine), bounds.largest
        self.smallest_claim = self._plan.smallest_claim(self._base)
        self.samples_of_mega_batch = self._plan.mega_batch * self._base

    def gather(self, value: Any) -> dict[int, Any] | None:
        """The `value`, of JSON's kinds, of every member that lives, by rank. Collective, between
        merges.

        None where this rank was left out meanwhile and has joined again, by a merge of its peers.
        """
        self._end_merge()
        if self.joined_by is not None:
            return None
        outcome = self._protocol.agree(self._report(None, None), json.dumps(value))
        if outcome.kind == "merge":
            self._adopt(outcome, self._num_steps)
            return None
        values = {
            proposal.rank: json.loads(proposal.payload)
            for proposal in outcome.proposals
            if proposal.kind == "agree" and not proposal.is_new
        }
        sizes = dict(zip(self.ranks, self.batch_sizes, strict=True))
        self.ranks = tuple(sorted(values))
        self._set_batch_sizes([sizes.get(rank, self._base) for rank in self.ranks])
        return {rank: values[rank] for rank in self.ranks}

    def feed(self, base: int, limits: Mapping[int, int | None]) -> None:
        """A loader feeds this rank from now on.

        Args:
            base: the batch size with which ranks begin, and which the learning rate is for, >= 1;
                the same on all ranks.
            limits: how many samples fit into a rank's memory at once, by rank, at least for this
                one; None: any number.

        Raises:
            ConfigError: less fits than the smallest batch allowed, or there is a loader already.
        """
        if self._has_loader:
            raise ConfigError(
                "the session has a loader already, which merges the models; attach once for each"
            )
        smallest = self._plan.bounds(base).smallest
        if base < smallest:
            raise ConfigError(
                f"the loader's batches have {base} samples, but min_batch_size is {smallest}; lower"
                " it, or raise the batch size"
            )
        for rank, limit in limits.items():
            if limit is not None and limit < smallest:
                raise ConfigError(
                    f"rank {rank} can hold batches of {limit} samples, but min_batch_size is"
                    f" {smallest}; lower it"
                )
        if not self.shares_equally and not self._learning_rate.is_linear and len(self.ranks) > 1:
            why = (
                f", since {type(self._optimizer).__name__} takes shorter steps with a rank's own"
                " gradients; rate_scaling='linear' leaves that out"
                if self._plan.rate_scaling == "auto"
                else ", as rate_scaling='sqrt' says"
            )
            self._notices.notify(
                f"learning rates are those of S-SGD times sqrt({len(self.ranks)} ranks x batch /"
                f" {base}){why}"
            )
        self._memory_limit = limits[self._rank]
        # One that has joined a run under way has its peers' sizes, and their base.
        sizes = self.batch_sizes if self.base == base else (base,) * len(self.ranks)
        self.base, self._has_loader = base, True
        bounds = [self._plan.bounds(self._base, limits.get(rank)) for rank in self.ranks]
        self._set_batch_sizes([bound.clip(size) for bound, size in zip(bounds, sizes, strict=True)])

    def batch_handed_out(self, num_samples: int) -> None:
        """The loop has a batch of so many samples, and the next step is taken with it. By how much
        a user says that a gradient counts is another thing, and scales no rate.
        """
        before = [] if self._has_stepped else self._claimed
        self._claimed, self._has_stepped = [*before, num_samples], False

    def samples_of_round(self, samples_before: int) -> int | None:
        """How many samples the ranks compute together until models are merged next, about; None: a
        whole mega-batch. The same on all ranks.

        Args:
            samples_before: that were merged in the run before, over all passes.
        """
        return self._plan.samples_of_round(samples_before, len(self.ranks), self._base)

    def steps_together(self, samples_before: int, num_samples: int) -> bool:
        """Whether the coming round of `num_samples` is one batch of each rank, and a step with the
        mean of their gradients; not where somebody waits for a merge of models. The same on all
        ranks.
        """
        num_ranks = len(self.ranks)
        return (
            self._plan.averages_gradients(samples_before, num_ranks, self._base)
            and num_samples == sum(self.batch_sizes) == num_ranks * self._base
            and not self._has_newcomers
        )

    def step_together(
        self, share: MegaBatchShare, claim_round: ClaimRound, *, takes_step: bool
    ) -> MergedRound | None:
        """Average gradients with all ranks that live, which ends the round. Collective.

        Args:
            share: what this rank has computed of it.
            claim_round: the round.
            takes_step: whether this rank has a gradient of it, and takes a step with what is now in
                its place.

        Returns:
            The round. None: the peers have gone on without this rank, and `joined_by` is what they
            merged then. It has no gradient any more.
        """
        if self._num_steps:  # In the first step much is loaded and compiled.
            self._pace = self._pace.plus(share)
        begin_s = time.monotonic()
        encode_s = self._protocol.encode_s
        with torch.no_grad():
            outcome = self._protocol.step(self._report(share, claim_round), takes_step=takes_step)
        spent_s = self._protocol.encode_s - encode_s
        self._record_wait(begin_s, max(begin_s, time.monotonic() - spent_s))
        if outcome.kind == "merge":
            for parameter in self._weights.parameters.values():
                parameter.grad = None
        return self._adopt(outcome, self._num_steps)

    def overlaps_merge(self, *, is_whole: bool) -> bool:
        """Whether ranks may go on while a round is merged; the same on all ranks.

        Args:
            is_whole: whether the round is a whole mega-batch.
        """
        return self._plan.overlap == "all" or (self._plan.overlap == "whole" and is_whole)

    def mega_batches_merged(self, count: int) -> None:
        """So many further mega-batches are in this rank's model, all of each of them."""
        for _ in range(count):
            for call in self._on_merge:
                call()

    def begin_merge(
        self, share: MegaBatchShare, claim_round: ClaimRound, following: ClaimRound | None
    ) -> None:
        """A round has come to its end: let a snapshot of this rank's model be merged with those of
        all ranks that live. Collective, and no other method that is collective is called until
        `end_merge`.

        Args:
            share: what this rank has computed since it began the last merge.
            claim_round: the round.
            following: the round with which this rank goes on, the same on all ranks, while a thread
                merges; None: it waits, by `end_merge` at once.
        """
        self._pace_before = self._pace
        if claim_round.retry == 0 and not self._missed_rounds:
            self._pace = self._pace.plus(share)
        self._begin_merge(replace(self._report(share, claim_round), following=following))

    @property
    def merge_is_over(self) -> bool:
        """Whether a merge was begun and `end_merge` would not wait for it."""
        under_way = self._under_way
        return self.merge_is_taken or (under_way is not None and under_way.merged.done())

    @property
    def merge_is_taken(self) -> bool:
        """Whether a merge was begun that is in this rank's model already, because something else
        needed it.
        """
        return self._taken is not None

    def end_merge(self) -> MergedRound | None:
        """Wait for the merge that was begun last, if it is not over, and take its outcome over.

        Returns:
            The round that was merged. None: the peers have gone on without this rank, and
            `joined_by` is what they merged then.
        """
        self._end_merge()
        taken, self._taken = self._taken, None
        return taken

    # Events

    @override
    def on_before_update(self) -> None:
        # The model with which the first mega-batch begins is copied as late as possible, since the
        # user may load weights after attaching.
        if self._momentum is not None:
            self._momentum.begin()
        self._protocol.rows.note_sparse_gradients()
        if self._claimed and not self.shares_equally:
            # The mean: the user's rate is for as many batches as the loop accumulates in a step.
            self._learning_rate.scale(fmean(self._claimed), len(self.ranks), self._base)

    @override
    def on_after_step(self) -> None:
        self._learning_rate.restore()
        self._has_stepped = True
        self._num_steps += 1
        if self._has_loader:
            return
        num_ranks, before = len(self.ranks), self._steps_before
        then, now = before + self._merged_at_step, before + self._num_steps
        period = whole = max(1, round(self._plan.mega_batch / num_ranks))
        # With merges of whole mega-batches only, images are 2.9 points worse (docs, parity).
        first = self._plan.samples_of_round(num_ranks * then, num_ranks, base=1)
        if first is not None and self._momentum is None:  # a merge's momentum is of whole ones
            period = min(whole, first // num_ranks)
        if self.group.is_new or now - then >= period:
            merges_before = self._protocol.num_merges
            self._merge_now()
            if not self.shares_equally:
                self._notices.warn(
                    "no loader of this session feeds the run: each rank computes the batches of its"
                    " own loop, and batch sizes and merge weights follow nothing. Models are"
                    f" averaged after every mega_batch / ranks = {whole} steps, and more often at"
                    " first, as by LocalSGD; take batches from session.loader(DataLoader or"
                    " dataset), made before the first step"
                )
            # One that was left out is as far as its peers now: it has missed as many merges as they
            # have made, of which most of the first ones end no mega-batch.
            now = self._steps_before + self._merged_at_step
            count = min(self._protocol.num_merges - merges_before, now // whole - then // whole)
            self.mega_batches_merged(count)

    @override
    def on_finish(self) -> None:
        """Take part in the merges of the peers until they have come to the end too, and in a last
        one of what has not been merged.
        """
        self._end_merge()
        begin_s = time.monotonic()
        self._protocol.finish(self._report(None, None))
        self._merged_at_step = self._num_steps
        self.group.has_finished = True
        self._record_wait(begin_s, time.monotonic())

    @override
    def on_abandon(self, reason: str) -> None:
        self.group.abort(reason)
        self._drop_merge()

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        """Write the mean of all members' models into `weights`, a copy of this rank's model.
        Collective, except just after a merge.
        """
        self._end_merge()
        just_merged = (
            self._protocol.num_merges
            and self._num_steps == self._merged_at_step
            and not self._went_on
        )
        if (just_merged or self.group.has_finished) and not self.group.is_new:
            return frozenset()  # All members hold the same model, and the copy is one of it.
        encode_s = self._protocol.encode_s
        outcome = self._protocol.mean_into(weights, self._report(None, None))
        self._protocol.encode_s = encode_s  # Only training counts.
        if outcome.kind == "merge":
            self._adopt(outcome, self._num_steps)
        return frozenset()

    @override
    def counters(self) -> dict[str, float]:
        protocol = self._protocol
        return {
            "exchanges": protocol.num_exchanges,
            "encode_s": protocol.encode_s,
            "merges": protocol.num_merges,
        }

    # One merge

    def _merge_now(self) -> None:
        self._begin_merge(self._report(None, None))
        self._end_merge()

    def _begin_merge(self, report: TrainerReport) -> None:
        assert self._under_way is None, "one merge at a time"
        if self._momentum is not None and not self.group.is_new:
            # Without a batch this rank has not yet noted where the first mega-batch began.
            self._momentum.begin()
        with torch.no_grad():
            snapshot = self._protocol.freeze(report)
        self._under_way = _MergeUnderWay(self._protocol, snapshot, self._driver)

    def _end_merge(self) -> None:
        """Wait for the merge that is under way, if any, and take it over."""
        if self._under_way is None:
            return
        begin_s = time.monotonic()
        self._under_way.wait()
        under_way, self._under_way = self._under_way, None
        outcome, report = under_way.merged.result(), under_way.snapshot.report
        assert outcome.mean is not None, "models were merged"
        # Laying vectors out is work of this rank, and no wait, unless a thread has done it.
        encode_s = outcome.mean.encode_s if report.following is None else 0.0
        self._protocol.encode_s += encode_s
        self._record_wait(begin_s, time.monotonic() - encode_s)
        if under_way.is_dropped:
            return
        then = report.num_steps
        with torch.no_grad():
            self._protocol.take(outcome, num_steps=self._num_steps - then)
        taken = self._adopt(outcome, then)
        # One that is new finds the round in `joined_by`.
        self._taken = None if outcome.mine.is_new else taken

    def _report(
        self, share: MegaBatchShare | None, claim_round: ClaimRound | None
    ) -> TrainerReport:
        """What this rank tells of itself; without a `share` it has computed nothing that counts."""
        nothing = MegaBatchShare(
            rank=self._rank, claims=(), updates=0, batch_size=self.batch_size, busy_s=0.0
        )
        return TrainerReport(
            share=share or nothing,
            pace=self._pace,
            claim_round=claim_round,
            memory_limit=self._memory_limit,
            base=self.base,
            num_steps=self._num_steps,
            steps_before=self._steps_before,
            since_merge=self._num_steps - self._merged_at_step,
            learning_rates=tuple(
                float(group.get("lr", 0.0)) for group in self._optimizer.param_groups
            ),
            norm=self._norm(),
        )

    def _adopt(self, outcome: MergeOutcome, at_step: int) -> MergedRound | None:
        """Take over from a merge what all members go on with: who they are, their batch sizes, and
        the round that is over.

        Args:
            outcome: of the merge.
            at_step: the steps that this rank had taken at its snapshot.
        """
        assert outcome.mean is not None
        reference = outcome.reference.report
        by_rank = {
            member.rank: proposal
            for member, proposal in zip(outcome.generation.members, outcome.proposals, strict=True)
            if proposal.kind == outcome.kind
        }
        self.ranks = tuple(sorted(by_rank))
        staying = [by_rank[rank] for rank in self.ranks]
        if outcome.mine.is_new:
            self.base = reference.base
        self._compare_learning_rates(staying)
        self._tell_what_stays_local()
        merged = self._merged_round(outcome, reference)
        has_rest = merged is not None and (bool(merged.claim_round.later) or merged.is_cut_short)
        ends = merged is None or (merged.claim_round.retry == 0 and not has_rest)
        # Of those who wait for a merge of models.
        is_step = outcome.kind == "step"
        self._has_newcomers = is_step and any(each.is_new for each in outcome.proposals)
        if ends or is_step:
            before = self.batch_size
            self._resize(staying)
            self._pace = self._pace.in_batches(self.batch_size, before=before)
        else:
            # What departed workers had claimed is given out again in small rounds, which say
            # nothing about speeds. Where models are merged within a mega-batch, all of it tells
            # more than one round.
            self._set_batch_sizes([*map(self._size_of, staying)])
        if ends or outcome.mine.is_new:
            # One that comes in between the rounds of a mega-batch would look slow by the updates
            # of those that are left. Rules leave the batch of a rank without updates as it is.
            self._pace = Pace()
            is_late = outcome.mine.is_new and reference.following is not None
            self._missed_rounds = is_late or has_rest
        if outcome.mine.is_new and not self._num_steps:
            self.start_step = self._num_steps = reference.num_steps
        if outcome.mine.is_new:
            self._steps_before = reference.steps_before + reference.num_steps - self._num_steps
        if not is_step:
            self._merged_at_step = self._num_steps if outcome.mine.is_new else at_step
        self._went_on = reference.following is not None
        self._claimed = []
        self.joined_by = merged if outcome.mine.is_new else self.joined_by
        return merged

    def _size_of(self, proposal: MergeProposal) -> int:
        """Of a rank's batches, for one that has joined without a loader so far too."""
        report = proposal.report
        return report.share.batch_size if report.base else self._base

    def _merged_round(self, outcome: MergeOutcome, reference: TrainerReport) -> MergedRound | None:
        """The round that a merge has ended; None without a loader."""
        if reference.claim_round is None:
            return None
        assert outcome.mean is not None
        total = sum(outcome.mean.weights)
        shares = [
            replace(proposal.report.share, weight=weight / total)
            for proposal, weight, is_party in zip(
                outcome.proposals, outcome.mean.weights, outcome.parties, strict=True
            )
            if is_party
        ]
        shares.sort(key=lambda share: share.rank)
        return MergedRound(
            claim_round=reference.claim_round,
            shares=tuple(shares),
            ranks=self.ranks,
            following=reference.following,
        )

    def _compare_learning_rates(self, proposals: Sequence[MergeProposal]) -> None:
        # A rank that has taken no step since may set its rate when it takes one.
        knowing = [
            proposal.report
            for proposal in proposals
            if proposal.report.since_merge and not proposal.is_new
        ]
        if len({report.learning_rates for report in knowing}) <= 1 or self._said_that_rates_differ:
            return
        self._said_that_rates_differ = True
        rates = ", ".join(
            f"{report.learning_rates[0]:.6g} on rank {report.rank}"
            for report in knowing
            if report.learning_rates
        )
        self._notices.warn(
            f"learning rates differ between ranks at a merge: {rates}. Ranks take different numbers"
            " of batches, so a scheduler that is stepped for each batch is further on one rank than"
            " on another; step it with session.on_merge(scheduler.step), and count mega-batches"
        )

    def _tell_what_stays_local(self) -> None:
        if self._said_what_stays_local or not self._plan.merges_optimizer_state:
            return
        remark = notice_of_local_states(self._optimizer, self._weights.parameters)
        if remark is not None:
            self._said_what_stays_local = True
            self._notices.notify(remark)

    def _merge_weights(self, proposals: Sequence[MergeProposal]) -> Sequence[float]:
        shares = [proposal.report.share for proposal in proposals]
        updates = [share.full_updates for share in shares]
        if not any(updates):
            # Nobody has claims: loops feed the ranks, or the run ends within a mega-batch.
            steps = [float(proposal.report.since_merge) for proposal in proposals]
            return steps if any(steps) else (1.0,) * len(shares)
        if self.shares_equally:
            return (1.0,) * len(shares)
        weights = merge_weights(updates, [share.batch_size for share in shares])
        if self._plan.rule == "proportional":
            return weights
        return perturbed(weights, [proposal.report.norm for proposal in proposals])

    def _resize(self, proposals: Sequence[MergeProposal]) -> None:
        bounds = [
            self._plan.bounds(self._base, proposal.report.memory_limit) for proposal in proposals
        ]
        of_ranks = zip(bounds, map(self._size_of, proposals), strict=True)
        sizes = [bound.clip(size) for bound, size in of_ranks]
        rule = self._plan.batch_rule(self._base)
        if rule is None or all(proposal.report.claim_round is None for proposal in proposals):
            self._set_batch_sizes(sizes)
            return
        # Where only ratios count, updates per second of computing say the same as updates do, and
        # are less coarse.
        # What one that is new has done since is lost, or was in another run.
        paces = [Pace() if each.is_new else each.report.pace for each in proposals]
        by_time = rule.only_ratios_count and all(pace.busy_s > 0 for pace in paces if pace.updates)
        updates = [
            pace.updates / pace.busy_s if by_time and pace.updates else pace.whole_updates
            for pace in paces
        ]
        self._set_batch_sizes(rule.resize(sizes, updates, bounds))
        now_binding = {
            self.ranks[number]: end for number, end in binding(self.batch_sizes, bounds).items()
        }
        if now_binding != self._binding:
            sized = dict(zip(self.ranks, self.batch_sizes, strict=True))
            which = ", ".join(
                f"rank {rank} at its {end} ({sized[rank]})" for rank, end in now_binding.items()
            )
            self._notices.notify(
                f"merge {self._protocol.num_merges}: batch sizes are held by bounds:"
                f" {which or 'none any more'}"
            )
        self._binding = now_binding

    def _norm(self) -> float:
        """||w|| / (number of parameters); 0 where the plan does not ask for it."""
        if self._plan.rule != "published":
            return 0.0
        parameters = [p.detach() for p in self._weights.parameters.values() if p.numel()]
        return float(torch.nn.utils.get_total_norm(parameters)) / sum(p.numel() for p in parameters)

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        counts = {
            "num_merges": self._protocol.num_merges,
            "merged_at": self._steps_before + self._merged_at_step,
            "batch_sizes": list(self.batch_sizes),
            "base": self._base,
        }
        momentum = {} if self._momentum is None else self._momentum.state()
        so_far = self._pace if self._under_way is None else self._pace_before
        pace = asdict(so_far) | {
            "missed_rounds": self._missed_rounds,
            "since_merge": self._num_steps - self._merged_at_step,
        }
        state: CallbackState = {
            "replicated": counts | momentum,
            "local": pace | self._weights.counter_state(),
        }
        if self._changes is not None:
            state["additive"] = self._changes.state()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_merges" not in saved:
            raise CheckpointError("the state lacks 'num_merges'; it was saved by another strategy")
        if self._momentum is not None:
            self._momentum.load(
                {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}
            )
        if self._changes is not None:
            self._changes.load(state.get("additive", {}))
        elif state.get("additive"):
            raise another_codec()
        if self._under_way is not None:
            self._under_way.is_dropped = True  # It is of another model.
        self._taken = None
        local = state.get("local", {})
        self._weights.load_counter_state(local)
        self._protocol.num_merges = int(saved["num_merges"])
        self._protocol.rows.forget()  # The ranks' models may differ.
        self._steps_before = int(saved["merged_at"]) - self._merged_at_step
        # A rank that is new has taken no step since.
        self._num_steps = self._merged_at_step + int(local.get("since_merge", 0))
        sizes = tuple(map(int, saved["batch_sizes"]))
        self._pace, self._missed_rounds = Pace(), False
        # With another number of workers, sizes begin anew: other workers have other speeds; so they
        # do where the user has given another one to begin with. Older checkpoints have no pace.
        base = saved.get("base", self._base)
        if len(sizes) == len(self.batch_sizes) and base == self._base:
            self._set_batch_sizes(sizes)
            self._pace = Pace(
                updates=float(local.get("updates", 0.0)), busy_s=float(local.get("busy_s", 0.0))
            )
            self._missed_rounds = bool(local.get("missed_rounds", False))
        self._claimed = []

    @override
    def close(self) -> None:
        self._learning_rate.restore()
        self.group.leave()
        self._drop_merge()

    def _drop_merge(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()  # It raises, now that the connections are closed.
            self._under_way = None


class _MergeUnderWay:
    """A merge of a snapshot: by a thread of its own where ranks go on meanwhile, else by whoever
    waits for it.

    Args:
        protocol: of this rank.
        snapshot: that is merged.
        driver: beside whose training it goes on.

    Attributes:
        snapshot: as given.
        merged: what comes of it, or what `MergeProtocol.merge_snapshot` raises.
        is_dropped: whether nobody wants its outcome any more.
    """

    def __init__(self, protocol: MergeProtocol, snapshot: ModelSnapshot, driver: Driver) -> None:
        self.is_dropped = False
        self._protocol, self.snapshot = protocol, snapshot
        self.merged: Future[MergeOutcome] = Future()
        goes_on = snapshot.report.following is not None
        self._join = driver.beside(self._run, name="offbeat-merge") if goes_on else None

    def wait(self) -> None:
        """Return when it is over."""
        (self._join or self._run)()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self.merged.set_result(self._protocol.merge_snapshot(self.snapshot))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.merged.set_exception(error)
