"""Sums and means that are coded or weighted, and gossip."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.arithmetic.topologies import GossipPeers, exponential_peers, ring_weights
from offbeat.codec.dense_wire import PIECE, DenseWire
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.collectives import gossip
from offbeat.collectives.base import Exchanged
from offbeat.collectives.coded_sum import coded_sum
from offbeat.collectives.gossip import Block, neighbour_mean, push_sum
from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.errors import PeerError, WireError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.driver import Counting, Driver
from offbeat.transport.operations import Collective, Payload, Recv, Send, Traffic
from transport_support.wrappers import Failing, ScriptedFault

# The same bits on every rank, and what is lost is owed.


codecs = st.sampled_from(sorted(VALUE_CODECS))


def wire_of(name: str) -> DenseWire:
    return DenseWire(num_parameters=2, values=VALUE_CODECS[name])


def tally_of(rank: int) -> Tally:
    return Tally(
        weight=1.0 + rank, num_nonfinite=0, num_failed=0, used=np.array([rank == 0, rank == 1])
    )


def summed(
    vectors: Sequence[torch.Tensor], name: str, seed: int = 0
) -> list[Exchanged[torch.Tensor]]:
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


@pytest.mark.parametrize("name", sorted(VALUE_CODECS))
def test_a_vector_of_several_pieces_is_what_is_sent_and_what_is_owed(name: str) -> None:
    vector = torch.randn(2 * PIECE + 37, generator=torch.Generator().manual_seed(0))
    wire, owed, read = wire_of(name), vector.clone(), torch.zeros_like(vector)
    payload = wire.encode_(owed, tally_of(0))
    for _ in range(2):
        assert wire.decode_to(payload, read, adds=True).weight == 1
    torch.testing.assert_close(read / 2 + owed, vector, rtol=1e-6, atol=1e-6)
    wire.decode_to(payload, read)
    torch.testing.assert_close(read + owed, vector, rtol=1e-6, atol=1e-6)


@given(st.binary(max_size=120), codecs)
def test_random_bytes_are_refused(payload: bytes, name: str) -> None:
    with pytest.raises(WireError):
        wire_of(name).decode_to(payload, torch.zeros(5))


@given(codecs, st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_damaged_message_is_refused_or_has_as_many_values(
    name: str, place: int, flipped: int
) -> None:
    wire = wire_of(name)
    payload = bytearray(wire.encode_(torch.arange(1.0, 8.0), tally_of(0)))
    payload[place % len(payload)] ^= flipped
    for damaged in (payload, payload[:-1], payload + b"\0"):
        values = torch.zeros(7)
        try:
            wire.decode_to(damaged, values, adds=True)
        except WireError:
            assert not values.any()
            continue
        assert len(damaged) == len(payload)


# The same bits on every rank, and what a sum over all would give.


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


def traffic_of_mean(size: int, num_elements: int) -> list[Traffic]:
    """What each rank moves for the mean of float32 vectors."""
    counters: list[Counting] = []

    def count(driver: Driver) -> Counting:
        counters.append(Counting(driver))
        return counters[-1]

    model = np.ones(num_elements, np.float32)
    VirtualCluster(size).run(
        [
            weighted_mean(rank, [1.0] * size, model, num_elements=num_elements, dtype=model.dtype)
            for rank in range(size)
        ],
        wrap=count,
    )
    return [counter.traffic for counter in counters]


def test_no_rank_sends_more_than_its_share() -> None:
    size, num_elements = 5, 100
    assert [traffic.bytes_sent for traffic in traffic_of_mean(size, num_elements)] == [
        2 * (size - 1) * 4 * num_elements // size
    ] * size


def test_many_ranks_send_no_shorter_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.collectives.weighted_mean.FRAGMENT_BYTES", 64)
    monkeypatch.setattr("offbeat.collectives.weighted_mean.PART_BYTES", 32)
    for size in (2, 5, 16):
        for traffic in traffic_of_mean(size, 3 * 8 * size):
            assert traffic.bytes_sent == 32 * traffic.messages_sent


def test_of_fewer_elements_than_ranks_no_message_is_empty() -> None:
    size, num_elements = 5, 3
    sent = [traffic.messages_sent for traffic in traffic_of_mean(size, num_elements)]
    assert sum(sent) == 2 * (size - 1) * num_elements


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
    monkeypatch.setattr("offbeat.collectives.weighted_mean.PART_BYTES", 1)
    assert means() == whole


# What averaging with a few ranks promises, for 1 to 17 virtual ranks, under random schedules and
# random graphs.


cases = st.tuples(st.integers(1, 17), st.integers(0, 2**32 - 1))


def cluster_of(world_size: int, seed: int) -> VirtualCluster:
    return VirtualCluster(world_size, seed=seed, link=VirtualLink(latency_s=1e-3, jitter_s=1e-2))


def vectors(world_size: int, seed: int) -> list[list[Block]]:
    """Each rank's vector: a float32, a float64 and an empty block."""
    draw = np.random.default_rng(seed)
    return [
        [
            draw.standard_normal(7).astype(np.float32),
            draw.standard_normal(5),
            np.empty(0, dtype=np.float32),
        ]
        for _ in range(world_size)
    ]


def flat(vector: list[Block]) -> NDArray[np.float64]:
    return np.concatenate([block.astype(np.float64) for block in vector])


def random_graph(world_size: int, seed: int) -> list[GossipPeers]:
    """Any directed graph: some ranks send to nobody, some hear from many."""
    draw = np.random.default_rng(seed)
    edges = draw.random((world_size, world_size)) < 0.4
    np.fill_diagonal(edges, False)
    return [
        GossipPeers(
            tuple(np.flatnonzero(edges[rank]).tolist()),
            tuple(np.flatnonzero(edges[:, rank]).tolist()),
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("message_bytes", [24, 1 << 20])
@given(case=cases)
def test_neighbours_form_the_mean_that_the_ring_prescribes(
    message_bytes: int, case: tuple[int, int]
) -> None:
    world_size, seed = case
    mine = vectors(world_size, seed)
    kept = [flat(vector) for vector in mine]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gossip, "MESSAGE_BYTES", message_bytes)
        work = [
            neighbour_mean(rank, mine[rank], ring_weights(rank, world_size))
            for rank in range(world_size)
        ]
        means = cluster_of(world_size, seed).run(work)
    for rank, mean in enumerate(means):
        expected = sum(
            weight * kept[peer] for peer, weight in ring_weights(rank, world_size).items()
        )
        np.testing.assert_allclose(flat(mean), expected, rtol=1e-5, atol=1e-6)
        assert [block.dtype for block in mean] == [block.dtype for block in mine[rank]]
        np.testing.assert_array_equal(flat(mine[rank]), kept[rank])
    np.testing.assert_allclose(
        np.mean([flat(mean) for mean in means], axis=0), np.mean(kept, axis=0), atol=1e-6
    )


@pytest.mark.parametrize("blocks", [[], [np.empty(0, np.float32)]])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_vectors_without_elements_are_averaged(world_size: int, blocks: list[Block]) -> None:
    means = [
        neighbour_mean(rank, blocks, ring_weights(rank, world_size)) for rank in range(world_size)
    ]
    peers = [
        exponential_peers(rank, world_size, round_number=0, out_degree=1)
        for rank in range(world_size)
    ]
    pushed = [push_sum(of_rank, blocks, 1.0) for of_rank in peers]
    for mean in cluster_of(world_size, 0).run(means):
        assert [block.size for block in mean] == [0] * len(blocks)
    for vector, weight in cluster_of(world_size, 0).run(pushed):
        assert [block.size for block in vector] == [0] * len(blocks)
        assert weight == 1


@given(case=cases)
def test_weights_need_not_sum_to_one(case: tuple[int, int]) -> None:
    world_size, seed = case
    mine = vectors(world_size, seed)
    work = [
        neighbour_mean(r, mine[r], {peer: 3.0 + peer for peer in range(world_size)})
        for r in range(world_size)
    ]
    expected = np.average(
        [flat(vector) for vector in mine], axis=0, weights=3.0 + np.arange(world_size)
    )
    for mean in cluster_of(world_size, seed).run(work):
        np.testing.assert_allclose(flat(mean), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("graph", ["exponential", "random"])
@given(case=cases)
def test_push_sum_keeps_the_sums_of_x_and_of_w(graph: str, case: tuple[int, int]) -> None:
    world_size, seed = case
    draw = np.random.default_rng(seed)
    x, w = vectors(world_size, seed), draw.uniform(0.5, 2, world_size).tolist()
    before_x, before_w = np.sum([flat(vector) for vector in x], axis=0), sum(w)
    for round_number in range(6):
        if graph == "random":
            peers = random_graph(world_size, seed + round_number)
        else:
            degree = min(1 + seed % 4, max(world_size - 1, 1))
            peers = [
                exponential_peers(r, world_size, round_number=round_number, out_degree=degree)
                for r in range(world_size)
            ]
        work = [push_sum(peers[rank], x[rank], w[rank]) for rank in range(world_size)]
        outcomes = cluster_of(world_size, seed).run(work, channel=round_number)
        x, w = [list(vector) for vector, _ in outcomes], [weight for _, weight in outcomes]
    np.testing.assert_allclose(
        np.sum([flat(vector) for vector in x], axis=0), before_x, rtol=1e-5, atol=1e-5
    )
    assert sum(w) == pytest.approx(before_w, rel=1e-12)
    assert min(w) > 0


@pytest.mark.parametrize("world_size", [2, 3, 6, 17])
def test_push_sum_over_an_irregular_graph_still_finds_the_mean(world_size: int) -> None:
    """Without the weights, ranks that hear from many would count for more."""
    everyone = {rank: {(rank + 1) % world_size, 0} - {rank} for rank in range(world_size)}
    peers = [
        GossipPeers(
            tuple(sorted(everyone[rank])),
            tuple(source for source in range(world_size) if rank in everyone[source]),
        )
        for rank in range(world_size)
    ]
    x, w = vectors(world_size, seed=3), [1.0] * world_size
    expected = np.mean([flat(vector) for vector in x], axis=0)
    for round_number in range(400):
        outcomes = VirtualCluster(world_size).run(
            [push_sum(peers[rank], x[rank], w[rank]) for rank in range(world_size)],
            channel=round_number,
        )
        x, w = [list(vector) for vector, _ in outcomes], [weight for _, weight in outcomes]
    for vector, weight in zip(x, w, strict=True):
        np.testing.assert_allclose(flat(vector) / weight, expected, rtol=1e-3, atol=1e-4)
    assert world_size == 2 or max(w) - min(w) > 0.1


@pytest.mark.parametrize("message_bytes", [16, 40, 1 << 20])
def test_the_size_of_messages_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, message_bytes: int
) -> None:
    def outcomes() -> list[bytes]:
        x = vectors(5, seed=1)
        peers = [exponential_peers(rank, 5, round_number=1, out_degree=2) for rank in range(5)]
        results = VirtualCluster(5).run([push_sum(peers[rank], x[rank], 1.0) for rank in range(5)])
        return [flat(vector).tobytes() for vector, _ in results]

    expected = outcomes()
    monkeypatch.setattr(gossip, "MESSAGE_BYTES", message_bytes)
    assert outcomes() == expected


def test_alone_the_vector_and_its_weight_stay_what_they_are() -> None:
    (mine,) = vectors(1, seed=0)
    ((mean,),) = [VirtualCluster(1).run([neighbour_mean(0, mine, {0: 1.0})])]
    ((vector, weight),) = VirtualCluster(1).run([push_sum(GossipPeers((), ()), mine, 0.3)])
    assert flat(mean).tobytes() == flat(vector).tobytes() == flat(mine).tobytes()
    assert weight == 0.3


def test_a_model_of_another_size_is_refused() -> None:
    mine = [[np.ones(3)], [np.ones(4)]]
    outcomes = VirtualCluster(2).outcomes(
        [neighbour_mean(rank, mine[rank], ring_weights(rank, 2)) for rank in range(2)]
    )
    assert any(
        isinstance(outcome, WireError) and "same model" in str(outcome) for outcome in outcomes
    )


@pytest.mark.parametrize("operation", [Send, Recv])
def test_a_failing_rank_leaves_nobody_waiting(operation: type) -> None:
    mine = vectors(5, seed=2)
    faults = [ScriptedFault(rank=1, step=0, operation=operation, action="raise")]
    outcomes = VirtualCluster(5).outcomes(
        [neighbour_mean(rank, mine[rank], ring_weights(rank, 5)) for rank in range(5)],
        wrap=lambda driver: Failing(driver, faults),
    )
    assert isinstance(outcomes[1], PeerError)
    assert all(isinstance(outcome, list | PeerError) for outcome in outcomes)
