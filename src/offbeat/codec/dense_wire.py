"""The bytes of a vector of which every element travels, in few bits.

head     magic, version, codec of values, number of elements, size of the tally
tally    see `codec.tally`
values   see `codec.value_codecs`: those of one piece of the vector after the other

A piece is small enough for the processor's cache, where it stays while it is coded, and while what
coding loses is taken from it. So both read and write the vector once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.arithmetic import Message
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.weightless import WeightlessCode
from offbeat.errors import WireError

MAGIC = b"OFBD"
VERSION = 2
PIECE: Final = 1 << 16
"""Elements that are coded at once."""
_HEAD = struct.Struct("<4sBBxxQI")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWire:
    """How the messages of one bucket are laid out.

    Attributes:
        num_parameters: whose gradients the messages bring, the length of `Tally.used`.
        values: how values travel.
    """

    num_parameters: int
    values: ValueCodec

    def encode_(self, vector: torch.Tensor, tally: Tally) -> Message:
        """Lay a message out, and leave in `vector` what the receiver of it still lacks.

        Args:
            vector: float32 or float64, shape (n,), on any device. One without content gives a
                message of its size.
            tally: what the message says beside it.
        """
        if vector.is_meta:
            size = _HEAD.size + Tally.num_bytes(self.num_parameters)
            size += self._num_bytes(vector.numel())
            message = WeightlessCode(size, (vector, tally), vector.numel(), self.values)
            return cast(Message, message)
        counts = tally.to_bytes()
        head = _HEAD.pack(MAGIC, VERSION, self.values.code, vector.numel(), len(counts)) + counts
        payload = np.empty(len(head) + self._num_bytes(vector.numel()), np.uint8)
        payload[: len(head)] = np.frombuffer(head, np.uint8)
        host = vector.cpu()
        for values, coded in self._pieces(host.numpy(), payload[len(head) :]):
            on_wire = self.values.encode(values).view(np.uint8)
            coded[:] = on_wire  # first: a codec that rounds nothing may give back what it got
            values -= self.values.decode(on_wire, values.size)
        if host is not vector:
            vector.copy_(host)
        return payload.data

    def decode_to(self, payload: Message, into: torch.Tensor, *, adds: bool = False) -> Tally:
        """Read a message: what `encode_` wrote, or anything else that reached this rank.

        Args:
            payload: as received.
            into: takes the values; of the message's size, float32 or float64, on any device.
            adds: whether they are added to what is there.

        Raises:
            WireError: the payload is no message, is damaged, or is of another version, bucket,
                model or choice of codec. Then `into` is as it was.
        """
        if isinstance(payload, WeightlessCode):
            return cast("tuple[torch.Tensor, Tally]", payload.content)[1]
        data, count = memoryview(payload).cast("B"), into.numel()
        if len(data) < _HEAD.size:
            raise WireError(f"a message of {len(data)} bytes is too short; it was truncated")
        magic, version, code, size, tally_bytes = _HEAD.unpack_from(data)
        found, expected = (magic, version, code, size), (MAGIC, VERSION, self.values.code, count)
        at_values = _HEAD.size + tally_bytes
        if found != expected or len(data) != at_values + self._num_bytes(count):
            raise WireError(
                f"a message of {len(data)} bytes begins with {found}, expected is {expected}; it is"
                " damaged, or the ranks use different models, options or versions of offbeat"
            )
        tally = Tally.from_bytes(data[_HEAD.size : at_values], num_parameters=self.num_parameters)
        host = into.cpu()
        with np.errstate(over="ignore"):  # what is damaged may be too large for float32
            coded = np.frombuffer(data[at_values:], np.uint8)
            for values, on_wire in self._pieces(host.numpy(), coded):
                # Copied, because what was received is not writable, and may not be aligned.
                read = self.values.decode(on_wire.copy(), values.size)
                np.copyto(values, values + read if adds else read)
        if host is not into:
            into.copy_(host)
        return tally

    def _num_bytes(self, count: int) -> int:
        whole, rest = divmod(count, PIECE)
        # Of no values a codec may still say that its table travels.
        return int(whole * self.values.num_bytes(PIECE) + (rest and self.values.num_bytes(rest)))

    def _pieces(
        self, values: NDArray[np.floating], coded: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[np.floating], NDArray[np.uint8]]]:
        """Each piece of a vector, and its place in the message."""
        begin = 0
        for first in range(0, values.size, PIECE):
            piece = values[first : first + PIECE]
            end = begin + int(self.values.num_bytes(piece.size))
            yield piece, coded[begin:end]
            begin = end
