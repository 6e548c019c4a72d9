"""The messages of background averages: chunks of models on their way to be averaged, and averages
on their way back.

Layout, little-endian: a head of 80 bytes, 24 bytes for each note, 8 for each counter, then the
values, which therefore begin at a multiple of 8.

    kind (u8), flags (u8: 1 fresh, 2 arrived), dtype (u8), bits (u8), generation (u32), version
    (i64), step (i64), weight (f64), participants (u64), elements of the model (u64), first element
    (u64), number of values (u64), of notes (u64), of counters (u64)
    note: weight (f64), step (i64), fresh (u64)
    counter: i64
    values: float32 (dtype 0) or float64 (1); rounded ones (2 and 3): the number of those that are
        not rounded (u64), these as float32 or float64, then all as bfloat16; coded ones (bits above
        0): likewise, with the bytes that a codec has made of all, and their number (u64) before
        those that are not rounded
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import WireError

Values: TypeAlias = NDArray[np.floating]
Codes: TypeAlias = NDArray[np.uint16]
"""Numbers in bfloat16, the upper halves of float32."""
Coded: TypeAlias = NDArray[np.uint8]
Counters: TypeAlias = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_HEAD = struct.Struct("<BBBBIqqdQQQQQQ")
_NOTE = struct.Struct("<dqQ")
HEAD_BYTES = _HEAD.size
NOTE_BYTES = _NOTE.size
COUNTER_BYTES = 8

_COUNTER = np.dtype("<i8")
_DTYPES: dict[int, np.dtype[np.floating]] = {0: np.dtype("<f4"), 1: np.dtype("<f8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ROUNDED = 2
"""What is added to the code of a dtype where values are rounded."""
_COUNT = struct.Struct("<Q")
_CODE = np.dtype("<u2")


def no_counters() -> Counters:
    """Those of a model that has none."""
    return np.empty(0, np.int64)


def no_codes() -> Codes:
    """Those of values that are not rounded."""
    return np.empty(0, np.uint16)


class MessageKind(IntEnum):
    """What a message says."""

    CHUNK = 1
    """The sender's contribution to the receiver's region, or to the whole model."""
    AVERAGE = 2
    """The average of the sender's region, with a note on each member."""
    MODEL_REQUEST = 3
    """The receiver must send its current model."""
    MODEL_REPLY = 4
    """The sender's model, or none."""
    STOPPED = 5
    """The sender takes no more steps; it still contributes when peers need it."""
    FINISHED = 6
    """The sender needs no peer any more; it still contributes until all have finished."""
    ARRIVE = 7
    """From a rank to itself: it has come to the end of a step."""
    FETCH_MODEL = 8
    """From a rank to itself: request the model of member `version`, or of every member where that
    is negative.
    """
    STOP_STEPPING = 9
    """From a rank to itself: it takes no more steps."""
    FINISH = 10
    """From a rank to itself: it needs nothing more."""
    ARRIVED = 11
    """The sender has arrived at the version, or at a later one. Its chunks follow, and may take
    long.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What an average says of the contribution of one member.

    Attributes:
        weight: the weight of the contribution, >= 0; 0 when it is not included.
        step: how many steps the member had made when the contribution was taken; -1 when it is not
            included.
        fresh: whether the member had arrived. A contribution that is not fresh was taken while the
            member was computing.
    """

    weight: float
    step: int
    fresh: bool


ABSENT = Note(weight=0.0, step=-1, fresh=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelMessage:
    """One message.

    Attributes:
        kind: what it says. Each kind uses only some of the other attributes.
        generation: the number of the generation, 0 <= generation < 2**32.
        version: the number of the average.
        step: of the contribution, as in `Note`.
        fresh: of the contribution, as in `Note`.
        weight: of the contribution, as in `Note`; 0 for a chunk whose values are withheld.
        arrived: whether the sender has arrived at this version or a later one, so that no peer
            needs to wait for its arrival.
        participants: in an exchange without owners, the members among which the sender means to
            average: bit i for the i-th member of the group.
        num_elements: the number of elements of the whole model.
        begin: the index of the first element in `values`.
        counters: the integer buffers of the model, int64, shape (any,); in an average, the largest
            value of each.
        values: float32 or float64, shape (any,): the elements from `begin` on or, where `codes` are
            given, those of them that are not rounded. Arrays of a received message are read-only.
        codes: all elements from `begin` on, rounded to bfloat16, shape (any,); empty where nothing
            is rounded.
        notes: one for each member of the group, in the order of the group.
        coded: differences of all elements from `begin` on, as a `ValueCodec` has written them;
            empty where it has not.
        num_coded: how many elements that are.
        bits: that the codec has for each of them.
    """

    kind: MessageKind
    generation: int
    version: int = -1
    step: int = -1
    fresh: bool = False
    weight: float = 0.0
    arrived: bool = False
    participants: int = 0
    num_elements: int = 0
    begin: int = 0
    counters: Counters = field(default_factory=no_counters)
    values: Values = field(default_factory=partial(np.empty, 0, np.float32))
    codes: Codes = field(default_factory=no_codes)
    notes: tuple[Note, ...] = ()
    coded: Coded = field(default_factory=lambda: np.empty(0, np.uint8))
    num_coded: int = 0
    bits: int = 0

    @property
    def note(self) -> Note:
        """The note of the sender's contribution."""
        return Note(weight=self.weight, step=self.step, fresh=self.fresh) if self.weight else ABSENT

    @property
    def size(self) -> int:
        """The number of elements from `begin` on."""
        return self.num_coded or self.codes.size or self.values.size

    def to_bytes(self) -> memoryview:
        """The message as it travels, read-only."""
        is_rounded = self.codes.size > 0
        flags = self.fresh | self.arrived << 1
        code = _CODES[self.values.dtype] + _ROUNDED * is_rounded
        when = self.generation, self.version, self.step
        what = self.weight, self.participants, self.num_elements, self.begin
        counts = self.size, len(self.notes), self.counters.size
        head = _HEAD.pack(self.kind, flags, code, self.bits, *when, *what, *counts)
        notes = [_NOTE.pack(note.weight, note.step, note.fresh) for note in self.notes]
        counters = np.ascontiguousarray(self.counters, _COUNTER).data
        sizes = [self.coded.size] * (self.bits > 0)
        sizes += [self.values.size] * (is_rounded or self.bits > 0)
        values = np.ascontiguousarray(self.values).data
        codes = self.coded if self.bits else np.ascontiguousarray(self.codes, _CODE)
        return _joined([head, *notes, counters, *map(_COUNT.pack, sizes)], values, codes.data)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ModelMessage:
        """The inverse of `to_bytes`; it does not copy the values. Raises `WireError` for bytes that
        `to_bytes` did not write.
        """
        if len(data) < HEAD_BYTES:
            raise WireError(
                f"a message of a group average has {HEAD_BYTES} bytes or more, got {len(data)}; it"
                " was truncated"
            )
        kind, flags, code, bits, generation, version, step, *rest = _HEAD.unpack_from(data)
        weight, participants, num_elements, begin, num_values, num_notes, num_counters = rest
        is_rounded, dtype = code >= _ROUNDED, _DTYPES[code % _ROUNDED]
        if (
            flags > 3
            or kind not in MessageKind._value2member_map_
            or code >= 2 * _ROUNDED
            or ((is_rounded or bits) and not num_values)
            or (is_rounded and bits)
        ):
            raise WireError(
                f"got a message of a group average of kind {kind}, dtype {code}, flags {flags}; it"
                " is corrupt"
            )
        counters_at = HEAD_BYTES + num_notes * NOTE_BYTES
        values_at = counters_at + num_counters * COUNTER_BYTES
        num_whole, num_codes, num_coded = num_values, num_values if is_rounded else 0, 0
        if bits:
            num_coded, values_at = _size_at(data, values_at)
        if bits or is_rounded:
            num_whole, values_at = _size_at(data, values_at)
        codes_at = values_at + num_whole * dtype.itemsize
        expected = codes_at + num_codes * _CODE.itemsize + num_coded
        if len(data) != expected or num_whole > num_values:
            raise WireError(
                f"a message of a group average announces {expected} bytes and has {len(data)}; it"
                " was truncated"
            )
        if begin + num_values > num_elements:
            raise WireError(
                f"a message of a group average holds elements {begin} to {begin + num_values} of a"
                f" model of {num_elements}"
            )
        notes = [
            Note(weight=_checked(note_weight), step=note_step, fresh=bool(note_fresh))
            for note_weight, note_step, note_fresh in _NOTE.iter_unpack(
                memoryview(data)[HEAD_BYTES:counters_at]
            )
        ]
        return cls(
            kind=MessageKind(kind),
            generation=generation,
            version=version,
            step=step,
            fresh=bool(flags & 1),
            arrived=bool(flags & 2),
            weight=_checked(weight),
            participants=participants,
            num_elements=num_elements,
            begin=begin,
            counters=_array(data, _COUNTER, num_counters, counters_at),
            values=_array(data, dtype, num_whole, values_at),
            codes=_array(data, _CODE, num_codes, codes_at),
            notes=tuple(notes),
            coded=_array(data, np.dtype(np.uint8), num_coded, codes_at),
            num_coded=num_values if bits else 0,
            bits=bits,
        )


def _joined(small: Sequence[bytes | memoryview], *large: memoryview) -> memoryview:
    """All of them side by side. While `bytes.join` copies a model no other thread runs; numpy lets
    the trainer go on meanwhile.
    """
    every = (memoryview(b"".join(small)), *large)
    parts = [np.frombuffer(part, np.uint8) for part in every if part.nbytes]
    content = np.empty(sum(part.size for part in parts), np.uint8)
    np.concatenate(parts, out=content)
    return content.data.toreadonly()


def bytes_at_scale(message: bytes | bytearray | memoryview, num_elements: int) -> float:
    """How many bytes `message` would have if its model had `num_elements`.

    >>> message = ModelMessage(
    ...     kind=MessageKind.CHUNK, generation=0, num_elements=4, values=np.zeros(2, np.float32)
    ... )
    >>> bytes_at_scale(message.to_bytes(), 4000) - HEAD_BYTES
    8000.0
    """
    _, _, code, bits, *rest = _HEAD.unpack_from(message)
    own_elements, _, num_values, _, _ = map(int, rest[-5:])
    if not num_values:
        return len(message)
    dtype = _CODE if code >= _ROUNDED else _DTYPES[code]
    num_bytes = num_values * (bits / 8 if bits else dtype.itemsize)
    return len(message) + (num_elements / own_elements - 1.0) * num_bytes


def _size_at(data: bytes | bytearray | memoryview, offset: int) -> tuple[int, int]:
    """A number that says how large a part of the message is, and where that number ends."""
    end = offset + _COUNT.size
    if len(data) < end:
        raise WireError(
            f"a message of a group average announces {end} bytes or more and has {len(data)}; it"
            " was truncated"
        )
    return int(_COUNT.unpack_from(data, offset)[0]), end


def _checked(weight: float) -> float:
    if not 0 <= weight < math.inf:
        raise WireError(
            f"a message of a group average holds the weight {weight}, allowed is any finite number"
            " from 0"
        )
    return weight


def _array(
    data: bytes | bytearray | memoryview, dtype: np.dtype[_Scalar], count: int, offset: int
) -> NDArray[_Scalar]:
    if not count:
        return np.empty(0, dtype)
    array = np.frombuffer(data, dtype, count, offset)
    if not array.flags.aligned:  # compiled code would be compiled anew for it
        array = array.copy()
    array.flags.writeable = False
    return array
