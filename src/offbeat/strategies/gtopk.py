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
    all_gather      (P-1) k traffic, exact, for few ranks
    auto            the cheapest of reduce_scatter, all_gather and a plain dense all-reduce, by what
                    was measured when the session was attached

Differences from the paper:
- conserving by default: sum of applied + owed equals the sum of gradients. The paper puts an entry
  back only if its index is missing from the global top-k; what merges dropped of a surviving index
  is lost. `variant="paper"` does as published.
- any world size;
- momentum correction with factor masking (the published code has it switched off), bfloat16 values,
  threshold re-use, and selectors and codecs of a user's own.

Cost per step, local: one pass over residual and gradient (12 bytes a parameter), one to zero the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from offbeat.codec.value_codecs import Float32Values
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.gtopk_tree import gtopk_tree
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.collectives.topk_allgather import global_topk
from offbeat.errors import ConfigError
from offbeat.gradients.collective_choice import CheapestCollective
from offbeat.parts.part import Part
from offbeat.parts.workspace import Workspace
from offbeat.strategies.gradient import Choose, SparseGradientStrategy
from offbeat.strategies.options import require_one_of

COLLECTIVES: Mapping[str, SparseCollective | None] = {
    "reduce_scatter": sparse_reduce_scatter,
    "all_gather": global_topk,
    "tree": gtopk_tree,
    "dense": None,
}


@dataclass(frozen=True, kw_only=True)
class GTopK(SparseGradientStrategy):
    """Global top-k: only the k largest entries of the whole cluster's gradient.

    Args:
        variant: "conserving" loses nothing; "paper" puts back as published, and exists in the tree
            only.
        collective: "auto", "reduce_scatter", "all_gather", "tree", or "dense" (send everything, owe
            nothing).
    """

    name: ClassVar[str] = "gtopk"

    variant: Literal["conserving", "paper"] = "conserving"
    collective: Literal["auto", "reduce_scatter", "all_gather", "tree", "dense"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("variant", self.variant, ("conserving", "paper"))
        require_one_of("collective", self.collective, ("auto", *COLLECTIVES))
        if self.variant == "paper" and self.collective != "tree":
            raise ConfigError(
                f"variant='paper' exists in the tree only, got collective={self.collective!r}; pass"
                " collective='tree'"
            )
        if self.variant == "paper" and self.values not in ("float32", Float32Values()):
            raise ConfigError(
                f"variant='paper' sends float32 values as published, got values={self.values!r}"
            )

    def chooser(self, workspace: Workspace) -> tuple[Choose, list[Part]]:
        if self.collective != "auto":
            fixed = (
                partial(gtopk_tree, variant=self.variant)
                if self.collective == "tree"
                else COLLECTIVES[self.collective]
            )
            return lambda bucket, k: fixed, []
        cheapest = CheapestCollective.measure(
            workspace.driver,
            workspace.new_stream(),
            sample=next(iter(workspace.parameters.values())),
            notify=workspace.notify,
        )
        return lambda bucket, k: COLLECTIVES[cheapest.choose(bucket, k)], [cheapest]
