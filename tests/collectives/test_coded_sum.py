"""The same bits on every rank, and what is lost is owed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.collectives.coded_sum import CodedSum, coded_sum
from offbeat.errors import WireError
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Counting, Driver

codecs = st.sampled_from(sorted(VALUE_CODECS))


def wire_of(name: str) -> DenseWire:
    return DenseWire(num_parameters=2, values=VALUE_CODECS[name])


def tally_of(rank: int) -> Tally:
    return Tally(
        weight=1.0 + rank, num_nonfinite=0, num_failed=0, used=np.array([rank == 0, rank == 1])
    )


def summed(vectors: Sequence[torch.Tensor], name: str, seed: int = 0) -> list[CodedSum]:
    size = len(vectors)
    return VirtualCluster(size, seed=seed).run(
        [
            coded_sum(
                rank,
                size,
                vector.clone(),
                tally_of(rank),
                wire_of(name),
                kept=torch.full_like(vector, torch.nan),
            )
            for rank, vector in enumerate(vectors)
        ]
    )


@given(st.integers(1, 7), st.integers(0, 60), codecs, st.booleans(), st.integers(0, 99))
def test_nothing_is_lost(size: int, n: int, name: str, double: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    vectors = [torch.randn(n, generator=generator, dtype=dtype) for _ in range(size)]
    results = summed(vectors, name, seed)
    for result in results:
        assert torch.equal(result.kept, results[0].kept)
        assert result.tally.weight == sum(1.0 + rank for rank in range(size))
        assert result.tally.used.tolist() == [True, size > 1]
    owed = torch.stack([result.owed for result in results]).sum(0)
    torch.testing.assert_close(
        results[0].kept + owed, torch.stack(vectors).sum(0), rtol=1e-5, atol=1e-5
    )


def test_whole_numbers_are_summed_as_they_are() -> None:
    vectors = [torch.arange(10.0) * (rank + 1) for rank in range(3)]
    for result in summed(vectors, "float32"):
        assert torch.equal(result.kept, torch.arange(10.0) * 6)
        assert not result.owed.any()


def test_signs_take_a_thirtieth_of_what_numbers_take() -> None:
    size, n = 4, 100_000

    def bytes_sent(name: str) -> int:
        counters: list[Counting] = []

        def count(driver: Driver) -> Counting:
            counters.append(Counting(driver))
            return counters[-1]

        wire, vector = wire_of(name), torch.randn(n)
        VirtualCluster(size).run(
            [
                coded_sum(rank, size, vector.clone(), tally_of(rank), wire, kept=vector.clone())
                for rank in range(size)
            ],
            wrap=count,
        )
        return counters[0].traffic.bytes_sent

    assert bytes_sent("sign") < bytes_sent("float32") / 30
    assert bytes_sent("float32") == pytest.approx(2 * 3 / 4 * 4 * n, rel=0.01)


@given(st.binary(max_size=120), codecs)
def test_random_bytes_are_refused(payload: bytes, name: str) -> None:
    with pytest.raises(WireError):
        wire_of(name).decode(payload, torch.zeros(5))


@given(codecs, st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_damaged_message_is_refused_or_has_as_many_values(
    name: str, place: int, flipped: int
) -> None:
    wire = wire_of(name)
    payload = bytearray(wire.encode(torch.arange(1.0, 8.0), tally_of(0))[0])
    payload[place % len(payload)] ^= flipped
    for damaged in (payload, payload[:-1], payload + b"\0"):
        try:
            values, _ = wire.decode(damaged, torch.zeros(7))
        except WireError:
            continue
        assert len(damaged) == len(payload)
        assert values.shape == (7,)
