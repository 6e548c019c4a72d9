"""Messages of a group average: parts of models on their way to be averaged, and averages on their way back.

Layout, little-endian: a head of 72 bytes, 24 bytes for each note, then the values.

    kind (u8), flags (u8: 1 fresh, 2 arrived), dtype (u8), zero (u8), generation (u32), version (i64), step (i64),
    weight (f64), party (u64), elements of the model (u64), first element (u64), number of values (u64), of notes (u64)
    note: weight (f64), step (i64), fresh (u64)
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import WireError

Values: TypeAlias = NDArray[np.floating]

_HEAD = struct.Struct("<BBBBIqqdQQQQQ")
_NOTE = struct.Struct("<dqQ")
HEAD_BYTES = _HEAD.size
NOTE_BYTES = _NOTE.size

_DTYPES: dict[int, np.dtype[np.floating]] = {0: np.dtype("<f4"), 1: np.dtype("<f8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Kind(IntEnum):
    """What a message says."""

    PART = 1
    """What the sender contributes to the receiver's region, or to all of the model."""
    AVERAGE = 2
    """The average of the sender's region, with a note on each member."""
    FINISHED = 3
    """The sender will not arrive at any further version; it goes on answering."""
    ARRIVE = 4
    """From a rank to itself: it has come to the end of a step."""
    FINISH = 5
    """From a rank to itself: that was its last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What an average holds of one member.

    Attributes:
        weight: with which its contribution counts, >= 0; 0 when it is not in.
        step: after which of its steps the contribution was taken; -1 when it is not in.
        fresh: whether the member had arrived; a contribution that is not fresh was taken while it was computing.
    """

    weight: float
    step: int
    fresh: bool


ABSENT = Note(weight=0.0, step=-1, fresh=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelMessage:
    """One message.

    Attributes:
        kind: what it says; the other attributes matter as far as it needs them.
        generation: number of the membership, 0 <= generation < 2**32.
        version: which average.
        step: of the contribution, as in `Note`.
        fresh: likewise.
        weight: likewise; 0 for a part that is withheld.
        arrived: whether the sender has arrived at this version or a later one, so that nobody need wait for it to.
        party: in an exchange without owners, among whom the sender means to average: bit i for the group's i-th member.
        num_elements: of the whole model.
        begin: first element that `values` are for.
        values: float32 or float64, shape (any,); those of a received message cannot be written to.
        notes: of a group's members, in the order of the group.
    """

    kind: Kind
    generation: int
    version: int = -1
    step: int = -1
    fresh: bool = False
    weight: float = 0.0
    arrived: bool = False
    party: int = 0
    num_elements: int = 0
    begin: int = 0
    values: Values = field(default_factory=partial(np.empty, 0, np.float32))
    notes: tuple[Note, ...] = ()

    @property
    def note(self) -> Note:
        """The sender's note of what it contributes."""
        return Note(weight=self.weight, step=self.step, fresh=self.fresh) if self.weight else ABSENT

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(
            self.kind,
            self.fresh | self.arrived << 1,
            _CODES[self.values.dtype],
            0,
            self.generation,
            self.version,
            self.step,
            self.weight,
            self.party,
            self.num_elements,
            self.begin,
            self.values.size,
            len(self.notes),
        )
        notes = [_NOTE.pack(note.weight, note.step, note.fresh) for note in self.notes]
        return b"".join([head, *notes, np.ascontiguousarray(self.values).data])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ModelMessage:
        """Inverse of `to_bytes`, without copying values. Raises `WireError` for anything that it did not write."""
        if len(data) < HEAD_BYTES:
            raise WireError(f"a message of a group average has {HEAD_BYTES} bytes or more, got {len(data)}; it was truncated")
        kind, flags, code, zero, generation, *rest = _HEAD.unpack_from(data)
        version, step, weight, party, num_elements, begin, num_values, num_notes = rest
        if zero or flags > 3 or kind not in Kind._value2member_map_ or code not in _DTYPES:
            raise WireError(
                f"got a message of a group average of kind {kind}, dtype {code}, flags {flags}.{zero}; it is corrupt"
            )
        expected = HEAD_BYTES + num_notes * NOTE_BYTES + num_values * _DTYPES[code].itemsize
        if len(data) != expected:
            raise WireError(f"a message of a group average announces {expected} bytes and has {len(data)}; it was truncated")
        if begin + num_values > num_elements:
            raise WireError(
                f"a message of a group average holds elements {begin} to {begin + num_values} of a model of {num_elements}"
            )
        notes = [
            Note(weight=_checked(note_weight), step=note_step, fresh=bool(note_fresh))
            for note_weight, note_step, note_fresh in _NOTE.iter_unpack(
                memoryview(data)[HEAD_BYTES : HEAD_BYTES + num_notes * NOTE_BYTES]
            )
        ]
        return cls(
            kind=Kind(kind),
            generation=generation,
            version=version,
            step=step,
            fresh=bool(flags & 1),
            arrived=bool(flags & 2),
            weight=_checked(weight),
            party=party,
            num_elements=num_elements,
            begin=begin,
            values=_values(data, _DTYPES[code], num_values, HEAD_BYTES + num_notes * NOTE_BYTES),
            notes=tuple(notes),
        )


def _checked(weight: float) -> float:
    if not 0 <= weight < math.inf:
        raise WireError(f"a message of a group average holds the weight {weight}, allowed is any finite number from 0")
    return weight


def _values(data: bytes | bytearray | memoryview, dtype: np.dtype[np.floating], count: int, offset: int) -> Values:
    if not count:
        return np.empty(0, dtype)
    values = np.frombuffer(data, dtype, count, offset)
    values.flags.writeable = False
    return values
