"""Values in a few bits, and Rice codes of indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.dense_wire import PIECE, DenseWire
from offbeat.codec.few_bits import (
    BLOCK,
    E3M0Values,
    LevelValues,
    LinearValues,
    SignValues,
    pack,
    unpack,
)
from offbeat.codec.index_codecs import GapIndices
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.errors import ConfigError, WireError

SCALED = [LinearValues(bits) for bits in (1, 2, 4, 8)] + [SignValues(), E3M0Values()]
ALL = [*SCALED, LinearValues(4, stochastic=True), LevelValues(4)]
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def there_and_back(codec: ValueCodec, values: np.ndarray) -> np.ndarray:
    coded = codec.encode(values)
    assert coded.nbytes == codec.num_bytes(values.size)
    return codec.decode(coded.view(np.uint8), values.size)


@given(st.integers(1, 16), st.data())
def test_codes_of_any_width_are_packed(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=40))
    packed = pack(np.array(codes, np.uint16), bits)
    assert packed.size == -(-len(codes) * bits // 8)
    assert unpack(packed, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("codec", ALL, ids=repr)
@given(values=st.lists(FLOATS, max_size=30), copies=st.sampled_from([1, 100]))
def test_nothing_grows_and_a_number_keeps_its_sign(
    codec: ValueCodec, values: list[float], copies: int
) -> None:
    sent = np.array(values * copies, np.float32)
    decoded = there_and_back(codec, sent)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max(initial=0) <= np.abs(sent).max(initial=0) * 1.000001
    if codec in SCALED:
        assert (np.sign(decoded) * np.sign(sent) >= 0).all() or isinstance(codec, LinearValues)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@given(values=st.lists(FLOATS, min_size=1, max_size=60))
def test_linear_levels_are_off_by_at_most_half_of_their_distance(
    bits: int, values: list[float]
) -> None:
    sent = np.array(values, np.float32)
    decoded = there_and_back(LinearValues(bits), sent)
    step = 2 * np.abs(sent).max() / ((1 << bits) - 1)
    assert np.abs(decoded - sent).max() <= 0.5001 * step


def test_rounding_at_random_has_no_bias_and_repeats_itself() -> None:
    sent = np.full(200_000, 0.3, np.float32)
    sent[::BLOCK] = 1.0
    codec = LinearValues(2, stochastic=True)
    decoded = there_and_back(codec, sent)
    others = decoded[sent != 1.0]
    assert (others > 0).mean() == pytest.approx(0.95, abs=0.01)
    assert others.mean() == pytest.approx(0.3, abs=0.002)  # of 4 levels none is near .3
    assert (there_and_back(codec, sent) == decoded).all()
    nearest = there_and_back(LinearValues(2), sent)
    assert (nearest[sent != 1.0] == np.float32(1 / 3)).all()


def test_each_block_has_its_scale() -> None:
    """A layer with gradients a million times smaller is as exact as the other one."""
    large = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32)
    both = np.concatenate([large, large * np.float32(2.0**-20)])
    for codec in SCALED:
        decoded = there_and_back(codec, both)
        np.testing.assert_allclose(decoded[BLOCK:], decoded[:BLOCK] * 2.0**-20, rtol=1e-6)


def test_the_sign_stands_for_the_mean_magnitude() -> None:
    decoded = there_and_back(SignValues(), np.array([3.0, -1.0, 2.0], np.float64))
    assert decoded.tolist() == [2.0, -2.0, 2.0]


@pytest.mark.parametrize(
    ("value", "read"),
    [(1, 1), (0.74, 0.5), (0.76, 1), (-0.25, -0.25), (0.007, 0), (-0.009, -1 / 64)],
)
def test_exponents_are_the_nearest_ones(value: float, read: float) -> None:
    assert there_and_back(E3M0Values(), np.array([1.0, value], np.float32))[1] == read


def test_levels_that_read_as_means_lose_less_than_even_ones_at_two_bits() -> None:
    sent = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    lost = {
        type(codec): np.linalg.norm(there_and_back(codec, sent) - sent)
        for codec in (LevelValues(2), LinearValues(2))
    }
    assert lost[LevelValues] < 0.7 * lost[LinearValues]


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_dense_message_of_whole_pieces_has_their_tables_and_no_other(pieces: int) -> None:
    codec, tally = LevelValues(4), Tally.of_nobody(0)
    wire = DenseWire(num_parameters=0, values=codec)
    head = len(DenseWire(num_parameters=0, values=LinearValues(4)).encode_(torch.empty(0), tally))
    payload = wire.encode_(torch.ones(pieces * PIECE), tally)
    assert len(payload) == head + pieces * codec.num_bytes(PIECE)
    assert len(payload) == len(wire.encode_(torch.ones(pieces * PIECE, device="meta"), tally))


def test_values_beyond_single_precision_become_the_largest() -> None:
    decoded = there_and_back(LinearValues(4), np.array([1e300, -1e300]))
    assert decoded.tolist() == [np.finfo(np.float32).max, -np.finfo(np.float32).max]


@pytest.mark.parametrize("bits", [0, 3, 9])
def test_a_number_of_bits_that_cannot_be_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="1, 2, 4 or 8"):
        LinearValues(bits)


@pytest.mark.parametrize("density", [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001])
def test_indices_take_little_more_than_their_entropy(density: float) -> None:
    """Rice codes are within 3%, and bytes in their place at most an eighth more than they."""
    n = 4_000_000
    indices = np.flatnonzero(np.random.default_rng(1).random(n) < density)
    codec = GapIndices()
    layout, coded = codec.encode(indices, n)
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    bits = 8 * coded.nbytes / indices.size
    assert bits <= entropy * 1.03 * (1 if 0.0003 <= density <= 0.003 else 1 / 0.875)
    assert bits == pytest.approx(8 * codec.expected_bytes(indices.size, n) / indices.size, rel=0.03)
    assert (codec.decode(layout, coded.view(np.uint8), indices.size, n) == indices).all()


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=60), st.integers(0, 200), st.data())
def test_rice_codes_that_are_damaged_are_noticed_or_give_as_many_indices(
    places: set[int], cut: int, data: st.DataObject
) -> None:
    codec, indices = GapIndices(), np.array(sorted(places), np.int64)
    layout, coded = codec.encode(indices, 1 << 20)
    damaged = coded.view(np.uint8)[: coded.nbytes - cut % coded.nbytes].copy()
    damaged[data.draw(st.integers(0, damaged.size - 1))] ^= data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(layout, damaged, indices.size, 1 << 20)
    except WireError:
        return
    assert decoded.size == indices.size
