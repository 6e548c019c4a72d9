"""What every rank holds when its session has ended, on real processes and real sockets."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import NonFiniteError, OffbeatError
from offbeat.integrations.framework import FrameworkSession
from offbeat.session.metrics import close_open_sessions
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.transport.link import SILENCE_VARIABLE
from rank_jobs import megabatch
from rank_jobs.averaging import make_net, sgd, train
from rank_jobs.regression import fingerprint, flat
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

IN_STEP: dict[str, AveragingStrategy] = {
    "localsgd": offbeat.LocalSGD(period=3, warmup=0),
    "localsgd at an average": offbeat.LocalSGD(period=2, warmup=0),
    "diloco": offbeat.LocalSGD(period=3, outer="diloco"),
    "a2sgd": offbeat.A2SGD(period=3),
    "dpsgd": offbeat.DPSGD(),
    "sgp": offbeat.SGP(),
    "crossbow": offbeat.Crossbow(),
    "elasticsgd": offbeat.ElasticSGD(mega_batch=9),
}
BESIDE: dict[str, AveragingStrategy] = {
    "wagma": offbeat.WAGMA(period=3),
    "adpsgd": offbeat.ADPSGD(),
    "eagersgd": offbeat.EagerSGD(period=3),
}


STEPS_LEFT_AFTER = [1, 4, 6]
UNEVEN_LIMIT_S = 60.0


def state_of(net: torch.nn.Module) -> list[float]:
    return torch.cat([t.double().flatten() for t in net.state_dict().values()]).tolist()


def ended_with_the_best(rank: int, world_size: int) -> dict[str, list[float]]:
    """By strategy: the model, into which a framework, or a script, has loaded ones after the last
    step.
    """
    results = {}
    for label, strategy in {**IN_STEP, **BESIDE}.items():
        if strategy.shares_samples:
            continue
        for by_framework in (True, False):
            net = make_net()
            optimizer = sgd(net)
            attach = FrameworkSession if by_framework else offbeat.attach
            running = attach(net, optimizer, strategy)
            train(net, optimizer, rank, range(4))
            ones = {name: each.new_ones(each.shape) for name, each in net.state_dict().items()}
            net.load_state_dict(ones)
            running.close()
            results[f"{label}, {by_framework}"] = state_of(net)
    return results


def ended_after_a_look(rank: int, world_size: int) -> dict[str, int]:
    """By strategy: the model, for which another one stood in after the last step."""
    results = {}
    for label, strategy in BESIDE.items():
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy):
            train(net, optimizer, rank, range(4))
            own = copy.deepcopy(net.state_dict())
            for state in (make_net(seed=2).state_dict(), own):
                net.load_state_dict(state)
        results[label] = fingerprint(net)
    return results


def test_the_best_model_that_is_loaded_at_the_end_is_the_result(
    run_ranks: RunRanks,
) -> None:
    for found in run_ranks(ended_with_the_best, 2):
        for label, state in found.items():
            assert state == pytest.approx([1.0] * len(state)), label


def test_a_model_that_is_put_back_after_a_look_at_another_one_is_averaged(
    run_ranks: RunRanks,
) -> None:
    first, second = run_ranks(ended_after_a_look, 2)
    assert first == second


def ended(rank: int, world_size: int) -> dict[str, Any]:
    """By strategy: this rank's model before the end and after it, and that of one that keeps its
    own.
    """
    results = {}
    for label, strategy in {**IN_STEP, **BESIDE}.items():
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(4))
            weight = session.averaging_weight
            before, print_before = state_of(net), fingerprint(net)
            momentum = state_of_optimizer(optimizer)
        session.close()
        results[label] = {
            "before": before,
            "weight": weight,
            "after": state_of(net),
            "prints": [print_before, fingerprint(net)],
            "momentum kept": momentum == state_of_optimizer(optimizer),
        }
    net = make_net()
    optimizer = sgd(net)
    with offbeat.attach(net, optimizer, offbeat.LocalSGD(period=3, warmup=0), finish="keep"):
        train(net, optimizer, rank, range(4))
        before = state_of(net)
    results["adaptive, left early"] = left_early(rank)
    results["kept"] = {"kept": before == state_of(net), "prints": [0, fingerprint(net)]}
    results["left open"] = left_open(rank)
    return results


def left_open(rank: int) -> dict[str, Any]:
    """The interpreter's end closes a session that the script has not closed."""
    net = make_net()
    optimizer = sgd(net)
    session = offbeat.attach(net, optimizer, offbeat.LocalSGD(period=3, warmup=0))
    train(net, optimizer, rank, range(4))
    before = state_of(net)
    close_open_sessions()
    return {"kept": before == state_of(net), "notices": session.notices}


def left_early(rank: int) -> dict[str, Any]:
    """Each rank leaves the loop within the first mega-batch, after a number of steps of its own."""
    net = megabatch.make_net()
    optimizer = megabatch.sgd(net)
    strategy = offbeat.AdaptiveSGD(mega_batch=25, warmup=0)
    with offbeat.attach(net, optimizer, strategy) as session:
        loader = session.loader(megabatch.Numbers(), batch_size=4, seed=3)
        for number, batch in enumerate(loader, start=1):
            megabatch.step(net, optimizer, batch)
            if number == STEPS_LEFT_AFTER[rank]:
                break
        before = state_of(net)
    return {"before": before, "after": state_of(net), "prints": [0, fingerprint(net)]}


def state_of_optimizer(optimizer: torch.optim.Optimizer) -> list[float]:
    kept = optimizer.state_dict()["state"].values()
    return torch.cat([each["momentum_buffer"].flatten() for each in kept]).tolist()


def test_a_session_that_ends_well_leaves_the_same_mean_on_every_rank(run_ranks: RunRanks) -> None:
    results = run_ranks(ended, 3, timeout_s=60)
    for label in [*IN_STEP, *BESIDE]:
        ranks = [result[label] for result in results]
        assert len({rank["prints"][1] for rank in ranks}) == 1, label
        assert all(rank["momentum kept"] for rank in ranks), label
        if label in IN_STEP:
            weights = [rank["weight"] for rank in ranks]
            mean = np.average([rank["before"] for rank in ranks], axis=0, weights=weights)
            np.testing.assert_allclose(ranks[0]["after"], mean, atol=1e-6, err_msg=label)
    early = [result["adaptive, left early"] for result in results]
    assert len({rank["prints"][1] for rank in early}) == 1
    mean = np.average([rank["before"] for rank in early], axis=0, weights=STEPS_LEFT_AFTER)
    np.testing.assert_allclose(early[0]["after"], mean, atol=1e-6)
    for rank in (result["localsgd at an average"] for result in results):
        assert rank["prints"][0] == rank["prints"][1]
    assert all(result["kept"]["kept"] for result in results)
    for rank in (result["left open"] for result in results):
        assert rank["kept"]
        assert any("before the model is saved" in notice for notice in rank["notices"])
    assert len({result["kept"]["prints"][1] for result in results}) == 3


def kept_beside(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks whose weights are apart take steps of length 0, rank 0 far fewer than its peers, which
    average on its behalf afterwards. By strategy: this rank's weights before and after.
    """
    results = {}
    for label, strategy in BESIDE.items():
        net = make_net()
        optimizer = sgd(net)
        optimizer.param_groups[0]["lr"] = 0.0
        with offbeat.attach(net, optimizer, strategy, finish="keep"):
            generator = torch.Generator().manual_seed(rank)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
            before = flat(list(net.parameters())).tolist()
            train(net, optimizer, rank, range(1 if rank == 0 else 8))
        results[label] = {"before": before, "after": flat(list(net.parameters())).tolist()}
    return results


def test_the_mean_of_models_that_ranks_keep_has_every_average_that_began(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(kept_beside, 3)
    for label in BESIDE:
        before, after = (
            np.mean([result[label][when] for result in results], axis=0)
            for when in ("before", "after")
        )
        np.testing.assert_allclose(after, before, atol=1e-6, err_msg=label)


def uneven(rank: int, world_size: int, *, label: str) -> str:
    """Rank 0 takes fewer steps than its peers. What does everyone hear?"""
    os.environ[SILENCE_VARIABLE] = str(10 * UNEVEN_LIMIT_S)  # nobody is saved by the limit
    net = make_net()
    optimizer = sgd(net)
    try:
        with offbeat.attach(net, optimizer, IN_STEP[label]):
            train(net, optimizer, rank, range(4 if rank == 0 else 8))
    except OffbeatError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("label", ["localsgd", "dpsgd"])
def test_a_rank_that_ends_while_its_peers_train_on_is_named_and_nobody_hangs(
    run_ranks: RunRanks, label: str
) -> None:
    first, *others = run_ranks(uneven, 3, label=label, timeout_s=UNEVEN_LIMIT_S)
    assert first.startswith("PeerError: rank")
    for other in others:
        assert "rank 0" in other
        assert "has ended its session, and this rank trains on" in other


def dies_before_the_end(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 is killed after its last step. What do the others end with?"""
    results: dict[str, Any] = {}
    for label, strategy in (("localsgd", IN_STEP["localsgd"]), ("wagma", BESIDE["wagma"])):
        net = make_net()
        optimizer = sgd(net)
        try:
            with offbeat.attach(net, optimizer, strategy) as session:
                train(net, optimizer, rank, range(4))
                if label == "wagma":
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                elif rank == 1:
                    raise KeyboardInterrupt
            results[label] = {"print": fingerprint(net), "notices": session.notices}
        except KeyboardInterrupt:
            results[label] = "interrupted"
        except OffbeatError as error:
            results[label] = f"{type(error).__name__}: {error}"
    return results


def test_who_has_died_is_an_error_or_left_out_of_the_mean(run_ranks: RunRanks) -> None:
    first, _, third = run_ranks(dies_before_the_end, 3, may_die=[1], timeout_s=60)
    for survivor in (first, third):
        assert "PeerError: rank 1 aborted: KeyboardInterrupt" in survivor["localsgd"]
        assert any("without worker 1" in n for n in survivor["wagma"]["notices"]), survivor
    assert first["wagma"]["print"] == third["wagma"]["print"]


def not_finite(rank: int, world_size: int) -> str:
    """Rank 1's model is not finite when it ends."""
    net = make_net()
    optimizer = sgd(net)
    try:
        with offbeat.attach(net, optimizer, offbeat.LocalSGD(period=9, warmup=0)):
            train(net, optimizer, rank, range(2))
            if rank == 1:
                next(net.parameters()).data.fill_(float("nan"))
    except NonFiniteError as error:
        return str(error)
    return "nothing"


def test_a_model_that_is_not_finite_is_named_on_every_rank(run_ranks: RunRanks) -> None:
    for said in run_ranks(not_finite, 2):
        assert "the weights of rank 1 at the end of the session are not finite" in said


def closes_in_a_finally_clause(rank: int, world_size: int) -> str:
    """Rank 1 raises, and closes its session on the way out, without a `with` block."""
    net = make_net()
    optimizer = sgd(net)
    session = offbeat.attach(net, optimizer, offbeat.LocalSGD(period=2, warmup=0))
    try:
        train(net, optimizer, rank, range(3))
        if rank == 1:
            raise ValueError("no more data")
        train(net, optimizer, rank, range(3, 6))
    except (ValueError, OffbeatError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.close()
    return "nothing"


def test_an_exception_on_its_way_out_averages_nothing(run_ranks: RunRanks) -> None:
    first, second = run_ranks(closes_in_a_finally_clause, 2)
    assert second == "ValueError: no more data"
    assert "PeerError: rank 1" in first
