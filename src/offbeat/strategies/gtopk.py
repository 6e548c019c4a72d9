"""gTop-k S-SGD: only the k largest entries of the whole cluster's gradient are applied (arXiv
1901.04359, algorithm 4).

    acc = residual + gradient
    mine = the k largest entries of acc; residual = the others
    kept, owed = global top-k of the sum of all ranks' entries
    residual += owed
    gradient = kept / P

Several collectives merge the ranks' entries:

    tree            the paper's: k log2(P) traffic, approximate. A patent exists (US 11,436,065), so
                    it is chosen by name only
    reduce_scatter  O(k) traffic, exact up to a relative 2**-8 in magnitude at the boundary
    all_gather      (P-1) k traffic, for few ranks; it brings every rank's entries to every rank, so
                    all of them are applied, as Top-k S-SGD does: the global top-k would throw most
                    of them back, at no byte less. Which of the two is more accurate depends on the
                    task
    global          the same, and the k largest are applied, exact
    paper           the tree as published
    auto            the cheapest of reduce_scatter, all_gather and a plain dense all-reduce, by what
                    was measured when the session was attached

Differences from the paper:
- the density is as large as the links allow without slowing a step by more than a tenth
  (`density="auto"`, see `gradients.density`); the paper's is 0.001;
- conserving by default: sum of applied + owed equals the sum of gradients. The paper puts an entry
  back only if its index is missing from the global top-k; what merges dropped of a surviving index
  is lost. `collective="paper"` does as published;
- any world size;
- momentum is applied before selection, all of it at once where few entries travel (the published
  code has DGC's momentum correction switched off), and more entries travel while the learning rate
  rises; gradients are scaled before selection where the optimizer is Adam; what is owed keeps the
  learning rate at which it was computed;
- bfloat16 and float8 values, threshold re-use, and selectors and codecs of a user's own.

Cost per step, local: one pass over residual and gradient (12 bytes a parameter), one to zero the
result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.topk_codec import TopKCodec
from offbeat.gradients.collective_choice import (
    BY_ITSELF,
    COLLECTIVES,
    BucketKind,
    CheapestCollective,
    measured_costs,
)
from offbeat.gradients.density import DensitySchedule, MeasuredDensity
from offbeat.strategies.options import refuse_idle
from offbeat.strategies.sparse_gradient import Scheduled, SparseGradientStrategy


@dataclass(frozen=True, kw_only=True)
class GTopK(SparseGradientStrategy):
    """Global top-k: only the k largest entries of the whole cluster's gradient.

    Args:
        density: fraction of entries that travel, in (0, 1]; "auto": the largest whose exchange
            costs at most a tenth of the time between two exchanges, by what links, entries and
            steps are measured to take, and everything, as `AllReduce` sends it, where that is as
            cheap; at most 0.02 where Adam's scaling is taken over. It is looked at again now and
            then.
        collective: "reduce_scatter" and "tree" apply the k largest of the sum, and "paper" is the
            tree that puts back as published, with the optimizer's momentum; "all_gather" applies
            all entries that any rank sent, and "global" the k largest of them; "dense" sends
            everything. "auto": the cheapest of "reduce_scatter", "all_gather" and "dense".
        codec: what picks entries and how they are written: a `TopKCodec`, or names of its parts
            such as "bfloat16" or "reuse+float8". None: "float8" with density="auto", since it buys
            more entries, which are worth more than their precision; else "float32".
    """

    trains_islands = True

    density: float | Literal["auto"] = "auto"
    collective: Literal[
        "auto", "reduce_scatter", "all_gather", "global", "tree", "paper", "dense"
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective == "dense":
            refuse_idle(
                self, "codec", because='collective="dense" sends all of the gradient as it is'
            )

    @property
    @override
    def takes_over(self) -> bool:
        """As published momentum is the optimizer's."""
        return super().takes_over and self.collective != "paper"

    @override
    def entries(self) -> TopKCodec:
        # What the tree as published rounds off is owed by nobody.
        is_bought = self.density == "auto" and self.collective != "paper"
        if self.codec is None and is_bought:
            return TopKCodec(values="float8")
        return super().entries()

    def schedule(self, context: Context) -> Scheduled:
        options: dict[str, Any] = {"warmup": self.stages()}
        is_open, named = self.collective == "auto", COLLECTIVES.get(self.collective)
        if self.collective == "dense" or not (is_open or self.density == "auto"):
            density = 1.0 if self.density == "auto" else self.density
            return DensitySchedule(density, context, collective=named, **options), []
        network = measured_costs(
            context.driver,
            context.new_stream(),
            sample=next(iter(context.parameters.values())),
            selector=self.entries().selector,
        )
        costs = CheapestCollective(
            network,
            world_size=context.driver.world_size,
            codec=self.entries(),
            among=BY_ITSELF if is_open else {self.collective, "dense"},
            notices=context.notices,
        )
        costs.load_state_dict(context.island.first(costs.state_dict()))
        options |= {"cheapest": costs} if is_open else {"collective": named}
        if self.density != "auto":
            return DensitySchedule(self.density, context, **options), [costs]
        parameters = context.parameters.values()
        measured = MeasuredDensity(
            costs,
            context,
            gradient=BucketKind(
                num_elements=context.island.first(sum(p.numel() for p in parameters)),
                element_bytes=max(parameter.element_size() for parameter in parameters),
            ),
            **options,
        )
        return measured, [costs]
