"""eager-SGD: gradients averaged over the ranks that have arrived; a late rank contributes its
gradient to a later average (arXiv 1908.04207).

    on each rank, in each step:
    G_send += gradient
    G = (1/P) partial_allreduce(G_send)   a late rank contributes what it has, which may be nothing,
                                          and finds G when it arrives
    G_send = 0                            if it was in the average; else it is still owed
    the user's optimizer steps with G

- solo: the average begins when the first rank arrives.
- majority: it begins when half of the ranks have arrived.

Every rank applies every average, so that models are equal except for the order of the updates; in
every `period`-th version the models are averaged.

The protocol is `averaging.background.group_average`, among all ranks. A gradient passes through
three accounts of its rank (`GradientLedger`), and no account loses anything:

    owed          no version has it yet
    under way     it was contributed to a version, and is owed again wherever the average came
                  without it
    to apply      averages that came, and that the trainer has not applied yet; every rank applies
                  every average once

Cost per step: at most 2 n (P-1)/P elements sent by each rank, and nothing by a rank that owes
nothing.

Differences from the paper: "majority" counts the ranks that have arrived, where the paper waits for
one rank drawn at random, which is half of the ranks in expectation only. Models are averaged by
steps instead of epochs, and among a quorum. A rank that missed several averages applies their sum
in one step. A rank whose gradient is not finite contributes nothing. What is owed or not applied
when a rank has taken its last step is not in the final model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.averager import BackgroundCallback, delta_merge
from offbeat.averaging.background.group_average import RoundManager
from offbeat.averaging.background.interface import Contribution, Piece
from offbeat.averaging.background.merge_rules import MergeRule
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import TwoOrMore
from offbeat.codec.model_wire import Values
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.options import require_dense_optimizer
from offbeat.weights.model_weights import ModelWeights, Staging, dense_gradient, restore_


@dataclass(frozen=True, kw_only=True)
class EagerSGD(AveragingStrategy):
    """Gradients averaged without waiting for stragglers.

    Args:
        mode: "solo": an average begins when the first worker arrives; "majority": when half of the
            workers have arrived.
        period: the models are averaged in every `period`-th version, among half of the
            workers or more; >= 2.
    """

    survives_death = True
    trains_islands = True
    changes_gradients = True

    mode: Literal["solo", "majority"] = "majority"
    period: TwoOrMore = 100

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_dense_optimizer(optimizer)

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        return [PartialAllReduce(context, weights, self)]

    def averages_models(self, version: int) -> bool:
        """Whether `version` averages models, and not gradients."""
        return (version + 1) % self.period == 0

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        """The group of the member at `position` in `version`."""
        half = -(-num_members // 2)
        several = self.mode == "majority" or self.averages_models(version)
        return VersionGroup(ranks=tuple(range(num_members)), min_arrivals=half if several else 1)


class PartialAllReduce(BackgroundCallback):
    """Before every optimizer step, contributes this rank's gradient and replaces it by the averages
    that have come.

    Args:
        context, weights: as of `BackgroundCallback`.
        strategy: says who averages what in each version.
    """

    state_key: ClassVar[str] = "partial_gradients"

    def __init__(self, context: Context, weights: ModelWeights, strategy: EagerSGD) -> None:
        staging = Staging(weights.tensors(), in_miniature=True)
        self._parameters = [*weights.parameters.values()]
        self._gradients = GradientLedger(
            staging.num_elements,
            len(self._parameters),
            make_rule=delta_merge(staging, weights),
            averages_models=strategy.averages_models,
            changed=context.driver.condition(),
        )
        super().__init__(
            context,
            weights,
            self._gradients,
            staging=staging,
            member=RoundManager,
            group_of=strategy.group_of,
            num_flags=len(self._parameters),
        )

    @override
    def on_before_update(self) -> None:
        self._publish()
        self._owe_gradients()
        # A version that averaged models has not taken the gradient, so another one follows.
        must_wait, averages_models = (lambda version: True), self._gradients.averages_models
        while (version := self._arrive(must_wait)) is not None and averages_models(version):
            pass
        self._write_gradients(*self._gradients.take_update())

    @override
    def on_after_step(self) -> None:
        self._advance()
        self._load()

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        state = super().state_dict()
        owed, to_apply = self._gradients.accounts()
        local = {f"to_apply/{name}": tensor for name, tensor in self._by_name(to_apply).items()}
        return {"local": state["local"] | local, "additive": self._by_name(owed)}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        owed, to_apply = self._by_name(None), self._by_name(None)
        restore_(owed, state.get("additive", {}), "what is owed of gradients")
        super().load_state_dict(state)
        to_apply |= {name: state["local"].get(f"to_apply/{name}", to_apply[name]) for name in owed}
        self._gradients.restore(owed=self._vector(owed), to_apply=self._vector(to_apply))

    def _owe_gradients(self) -> None:
        """Add `param.grad` to what this rank owes."""
        used = np.array([parameter.grad is not None for parameter in self._parameters])
        if used.any():
            own = map(dense_gradient, self._parameters)
            self._gradients.owe(self._staging.read([*own, *self._zeros_of_buffers()]), used)

    def _zeros_of_buffers(self) -> list[torch.Tensor]:
        """In the places of statistics, which have no gradient."""
        return [*map(torch.zeros_like, self._weights.statistics())]

    def _write_gradients(self, update: Values | None, used: UsedParameters) -> None:
        """Write `update` into `param.grad`, or None where no rank used the parameter or it is
        frozen on this rank.
        """
        gradients = [
            torch.zeros_like(p) if p.grad is None or p.grad.is_sparse else p.grad
            for p in self._parameters
        ]
        if update is not None:
            self._staging.write_(update, [*gradients, *self._zeros_of_buffers()])
        for parameter, gradient, is_used in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used and parameter.requires_grad else None

    def _by_name(self, values: Values | None) -> dict[str, torch.Tensor]:
        tensors = [torch.zeros_like(tensor) for tensor in self._weights.tensors()]
        if values is not None:
            self._staging.write_(values, tensors)
        return dict(zip(self._weights.parameters, tensors, strict=False))

    def _vector(self, by_name: Mapping[str, torch.Tensor]) -> Values:
        own = [by_name[name].to(like) for name, like in self._weights.parameters.items()]
        return self._staging.read([*own, *self._zeros_of_buffers()])


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

    Attributes:
        averages_models: as given.
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
        self.averages_models = averages_models
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

    def restore(self, *, owed: Values, to_apply: Values) -> None:
        """Restore the accounts of a saved state. Which parameters were used was not saved: where an
        account is not zero, all of them.

        Args:
            owed: what was owed, shape (num_elements,).
            to_apply: what was to be applied, shape (num_elements,).
        """
        with self._changed:
            self._owed = owed if owed.any() else None
            self._to_apply = to_apply if to_apply.any() else None
            self._used = np.full(self._num_parameters, self._owed is not None)
            self._used_to_apply = np.full(self._num_parameters, self._to_apply is not None)

    # Versions

    @override
    def _moves_model(self, version: int) -> bool:
        return self.averages_models(version)

    @override
    def _contribution_to(self, version: int, *, fresh: bool) -> Contribution | None:
        if self.averages_models(version):
            return super()._contribution_to(version, fresh=fresh)
        if self._owed is None:
            return None  # it would be zeros, so there is no reason to send it
        mine, used = self._owed, self._used
        self._owed, self._used = None, self._none_used()
        # A copy, because elements become zero when their average comes.
        self._under_way[version] = mine.copy()
        return self._contribution(mine, fresh=fresh, used=used)

    @override
    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        if self.averages_models(version):
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
    def _contribution(
        self, values: Values, *, fresh: bool, used: UsedParameters | None = None
    ) -> Contribution:
        mine = super()._contribution(values, fresh=fresh)
        flags = self._none_used() if used is None else used
        return replace(mine, counters=np.concatenate([mine.counters, flags.astype(np.int64)]))

    @override
    def adopt(self, model: Contribution) -> None:
        with self._changed:
            counters = model.counters[: model.counters.size - self._num_parameters]
            super().adopt(replace(model, counters=counters))
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
