"""WAGMA-SGD: weights averaged in small rotating groups that wait for no rank that computes (arXiv
2005.00124, algorithm 2).

    on each rank, in step t:
    W' = W + U(G)                                    the user's optimizer, with the rank's gradient
    if (t + 1) mod period:
        W_sum = wait_avoiding_group_allreduce(W')    a late rank contributes its last snapshot
        W = W_sum / S                                if W' was in it
        W = (W_sum + W') / (S + 1)                   else
    else:
        W = mean of all ranks' W'                    global synchronization

The protocol is `averaging.background.group_average`, the groups are those of `planning.groups`. A
progress thread (`averaging.background.progress_thread`) runs the protocol while the trainer
computes. A worker that dies, hangs or is disconnected does not stop its peers, and may return
(`membership.generations`).

Cost in each step, or in every `interval`-th: each rank sends at most 2 n (S-1)/S elements of 4
bytes, or of 2, 2 n (P-1)/P at a global synchronization, and (S-1) n where models are small. At a
global synchronization the trainer waits for a quorum to arrive, and, unless `overlap`, for the
network.

Differences from the paper, besides those of the two modules:
- `merge="delta"`, the default, is W_sum/S + (W' - what W' contributed): it keeps what a late rank
  did meanwhile, and it keeps the mean over ranks. The paper's rule, which moves the mean towards
  late ranks, is `merge="paper"`.
- `overlap`, the default with "delta": an average travels while the next step is computed and is
  merged at its end. At a global synchronization a rank waits until enough ranks have arrived, and
  not for the network.
- A global synchronization proceeds when `quorum` of the ranks have arrived; the snapshots of the
  other ranks are contributed on their behalf. The paper waits for all, as `quorum=1.0` does.
  `max_ahead` bounds how many versions may pass within one step of a late rank.
- With `ends_with="quorum"` steps of late ranks do not count any more when the quorum has taken all
  its steps: on data of their own they may undo what the others have learned.
- With `interval` groups average after every few steps only.
- With `rate_scaling="auto"` learning rates are multiplied by sqrt(n) for n workers where the
  optimizer divides by the root of squared gradients, as Adam does. The paper trains with SGD.
- A version is the time of a group, not the step of a rank: a rank that is always slow takes part in
  all versions.
- Contributions and averages are rounded to bfloat16 for the wire (`values`), as
  `averaging.background.rounds` says. A rank keeps what rounding took from its own model, so the
  mean over ranks is still exact. Floating-point buffers are not rounded.
- Floating-point buffers take plain means, integer ones stay local (`weights.statistics`). A rank
  whose gradient is not finite skips its step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch

from offbeat.arithmetic.groups import (
    VersionGroup,
    default_group_size,
    group_of_version,
    size_of_quorum,
)
from offbeat.arithmetic.version_numbers import VersionNumbers
from offbeat.averaging.background import group_average
from offbeat.averaging.background.averager import (
    BackgroundAverager,
    BackgroundWeightAverage,
    averaged_tensors,
    delta_merge,
    start_background_averager,
)
from offbeat.averaging.background.interval_choice import IntervalChoice
from offbeat.averaging.background.interval_watch import IntervalWatch
from offbeat.averaging.background.merge_rules import PaperMerge
from offbeat.averaging.background.model_state import ModelState
from offbeat.averaging.background.processor_time import read_processor_time
from offbeat.averaging.background.published_model import PublishedModel
from offbeat.averaging.scaled_rate import SquareRootRate
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.model_wire import MAX_INTERVAL
from offbeat.codec.rounding import Rounding
from offbeat.errors import ConfigError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.options import (
    refuse_idle,
    require_at_least,
    require_one_of,
    require_positive,
)
from offbeat.weights.model_weights import ModelWeights
from offbeat.weights.optimizer_state import Momenta, divides_by_squares, momentum_name
from offbeat.weights.staging import Staging

_MANY = 65_536


@dataclass(frozen=True, kw_only=True)
class WAGMA(AveragingStrategy):
    """Weights averaged in rotating groups, without waiting for stragglers.

    Args:
        group_size: S, from 2 to the number of workers; None: about its square root.
        period: after so many steps there is a global synchronization, an average of all workers,
            >= 1.
        interval: after so many steps there is an average of a group, a divisor of `period`; more
            than 1 saves bytes and processors' time, and mixes less. "auto": the workers lengthen
            it together while averages cost a step more than `budget`, and shorten it again.
        budget: of interval="auto": share of a step that a worker may wait for a processor because
            of averages, > 0.
        merge: "delta" keeps the mean over ranks and the steps of late ranks; "paper" is the rule of
            the paper.
        quorum: the fraction of workers, rounded down to a number of them, that has to arrive at a
            global synchronization, in (0, 1]; 1 waits for all.
        max_ahead: how many steps a worker may be ahead of one that computes a single step, at least
            `period`, rounded down to a multiple of it; None: 2 `period`. Whoever comes to a
            global synchronization waits for workers that are further behind.
        overlap: whether to compute while an average travels; None: with "delta". It is impossible
            with "paper".
        momenta: "averaged": at global synchronizations the optimizers' momenta are averaged with
            the weights; "local": each worker keeps its own.
        ends_with: "all": every step of every worker counts; "quorum": when the quorum of workers
            has taken all its steps the model is final, and further steps of late workers are not in
            it.
        rate_scaling: "linear": the learning rate is that of S-SGD; "sqrt": sqrt(n) times that, with
            n workers; "auto": "sqrt" with optimizers that divide by the root of squared gradients
            (Adam, Adagrad, RMSprop), whose steps with a worker's own, noisier gradients come to
            less in the mean over workers.
        values: "float32" on the wire (float64 where the model has such), or "bfloat16" for half the
            bytes: what rounding takes stays in the worker's own model, so the mean over workers is
            as exact. It is impossible with merge="paper". "auto": bfloat16 with `overlap`, where
            models of 65,536 elements or more, none of them float64, are averaged.
        groups: "rotating", or for ablations "fixed" (always the same groups) and "off" (global
            synchronizations only).
    """

    name: ClassVar[str] = "wagma"
    survives_death: ClassVar[bool] = True

    group_size: int | None = None
    period: int = 10
    interval: int | Literal["auto"] = 1
    budget: float = 0.05
    merge: Literal["delta", "paper"] = "delta"
    quorum: float = 0.75
    max_ahead: int | None = None
    overlap: bool | None = None
    momenta: Literal["local", "averaged"] = "local"
    ends_with: Literal["all", "quorum"] = "all"
    rate_scaling: Literal["auto", "linear", "sqrt"] = "linear"
    values: Literal["auto", "float32", "bfloat16"] = "auto"
    groups: Literal["rotating", "fixed", "off"] = "rotating"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size is not None:
            require_at_least("group_size", self.group_size, 2)
        require_at_least("period", self.period, 1)
        require_positive("budget", self.budget)
        if self.interval != "auto":
            self._require_divisor(self.interval)
        if self.interval != 1 and self.groups == "off":
            raise ConfigError(
                'interval is that of group averages, and with groups="off" there are none; leave it'
                f" out, got {self.interval!r}"
            )
        if self.interval == "auto" and self.intervals == (1,):
            refuse_idle(
                self, "interval", because=f"period={self.period} leaves no interval but 1 to choose"
            )
        if self.interval != "auto":
            refuse_idle(
                self,
                "budget",
                because=f'it is that of interval="auto", got interval={self.interval}',
            )
        require_one_of("merge", self.merge, ("delta", "paper"))
        require_one_of("momenta", self.momenta, ("local", "averaged"))
        require_one_of("ends_with", self.ends_with, ("all", "quorum"))
        require_one_of("rate_scaling", self.rate_scaling, ("auto", "linear", "sqrt"))
        require_one_of("values", self.values, ("auto", "float32", "bfloat16"))
        require_one_of("groups", self.groups, ("rotating", "fixed", "off"))
        if not 0 < self.quorum <= 1:
            raise ConfigError(
                "quorum must be above 0 and at most 1, the fraction of workers that has to arrive,"
                f" got {self.quorum}"
            )
        if self.groups == "off":
            refuse_idle(self, "group_size", because='with groups="off" there are no groups')
        if self.quorum == 1:
            refuse_idle(
                self, "max_ahead", because="with quorum=1 each global synchronization waits for all"
            )
        if self.max_ahead is not None:
            require_at_least("max_ahead", self.max_ahead, self.period)
        if self.overlap and self.merge == "paper":
            raise ConfigError(
                'merge="paper" takes an average in the place of the model, so overlap must be'
                " False, got True"
            )
        if self.values == "bfloat16" and self.merge == "paper":
            raise ConfigError(
                'merge="paper" takes an average in the place of the model, and with'
                ' values="bfloat16" that would round the model in each step; leave values out, or'
                ' use merge="delta"'
            )

    def _require_divisor(self, interval: int) -> None:
        require_at_least("interval", interval, 1)
        if self.period % interval:
            divisors = [n for n in range(1, self.period + 1) if self.period % n == 0]
            raise ConfigError(
                f"interval must be a divisor of period={self.period}, so"
                f' {", ".join(map(str, divisors))}, or "auto", got {interval}'
            )

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        if self.momenta == "averaged":
            momentum_name(optimizer)

    def check_world(self, world_size: int) -> None:
        if self.group_size is not None and self.group_size > max(2, world_size):
            raise ConfigError(
                f"group_size is {self.group_size}, allowed is 2 to {max(2, world_size)}, the number"
                " of workers; leave it out for about the square root of that"
            )

    def parts(self, context: Context, weights: ModelWeights) -> list[Callback]:
        momenta = None
        if self.momenta == "averaged" and context.optimizer is not None:
            momenta = Momenta(context.optimizer, context.parameters)
        staging = Staging(averaged_tensors(weights, momenta))
        rule = delta_merge(staging, weights) if self.merge == "delta" else PaperMerge
        is_rounded = self.rounds(staging.num_elements, staging.dtype)
        averager = start_background_averager(
            context,
            weights,
            PublishedModel(ModelState(rule), intervals=IntervalChoice(self.numbers)),
            staging=staging,
            serve=group_average.serve,
            group_of=self.group_of,
            ends_with=self.num_to_end,
            momenta=momenta,
            averages_momenta=lambda version: (
                momenta is not None and self.numbers.is_global(version)
            ),
            rounding=(
                Rounding(tuple(staging.spans(weights.positions_of_statistics())))
                if is_rounded
                else None
            ),
            yields=self.overlaps,
        )
        watch = self._watch(averager) if self.interval == "auto" else None
        part = BackgroundWeightAverage(averager, overlap=self.overlaps, watch=watch)
        return [*self._rate_parts(context, averager), part]

    def _watch(self, averager: BackgroundAverager) -> IntervalWatch:
        trainer = threading.get_native_id()
        return IntervalWatch(
            averager.trainer,
            lambda: read_processor_time(trainer, averager.progress.native_ids()),
            intervals=self.intervals,
            period=self.period,
            budget=self.budget,
            inform=averager.inform,
        )

    def _rate_parts(self, context: Context, averager: BackgroundAverager) -> list[Callback]:
        optimizer = context.optimizer
        if optimizer is None or not self.scales_rates(optimizer):
            return []
        if (num_ranks := averager.num_members) > 1:
            why = (
                f", since the steps of {type(optimizer).__name__} with a rank's own gradients come"
                " to less in their mean"
                if self.rate_scaling == "auto"
                else ", as rate_scaling='sqrt' says"
            )
            factor = f"sqrt({num_ranks} ranks)"
            context.notify(f"learning rates are those of S-SGD times {factor}{why}")
        return [SquareRootRate(optimizer, lambda: averager.num_members)]

    def scales_rates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether learning rates are those of S-SGD times sqrt(n)."""
        if self.rate_scaling == "auto":
            return divides_by_squares(optimizer)
        return self.rate_scaling == "sqrt"

    @property
    def overlaps(self) -> bool:
        """Whether a step is computed while an average travels."""
        return self.merge == "delta" if self.overlap is None else self.overlap

    def rounds(self, num_elements: int, dtype: np.dtype[np.floating]) -> bool:
        """Whether the values of a vector that is averaged travel in bfloat16."""
        if self.values == "auto":
            # Without overlap all ranks may hold the same bits, and rounding would change that. Few
            # elements cost nothing.
            return self.overlaps and num_elements >= _MANY and dtype == np.float32
        return self.values == "bfloat16"

    @property
    def intervals(self) -> tuple[int, ...]:
        """The possible numbers of steps from one version to the next, ascending."""
        if self.groups == "off":
            return (self.period,)
        if self.interval != "auto":
            return (self.interval,)
        # Without any group average between two global synchronizations it would be another method.
        shorter = [n for n in range(1, self.period) if self.period % n == 0 and n <= MAX_INTERVAL]
        return tuple(shorter) or (1,)

    def num_to_end(self, num_members: int) -> int:
        """How many of `num_members` have to take no more steps for those of the others not to
        count.
        """
        return num_members if self.ends_with == "all" else size_of_quorum(self.quorum, num_members)

    @property
    def numbers(self) -> VersionNumbers:
        """Those of the versions."""
        return _numbers(self.period, self.intervals)

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        """The group of the member at `position` in `version`."""
        numbers = self.numbers
        is_global = numbers.is_global(version)
        fixed = 0 if self.groups == "fixed" else numbers.rotation(version)
        max_ahead = 2 * self.period if self.max_ahead is None else self.max_ahead
        return group_of_version(
            version if is_global else fixed,
            position,
            range(num_members),
            group_size=(
                default_group_size(num_members) if self.group_size is None else self.group_size
            ),
            period=numbers.in_a_period if is_global else None,
            quorum=self.quorum,
            max_ahead=max_ahead // self.period * numbers.in_a_period,
        )


@lru_cache(maxsize=16)
def _numbers(period: int, intervals: tuple[int, ...]) -> VersionNumbers:
    return VersionNumbers(period, intervals)
