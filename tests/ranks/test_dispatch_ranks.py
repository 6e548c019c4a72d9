"""Samples claimed by real processes of uneven speeds, and gradients averaged over samples."""

from __future__ import annotations

from typing import Any

import dispatch_jobs as jobs
import numpy as np
import pytest

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def samples_of(work: dict[str, Any]) -> int:
    return sum(end - begin for claim in work["claims"] for begin, end in claim["spans"])


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_sample_is_seen_once_an_epoch_and_models_meet(
    run_ranks: RunRanks, world_size: int
) -> None:
    ranks = run_ranks(jobs.epochs, world_size)
    for label in ranks[0]:
        results = [rank[label] for rank in ranks]
        orders = []
        for epoch in range(2):
            seen = [index for result in results for index in result["seen"][epoch]]
            assert sorted(seen) == list(range(jobs.NUM_SAMPLES)), label
            orders.append(seen)
        assert orders[0] != orders[1], label
        assert all(
            len({result["prints"][merge] for result in results}) == 1 for merge in range(6)
        ), label
        assert len(set(results[0]["prints"])) == 6, label
        assert [(result["epoch"], result["lr"], result["exchanges"]) for result in results] == [
            (2, 0.05, 6)
        ] * world_size
        for result in results:
            assert result["works"] == results[0]["works"], label
        assert [sum(map(samples_of, works)) for works in results[0]["works"]] == [34, 34, 35] * 2, (
            label
        )


def test_a_slow_worker_gets_less(run_ranks: RunRanks) -> None:
    ranks = run_ranks(jobs.epochs, 3)
    for label in ("proportional", "hogbatch", "momentum"):
        works = ranks[0][label]["works"]
        taken = [sum(samples_of(mega_batch[rank]) for mega_batch in works) for rank in range(3)]
        assert taken[2] < min(taken[:2]), label
        sizes = [[work["batch_size"] for work in mega_batch] for mega_batch in works]
        assert sizes[0] == [4, 4, 4]
        assert sizes[-1][2] < max(sizes[-1][:2]), label
    shares = [
        [samples_of(work) for work in mega_batch] for mega_batch in ranks[0]["elastic"]["works"]
    ]
    assert max(max(share) - min(share) for share in shares) <= 1


def test_a_run_resumes_in_the_middle_of_a_mega_batch_and_can_be_replayed(
    run_ranks: RunRanks,
) -> None:
    ranks = run_ranks(jobs.resumed, 2)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(
        range(jobs.NUM_SAMPLES)
    )
    assert len({rank["print"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["replayed"] == rank["print"]


def test_states_from_both_sides_of_a_merge_are_refused(run_ranks: RunRanks) -> None:
    for said in run_ranks(jobs.apart, 2):
        assert "different mega-batches" in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("length", "'samples': 99 there, 103 on rank 0"),
        ("stream", "must be of map style"),
        ("seed", "'seed': 5 there, 0 on rank 0"),
        ("memory", "max_batch_size must be an integer of at least 1, got 0"),
        ("bounds", "rank 1 can hold batches of 2 samples, but min_batch_size is 4"),
        ("too few", "1 samples cannot be shared by 2 ranks"),
    ],
)
def test_bad_input_is_one_error_on_every_rank(run_ranks: RunRanks, fault: str, said: str) -> None:
    for result in run_ranks(jobs.refused, 2, fault=fault):
        assert said in result[1]


def test_the_mean_of_means_is_wrong_and_the_mean_over_samples_is_not(run_ranks: RunRanks) -> None:
    for result in run_ranks(jobs.unequal_batches, 2):
        alone = np.concatenate(result["alone"])
        np.testing.assert_allclose(np.concatenate(result["True"]), alone, rtol=1e-5, atol=1e-7)
        assert np.abs(np.concatenate(result["False"]) - alone).max() > 0.1 * np.abs(alone).max()


def test_ranks_keep_step_with_unequal_batches(run_ranks: RunRanks) -> None:
    ranks = run_ranks(jobs.lockstep, 2)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(
        range(jobs.NUM_SAMPLES)
    )
    assert (
        ranks[0]["steps"] == ranks[1]["steps"] == len(ranks[0]["sizes"]) == len(ranks[1]["sizes"])
    )
    assert set(ranks[0]["sizes"]) <= {1, 2}
    assert set(ranks[1]["sizes"]) <= {6, 7}
    for rank in ranks:
        assert rank["again"] == rank["seen"][sum(rank["sizes"][:3]) :]
    assert ranks[0]["print"] == ranks[1]["print"]


def test_a_rank_without_samples_has_no_weight(run_ranks: RunRanks) -> None:
    for got, alone in run_ranks(jobs.idle, 3):
        np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world_size", [1, 3])
def test_models_are_drawn_to_the_central_model_as_in_the_paper(
    run_ranks: RunRanks, world_size: int
) -> None:
    assert max(result["error"] for result in run_ranks(jobs.drawn_together, world_size)) < 1e-5
