"""The gradient strategies on real processes and real sockets."""

from __future__ import annotations

from typing import Any

import gradient_jobs as jobs
import numpy as np
import pytest

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

Strategies = dict[str, tuple[str, dict[str, Any]]]

BASE: dict[str, Any] = {"replica_check_interval": 1}
SMALL_BUCKETS = BASE | {"bucket_mib": 1e-3, "first_bucket_mib": 1e-4}
SPARSE = BASE | {"density": 0.1}
STRATEGIES: Strategies = {
    "allreduce": ("allreduce", BASE),
    "allreduce in small buckets": ("allreduce", SMALL_BUCKETS),
    "topk": ("topk", SPARSE),
    "gtopk by reduce-scatter": ("gtopk", SPARSE | {"collective": "reduce_scatter"}),
    "gtopk by reduce-scatter, bfloat16, small buckets": (
        "gtopk",
        SPARSE | {"collective": "reduce_scatter", "values": "bfloat16", "bucket_mib": 1e-3},
    ),
    "gtopk by all-gather": ("gtopk", SPARSE | {"collective": "all_gather"}),
    "gtopk by tree": ("gtopk", SPARSE | {"collective": "tree"}),
    "gtopk dense": ("gtopk", SPARSE | {"collective": "dense", "bucket_mib": 1e-3}),
    "gtopk auto": ("gtopk", SPARSE),
}
PAIR: Strategies = {
    label: STRATEGIES[label] for label in ("allreduce in small buckets", "gtopk by reduce-scatter")
}
LOSSLESS: Strategies = {
    label: (name, options if name == "allreduce" else options | {"density": 1.0})
    for label, (name, options) in STRATEGIES.items()
    if options.get("values") != "bfloat16"
}


def by_strategy(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """From each rank's results by strategy to each strategy's results by rank."""
    return {label: [result[label] for result in results] for label in results[0]}


def assert_identical(results: list[dict[str, Any]], label: str) -> None:
    assert len({result["fingerprint"] for result in results}) == 1, f"{label}: the replicas differ"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_density_1_is_ddp(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(jobs.for_each, world_size, job="against_ddp", strategies=LOSSLESS)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert max(result["apart"] for result in ranks) < 1e-5, label


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_applied_plus_owed_is_the_sum_of_gradients(run_ranks: RunRanks, world_size: int) -> None:
    strategies = {
        label: spec for label, spec in STRATEGIES.items() if spec[0] == "gtopk" or label == "topk"
    }
    results = run_ranks(jobs.for_each, world_size, job="conservation", strategies=strategies)
    for label, ranks in by_strategy(results).items():
        computed = np.sum([result["computed"] for result in ranks], axis=0)
        owed = np.sum([result["owed"] for result in ranks], axis=0)
        applied = world_size * np.array(ranks[0]["applied"])
        assert np.abs(applied + owed - computed).sum() <= 1e-6 * np.abs(computed).sum(), label


def test_ranks_that_use_parts_of_the_model_or_nothing(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.for_each, 3, job="uneven_use", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert {result["exchanges"] for result in ranks} == {5}


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.for_each, 3, job="nonfinite", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert all(result["untouched"] and result["skipped"] == 1 for result in ranks), label


def test_an_exception_in_backward_reaches_the_peers_and_training_goes_on(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(jobs.for_each, 3, job="exception_in_backward", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert [result["heard"] for result in ranks] == ["PeerError", "MemoryError", "PeerError"], (
            label
        )


def test_two_models_in_one_process(run_ranks: RunRanks) -> None:
    for label, ranks in by_strategy(
        run_ranks(jobs.for_each, 2, job="gan", strategies=PAIR)
    ).items():
        assert_identical(ranks, label)


def test_two_groups_train_apart(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.for_each, 4, job="subgroup", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks[:2], label)
        assert_identical(ranks[2:], label)
        assert ranks[0]["fingerprint"] != ranks[2]["fingerprint"]
        assert {result["world_size"] for result in ranks} == {2}


def test_a_replica_that_drifts_is_found_and_named_on_every_rank(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.for_each, 3, job="diverged", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert {result["heard"] for result in ranks} == {"DivergedError"}, label
        assert all("ranks [1]" in result["message"] for result in ranks), label


def test_an_exception_in_the_loop_frees_the_peers_and_is_quoted(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.for_each, 3, job="exception_in_the_loop", strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert [result["heard"] for result in ranks] == ["PeerError", "ValueError", "PeerError"], (
            label
        )
        assert all("the data set ran dry" in result["message"] for result in ranks), label


@pytest.mark.parametrize("label", PAIR)
def test_a_killed_rank_is_named_by_every_survivor(run_ranks: RunRanks, label: str) -> None:
    name, options = PAIR[label]
    results = run_ranks(jobs.killed, 4, may_die={3}, name=name, options=options)
    assert [result["blamed"] for result in results[:3]] == [3, 3, 3]


def test_a_rank_that_runs_more_passes_is_found_out(run_ranks: RunRanks) -> None:
    name, options = STRATEGIES["gtopk by reduce-scatter"]
    results = run_ranks(
        jobs.more_passes_on_one_rank, 3, name=name, options=options | {"replica_check_interval": 0}
    )
    assert {result["heard"] for result in results} & {"MismatchError", "PeerError"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("model", "'weight'"),
        ("optimizer", "rank 1 refused: LBFGS"),
        ("lr", "'group 0 lr': 0.2 there, 0.1 on rank 0"),
        ("strategy", "density=0.5"),
        ("interface", "rank 1 refused"),
    ],
)
def test_a_mismatch_is_one_error_on_every_rank(run_ranks: RunRanks, fault: str, said: str) -> None:
    results = run_ranks(jobs.attach_error, 2, fault=fault)
    assert results[0]["kind"] == "MismatchError"
    assert said in results[0]["message"]
    own = {"optimizer": "UnsupportedError", "interface": "ConfigError"}
    assert results[1]["kind"] == own.get(fault, "MismatchError")
