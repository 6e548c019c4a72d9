"""Messages of group averages: what is written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.model_wire import ABSENT, HEAD_BYTES, NOTE_BYTES, MessageKind, ModelMessage, Note
from offbeat.errors import WireError

notes = st.builds(Note, weight=st.floats(0, 1e9), step=st.integers(-1, 2**62), fresh=st.booleans())
codes = st.lists(st.integers(0, 2**16 - 1), min_size=8, max_size=50)
messages = st.builds(
    ModelMessage,
    kind=st.sampled_from(MessageKind),
    generation=st.integers(0, 2**32 - 1),
    version=st.integers(-1, 2**62),
    step=st.integers(-1, 2**62),
    fresh=st.booleans(),
    arrived=st.booleans(),
    weight=st.floats(0, 1e9),
    participants=st.integers(0, 2**64 - 1),
    num_elements=st.integers(100, 2**40),
    begin=st.integers(0, 50),
    counters=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(
        lambda counters: np.array(counters, np.int64)
    ),
    values=st.lists(st.floats(width=32), max_size=50).flatmap(
        lambda values: st.sampled_from([np.array(values, np.float32), np.array(values, np.float64)])
    ),
    notes=st.lists(notes, max_size=6).map(tuple),
)
rounded = st.builds(
    lambda message, codes: replace(
        message, values=message.values[: codes.size], codes=np.array(codes, np.uint16)
    ),
    messages,
    codes.map(np.array),
)
coded = st.builds(
    lambda message, codes, bits: replace(
        message,
        values=message.values[:8],
        coded=np.array(codes, np.uint8),
        num_coded=8,
        bits=bits,
    ),
    messages,
    st.lists(st.integers(0, 255), max_size=50),
    st.integers(1, 255),
)
messages |= rounded | coded


@given(messages)
def test_what_is_written_is_read(message: ModelMessage) -> None:
    content = message.to_bytes()
    assert len(content) == HEAD_BYTES + NOTE_BYTES * len(
        message.notes
    ) + message.counters.nbytes + message.values.nbytes + (
        8 + message.codes.nbytes if message.codes.size else 0
    ) + (16 + message.coded.nbytes if message.bits else 0)
    read = ModelMessage.from_bytes(memoryview(content))
    for name in (
        "kind",
        "generation",
        "version",
        "step",
        "fresh",
        "arrived",
        "weight",
        "participants",
        "num_elements",
        "begin",
        "notes",
        "num_coded",
        "bits",
    ):
        assert getattr(read, name) == getattr(message, name)
    assert read.counters.dtype == np.int64
    assert read.counters.tolist() == message.counters.tolist()
    assert read.values.dtype == message.values.dtype
    assert read.values.tobytes() == message.values.tobytes()
    assert read.codes.tobytes() == message.codes.tobytes()
    assert read.coded.tobytes() == message.coded.tobytes()
    assert not read.values.flags.writeable or not read.values.size


@given(messages, st.data())
def test_whatever_is_altered_in_the_head_raises_or_reads_as_something_else(
    message: ModelMessage, data: st.DataObject
) -> None:
    content = bytearray(message.to_bytes())
    position = data.draw(st.integers(0, HEAD_BYTES - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = ModelMessage.from_bytes(content)
    except WireError:
        return
    assert read.to_bytes() == bytes(content)


@given(messages, st.integers(1, 200))
def test_a_truncated_or_extended_message_is_refused(message: ModelMessage, count: int) -> None:
    content = bytes(message.to_bytes())
    with pytest.raises(WireError):
        ModelMessage.from_bytes(content[:-count])
    with pytest.raises(WireError):
        ModelMessage.from_bytes(content + bytes(count))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_are_refused(weight: float) -> None:
    with pytest.raises(WireError, match="holds the weight"):
        ModelMessage.from_bytes(
            ModelMessage(kind=MessageKind.CHUNK, generation=0, weight=weight).to_bytes()
        )
    noted = ModelMessage(
        kind=MessageKind.AVERAGE, generation=0, notes=(Note(weight=weight, step=0, fresh=False),)
    )
    with pytest.raises(WireError, match="holds the weight"):
        ModelMessage.from_bytes(noted.to_bytes())


def test_values_beyond_the_model_are_refused() -> None:
    message = ModelMessage(
        kind=MessageKind.CHUNK,
        generation=0,
        num_elements=4,
        begin=3,
        values=np.zeros(2, np.float32),
    )
    with pytest.raises(WireError, match="elements 3 to 5 of a model of 4"):
        ModelMessage.from_bytes(message.to_bytes())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_begin_at_a_multiple_of_eight(dtype: type[np.floating]) -> None:
    for num_notes, num_counters in ((0, 0), (3, 1), (2, 4)):
        message = ModelMessage(
            kind=MessageKind.AVERAGE,
            generation=0,
            num_elements=3,
            notes=(ABSENT,) * num_notes,
            counters=np.arange(num_counters),
            values=np.arange(3, dtype=dtype),
        )
        assert (len(message.to_bytes()) - message.values.nbytes) % 8 == 0


def test_values_are_not_copied() -> None:
    content = ModelMessage(
        kind=MessageKind.CHUNK, generation=0, num_elements=3, values=np.arange(3, dtype=np.float32)
    ).to_bytes()
    buffer = bytearray(content)
    read = ModelMessage.from_bytes(buffer)
    buffer[-4:] = np.float32(7).tobytes()
    assert read.values.tolist() == [0.0, 1.0, 7.0]


def test_the_note_of_what_is_withheld_says_that_nothing_is_in() -> None:
    assert ModelMessage(kind=MessageKind.CHUNK, generation=0, step=3, fresh=True).note == ABSENT
    assert ModelMessage(
        kind=MessageKind.CHUNK, generation=0, step=3, fresh=True, weight=2.0
    ).note == Note(weight=2.0, step=3, fresh=True)
