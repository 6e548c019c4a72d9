"""How one bucket becomes the ranks' weighted mean in few bits a value: all of it travels, and what
rounding loses is owed to the next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.finite import is_finite
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.collectives.coded_sum import CodedSum, coded_sum
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import owe_rounding_
from offbeat.transport.driver import Driver, Pending, Stream


class CodedReduction:
    """Weighted mean by `coded_sum`.

    Memory beside the gradient: two buffers of its size, and a third one while a step lasts.

    Args:
        bucket: what will be reduced; fixes sizes and names of the state.
        values: how values travel.
        driver: carries the collective out.
        stream: this bucket's channels.
        decay: what is owed is multiplied by it when a step is committed, in (0, 1].

    Attributes:
        encode_s: seconds spent on adding what is owed and on putting results in place.
        residual: what is owed, shape (n,).
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
        self.encode_s = 0.0
        self.ages = None
        self.residual = bucket.flat.new_zeros(bucket.num_elements, dtype=bucket.state_dtype)
        self._bucket, self._driver, self._stream, self._decay = bucket, driver, stream, decay
        double = self.residual.dtype == torch.float64
        values = values.suited_to(np.dtype(np.float64 if double else np.float32))
        self._wire = DenseWire(num_parameters=len(bucket.indices), values=values)
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._pending: Pending[CodedSum] | None = None
        self._grad_scale = 1.0

    def launch(
        self, gradient: torch.Tensor, tally: Tally, *, weight: float, grad_scale: float
    ) -> None:
        begin_s = time.perf_counter()
        self._grad_scale = grad_scale
        mine = torch.zeros_like(self.residual)
        if not tally.num_failed:
            torch.add(self.residual, gradient.to(mine.dtype), alpha=weight, out=mine)
            tally = replace(tally, num_nonfinite=int(not is_finite(mine)))
            if tally.num_nonfinite:
                mine.zero_()  # which no codec minds; the step will be skipped
        driver = self._driver
        work = coded_sum(driver.rank, driver.world_size, mine, tally, self._wire)
        self._pending = driver.launch(work, self._stream.next())
        self.encode_s += time.perf_counter() - begin_s

    def wait(self) -> Tally:
        return self._result.tally

    @property
    def _result(self) -> CodedSum:
        assert self._pending is not None, "nothing was launched"
        return self._pending.wait()

    def commit(self) -> torch.Tensor:
        begin_s = time.perf_counter()
        (kept, owed, tally), flat = self._result, self._bucket.flat
        factor = self._grad_scale / (tally.weight or 1)
        self.residual.copy_(owed)
        for position in np.flatnonzero(~tally.used).tolist():
            self._take_back(position, kept)
        flat.copy_(kept.mul_(factor))
        if flat.dtype != kept.dtype:
            owe_rounding_(self.residual, kept, flat, factor, self._driver)
        if self._decay != 1:
            self.residual.mul_(self._decay)
        self.encode_s += time.perf_counter() - begin_s
        return flat

    def _take_back(self, position: int, kept: torch.Tensor) -> None:
        """Nothing is applied to a parameter that no rank used: codes of few bits have no zero, and
        what is owed to it waits until it is used. One rank owes what all ranks have read.
        """
        begin, end = self._bucket.offsets[position : position + 2]
        if position % self._driver.world_size == self._driver.rank:
            self.residual[begin:end] += kept[begin:end]
        kept[begin:end] = 0

    def discard(self) -> None:
        """What is owed changes at `commit` alone."""

    def additive_state(self) -> dict[str, torch.Tensor]:
        return self._bucket.named("residual", self.residual)

    def local_state(self) -> dict[str, float]:
        return {}

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, float]) -> None:
        for name, live in self.additive_state().items():
            live.copy_(additive[name])
