"""How one bucket becomes the ranks' weighted mean: densely, or sparsely with what is left out owed to later steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from offbeat.codec.finite import is_finite
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.tally import NUM_COUNTERS, Tally
from offbeat.collectives.base import Exchanged, SparseCollective, Wire
from offbeat.collectives.dense import dense_all_reduce
from offbeat.errors import CheckpointError
from offbeat.exchange.buckets import Bucket
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective

_EXACT = (torch.float32, torch.float64)
"""Types in which sums of small integers and of weights are exact enough to count with."""


class DenseReduction:
    """Weighted mean by all-reduce. The tally rides in the bucket's tail.

    Gradients are divided by the world size before they are summed, which keeps half precision from overflowing; if the
    weights turn out to add up to something else, the mean is corrected afterwards.
    """

    def __init__(self, bucket: Bucket, driver: Driver, stream: Stream) -> None:
        self.encode_s = 0.0
        self._driver = driver
        self._stream = stream
        size = NUM_COUNTERS + len(bucket.indices)
        if bucket.flat.dtype in _EXACT:
            self._message = torch.cat([bucket.flat, bucket.flat.new_zeros(size)])
            self._tail = self._message[bucket.num_elements :]
            self._own_tail = None
            bucket.flat = self._message[: bucket.num_elements]
        else:  # sums of weights and counts are not exact in half precision
            self._message = bucket.flat
            self._tail = self._own_tail = torch.zeros(size, dtype=torch.float64)

    def launch(self, bucket: Bucket, tally: Tally, *, grad_scale: float) -> None:
        if not tally.num_failed:
            tally = replace(tally, num_nonfinite=int(not is_finite(bucket.flat)))
            bucket.flat.mul_(tally.weight / self._driver.world_size)
        tally.write_to(self._tail)
        self._flat = bucket.flat
        self._pending = self._driver.launch(dense_all_reduce(self._message, self._own_tail), self._stream.next())

    def wait(self) -> Tally:
        self._pending.wait()
        self._tally = Tally.read_from(self._tail)
        return self._tally

    def commit(self) -> torch.Tensor:
        if self._tally.weight != self._driver.world_size:
            self._flat.mul_(self._driver.world_size / self._tally.weight)
        return self._flat

    def discard(self) -> None:
        """Nothing is remembered from step to step."""

    def additive_state(self) -> dict[str, torch.Tensor]:
        return {}

    def local_state(self) -> dict[str, float]:
        return {}

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, float]) -> None:
        """There is nothing to load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one exchange of a bucket does: send the `k` largest entries through `collective`, or all of it densely (None)."""

    k: int
    collective: SparseCollective | None


class SparseReduction:
    """Mean of the largest entries; the rest is owed (error feedback), and added to the next step's gradient.

    Args:
        bucket: what will be reduced; fixes sizes and names of the state.
        feedback: residual and selection.
        driver: carries the collective out.
        stream: this bucket's channels.
        wire: layout of the messages.
        plan: called once for each exchange, at the same point on all ranks.
    """

    def __init__(
        self,
        bucket: Bucket,
        feedback: ErrorFeedback,
        *,
        driver: Driver,
        stream: Stream,
        wire: Wire,
        plan: Callable[[], Plan],
    ) -> None:
        self.encode_s = 0.0
        self._bucket = bucket
        self._feedback = feedback
        self._driver = driver
        self._stream = stream
        self._wire = wire
        self._plan = plan

    def launch(self, bucket: Bucket, tally: Tally, *, grad_scale: float) -> None:
        plan = self._plan()
        self._grad_scale = grad_scale
        self._staged = not tally.num_failed
        begin_s = time.perf_counter()
        work: Collective[Exchanged | Tally]
        if plan.collective is None:
            work = self._everything(bucket.flat, tally)
        else:
            work = self._largest(bucket.flat, tally, plan.k, plan.collective)
        self.encode_s += time.perf_counter() - begin_s
        self._pending: Pending[Exchanged | Tally] = self._driver.launch(work, self._stream.next())

    def _largest(self, flat: torch.Tensor, tally: Tally, k: int, collective: SparseCollective) -> Collective[Exchanged]:
        mine = self._wire.empty()
        if self._staged:
            selection = self._feedback.stage(flat, k, weight=tally.weight / self._grad_scale)
            if selection.finite:
                mine = selection.sparse
            else:
                tally = replace(tally, num_nonfinite=1)
        return collective(self._driver.rank, self._driver.world_size, mine, tally, k, self._wire)

    def _everything(self, flat: torch.Tensor, tally: Tally) -> Collective[Tally]:
        if self._staged:
            finite = self._feedback.stage_all(flat, weight=tally.weight / self._grad_scale)
            tally = replace(tally, num_nonfinite=int(not finite))
        tail = torch.empty(NUM_COUNTERS + tally.used.size, dtype=torch.float64)
        tally.write_to(tail)
        yield from dense_all_reduce(flat, tail)
        return Tally.read_from(tail)

    def wait(self) -> Tally:
        outcome = self._pending.wait()
        self._exchanged = outcome if isinstance(outcome, Exchanged) else None
        self._tally = outcome.tally if isinstance(outcome, Exchanged) else outcome
        return self._tally

    def commit(self) -> torch.Tensor:
        begin_s = time.perf_counter()
        factor = self._grad_scale / self._tally.weight
        if self._exchanged is None:
            self._feedback.commit_all()
            flat = self._bucket.flat.mul_(factor)
        else:
            flat = self._feedback.commit(self._exchanged.owed)
            kept = self._exchanged.kept
            indices = torch.from_numpy(kept.indices).to(flat.device)
            flat[indices] = torch.from_numpy(kept.values * factor).to(device=flat.device, dtype=flat.dtype)
            self._tally.used[np.searchsorted(self._bucket.offsets, kept.indices, side="right") - 1] = True
        self.encode_s += time.perf_counter() - begin_s
        return flat

    def discard(self) -> None:
        if self._staged:
            self._feedback.discard()

    def additive_state(self) -> dict[str, torch.Tensor]:
        state = self._named("residual", self._feedback.residual)
        if self._feedback.velocity is not None:
            state |= self._named("velocity", self._feedback.velocity)
        return state

    def local_state(self) -> dict[str, float]:
        return {f"threshold/{self._bucket.names[0]}": self._feedback.threshold}

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, float]) -> None:
        for name, live in self.additive_state().items():
            if additive[name].shape != live.shape:
                raise CheckpointError(
                    f"{name!r} was saved with shape {list(additive[name].shape)}, here it has {list(live.shape)}"
                )
            live.copy_(additive[name])
        self._feedback.threshold = local.get(f"threshold/{self._bucket.names[0]}", 0.0)

    def _named(self, kind: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat state tensor by parameter name, in the parameters' shapes."""
        return {f"{kind}/{name}": view for name, view in zip(self._bucket.names, self._bucket.views_of(flat), strict=True)}
