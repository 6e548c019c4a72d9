"""A model as one vector in main memory, where other ranks can be given it, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from offbeat.codec.jit import keep_freed_memory
from offbeat.codec.model_wire import Values
from offbeat.weights.model_weights import Pack, real


class Staging:
    """Lays tensors side by side in one vector: of float32, or of float64 if any of them is.

    What lives on a CUDA device goes through pinned memory, copied on a stream of its own, so that
    kernels that are under way there go on.

    Args:
        like: tensors of the shapes, types and devices that all later ones have.

    Attributes:
        num_elements: of the vector.
        dtype: its type.
        exact: whether the tensors hold what the vector does; those of half precision round.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        # Vectors are made anew in each step.
        keep_freed_memory()
        self._pack = Pack(like)
        pieces = self._pack.pieces
        self._dtype = (
            torch.float64
            if any(piece.dtype == torch.float64 for piece in pieces)
            else torch.float32
        )
        self._sizes = [vector.numel() for vector in self._pack.vectors(like)]
        self._streams = {
            piece.device: torch.cuda.Stream(piece.device)
            for piece in pieces
            if piece.device.type == "cuda"
        }
        self.num_elements = sum(self._sizes)
        self.dtype: np.dtype[np.floating] = (
            np.dtype(np.float64) if self._dtype == torch.float64 else np.dtype(np.float32)
        )
        self.exact = self._pack.exact and len({piece.dtype for piece in pieces}) <= 1
        self._shares_memory = self.exact and {piece.device.type for piece in pieces} == {"cpu"}

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
        """What `tensors` hold, in vectors that are side by side what `read` gives. They are the
        tensors' own memory where that can be.
        """
        if self._shares_memory:
            return [real(tensor).reshape(-1).numpy() for tensor in tensors]
        return [self.read(tensors)]

    def read(self, tensors: Sequence[torch.Tensor]) -> Values:
        """A vector of its own, shape (num_elements,), with what `tensors` hold."""
        vectors = self._pack.vectors(tensors)
        if (
            len(vectors) == 1
            and vectors[0].device.type == "cpu"
            and vectors[0].dtype == self._dtype
        ):
            return vectors[0].numpy()
        whole = torch.empty(self.num_elements, dtype=self._dtype, pin_memory=bool(self._streams))
        for vector, part in zip(vectors, whole.split(self._sizes), strict=True):
            self._copy(vector, part, vector.device)
        self._finish()
        return whole.numpy()

    def write_(self, values: Values, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `values`, shape (num_elements,), into `tensors`."""
        whole = torch.from_numpy(values)
        if self._streams:
            pinned = torch.empty(self.num_elements, dtype=self._dtype, pin_memory=True)
            whole = pinned.copy_(whole)
        parts = []
        for piece, part in zip(self._pack.pieces, whole.split(self._sizes), strict=True):
            vector = (
                torch.empty(part.numel(), dtype=piece.dtype, device=piece.device)
                if self._streams
                else part.to(piece.dtype)
            )
            if self._streams:
                self._copy(part, vector, piece.device)
            parts.append(vector)
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
