"""DEF: in each step all ranks send the same part of what they owe, drawn anew, and compute
gradients between where all of them are and where their own steps lead (Xu, Huo and Huang, arXiv
2004.05298, algorithm 1).

    on each rank, whose parameters are x = anchor + ahead * owed:
    owed  += the optimizer's step from x
    block  = 1 / ratio of each parameter's elements, from a place on that all ranks draw alike; the
             last element is followed by the first
    anchor += mean of all ranks' owed in the block;  owed = 0 there
    x      = anchor + ahead * owed

No place travels, and blocks are summed by an all-reduce of any backend. `ahead` is the paper's
lambda: 0 is error feedback, whose steps wait for about `ratio` steps; at 1 each rank trains by
itself, and a block is averaged in each step.

Cost per step: 2(P-1)/P n / ratio elements sent by each rank, after the step; four passes over the
parameters, and four vectors of their size.

Differences from the paper: the step may be any optimizer's; floating-point buffers are averaged
with the blocks; what is evaluated in the end is the mean of ranks' parameters, which is DEF-A's
point where `ahead` is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from offbeat.averaging.periodic import (
    EncodedChanges,
    Everyone,
    GrowingPeriod,
    MeanOfAll,
    PeriodicAverage,
    TakeMean,
)
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore, ZeroToOne
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import ResidualReduction, WeightedGradient
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.options import require_real
from offbeat.weights.model_weights import ModelWeights, restore_, wide


@dataclass(frozen=True, kw_only=True)
class DEFSGD(AveragingStrategy):
    """A random part of each step, the same on all ranks, and the rest is owed.

    Args:
        ratio: one of so many elements travels in a step, >= 1.
        ahead: how much of what a rank owes is in its own parameters, in [0, 1].
    """

    ratio: OneOrMore = 64
    ahead: ZeroToOne = 0.3

    @property
    @override
    def keeps_anchor(self) -> bool:
        return True

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_real(model)

    @override
    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        peers = Everyone(context.driver, context.new_stream())
        rule = KeepOwed(context.parameters, share=self.ahead)
        reduce_by = partial(_BlockReduction, ratio=self.ratio)
        changes = EncodedChanges(context.parameters, reduce_by, peers)
        rule.owed = changes.owed
        exchange = MeanOfAll(weights, peers, changes=changes, rule=rule)
        exchange.brings_together = not self.ahead  # else each holds a part of what it owes itself
        return [PeriodicAverage(exchange, GrowingPeriod(1))]


class KeepOwed(TakeMean):
    """Parameters are the anchor, which is the same on all ranks, and a share of what this rank
    owes.

    Args:
        parameters: the model's, by name.
        share: in [0, 1].

    Attributes:
        anchor: by name: float32 or float64.
        owed: gives what has not travelled yet, in the order of the parameters.
    """

    owed: Callable[[], Sequence[torch.Tensor]]

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, share: float) -> None:
        self._parameters, self._share = parameters, share
        self.anchor = self._copies()
        self._has_begun = self._is_loaded = False
        # What the model held after a load, which may be another rank's: until the step is over.
        self._held: dict[str, torch.Tensor] = {}

    def _copies(self) -> dict[str, torch.Tensor]:
        """Of the parameters, in float32 or float64."""
        return {name: wide(parameter).clone() for name, parameter in self._parameters.items()}

    @override
    def begin(self) -> None:
        if not self._has_begun:
            self.anchor, self._has_begun = self._copies(), True
        if self._is_loaded:
            self._is_loaded, self._held = False, self._copies()

    @override
    def changes(self) -> Iterator[torch.Tensor]:
        """Since the last step left them, so that what else is written into them counts, too."""
        for (name, parameter), point in zip(self._parameters.items(), self._points(), strict=True):
            left, now = self._held.get(name, point).to(parameter.dtype), wide(parameter)
            yield now - left if parameter.requires_grad else torch.zeros_like(now)

    def _points(self) -> Iterator[torch.Tensor]:
        """Where this rank's parameters belong."""
        for anchor, owed in zip(self.anchor.values(), self.owed(), strict=True):
            yield torch.add(anchor, owed, alpha=self._share)

    @override
    def merge_(self, changes: Sequence[torch.Tensor] | None) -> None:
        assert changes is not None, "they travel"
        for anchor, change in zip(self.anchor.values(), changes, strict=True):
            anchor.add_(change)
        self._held = {}
        for parameter, point in zip(self._parameters.values(), self._points(), strict=True):
            if parameter.requires_grad:
                parameter.detach().copy_(point)

    @override
    def state(self) -> dict[str, Any]:
        anchors = {f"anchor/{name}": anchor for name, anchor in self.anchor.items()}
        return anchors if self._has_begun else {}

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        saved = {key: value for key, value in state.items() if key.startswith("anchor/")}
        if saved:
            live = {f"anchor/{name}": anchor for name, anchor in self.anchor.items()}
            restore_(live, saved, "the anchor")
        self._has_begun = self._is_loaded = bool(saved)
        self._held = {}


class _BlockReduction(ResidualReduction):
    """The mean of one block of each parameter.

    Args:
        bucket: of what ranks owe.
        peers: all ranks.
        ratio: one of so many elements is in a block.
    """

    def __init__(self, bucket: Bucket, peers: Everyone, *, ratio: int) -> None:
        super().__init__(bucket, peers.driver, peers.stream)
        self._sizes = np.diff(bucket.offsets)
        lengths = -(-self._sizes // ratio)
        self._parameter = np.repeat(np.arange(lengths.size), lengths)
        self._within = np.concatenate([np.arange(length) for length in lengths])
        self._num_exchanges = 0
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._block = torch.zeros(0, dtype=torch.int64)
        self._total = self._residual

    def _draw(self) -> torch.Tensor:
        """Places of the elements that travel, the same on all ranks."""
        draws = np.random.default_rng([self._bucket.num_elements, self._num_exchanges])
        starts = (draws.random(self._sizes.size) * self._sizes).astype(np.int64)
        sizes = self._sizes[self._parameter]
        places = (starts[self._parameter] + self._within) % sizes
        places += np.asarray(self._bucket.offsets)[self._parameter]
        return torch.from_numpy(places).to(self._residual.device)

    @override
    def _launch(self, given: WeightedGradient) -> None:
        tally = self._stage(given)
        self._block = self._draw()
        (self._total,) = self._sum_tallied([self._mine[self._block]], tally)

    @override
    def _commit(self) -> torch.Tensor:
        self._mine[self._block] = 0
        self._residual, self._mine = self._mine, self._residual
        self._num_exchanges += 1
        return self._show(torch.zeros_like(self._mine).index_copy_(0, self._block, self._total))

    @override
    def local_state(self) -> dict[str, float | torch.Tensor]:
        mine = {self._local_name("num_exchanges"): self._num_exchanges}
        return super().local_state() | mine

    @override
    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        super().load(additive, local)
        self._num_exchanges = int(local.get(self._local_name("num_exchanges"), 0))
