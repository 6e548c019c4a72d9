"""Samples claimed by real processes of uneven speeds, and gradients averaged over samples."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import offbeat
from offbeat import Session
from offbeat.errors import OffbeatError, OffbeatWarning
from rank_jobs.megabatch import NUM_SAMPLES, Numbers, make_net, sgd, step
from rank_jobs.regression import fingerprint
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def samples_of(work: dict[str, Any]) -> int:
    return sum(end - begin for claim in work["claims"] for begin, end in claim["spans"])


def strategies() -> dict[str, Any]:
    adaptive = offbeat.AdaptiveSGD(mega_batch=10, warmup=0)
    return {
        "proportional": adaptive,
        "published": replace(adaptive, rule="published", min_batch_size=2),
        "warmup": replace(adaptive, warmup=2, optimizer_state="averaged"),
        "overlap": replace(adaptive, warmup=2, optimizer_state="averaged", overlap=True),
        "elastic": offbeat.ElasticSGD(mega_batch=10),
    }


def epochs(rank: int, world_size: int) -> dict[str, Any]:
    """Two epochs. The last rank waits after each step twenty times as long as that took, so that
    it is slow beside its peers on a busy machine too.
    """
    results = {}
    waits_for = 20 if rank == world_size - 1 else 0
    for label, strategy in strategies().items():
        net = make_net(seed=rank)
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            loader = session.loader(Numbers(), batch_size=4, seed=3)
            seen, prints, works = [], [], []
            for _ in range(2):
                mine: list[int] = []
                for _ in range(3):
                    for batch in loader.one_mega_batch():
                        begin_s = time.monotonic()
                        mine += step(net, optimizer, batch)
                        time.sleep(waits_for * (time.monotonic() - begin_s))
                    prints.append(fingerprint(net))
                    works.append([asdict(work) for work in loader.last])
                seen.append(mine)
            results[label] = {
                "seen": seen,
                "prints": prints,
                "works": works,
                "epoch": loader.epoch,
                "lr": optimizer.param_groups[0]["lr"],
                "exchanges": session.stats.exchanges,
            }
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_sample_is_seen_once_an_epoch_and_models_meet(
    run_ranks: RunRanks, world_size: int
) -> None:
    """Of three, the slow one gets less."""
    ranks = run_ranks(epochs, world_size)
    if world_size == 3:
        assert_that_the_slow_one_gets_less(ranks)
    for label in ranks[0]:
        results = [rank[label] for rank in ranks]
        orders = []
        for epoch in range(2):
            seen = [index for result in results for index in result["seen"][epoch]]
            assert sorted(seen) == list(range(NUM_SAMPLES)), label
            orders.append(seen)
        assert orders[0] != orders[1], label
        assert all(
            len({result["prints"][merge] for result in results}) == 1 for merge in range(6)
        ), label
        assert len(set(results[0]["prints"])) == 6, label
        assert [(result["epoch"], result["lr"]) for result in results] == [(2, 0.05)] * world_size
        exchanges = {result["exchanges"] for result in results}
        assert min(exchanges) > 6 if label in ("warmup", "overlap") else exchanges == {6}, label
        for result in results:
            assert result["works"] == results[0]["works"], label
        assert [sum(map(samples_of, works)) for works in results[0]["works"]] == [34, 34, 35] * 2, (
            label
        )


def assert_that_the_slow_one_gets_less(ranks: list[Any]) -> None:
    for label in ("proportional", "warmup"):
        works = ranks[0][label]["works"]
        taken = [sum(samples_of(mega_batch[rank]) for mega_batch in works) for rank in range(3)]
        # Below an even share, not below each peer: a busy machine may starve one of these as well.
        assert 3 * taken[2] < sum(taken), label
        sizes = [[work["batch_size"] for work in mega_batch] for mega_batch in works]
        assert sizes[0] == [4, 4, 4]
        assert sizes[-1][2] < max(sizes[-1][:2]), label
    shares = [
        [samples_of(work) for work in mega_batch] for mega_batch in ranks[0]["elastic"]["works"]
    ]
    assert max(max(share) - min(share) for share in shares) <= 1


def _begin(seed: int) -> tuple[torch.nn.Module, Any, Session, Any]:
    net = make_net(seed=seed)
    optimizer = sgd(net)
    session = offbeat.attach(net, optimizer, offbeat.AdaptiveSGD(mega_batch=10, warmup=0))
    loader = session.loader(Numbers(), batch_size=4, seed=3)
    return net, optimizer, session, loader


def read_by_workers(rank: int, world_size: int) -> dict[str, Any]:
    """An epoch of a DataLoader's, with a scheduler that is stepped by merges. Rank 0 has one more,
    which it has stepped by batches.
    """
    net = make_net()
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    given = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1)
    # Under AdaptiveSGD a rank that is late might get no batch of a mega-batch.
    strategy = offbeat.ElasticSGD(mega_batch=10)
    seen: list[int] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        offbeat.attach(net, optimizer, strategy) as session,
    ):
        warnings.simplefilter("always")
        session.on_merge(scheduler.step)
        loader = session.loader(given, seed=3)
        for _ in range(loader.num_mega_batches):
            for batch in loader.one_mega_batch():
                seen += step(net, optimizer, batch)
            if rank == 0 and loader.num_merged == 1:
                optimizer.param_groups[0]["lr"] = 0.02
        return {
            "seen": seen,
            "lr": optimizer.param_groups[0]["lr"],
            "batches": [len(given), len(loader)],
            "notices": session.notices,
            "warned": [
                str(warning.message)
                for warning in warned
                if issubclass(warning.category, OffbeatWarning)
            ],
        }


def test_a_data_loader_is_shared_out_and_schedulers_are_stepped_by_merges(
    run_ranks: RunRanks,
) -> None:
    ranks = run_ranks(read_by_workers, 2)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(NUM_SAMPLES))
    assert [rank["lr"] for rank in ranks] == pytest.approx([0.02 / 4, 0.05 / 8])
    for rank in ranks:
        (warned,) = rank["warned"]
        assert "differ between ranks at a merge: 0.02 on rank 0, 0.025 on rank 1" in warned
        assert "session.on_merge(scheduler.step)" in warned
        assert warned in rank["notices"]
        assert rank["batches"] == [26, 13]


def resumed(rank: int, world_size: int) -> dict[str, Any]:
    """Saved in the middle of a mega-batch, ranks a different number of steps into it; what is seen
    before and after?
    """
    net, optimizer, session, loader = _begin(1)
    with session:
        seen: list[int] = []
        batches = iter(loader)
        for _ in range(1 + rank):
            seen += step(net, optimizer, next(batches))
        dist.barrier()  # before that, a rank that goes on could take the batches of the other
        states = copy.deepcopy((net.state_dict(), optimizer.state_dict(), session.state_dict()))
        for _ in batches:  # lost, since it was not saved
            optimizer.step()
    net, optimizer, session, loader = _begin(2)
    with session:
        for target, state in zip((net, optimizer, session), states, strict=True):
            target.load_state_dict(state)
        for batch in loader:
            seen += step(net, optimizer, batch)
        return {"seen": seen, "print": fingerprint(net)}


def test_a_run_resumes_in_the_middle_of_a_mega_batch(run_ranks: RunRanks) -> None:
    ranks = run_ranks(resumed, 2)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(NUM_SAMPLES))
    assert len({rank["print"] for rank in ranks}) == 1


def apart(rank: int, world_size: int) -> str:
    """Saved before a merge on one rank and after it on the other: what does each hear?"""
    net, optimizer, session, loader = _begin(1)
    with session:
        before = copy.deepcopy(session.state_dict())
        for batch in loader.one_mega_batch():
            step(net, optimizer, batch)
        session.load_state_dict(before if rank else session.state_dict())
        try:
            next(iter(loader))
        except OffbeatError as error:
            return str(error)
    return ""


def test_states_from_both_sides_of_a_merge_are_refused(run_ranks: RunRanks) -> None:
    for said in run_ranks(apart, 2):
        assert "different mega-batches" in said


def refused(rank: int, world_size: int, *, faults: list[str]) -> list[str]:
    """Rank 1 alone is wrong, in one way after the other. What does everyone hear?"""
    return [what_is_heard(rank, world_size, fault) for fault in faults]


def what_is_heard(rank: int, world_size: int, fault: str) -> str:
    net = make_net()
    strategy = offbeat.AllReduce() if fault == "too few" else offbeat.AdaptiveSGD(mega_batch=5)
    dataset: Any = Numbers()
    arguments: dict[str, Any] = {"batch_size": 8}
    if rank == 1:
        match fault:
            case "length":
                dataset = Numbers(99)
            case "stream":
                dataset = iter([1, 2])
            case "seed":
                arguments["seed"] = 5
            case "batches":
                arguments["batch_size"] = 4
            case "memory":
                arguments["max_batch_size"] = 0
    if fault == "bounds":
        strategy = replace(strategy, min_batch_size=4)
        arguments["max_batch_size"] = 2 if rank == 1 else None
    if fault == "too few":
        dataset, arguments["batch_size"] = Numbers(world_size - 1), 3
    with offbeat.attach(net, sgd(net), strategy) as session:
        try:
            session.loader(dataset, **arguments)
        except OffbeatError as error:
            return str(error)
    return ""


REFUSED = {
    "length": "'samples': 99 there, 103 on rank 0",
    "stream": "must be of map style",
    "seed": "'seed': 5 there, 0 on rank 0",
    "batches": "'batch_size': 4 there, 8 on rank 0",
    "memory": "max_batch_size must be an integer of at least 1, got 0",
    "bounds": "rank 1 can hold batches of 2 samples, but min_batch_size is 4",
    "too few": "1 samples cannot be shared by 2 ranks",
}


def test_bad_input_is_one_error_on_every_rank(run_ranks: RunRanks) -> None:
    for heard in run_ranks(refused, 2, faults=[*REFUSED]):
        for (fault, said), message in zip(REFUSED.items(), heard, strict=True):
            assert said in message, fault


def unequal_batches(rank: int, world_size: int) -> dict[str, Any]:
    """Batches of 1 and 9 of ten samples: gradients by ranks, by samples, and of one device."""
    results: dict[str, Any] = {}
    dataset = Numbers(10)
    for weighed in (False, True):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
            for _ in session.loader(dataset, batch_size=2):
                pass  # an evaluation, which is in no gradient
            x, y, _ = next(iter(session.loader(dataset, batch_size=1 if rank == 0 else 9)))
            if not weighed:  # what it would be without the loader's word
                optimizer.step()
                session.weigh(1)
            torch.nn.functional.mse_loss(net(x), y).backward()
            results[str(weighed)] = [p.grad.flatten().tolist() for p in net.parameters()]
            results["sizes"] = len(x)
    alone = make_net()
    torch.nn.functional.mse_loss(alone(dataset.x), dataset.y).backward()
    results["alone"] = [p.grad.flatten().tolist() for p in alone.parameters()]
    return results


def test_the_mean_of_means_is_wrong_and_the_mean_over_samples_is_not(run_ranks: RunRanks) -> None:
    for result in run_ranks(unequal_batches, 2):
        alone = np.concatenate(result["alone"])
        np.testing.assert_allclose(np.concatenate(result["True"]), alone, rtol=1e-5, atol=1e-7)
        assert np.abs(np.concatenate(result["False"]) - alone).max() > 0.1 * np.abs(alone).max()


def lockstep(rank: int, world_size: int) -> dict[str, Any]:
    """An epoch of unequal batches in step, resumed in the middle."""
    net = make_net()
    optimizer = sgd(net)
    seen: list[int] = []
    sizes: list[int] = []
    with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
        loader = session.loader(Numbers(), batch_size=2 + 5 * rank)
        state: dict[str, Any] = {}
        for number, batch in enumerate(loader):
            sizes.append(len(batch[0]))
            seen += step(net, optimizer, batch)
            if number == 2:
                state = copy.deepcopy(session.state_dict())
        session.load_state_dict(state)
        again = [index for batch in loader for index in step(net, optimizer, batch)]
        return {
            "seen": seen,
            "sizes": sizes,
            "again": again,
            "steps": len(loader),
            "print": fingerprint(net),
        }


def test_ranks_keep_step_with_unequal_batches(run_ranks: RunRanks) -> None:
    ranks = run_ranks(lockstep, 2)
    assert sorted(index for rank in ranks for index in rank["seen"]) == list(range(NUM_SAMPLES))
    assert (
        ranks[0]["steps"] == ranks[1]["steps"] == len(ranks[0]["sizes"]) == len(ranks[1]["sizes"])
    )
    assert set(ranks[0]["sizes"]) <= {1, 2}
    assert set(ranks[1]["sizes"]) <= {6, 7}
    for rank in ranks:
        assert rank["again"] == rank["seen"][sum(rank["sizes"][:3]) :]
    assert ranks[0]["print"] == ranks[1]["print"]


def idle(rank: int, world_size: int) -> list[list[float]]:
    """Rank 0 has ten samples; the others have none in this step, and no weight. The gradient, and
    that of ten alone.
    """
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    dataset = Numbers(10)
    with offbeat.attach(net, optimizer, offbeat.AllReduce()) as session:
        session.weigh(4)
        torch.nn.functional.mse_loss(net(dataset.x), dataset.y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            session.weigh(10)
            torch.nn.functional.mse_loss(net(dataset.x), dataset.y).backward()
        else:
            session.join()
        got = torch.cat([p.grad.flatten() for p in net.parameters()]).tolist()
    alone = make_net()
    torch.nn.functional.mse_loss(alone(dataset.x), dataset.y).backward()
    return [got, torch.cat([p.grad.flatten() for p in alone.parameters()]).tolist()]


def test_a_rank_without_samples_has_no_weight(run_ranks: RunRanks) -> None:
    for got, alone in run_ranks(idle, 3):
        np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-7)


def drawn_together(rank: int, world_size: int) -> dict[str, float]:
    """CROSSBOW's step against the same done in one process: the largest difference, and how far
    models are apart.
    """
    strategy = offbeat.Crossbow(period=2, alpha=0.4)
    net = make_net()
    optimizer = sgd(net)
    nets = [make_net() for _ in range(world_size)]
    optimizers = [sgd(other) for other in nets]
    central = [p.detach().clone() for p in nets[0].parameters()]
    data = Numbers()
    with offbeat.attach(net, optimizer, strategy, finish="keep"):
        for number in range(6):
            chosen = [
                slice(10 * number + 3 * other, 10 * number + 3 * other + 3)
                for other in range(world_size)
            ]
            torch.nn.functional.mse_loss(net(data.x[chosen[rank]]), data.y[chosen[rank]]).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls = [
                [0.4 * (p.detach() - z) for p, z in zip(other.parameters(), central, strict=True)]
                for other in nets
            ]
            for other, opt, part in zip(nets, optimizers, chosen, strict=True):
                torch.nn.functional.mse_loss(other(data.x[part]), data.y[part]).backward()
                opt.step()
                opt.zero_grad()
            if number % 2:
                for other, pull in zip(nets, pulls, strict=True):
                    for p, by in zip(other.parameters(), pull, strict=True):
                        p.detach().sub_(by)
                for position, z in enumerate(central):
                    z.add_(sum(pull[position] for pull in pulls))
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    expected = torch.cat([p.detach().flatten() for p in nets[rank].parameters()])
    return {"error": float((mine - expected).abs().max())}


@pytest.mark.parametrize("world_size", [1, 3])
def test_models_are_drawn_to_the_central_model_as_in_the_paper(
    run_ranks: RunRanks, world_size: int
) -> None:
    assert max(result["error"] for result in run_ranks(drawn_together, world_size)) < 1e-5
