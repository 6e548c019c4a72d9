"""What a rank publishes: its model, its integer buffers and its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from offbeat.averaging.background.interface import Contribution, Piece
from offbeat.averaging.background.merge_rules import MergeRule
from offbeat.codec.model_wire import Counters, Values, no_counters


class Taken(NamedTuple):
    """With what the trainer continues.

    Attributes:
        values: of the model; read-only.
        counters: the model's.
        is_held: whether the trainer's model holds `values` already: no average has come since it
            ended its step.
    """

    values: Values
    counters: Counters
    is_held: bool


class ModelState:
    """The model of a rank, its integer buffers and its step. Used under the lock of a
    `PublishedModel`.

    Args:
        make_rule: makes the merge rule that holds a model, once there is one.
        weight: the weight of this rank in averages, > 0.

    Attributes:
        step: how many steps the trainer has made, including those of the member whose model was
            adopted.
        is_final: whether the trainer's steps count no more.
    """

    def __init__(self, make_rule: Callable[[Values], MergeRule], *, weight: float = 1.0) -> None:
        self.step = 0
        self._make_rule = make_rule
        self._weight = weight
        self._rule: MergeRule | None = None
        self._counters = no_counters()
        self._replaced = False
        self.is_final = False

    @property
    def exists(self) -> bool:
        return self._rule is not None

    @property
    def is_under_way(self) -> bool:
        """Whether something that this rank has contributed may still come back, besides averages
        of open versions.
        """
        return False

    def averages_models(self, version: int) -> bool:
        """Whether `version` averages models, as opposed to gradients."""
        return True

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        """From now on there is a model."""
        self._rule, self._counters, self.step = self._make_rule(model), counters, step

    def forget(self) -> None:
        """From now on there is no model."""
        self._rule = None

    def advance(self, model: Sequence[Values], counters: Counters) -> bool:
        """The trainer has ended a step; see `MergeRule.advance`."""
        # A step that began with a model which was replaced meanwhile says nothing about the new
        # one.
        if not (self._replaced or self.is_final):
            if not self._existing.advance(model):
                return False
            self._counters = counters
        self._replaced = False
        self.step += 1
        return True

    def take(self) -> Taken:
        """The trainer continues."""
        self._replaced = False
        values = self._existing.take()
        is_held = values is self._existing.held and not self.is_final
        return Taken(values, self._counters, is_held=is_held)

    def rebase(self, held: Values) -> None:
        """The trainer's model holds `held` instead of what it took."""
        self._existing.rebase(held)

    def adopt(self, model: Contribution) -> None:
        """Replace this rank's model by that of a member."""
        self._replaced = self._rule is not None
        self._rule, self._counters = self._make_rule(model.values.copy()), model.counters
        self.step = self.step if self._replaced else model.step

    def end_training(self) -> None:
        """From now on the trainer's steps are not added to the model, and the trainer takes the
        model as it was before each. Averages are still merged.
        """
        self.is_final = True

    def snapshot(self) -> Contribution:
        """The current model, as a contribution that is not fresh."""
        return self._contribution(self._existing.snapshot, fresh=False)

    def contribute(self, version: int, *, fresh: bool) -> Contribution | None:
        """What this rank contributes to `version`; None if it has nothing to contribute."""
        return self._contribution(self._existing.snapshot, fresh=fresh)

    def merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        """Merge averages of `version`."""
        if self._rule is None:
            return
        # Counters stay this rank's own. A rank that took over a larger count and went on from there
        # would count more steps than any rank has made.
        self._rule.merge(pieces)

    def finalize_version(self, version: int) -> None:
        """No further piece of `version` will come."""

    def begin_generation(self) -> None:
        """No piece of a version of the old generation will come."""

    def _contribution(self, values: Values, *, fresh: bool) -> Contribution:
        return Contribution(
            values=values,
            step=self.step,
            fresh=fresh,
            weight=self._weight,
            counters=self._counters,
        )

    @property
    def _existing(self) -> MergeRule:
        assert self._rule is not None, "begin must be called first"
        return self._rule
