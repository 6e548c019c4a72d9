"""All ranks' weights, merged after every mega-batch with weights of their own; batch sizes and
learning rates follow speeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.errors import CheckpointError, ConfigError, OffbeatError
from offbeat.megabatch.assembly import Assembly
from offbeat.megabatch.batch_sizes import BatchRule, Bounds, Proportional, binding, learning_rate
from offbeat.megabatch.claims import Merged, Place, Work
from offbeat.megabatch.merge import Meetings, Met
from offbeat.megabatch.merge_momentum import MergeMomentum
from offbeat.megabatch.merge_weights import Weighting, merge_weights, perturbed
from offbeat.megabatch.proposal import Report, Statement
from offbeat.membership.generations import Generations
from offbeat.parts.part import Part
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatchPlan:
    """How mega-batches are dealt out and merged.

    Attributes:
        mega_batch: samples between merges, >= 1.
        base: b_base, the batch size that the user's learning rate is for, >= 1.
        bounds: of every rank's batch size.
        rule: how batch sizes follow speeds; None: they stay, and each rank gets an equal share.
        weighting: what merge weights follow.
        delta: of the perturbation, in [0, 1); 0: none.
        threshold: no perturbation where a model's norm per parameter reaches it.
        momentum: gamma, in [0, 1).
    """

    mega_batch: int
    base: int
    bounds: Bounds
    rule: BatchRule | None
    weighting: Weighting
    delta: float = 0.0
    threshold: float = 0.1
    momentum: float = 0.0


class ScaledRate:
    """eta_0 b_i / b_base during one optimizer step, and eta_0 before and after it, so that
    schedulers see what they set.

    Args:
        optimizer: the user's.
        base: b_base.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, base: int) -> None:
        self._optimizer = optimizer
        self._base = base
        self._before: list[Any] = []

    def scale(self, num_samples: int) -> None:
        self.restore()
        self._before = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(group["lr"], num_samples, self._base)

    def restore(self) -> None:
        """Also after a step that raised, which has no end that anybody is told of."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            group["lr"] = before
        self._before = []


class MegaBatches(Part):
    """Merges when the loader says that a mega-batch is computed; with whoever is a member of the
    run then.

    Without a loader the ranks feed themselves, with batches of b_base samples as far as this part
        knows: it merges after every
    `mega_batch / (ranks x b_base)` steps, with equal weights, and batch sizes stay what they are.

    Args:
        weights: what is merged.
        plan: how.
        optimizer: the user's, for its learning rates.
        assembly: the members.
        enter: brings this rank into the run's generations; None in a world of one.
        rank: this rank.
        world_size: number of ranks at first.
        notify: for remarks.
        stood_still: told from when to when the trainer waited, in seconds of the monotonic clock.

    Attributes:
        ranks: who takes part, ascending.
        batch_sizes: what each of them claims at a time.
        entry: the merge by which this rank came into the run since anybody asked; None: it has been
            there.
        start_step: the step at which this rank came in.
    """

    state_key: ClassVar[str] = "mega_batches"

    averages_models = True

    def __init__(
        self,
        weights: ModelWeights,
        *,
        plan: MegaBatchPlan,
        optimizer: torch.optim.Optimizer,
        assembly: Assembly,
        enter: Callable[[], Generations | None],
        rank: int,
        world_size: int,
        notify: Callable[[str], None],
        stood_still: Callable[[float, float], None],
    ) -> None:
        self.mega_batch = plan.mega_batch
        self.deals_equally = plan.rule is None
        self.ranks: tuple[int, ...] = tuple(range(world_size))
        self.batch_sizes: tuple[int, ...] = (plan.base,) * world_size
        self.entry: Merged | None = None
        self.start_step = 0
        self._weights, self._plan, self._rank, self._notify = weights, plan, rank, notify
        self._assembly, self._stood_still = assembly, stood_still
        self._largest: int | None = None
        self._rate = ScaledRate(optimizer, plan.base)
        self._in_hand = 0
        self._is_fed = self._has_finished = False
        self._num_steps = self._merged_at_step = 0
        self._binding: Mapping[int, str] = {}
        self._momentum = (
            MergeMomentum(weights.parameters, gamma=plan.momentum) if plan.momentum else None
        )
        self._meetings = Meetings(
            weights,
            assembly=assembly,
            shares=self._shares,
            momentum=self._momentum,
            norm=self._norm,
            rank=rank,
        )
        self._generations: Generations | None = None
        try:
            self._generations = enter()
            if assembly.is_new:
                self._merge(None, None)
        except BaseException:
            self._close()
            raise

    # The loader's side

    @property
    def batch_size(self) -> int:
        """What this rank claims at a time."""
        sizes = dict(zip(self.ranks, self.batch_sizes, strict=True))
        return self._bounds(self._largest).clip(sizes.get(self._rank, self._plan.base))

    @property
    def is_left_out(self) -> bool:
        """Whether the others went on without this rank, so that what it has computed since the last
        merge is lost.
        """
        return self._assembly.is_new

    def gather(self, value: Any) -> dict[int, Any] | None:
        """What all members that live say: `value`, of JSON's kinds, by rank. Collective, between
        merges.

        None where this rank was left out meanwhile and has come in again, by a merge of the others.
        """
        met = self._meetings.agree(self._report(None, None), json.dumps(value))
        if met.kind == "merge":
            self._follow(met)
            return None
        said = {
            s.report.work.rank: json.loads(s.said)
            for s in met.stated
            if s.kind == "agree" and not s.is_new
        }
        sizes = dict(zip(self.ranks, self.batch_sizes, strict=True))
        self.ranks = tuple(sorted(said))
        self.batch_sizes = tuple(sizes.get(rank, self._plan.base) for rank in self.ranks)
        return {rank: said[rank] for rank in self.ranks}

    def limit(self, largest: Mapping[int, int | None]) -> None:
        """A loader feeds this rank from now on. `largest`: what fits into a rank's memory, by rank;
        of this one at least.

        Raises:
            ConfigError: less fits than the smallest batch allowed, or a loader is there already.
        """
        if self._is_fed:
            raise ConfigError(
                "the session has a loader already, which merges the models; attach once for each"
            )
        smallest = self._plan.bounds.smallest
        for rank, most in largest.items():
            if most is not None and most < smallest:
                raise ConfigError(
                    f"rank {rank} can hold batches of {most} samples, but min_batch_size is"
                    f" {smallest}; lower it"
                )
        self._largest = largest[self._rank]
        bounds = [self._bounds(largest.get(rank)) for rank in self.ranks]
        self.batch_sizes = tuple(
            bound.clip(size) for bound, size in zip(bounds, self.batch_sizes, strict=True)
        )
        self._is_fed = True

    @override
    def on_batch_claimed(self, num_samples: int) -> None:
        """One that the loader has claimed; those of a user's own loop are as large as the user
        likes.
        """
        if self._is_fed:
            self._in_hand += num_samples

    def settle(self) -> None:
        """A device that computes in the background must not claim more than it gets done."""
        device = next(iter(self._weights.parameters.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def merge(self, work: Work, place: Place) -> Merged:
        with torch.no_grad():
            merged = self._merge(work, place)
        self.entry = None
        assert merged is not None, "whoever has a loader merges with ranks that have one"
        return merged

    # Events

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """Where the first mega-batch begins is seen as late as can be: the user may load weights
        after attaching.
        """
        if self._momentum is not None:
            self._momentum.begin()

    @override
    def on_before_step(self) -> None:
        if self._momentum is not None:
            self._momentum.begin()
        self._meetings.rows.look_at_gradients()
        self._scale_rate()

    @override
    def on_closure(self) -> None:
        self.on_before_step()

    @override
    def on_after_step(self) -> None:
        self._rate.restore()
        self._in_hand = 0
        self._num_steps += 1
        if self._is_fed:
            return
        period = max(1, round(self.mega_batch / (len(self.ranks) * self._plan.base)))
        if self.is_left_out or self._num_steps - self._merged_at_step >= period:
            self._merge(None, None)

    @override
    def on_finish(self) -> None:
        """No more steps: take part in the others' merges until they have come to the end too."""
        begin_s = time.monotonic()
        if self._meetings.finish(self._report(None, None)):
            self._merged_at_step = self._num_steps
        self._has_finished = self._assembly.has_finished = True
        self._stood_still(begin_s, time.monotonic())

    @override
    def on_abandon(self, reason: str) -> None:
        """This rank has failed: nobody is to wait for it."""
        self._assembly.abort(reason)
        self._close()

    @override
    def average_into(self, weights: ModelWeights) -> None:
        """Write the mean of all members' models into `weights`, a copy of this rank's. Collective,
        but just after a merge.
        """
        just_merged = (
            self._meetings.num_merges
            and self._num_steps == self._merged_at_step
            and not self._has_finished
        )
        if just_merged and not self.is_left_out:
            return  # all hold the same
        encode_s = self._meetings.encode_s
        met = self._meetings.mean_into(weights, self._report(None, None))
        self._meetings.encode_s = encode_s  # this was no training
        if met.kind == "merge":
            self._follow(met)

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._meetings.num_exchanges, "encode_s": self._meetings.encode_s}

    # One merge

    def _report(self, work: Work | None, place: Place | None) -> Report:
        """`work`: None: none that counts."""
        nothing = Work(
            rank=self._rank, claims=(), updates=0, batch_size=self.batch_size, busy_s=0.0
        )
        return Report(
            work=work or nothing,
            place=place,
            largest=self._largest,
            num_steps=self._num_steps,
            since_merge=self._num_steps - self._merged_at_step,
        )

    def _merge(self, work: Work | None, place: Place | None) -> Merged | None:
        begin_s, encode_s = time.monotonic(), self._meetings.encode_s
        met = self._meetings.merge(self._report(work, place))
        self._stood_still(begin_s, time.monotonic() - (self._meetings.encode_s - encode_s))
        return self._follow(met)

    def _follow(self, met: Met) -> Merged | None:
        """Go on from a merge as all others do."""
        place = met.elder.report.place
        assert met.mean is not None
        total = sum(met.mean.scales)
        works = [
            replace(statement.report.work, weight=scale / total)
            for statement, scale in zip(met.stated, met.mean.scales, strict=True)
            if statement.kind == "merge" and not statement.is_new
        ]
        staying = sorted(
            (s for s in met.stated if s.kind == "merge"), key=lambda s: s.report.work.rank
        )
        self.ranks = tuple(statement.report.work.rank for statement in staying)
        if place is None or place.retry == 0:
            self._resize(staying)
        else:
            self.batch_sizes = tuple(statement.report.work.batch_size for statement in staying)
        if met.mine.is_new and not self._num_steps:
            self.start_step = self._num_steps = met.elder.report.num_steps
        self._merged_at_step = self._num_steps
        self._in_hand = 0
        merged = None
        if place is not None:
            works.sort(key=lambda work: work.rank)
            merged = Merged(place=place, works=tuple(works), ranks=self.ranks)
        self.entry = merged if met.mine.is_new else self.entry
        return merged

    def _shares(self, stated: Sequence[Statement]) -> Sequence[float]:
        works = [statement.report.work for statement in stated]
        updates = [work.updates for work in works]
        if not any(updates):
            return (1.0,) * len(works)
        shares = merge_weights(
            self._plan.weighting,
            updates=updates,
            batch_sizes=[work.batch_size for work in works],
            samples=[work.samples for work in works],
        )
        norms = [statement.norm for statement in stated]
        return perturbed(shares, norms, delta=self._plan.delta, threshold=self._plan.threshold)

    def _resize(self, stated: Sequence[Statement]) -> None:
        works = [statement.report.work for statement in stated]
        bounds = [self._bounds(statement.report.largest) for statement in stated]
        sizes = [bound.clip(work.batch_size) for bound, work in zip(bounds, works, strict=True)]
        if self._plan.rule is None or all(statement.report.place is None for statement in stated):
            self.batch_sizes = tuple(sizes)
            return
        # Updates a second of computing say the same as updates, less coarsely.
        finely = isinstance(self._plan.rule, Proportional) and all(
            work.busy_s > 0 for work in works if work.updates
        )
        made = [
            (
                work.samples / work.batch_size / work.busy_s
                if finely and work.updates
                else work.updates
            )
            for work in works
        ]
        self.batch_sizes = self._plan.rule.resize(sizes, made, bounds)
        bound_ones = {
            self.ranks[number]: end for number, end in binding(self.batch_sizes, bounds).items()
        }
        if bound_ones != self._binding:
            sized = dict(zip(self.ranks, self.batch_sizes, strict=True))
            which = ", ".join(
                f"rank {rank} at its {end} ({sized[rank]})" for rank, end in bound_ones.items()
            )
            self._notify(
                f"merge {self._meetings.num_merges}: batch sizes are held by bounds:"
                f" {which or 'none any more'}"
            )
        self._binding = bound_ones

    def _bounds(self, largest: int | None) -> Bounds:
        """Of a rank whose memory holds so much."""
        given = self._plan.bounds
        limit = given.limit if largest is None else min(largest, given.limit)
        return Bounds(smallest=given.smallest, largest=None if limit == Bounds().limit else limit)

    def _scale_rate(self) -> None:
        if self._in_hand and self._plan.rule is not None:
            self._rate.scale(self._in_hand)

    def _norm(self) -> float:
        """||w|| / (number of parameters); 0 where nobody asks."""
        if not self._plan.delta:
            return 0.0
        parameters = [p.detach() for p in self._weights.parameters.values() if p.numel()]
        return float(torch.nn.utils.get_total_norm(parameters)) / sum(p.numel() for p in parameters)

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        counts = {
            "num_merges": self._meetings.num_merges,
            "since_merge": self._num_steps - self._merged_at_step,
            "batch_sizes": list(self.batch_sizes),
        }
        return {"replicated": counts | ({} if self._momentum is None else self._momentum.state())}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_merges" not in saved:
            raise CheckpointError("the state lacks 'num_merges'; it was saved by another strategy")
        if self._momentum is not None:
            self._momentum.load(
                {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}
            )
        self._meetings.num_merges = int(saved["num_merges"])
        self._meetings.rows.forget()  # the ranks' models may be apart
        self._num_steps = self._merged_at_step + int(saved["since_merge"])
        sizes = tuple(map(int, saved["batch_sizes"]))
        if len(sizes) == len(self.batch_sizes):  # other workers have other speeds: begin anew
            self.batch_sizes = sizes
        self._in_hand = 0

    @override
    def close(self) -> None:
        self._rate.restore()
        over = False
        with suppress(OffbeatError):
            over = self._assembly.closes_last()
        self._close(over=over)

    def _close(self, *, over: bool = False) -> None:
        if self._generations is not None:
            self._generations.close(over=over)
        self._assembly.close()
