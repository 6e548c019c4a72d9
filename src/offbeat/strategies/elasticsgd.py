"""Elastic SGD as Adaptive SGD's paper (arXiv 2110.07029) compares itself with it: equal batches,
equal shares, equal weights.

    for each mega-batch of M batches of b samples, on each of n ranks
        M / n batches:  w_i = w_i - eta gradient(w_i)
        w_i = sum over j of w_j / n

The slowest rank decides when a mega-batch ends.

Cost per mega-batch: one mean of the weights. A worker's death ends nothing, as under Adaptive SGD.

Difference from the comparison: the last batch of a rank in a mega-batch may be smaller, at the same
learning rate. Difference from elastic averaging (arXiv 1412.6651): no elastic force; the mean
replaces every model, as in that comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.megabatch.callback import MegaBatchPlan
from offbeat.strategies.adaptive import MegaBatchStrategy


@dataclass(frozen=True, kw_only=True)
class ElasticSGD(MegaBatchStrategy):
    """Models averaged after every mega-batch, of which each rank computes an equal share in equal
    batches.
    """

    def plan(self) -> MegaBatchPlan:
        return MegaBatchPlan(mega_batch=self.mega_batch, rule="equal", smallest=1)
