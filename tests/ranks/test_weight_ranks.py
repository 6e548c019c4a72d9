"""The strategies that average weights, on real processes and real sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import weight_jobs as jobs

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def by_label(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """From each rank's results by strategy to each strategy's results by rank."""
    return {label: [result[label] for result in results] for label in results[0]}


def assert_bytes_are_those_of_the_docstrings(
    results: dict[str, list[Any]], world_size: int
) -> None:
    net = jobs.make_net()
    vector_bytes = 4 * sum(t.numel() for t in net.state_dict().values() if t.is_floating_point())
    expected = {
        "localsgd": 2 * 2 * (world_size - 1) / world_size * vector_bytes,
        "dpsgd": jobs.NUM_STEPS * min(2, world_size - 1) * vector_bytes,
        "sgp": jobs.NUM_STEPS * vector_bytes,
        "sgp to everyone": jobs.NUM_STEPS * (world_size - 1) * vector_bytes,
    }
    for label, num_bytes in expected.items():
        for result in results[label]:
            assert num_bytes <= result["bytes_sent"] <= 1.1 * num_bytes, label


def test_the_start_phase_averages_over_samples(run_ranks: RunRanks) -> None:
    """Gradients of 0 over 1 sample and of 4 over 3 samples have the mean 3 over all samples."""
    assert run_ranks(jobs.weighed_start_phase, 2) == [3.0, 3.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_is_the_papers(run_ranks: RunRanks, world_size: int) -> None:
    results = by_label(run_ranks(jobs.against_the_paper, world_size))
    for label, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert max(result["errors"]) < 1e-5, f"{label}, rank {rank}"
    same = {
        label: [len(set(prints)) == 1 for prints in zip(*(r["prints"] for r in ranks), strict=True)]
        for label, ranks in results.items()
    }
    assert same["localsgd"] == [False, False, True, False, False, True, False]
    assert same["post-local sgd"] == [True, True, True, False, True, False, True]
    assert same["diloco"] == [False, True] * 3 + [False]
    assert all(same["localsgd in every step"])
    assert_bytes_are_those_of_the_docstrings(results, world_size)


def test_averaging_in_every_step_is_all_reducing_gradients(run_ranks: RunRanks) -> None:
    assert max(run_ranks(jobs.like_allreduce, 3)) < 1e-6


@pytest.mark.parametrize("world_size", [2, 3])
def test_averaging_keeps_the_mean_and_brings_ranks_together(
    run_ranks: RunRanks, world_size: int
) -> None:
    for label, ranks in by_label(run_ranks(jobs.mean_kept, world_size)).items():
        before, after = (
            np.array([result[when] for result in ranks]) for when in ("before", "after")
        )
        if label.startswith("post-local"):
            continue  # while gradients are exchanged, nobody looks at weights
        tolerance = 2e-2 if "bfloat16" in label else 1e-6
        np.testing.assert_allclose(
            after.mean(axis=0), before.mean(axis=0), atol=tolerance, err_msg=label
        )
        assert np.ptp(after, axis=0).max() <= 0.05 * np.ptp(before, axis=0).max() + 0.02, label


def test_the_averaged_model_is_the_mean_on_every_rank(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(jobs.averaged_model, 3)).items():
        for name in ranks[0]["own"]:
            own = np.array([result["own"][name] for result in ranks])
            expected = own.max(axis=0) if name.endswith("num_batches_tracked") else own.mean(axis=0)
            for result in ranks:
                np.testing.assert_allclose(
                    result["averaged"][name], expected, atol=1e-6, err_msg=f"{label}, {name}"
                )
            assert (
                ranks[0]["averaged"][name]
                == ranks[1]["averaged"][name]
                == ranks[2]["averaged"][name]
            ), label


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(jobs.resumed, 3)).items():
        assert ranks == [True] * 3, label


def test_a_rank_with_a_bad_gradient_or_no_batch_holds_nobody_up(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(jobs.nonfinite, 3)).items():
        assert all(result["finite"] for result in ranks), label
        assert [result["skipped"] for result in ranks] == [0, 1, 0], label
        assert [result["steps"] for result in ranks] == [7, 7, 7], label


def test_optimizer_state_that_only_some_ranks_have(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.uneven_optimizer_state, 3)
    assert [result["used"]["4.weight"] for result in results] == [True, False, False]
    assert all(result["used"]["3.weight"] for result in results)
    assert results[0]["moments"] == results[1]["moments"] == results[2]["moments"]
    assert len({result["fingerprint"] for result in results}) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("out_degree", "ConfigError", "out_degree must be below the number of ranks"),
        ("scaler", "UnsupportedError", "bfloat16 autocast"),
        ("differs", "MismatchError", "period=2"),
    ],
)
def test_what_cannot_work_is_one_error_on_every_rank(
    run_ranks: RunRanks, fault: str, kind: str, said: str
) -> None:
    for result in run_ranks(jobs.refused, 2, fault=fault):
        assert result["kind"] == kind
        assert said in result["message"]
        assert result["touched"] == "False"


def test_a_killed_rank_is_named_by_every_survivor(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.killed, 3, may_die={2})
    assert results[:2] == [[2], [2]]
