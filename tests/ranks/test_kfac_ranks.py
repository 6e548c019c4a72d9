"""K-FAC on real processes: what many ranks do together is what one does with all their examples."""

from __future__ import annotations

from functools import cache
from typing import Any

import gradient_jobs
import kfac_jobs as jobs
import numpy as np
import pytest
import torch

from kfac_support import reference
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

HYPER: dict[str, Any] = {
    "damping": 0.01,
    "kl_clip": 0.01,
    "decay": 0.9,
    "factor_interval": 1,
    "inverse_interval": 2,
}
EVERY_STEP = {"inverse_interval": 1}
NAMES = {
    "dkfac": ("dkfac", {}),
    "mpdkfac": ("mpdkfac", {}),
    "spdkfac": ("spdkfac", {}),
    "spdkfac, unfused": ("spdkfac", {"fusion": "none"}),
    "spdkfac, the paper's rules": ("spdkfac", {"fusion": "rule", "placement": "rule"}),
    "dpkfac": ("dpkfac", {"factors": "everyone"}),
}
EIGEN = HYPER | {"inverse": "eigen"}
ROUNDED = HYPER | {"inverse_dtype": "bfloat16", "sample_stride": 2}
STRATEGIES = {label: (name, HYPER | options) for label, (name, options) in NAMES.items()}
SHORT = {
    label: (name, EVERY_STEP | options)
    for label, (name, options) in NAMES.items()
    if "," not in label
}
LOCAL = SHORT | {"dpkfac as published": ("dpkfac", EVERY_STEP)}


@cache
def one_process(
    world_size: int, steps: int, *, same_data: bool = False, inverse: str = "cholesky"
) -> np.ndarray:
    """The slow reference on the ranks' examples together."""
    net = reference.make_net(seed=0)
    ranks = [0] if same_data else range(world_size)
    batches = [
        reference.together([reference.batch_of(rank, step) for rank in ranks])
        for step in range(steps)
    ]
    reference.train(net, batches, lr=0.05, inverse=inverse, **HYPER)
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


def assert_identical(results: list[dict[str, Any]]) -> None:
    for label in results[0]:
        assert len({result[label]["fingerprint"] for result in results}) == 1, (
            f"{label}: the replicas differ"
        )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_ranks_do_what_one_does_with_all_examples(
    run_ranks: RunRanks, world_size: int
) -> None:
    results = run_ranks(jobs.train, world_size, strategies=STRATEGIES, steps=6, lr=0.05)
    assert_identical(results)
    expected = one_process(world_size, 6)
    for label, result in results[0].items():
        np.testing.assert_allclose(
            result["parameters"], expected, rtol=1e-8, atol=1e-10, err_msg=label
        )
    for noted in [
        {label: outcome["noted"] for label, outcome in result.items()} for result in results
    ]:
        assert noted["spdkfac, unfused"]["sum"] == noted["spdkfac, unfused"]["factor"] == 6
        assert {label for label, kinds in noted.items() if "broadcast" in kinds} >= {
            "mpdkfac",
            "dpkfac",
        }
        assert "broadcast" not in noted["dkfac"]
        assert all(kinds["precondition"] == 1 for kinds in noted.values())
    assert set(results[0]["mpdkfac"]["owners"]) == set(range(world_size))
    assert set(results[0]["dkfac"]["owners"]) == {None}
    assert results[0]["spdkfac, unfused"]["num_groups"] == 6
    for what in ("num_kept", "num_in_memory"):
        assert sum(result["dpkfac"][what] for result in results) == results[0]["spdkfac"][what], (
            "owners share the state"
        )


def test_factors_of_one_rank_are_as_good_where_all_see_the_same(run_ranks: RunRanks) -> None:
    strategies = {"dpkfac": ("dpkfac", HYPER), "dkfac": ("dkfac", HYPER)}
    results = run_ranks(jobs.train, 3, strategies=strategies, steps=4, lr=0.05, same_data=True)
    assert_identical(results)
    for result in results[0].values():
        np.testing.assert_allclose(
            result["parameters"], one_process(3, 4, same_data=True), rtol=1e-8, atol=1e-10
        )


def test_other_forms_travel_like_inverses(run_ranks: RunRanks) -> None:
    """Decompositions, and inverses in bfloat16, here of half of the examples."""
    plain = {label: (name, options) for label, (name, options) in NAMES.items() if "," not in label}
    strategies = {label: (name, EIGEN | options) for label, (name, options) in plain.items()}
    strategies |= {
        f"{label}, rounded": (name, ROUNDED | options) for label, (name, options) in plain.items()
    }
    results = run_ranks(jobs.train, 3, strategies=strategies, steps=4, lr=0.05)
    assert_identical(results)
    expected, rounded = (
        one_process(3, 4, inverse="eigen"),
        results[0]["dkfac, rounded"]["parameters"],
    )
    for label, result in results[0].items():
        if label in plain:
            np.testing.assert_allclose(
                result["parameters"], expected, rtol=1e-8, atol=1e-10, err_msg=label
            )
        else:
            np.testing.assert_allclose(
                result["parameters"], rounded, rtol=1e-3, atol=1e-4, err_msg=label
            )


def test_a_step_in_two_passes_is_one_step(run_ranks: RunRanks) -> None:
    strategies = {label: STRATEGIES[label] for label in ("dkfac", "spdkfac")}
    results = run_ranks(jobs.accumulating, 2, strategies=strategies)
    assert_identical(results)
    net = reference.make_net()
    batches = [
        reference.together([reference.batch_of(rank, step) for rank in (0, 1)]) for step in range(6)
    ]
    reference.train(net, batches, lr=0.05, **HYPER)
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for label, result in results[0].items():
        np.testing.assert_allclose(
            result["parameters"], expected, rtol=1e-8, atol=1e-10, err_msg=label
        )


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(run_ranks: RunRanks) -> None:
    strategies = {
        label: (
            name,
            {
                **HYPER,
                "inverse_interval": 4,
                **options,
                **({"fusion": "all"} if name == "spdkfac" else {}),
            },
        )
        for label, (name, options) in LOCAL.items()
    }
    for result in run_ranks(jobs.resumed, 3, strategies=strategies):
        for label, ends in result.items():
            assert ends["straight"] == ends["resumed"], label


def test_trouble_with_a_factor_keeps_ranks_alike(run_ranks: RunRanks) -> None:
    calls = {
        kind: ("trouble", {"strategies": LOCAL, "kind": kind})
        for kind in ("retired", "indefinite", "nan factor")
    }
    outcomes = run_ranks(jobs.several, 3, calls=calls)
    for kind in calls:
        results = [outcome[kind] for outcome in outcomes]
        assert_identical(results)
        assert all(outcome["finite"] for result in results for outcome in result.values())
        said = {"retired": "no longer preconditions", "indefinite": "not positive definite"}.get(
            kind
        )
        for label in SHORT if said else ():
            assert any(
                said in notice for result in results for notice in result[label]["notices"]
            ), label
    for rank in (0, 2):
        assert "on another rank" in str(outcomes[rank]["retired"]["spdkfac"]["notices"])


def test_ranks_on_unlike_devices_send_directions(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.unlike_devices, 2, strategies=STRATEGIES)
    assert_identical(results)
    assert all(
        "different kinds" in str(outcome["notices"])
        for result in results
        for outcome in result.values()
    )
    for label, result in results[0].items():
        np.testing.assert_allclose(
            result["parameters"], one_process(2, 3), rtol=1e-8, atol=1e-10, err_msg=label
        )


def test_what_befalls_gradients_befalls_factors(run_ranks: RunRanks) -> None:
    expected: dict[str, tuple[str, set[Any]]] = {
        "uneven_use": ("exchanges", {5}),
        "nonfinite": ("skipped", {1}),
        "exception_in_backward": ("heard", {"MemoryError", "PeerError"}),
    }
    calls = {job: ("for_each", {"job": job, "strategies": LOCAL}) for job in (*expected, "gan")}
    outcomes = run_ranks(jobs.several, 3, calls=calls)
    for job in calls:
        results = [outcome[job] for outcome in outcomes]
        assert_identical(results)
        if job in expected:
            key, values = expected[job]
            assert {outcome[key] for result in results for outcome in result.values()} == values, (
                job
            )


def test_two_halves_of_the_world_train_apart(run_ranks: RunRanks) -> None:
    results = run_ranks(
        gradient_jobs.for_each, 4, job="subgroup", strategies={"spdkfac": SHORT["spdkfac"]}
    )
    for half in (0, 1):
        assert (
            len(
                {
                    result["spdkfac"]["fingerprint"]
                    for result in results
                    if result["spdkfac"]["half"] == half
                }
            )
            == 1
        )


@pytest.mark.parametrize("job", ["exception_in_the_loop", "killed"])
def test_a_rank_that_goes_is_an_error_on_the_others(run_ranks: RunRanks, job: str) -> None:
    may_die = (2,) if job == "killed" else ()
    results = run_ranks(
        getattr(gradient_jobs, job), 3, may_die=may_die, name="spdkfac", options=EVERY_STEP
    )
    for result in results[:1]:
        assert result["message"]


def test_sparse_gradients_and_dense_factors(run_ranks: RunRanks) -> None:
    strategies = {
        name: (name, EVERY_STEP | {"exchange": "gtopk"}) for name in ("dkfac", "spdkfac", "dpkfac")
    }
    assert_identical(run_ranks(jobs.train, 3, strategies=strategies, steps=5, lr=0.05))
