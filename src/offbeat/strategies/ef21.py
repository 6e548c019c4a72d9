"""EF21: each rank's gradient is estimated from the changes that it sends, the k largest in each
step (Richtarik, Sokolov and Fatkhullin, arXiv 2106.05203, algorithm 2; with momentum EF21-SGDM,
Fatkhullin, Tyurin and Richtarik, arXiv 2305.15155, algorithm 1).

    rank i:    c_i = the k largest of (gradient - g_i);  g_i += c_i
    everyone:  g  += mean of all c_i                     so g is always the mean of all g_i
    gradient = g

With momentum v_i = momentum v_i + gradient takes the gradient's place.

Error feedback adds up what it does not send, and applies all of it in the end, late. EF21 forgets
it: what has not been sent when the gradient changes is never sent. Its theory needs no bound on
gradients, and where they change little from step to step, with large batches, g comes as close to
the gradient as one likes. With small batches the noise of old batches stays in g for as long as
their entries wait, and momentum averages it out before it is sent. On photographs in batches of
4 x 32, at density 0.01, it reached an accuracy of 0.45 after 800 steps at a learning rate of 0.1
and 0.54 at 0.0125, where all-reduce reached 0.71 and 0.73, and Top-k with error feedback 0.73 and
0.72 (one seed, benchmarks/studies/sparse_accuracy.py).

Cost per step: as of Top-k, ceil(log2 P) messages, (P-1) k pairs sent by each rank; local: one pass
over gradient and estimate (12 bytes a parameter), one to write the result. Memory: two buffers more
than the gradient's, four with momentum.

Differences from the papers:
- g_i begins at 0, not at the compressed first gradient or at the mean of a large batch;
- the momentum is SGD's, v = momentum v + gradient, which is 1 / eta times EF21-SGDM's
  v = (1 - eta) v + eta gradient with eta = 1 - momentum: at eta times the learning rate both are
  the same. By default it is the optimizer's, taken over;
- ranks are weighted by their samples, where these are known;
- values may be rounded to bfloat16 or float8, and what rounding loses stays in the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.gradient_estimates import EstimateReduction
from offbeat.gradients.reductions import ExchangePlan, Reduction, SparseReduction
from offbeat.strategies.sparse_gradient import EntriesStrategy


@dataclass(frozen=True, kw_only=True)
class EF21(EntriesStrategy):
    """Gradients estimated from their largest changes, which are all that travels.

    Args:
        density: fraction of the changes that travel in a step, in (0, 1]; 1 gives the result of
            `AllReduce`.
        momentum_correction: "auto": each rank applies the momentum and weight decay of
            `torch.optim.SGD` before changes are looked for; None: the optimizer has them.
        clip_norm: clip before changes are looked for, as the other sparse strategies do, > 0. None:
            no clipping; clipping after backward is possible then, since nothing is owed.
    """

    trains_islands = True

    density: float = 0.01

    @override
    def clipping(self, world_size: int) -> LocalClipping | None:
        """What clips the mean leaves no more than the step it clips."""
        if self.clip_norm is None:
            return None
        return LocalClipping(self.clip_norm, world_size=world_size)

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        codec, driver, stream = self.entries(), context.driver, context.new_stream()
        k = max(1, round(self.density * bucket.num_elements))
        if k < bucket.num_elements:
            return EstimateReduction(bucket, driver, stream, k=k, codec=codec)
        # All of it travels, so there is nothing to estimate, and nothing is ever owed.
        everything = ExchangePlan(k=bucket.num_elements, collective=None)
        return SparseReduction(bucket, driver, stream, codec=codec, plan=lambda: everything)
