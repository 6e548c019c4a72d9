"""Messages that are damaged: whatever bytes come, they are read or refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_support import altered_bytes, bounded_memory, succeeds_or_refuses
from offbeat import TopKCodec
from offbeat.codec.index_codecs import decode_rows, encode_rows
from offbeat.codec.model_wire import MessageKind, ModelMessage, Note
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.codec.value_codecs import Float64Values
from offbeat.codec.wire import Wire
from offbeat.errors import WireError
from offbeat.strategies.registry import WEIGHT_CODECS

MIB = 1 << 20
NUM_ELEMENTS = 1 << 20
TALLY = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(3, np.bool_))


def wire_of(codec: TopKCodec, num_elements: int = NUM_ELEMENTS) -> Wire:
    wire = codec.wire(num_elements, num_parameters=3, dtype=np.dtype(np.float32))
    return replace(wire, values=codec.values)  # for float64 too


def message(codec: TopKCodec, indices: list[int], num_elements: int = NUM_ELEMENTS) -> bytes:
    sparse = Sparse(
        indices=np.array(indices, np.int64),
        values=np.arange(1, len(indices) + 1, dtype=np.float32),
        num_elements=num_elements,
    )
    return wire_of(codec, num_elements).encode(sparse, TALLY)[0]


CODECS = {
    **{name: TopKCodec(values=name) for name in VALUE_CODECS},
    "float64": TopKCodec(values=Float64Values()),
    **{name: codec.entries for name, codec in WEIGHT_CODECS.items()},
}


@pytest.mark.parametrize(
    ("name", "num_elements"),
    [
        (name, num_elements)
        for name in CODECS
        for num_elements in (64, NUM_ELEMENTS, 1 << 40)
        # Codecs of weights may have some bytes for each chunk.
        if name not in WEIGHT_CODECS or num_elements <= NUM_ELEMENTS
    ],
)
@given(data=st.data())
def test_a_sparse_message_is_read_or_refused(
    name: str, num_elements: int, data: st.DataObject
) -> None:
    codec = CODECS[name]
    near = [1, 2, 70_000] if num_elements > 64 else list(range(0, 64, 3))
    far = [5, num_elements - 1]
    everything = list(range(64)) if num_elements == 64 else near
    content = message(codec, data.draw(st.sampled_from([[], near, far, everything])), num_elements)
    payload = data.draw(altered_bytes(content) | st.binary(max_size=80))
    wire = wire_of(codec, num_elements)

    def read() -> None:
        sparse, _ = wire.decode(payload)
        # What is read may be used as it is: indices without a check lead into other memory.
        assert (np.diff(sparse.indices) > 0).all()
        assert sparse.indices.size == sparse.values.size
        assert not sparse.indices.size or 0 <= sparse.indices[0] <= sparse.indices[-1]
        assert not sparse.indices.size or sparse.indices[-1] < num_elements

    succeeds_or_refuses(read)


@pytest.mark.parametrize("count", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_a_message_that_announces_many_values_takes_no_memory(count: int) -> None:
    payload = bytearray(message(TopKCodec(), [1, 2]))
    payload[16:24] = struct.pack("<Q", count)
    with bounded_memory(MIB), pytest.raises(WireError, match="should have"):
        wire_of(TopKCodec()).decode(payload)


WHOLE = ModelMessage(
    kind=MessageKind.AVERAGE,
    generation=1,
    version=2,
    step=3,
    weight=1.0,
    num_elements=10,
    begin=2,
    counters=np.arange(2),
    values=np.ones(3, np.float32),
    notes=(Note(weight=1.0, step=1, fresh=True),),
)
MODEL = WHOLE.to_bytes()
ROUNDED = replace(WHOLE, codes=np.arange(5, dtype=np.uint16)).to_bytes()


@given(altered_bytes(MODEL) | altered_bytes(ROUNDED) | st.binary(max_size=120))
def test_a_message_of_a_model_is_read_or_refused(payload: bytes) -> None:
    succeeds_or_refuses(lambda: ModelMessage.from_bytes(payload))


@pytest.mark.parametrize(
    ("content", "field"),
    [(MODEL, 56), (MODEL, 64), (MODEL, 72), (ROUNDED, 56), (ROUNDED, 80 + 24 + 16)],
)
@pytest.mark.parametrize("count", [1 << 40, (1 << 64) - 1])
def test_a_message_of_a_model_that_announces_much_takes_no_memory(
    content: bytes, field: int, count: int
) -> None:
    payload = bytearray(content)
    payload[field : field + 8] = struct.pack("<Q", count)
    with bounded_memory(MIB), pytest.raises(WireError):
        ModelMessage.from_bytes(payload)


@given(
    altered_bytes(encode_rows(np.arange(1000) % 300 == 0)) | st.binary(max_size=200),
    st.sampled_from([0, 1, 1000]),
)
def test_a_set_of_rows_is_read_or_refused(payload: bytes, num_rows: int) -> None:
    succeeds_or_refuses(lambda: decode_rows(payload, num_rows))


@given(altered_bytes(TALLY.to_bytes()) | st.binary(max_size=40))
def test_a_tally_is_read_or_refused(payload: bytes) -> None:
    succeeds_or_refuses(lambda: Tally.from_bytes(payload, num_parameters=3))
