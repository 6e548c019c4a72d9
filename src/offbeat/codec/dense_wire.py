"""The bytes of a vector of which every element travels, in few bits.

head     magic, version, codec of values, number of elements, size of the tally
tally    see `codec.tally`
values   see `codec.value_codecs`
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from offbeat.codec.arithmetic import Message
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.weightless import WeightlessCode
from offbeat.errors import WireError

MAGIC = b"OFBD"
VERSION = 1
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

    def encode(self, vector: torch.Tensor, tally: Tally) -> tuple[Message, torch.Tensor]:
        """Lay a message out.

        Args:
            vector: float32 or float64, shape (n,), on any device. One without content gives a
                message of its size.
            tally: what the message says beside it.

        Returns:
            The payload, and what `decode` will make of it.
        """
        if vector.is_meta:
            size = _HEAD.size + Tally.num_bytes(self.num_parameters)
            size += int(self.values.num_bytes(vector.numel()))
            message = WeightlessCode(size, (vector, tally), vector.numel(), self.values)
            return cast(Message, message), vector
        on_wire = self.values.encode(vector.cpu().numpy())
        counts = tally.to_bytes()
        head = _HEAD.pack(MAGIC, VERSION, self.values.code, vector.numel(), len(counts))
        return b"".join((head, counts, on_wire.data)), self._read(on_wire.view(np.uint8), vector)

    def decode(self, payload: Message, like: torch.Tensor) -> tuple[torch.Tensor, Tally]:
        """Read a message: what `encode` wrote, or anything else that reached this rank.

        Args:
            payload: as received.
            like: a vector of the message's size, of the dtype and on the device of the result.

        Raises:
            WireError: the payload is no message, is damaged, or is of another version, bucket,
                model or choice of codec.
        """
        if isinstance(payload, WeightlessCode):
            # One rank may stand for all: what it reads may be what it sent, of another length.
            return like, cast("tuple[torch.Tensor, Tally]", payload.content)[1]
        data, count = memoryview(payload).cast("B"), like.numel()
        if len(data) < _HEAD.size:
            raise WireError(f"a message of {len(data)} bytes is too short; it was truncated")
        magic, version, code, size, tally_bytes = _HEAD.unpack_from(data)
        found, expected = (magic, version, code, size), (MAGIC, VERSION, self.values.code, count)
        at_values = _HEAD.size + tally_bytes
        if found != expected or len(data) != at_values + int(self.values.num_bytes(count)):
            raise WireError(
                f"a message of {len(data)} bytes begins with {found}, expected is {expected}; it is"
                " damaged, or the ranks use different models, options or versions of offbeat"
            )
        tally = Tally.from_bytes(data[_HEAD.size : at_values], num_parameters=self.num_parameters)
        return self._read(np.frombuffer(data[at_values:], np.uint8).copy(), like), tally

    def _read(self, coded: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        with np.errstate(over="ignore"):  # what is damaged may be too large for float32
            values = torch.from_numpy(self.values.decode(coded, like.numel()))
        return values.to(like.device, like.dtype)
