"""The wire layout: what comes out is what went in, and nothing that is no message gets through."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from offbeat.codec.index_codecs import decode_rows, encode_rows
from offbeat.codec.sparse import Sparse, add
from offbeat.codec.tally import Tally, is_finite
from offbeat.codec.value_codecs import (
    BFloat16Values,
    Float8Values,
    Float32Values,
    Float64Values,
    ValueCodec,
)
from offbeat.codec.wire import Wire, pair_bytes
from offbeat.errors import WireError
from offbeat.megabatch.merge import index_bytes

FINITE_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOAT32, FLOAT64, BFLOAT16 = Float32Values(), Float64Values(), BFloat16Values()
FLOAT8 = Float8Values()
VALUE_BYTES: dict[ValueCodec, int] = {FLOAT32: 4, FLOAT64: 8, BFLOAT16: 2, FLOAT8: 1}
HEAD_BYTES = 28


@st.composite
def messages(draw: st.DrawFn, dtype: type[np.floating] = np.float32) -> Sparse:
    num_elements = draw(st.sampled_from([1, 50, 1 << 17, 1 << 31, 1 << 40]))
    indices = np.array(
        sorted(draw(st.sets(st.integers(0, num_elements - 1), max_size=20))), dtype=np.int64
    )
    values = draw(hnp.arrays(dtype, indices.size, elements=FINITE_FLOATS))
    return Sparse(indices=indices, values=values, num_elements=num_elements)


def wire_of(
    num_elements: int,
    values: ValueCodec = FLOAT32,
    *,
    num_parameters: int = 3,
    dtype: type[np.floating] = np.float32,
) -> Wire:
    return Wire(
        num_elements=num_elements,
        num_parameters=num_parameters,
        dtype=np.dtype(dtype),
        values=values,
    )


def tally_of(num_parameters: int = 3) -> Tally:
    used = np.arange(num_parameters) % 2 == 0
    return Tally(weight=1.5, num_nonfinite=1, num_failed=0, used=used)


def without_zeros(sparse: Sparse) -> Sparse:
    nonzero = sparse.values != 0
    return Sparse(
        indices=sparse.indices[nonzero],
        values=sparse.values[nonzero],
        num_elements=sparse.num_elements,
    )


def assert_same(a: Sparse, b: Sparse) -> None:
    np.testing.assert_array_equal(a.indices, b.indices)
    np.testing.assert_array_equal(a.values, b.values)
    assert a.values.dtype == b.values.dtype
    assert a.num_elements == b.num_elements


@given(messages())
def test_float32_is_lossless(message: Sparse) -> None:
    payload, rounding = wire_of(message.num_elements, FLOAT32).encode(message, tally_of())
    decoded, tally = wire_of(message.num_elements).decode(payload)
    assert len(rounding) == 0
    assert_same(decoded, without_zeros(message))
    assert tally.to_bytes() == tally_of().to_bytes()


@given(messages(), st.sampled_from([FLOAT32, BFLOAT16]))
def test_what_is_decoded_and_what_was_rounded_off_make_up_the_message(
    message: Sparse, values: ValueCodec
) -> None:
    payload, rounding = wire_of(message.num_elements, values).encode(message, tally_of())
    decoded, _ = wire_of(message.num_elements, values).decode(payload)
    assert_same(without_zeros(add(decoded, rounding)), without_zeros(message))


@given(messages(np.float64))
def test_double_precision_is_owed_what_single_precision_loses(message: Sparse) -> None:
    precise = message.scaled(1 + 2**-40)
    payload, rounding = wire_of(precise.num_elements, FLOAT32).encode(precise, tally_of())
    decoded, _ = wire_of(message.num_elements, dtype=np.float64).decode(payload)
    assert_same(without_zeros(add(decoded, rounding)), without_zeros(precise))
    payload, rounding = wire_of(precise.num_elements, FLOAT64).encode(precise, tally_of())
    decoded, _ = wire_of(message.num_elements, FLOAT64, dtype=np.float64).decode(payload)
    assert len(rounding) == 0
    assert_same(decoded, without_zeros(precise))


@given(
    hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-(2.0**127), 2.0**127, width=32)),
    st.booleans(),
)
def test_bfloat16_rounds_as_torch_does(values: NDArray[np.float32], halfway: bool) -> None:
    if halfway:
        values = (values.view(np.uint32) & 0xFFFF_0000 | 0x8000).view(np.float32)
    message = Sparse(indices=np.arange(values.size), values=values, num_elements=values.size)
    payload, _ = wire_of(message.num_elements, BFLOAT16).encode(message, tally_of())
    decoded, _ = wire_of(values.size, BFLOAT16).decode(payload)
    np.testing.assert_array_equal(
        decoded.to_dense(), torch.from_numpy(values).bfloat16().float().numpy()
    )


def test_values_beyond_bfloat16_become_its_largest() -> None:
    message = Sparse.from_dense(np.array([3.4e38, -3.4e38], dtype=np.float32))
    payload, rounding = wire_of(message.num_elements, BFLOAT16).encode(message, tally_of())
    decoded, _ = wire_of(2, BFLOAT16).decode(payload)
    assert np.isfinite(decoded.values).all()
    assert_same(add(decoded, rounding), message)


@pytest.mark.parametrize("bits", [0x7FC0_0000, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001])
def test_nan_stays_nan_in_bfloat16(bits: int) -> None:
    message = Sparse.from_dense(np.array([bits], dtype=np.uint32).view(np.float32))
    payload, _ = wire_of(message.num_elements, BFLOAT16).encode(message, tally_of())
    decoded, _ = wire_of(1, BFLOAT16).decode(payload)
    assert np.isnan(decoded.values).all()
    assert len(decoded) == 1


@given(messages(), st.sampled_from(list(VALUE_BYTES)))
def test_a_pair_takes_at_most_four_bytes_and_its_value(message: Sparse, values: ValueCodec) -> None:
    payload, _ = wire_of(message.num_elements, values).encode(message, tally_of())
    index_bytes = 4 if message.num_elements <= 1 << 32 else 8
    most = HEAD_BYTES + Tally.num_bytes(3) + len(message) * (index_bytes + VALUE_BYTES[values])
    assert len(payload) <= most


MOST_INDEX_BYTES = {1e-6: 4, 0.001: 2, 0.01: 1.8, 0.06: 1, 0.5: 0.25}
"""By density."""


@pytest.mark.parametrize(
    ("values", "density"),
    [
        *((FLOAT32, density) for density in MOST_INDEX_BYTES),
        (FLOAT64, 0.01),
        (BFLOAT16, 0.001),
        (FLOAT8, 0.06),
    ],
)
def test_indices_take_the_shortest_layout(values: ValueCodec, density: float) -> None:
    num_elements = 10_000_000 if density < 0.05 else 1_000_000  # enough entries to tell
    indices = np.flatnonzero(np.random.default_rng(0).random(num_elements) < density)
    ones = np.ones(indices.size, dtype=np.float32)
    message = Sparse(indices=indices, values=ones, num_elements=num_elements)
    wire = wire_of(num_elements, values)
    payload, _ = wire.encode(message, tally_of())
    entries_bytes = len(payload) - HEAD_BYTES - Tally.num_bytes(3)
    expected = pair_bytes(values, wire.indices, k=len(message), num_elements=num_elements)
    assert entries_bytes == pytest.approx(len(message) * expected, rel=0.01, abs=8)
    most = len(message) * (MOST_INDEX_BYTES[density] + VALUE_BYTES[values])
    assert entries_bytes <= 1.001 * most
    decoded, _ = wire.decode(payload)
    assert_same(decoded, message)


def test_a_float8_is_within_a_fifth() -> None:
    magnitudes = np.geomspace(2.0**-40, 2.0**22, 10_001)[:-1].astype(np.float32)
    message = Sparse.from_dense(np.concatenate((magnitudes, -magnitudes)))
    wire = wire_of(message.num_elements, FLOAT8)
    decoded, _ = wire.decode(wire.encode(message, tally_of())[0])
    np.testing.assert_allclose(decoded.values, message.values, rtol=0.2)


@pytest.mark.parametrize("value", [2.0**-40, 1.5 * 2.0**-7, -1.0, -1.5, 3.0, 2.0**22])
def test_float8_numbers_are_exact(value: float) -> None:
    message = Sparse.from_dense(np.array([value], dtype=np.float32))
    payload, rounding = wire_of(1, FLOAT8).encode(message, tally_of())
    assert_same(wire_of(1, FLOAT8).decode(payload)[0], message)
    assert len(rounding) == 0


def test_what_float8_cannot_say_is_owed() -> None:
    message = Sparse.from_dense(np.array([1e9, -1e9, 1e-15, 1.2], dtype=np.float32))
    payload, rounding = wire_of(4, FLOAT8).encode(message, tally_of())
    decoded, _ = wire_of(4, FLOAT8).decode(payload)
    assert decoded.values[2] == 0  # which is too small
    assert_same(add(decoded, rounding), message)


def test_nan_stays_nan_in_float8() -> None:
    message = Sparse.from_dense(np.array([np.nan], dtype=np.float32))
    decoded, _ = wire_of(1, FLOAT8).decode(wire_of(1, FLOAT8).encode(message, tally_of())[0])
    assert np.isnan(decoded.values).all()
    assert len(decoded) == 1


@pytest.mark.parametrize(
    "gap", [255, 256, 257, 512, 513, 65535, 65536, 65537, 131072, 131073, 200_000]
)
def test_large_gaps_are_bridged(gap: int) -> None:
    indices = np.concatenate([[gap - 1], gap - 1 + gap + np.arange(30)]).astype(np.int64)
    message = Sparse(
        indices=indices, values=np.arange(1.0, 32.0, dtype=np.float32), num_elements=1 << 20
    )
    payload, _ = wire_of(message.num_elements, FLOAT32).encode(message, tally_of())
    assert len(payload) < HEAD_BYTES + Tally.num_bytes(3) + len(message) * 8
    decoded, _ = wire_of(1 << 20).decode(payload)
    assert_same(decoded, message)


def good_payload(values: ValueCodec = FLOAT32, *, far: bool = False) -> tuple[bytes, int]:
    indices = np.array([0, 3, 1 << 20, 1 << 21] if far else [0, 3, 7, 9], dtype=np.int64)
    message = Sparse(
        indices=indices, values=np.array([1, -2, 3, 4], dtype=np.float32), num_elements=1 << 22
    )
    return wire_of(message.num_elements, values).encode(message, tally_of())[0], 1 << 22


def reads_or_refuses(payload: bytes, num_elements: int, values: ValueCodec) -> None:
    """Anything but a `WireError` fails the test; what is accepted must be well formed."""
    try:
        sparse, tally = wire_of(num_elements, values).decode(payload)
    except WireError:
        return
    assert (np.diff(sparse.indices) > 0).all()
    assert len(sparse) == 0 or 0 <= sparse.indices[0] <= sparse.indices[-1] < num_elements
    assert sparse.values.dtype == np.float32
    assert np.isfinite(tally.weight)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        wire_of(100).decode(payload)


@given(st.data(), st.sampled_from([FLOAT32, BFLOAT16, FLOAT8]), st.booleans())
def test_flipped_bits_raise_nothing_else(
    data: st.DataObject, values: ValueCodec, far: bool
) -> None:
    payload, num_elements = good_payload(values, far=far)
    damaged = bytearray(payload)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=4)):
        damaged[bit // 8] ^= 1 << bit % 8
    reads_or_refuses(bytes(damaged), num_elements, values)


@pytest.mark.parametrize("far", [False, True])
def test_truncated_and_overlong_messages_are_refused(far: bool) -> None:
    payload, num_elements = good_payload(far=far)
    for damaged in [payload[:length] for length in range(len(payload))] + [payload + b"\0"]:
        with pytest.raises(WireError):
            wire_of(num_elements).decode(damaged)


@pytest.mark.parametrize(
    ("position", "value", "says"),
    [
        (0, 0, "begins with"),
        (4, 9, "version 9"),
        (5, 7, "value codec 7"),
        (6, 7, "index layout 7"),
        (8, 1, "elements reached a bucket"),
    ],
)
def test_errors_say_what_is_wrong(position: int, value: int, says: str) -> None:
    payload, num_elements = good_payload()
    damaged = bytearray(payload)
    damaged[position] = value
    with pytest.raises(WireError, match=says):
        wire_of(num_elements).decode(damaged)


def test_indices_must_ascend_and_stay_within_bounds() -> None:
    plain, num_elements = good_payload(far=True)
    at = HEAD_BYTES + Tally.num_bytes(3)
    for indices, says in (
        ([5, 5, 6, 7], "ascend"),
        ([0, 1, 2, num_elements], f"ones below {num_elements}"),
    ):
        # As indices of 4 bytes each, layout 1, and the 4 values.
        head, written = plain[:6] + b"\1" + plain[7:at], np.array(indices, dtype="<u4").tobytes()
        damaged = head + written + plain[-16:]
        with pytest.raises(WireError, match=says):
            wire_of(num_elements).decode(damaged)
    gaps, _ = good_payload()
    with pytest.raises(WireError, match="entries behind its last gap"):
        wire_of(num_elements).decode(gaps[:at] + bytes([0xFF] * 4) + gaps[at + 4 :])
    damaged = gaps[:at] + bytes([0xFE] * 4) + gaps[at + 4 :]
    damaged = damaged[:8] + (1000).to_bytes(8, "little") + damaged[16:]
    with pytest.raises(WireError, match="ones below 1000"):
        wire_of(1000).decode(damaged)
    nearly_everywhere = Sparse.from_dense(np.arange(20, dtype=np.float32))
    bitmap, _ = wire_of(20).encode(nearly_everywhere, tally_of())
    for bits, says in (([0xFF, 0xFF, 0x03], "has 18 indices"), ([0xFF, 0xFF, 0x13], "below 20")):
        with pytest.raises(WireError, match=says):
            wire_of(20).decode(bitmap[:at] + bytes(bits) + bitmap[at + 3 :])


def test_another_dtype_or_model_is_refused() -> None:
    payload, num_elements = good_payload(FLOAT64)
    with pytest.raises(WireError, match="value codec 1, this rank reads 0.*different dtypes"):
        wire_of(num_elements).decode(payload)
    with pytest.raises(WireError, match="same model"):
        wire_of(num_elements, FLOAT64, num_parameters=300, dtype=np.float64).decode(payload)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    tally = Tally(weight=weight, num_nonfinite=0, num_failed=0, used=np.zeros(3, dtype=np.bool_))
    payload, _ = wire_of(5).encode(Sparse.empty(5, np.float32), tally)
    with pytest.raises(WireError, match="weight"):
        wire_of(5).decode(payload)


def test_views_are_read_like_bytes() -> None:
    payload, num_elements = good_payload()
    padded = memoryview(b"x" + payload)[1:]
    decoded, _ = wire_of(num_elements).decode(padded)
    assert decoded.indices.tolist() == [0, 3, 7, 9]
    assert decoded.indices.flags.writeable
    assert decoded.values.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "large"),
    [
        (torch.float16, 6e4),
        (torch.bfloat16, 3e38),
        (torch.float32, 3e38),
        (torch.float64, 1e308),
        (torch.complex64, 3e38),
    ],
)
def test_what_is_not_finite_is_found_and_what_only_sums_to_infinity_is_not(
    dtype: torch.dtype, large: float
) -> None:
    for bad in ({7: math.inf}, {7: math.inf, 8: -math.inf}, {8: math.nan}):
        numbers = torch.full((1000,), large, dtype=dtype)
        assert is_finite(numbers)
        for place, value in bad.items():
            numbers[place] = value
        assert not is_finite(numbers)


@given(st.integers(1, 300), st.data())
def test_a_set_comes_back_in_as_few_bytes_as_planned(num_rows: int, data: st.DataObject) -> None:
    rows = np.zeros(num_rows, np.bool_)
    rows[data.draw(st.lists(st.integers(0, num_rows - 1)))] = True
    encoded = encode_rows(rows)
    np.testing.assert_array_equal(decode_rows(encoded, num_rows), rows)
    assert len(encoded) == 1 + index_bytes(int(rows.sum()), num_rows)


@pytest.mark.parametrize(
    "payload", [b"", b"x", b"b\x00", b"l\x00", b"l\x09\x00\x00\x00", b"b\x00\x00\x00"]
)
def test_what_is_no_set_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="a set of 9 rows"):
        decode_rows(payload, 9)
