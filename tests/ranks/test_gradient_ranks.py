"""The gradient strategies on real processes and real sockets."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import offbeat
from conformance_support.lent import lent
from rank_jobs.gradients import (
    exception_in_backward,
    exception_in_the_loop,
    for_each,
    gan,
    killed,
    nonfinite,
    subgroup,
    uneven_closures,
    uneven_use,
)
from rank_jobs.regression import fingerprint, flat, loss_of, make_net, train
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

Strategies = dict[str, Any]
SMALL_BUCKETS = {"bucket_mib": 1e-3, "replica_check_interval": 1}
CHECKED = {"replica_check_interval": 1}
GTOPK = lent(offbeat.GTopK(density=0.1), **CHECKED)
STRATEGIES: Strategies = {
    "allreduce": lent(offbeat.AllReduce(), **CHECKED),
    "allreduce in small buckets": lent(offbeat.AllReduce(), **SMALL_BUCKETS),
    "dear": lent(offbeat.DeAR(), **SMALL_BUCKETS),
    "allreduce in 4 bits": lent(offbeat.AllReduce(codec="linear4"), **SMALL_BUCKETS),
    "allreduce by signs": lent(offbeat.AllReduce(codec="sign"), **CHECKED),
    "powersgd": lent(offbeat.PowerSGD(rank=1), **SMALL_BUCKETS),
    "demo": lent(offbeat.DeMo(density=0.1, decay=1.0, sign=False), **CHECKED),
    "topk": lent(offbeat.TopK(density=0.1), **CHECKED),
    "gtopk by reduce-scatter": replace(GTOPK, collective="reduce_scatter"),
    "gtopk by reduce-scatter, bfloat16, small buckets": lent(
        replace(GTOPK, collective="reduce_scatter", codec="bfloat16"), bucket_mib=1e-3
    ),
    "gtopk by all-gather": replace(GTOPK, collective="all_gather"),
    "gtopk by all-gather, the largest": replace(GTOPK, collective="global"),
    "gtopk by tree": replace(GTOPK, collective="tree"),
    "gtopk dense": lent(replace(GTOPK, collective="dense"), bucket_mib=1e-3),
    "gtopk auto": GTOPK,
    "gtopk as it comes": lent(offbeat.GTopK(), **CHECKED),
    "ef21": lent(offbeat.EF21(density=0.1), **CHECKED),
}
PAIR: Strategies = {
    label: STRATEGIES[label] for label in ("allreduce in small buckets", "gtopk by reduce-scatter")
}
LOSSLESS: Strategies = {
    label: replace(
        strategy, **{name: 1 for name in ("density", "ratio") if hasattr(strategy, name)}
    )
    for label, strategy in STRATEGIES.items()
    if not any(part in label for part in ("bfloat16", "bits", "signs", "powersgd", "as it comes"))
}


def by_strategy(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """From each rank's results by strategy to each strategy's results by rank."""
    return {label: [result[label] for result in results] for label in results[0]}


def assert_identical(results: list[dict[str, Any]], label: str) -> None:
    assert len({result["fingerprint"] for result in results}) == 1, f"{label}: the replicas differ"


@cache
def trained_with_ddp(rank: int) -> list[torch.nn.Parameter]:
    """Once in each process, for all strategies."""
    net = make_net(seed=0)
    ddp = DistributedDataParallel(net)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), rank, range(5))
    return list(net.parameters())


def against_ddp(rank: int, world_size: int, *, strategy: Any) -> dict[str, Any]:
    """Train with offbeat and with DDP on the same data; how far apart are the parameters?"""
    mine = make_net(seed=rank)  # attach must copy rank 0's
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    with offbeat.attach(mine, optimizer, strategy) as session:
        train(mine, optimizer, rank, range(5))
        bytes_sent = session.stats.bytes_sent
    apart = max(
        float((a - b).detach().abs().max())
        for a, b in zip(mine.parameters(), trained_with_ddp(rank), strict=True)
    )
    return {"apart": apart, "fingerprint": fingerprint(mine), "bytes_sent": bytes_sent}


def test_density_1_is_ddp(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 3, job=against_ddp, strategies=LOSSLESS)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert max(result["apart"] for result in ranks) < 1e-5, label


def signs_of_momentum(rank: int, world_size: int) -> dict[str, Any]:
    """Train with Adam, whose second moments are frozen halfway."""
    strategies = {
        "1-bit": offbeat.OneBitAdam(freeze_step=3),
        "0/1": offbeat.ZeroOneAdam(freeze_step=3, period=1),
    }
    return {label: signs_with(strategy, rank) for label, strategy in strategies.items()}


def signs_with(strategy: Any, rank: int) -> dict[str, Any]:
    net = make_net(seed=rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    sent, squares = [0], []
    with offbeat.attach(net, optimizer, strategy) as session:
        for step in range(6):
            train(net, optimizer, rank, range(step, step + 1))
            sent.append(session.stats.bytes_sent)
            squares.append(
                float(sum(each["exp_avg_sq"].sum() for each in optimizer.state.values()))
            )
    return {"fingerprint": fingerprint(net), "sent": np.diff(sent).tolist(), "squares": squares}


def test_signs_of_momentum_keep_replicas_identical(run_ranks: RunRanks) -> None:
    results = run_ranks(signs_of_momentum, 3)
    for label in ("1-bit", "0/1"):
        ranks = [result[label] for result in results]
        assert_identical(ranks, label)
        for result in ranks:
            assert len(set(result["squares"])) == 3
            assert max(result["sent"][4:]) < 0.5 * result["sent"][1]


def conservation(rank: int, world_size: int, *, strategy: Any) -> dict[str, Any]:
    """Over some steps: everything applied, owed and computed, as flat lists, for the test to add up
    over ranks.
    """
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = make_net()
    applied = computed = torch.zeros(
        sum(p.numel() for p in model.parameters()), dtype=torch.float64
    )
    with offbeat.attach(model, optimizer, strategy) as session:
        for step in range(4):
            loss_of(model, rank, step).backward()
            loss_of(plain, rank, step).backward()
            applied = applied + flat([p.grad for p in model.parameters()])
            computed = computed + flat([p.grad for p in plain.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
        state = session.state_dict()["callbacks"]["gradients"]["additive"]
    owed = flat([state[f"residual/{key}"] for key, _ in model.named_parameters()])
    return {"applied": applied.tolist(), "owed": owed.tolist(), "computed": computed.tolist()}


def test_applied_plus_owed_is_the_sum_of_gradients(run_ranks: RunRanks) -> None:
    strategies = {
        label: strategy
        for label, strategy in STRATEGIES.items()
        # These owe nothing, and DeMo owes cosine coefficients.
        if label not in ("allreduce", "allreduce in small buckets", "dear", "ef21", "demo")
    }
    results = run_ranks(for_each, 3, job=conservation, strategies=strategies)
    for label, ranks in by_strategy(results).items():
        computed = np.sum([result["computed"] for result in ranks], axis=0)
        owed = np.sum([result["owed"] for result in ranks], axis=0)
        applied = len(ranks) * np.array(ranks[0]["applied"])
        assert np.abs(applied + owed - computed).sum() <= 1e-6 * np.abs(computed).sum(), label


def test_what_an_all_gather_has_brought_is_applied(run_ranks: RunRanks) -> None:
    strategies = {
        "topk": STRATEGIES["topk"],
        "auto": STRATEGIES["gtopk by all-gather"],
        "union": replace(GTOPK, collective="all_gather"),
        "global": STRATEGIES["gtopk by all-gather, the largest"],
    }
    results = by_strategy(run_ranks(for_each, 3, job=against_ddp, strategies=strategies))
    found = {label: ranks[0]["fingerprint"] for label, ranks in results.items()}
    assert found["topk"] == found["auto"] == found["union"] != found["global"]
    sent = [ranks[0]["bytes_sent"] for ranks in results.values()]
    assert max(sent) - min(sent) <= 0.01 * max(sent)  # codes of indices depend on the indices


def test_ranks_that_use_parts_of_the_model_or_nothing(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 3, job=uneven_use, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert {result["exchanges"] for result in ranks} == {5}


def test_a_rank_whose_closure_runs_no_backward_pass_joins(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 2, job=uneven_closures, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert {result["exchanges"] for result in ranks} == {3}


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 3, job=nonfinite, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert all(result["untouched"] and result["skipped"] == 1 for result in ranks), label


def test_an_exception_in_backward_reaches_the_peers_and_training_goes_on(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(for_each, 3, job=exception_in_backward, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks, label)
        assert [result["heard"] for result in ranks] == ["PeerError", "MemoryError", "PeerError"], (
            label
        )


def test_two_models_in_one_process(run_ranks: RunRanks) -> None:
    for label, ranks in by_strategy(run_ranks(for_each, 2, job=gan, strategies=PAIR)).items():
        assert_identical(ranks, label)


def test_two_groups_train_apart(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 4, job=subgroup, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert_identical(ranks[:2], label)
        assert_identical(ranks[2:], label)
        assert ranks[0]["fingerprint"] != ranks[2]["fingerprint"]
        assert {result["world_size"] for result in ranks} == {2}


def diverged(rank: int, world_size: int, *, strategy: Any) -> dict[str, Any]:
    """Rank 1 changes a parameter behind the session's back."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, strategy):
            train(model, optimizer, rank, range(1))
            if rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] += 1e-6
            train(model, optimizer, rank, range(1, 3))
    except offbeat.OffbeatError as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}


def test_a_replica_that_drifts_is_found_and_named_on_every_rank(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 3, job=diverged, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert {result["heard"] for result in ranks} == {"DivergedError"}, label
        assert all("ranks [1]" in result["message"] for result in ranks), label


def test_an_exception_in_the_loop_frees_the_peers_and_is_quoted(run_ranks: RunRanks) -> None:
    results = run_ranks(for_each, 3, job=exception_in_the_loop, strategies=PAIR)
    for label, ranks in by_strategy(results).items():
        assert [result["heard"] for result in ranks] == ["PeerError", "ValueError", "PeerError"], (
            label
        )
        assert all("the data set ran dry" in result["message"] for result in ranks), label


@pytest.mark.parametrize("label", PAIR)
def test_a_killed_rank_is_named_by_every_survivor(run_ranks: RunRanks, label: str) -> None:
    results = run_ranks(killed, 4, may_die={3}, strategy=PAIR[label])
    assert [result["blamed"] for result in results[:3]] == [3, 3, 3]


def more_passes_on_one_rank(rank: int, world_size: int, *, strategy: Any) -> dict[str, Any]:
    """Rank 1 runs one synchronised backward pass too many."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with offbeat.attach(model, optimizer, strategy):
            train(model, optimizer, rank, range(1))
            for _ in range(2 if rank == 1 else 1):
                loss_of(model, rank, 1).backward()
            optimizer.step()
            if rank != 1:
                return {"heard": "", "message": ""}
    except offbeat.OffbeatError as error:
        return {"heard": type(error).__name__, "message": str(error)}
    return {"heard": "", "message": ""}


def test_a_rank_that_runs_more_passes_is_found_out(run_ranks: RunRanks) -> None:
    strategy = lent(replace(GTOPK, collective="reduce_scatter"), replica_check_interval=0)
    results = run_ranks(more_passes_on_one_rank, 3, strategy=strategy)
    assert {result["heard"] for result in results} & {"MismatchError", "PeerError"}


def attach_errors(rank: int, world_size: int, *, faults: list[str]) -> list[dict[str, Any]]:
    """Rank 1 builds something else than the others, one thing after the other. What does everyone
    hear?
    """
    return [attach_error(rank, fault) for fault in faults]


def attach_error(rank: int, fault: str) -> dict[str, Any]:
    odd = rank == 1
    model = torch.nn.Linear(6, 4 if odd and fault == "model" else 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if odd and fault == "lr" else 0.1)
    if odd and fault == "optimizer":
        optimizer = torch.optim.LBFGS(model.parameters())
    if odd and fault == "foreign parameters":
        optimizer = torch.optim.SGD(torch.nn.Linear(6, 3).parameters(), lr=0.1)
    interface = {"OFFBEAT_INTERFACE": "no-such-interface"} if odd and fault == "interface" else {}
    strategy = offbeat.GTopK(density=0.5 if odd and fault == "strategy" else 0.1)
    try:
        with patch.dict(os.environ, interface):
            offbeat.attach(model, optimizer, strategy)
    except offbeat.OffbeatError as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none", "message": ""}


MISMATCHES = {
    "model": "'weight'",
    "optimizer": "rank 1 refused: LBFGS",
    "foreign parameters": "rank 1 refused: 2 of the optimizer's parameters are not",
    "lr": "'group 0 lr': 0.2 there, 0.1 on rank 0",
    "strategy": "density=0.5",
    "interface": "rank 1 refused",
}
OWN_ERRORS = {
    "optimizer": "UnsupportedError",
    "foreign parameters": "ConfigError",
    "interface": "ConfigError",
}
"""What rank 1 hears, where that is something else than a mismatch."""


def test_a_mismatch_is_one_error_on_every_rank(run_ranks: RunRanks) -> None:
    heard = run_ranks(attach_errors, 2, faults=[*MISMATCHES])
    for (fault, said), first, odd in zip(MISMATCHES.items(), *heard, strict=True):
        assert first["kind"] == "MismatchError", fault
        assert said in first["message"], fault
        assert odd["kind"] == OWN_ERRORS.get(fault, "MismatchError"), fault
