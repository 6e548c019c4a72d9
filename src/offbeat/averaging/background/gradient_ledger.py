"""Gradients in averages that wait for no rank, the bookkeeping of eager-SGD (arXiv 1908.04207).

A gradient passes through three accounts of its rank, and no account loses anything:

    owed          no version has it yet
    under way     it was contributed to a version, and is owed again wherever the average came
                  without it
    to apply      averages that came, and that the trainer has not applied yet; every rank applies
                  every average once
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.averaging.background.interface import Contribution, Piece
from offbeat.averaging.background.merge_rules import MergeRule
from offbeat.averaging.background.shared_model import SharedModel, Taken
from offbeat.codec.model_wire import Counters, Values

UsedParameters = NDArray[np.bool_]
"""Which parameters had a gradient, shape (num_parameters,)."""


class GradientLedger(SharedModel):
    """A rank's model and gradients, for versions that average gradients and some that average
    models.

    Which parameters any rank has used travels as further counters of the model: an average has the
    largest value of each.

    Args:
        num_elements: the number of elements of the model.
        num_parameters: the number of its parameters.
        make_rule: makes the merge rule of the model, for the versions that average models and for
            peers that request the model.
        averages_models: whether a version averages models.
        changed: as of `SharedModel`.
    """

    def __init__(
        self,
        num_elements: int,
        num_parameters: int,
        *,
        make_rule: Callable[[Values], MergeRule],
        averages_models: Callable[[int], bool],
        changed: threading.Condition | None = None,
    ) -> None:
        # A rank that skipped more than one arrival would keep its gradients for too long.
        super().__init__(make_rule, max_credit=1, changed=changed)
        self._num_elements = num_elements
        self._num_parameters = num_parameters
        self._averages_models = averages_models
        self._owed: Values | None = None
        self._used = self._none_used()
        self._under_way: dict[int, Values] = {}
        self._to_apply: Values | None = None
        self._used_to_apply = self._none_used()

    # The trainer's gradients

    def owe(self, gradient: Values, used: UsedParameters) -> None:
        """This rank has a new gradient, shape (num_elements,), which belongs to this object from
        now on.
        """
        with self._changed:
            self._owed = gradient if self._owed is None else self._owed + gradient
            self._used = self._used | used

    def owed(self) -> Values | None:
        """A copy of what no version has taken in so far, including what is under way; None:
        nothing.
        """
        with self._changed:
            accounts = [*self._under_way.values(), *([] if self._owed is None else [self._owed])]
            return np.sum(accounts, axis=0) if accounts else None

    def accounts(self) -> tuple[Values | None, Values | None]:
        """Copies, of one moment, of what is owed and of what is to be applied; None: nothing."""
        with self._changed:
            return self.owed(), None if self._to_apply is None else self._to_apply.copy()

    def take_update(self) -> tuple[Values | None, UsedParameters]:
        """What the trainer must apply now.

        Returns:
            The sum, over the versions since the last call, of their contributions divided by the
            number of members, None if there was no version; and which parameters any rank used.
        """
        with self._changed:
            taken, used = self._to_apply, self._used_to_apply
            self._to_apply, self._used_to_apply = None, self._none_used()
            return taken, used

    def restore(self, *, owed: Values, to_apply: Values, used: UsedParameters) -> None:
        """Restore the accounts of a saved state.

        Args:
            owed: what was owed, shape (num_elements,).
            to_apply: what was to be applied, shape (num_elements,).
            used: which parameters count as used, where an account is not zero.
        """
        with self._changed:
            self._owed = owed if owed.any() else None
            self._to_apply = to_apply if to_apply.any() else None
            self._used = used if self._owed is not None else self._none_used()
            self._used_to_apply = used if self._to_apply is not None else self._none_used()

    # Versions

    @override
    def _moves_model(self, version: int) -> bool:
        return self._averages_models(version)

    @override
    def _contribution_to(self, version: int, *, fresh: bool) -> Contribution | None:
        if self._averages_models(version):
            return super()._contribution_to(version, fresh=fresh)
        if self._owed is None:
            return None  # it would be zeros, so there is no reason to send it
        mine, used = self._owed, self._used
        self._owed, self._used = None, self._none_used()
        # A copy, because elements become zero when their average comes.
        self._under_way[version] = mine.copy()
        own_counters = self._counters[: self._counters.size - self._num_parameters]
        counters = self._with_used(own_counters, used)
        return replace(self._contribution(mine, fresh=fresh), counters=counters)

    @override
    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        if self._averages_models(version):
            super()._merge(version, pieces)
            return
        mine = self._under_way.get(version)
        for piece in pieces:
            average = piece.average[:]
            if self._to_apply is None:
                self._to_apply = np.zeros(self._num_elements, average.dtype)
            self._used_to_apply |= piece.counters[piece.counters.size - self._num_parameters :] > 0
            # The sum of contributions divided by the number of members: a member that owed nothing
            # has contributed zero.
            self._to_apply[piece.begin : piece.end] += average * (
                piece.sum_of_weights / len(piece.notes)
            )
            if mine is not None:
                if piece.contributed is None:  # this rank's contribution came too late for it
                    self._owe_again(mine, piece.begin, piece.end)
                mine[piece.begin : piece.end] = 0
        if mine is not None and not mine.any():
            del self._under_way[version]

    @override
    def _finalize(self, version: int) -> None:
        if (lost := self._under_way.pop(version, None)) is not None:
            self._owe_again(lost, 0, lost.size)

    @override
    def begin_generation(self) -> None:
        with self._changed:
            for values in self._under_way.values():
                self._owe_again(values, 0, values.size)
            self._under_way = {}
            super().begin_generation()

    @property
    @override
    def _is_under_way(self) -> bool:
        return bool(self._under_way)

    # The model

    @override
    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        super().begin(model, self._with_used(counters, self._none_used()), step=step)

    @override
    def advance(
        self, model: Sequence[Values], counters: Counters, *, is_given: bool = False
    ) -> bool:
        counters = self._with_used(counters, self._none_used())
        return super().advance(model, counters, is_given=is_given)

    @override
    def take(self) -> Taken:
        taken = super().take()
        own_counters = taken.counters[: taken.counters.size - self._num_parameters]
        return taken._replace(counters=own_counters)

    @override
    def adopt(self, model: Contribution) -> None:
        with self._changed:
            super().adopt(model)
            # Gradients of the model that is given up say nothing about the new one.
            self._owed = self._to_apply = None
            self._used, self._used_to_apply = self._none_used(), self._none_used()
            self._under_way = {}

    def _owe_again(self, values: Values, begin: int, end: int) -> None:
        if self._owed is None:
            self._owed = np.zeros_like(values)
        self._owed[begin:end] += values[begin:end]
        # Which parameters these elements belong to was not kept. Where no rank used a parameter its
        # gradient is zero.
        self._used[:] = True

    def _none_used(self) -> UsedParameters:
        return np.zeros(self._num_parameters, np.bool_)

    def _with_used(self, counters: Counters, used: UsedParameters) -> Counters:
        return np.concatenate([counters, used.astype(np.int64)])
