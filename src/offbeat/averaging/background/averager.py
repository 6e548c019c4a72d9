"""Averages that travel and are merged while the trainer computes.

`BackgroundCallback` puts together what a rank needs for that; `BackgroundWeightAverage` is that of
WAGMA-SGD and AD-PSGD.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from typing_extensions import override

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.interface import ProtocolSettings
from offbeat.averaging.background.merge_rules import DeltaMerge, MergeRule
from offbeat.averaging.background.progress_thread import MakeMember, ProgressThread
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec import rounding as rounding_kernels
from offbeat.codec.model_wire import Values
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.errors import CheckpointError
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import Generations
from offbeat.weights.model_weights import ModelWeights, Staging, non_finite_weights, require_finite

HOLD_S = 10.0
"""How long a rank waits for members that are too far behind, in seconds. It then goes on without
them until they have ended a step.
"""

GroupOf: TypeAlias = Callable[[int, int, int], VersionGroup]
"""The group of (a version, this rank's position, the number of members)."""


def delta_merge(
    staging: Staging, weights: ModelWeights, *, has_anchor: bool = False
) -> Callable[[Values], MergeRule]:
    """Makes the `DeltaMerge` of a vector that `staging` lays out, in which `weights` come first."""
    statistics = staging.spans(weights.positions_of_statistics())
    return partial(DeltaMerge, statistics=statistics, has_anchor=has_anchor)


class BackgroundCallback(Callback):
    """What takes part in averages on behalf of a rank while its trainer computes. Making it starts
    the threads for that, and is collective.

    Args:
        context: of the session.
        weights: the weights to average.
        model: what peers may have of it; it is empty.
        staging: of `weights.tensors()`.
        member: makes this rank's member of a generation, of a protocol.
        group_of: the group of each version.
        num_flags: how many counters `model` adds to the model's own, >= 0.
        rounding: how values travel; None: as they are.
        changes: how differences from global synchronizations do in the averages between them.
        overlap: whether the trainer computes while an average travels: then it comes first where
            there are too few processors for both.

    Raises:
        PeerError: a newcomer received no model.
    """

    averages_models = True
    averages_alone = True

    def __init__(
        self,
        context: Context,
        weights: ModelWeights,
        model: SharedModel,
        *,
        staging: Staging,
        member: MakeMember,
        group_of: GroupOf,
        num_flags: int = 0,
        rounding: Rounding | None = None,
        changes: CodedChanges | None = None,
        overlap: bool = False,
    ) -> None:
        # Compiling takes longer than peers wait for an answer, so it comes before the first.
        rounding_kernels.warm()
        if changes is not None:
            changes.encode(np.ones(1, staging.dtype), None, begin=staging.num_elements)
        self._weights, self._staging, self._model = weights, staging, model
        self._rank, self._overlap = context.driver.name_of(context.driver.rank), overlap
        self._record_wait, self._inform = context.record_wait, context.notices.inform
        buffers = weights.buffers()
        num_counters = num_flags + sum(buffers[name].numel() for name in weights.chosen.counters)

        def settings(generation: Generation, position: int) -> ProtocolSettings:
            num_members = len(generation.members)
            return ProtocolSettings(
                members=tuple(range(num_members)),
                generation=generation.number,
                num_elements=staging.num_elements,
                scale=staging.scale,
                num_counters=num_counters,
                dtype=staging.dtype,
                rounding=rounding,
                changes=changes,
                group_of=lambda version: group_of(version, position, num_members),
            )

        self._progress = ProgressThread(
            model,
            member=member,
            settings=settings,
            count=context.count,
            notify=context.notices.notify,
            name_of=context.driver.name_of,
            yields=overlap,
        )
        self._generations: Generations | None = None  # None in a world of one
        try:
            self._generations = context.enter(self._progress)
            self._progress.wait_for_model()
        except BaseException:
            self._end()
            raise
        self.start_step = model.step
        self._num_steps = self.start_step or context.num_steps
        self._encode_s = 0.0
        if model.has_begun:  # this rank is a newcomer and has the model of a member
            self._load()

    def _confirm_membership(self) -> None:
        """Raise what this rank does not know yet if it was suspended: that its peers have gone on
        or ended without it, and that it cannot join them again.
        """
        if self._generations is not None:
            self._generations.confirm()
        self._model.raise_failure()

    def _end(self, *, over: bool = False) -> None:
        """End the threads of this rank. `over`: the run has ended for all members."""
        # The membership first: otherwise it could begin a generation whose mesh is never closed.
        if self._generations is not None:
            self._generations.close(over=over)
        self._progress.close()

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        # The model is published as late as possible, because the user may load weights after
        # attaching.
        self._publish()

    @override
    def steps_behind(self) -> int:
        return self._model.steps_behind if self._model.has_begun else 0

    @override
    def on_finish(self) -> None:
        self._publish()
        self._model.end_with(self._read(), self._weights.read_counters())
        self._confirm_membership()
        self._progress.stop_stepping()
        # Averages on this rank's behalf have arrived since its last step, and peers have their
        # parts of them.
        self._load()
        counts = self._model.counts
        if counts.contributions:
            self._inform(
                f"worker {self._rank} had {counts.made} averages and missed"
                f" {counts.missed}; {counts.stale / counts.contributions:.0%} of what they"
                " were made of came from workers that were computing"
            )

    @override
    def on_rest(self) -> None:
        self._model.rest()
        self._progress.end_step()

    @override
    def on_resume(self) -> None:
        self._model.resume()

    @override
    def on_abandon(self, reason: str) -> None:
        self._progress.abort(reason)
        self._end()

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        self._publish()
        with self._staging.written(weights.tensors()) as into:
            counters, missing = self._progress.mean(into)
        weights.write_counters(counters)
        return missing

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._model.counts.made, "encode_s": self._encode_s}

    @override
    def gauges(self) -> dict[str, float]:
        counts = self._model.counts
        return {"stale_share": counts.stale / counts.contributions} if counts.contributions else {}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {"local": {"num_steps": self._num_steps}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        if "num_steps" not in state.get("local", {}):
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        self._num_steps = int(state["local"]["num_steps"])
        # The weights are loaded too, before or after this, so what was published is out of date.
        self._model.forget()

    @override
    def close(self) -> None:
        try:
            self._confirm_membership()
        finally:
            self._end(over=self._progress.leave())

    def _publish(self) -> None:
        """Publish the model, unless it is published."""
        if not self._model.has_begun:
            self._model.begin(self._read(), self._weights.read_counters(), step=self._num_steps)

    def _advance(self) -> None:
        """Publish the model as it is at the end of a step."""
        begin_s = time.perf_counter()
        self._num_steps += 1
        staging, tensors = self._staging, self._weights.tensors()
        if not staging.shares_memory:  # a device is faster at that than the host
            require_finite(tensors, rank=self._rank)
        parts = staging.parts(tensors)
        counters = self._weights.read_counters()
        if not self._model.advance(parts, counters, is_given=not staging.shares_memory):
            raise non_finite_weights(self._rank)
        self._encode_s += time.perf_counter() - begin_s

    def _arrive(self, must_wait: Callable[[int], bool], *, for_average: bool = True) -> int | None:
        """Arrive at a version, unless this rank need not, and wait for it if it must.

        Args:
            must_wait: whether the trainer must wait for a version.
            for_average: whether it waits for the average; else for the arrivals of peers alone.

        Returns:
            The version; None without an arrival.
        """
        begin_s = time.monotonic()
        # Peers that wait for the end of this step are told before this rank waits for anybody.
        self._progress.end_step()
        self._wait_for_late()
        version = self._model.arrive(must_wait)
        if version is not None:
            self._progress.arrive(version)
            if must_wait(version):
                self._model.wait(for_average=for_average)
        self._record_wait(begin_s, time.monotonic())
        return version

    def _wait_for_late(self) -> None:
        """Begin no step before members that are too far behind have ended theirs. But a member that
        ends none for long may itself be waiting for this rank, outside of its steps.
        """
        if late := self._model.wait_for_late(HOLD_S):
            names = self._progress.names(late)
            self._inform(
                f"this worker has waited {HOLD_S:g} s for worker {names}, which is further behind"
                " than two periods, and goes on. A worker that does something else than a step"
                " should do it within session.resting(), or after session.finish()"
            )

    def _load(self) -> None:
        """Continue with what averages have made of the model."""
        begin_s = time.perf_counter()
        tensors = self._weights.tensors()
        values, counters, is_held = self._model.take()
        if not is_held:
            self._staging.write_(values, tensors)
            # The tensors do not hold exactly `values` where their type is shorter. The next step
            # must count from what they hold.
            if not self._staging.exact:
                self._model.rebase(self._read())
        self._weights.write_counters(counters)
        self._encode_s += time.perf_counter() - begin_s

    def _read(self) -> Values:
        values = self._staging.read(self._weights.tensors())
        require_finite([torch.from_numpy(values)], rank=self._rank)
        return values


class BackgroundWeightAverage(BackgroundCallback):
    """After every optimizer step, publishes this rank's weights and takes the averaged ones.

    With `overlap` the trainer continues as soon as enough ranks have arrived (at once where one
    suffices) and takes the average at the end of a later step; else it waits for the average.
    """

    state_key: ClassVar[str] = "group_average"

    @override
    def on_before_update(self) -> None:
        self._publish()

    @override
    def on_after_step(self) -> None:
        self._advance()
        if self._model.is_due:
            self._arrive(self._must_wait, for_average=not self._overlap)
        else:
            self._progress.end_step()
        self._load()

    def _must_wait(self, version: int) -> bool:
        return not self._overlap or self._progress.must_wait(version)
