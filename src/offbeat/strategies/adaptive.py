"""Adaptive SGD: workers of any speed, at the sum of their speeds (arXiv 2110.07029).

    for each mega-batch of M batches of b_base samples, on each rank i
        while samples are left: claim the next b_i;  w_i = w_i - eta_0 b_i / b_base gradient(w_i);
        u_i = u_i + 1
        alpha_i = u_i / sum u, or b_i / sum b where all u_i are equal
        w_before, w = w, sum over i of alpha_i w_i + gamma (w - w_before);  w_i = w
        b_i follows u_i

In the first steps of all ranks, each with a batch of its b_i samples,
    w = w - eta_0 (mean of all samples' gradients);  b_i follows the speed of i

Samples are claimed in a log that all ranks share through the run's store; `Session.loader` does
it. The rules by which batch sizes and merge weights follow updates are those of
`megabatch.batch_sizes`.

Ranks are the members of a generation (`membership.generations`). A merge is one pipeline
(`megabatch.merge`): propose, agree, average, commit. It is final for all members or for none: when
a worker dies, its peers go on, and what it had not merged is given out again.

What is merged is a snapshot s_i of the model. A rank does not wait for the merge of a whole
mega-batch, or with `overlap=True` for any: a thread merges while it trains on, and then
w_i = w + (w_i - s_i).

Cost per mega-batch: one mean of the weights, of sparse parameters the rows that have changed; for
each claim a short message to the store and its answer. Per first step: one mean of the gradients.

Differences from the paper: by default `rule="proportional"`, since the published rule oscillates or
never adapts, and neither momentum nor perturbation; the first steps
(`benchmarks/studies/uneven_start.py`); a perturbed mean is divided by its weights'
sum; order is drawn anew for each epoch and the tail is trained on. A last claim before a merge,
which may have fewer or more samples than the others, has the learning rate of its own size and
counts as an update by its samples; no claim has fewer than `min_batch_size`, where there are as
many. The first merge has no momentum. A rank claims several batches at once where claiming would
take more than a twentieth of its time, up to a quarter of its share of what is left
(`megabatch.claims.batches_at_once`); the paper's coordinator gives out one at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import NotNegative, OneOrMore
from offbeat.megabatch.batch_sizes import RateScaling
from offbeat.megabatch.callback import MegaBatchCallback, MegaBatchPlan
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec
from offbeat.strategies.options import require_real
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class MegaBatchStrategy(AveragingStrategy):
    """Ranks train alone on a mega-batch that they share, and merge.

    Args:
        mega_batch: batches between merges, of all ranks together, >= 1. What a batch has on
            average, b_base, is the batch size of the loader.
    """

    survives_death = True
    shares_samples: ClassVar[bool] = True

    mega_batch: OneOrMore = 100

    @override
    def samples_between_merges(self, batch_size: int) -> int:
        return self.mega_batch * batch_size

    @abstractmethod
    def plan(self) -> MegaBatchPlan:
        """How mega-batches are shared out and merged."""

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        group = AtomicGroup(context.own_store(), count=context.count, notify=context.notices.notify)
        return [MegaBatchCallback(context, weights, plan=self.plan(), group=group)]


@dataclass(frozen=True, kw_only=True)
class AdaptiveSGD(MegaBatchStrategy):
    """Each rank claims its next batch as soon as it is free, batch sizes follow speeds, and models
    are merged after every mega-batch.

    Args:
        warmup: in the first 2 `warmup` steps of all ranks (n batches each) gradients are averaged,
            and models are merged more often for some time. With the published rule, or with a
            codec, models are merged in the place of gradients, after one update and after two. >=
            0; 0: models are merged only after whole mega-batches.
        optimizer_state: "averaged": momenta, second moments and numbers of steps are merged with
            the weights, which multiplies the bytes; "local": they stay the rank's own.
        codec: how changes of weights since the last merge travel: the name of a codec, or a
            `WeightCodec`; what it drops is owed. None: weights travel whole, as what else is merged
            does anyway.
        rule: what follows from the updates that ranks have made. "proportional": batch sizes, so
            that updates become equal, and merge weights; "published": the same by the paper's
            rules, with its perturbation of the weights and its momentum of merges.
        min_batch_size: the smallest batch, >= 1; None: an eighth of the loader's, at least 2. What
            is left at the end of a mega-batch and is less goes to the claim before it. What fits
            into a rank's memory is told to `Session.loader`.
        rate_scaling: how a batch's learning rate follows its size: "linear", lr b_i / b_base;
            "sqrt", lr sqrt(n b_i / b_base) with n ranks; "auto": "sqrt" with optimizers that
            divide by the root of squared gradients (Adam, Adagrad, Adafactor, RMSprop), whose
            steps with a rank's own, noisier gradients are shorter. With "sqrt" decoupled weight
            decay stays what it is with lr.
        overlap: whether ranks go on training while a merge is under way, and add to the merged
            model what they have done since it began. None: where a whole mega-batch is merged, and
            not with the published rule. Merges that end a pass over the data are waited for.
    """

    warmup: NotNegative = 20
    optimizer_state: Literal["local", "averaged"] = "averaged"
    codec: ChangesCodec = None
    rule: Literal["proportional", "published"] = "proportional"
    min_batch_size: OneOrMore | None = None
    rate_scaling: RateScaling = "auto"
    overlap: bool | None = None

    @property
    @override
    def keeps_anchor(self) -> bool:
        return self.codec is not None or self.rule == "published"

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.codec is not None:
            require_real(model)

    def plan(self) -> MegaBatchPlan:
        return MegaBatchPlan(
            mega_batch=self.mega_batch,
            rule=self.rule,
            smallest=self.min_batch_size,
            merges_optimizer_state=self.optimizer_state == "averaged",
            rate_scaling=self.rate_scaling,
            warmup=self.warmup,
            overlap=self._overlap,
            codec=self.weight_codec,
        )

    @property
    def _overlap(self) -> Literal["all", "whole", "none"]:
        if self.overlap is None:
            return "none" if self.rule == "published" else "whole"
        return "all" if self.overlap else "none"
