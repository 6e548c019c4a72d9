"""The same bits on every rank, and what a sum over all would give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.errors import WireError
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Counting
from offbeat.transport.operations import Collective, Payload, Send

weights_of_ranks = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=7).filter(
    any
)


@given(
    weights_of_ranks,
    st.integers(0, 40),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 99),
)
def test_everyone_has_the_weighted_mean(
    weights: list[float], num_elements: int, kind: str, seed: int
) -> None:
    dtype = np.dtype(kind)
    models = np.random.default_rng(seed).normal(size=(len(weights), num_elements)).astype(dtype)
    means = VirtualCluster(len(weights), seed=seed).run(
        [
            weighted_mean(
                rank,
                weights,
                models[rank] if weight else None,
                num_elements=num_elements,
                dtype=dtype,
            )
            for rank, weight in enumerate(weights)
        ]
    )
    assert len({mean.tobytes() for mean in means}) == 1
    np.testing.assert_allclose(
        means[0], np.average(models, axis=0, weights=weights), rtol=1e-5, atol=1e-5
    )


def test_alone_nothing_is_rounded_and_nothing_is_sent() -> None:
    model = np.array([0.1, -1e-30, 3.3], np.float32)
    (mean,) = VirtualCluster(1).run(
        [weighted_mean(0, [0.3], model, num_elements=3, dtype=model.dtype)]
    )
    assert mean.tobytes() == model.tobytes()
    assert not np.shares_memory(mean, model)


def test_no_rank_sends_more_than_its_share() -> None:
    size, num_elements = 5, 100
    counters: list[Counting] = []

    def count(driver: object) -> Counting:
        counters.append(Counting(driver))  # type: ignore[arg-type]  # one of the cluster's drivers
        return counters[-1]

    model = np.ones(num_elements, np.float32)
    VirtualCluster(size).run(
        [
            weighted_mean(rank, [1.0] * size, model, num_elements=num_elements, dtype=model.dtype)
            for rank in range(size)
        ],
        wrap=count,
    )
    assert [counter.traffic.bytes_sent for counter in counters] == [
        2 * (size - 1) * 4 * num_elements // size
    ] * size


def test_a_part_of_another_length_is_named() -> None:
    def wrong() -> Collective[Payload]:
        yield Send(0, b"abc")
        return b""

    model = np.ones(4, np.float32)
    with pytest.raises(WireError, match="rank 1 sent 3 bytes of a mean"):
        VirtualCluster(2).run(
            [weighted_mean(0, [1.0, 1.0], model, num_elements=4, dtype=model.dtype), wrong()]
        )  # type: ignore[list-item]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_long_vector_goes_a_few_elements_at_a_time_to_the_same_bits(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = np.random.default_rng(size).normal(size=(size, 50)).astype(np.float32)

    def means() -> list[bytes]:
        return [
            mean.tobytes()
            for mean in VirtualCluster(size, seed=size).run(
                [
                    weighted_mean(
                        rank, range(1, size + 1), model, num_elements=50, dtype=model.dtype
                    )
                    for rank, model in enumerate(models)
                ]
            )
        ]

    whole = means()
    monkeypatch.setattr("offbeat.collectives.weighted_mean.FRAGMENT_BYTES", 28)
    assert means() == whole
