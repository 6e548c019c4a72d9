"""The running averages of the factors that this rank keeps.

Where preconditioned gradients travel, a rank keeps the factors that it owns; elsewhere every rank
keeps all of them. What is averaged is a step's mean over all ranks, out of a message, or, where no
factors are sent, what this rank has seen itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.kfac.averages import RunningFactor, damping_of, mean_eigenvalue
from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.capture import Increment
from offbeat.kfac.exchange.messages import FactorMessage
from offbeat.kfac.inverses import InversionTask
from offbeat.kfac.options import KFACSettings
from offbeat.kfac.plans.factor_plan import FactorPlan
from offbeat.kfac.tied import joined_factors


class FactorAccumulator:
    """Averages factors over steps, and says what is to be inverted of them.

    Args:
        slots: all factors of the model.
        settings: the decay and the damping.
        plan: who keeps which factors.
        rank: this rank.

    Attributes:
        factors: the averages that this rank keeps, by slot.
    """

    def __init__(
        self,
        slots: Sequence[FactorSlot],
        *,
        settings: KFACSettings,
        plan: FactorPlan,
        rank: int,
    ) -> None:
        self._slots, self._settings, self._rank = slots, settings, rank
        self.factors: dict[int, RunningFactor] = {}
        self.adopt(plan)

    def adopt(self, plan: FactorPlan) -> None:
        """Keep what `plan` says. Averages that this rank has already stay as they are."""
        self.factors = {
            slot.index: self.factors.get(slot.index)
            or RunningFactor(slot.shape, dtype=slot.dtype, device=slot.device)
            for slot in self._slots
            if plan.is_kept_by(self._rank, slot.index)
        }

    def add_message(self, message: FactorMessage) -> list[tuple[int, torch.Tensor]]:
        """Take the sums of a message in, which has been waited for.

        Returns:
            For each factor in it the index of its block, and on how many ranks that is retired, a
            scalar tensor.
        """
        num_retired = []
        for slot, mean, weight, num_retired_ranks in message.read():
            if slot in self.factors:
                self.factors[slot].update_(mean, weight=weight, decay=self._settings.decay)
            num_retired.append((self._slots[slot].block_index, num_retired_ranks))
        return num_retired

    def add_own(self, slot: int, increment: Increment, *, is_retired: bool) -> None:
        """Take in what this rank has seen itself of a factor that it keeps."""
        packed, weight = increment
        factor = self.factors[slot]
        factor.update_(packed, weight=weight, decay=self._settings.decay)
        if is_retired:
            # Without an average there is no inverse, which is what the owner's message then says.
            factor.mass.zero_()

    def inversion_task(self, slot: int, damping: float) -> InversionTask:
        """What is to be inverted of a factor that this rank keeps, with `damping`, > 0."""
        own, shape = self.factors[slot], self._slots[slot].shape
        pair = slot & ~1, slot | 1
        if shape.uses > 1:
            averages = [self.factors[of].average() for of in pair]
            shapes = [self._slots[of].shape for of in pair]
            joined = joined_factors((averages[0], shapes[0]), (averages[1], shapes[1]))
            packed = joined[slot % 2]
            means = [
                mean_eigenvalue(each, of.joined) for each, of in zip(joined, shapes, strict=True)
            ]
        else:
            packed = own.average()
            # Without pi the partner may not have arrived yet, and does not matter.
            means = [self.factors[of].mean_eigenvalue() for of in pair]
        of_each = damping_of(*means, damping=damping, pi=self._settings.pi)
        return InversionTask(
            name=self._slots[slot].name,
            packed=packed,
            shape=shape.joined,
            damping=of_each[slot % 2],
            valid=own.mass > 0,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            f"{self._slots[slot].key}/{name}": tensor
            for slot, factor in self.factors.items()
            for name, tensor in factor.state_dict().items()
        }

    def lacking(self, saved: Mapping[str, Any]) -> list[str]:
        """Names of the factors that this rank keeps and `saved` has no average of."""
        return [
            self._slots[slot].name
            for slot in self.factors
            if f"{self._slots[slot].key}/sum" not in saved
        ]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. An average that is not in `saved` stays as it is."""
        for slot, factor in self.factors.items():
            key = self._slots[slot].key
            if f"{key}/sum" in saved:
                factor.load_state_dict({name: saved[f"{key}/{name}"] for name in ("sum", "mass")})
