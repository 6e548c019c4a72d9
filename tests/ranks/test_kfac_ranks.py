"""K-FAC on real processes: what many ranks do together is what one does with all their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from kfac_support import reference
from kfac_support.plans import ByThePapersRules, FactorsOfEveryone, FullyFused, Unfused
from kfac_support.reference import batch_of, loss_of, make_net
from offbeat import Session
from offbeat.kfac.callback import KFACCallback
from offbeat.strategies.base import Strategy
from rank_jobs import gradients
from rank_jobs.regression import fingerprint
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

Strategies = dict[str, Strategy]

HYPER: dict[str, Any] = {
    "damping": 0.01,
    "kl_clip": 0.01,
    "decay": 0.9,
    "factor_interval": 1,
    "inverse_interval": 2,
}
ROUNDED = HYPER | {"inverse_dtype": "bfloat16", "sample_stride": 2}


def plain(**options: Any) -> Strategies:
    """The four strategies, with `options`."""
    return {
        "dkfac": offbeat.DKFAC(**reference.options(**options)),
        "mpdkfac": offbeat.MPDKFAC(**reference.options(**options)),
        "spdkfac": offbeat.SPDKFAC(**reference.options(**options)),
        "dpkfac": FactorsOfEveryone(**reference.options(**options)),
    }


STRATEGIES = plain(**HYPER) | {
    "spdkfac, unfused": Unfused(**reference.options(**HYPER)),
    "spdkfac, the paper's rules": ByThePapersRules(**reference.options(**HYPER)),
}
SHORT: Strategies = {
    "dkfac": offbeat.DKFAC(inverse_interval=1),
    "spdkfac": offbeat.SPDKFAC(inverse_interval=1),
}
LOCAL = SHORT | {"dpkfac as published": offbeat.DPKFAC(inverse_interval=1)}
"""Where every rank inverts, where owners do, and where factors stay with their rank: what goes
wrong beside the plan does not depend on more of it.
"""


@cache
def one_process(world_size: int, steps: int, *, same_data: bool = False) -> np.ndarray:
    """The slow reference on the ranks' examples together."""
    net = reference.make_net(seed=0)
    ranks = [0] if same_data else range(world_size)
    batches = [
        reference.together([reference.batch_of(rank, step) for rank in ranks])
        for step in range(steps)
    ]
    reference.train(net, batches, lr=0.05, **HYPER)
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()


def assert_identical(results: Sequence[dict[str, Any]]) -> None:
    for label in results[0]:
        assert len({result[label]["fingerprint"] for result in results}) == 1, (
            f"{label}: the replicas differ"
        )


def part_of(session: Session) -> KFACCallback:
    return next(part for part in session.callbacks if isinstance(part, KFACCallback))


def step_(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss_of(model, batch_of(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    rank: int,
    world_size: int,
    *,
    strategies: Strategies,
    steps: int,
    lr: float,
    same_data: bool = False,
) -> dict[str, Any]:
    """Train with several strategies, one after the other."""
    results = {}
    for label, strategy in strategies.items():
        model = make_net(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with offbeat.attach(model, optimizer, strategy) as session:
            for step in range(steps):
                step_(model, optimizer, 0 if same_data else rank, step)
            plan = part_of(session).plan
            state = session.state_dict()["callbacks"]["kfac"]
            results[label] = {
                "parameters": torch.cat(
                    [p.detach().flatten() for p in model.parameters()]
                ).tolist(),
                "fingerprint": fingerprint(model),
                "owners": plan.owners,
                "num_groups": len(plan.groups),
                "num_kept": sum(
                    t.numel()
                    for kept in state.values()
                    for t in kept.values()
                    if isinstance(t, torch.Tensor)
                ),
                "num_in_memory": sum(
                    factor.weighted_sum.numel()
                    for factor in part_of(session).averages.factors.values()
                )
                + sum(
                    kept.numel()
                    for kept in part_of(session).preconditioner.inverses.packed
                    if kept is not None
                ),
                "notices": session.notices,
            }
    return results


@pytest.mark.parametrize("world_size", [3])
def test_many_ranks_do_what_one_does_with_all_examples(
    run_ranks: RunRanks, world_size: int
) -> None:
    results = run_ranks(train, world_size, strategies=STRATEGIES, steps=6, lr=0.05)
    assert_identical(results)
    expected = one_process(world_size, 6)
    for label, result in results[0].items():
        np.testing.assert_allclose(
            result["parameters"], expected, rtol=1e-8, atol=1e-10, err_msg=label
        )
    assert set(results[0]["mpdkfac"]["owners"]) == set(range(world_size))
    assert set(results[0]["dkfac"]["owners"]) == {None}
    assert results[0]["spdkfac, unfused"]["num_groups"] == 6
    for what in ("num_kept", "num_in_memory"):
        assert sum(result["dpkfac"][what] for result in results) == results[0]["spdkfac"][what], (
            "owners share the state"
        )


def test_factors_of_one_rank_are_as_good_where_all_see_the_same(run_ranks: RunRanks) -> None:
    strategies = {
        "dpkfac": offbeat.DPKFAC(**reference.options(**HYPER)),
        "dkfac": offbeat.DKFAC(**reference.options(**HYPER)),
    }
    results = run_ranks(train, 3, strategies=strategies, steps=4, lr=0.05, same_data=True)
    assert_identical(results)
    for result in results[0].values():
        np.testing.assert_allclose(
            result["parameters"], one_process(3, 4, same_data=True), rtol=1e-8, atol=1e-10
        )


def test_inverses_in_bfloat16_travel_like_others(run_ranks: RunRanks) -> None:
    """Here of half of the examples."""
    results = run_ranks(train, 3, strategies=plain(**ROUNDED), steps=4, lr=0.05)
    assert_identical(results)
    for label, result in results[0].items():
        np.testing.assert_allclose(
            result["parameters"],
            results[0]["dkfac"]["parameters"],
            rtol=1e-3,
            atol=1e-4,
            err_msg=label,
        )


def accumulating(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Each step's examples come in two passes, of which only the second is synchronised; rank 1
    also looks at others.
    """
    results = {}
    for label, strategy in strategies.items():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer, strategy) as session:
            for step in range(6):
                x, y = batch_of(rank, step)
                with session.no_sync():
                    (loss_of(model, (x[:1], y[:1])) / 2).backward()
                (loss_of(model, (x[1:], y[1:])) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 1:
                    with torch.no_grad():
                        model(x)
        results[label] = {
            "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "fingerprint": fingerprint(model),
        }
    return results


def test_a_step_in_two_passes_is_one_step(run_ranks: RunRanks) -> None:
    strategies = {label: STRATEGIES[label] for label in ("dkfac", "spdkfac")}
    results = run_ranks(accumulating, 2, strategies=strategies)
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


def resumed(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Six steps at a stretch, and three and three."""
    results = {}
    for label, strategy in strategies.items():
        straight = make_net()
        optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
        with offbeat.attach(straight, optimizer, strategy) as session:
            for step in range(3):
                step_(straight, optimizer, rank, step)
            state, weights = (
                session.state_dict(),
                {key: t.clone() for key, t in straight.state_dict().items()},
            )
            for step in range(3, 6):
                step_(straight, optimizer, rank, step)
        second = make_net(seed=5)
        second.load_state_dict(weights)
        optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        with offbeat.attach(second, optimizer, strategy) as session:
            session.load_state_dict(state)
            for step in range(3, 6):
                step_(second, optimizer, rank, step)
        results[label] = {"straight": fingerprint(straight), "resumed": fingerprint(second)}
    return results


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(run_ranks: RunRanks) -> None:
    options = HYPER | {"inverse_interval": 4}
    strategies = {
        "spdkfac": FullyFused(**reference.options(**options)),
        "dpkfac": FactorsOfEveryone(**reference.options(**options)),
        "dpkfac as published": offbeat.DPKFAC(**reference.options(**options)),
    }
    for result in run_ranks(resumed, 3, strategies=strategies):
        for label, ends in result.items():
            assert ends["straight"] == ends["resumed"], label


TROUBLES = ("retired", "indefinite", "nan factor")


def troubles(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    return {kind: trouble(rank, strategies=strategies, kind=kind) for kind in TROUBLES}


def trouble(rank: int, *, strategies: Strategies, kind: str) -> dict[str, Any]:
    """Something is wrong with one factor from step 2 on, on one rank or on all of them."""
    results = {}
    for label, strategy in strategies.items():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer, strategy) as session:
            scheduler = part_of(session).scheduler
            for step in range(5):
                if step == 2 and kind == "retired" and rank == 1:
                    scheduler.capture.retire(1, "it was told to")
                if step == 2 and kind == "indefinite":
                    for factor in part_of(session).averages.factors.values():
                        factor.weighted_sum.fill_(-1e3)
                if step == 2 and kind == "nan factor" and rank == 1:
                    broken = torch.full((1, 2, 3, 3), float("nan"), dtype=torch.float64)
                    scheduler.capture.saw_inputs(0, broken)
                step_(model, optimizer, rank, step)
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            results[label] = {
                "fingerprint": fingerprint(model),
                "notices": session.notices,
                "finite": finite,
            }
    return results


def test_trouble_with_a_factor_keeps_ranks_alike(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(troubles, 3, strategies=LOCAL)
    outcomes = {kind: [outcome[kind] for outcome in by_rank] for kind in TROUBLES}
    for kind, results in outcomes.items():
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
        assert "on another rank" in str(outcomes["retired"][rank]["spdkfac"]["notices"])


def unlike_devices(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Rank 1 computes with another number of threads than the others."""
    torch.set_num_threads(2 if rank == 1 else 1)
    return train(rank, world_size, strategies=strategies, steps=3, lr=0.05)


def test_ranks_on_unlike_devices_send_directions(run_ranks: RunRanks) -> None:
    strategies = {label: STRATEGIES[label] for label in ("dkfac", "spdkfac", "dpkfac")}
    results = run_ranks(unlike_devices, 2, strategies=strategies)
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


BEFALLS: list[tuple[Callable[..., Any], str, set[Any]]] = [
    (gradients.uneven_use, "exchanges", {5}),
    (gradients.nonfinite, "skipped", {1}),
    (gradients.exception_in_backward, "heard", {"MemoryError", "PeerError"}),
    (gradients.gan, "", set()),
]


def in_turn(
    rank: int, world_size: int, *, jobs: list[Callable[..., Any]], strategies: Strategies
) -> list[dict[str, Any]]:
    """Several jobs in the same processes."""
    return [gradients.for_each(rank, world_size, job=job, strategies=strategies) for job in jobs]


def test_what_befalls_gradients_befalls_factors(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(in_turn, 3, jobs=[job for job, *_ in BEFALLS], strategies=LOCAL)
    for results, (job, key, values) in zip(zip(*by_rank, strict=True), BEFALLS, strict=True):
        assert_identical(results)
        if key:
            found = {outcome[key] for result in results for outcome in result.values()}
            assert found == values, job.__name__


def test_two_halves_of_the_world_train_apart(run_ranks: RunRanks) -> None:
    results = run_ranks(
        gradients.for_each, 4, job=gradients.subgroup, strategies={"spdkfac": SHORT["spdkfac"]}
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


@pytest.mark.parametrize(
    ("job", "may_die"), [(gradients.exception_in_the_loop, ()), (gradients.killed, (2,))]
)
def test_a_rank_that_goes_is_an_error_on_the_others(
    run_ranks: RunRanks, job: Callable[..., Any], may_die: tuple[int, ...]
) -> None:
    results = run_ranks(job, 3, may_die=may_die, strategy=SHORT["spdkfac"])
    for result in results[:1]:
        assert result["message"]


def test_sparse_gradients_and_dense_factors(run_ranks: RunRanks) -> None:
    strategies = {
        f"{kind.name} with {exchange}": kind(
            inverse_interval=1,
            exchange=offbeat.AllReduce(codec="sign") if exchange == "signs" else exchange,
        )
        for kind, exchange in (
            (offbeat.DKFAC, "gtopk"),
            (offbeat.SPDKFAC, "powersgd"),
            (offbeat.SPDKFAC, "signs"),
            (offbeat.DPKFAC, "gtopk"),
        )
    }
    assert_identical(run_ranks(train, 3, strategies=strategies, steps=5, lr=0.05))


def local_after_kfac(rank: int, world_size: int, *, strategies: Strategies) -> dict[str, Any]:
    """Three steps of K-FAC and then local SGD: in one session of `LocalSGD`, and in two sessions of
    one model and optimizer, one after the other.
    """
    results = {}
    for label, strategy in strategies.items():
        apart, joined = make_net(), make_net()
        optimizers = [
            torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (apart, joined)
        ]
        local = offbeat.LocalSGD(period=2, warmup=0, optimizer_state="local")
        for steps, part in ((range(3), strategy), (range(3, 8), local)):
            with offbeat.attach(apart, optimizers[0], part):
                for step in steps:
                    step_(apart, optimizers[0], rank, step)
        together = offbeat.LocalSGD(period=2, start_step=3, start=strategy)
        alike = []
        with offbeat.attach(joined, optimizers[1], together) as session:
            for step in range(8):
                step_(joined, optimizers[1], rank, step)
                alike.append(fingerprint(joined))
            kept = sum(
                value.numel()
                for part in session.state_dict()["callbacks"].values()
                for entries in part.values()
                for value in entries.values()
                if isinstance(value, torch.Tensor)
            )
        results[label] = {
            "two sessions": fingerprint(apart),
            "one session": fingerprint(joined),
            "after each step": alike,
            "kept": kept,
        }
    return results


def test_local_sgd_can_start_with_second_order_steps(run_ranks: RunRanks) -> None:
    strategies = {label: STRATEGIES[label] for label in ("spdkfac", "dpkfac")}
    results = run_ranks(local_after_kfac, 2, strategies=strategies)
    for label in results[0]:
        steps = zip(*(result[label]["after each step"] for result in results), strict=True)
        same = [len(set(prints)) == 1 for prints in steps]
        assert same == [True] * 3 + [False, True] * 2 + [False], label
        for result in results:
            assert result[label]["one session"] == result[label]["two sessions"], label
            assert result[label]["kept"] == 0, "of factors, once local steps have begun"
