"""Gradients that have other rows on each rank: exchanged as dense ones, or left alone where weights are averaged."""

from __future__ import annotations

import pytest
import sparse_jobs as jobs

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def test_exchanged_gradients_are_those_of_all_batches_together(run_ranks: RunRanks) -> None:
    strategies = {
        "allreduce": ("allreduce", {"replica_check_interval": 1}),
        "small buckets": ("allreduce", {"bucket_mib": 1e-4, "first_bucket_mib": 1e-4}),
        "gtopk": ("gtopk", {"density": 1.0, "collective": "reduce_scatter"}),
        "ddp": ("ddp", {}),
    }
    ranks = run_ranks(jobs.exchange, 2, strategies=strategies)
    for label in strategies:
        assert max(result[label]["distance"] for result in ranks) < 1e-5, label
        assert len({result[label]["print"] for result in ranks}) == 1, label


def test_weights_are_averaged_and_gradients_stay_sparse(run_ranks: RunRanks) -> None:
    ranks = run_ranks(jobs.average, 2, period=3)
    assert max(distance for result in ranks for distance in result["distances"]) < 1e-6
    assert all(result["sparse"] for result in ranks)
    assert len({result["print"] for result in ranks}) == 1
