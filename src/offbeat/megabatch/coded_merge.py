"""What a merge moves where weights travel by a codec: how far each member's model has moved from
the last merged one, which all members hold.

    c_i = alpha_i (x_i - merged) + owed_i              alpha_i: its weight over the sum of weights
    kept, owed_i = the sum of all c_i by the codec     kept is the same on all members
    merged = merged + kept

Nothing is lost: over the members of a merge, merged + sum of owed_i afterwards is the weighted mean
of the x_i + sum of owed_i before it. What a member owes that dies, or that is left out and comes
again, is lost with what it has computed; what is owed when the run ends is too. A codec that decays
forgets a part of what is owed.

A merge that is void changes nothing here: what it would leave owed is staged with its outcome. A
member that is new contributes nothing, and has the last merged model from its peers.

Statistics, and the optimizer's states where they are merged, travel whole. So does a parameter that
is frozen, which must stay where it is; what is owed of it waits until it trains again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.sparse import add_owed
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import WeightCodec, another_codec
from offbeat.collectives.coded_sum import coded_sum
from offbeat.collectives.topk_allgather import clipped_sum, topk_sum
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import Staging, empty_means

_TALLY = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))


class Owed(NamedTuple):
    """What a merge leaves to a member.

    Attributes:
        values: that it owes, shape (num_elements,), float32 or float64.
        selector: what the selection of entries remembers.
    """

    values: torch.Tensor
    selector: Mapping[str, float]


class MergedChanges:
    """One member's changes since the last merge, and what it owes of earlier ones.

    Args:
        parameters: by name.
        codec: how changes travel.

    Attributes:
        owed: now; whoever commits a merge replaces it.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], codec: WeightCodec) -> None:
        self._parameters, self._codec = parameters, codec
        self._layout = Staging(list(parameters.values()))
        zeros = [torch.zeros_like(each) for each in parameters.values()]
        values = torch.as_tensor(self._layout.read(zeros))
        self.owed = Owed(values, codec.entries.selector.initial_state())

    def merged(
        self,
        position: int,
        weights: Sequence[float],
        *,
        base: Sequence[torch.Tensor],
        mine: Sequence[torch.Tensor] | None,
        frozen: Collection[int] = (),
    ) -> Collective[tuple[list[torch.Tensor], Owed]]:
        """The model that all members hold after this merge, in the type in which means are
        computed, and what this member owes then. Changes nothing.

        Args:
            position: of this member.
            weights: of each member's model, >= 0, not all zero.
            base: the last merged model.
            mine: this member's; None: it has none, and owes nothing.
            frozen: positions of parameters that travel otherwise; the same on all members.
        """
        codec, size = self._codec, len(weights)
        merged = torch.as_tensor(self._layout.read(base))
        change, waiting = torch.zeros_like(merged), self._layout.spans(frozen)
        before = torch.zeros_like(merged) if mine is None else self.owed.values
        owed = before.clone()
        if mine is not None and weights[position]:
            change = torch.as_tensor(self._layout.read(mine)) - merged
        for span in waiting:
            change[span] = owed[span] = 0.0
        weight, selector = weights[position] / sum(weights), self.owed.selector
        if codec.density == 1:
            wire = DenseWire(
                num_parameters=1, values=codec.entries.values.suited_to(self._layout.dtype)
            )
            change.mul_(weight).add_(owed)
            total, owed, _ = yield from coded_sum(
                position, size, change, _TALLY, wire, kept=torch.empty_like(change)
            )
            merged += total
        else:
            k = max(1, round(codec.density * merged.numel()))
            picked = codec.entries.selector.select(change, owed, k=k, weight=weight, state=selector)
            collective = clipped_sum if codec.clip_to_median else topk_sum
            layout = codec.entries.wire(merged.numel(), num_parameters=1, dtype=self._layout.dtype)
            exchanged = yield from layout.carry(
                collective, position, size, picked.sparse, _TALLY, k
            )
            owed, selector = change, picked.state  # a selection leaves there what it has not picked
            add_owed(owed, exchanged.owed)
            add_owed(merged, exchanged.kept)
        owed.mul_(codec.decay)
        for span in waiting:
            owed[span] = before[span]
        return self._laid_out(merged), Owed(owed, selector)

    def _laid_out(self, vector: torch.Tensor) -> list[torch.Tensor]:
        tensors = empty_means([*self._parameters.values()])
        self._layout.write_(vector if vector.is_meta else vector.numpy(), tensors)  # type: ignore[arg-type]  # as arithmetic they are alike
        return tensors

    def state(self) -> dict[str, torch.Tensor]:
        """What is owed of each parameter. Over the ranks its sum counts."""
        owed = zip(self._parameters, self._laid_out(self.owed.values), strict=True)
        return {f"owed/{name}": tensor for name, tensor in owed}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`; selection begins anew. Raises `CheckpointError`."""
        saved = [state.get(f"owed/{name}", torch.empty(0)) for name in self._parameters]
        if [one.shape for one in saved] != [one.shape for one in self._parameters.values()]:
            raise another_codec()
        values = torch.as_tensor(self._layout.read(saved))
        self.owed = Owed(values, self._codec.entries.selector.initial_state())
