"""Weights, averaged over ranks in place: what of a model is averaged, how it lies in vectors, and
the weighted mean itself, in training and at its end.

The parameters' tensors stay the user's: values are copied into them, and nothing is ever rebound.
Everything travels and is summed in float32, or in float64 where a tensor is of that type, so that
half precision is rounded once, at the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from offbeat.codec.device_copies import numpy_dtype, read_numbers
from offbeat.codec.jit import keep_freed_memory
from offbeat.codec.model_wire import Counters, Values
from offbeat.codec.tally import all_finite, is_finite
from offbeat.collectives.dense import dense_all_reduce, gather_bytes
from offbeat.collectives.gather import all_gather, gather_largest
from offbeat.collectives.weighted_mean import FRAGMENT_BYTES, Elements, weighted_mean
from offbeat.errors import CheckpointError, NonFiniteError
from offbeat.torch_private import for_each
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective


class BufferNames(NamedTuple):
    """The buffers that training changes, by name.

    Attributes:
        statistics: of floating-point type, such as BatchNorm's running mean; they are averaged.
        counters: of an integer type, such as BatchNorm's count of batches; an average has the
            largest.
    """

    statistics: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()


def choose_buffers(buffers: Mapping[str, torch.Tensor]) -> BufferNames:
    """Which of `buffers` are averaged: neither masks of truth values nor tables that hold an
    infinity, such as masks to add.
    """
    return BufferNames(
        tuple(name for name, b in buffers.items() if b.is_floating_point() and is_finite(b)),
        tuple(name for name, b in buffers.items() if _is_integer(b)),
    )


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


@dataclass(kw_only=True)
class ModelWeights:
    """What is averaged of a model.

    Attributes:
        parameters: by name, the same set on all ranks for good.
        buffers: the model's buffers by name, at the moment of the call: modules may replace them.
        chosen: the buffers that are averaged too; chosen while all ranks hold the same values.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    chosen: BufferNames
    # What this rank has counted itself, and what its counters were last seen to hold.
    _own: Counters | None = field(default=None, init=False, repr=False)
    _seen: Counters | None = field(default=None, init=False, repr=False)

    @property
    def names(self) -> list[str]:
        """Of the tensors that are averaged."""
        return [*self.parameters, *self.chosen.statistics]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are averaged, in the order of `names`."""
        return [*self.parameters.values(), *self.statistics()]

    def statistics(self) -> list[torch.Tensor]:
        """The buffers that are averaged, which `tensors` ends with."""
        buffers = self.buffers() if self.chosen.statistics else {}
        return [buffers[name] for name in self.chosen.statistics]

    def positions_of_statistics(self) -> range:
        """Where the statistics are among `tensors()`."""
        return range(len(self.parameters), len(self.parameters) + len(self.chosen.statistics))

    def write(self, tensors: Sequence[torch.Tensor], counters: Counters) -> None:
        """Take over what another model, or a mean, has as `tensors` and as counters."""
        for target, new in zip(self.tensors(), tensors, strict=True):
            target.detach().copy_(new)
        self.write_counters(counters)

    def read_counters(self) -> Counters:
        """The counters, side by side, shape (any,)."""
        if not self.chosen.counters:
            return np.zeros(0, np.int64)
        buffers = self.buffers()
        parts = [
            buffers[name].detach().reshape(-1).to("cpu", torch.int64)
            for name in self.chosen.counters
        ]
        return torch.cat(parts).numpy()

    def write_counters(self, counters: Counters) -> None:
        """Inverse of `read_counters`; what `counters` has beyond them is left."""
        if not self.chosen.counters:
            return
        self.own_counters()
        buffers = self.buffers()
        tensors = [buffers[name] for name in self.chosen.counters]
        sizes = [tensor.numel() for tensor in tensors]
        parts = torch.from_numpy(counters[: sum(sizes)]).split(sizes)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
        self._seen = self.read_counters()

    def own_counters(self) -> Counters:
        """What the counters would be if nothing had been written to them: what this rank has
        counted itself, from what they were at the first call on.

        Where ranks take unequal numbers of steps, the largest count is taken of these. The largest
        of counts that were themselves taken over would be more than any rank has counted.
        """
        now = self.read_counters()
        if self._own is None or self._seen is None:
            self._own = now
        else:
            # A buffer that has fallen is no count, or was loaded.
            self._own = np.where(now >= self._seen, self._own + (now - self._seen), now)
        self._seen = now
        return self._own

    def counter_state(self) -> dict[str, list[int]]:
        """What `own_counters` has to know after a resumption; empty without counters."""
        if not self.chosen.counters:
            return {}
        own, seen = self.own_counters(), self.read_counters()
        return {"counters/own": own.tolist(), "counters/seen": seen.tolist()}

    def load_counter_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `counter_state`; other keys are ignored. Where nothing was saved, the counters
        count as this rank's own. Raises `CheckpointError` for the state of another model.
        """
        saved = {k: np.array(each) for k, each in state.items() if k.startswith("counters/")}
        shape = self.read_counters().shape
        if any(each.shape != shape or each.dtype != np.int64 for each in saved.values()):
            raise CheckpointError("the counters were saved with another model")
        self._own = self._seen = None
        if saved:
            self._own, self._seen = (saved[f"counters/{name}"] for name in ("own", "seen"))

    def average_(self, driver: Driver, stream: Stream, *, weight: float) -> float:
        """Replace parameters and statistics by their weighted mean over all ranks, and counters by
        the maximum of what each rank has counted itself. Collective.

        Every rank ends with the same bits.

        Args:
            driver: carries the sum out.
            stream: of channels.
            weight: this rank's, >= 0; over all ranks the sum must be positive.

        Returns:
            Seconds spent on laying vectors out and writing results, without the waiting.

        Raises:
            NonFiniteError: this rank's weights hold an infinity or a NaN; nothing has been sent.
        """
        tensors = self.tensors()
        encode_s = average_(tensors, tensors, driver=driver, stream=stream, weight=weight)
        self.average_counters_(driver, stream)
        return encode_s

    def average_counters_(self, driver: Driver, stream: Stream) -> None:
        """Replace counters by the maximum of what each rank has counted itself. Collective."""
        if self.chosen.counters:
            payloads = driver.run(gather_bytes(self.own_counters().tobytes()), stream.next())
            counted = [np.frombuffer(payload, dtype=np.int64) for payload in payloads]
            self.write_counters(np.max(counted, axis=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some tensors that share a vector: their positions, and the vector's type and device."""

    positions: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Pack:
    """How tensors are laid side by side, in one vector for each device and each of float32 and
    float64.

    Args:
        like: tensors of the shapes, types and devices that all later ones have. Complex ones count
            as pairs of reals.

    Attributes:
        pieces: what each vector is made of.
        exact: whether every tensor holds what its vector does; those of half precision round.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._shapes = [real(tensor).shape for tensor in like]
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position, tensor in enumerate(like):
            dtype = torch.promote_types(real(tensor).dtype, torch.float32)
            kinds.setdefault((dtype, tensor.device), []).append(position)
        self.exact = all(real(tensor).dtype in (torch.float32, torch.float64) for tensor in like)
        self.pieces = [
            _Piece(positions=tuple(of), dtype=dtype, device=device)
            for (dtype, device), of in kinds.items()
        ]

    def sizes(self, piece: _Piece) -> list[int]:
        """The number of elements of each tensor of `piece`."""
        return [self._shapes[position].numel() for position in piece.positions]

    def vectors(
        self, tensors: Sequence[torch.Tensor], *, with_tails: bool = False
    ) -> list[torch.Tensor]:
        """Copies of `tensors` as vectors, shape (n,) each. A tail is a further element for each
        tensor, which is to be written.
        """
        vectors = [
            torch.empty(
                sum(self.sizes(piece)) + with_tails * len(piece.positions),
                dtype=piece.dtype,
                device=piece.device,
            )
            for piece in self.pieces
        ]
        # Together, because a device takes as long to begin a copy as to make a small one.
        for_each("copy_", self.views(vectors), [*map(real, tensors)])
        return vectors

    def views(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor's place in `vectors`, by position, in its shape. A vector may have more
        elements at its end.
        """
        found: dict[int, torch.Tensor] = {}
        for piece, vector in zip(self.pieces, vectors, strict=True):
            sizes = self.sizes(piece)
            parts = vector[: sum(sizes)].split(sizes)
            found.update(
                (p, part.view(self._shapes[p]))
                for p, part in zip(piece.positions, parts, strict=True)
            )
        return [found[position] for position in range(len(self._shapes))]

    def named(
        self, kind: str, names: Iterable[str], vectors: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The same by "kind/name", for a state; empty without vectors."""
        views = self.views(vectors) if vectors else []
        return {f"{kind}/{name}": view for name, view in zip(names, views, strict=bool(views))}

    def write_(self, vectors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Inverse of `vectors`: copy them into `tensors`."""
        for_each("copy_", [*map(real, tensors)], self.views(vectors))

    def add_(self, vectors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Add `vectors` to `tensors`, rounding once."""
        for view, tensor in zip(self.views(vectors), tensors, strict=True):
            real(tensor).add_(view)


MINIATURE: Final = 1024
"""Elements of a vector that stands for tensors without content."""


class Staging:
    """Lays tensors side by side in one vector: of float32, or of float64 if any of them is.

    What lives on a CUDA device goes through pinned memory, copied on a stream of its own, so that
    kernels that are under way there go on. Tensors of a simulation have no content, and neither has
    their vector.

    Args:
        like: tensors of the shapes, types and devices that all later ones have.
        in_miniature: whether what stands for tensors without content is a vector of few numbers,
            for protocols that compute with them.

    Attributes:
        num_elements: of the vector.
        scale: how many elements of tensors each of them stands for, 1 but in miniature.
        dtype: its type.
        exact: whether the tensors hold what the vector does; those of half precision round.
        shares_memory: whether `parts` are the tensors' own memory; else they are new.
    """

    def __init__(self, like: Sequence[torch.Tensor], *, in_miniature: bool = False) -> None:
        # Vectors are made anew in each step.
        keep_freed_memory()
        self._pack = Pack(like)
        pieces = self._pack.pieces
        self._dtype = (
            torch.float64
            if any(piece.dtype == torch.float64 for piece in pieces)
            else torch.float32
        )
        self._device_sizes = [sum(self._pack.sizes(piece)) for piece in pieces]
        num_whole, self.scale, self._sizes = sum(self._device_sizes), 1.0, self._device_sizes
        is_weightless = any(tensor.is_meta for tensor in like)
        self._is_weightless = is_weightless and not in_miniature
        if is_weightless and in_miniature and num_whole > MINIATURE:
            self._sizes = [MINIATURE * size // num_whole or 1 for size in self._device_sizes]
            self.scale = num_whole / sum(self._sizes)
        self._streams = {
            piece.device: torch.cuda.Stream(piece.device)
            for piece in pieces
            if piece.device.type == "cuda"
        }
        self.num_elements = sum(self._sizes)
        self.dtype = numpy_dtype(self._dtype)
        self.exact = self._pack.exact and len({piece.dtype for piece in pieces}) <= 1
        self.shares_memory = self.exact and {piece.device.type for piece in pieces} == {"cpu"}

    def spans(self, positions: Collection[int]) -> list[slice]:
        """The elements of the vector that belong to the tensors at `positions`, in order."""
        spans: list[slice] = []
        begin = 0
        for piece in self._pack.pieces:
            for position, size in zip(piece.positions, self._pack.sizes(piece), strict=True):
                if position in positions and size:
                    if spans and spans[-1].stop == begin:
                        spans[-1] = slice(spans[-1].start, begin + size)
                    else:
                        spans.append(slice(begin, begin + size))
                begin += size
        return spans

    def parts(self, tensors: Sequence[torch.Tensor]) -> list[Values]:
        """What `tensors` hold, in vectors that are side by side what `read` gives."""
        if self.shares_memory:
            return [real(tensor).reshape(-1).numpy() for tensor in tensors]
        return [self.read(tensors)]

    def laid_out(self, tensors: Sequence[torch.Tensor]) -> Elements:
        """What `read` gives, a few elements at a time, and where they are written to."""
        return self.read(tensors) if self._is_weightless else LaidOut(self, tensors)

    @contextmanager
    def written(self, tensors: Sequence[torch.Tensor]) -> Iterator[Elements]:
        """A vector, shape (num_elements,), that is to be written, and with it `tensors`: without
        memory of its own where they are contiguous.
        """
        if not any(tensor.is_meta for tensor in tensors) and all(
            real(tensor).is_contiguous() for tensor in tensors
        ):
            yield LaidOut(self, tensors)
            return
        values: Values = np.empty(self.num_elements, self.dtype)
        yield values
        self.write_(values, tensors)

    def read(self, tensors: Sequence[torch.Tensor]) -> Values:
        """A vector of its own, shape (num_elements,), with what `tensors` hold; or a tensor of this
        shape, if they hold nothing.
        """
        vectors = self._pack.vectors(tensors)
        if self._is_weightless:
            return torch.cat(vectors)  # type: ignore[return-value]  # as arithmetic they are alike
        return self.on_host(vectors, self._sizes)

    def holds(self, part: torch.Tensor) -> bool:
        """Whether the vector has the type of `part`."""
        return part.dtype == self._dtype

    @property
    def order(self) -> list[int]:
        """The positions of tensors in the order in which the vector has them."""
        return [position for piece in self._pack.pieces for position in piece.positions]

    def on_host(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Values:
        """Vectors side by side, of the type of the vector and of these sizes; a single one's own
        memory where that can be.
        """
        if len(parts) == 1 and parts[0].device.type == "cpu" and self.holds(parts[0]):
            return parts[0].numpy()
        joined = torch.empty(sum(sizes), dtype=self._dtype, pin_memory=bool(self._streams))
        for part, place in zip(parts, joined.split(sizes), strict=True):
            self._copy(part, place, part.device)
        self._finish()
        return joined.numpy()

    def write_(self, values: Values, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `values`, shape (num_elements,), into `tensors`."""
        whole = torch.as_tensor(values)
        if self._streams:
            pinned = torch.empty(self.num_elements, dtype=self._dtype, pin_memory=True)
            whole = pinned.copy_(whole)
        parts = []
        for piece, part, size in zip(
            self._pack.pieces, whole.split(self._sizes), self._device_sizes, strict=True
        ):
            if piece.device.type == "cpu":
                parts.append(part.to(piece.dtype))
            else:
                parts.append(torch.empty(size, dtype=piece.dtype, device=piece.device))
                self._copy(part, parts[-1], piece.device)
        self._finish()
        self._pack.write_(parts, tensors)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
        stream = self._streams.get(device)
        if stream is None:
            target.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def _finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


class LaidOut:
    """Tensors as one vector, which is read and written a few elements at a time. What is read is
    the tensors' own memory where that can be.

    Args:
        staging: how they lie in it.
        tensors: contiguous, if they are written.
    """

    def __init__(self, staging: Staging, tensors: Sequence[torch.Tensor]) -> None:
        self._staging = staging
        self._tensors = [tensors[position] for position in staging.order]
        sizes = [real(tensor).numel() for tensor in self._tensors]
        self._begins = [*accumulate(sizes, initial=0)]

    def __getitem__(self, span: slice) -> Values:
        """The elements `span`, which has both ends."""
        parts = [flat[there] for flat, there, _ in self._parts(span)]
        return self._staging.on_host(parts, [part.numel() for part in parts])

    def __setitem__(self, span: slice, values: Values) -> None:
        for flat, there, here in self._parts(span):
            if flat.device.type == "cpu" and self._staging.holds(flat):
                flat[there].numpy()[:] = values[here]
            else:  # what was received is not writable, which torch asks for
                flat[there].copy_(torch.from_numpy(values[here].copy()))

    def _parts(self, span: slice) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """The tensors that `span` goes through, which elements of each it has, and where they are
        in the span.
        """
        first = bisect_right(self._begins, span.start) - 1
        for number in range(first, len(self._tensors)):
            if (begin := self._begins[number]) >= span.stop:
                break
            flat = real(self._tensors[number]).reshape(-1)
            low, high = max(span.start, begin), min(span.stop, begin + flat.numel())
            if low < high:
                there = slice(low - begin, high - begin)
                yield flat, there, slice(low - span.start, high - span.start)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """What it holds, out of autograd's sight, in the type in which means are computed: at least
    float32. Its own memory, if it has that type.
    """
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def empty_means(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for means of such tensors, in the type in which means are computed."""
    return [
        torch.empty_like(
            tensor,
            dtype=torch.promote_types(tensor.dtype, torch.float32),
            memory_format=torch.contiguous_format,
        )
        for tensor in tensors
    ]


def mean_of_tensors(
    rank: int,
    weights: Sequence[float],
    tensors: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
) -> Collective[object]:
    """As `weighted_mean`, of tensors of the same shapes and types on all ranks. A rank without a
    weight gives shapes and types alone. The means are written into other tensors, which are
    contiguous.
    """
    staging = Staging(tensors)
    return weighted_mean(
        rank,
        weights,
        staging.laid_out(tensors),
        num_elements=staging.num_elements,
        dtype=staging.dtype,
        into=staging.laid_out(into),
    )


def average_(
    tensors: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor],
    *,
    driver: Driver,
    stream: Stream,
    weight: float,
    absent: Collection[int] = (),
) -> float:
    """Replace each tensor by its weighted mean over the ranks that have it, in place. Collective.

    The weights ride in the vectors' tails and are summed with them. Sums are begun in the same
    order on all ranks.

    Args:
        tensors: by position.
        like: tensors of the same shapes and types, the same on all ranks.
        driver: carries the sums out.
        stream: of channels.
        weight: this rank's, >= 0.
        absent: positions of tensors that count for nothing here, and take the others' mean.

    Returns:
        Seconds spent on laying vectors out and writing results, without the waiting.

    Raises:
        NonFiniteError: one of this rank's tensors holds an infinity or a NaN; nothing has been
            sent.
    """
    begin_s = time.perf_counter()
    require_finite(tensors, rank=driver.rank)
    if driver.world_size == 1:  # they are their own mean
        return time.perf_counter() - begin_s
    tensors, like = [*map(real, tensors)], [*map(real, like)]
    means, under_way, waited_s = _Means(tensors), deque[Callable[[], float]](), 0.0
    for cuts in _fragments(like):
        if len(under_way) == _UNDER_WAY:
            waited_s += under_way.popleft()()
        pack = Pack([_cut(like[position], rows) for position, rows in cuts])
        mine, sums = [_cut(tensors[position], rows) for position, rows in cuts], []
        vectors = pack.vectors(mine, with_tails=True)
        for piece, vector in zip(pack.pieces, vectors, strict=True):
            tail = vector.mul_(weight)[-len(piece.positions) :].fill_(weight)
            for number, place in enumerate(piece.positions):
                if cuts[place][0] in absent:
                    tail[number].zero_()
            sums.append(driver.launch(dense_all_reduce(vector), stream.next()))
        under_way.append(partial(means.take, pack, cuts, sums))
    waited_s += sum(take() for take in under_way)
    means.write_()
    return time.perf_counter() - begin_s - waited_s


_UNDER_WAY: Final = 2
"""How many fragments are summed at a time."""


_Cut: TypeAlias = tuple[int, slice | None]
"""The position of a tensor, and which of its rows; None: all of it."""


def _fragments(like: Sequence[torch.Tensor]) -> Iterator[list[_Cut]]:
    """Tensors a few MiB at a time. What they are cut into follows from shapes alone, which are the
    same on all ranks.
    """
    # Sizes alone need no memory.
    left = limit = sys.maxsize if any(each.is_meta for each in like) else FRAGMENT_BYTES // 4
    fragment: list[_Cut] = []
    for position, tensor in enumerate(like):
        num_rows = len(tensor) if tensor.dim() else 0
        row = tensor.numel() // max(1, num_rows)
        step = int(min(num_rows, max(1, limit // max(1, row)))) or 1
        for begin in range(0, max(1, num_rows), step):
            rows = slice(begin, min(begin + step, num_rows)) if num_rows else None
            size = row if rows is None else row * (rows.stop - rows.start)
            if fragment and size > left:
                yield fragment
                fragment, left = [], limit
            fragment.append((position, None if step == num_rows else rows))
            left -= size
    if fragment:
        yield fragment


def _cut(tensor: torch.Tensor, rows: slice | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows]


class _Means:
    """Means that arrive a fragment at a time, and are written when all are there: a rank whose peer
    fails meanwhile still has its own.

    Args:
        tensors: by position, whose means these are; real ones.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._means: dict[int, torch.Tensor] = {}
        self._positions: list[int] = []
        self._divisors: list[torch.Tensor] = []

    def take(
        self, pack: Pack, cuts: Sequence[_Cut], sums: Sequence[Pending[torch.Tensor]]
    ) -> float:
        """Wait for the sums of a fragment, but not for the device. Returns for how many seconds."""
        begin_s = time.perf_counter()
        totals = [pending.wait() for pending in sums]
        waited_s, views = time.perf_counter() - begin_s, pack.views(totals)
        for piece, total in zip(pack.pieces, totals, strict=True):
            divisors = total[-len(piece.positions) :].clone()  # a view would keep all of `total`
            here, places = [views[place] for place in piece.positions], []
            for_each("div_", here, [*divisors.unbind()])
            for position, rows in (cuts[place] for place in piece.positions):
                # One block a tensor: where many small ones are freed, the heap may keep them all.
                if position not in self._means:
                    self._means[position] = torch.empty_like(self._tensors[position])
                places.append(_cut(self._means[position], rows))
                self._positions.append(position)
            for_each("copy_", places, here)
            self._divisors.append(divisors)
        return waited_s

    def write_(self) -> None:
        """Write all means but those of what no rank has. The host waits for the device once."""
        weights = read_numbers(self._divisors)
        nowhere = {p for p, weight in zip(self._positions, weights, strict=True) if not weight}
        written = [position for position in self._means if position not in nowhere]
        for_each("copy_", [self._tensors[p] for p in written], [self._means[p] for p in written])


def restore_(live: Mapping[str, torch.Tensor], saved: Mapping[str, Any], what: str) -> None:
    """Write tensors of a checkpoint into `live`. Raises `CheckpointError`, and has changed nothing
    then, unless `saved` has the same, of the same shapes.
    """
    shapes = ({key: value.shape for key, value in each.items()} for each in (live, saved))
    if next(shapes) != next(shapes):
        raise CheckpointError(
            f"{what} was saved with another model or strategy; resume with the same ones"
        )
    for key, tensor in live.items():
        tensor.copy_(saved[key])


def require_finite(tensors: Iterable[torch.Tensor], *, rank: int) -> None:
    """Raise `NonFiniteError` before what is not finite reaches another rank."""
    if not all_finite([*map(real, tensors)]):
        raise non_finite_weights(rank)


def non_finite_weights(rank: int) -> NonFiniteError:
    """That the weights of `rank` hold an infinity or a NaN."""
    return NonFiniteError(
        f"the weights of rank {rank} are no longer finite, and averaging would spread that to its"
        " peers. Lower the learning rate or look at this rank's data; resume from the last"
        " checkpoint"
    )


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """As AllReduce reads it: all rows of one that is sparse, and zeros where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory, out of autograd's sight; complex numbers as pairs."""
    detached = tensor.detach() if tensor.requires_grad else tensor
    return torch.view_as_real(detached) if detached.is_complex() else detached


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinalModel:
    """One rank's model when its loop has ended.

    Attributes:
        tensors: parameters and statistics.
        counters: the integer buffers, shape (any,).
        weight: of the model in the mean, >= 0.
    """

    tensors: Sequence[torch.Tensor]
    counters: Counters
    weight: float

    def summary(self) -> dict[str, float | str | bool]:
        """The weight, whether the values are finite, and a digest, which is equal if, and only if,
        values and counters are equal to the bit.
        """
        digest, finite, staging = hashlib.sha256(), True, Staging(self.tensors)
        values, step = staging.laid_out(self.tensors), FRAGMENT_BYTES // staging.dtype.itemsize
        for begin in range(0, staging.num_elements, step):
            part = values[begin : min(begin + step, staging.num_elements)]
            finite = finite and bool(is_finite(torch.from_numpy(part)))
            digest.update(part.view(np.uint8).data)
        digest.update(self.counters.tobytes())
        return {"weight": self.weight, "finite": finite, "digest": digest.hexdigest()}


def mean_of_final_models(rank: int, world_size: int, mine: FinalModel) -> Collective[FinalModel]:
    """The mean of all ranks' models when training is over; `mine` itself where all hold the same.

        rank                                    every peer
          |  `Driver.end_training`  ------------>  |   no message of training will follow
          |  my weight, a digest of my model  <->  |   all have come to the end
          |  the models, where they differ    <->  |   one weighted mean, the same bits everywhere

    All of it travels as messages, and connections for dense collectives are given up first: a peer
    that still trains, because its loop has more steps, waits in a collective for this rank. It then
    hears that this rank has ended, and both raise. Were the mean a dense collective it would meet
    that one.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's model, which is left as it is.

    Raises:
        NonFiniteError: a rank's model is not finite. On every rank.
    """
    summary = json.dumps(mine.summary()).encode()
    summaries: list[dict[str, Any]] = yield from all_gather(
        rank, world_size, summary, lambda payload: json.loads(bytes(payload))
    )
    broken = [number for number, each in enumerate(summaries) if not each["finite"]]
    if broken:
        raise NonFiniteError(
            f"the weights of rank {broken[0]} at the end of the session are not finite, so they"
            " have no mean with those of its peers. Lower the learning rate or look at its data;"
            ' with finish="keep" each rank keeps its own model'
        )
    if len({each["digest"] for each in summaries}) == 1:
        return mine
    weights = [float(each["weight"]) for each in summaries]
    means = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in mine.tensors]
    yield from mean_of_tensors(rank, weights, mine.tensors, means)
    counters = mine.counters
    if counters.size:
        counters = yield from gather_largest(rank, [True] * world_size, counters)
    return replace(mine, tensors=means, counters=counters)


def average_at_the_end(
    weights: ModelWeights, *, driver: Driver, stream: Stream, weight: float
) -> None:
    """Replace this rank's model by the mean of all ranks' models. Collective; no training follows.

    Args:
        weights: of the model.
        driver: carries messages; it carries out no dense collective afterwards.
        stream: of channels; no part trains on it.
        weight: of this rank's model.

    Raises:
        NonFiniteError: a rank's model is not finite.
        PeerError: a rank has failed, or goes on training.
    """
    channel = stream.next()
    driver.end_training(channel)
    mine = FinalModel(tensors=weights.tensors(), counters=weights.read_counters(), weight=weight)
    mean = driver.run(mean_of_final_models(driver.rank, driver.world_size, mine), channel)
    if mean is not mine:
        weights.write(mean.tensors, mean.counters)
