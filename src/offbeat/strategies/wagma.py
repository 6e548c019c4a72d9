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

The protocol is `averaging.background.group_average`, the groups are those of `arithmetic.groups`. A
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
  While a rank computes a single step, the others pass two periods at most.
- With `interval` groups average after every few steps only.
- A version is the time of a group, not the step of a rank: a rank that is always slow takes part in
  all versions.
- Contributions and averages are rounded to bfloat16 for the wire (`values`), as
  `averaging.background.rounds` says. A rank keeps what rounding took from its own model, so the
  mean over ranks is still exact. Floating-point buffers are not rounded. In fewer bits groups
  exchange differences from the last global synchronization: a member moves by the mean of the
  decoded differences less its own one, so the weighted sum over a group does not change, whatever
  each member takes differences from. One that missed a synchronization, or has just joined or
  resumed, takes them from what it has until the next one, and mixes less till then.
- Floating-point buffers take plain means, integer ones stay local (`weights.statistics`). A rank
  whose gradient is not finite skips its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from offbeat.arithmetic.groups import VersionGroup, default_group_size, group_of_version
from offbeat.averaging.background.averager import BackgroundWeightAverage, delta_merge
from offbeat.averaging.background.group_average import RoundManager
from offbeat.averaging.background.merge_rules import MergeRule, PaperMerge
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore, TwoOrMore, UpToOne
from offbeat.codec.model_wire import Values
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.codec.value_codecs import ValueCodec
from offbeat.errors import ConfigError
from offbeat.strategies.averaging import AveragingStrategy, inform_of_short_steps
from offbeat.strategies.options import refuse_idle
from offbeat.weights.model_weights import ModelWeights, Staging

_MANY = 65_536


@dataclass(frozen=True, kw_only=True)
class WAGMA(AveragingStrategy):
    """Weights averaged in rotating groups, without waiting for stragglers.

    Args:
        group_size: S, from 2 to the number of workers; None: about its square root.
        period: after so many steps there is a global synchronization, an average of all workers,
            >= 1.
        interval: after so many steps there is an average of a group, a divisor of `period`; more
            than 1 saves bytes and processors' time, and mixes less; with `period` there are no
            averages of groups.
        merge: "delta" keeps the mean over ranks and the steps of late ranks; "paper" is the rule of
            the paper.
        quorum: the fraction of workers, rounded down to a number of them, that has to arrive at a
            global synchronization, in (0, 1]; 1 waits for all.
        overlap: whether to compute while an average travels; None: with "delta". It is impossible
            with "paper".
        values: how values travel: "float32" (float64 where the model has such), or "bfloat16",
            which is impossible with merge="paper". "auto": bfloat16 with `overlap`, where models of
            65,536 elements or more, none of them float64, are averaged. "float8", "linear8",
            "linear4", "e3m0" (1 byte, 1 byte, 4 bits, 4 bits), or a `ValueCodec` of your own: of
            averages of groups, differences from the last global synchronization.
    """

    survives_death = True
    trains_islands = True
    periods_ahead: ClassVar[int] = 2
    """How far a worker may be ahead of one that computes a single step: whoever comes to a global
    synchronization waits for workers that are further behind.
    """

    group_size: TwoOrMore | None = None
    period: OneOrMore = 10
    interval: OneOrMore = 1
    merge: Literal["delta", "paper"] = "delta"
    quorum: UpToOne = 0.75
    overlap: bool | None = None
    values: (
        ValueCodec | Literal["auto", "float32", "bfloat16", "float8", "linear8", "linear4", "e3m0"]
    ) = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period % self.interval:
            divisors = [n for n in range(1, self.period + 1) if self.period % n == 0]
            raise ConfigError(
                f"interval must be a divisor of period={self.period}, so"
                f" {', '.join(map(str, divisors))}, got {self.interval}"
            )
        if self.interval == self.period:
            refuse_idle(self, "group_size", because="with interval=period there are no groups")
        if self.overlap and self.merge == "paper":
            raise ConfigError(
                'merge="paper" takes an average in the place of the model, so overlap must be'
                " False, got True"
            )
        if self.values not in ("auto", "float32") and self.merge == "paper":
            raise ConfigError(
                'merge="paper" takes an average in the place of the model, and with'
                f" values={self.values!r} that would round the model in each step; leave values"
                ' out, or use merge="delta"'
            )
        if self.change_values is not None and self.interval == self.period:
            raise ConfigError(
                f"values={self.values!r} is for averages of groups, and with interval=period there"
                ' are none; use values="bfloat16"'
            )

    def check_world(self, world_size: int) -> None:
        if self.group_size is not None and self.group_size > max(2, world_size):
            raise ConfigError(
                f"group_size is {self.group_size}, allowed is 2 to {max(2, world_size)}, the number"
                " of workers; leave it out for about the square root of that"
            )

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        inform_of_short_steps(context)
        staging, values = Staging(weights.tensors(), in_miniature=True), self.change_values
        rule: Callable[[Values], MergeRule] = PaperMerge
        if self.merge == "delta":
            rule = delta_merge(staging, weights, has_anchor=values is not None)
        is_rounded = self.rounds(staging.scale * staging.num_elements, staging.dtype)
        statistics = tuple(staging.spans(weights.positions_of_statistics()))
        model = SharedModel(rule, interval=self.interval, changed=context.driver.condition())
        return [
            BackgroundWeightAverage(
                context,
                weights,
                model,
                staging=staging,
                member=RoundManager,
                group_of=self.group_of,
                rounding=Rounding(statistics) if is_rounded else None,
                changes=None if values is None else CodedChanges(values, statistics),
                overlap=self.overlaps,
            )
        ]

    @property
    def overlaps(self) -> bool:
        """Whether a step is computed while an average travels."""
        return self.merge == "delta" if self.overlap is None else self.overlap

    def rounds(self, num_elements: float, dtype: np.dtype[np.floating]) -> bool:
        """Whether the values of a vector that is averaged travel in bfloat16."""
        if self.values == "auto":
            # Without overlap all ranks may hold the same bits, and rounding would change that. Few
            # elements cost nothing.
            return self.overlaps and num_elements >= _MANY and dtype == np.float32
        return self.values != "float32"

    @property
    def change_values(self) -> ValueCodec | None:
        """What writes differences in averages of groups; None: values travel."""
        if self.values in ("auto", "float32", "bfloat16"):
            return None
        return VALUE_CODECS[self.values] if isinstance(self.values, str) else self.values

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        """The group of the member at `position` in `version`."""
        in_a_period = self.period // self.interval
        return group_of_version(
            version,
            position,
            range(num_members),
            group_size=self.group_size or default_group_size(num_members),
            period=in_a_period,
            quorum=self.quorum,
            max_ahead=self.periods_ahead * in_a_period,
        )
