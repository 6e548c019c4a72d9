"""gTop-k S-SGD: only the k largest entries of the whole cluster's gradient are applied (arXiv
1901.04359, algorithm 4).

    acc = residual + gradient
    mine = the k largest entries of acc; residual = the others
    kept, owed = global top-k of the sum of all ranks' entries
    residual += owed
    gradient = kept / P

Three collectives find the global top-k; see each one's page for its cost:

    tree            the paper's: k log2(P) traffic, approximate. A patent exists (US 11,436,065), so
                    it is chosen by name only
    reduce_scatter  O(k) traffic, exact up to a relative 2**-8 in magnitude at the boundary
    all_gather      (P-1) k traffic, exact, for few ranks; it brings every rank's entries to every
                    rank, so all of them may be applied (`apply`)
    auto            the cheapest of reduce_scatter, all_gather and a plain dense all-reduce, by what
                    was measured when the session was attached

Differences from the paper:
- the density is as large as the links allow without slowing a step by more than a tenth
  (`density="auto"`, see `gradients.density_choice`); the paper's is 0.001;
- conserving by default: sum of applied + owed equals the sum of gradients. The paper puts an entry
  back only if its index is missing from the global top-k; what merges dropped of a surviving index
  is lost. `variant="paper"` does as published.
- where an all-gather has brought all entries anyway, all of them are applied by default, as Top-k
  S-SGD does: the global top-k would throw most of them back, at no byte less. Which of the two is
  more accurate depends on the task. `apply="global"` does as published;
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.value_codecs import Float32Values
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.gtopk_tree import gtopk_tree
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.collectives.topk_allgather import global_topk, topk_sum
from offbeat.errors import ConfigError
from offbeat.gradients.collective_choice import BY_ITSELF, BucketKind, CheapestCollective
from offbeat.gradients.density_choice import AutoDensity
from offbeat.strategies.options import refuse_idle, require_one_of, require_positive
from offbeat.strategies.sparse_gradient import Choose, SparseGradientStrategy

COLLECTIVES: Mapping[str, SparseCollective | None] = {
    "reduce_scatter": sparse_reduce_scatter,
    "all_gather": global_topk,
    "tree": gtopk_tree,
    "dense": None,
}
BRING_ALL_ENTRIES = frozenset({"all_gather", "dense"})
"""Collectives after which each rank has the entries of all ranks."""


@dataclass(frozen=True, kw_only=True)
class GTopK(SparseGradientStrategy):
    """Global top-k: only the k largest entries of the whole cluster's gradient.

    Args:
        variant: "conserving" loses nothing; "paper" puts back as published, and exists in the tree
            only.
        collective: "auto", "reduce_scatter", "all_gather", "tree", or "dense" (send everything, owe
            nothing).
        apply: "global" applies the k largest of the sum, as published; "union" all entries that any
            rank sent, up to P k, which an all-gather brings to every rank anyway; "auto" the union
            where the collective is an all-gather, else the global top-k. With "union" and
            collective="auto", the choice is between all_gather and dense.
        density: fraction of entries that travel, in (0, 1]; "auto": the largest whose exchange
            costs at most `budget`, by what links and steps are measured to take, and everything,
            as `AllReduce` sends it, where that is as cheap. It is looked at again now and then.
        budget: of density="auto": share of the time between two exchanges that one exchange may
            take, > 0.
    """

    name: ClassVar[str] = "gtopk"

    variant: Literal["conserving", "paper"] = "conserving"
    collective: Literal["auto", "reduce_scatter", "all_gather", "tree", "dense"] = "auto"
    apply: Literal["auto", "global", "union"] = "auto"
    density: float | Literal["auto"] = "auto"
    budget: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("variant", self.variant, ("conserving", "paper"))
        require_one_of("collective", self.collective, ("auto", *COLLECTIVES))
        require_positive("budget", self.budget)
        require_one_of("apply", self.apply, ("auto", "global", "union"))
        if self.density != "auto":
            refuse_idle(
                self, "budget", because=f'it is that of density="auto", got density={self.density}'
            )
        if self.collective == "dense":
            refuse_idle(
                self,
                *("selection", "values", "indices"),
                because='collective="dense" sends all of the gradient as it is',
            )
        if self.apply == "union" and self.collective not in ("auto", *BRING_ALL_ENTRIES):
            raise ConfigError(
                f"apply='union' needs every rank's entries on every rank, which"
                f" collective={self.collective!r} does not bring; pass collective='all_gather' or"
                " 'auto', or apply='global'"
            )
        if self.variant == "paper" and self.collective != "tree":
            raise ConfigError(
                f"variant='paper' exists in the tree only, got collective={self.collective!r}; pass"
                " collective='tree'"
            )
        if self.variant == "paper" and self.density == "auto":
            raise ConfigError(
                "variant='paper' has no density='auto'; pass a number, such as the paper's 0.001"
            )
        if self.variant == "paper" and self.values not in ("auto", "float32", Float32Values()):
            raise ConfigError(
                f"variant='paper' sends float32 values as published, got values={self.values!r}"
            )

    @property
    @override
    def takes_momentum(self) -> bool:
        """As published momentum is the optimizer's."""
        return self.momentum_correction == "auto" and self.variant != "paper"

    @override
    def _require_measuring(self) -> None:
        """It measures, where it has no fixed density."""

    def chooser(self, context: Context) -> tuple[Choose, list[Callback]]:
        applied = self._applied(context.inform)
        measures = self.collective == "auto" or (
            self.density == "auto" and self.collective != "dense"
        )
        if not measures:
            return lambda bucket, k: applied(self.collective), []
        cheapest = CheapestCollective.measure(
            context.driver,
            context.new_stream(),
            sample=next(iter(context.parameters.values())),
            among=self._candidates(),
            notify=context.notify,
            inform=context.inform,
        )
        parts: list[Callback] = [cheapest]
        if self.density == "auto":
            parts.append(self._auto_density(cheapest, context))
        if self.collective == "auto":
            return lambda bucket, k: applied(cheapest.choose(bucket, k)), parts
        return lambda bucket, k: applied(self.collective), parts

    def _candidates(self) -> frozenset[str]:
        """Names of the collectives whose costs count, "dense" among them."""
        if self.collective != "auto":
            return frozenset({self.collective, "dense"})
        return BRING_ALL_ENTRIES if self.apply == "union" else BY_ITSELF

    def _auto_density(self, cheapest: CheapestCollective, context: Context) -> AutoDensity:
        parameters = context.parameters.values()
        values, indices = self.codecs()
        return AutoDensity(
            cheapest,
            gradient=BucketKind(
                num_elements=sum(parameter.numel() for parameter in parameters),
                element_bytes=max(parameter.element_size() for parameter in parameters),
                values=values,
                indices=indices,
            ),
            budget=self.budget,
            driver=context.driver,
            stream=context.new_stream(),
            inform=context.inform,
        )

    def _applied(self, inform: Callable[[str], None]) -> Callable[[str], SparseCollective | None]:
        """From a collective's name to what is done; where offbeat chose what is applied, it says
        so once for each collective.
        """
        told: set[str] = set()

        def applied(name: str) -> SparseCollective | None:
            union = name == "all_gather" and self.apply != "global"
            if self.apply == "auto" and name not in told:
                told.add(name)
                if union:
                    inform(
                        "apply='auto': all entries that any rank sent are applied, because an"
                        " all-gather brings all of them to every rank; apply='global' applies only"
                        " the k largest of the sum, as published"
                    )
                elif name != "dense" and self.collective == "auto":
                    inform(
                        "apply='auto': the k largest of the sum are applied, because a"
                        f" {name.replace('_', '-')} brings only these; what ranks sent besides is"
                        " owed"
                    )
            if name == "tree":
                return partial(gtopk_tree, variant=self.variant)
            return topk_sum if union else COLLECTIVES[name]

        return applied
