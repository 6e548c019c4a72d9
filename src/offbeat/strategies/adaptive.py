"""Adaptive SGD: workers of any speed, at the sum of their speeds (arXiv 2110.07029).

    for each mega-batch of M samples, on each rank i
        while samples are left: claim the next b_i;  w_i = w_i - eta_0 b_i / b_base gradient(w_i);
        u_i = u_i + 1
        alpha_i = u_i / sum u, or b_i / sum b where all u_i are equal
        w_before, w = w, sum over i of alpha_i w_i + gamma (w - w_before);  w_i = w
        b_i follows u_i

Samples are claimed in a log that all ranks share through the run's store; `Session.loader` does
it. The rules by which batch sizes follow updates are those of `megabatch.batch_sizes`, merge
weights those of `megabatch.merge_weights`.

Ranks are the members of a generation (`membership.generations`). A merge is one pipeline
(`megabatch.merge`): propose, agree, average, commit. It is final for all members or for none: when
a worker dies, its peers go on, and what it had not merged is given out again.

A rank does not wait for the merge of a whole mega-batch, or with `overlap=True` for any: a thread
merges a snapshot s_i of its model while it trains on, and then w_i = w + (w_i - s_i).

Cost per mega-batch: one mean of the weights, of sparse parameters the rows that have changed; for
each claim a short message to the store and its answer.

Differences from the paper: `rule="proportional"` by default, since the published rule oscillates or
never adapts; momentum and perturbation are off by default, and a perturbed mean is divided by its
weights' sum; order is drawn anew for each epoch and the tail is trained on. A last claim before a
merge, which may have fewer or more samples than the others, has the learning rate of its own size
and counts as an update by its samples; no claim has fewer than `min_batch_size`, where there are as
many. The first merge has no momentum. A rank claims several batches at once where claiming would
take more than a twentieth of its time, up to a quarter of its share of what is left
(`megabatch.claims.batches_at_once`); the paper's coordinator gives out one at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError
from offbeat.megabatch.atomic_group import AtomicGroup
from offbeat.megabatch.batch_sizes import (
    BatchRule,
    Bounds,
    Hogbatch,
    Paper,
    Proportional,
    Reference,
)
from offbeat.megabatch.callback import MegaBatchCallback, MegaBatchPlan, RateScaling
from offbeat.megabatch.merge_weights import Weighting
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.options import (
    refuse_idle,
    require_at_least,
    require_fraction_below_one,
    require_one_of,
)
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class MegaBatchStrategy(AveragingStrategy):
    """Ranks train alone on a mega-batch that they share, and merge.

    Args:
        mega_batch: samples between merges, >= batch_size; None: 100 batches.
        batch_size: b_base: what a batch has on average, and what the learning rate is for, >= 1; on
            the command line it is the task's.
        warmup: within a mega-batch models are merged more often at first: after one update of each
            rank, and after one more with every so many steps of all ranks (n batches each), >= 0;
            0: only after whole mega-batches.
        optimizer_state: "averaged": momenta, second moments and numbers of steps are merged with
            the weights, which multiplies the bytes; "local": they stay the rank's own.
    """

    survives_death: ClassVar[bool] = True
    shares_samples: ClassVar[bool] = True

    mega_batch: int | None = None
    batch_size: int = 128
    warmup: int = 0
    optimizer_state: Literal["local", "averaged"] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("warmup", self.warmup, 0)
        require_one_of("optimizer_state", self.optimizer_state, ("local", "averaged"))
        require_at_least("mega_batch", self.samples_between_merges, 1)
        if self.samples_between_merges < self.batch_size:
            raise ConfigError(
                "mega_batch is the number of samples between merges, at least"
                f" batch_size={self.batch_size}, got {self.mega_batch}; 100 batches would be"
                f" {100 * self.batch_size}"
            )

    @property
    @override
    def samples_between_merges(self) -> int:
        """`mega_batch` as a number."""
        return 100 * self.batch_size if self.mega_batch is None else self.mega_batch

    @abstractmethod
    def plan(self) -> MegaBatchPlan:
        """How mega-batches are shared out and merged."""

    def parts(self, context: Context, weights: ModelWeights) -> list[Callback]:
        assert context.optimizer is not None
        group = AtomicGroup(context.own_store(), count=context.count, notify=context.notify)
        part = MegaBatchCallback(
            weights,
            plan=self.plan(),
            optimizer=context.optimizer,
            group=group,
            enter=lambda: context.enter(group),
            rank=context.driver.rank,
            world_size=context.driver.world_size,
            notify=context.notify,
            warn=context.warn,
            record_wait=context.record_wait,
            mega_batches_merged=context.mega_batches_merged,
        )
        return [part]


@dataclass(frozen=True, kw_only=True)
class AdaptiveSGD(MegaBatchStrategy):
    """Each rank claims its next batch as soon as it is free, batch sizes follow speeds, and models
    are merged after every mega-batch.

    Args:
        rule: how batch sizes follow: "proportional", the published "paper", its code's "reference",
            or "hogbatch".
        min_batch_size: the smallest batch, >= 1; None: an eighth of batch_size, at least 2. What is
            left at the end of a mega-batch and is less goes to the claim before it.
        max_batch_size: the largest batch, >= batch_size; None: no limit. What fits into one
            rank's memory alone is told to `Session.loader`.
        merge: what merge weights follow: "paper" (updates, or batch sizes where updates are equal),
            "updates", "batch_sizes", "samples" or "equal".
        kappa: of "proportional": the part of a difference that is removed at once, in (0, 1].
        rate_scaling: how a batch's learning rate follows its size: "linear", lr b_i / batch_size;
            "sqrt", lr sqrt(n b_i / batch_size) with n ranks; "auto": "sqrt" with optimizers that
            divide by the root of squared gradients (Adam, Adagrad, RMSprop), whose steps with a
            rank's own, noisier gradients are shorter.
        perturbation: delta, by which the largest merge weight is raised and the smallest lowered,
            in [0, 1); the paper's is 0.1.
        perturbation_threshold: weights are perturbed only while every model's norm per
            parameter is below it.
        merge_momentum: gamma of merges, in [0, 1); the paper's is 0.9.
        overlap: whether ranks go on training while a merge is under way, and add to the merged
            model what they have done since it began; not with merge_momentum. None: where a whole
            mega-batch is merged, and without merge_momentum. Merges that end a pass over the data
            are waited for.
    """

    name: ClassVar[str] = "adaptive"

    warmup: int = 20
    optimizer_state: Literal["local", "averaged"] = "averaged"
    rule: Literal["proportional", "paper", "reference", "hogbatch"] = "proportional"
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    merge: Weighting = "paper"
    kappa: float = 1.0
    rate_scaling: RateScaling = "auto"
    perturbation: float = 0.0
    perturbation_threshold: float = 0.1
    merge_momentum: float = 0.0
    overlap: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("rule", self.rule, ("proportional", "paper", "reference", "hogbatch"))
        require_one_of("merge", self.merge, ("paper", "updates", "batch_sizes", "samples", "equal"))
        require_one_of("rate_scaling", self.rate_scaling, ("auto", "linear", "sqrt"))
        require_fraction_below_one("perturbation", self.perturbation)
        if self.rule != "proportional":
            refuse_idle(
                self, "kappa", because=f'it is that of rule="proportional", got rule={self.rule!r}'
            )
        if self.perturbation == 0:
            refuse_idle(
                self,
                "perturbation_threshold",
                because="perturbation is 0, and weights are not perturbed at all",
            )
        require_fraction_below_one("merge_momentum", self.merge_momentum)
        if self.overlap and self.merge_momentum:
            raise ConfigError(
                f"overlap=True goes without merge_momentum, got {self.merge_momentum}; set one of"
                " them alone"
            )
        if self.min_batch_size is not None:
            require_at_least("min_batch_size", self.min_batch_size, 1)
        if self.max_batch_size is not None:
            require_at_least("max_batch_size", self.max_batch_size, 1)
        if not self.bounds.hold(self.batch_size):
            raise ConfigError(
                f"batch_size is {self.batch_size}, but min_batch_size and max_batch_size allow"
                f" {self.bounds.smallest} to {self.bounds.largest}; all batches begin with"
                " batch_size"
            )
        self._batch_rule()

    @property
    def bounds(self) -> Bounds:
        """Of every rank's batch size."""
        smallest = self.min_batch_size
        if smallest is None:
            smallest = min(self.batch_size, max(2, self.batch_size // 8))
        return Bounds(smallest=smallest, largest=self.max_batch_size)

    def plan(self) -> MegaBatchPlan:
        return MegaBatchPlan(
            mega_batch=self.samples_between_merges,
            base=self.batch_size,
            bounds=self.bounds,
            rule=self._batch_rule(),
            weighting=self.merge,
            delta=self.perturbation,
            threshold=self.perturbation_threshold,
            momentum=self.merge_momentum,
            merges_optimizer_state=self.optimizer_state == "averaged",
            rate_scaling=self.rate_scaling,
            warmup=self.warmup,
            overlap=self._overlap,
        )

    @property
    def _overlap(self) -> Literal["all", "whole", "none"]:
        if self.overlap is None:
            return "none" if self.merge_momentum else "whole"
        return "all" if self.overlap else "none"

    def _batch_rule(self) -> BatchRule:
        match self.rule:
            case "paper":
                return Paper()
            case "reference":
                return Reference()
            case "hogbatch":
                return Hogbatch()
            case "proportional":
                return Proportional(base=self.batch_size, kappa=self.kappa)
