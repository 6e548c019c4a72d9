"""The strategies that average weights, on real processes and real sockets."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.arithmetic.topologies import exponential_peers, ring_weights
from offbeat.codec.sparseloco import ChunkIndices, ChunkSelector, LevelValues
from offbeat.errors import OffbeatError, PeerError
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.registry import SCHEDULES
from rank_jobs.averaging import backward, make_net, sgd, train
from rank_jobs.regression import data, fingerprint, flat
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

NUM_STEPS = 7


def by_label(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """From each rank's results by strategy to each strategy's results by rank."""
    return {label: [result[label] for result in results] for label in results[0]}


def assert_bytes_are_those_of_the_docstrings(
    results: dict[str, list[Any]], world_size: int
) -> None:
    net = make_net()
    vector_bytes = 4 * sum(t.numel() for t in net.state_dict().values() if t.is_floating_point())
    expected = {
        "localsgd": 2 * 2 * (world_size - 1) / world_size * vector_bytes,
        "dpsgd": NUM_STEPS * min(2, world_size - 1) * vector_bytes,
        "sgp": NUM_STEPS * vector_bytes,
        "sgp to everyone": NUM_STEPS * (world_size - 1) * vector_bytes,
    }
    for label, num_bytes in expected.items():
        for result in results[label]:
            assert num_bytes <= result["bytes_sent"] <= 1.1 * num_bytes, label


def strategies(world_size: int) -> dict[str, AveragingStrategy]:
    return published(world_size) | OVER_CODECS | OF_SCHEDULES | RELATIVES


def of_each_kind(world_size: int) -> dict[str, AveragingStrategy]:
    """One for each state that a rank keeps and each way in which ranks meet. Periods and other
    schedules are varied in tests/conformance/test_weight_strategies.py.
    """
    repeated = {
        "localsgd",
        "localsgd in every step",
        "averaged momentum",
        "periods that grow",
        "sgp to everyone",
        *list(OF_SCHEDULES)[1:],
    }
    return {
        label: strategy
        for label, strategy in strategies(world_size).items()
        if label not in repeated
    }


OVER_CODECS: dict[str, AveragingStrategy] = {
    "few changes": offbeat.LocalSGD(
        period=2,
        codec=offbeat.WeightCodec(density=0.1, entries="reuse+float8"),
        outer="diloco",
    ),
}
"""One for all: tests/conformance/test_products.py has each codec on several ranks."""
OF_SCHEDULES: dict[str, AveragingStrategy] = {
    name: offbeat.LocalSGD(period=name) for name in SCHEDULES
}
RELATIVES: dict[str, AveragingStrategy] = {
    "des-loc": offbeat.LocalSGD(period=1, warmup=0, optimizer_state={"momentum_buffer": 2}),
    "defsgd": offbeat.DEFSGD(ratio=10),
    "dpsgd over linear4": offbeat.DPSGD(codec="linear4"),
    "sgp over linear4": offbeat.SGP(codec="linear4"),
    "noloco": offbeat.LocalSGD(period=2, outer="diloco", exchange="pairs"),
}


def published(world_size: int) -> dict[str, AveragingStrategy]:
    """Those that `Reference` knows."""
    return {
        "localsgd": offbeat.LocalSGD(period=3, warmup=0, optimizer_state="local"),
        "localsgd as it comes": offbeat.LocalSGD(),
        "localsgd in every step": offbeat.LocalSGD(period=1, optimizer_state="local"),
        "post-local sgd": offbeat.LocalSGD(period=2, start_step=3),
        "averaged momentum": offbeat.LocalSGD(period=2, warmup=0),
        "periods that grow": offbeat.LocalSGD(period=3, warmup=2),
        "diloco": offbeat.LocalSGD(period=2, outer="diloco"),
        "dpsgd": offbeat.DPSGD(),
        "sgp": offbeat.SGP(),
        "sgp to everyone": offbeat.SGP(out_degree=max(world_size - 1, 1)),
    }


class Reference:
    """All ranks in one process, plainly: what the papers say, with no part of offbeat's but the
    graphs.
    """

    def __init__(self, world_size: int) -> None:
        self.nets = [make_net(seed=0) for _ in range(world_size)]
        self.optimizers = [sgd(net) for net in self.nets]
        self.anchor = [p.detach().clone() for p in self.nets[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.anchor]
        self.weights = [1.0] * world_size
        self.averaged_at = 0

    def vectors(self) -> list[list[torch.Tensor]]:
        """Each rank's parameters and running statistics: the tensors themselves."""
        return [
            [t.detach() for t in net.state_dict(keep_vars=True).values() if t.is_floating_point()]
            for net in self.nets
        ]

    def mix(self, matrix: torch.Tensor) -> list[list[torch.Tensor]]:
        """Row i: the sum over j of matrix[i, j] times rank j's vector."""
        stacked = [torch.stack(tensors).double() for tensors in zip(*self.vectors(), strict=True)]
        return [
            [torch.tensordot(row, tensors, dims=1) for tensors in stacked]
            for row in matrix.double()
        ]

    def write(self, vectors: list[list[torch.Tensor]]) -> None:
        for mine, new in zip(self.vectors(), vectors, strict=True):
            for tensor, value in zip(mine, new, strict=True):
                tensor.copy_(value)

    def average(self) -> None:
        world_size = len(self.nets)
        self.write(self.mix(torch.full((world_size, world_size), 1 / world_size)))

    def step(self, strategy: AveragingStrategy, step: int) -> None:
        world_size = len(self.nets)
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            backward(net, rank, step)
        if isinstance(strategy, offbeat.LocalSGD) and step < strategy.start_step:
            for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(dim=0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        neighbours = torch.zeros(world_size, world_size)
        for rank in range(world_size):
            for peer, weight in ring_weights(rank, world_size).items():
                neighbours[rank, peer] = weight
        mixed = self.mix(neighbours - torch.eye(world_size))
        for optimizer in self.optimizers:
            optimizer.step()
        match strategy:
            case offbeat.LocalSGD():
                num_local = step + 1 - strategy.start_step
                length = strategy.period
                if growth := strategy.steps_of_growth:
                    length = min(length, max(1, num_local // growth))
                if num_local - self.averaged_at >= length:
                    self.averaged_at = num_local
                    self.average()
                    self.after_average(strategy)
            case offbeat.DPSGD():
                self.write(
                    [
                        [t + change for t, change in zip(*pair, strict=True)]
                        for pair in zip(self.vectors(), mixed, strict=True)
                    ]
                )
            case offbeat.SGP():
                matrix = torch.zeros(world_size, world_size)
                for rank in range(world_size):
                    targets = exponential_peers(
                        rank, world_size, round_number=step, out_degree=strategy.out_degree
                    ).targets
                    matrix[[rank, *targets], rank] = 1 / (1 + len(targets))
                self.write(self.mix(matrix))

    def after_average(self, strategy: offbeat.LocalSGD) -> None:
        if strategy.outer == "diloco":
            for i, parameters in enumerate(
                zip(*(net.parameters() for net in self.nets), strict=True)
            ):
                change = self.anchor[i] - parameters[0].detach()
                self.momentum[i] = 0.9 * self.momentum[i] + change
                self.anchor[i] = self.anchor[i] - 0.7 * (change + 0.9 * self.momentum[i])
                for parameter in parameters:
                    parameter.detach().copy_(self.anchor[i])
        if strategy.averages_state:
            for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
                buffers = [
                    o.state[p]["momentum_buffer"]
                    for o, p in zip(self.optimizers, parameters, strict=True)
                ]
                mean = torch.stack(buffers).mean(dim=0)
                for buffer in buffers:
                    buffer.copy_(mean)


def apart(left: torch.nn.Module, right: torch.nn.Module) -> float:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def against_the_paper(rank: int, world_size: int) -> dict[str, Any]:
    """By strategy: how far this rank's model is from the reference's after each step, and the model
    as text.
    """
    results = {}
    for label, strategy in published(world_size).items():
        reference = Reference(world_size)
        net = make_net(seed=rank)  # attach must copy rank 0's
        optimizer = sgd(net)
        errors, prints = [], []
        with offbeat.attach(net, optimizer, strategy) as session:
            for step in range(NUM_STEPS):
                train(net, optimizer, rank, range(step, step + 1))
                reference.step(strategy, step)
                errors.append(apart(net, reference.nets[rank]))
                prints.append(fingerprint(net))
            stats = session.stats
        results[label] = {
            "errors": errors,
            "prints": prints,
            "bytes_sent": stats.bytes_sent,
            "exchanges": stats.exchanges,
        }
    return results


def test_every_step_is_the_papers(run_ranks: RunRanks) -> None:
    world_size = 3
    results = by_label(run_ranks(against_the_paper, world_size))
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
    assert all(same["localsgd as it comes"])
    assert_bytes_are_those_of_the_docstrings(results, world_size)


def like_allreduce(rank: int, world_size: int) -> float:
    """How far local SGD that averages in every step is from S-SGD, for an optimizer that is linear
    in the gradient.
    """
    nets = []
    for strategy in (offbeat.LocalSGD(period=1), offbeat.AllReduce()):
        net = make_net()
        optimizer = sgd(net, momentum=0.0)
        with offbeat.attach(net, optimizer, strategy):
            train(net, optimizer, rank, range(5))
        nets.append(net)
    return max(
        float((a - b).detach().abs().max())
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    )


def test_averaging_in_every_step_is_all_reducing_gradients(run_ranks: RunRanks) -> None:
    assert max(run_ranks(like_allreduce, 3)) < 1e-6


def weighed_start_phase(rank: int, world_size: int) -> float:
    """One step of post-local SGD in its start phase, with 1 sample here and 3 on the other rank."""
    weight = torch.nn.Parameter(torch.zeros(()))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(start_step=1)) as session:
        session.weigh(1 + 2 * rank)
        (weight * 4.0 * rank).backward()
        applied = float(weight.grad) if weight.grad is not None else float("nan")
        optimizer.step()
    assert weight.item() == -applied
    return applied


def test_the_start_phase_averages_over_samples(run_ranks: RunRanks) -> None:
    """Gradients of 0 over 1 sample and of 4 over 3 samples have the mean 3 over all samples."""
    assert run_ranks(weighed_start_phase, 2) == [3.0, 3.0]


def mean_kept(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks whose weights are apart take steps of length 0. Flat weights before and after, by
    strategy and type.
    """
    results = {}
    for label, strategy in of_each_kind(world_size).items():
        if label in ("diloco", *OVER_CODECS):
            continue
        halved = [torch.bfloat16] if label in ("localsgd as it comes", "dpsgd", "sgp") else []
        for dtype in (torch.float32, *halved):
            net = make_net().to(dtype)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            with offbeat.attach(net, optimizer, strategy):
                generator = torch.Generator().manual_seed(rank)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype))
                before = flat(list(net.parameters()))
                for _ in range(6):
                    optimizer.step()
                after = flat(list(net.parameters()))
            results[f"{label}, {dtype}"] = {"before": before.tolist(), "after": after.tolist()}
    return results


def test_averaging_keeps_the_mean_and_brings_ranks_together(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(mean_kept, 3)).items():
        before, after = (
            np.array([result[when] for result in ranks]) for when in ("before", "after")
        )
        if label.startswith("post-local"):
            continue  # while gradients are exchanged, nobody looks at weights
        tolerance = 2e-2 if "bfloat16" in label else 1e-6
        np.testing.assert_allclose(
            after.mean(axis=0), before.mean(axis=0), atol=tolerance, err_msg=label
        )
        if label.startswith("noloco"):
            continue  # three averages of pairs do not bring three ranks together
        if label.startswith("defsgd"):
            continue  # what is averaged is steps, and not where ranks have begun
        assert np.ptp(after, axis=0).max() <= 0.05 * np.ptp(before, axis=0).max() + 0.02, label


def moved_or_owed(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks move their weights apart, and average them over a codec, again and again."""
    results: dict[str, Any] = {}
    for label, codec in CODECS.items():
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        strategy = offbeat.LocalSGD(period=1, codec=codec)
        total, prints = torch.zeros(num_parameters := flat(list(net.parameters())).numel()), []
        begin = flat(list(net.parameters()))
        with offbeat.attach(net, optimizer, strategy) as session:
            for step in range(5):
                generator = torch.Generator().manual_seed(100 * step + rank)
                move = torch.randn(num_parameters, generator=generator)
                net.zero_grad(set_to_none=True)
                optimizer.step() if step == 0 else None  # which takes the anchor
                with torch.no_grad():
                    for parameter, part in zip(
                        net.parameters(),
                        move.split([p.numel() for p in net.parameters()]),
                        strict=True,
                    ):
                        parameter.add_(part.view(parameter.shape))
                total += move
                optimizer.step()
                prints.append(fingerprint(net))
            owed = session.state_dict()["callbacks"]["periodic_average"]["additive"]
        results[label] = {
            "moved": total.tolist(),
            "applied": (flat(list(net.parameters())) - begin).tolist(),
            "owed": flat([owed[f"residual/{name}"] for name, _ in net.named_parameters()]).tolist(),
            "prints": prints,
        }
    return results


CODECS = {
    "exact": offbeat.WeightCodec(density=0.1),
    "all in bfloat16": offbeat.WeightCodec(density=1.0, entries="bfloat16"),
    "chunks in 2 bits": offbeat.WeightCodec(
        density=1 / 8,
        entries=offbeat.TopKCodec(
            selector=ChunkSelector(64), values=LevelValues(bits=2), indices=ChunkIndices(64)
        ),
    ),
}


def test_what_a_codec_does_not_apply_is_owed_and_ranks_agree(run_ranks: RunRanks) -> None:
    world_size = 3
    for label, ranks in by_label(run_ranks(moved_or_owed, world_size)).items():
        assert all(result["prints"] == ranks[0]["prints"] for result in ranks), label
        moved, applied, owed = (
            np.array([result[what] for result in ranks]) for what in ("moved", "applied", "owed")
        )
        np.testing.assert_allclose(
            world_size * applied[0] + owed.sum(0), moved.sum(0), atol=1e-4, err_msg=label
        )
        assert np.abs(applied[0]).max() > 0.5


def averaged_model(rank: int, world_size: int) -> dict[str, Any]:
    """By strategy: this rank's weights and buffers, and the averaged model's."""
    results = {}
    for label, strategy in {**of_each_kind(world_size), "allreduce": offbeat.AllReduce()}.items():
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(4))
            if rank == 0:
                net(data(rank, 9)[0])  # one more batch seen than the others
            own = net.state_dict()
            own = {name: tensor.double().flatten().tolist() for name, tensor in own.items()}
            averaged = session.averaged_model().state_dict()
            train(net, optimizer, rank, range(4, 6))
        results[label] = {
            "own": own,
            "averaged": {n: t.double().flatten().tolist() for n, t in averaged.items()},
        }
    return results


def test_the_averaged_model_is_the_mean_on_every_rank(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(averaged_model, 3)).items():
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


def resumed(rank: int, world_size: int) -> dict[str, bool]:
    """By strategy: does a run that was saved in the middle of a period end as one that never
    stopped?
    """
    results = {}
    for label, strategy in of_each_kind(world_size).items():
        if label in RELATIVES:
            continue  # resumed in tests/averaging/ and tests/conformance/test_products.py
        straight = make_net()
        optimizer = sgd(straight)
        with offbeat.attach(straight, optimizer, strategy, finish="keep") as session:
            train(straight, optimizer, rank, range(4))
            states = copy.deepcopy(
                (straight.state_dict(), optimizer.state_dict(), session.state_dict())
            )
            train(straight, optimizer, rank, range(4, NUM_STEPS))
        second = make_net(seed=5)
        optimizer = sgd(second)
        with offbeat.attach(second, optimizer, strategy, finish="keep") as session:
            for target, state in zip((second, optimizer, session), states, strict=True):
                target.load_state_dict(state)
            train(second, optimizer, rank, range(4, NUM_STEPS))
        results[label] = fingerprint(second) == fingerprint(straight)
    return results


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(resumed, 3)).items():
        assert ranks == [True] * 3, label


def nonfinite(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's gradient is NaN in step 2, and rank 0 has no batch in step 3."""
    results = {}
    for label, strategy in of_each_kind(world_size).items():
        if label == "post-local sgd":
            continue  # skips together with the others as long as gradients are exchanged
        net = make_net()
        optimizer = sgd(net)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, rank, range(2))
            backward(net, rank, 2)
            if rank == 1:
                net[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            if rank != 0:
                backward(net, rank, 3)
            optimizer.step()
            optimizer.zero_grad()
            train(net, optimizer, rank, range(4, 7))
            finite = all(bool(p.isfinite().all()) for p in net.parameters())
            results[label] = {
                "finite": finite,
                "skipped": session.stats.skipped_steps,
                "steps": session.stats.steps,
            }
    return results


def test_a_rank_with_a_bad_gradient_or_no_batch_holds_nobody_up(run_ranks: RunRanks) -> None:
    for label, ranks in by_label(run_ranks(nonfinite, 3)).items():
        assert all(result["finite"] for result in ranks), label
        assert [result["skipped"] for result in ranks] == [0, 1, 0], label
        assert [result["steps"] for result in ranks] == [7, 7, 7], label


def uneven_optimizer_state(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 0 uses the last layer, so only it has a momentum there, until all average their
    optimizers' states with Adam.
    """
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with offbeat.attach(net, optimizer, offbeat.LocalSGD(period=2, warmup=0)):
        for step in range(2):
            x, _ = data(rank, step)
            (net(x) if rank == 0 else net[:4](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = flat([optimizer.state[p]["exp_avg_sq"] for p in net.parameters()]).tolist()
        steps = [int(optimizer.state[p]["step"]) for p in net.parameters()]
        train(net, optimizer, rank, range(2, 4))
    return {"steps": steps, "moments": moments, "fingerprint": fingerprint(net)}


def test_optimizer_state_that_only_some_ranks_have(run_ranks: RunRanks) -> None:
    results = run_ranks(uneven_optimizer_state, 3)
    assert all(set(result["steps"]) == {2} for result in results)
    assert results[0]["moments"][-1] > 0
    assert results[0]["moments"] == results[1]["moments"] == results[2]["moments"]
    assert len({result["fingerprint"] for result in results}) == 1


def refused(rank: int, world_size: int, *, faults: list[str]) -> list[dict[str, str]]:
    """Something cannot work, on every rank or on rank 1 alone. What does everyone hear?"""
    return [what_is_heard(rank, world_size, fault) for fault in faults]


def what_is_heard(rank: int, world_size: int, fault: str) -> dict[str, str]:
    net = make_net()
    build = {
        "out_degree": lambda: offbeat.SGP(out_degree=world_size),
        "scaler": lambda: offbeat.DPSGD(),
        "differs": lambda: offbeat.LocalSGD(period=2 if rank == 1 else 3),
    }[fault]
    scaler = torch.amp.GradScaler("cpu") if fault == "scaler" else None
    before = fingerprint(net)
    try:
        offbeat.attach(net, sgd(net), build(), scaler=scaler)
    except OffbeatError as error:
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "touched": str(fingerprint(net) != before),
        }
    return {"kind": "none", "message": "", "touched": ""}


REFUSED = {
    "out_degree": ("ConfigError", "out_degree must be below the number of ranks"),
    "scaler": ("UnsupportedError", "bfloat16 autocast"),
    "differs": ("MismatchError", "period=2"),
}


def test_what_cannot_work_is_one_error_on_every_rank(run_ranks: RunRanks) -> None:
    for heard in run_ranks(refused, 2, faults=[*REFUSED]):
        for (fault, (kind, said)), result in zip(REFUSED.items(), heard, strict=True):
            assert result["kind"] == kind, fault
            assert said in result["message"], fault
            assert result["touched"] == "False", fault


def killed(rank: int, world_size: int) -> list[int | None]:
    """The last rank is killed between steps, once for all strategies. Whom do the others blame,
    strategy by strategy?
    """
    net = make_net()
    optimizer = sgd(net)
    try:
        with offbeat.attach(net, optimizer, offbeat.SGP()):
            train(net, optimizer, rank, range(2))
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(net, optimizer, rank, range(2, 6))
    except PeerError as error:
        return [error.rank]
    return [None]


def test_a_killed_rank_is_named_by_every_survivor(run_ranks: RunRanks) -> None:
    results = run_ranks(killed, 3, may_die={2})
    assert results[:2] == [[2], [2]]


def trained_on_digits(rank: int, world_size: int, *, digits: str) -> dict[str, Any]:
    """Over 2 bits and whole: the share of held-out digits that are read right, and bytes sent in an
    average.
    """
    x, y = map(torch.from_numpy, np.load(digits).values())
    plain = offbeat.Outer(lr=1.0, momentum=0.0, nesterov=False)
    found = {}
    for label, codec in {"whole": None, "2 bits": "sparseloco"}.items():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(rank)
        strategy = offbeat.LocalSGD(period=5, outer=plain, codec=codec)
        with offbeat.attach(net, optimizer, strategy) as session:
            for _ in range(300):
                picked = torch.randint(400, x.shape[0], (16,), generator=draw)
                torch.nn.functional.cross_entropy(net(x[picked]), y[picked]).backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = session.stats
        right = (net(x[:400]).argmax(1) == y[:400]).double().mean().item()
        found[label] = {"right": right, "bytes": stats.bytes_sent / stats.exchanges}
    return found


def test_a_64th_of_changes_in_2_bits_trains_as_well_as_whole_weights(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """Seen: .953 against .943. Held out are 400 digits, of which a run reads 2% more or fewer than
    another one of other samples.
    """
    from sklearn.datasets import load_digits  # takes a second, and ranks import this file

    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "digits.npz", (images / 16).astype(np.float32), labels)
    for result in run_ranks(trained_on_digits, 4, digits=str(tmp_path / "digits.npz")):
        assert result["whole"]["right"] > 0.9
        assert result["2 bits"]["right"] > result["whole"]["right"] - 0.03
        assert result["2 bits"]["bytes"] < result["whole"]["bytes"] / 30
