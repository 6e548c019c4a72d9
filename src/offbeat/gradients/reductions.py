"""How one bucket becomes the ranks' weighted mean: densely, or sparsely with what is left out owed
to later steps.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.device_copies import numpy_dtype, on_device
from offbeat.codec.selectors import Selector
from offbeat.codec.sparse import Sparse, add_owed
from offbeat.codec.tally import NUM_COUNTERS, Tally, is_finite
from offbeat.codec.topk_codec import TopKCodec
from offbeat.collectives.base import Exchanged, SparseCollective
from offbeat.collectives.dense import dense_all_reduce
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.parameter_groups import OwedRate
from offbeat.transport.driver import Driver, Pending, Stream

_EXACT = (torch.float32, torch.float64)
"""Types in which sums of small integers and of weights are exact enough to count with."""

JOINED_BYTES = 1 << 22
"""A bucket of at most this is copied into one message with its tally: copying it twice takes less
than a further sum over all ranks.
"""


NUM_SAMPLES: Final = 4096


class EntryAges:
    """How long entries of one bucket wait before this rank sends them, counted on a sample.

    An entry that waits brings the gradients of many steps at once, computed where the model was
    then. So its age, the exchanges since the same entry was sent last, says how stale training is:
    about 1 / density where all entries take turns. What was not sent at all yet does not count, nor
    do exchanges of everything: those of a warm-up would hide how long entries wait later.

    Args:
        num_elements: of the bucket.
        num_samples: how many of them are watched, spread evenly.

    Attributes:
        num_sent: entries of the sample that were sent so far, each time counted.
        total_age: their ages, added up.
    """

    def __init__(self, num_elements: int, num_samples: int = NUM_SAMPLES) -> None:
        self.num_sent = self.total_age = 0
        # Evenly spread places with a common distance would meet the same columns of a layer, so
        # each lies somewhere in its part.
        parts = np.linspace(0, num_elements, min(num_samples, num_elements) + 1)
        draw = np.random.default_rng(0).random(parts.size - 1)
        self._watched = (parts[:-1] + draw * np.diff(parts)).astype(np.int64)
        self._sent_at = np.zeros(self._watched.size, dtype=np.int64)
        self._now = 0

    def after_exchange(self, indices: NDArray[np.int64] | None) -> None:
        """Entries at `indices`, ascending, were sent; None: all were, densely."""
        self._now += 1
        if indices is None:
            self._sent_at[:] = self._now
            return
        places = np.searchsorted(indices, self._watched)
        there = places < indices.size
        there[there] = indices[places[there]] == self._watched[there]
        hits = np.flatnonzero(there)
        self.num_sent += hits.size
        self.total_age += int((self._now - self._sent_at[hits]).sum())
        self._sent_at[hits] = self._now


class WeightedGradient(NamedTuple):
    """What one rank brings to an exchange of a bucket.

    Attributes:
        gradient: shape (n,): the buffer of the bucket, which belongs to the reduction until the
            end, or, in half precision, what a transform has made of it in float32.
        tally: this rank's weight, whether it failed (then the gradient does not matter), and which
            of the bucket's parameters it used.
        weight: what `gradient` has yet to be multiplied by: this rank's weight / `grad_scale`, or
            less where a transform has applied a part of it.
        grad_scale: the AMP scale in force.
    """

    gradient: torch.Tensor
    tally: Tally
    weight: float
    grad_scale: float


class Reduction:
    """Turns each rank's bucket into the ranks' weighted mean.

    Its `launch` may wait for the device, unless `only_queues`.

    Args:
        bucket: what is reduced; fixes sizes and names of the state.
        driver: carries the collective out.
        stream: this bucket's channels.

    Attributes:
        gives_whole: whether every rank gets all of the mean, and not a part.
        ages: how long entries waited before this rank sent them; None where all of them always are.
        encode_s: seconds spent on selection and on putting results in place, so far.
        residual: what is owed, shape (n,); None where nothing ever is.
        tally: of all ranks, after `wait_for`.
    """

    only_queues: ClassVar[bool] = False
    gives_whole: ClassVar[bool] = True
    ages: EntryAges | None = None
    encode_s: float = 0.0
    _pending: Pending[Exchanged[Any]] | None = None
    """What entries, or codes, are merged by, from `launch` on; None: tensors are summed."""
    _tail: torch.Tensor
    """Of those that sum tensors: what the tally of all ranks is written to."""
    _owed_weight: float = 0.0
    """This rank's when something was owed last; 0: it had none yet."""

    def __init__(self, bucket: Bucket, driver: Driver, stream: Stream) -> None:
        self._bucket, self._driver, self._stream = bucket, driver, stream
        self.tally = Tally.of_nobody(len(bucket.indices))
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._aside: list[tuple[slice, torch.Tensor]] = []
        self._sums: Sequence[Pending[torch.Tensor]] = ()

    @property
    def residual(self) -> torch.Tensor | None:
        return None

    @abstractmethod
    def launch(self, given: WeightedGradient) -> None:
        """Begin, after adding to the tally whether the gradient is finite."""

    def wait(self) -> Tally | torch.Tensor:
        """Wait for the peers. Returns the tally of all ranks, or the numbers that it has been
        written to, where the host has not waited for the device. See `wait_for`.
        """
        if self._pending is not None:
            return self._exchanged().tally
        for pending in self._sums:
            pending.wait()
        return self._tail

    def go_on(self) -> None:
        """Answer what has come of the peers, without waiting for more."""
        if self._pending is not None:
            self._pending.poll()

    def _exchanged(self) -> Exchanged[Any]:
        assert self._pending is not None, "nothing was launched"
        return self._pending.wait()

    @abstractmethod
    def commit(self) -> torch.Tensor:
        """The step is good: change state, and return a buffer with the mean, times `grad_scale`.

        A parameter that no rank used may get a gradient all the same, because one was still owed;
        it is then marked as used in `tally`.
        """

    def discard(self) -> None:
        """The step is bad: state stays as it was before `launch`. The buffer belongs to the bucket
        again.
        """

    def send_all(self) -> None:
        """Owe nothing after the coming exchange, and after all that follow."""

    def _begin_sum(self, given: WeightedGradient) -> None:
        """Let the gradient be this rank's part of the mean, and write into `_tail` the tally with
        whether it is finite.
        """
        tally = given.tally
        if not tally.num_failed:
            tally = replace(tally, num_nonfinite=~is_finite(given.gradient))
            given.gradient.mul_(tally.weight / self._driver.world_size)
        tally.write_to(self._tail)

    def _sum_tallied(self, parts: Sequence[torch.Tensor], tally: Tally) -> list[torch.Tensor]:
        """Begin to sum numbers over all ranks, in one message with the tally behind them.

        Args:
            parts: what is summed, of one real type each; float32 or float64.
            tally: this rank's, in which it is noted whether `parts` are finite, unless it says so
                of the gradient.

        Returns:
            Where the sums of `parts` are after `wait`, each of shape (n,).
        """
        tail = parts[0].new_empty(NUM_COUNTERS + tally.used.size)
        message = torch.cat([*(part.flatten() for part in parts), tail])
        sums = [*message.split([*(part.numel() for part in parts), tail.numel()])]
        self._tail = sums.pop()
        if not tally.num_failed and isinstance(tally.num_nonfinite, int):
            summed = message[: message.numel() - tail.numel()]
            tally = replace(tally, num_nonfinite=~is_finite(summed))
        tally.write_to(self._tail)
        self._sums = launch_sums(self._driver, self._stream, message)
        return sums

    def additive_state(self) -> dict[str, torch.Tensor]:
        """As of `Callback.state_dict`. Tensors are live."""
        return {} if self.residual is None else self._bucket.named("residual", self.residual)

    def local_state(self) -> dict[str, float | torch.Tensor]:
        """As of `Callback.state_dict`."""
        return {} if self.residual is None else {self._local_name("weight"): self._owed_weight}

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        """Inverse of both."""
        for name, live in self.additive_state().items():
            live.copy_(additive[name])
        self._owed_weight = float(local.get(self._local_name("weight"), 0))

    def _weigh(self, owed: torch.Tensor, tally: Tally) -> None:
        """Let what is owed weigh as much as this step's gradient: of a batch of few samples it
        would else be a multiple.
        """
        if tally.num_failed or not tally.weight:
            return
        if self._owed_weight not in (0, tally.weight):
            owed.mul_(tally.weight / self._owed_weight)
        self._owed_weight = tally.weight

    def _set_aside(self, owed: torch.Tensor, resting: Sequence[slice] = ()) -> None:
        """Let what is owed to frozen parameters, and to elements at `resting`, wait: if it were
        sent now it would be lost.
        """
        frozen = [
            place
            for parameter, place in zip(self._bucket.parameters, self._bucket.places, strict=True)
            if not parameter.requires_grad
        ]
        for place in [*frozen, *resting]:
            self._aside.append((place, owed[place].clone()))
            owed[place] = 0

    def _bring_back(self, owed: torch.Tensor) -> None:
        for here, waiting in self._aside:
            owed[here] += waiting
        self._aside.clear()

    def _local_name(self, key: str) -> str:
        """What a number that belongs to the whole bucket is called in a checkpoint: after the
        bucket's first parameter, because buckets have no names.
        """
        return f"{key}/{self._bucket.names[0]}"

    def _mark_unused_with_gradient(self) -> None:
        """Mark parameters as used that no rank used, and of which something was still owed."""
        for position in np.flatnonzero(~self.tally.used).tolist():
            self.tally.used[position] = bool(self._bucket.views[position].any())


def wait_for(reductions: Sequence[Reduction]) -> list[Tally]:
    """Wait for the peers, and for the device once. Returns the tally of each."""
    waited = [reduction.wait() for reduction in reductions]
    late = iter(Tally.read_from([each for each in waited if isinstance(each, torch.Tensor)]))
    for reduction, each in zip(reductions, waited, strict=True):
        reduction.tally = next(late) if isinstance(each, torch.Tensor) else each
    return [reduction.tally for reduction in reductions]


class ResidualReduction(Reduction):
    """One that owes a vector of the bucket's size, which is added to the next contribution. Its
    work is timed.

    Args:
        bucket, driver, stream: as of `Reduction`.
        has_buffer: whether there is another vector, for the contribution.
    """

    # What one exchange leaves for the methods that end it, from `launch` on:
    _grad_scale: float = 1.0

    def __init__(
        self, bucket: Bucket, driver: Driver, stream: Stream, *, has_buffer: bool = True
    ) -> None:
        super().__init__(bucket, driver, stream)
        size, dtype = bucket.num_elements, bucket.state_dtype
        self._residual, self._mine = (
            bucket.flat.new_zeros(length, dtype=dtype) for length in (size, size * has_buffer)
        )

    def _stage(self, given: WeightedGradient) -> Tally:
        """Let `_mine` be what is owed and the gradient. Returns the tally, which says whether that
        is finite.
        """
        self._add_owed(given)
        if given.tally.num_failed:
            return given.tally
        return replace(given.tally, num_nonfinite=~is_finite(self._mine))

    def _add_owed(self, given: WeightedGradient) -> None:
        """Let `_mine` be what is owed and the gradient."""
        mine, self._grad_scale = self._mine, given.grad_scale
        self._weigh(self._residual, given.tally)
        self._set_aside(self._residual)
        if given.tally.num_failed:
            mine.zero_()
        else:
            torch.add(self._residual, given.gradient.to(mine.dtype), alpha=given.weight, out=mine)

    def _show(self, total: torch.Tensor) -> torch.Tensor:
        """The buffer of the bucket with the mean, after `_residual` has become what is owed.

        Args:
            total: the sum over ranks, float32 or float64, shape (n,), which may be that buffer;
                changed in place.
        """
        return self._put(total.mul_(self._factor), self._bucket.flat)

    @property
    def _factor(self) -> float:
        """By what the sum over ranks becomes the mean."""
        return self._grad_scale / (self.tally.weight or 1)

    def _put(self, mean: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Copy `mean`, which may be the same, into `flat`. What half precision rounds off is owed,
        too: all ranks round alike, so by one of them, the entry's index modulo P. One rank's
        residual reaches the largest entries sooner than the same divided among all. A mean that
        overflows is not applied: a GradScaler skips the step.
        """
        if mean is not flat:
            flat.copy_(mean)
        if flat.dtype != mean.dtype:
            mine = slice(self._driver.rank, None, self._driver.world_size)
            shown = flat[mine].to(mean.dtype)
            shown = torch.where(shown.isfinite(), shown, 0)
            self._residual[mine] += (mean[mine] - shown) / self._factor
        self._bring_back(self._residual)
        return flat

    @property
    @override
    def residual(self) -> torch.Tensor:
        return self._residual

    @override
    def discard(self) -> None:
        self._bring_back(self._residual)

    @override
    def launch(self, given: WeightedGradient) -> None:
        begin_s = time.perf_counter()
        self._launch(given)
        self.encode_s += time.perf_counter() - begin_s

    @override
    def commit(self) -> torch.Tensor:
        begin_s = time.perf_counter()
        flat = self._commit()
        self.encode_s += time.perf_counter() - begin_s
        return flat

    @abstractmethod
    def _launch(self, given: WeightedGradient) -> None:
        """As of `launch`."""

    @abstractmethod
    def _commit(self) -> torch.Tensor:
        """As of `commit`."""


class DenseReduction(Reduction):
    """Weighted mean by all-reduce. The tally rides in the bucket's tail.

    Gradients are divided by the world size before they are summed, which keeps half precision from
    overflowing; if the weights turn out to add up to something else, the mean is corrected
    afterwards.
    """

    only_queues: ClassVar[bool] = True

    def __init__(self, bucket: Bucket, driver: Driver, stream: Stream) -> None:
        super().__init__(bucket, driver, stream)
        size = NUM_COUNTERS + len(bucket.indices)
        self._message = bucket.flat
        if bucket.flat.dtype in _EXACT:
            self._message = torch.cat([bucket.flat, bucket.flat.new_zeros(size)])
            self._tail = self._message[bucket.num_elements :]
            bucket.flat = self._message[: bucket.num_elements]
        else:  # sums of weights and counts are not exact in half precision
            self._tail = bucket.flat.new_zeros(size, dtype=torch.float64)

    def launch(self, given: WeightedGradient) -> None:
        self._begin_sum(given)
        rides = self._tail.dtype == self._message.dtype
        self._sums = launch_sums(
            self._driver, self._stream, self._message, *(() if rides else (self._tail,))
        )

    def commit(self) -> torch.Tensor:
        if self.tally.weight not in (0, self._driver.world_size):
            self._bucket.flat.mul_(self._driver.world_size / self.tally.weight)
        return self._bucket.flat


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """What one exchange of a bucket does.

    Attributes:
        k: how many of the largest entries are sent.
        collective: by what; None: everything is sent, densely.
    """

    k: int
    collective: SparseCollective | None


class SparseReduction(ResidualReduction):
    """Mean of the largest entries; the rest is owed (error feedback), and added to the next step's
    gradient.

        acc = residual + weight * gradient                  (written into the gradient's buffer)
        send the k largest of acc; what is left is the new residual
        add what other parts dropped or rounded off

    Staging copies nothing: residual and gradient trade buffers on commit.

    Memory beside the gradient: one buffer of its size. Half-precision gradients are owed in
    float32; their buffer cannot be traded, so that takes two float32 buffers.

    Args:
        bucket, driver, stream: as of `Reduction`.
        codec: which entries, and how they are written.
        plan: called once for each exchange, at the same point on all ranks.
        selector: another one than the codec's.
        decay: what is owed is multiplied by it when a step in which entries travelled is committed,
            in (0, 1].
        owed_rate: follows the learning rate; None: what is owed is applied at whatever it is then.
    """

    def __init__(
        self,
        bucket: Bucket,
        driver: Driver,
        stream: Stream,
        *,
        codec: TopKCodec,
        plan: Callable[[], ExchangePlan],
        selector: Selector | None = None,
        decay: float = 1.0,
        owed_rate: OwedRate | None = None,
    ) -> None:
        self._is_half = bucket.flat.dtype not in _EXACT
        super().__init__(bucket, driver, stream, has_buffer=self._is_half)
        self.ages = self._ages = EntryAges(bucket.num_elements)
        self._owed_rate = owed_rate
        self._selector, self._decay = selector or codec.selector, decay
        self._selector_state = dict(self._selector.initial_state())
        # Half-precision gradients are selected, owed and merged in float32.
        dtype = numpy_dtype(bucket.state_dtype)
        self._wire = codec.wire(
            bucket.num_elements, num_parameters=len(bucket.indices), dtype=dtype
        )
        self._plan = plan
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._total = bucket.flat  # where a sum of everything comes to be
        self._tail = bucket.flat.new_empty(NUM_COUNTERS + len(bucket.indices), dtype=torch.float64)
        self._picked: Sparse | None = None
        self._new_selector_state: Mapping[str, float] = self._selector_state

    @override
    def _launch(self, given: WeightedGradient) -> None:
        plan = self._plan()
        self._grad_scale = given.grad_scale
        rates = self._owed_rate
        resting = [] if rates is None else rates.follow(self._residual, given.gradient)
        self._weigh(self._residual, given.tally)
        self._set_aside(self._residual, resting)
        self._pending, self._picked = None, None
        self._new_selector_state = self._selector_state
        if plan.collective is None:
            self._launch_everything(given)
        else:
            mine, tally = self._pick(given, plan.k)
            work = self._wire.carry(
                plan.collective, self._driver.rank, self._driver.world_size, mine, tally, plan.k
            )
            self._pending = self._driver.launch(work, self._stream.next())

    def _pick(self, given: WeightedGradient, k: int) -> tuple[Sparse, Tally]:
        if given.tally.num_failed:
            return self._wire.empty(), given.tally
        accumulated = self._accumulated(given)
        selection = self._selector.select(
            accumulated,
            self._residual,
            k=min(k, accumulated.numel()),
            weight=given.weight,
            state=self._selector_state,
        )
        self._picked, self._new_selector_state = selection.sparse, selection.state
        return selection.sparse, replace(given.tally, num_nonfinite=int(not selection.finite))

    def _launch_everything(self, given: WeightedGradient) -> None:
        flat, tally = self._bucket.flat, given.tally
        if not tally.num_failed:
            accumulated = self._accumulated(given)
            torch.add(self._residual, accumulated, alpha=given.weight, out=accumulated)
            if self._is_half:  # only what rounding to it loses will be owed
                flat.copy_(accumulated)
                accumulated.sub_(flat)
            tally = replace(tally, num_nonfinite=~is_finite(flat))
        if flat.dtype in _EXACT and flat.nbytes <= JOINED_BYTES:
            (self._total,) = self._sum_tallied([flat], tally)
        else:
            self._total = flat
            tally.write_to(self._tail)
            self._sums = launch_sums(self._driver, self._stream, flat, self._tail)

    def _accumulated(self, given: WeightedGradient) -> torch.Tensor:
        """The buffer to accumulate in, which holds the gradient."""
        return self._mine.copy_(given.gradient) if self._is_half else self._bucket.flat

    @override
    def _commit(self) -> torch.Tensor:
        flat = self._bucket.flat
        self._selector_state = dict(self._new_selector_state)
        if self._is_half:
            self._residual, self._mine = self._mine, self._residual
        elif self._pending is not None:
            # What is left in the gradient's buffer is the new residual, and the old residual's
            # buffer becomes the gradient's: no copy of either is made.
            self._residual, flat = flat, self._residual
        else:
            self._residual.zero_()
        mean = self._mine if self._is_half else flat
        if self._pending is not None:
            exchanged = self._exchanged()
            kept = exchanged.kept
            add_owed(self._residual, exchanged.owed)
            if self._decay != 1:
                self._residual.mul_(self._decay)
            indices = on_device(torch.from_numpy(kept.indices), flat.device)
            values = torch.from_numpy(kept.values * self._factor).to(mean.dtype)
            mean.zero_()[indices] = on_device(values, flat.device)
            hit = np.searchsorted(self._bucket.offsets, kept.indices, side="right") - 1
            self.tally.used[hit] = True
        else:
            # What the backends' sum has rounded is not known to anybody, and lost as with plain
            # S-SGD.
            if self._total is not flat:
                flat.copy_(self._total)
            self._mark_unused_with_gradient()
            mean.copy_(flat).mul_(self._factor)
        self._put(mean, flat)
        self._ages.after_exchange(None if self._picked is None else self._picked.indices)
        return flat

    @override
    def send_all(self) -> None:
        everything = ExchangePlan(k=self._bucket.num_elements, collective=None)
        self._plan = lambda: everything

    @override
    def local_state(self) -> dict[str, float | torch.Tensor]:
        state = dict(self._selector_state)
        if self._owed_rate is not None:
            state |= self._owed_rate.state()
        named = {self._local_name(key): value for key, value in state.items()}
        return super().local_state() | named

    @override
    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        super().load(additive, local)
        # What is not there keeps its value: a run may resume with another selector.
        for key, value in self._selector_state.items():
            self._selector_state[key] = local.get(self._local_name(key), value)
        if self._owed_rate is not None:
            # A parameter's name may hold slashes; what stands before it holds none.
            named = {tuple(name.split("/", 1)): value for name, value in local.items()}
            first = self._bucket.names[0]
            self._owed_rate.load({key: value for (key, of), value in named.items() if of == first})


def launch_sums(
    driver: Driver, stream: Stream, *tensors: torch.Tensor
) -> list[Pending[torch.Tensor]]:
    """Begin to sum each tensor over all ranks, in place.

    All of them are begun at once, in this order: dense operations of different ranks are matched by
    the order in which each rank begins them, so none may wait until another one happens to be over.
    """
    return [driver.launch(dense_all_reduce(tensor), stream.next()) for tensor in tensors]
