"""How one bucket becomes the ranks' weighted mean in few bits a value: all of it travels, and what
rounding loses is owed to the next step.
"""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.device_copies import numpy_dtype
from offbeat.codec.value_codecs import Float32Values, ValueCodec
from offbeat.collectives.coded_sum import coded_sum
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import ResidualReduction, WeightedGradient
from offbeat.transport.driver import Driver, Stream


class CodedReduction(ResidualReduction):
    """Weighted mean by `coded_sum`.

    Memory beside the gradient: two buffers of its size; a third one while a step lasts for
    half-precision gradients.

    Args:
        bucket: what will be reduced; fixes sizes and names of the state.
        values: how values travel.
        driver: carries the collective out.
        stream: this bucket's channels.
        decay: what is owed is multiplied by it when a step is committed, in (0, 1].
    """

    def __init__(
        self,
        bucket: Bucket,
        values: ValueCodec,
        driver: Driver,
        stream: Stream,
        *,
        decay: float = 1.0,
    ) -> None:
        super().__init__(bucket, driver, stream)
        self._decay = decay
        self._wire = self._wire_of(values)

    def _wire_of(self, values: ValueCodec) -> DenseWire:
        values = values.suited_to(numpy_dtype(self._residual.dtype))
        return DenseWire(num_parameters=len(self._bucket.indices), values=values)

    @override
    def send_all(self) -> None:
        self._wire = self._wire_of(Float32Values())

    @override
    def _launch(self, given: WeightedGradient) -> None:
        mine, driver, tally = self._mine, self._driver, self._stage(given)
        if not tally.good:
            mine.zero_()  # which no codec minds; the step will be skipped
        kept = self._bucket.flat
        if kept.dtype != mine.dtype:
            kept = torch.empty_like(mine)
        work = coded_sum(driver.rank, driver.world_size, mine, tally, self._wire, kept=kept)
        self._pending = driver.launch(work, self._stream.next())

    @override
    def _commit(self) -> torch.Tensor:
        kept, owed, _ = self._exchanged()
        self._residual, self._mine = owed, self._residual
        # Nothing is applied to a parameter that no rank used: codes of few bits have no zero. Each
        # rank owes it what it did before, until it is used.
        for position in np.flatnonzero(~self.tally.used).tolist():
            here = self._bucket.places[position]
            self._residual[here] = self._mine[here]
            kept[here] = 0
        if self._decay != 1:  # before what waits comes back
            self._residual.mul_(self._decay)
        return self._show(kept)
