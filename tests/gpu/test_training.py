"""What each strategy does on a GPU, compared with the same strategy on the CPU: two ranks on one
device, whose messages travel over ZeroMQ and gloo.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import offbeat
from gpu_support import DEVICE
from offbeat.averaging.outer import OuterOptimizer
from offbeat.errors import PeerError
from offbeat.strategies import choice
from offbeat.strategies.by_name import build_strategy, parse_spec
from offbeat.strategies.choice import FIRST_LOOK
from ranks_support.launch import RunRanks

EXACT = [
    "allreduce",
    "gtopk:density=0.2:collective=reduce_scatter:warmup=none",
    "localsgd:period=2:warmup=0",
    "allreduce:codec=linear8",
    "powersgd:rank=1",
    "topk:density=0.2:warmup=none",
    "gtopk:density=0.2:collective=tree:codec=reuse:warmup=none",
    "gtopk:density=0.2:collective=all_gather:codec=bfloat16:warmup=none",
    "ef21:density=0.2",
    "demo:density=0.2",
    "defsgd:ratio=5",
    "qgenx:codec=linear8",
    "localsgd:period=2:warmup=0:codec=linear4",
    "localsgd:period=2:warmup=0:exchange=members",
    "a2sgd:period=2",
    "crossbow",
    "dpsgd",
    "sgp",
    "spdkfac",
    "mpdkfac",
    "dkfac",
    "dpkfac",
    "dear",
]
"""Whose result does not depend on who comes first."""

LOOSE = ["wagma:group_size=2", "adpsgd", "eagersgd"]
ADAMS = [
    "onebitadam",
    "zerooneadam",
    "gtopk:density=0.2:collective=tree:warmup=none",
    "localsgd:period=2:warmup=0",
    "demo",
]
ROUNDED = ("codec", "qgenx", "onebit", "zeroone", "demo", "a2sgd")
STEPS = 6


def net(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(3)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 64, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 5),
    )
    return made.double().to(device)


def batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn((8, 1, 8, 8), generator=draw, dtype=torch.float64)
    return inputs.to(device), torch.randint(5, (8,), generator=draw).to(device)


def train(rank: int, spec: str, adam: bool, device: torch.device) -> tuple[torch.Tensor, float]:
    """The weights after `STEPS`, on the CPU, and the last loss."""
    model = net(device)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01 if adam else 0.05)
    loss = torch.zeros(())
    with offbeat.attach(model, optimizer, build_strategy(*parse_spec(spec))):
        for step in range(STEPS):
            inputs, labels = batch(rank, step, device)

            def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> Any:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            if spec.startswith("qgenx"):
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return weights, float(loss.detach())


def both_devices(
    rank: int, world_size: int, *, spec: str, adam: bool, device: str
) -> dict[str, float]:
    before = torch.cat([p.detach().flatten() for p in net(torch.device("cpu")).parameters()])
    there, loss = train(rank, spec, adam, torch.device(device))
    here, _ = train(rank, spec, adam, torch.device("cpu"))
    return {
        "moved": float((here - before).norm()),
        "apart": float((here - there).norm()),
        "total": float(there.double().sum()),
        "loss": loss,
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spec", "adam"),
    [(spec, False) for spec in (EXACT if DEVICE == "cuda" else EXACT[:2])]
    + [(spec, True) for spec in (ADAMS if DEVICE == "cuda" else [])],
)
def test_a_strategy_does_on_a_gpu_what_it_does_on_a_cpu(
    run_ranks: RunRanks, device: torch.device, spec: str, adam: bool
) -> None:
    ran = run_ranks(both_devices, 2, spec=spec, adam=adam, device=device.type, timeout_s=120.0)
    for each in ran:
        assert each["moved"] > 0
        # Values that were rounded to few bits may fall on either side.
        rounds = any(word in spec for word in ROUNDED)
        assert each["apart"] <= (0.1 if rounds else 1e-6) * each["moved"], each
    if not rounds:
        assert ran[0]["total"] == pytest.approx(ran[1]["total"], rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("spec", LOOSE if DEVICE == "cuda" else LOOSE[:1])
def test_a_background_strategy_trains_on_a_gpu_and_ends_with_one_model(
    run_ranks: RunRanks, device: torch.device, spec: str
) -> None:
    ran = run_ranks(background, 2, spec=spec, device=device.type, timeout_s=120.0)
    assert ran[0]["total"] == pytest.approx(ran[1]["total"], rel=1e-12)
    assert all(0 < each["loss"] < 10 for each in ran)


def background(rank: int, world_size: int, *, spec: str, device: str) -> dict[str, float]:
    weights, loss = train(rank, spec, False, torch.device(device))
    return {"total": float(weights.sum()), "loss": loss}


def test_an_outer_optimizer_that_is_offloaded_takes_the_same_steps(device: torch.device) -> None:
    models = []
    for offload in (False, True):
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = offbeat.LocalSGD(period=2, outer=offbeat.Outer(offload=offload))
        with offbeat.attach(model, optimizer, strategy):
            for step in range(STEPS):
                inputs, labels = batch(0, step, device)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        models.append(model.state_dict())
    torch.testing.assert_close(models[1], models[0], rtol=1e-9, atol=1e-12)


def test_an_offloaded_outer_optimizer_is_on_the_host_between_averages(device: torch.device) -> None:
    model = net(device)
    parameters = dict(model.named_parameters())
    rule = OuterOptimizer(parameters, make=offbeat.Outer(offload=True))
    rule.begin()
    for _ in range(2):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(1)
        rule.merge_(None)
        state = rule.state()
        assert len(state) == 2 * len(parameters)  # the anchor and the momentum
        assert {kept.device.type for kept in state.values()} == {"cpu"}
        for name, anchor in rule.anchor.items():
            assert anchor.device == parameters[name].device
            torch.testing.assert_close(anchor.detach(), parameters[name].detach(), rtol=0, atol=0)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}])
def test_adam_goes_on_by_itself_after_zerooneadam(device: torch.device, options: Any) -> None:
    """Its number of steps is where its kernels look for it."""
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step(number: int) -> None:
        inputs, labels = batch(0, number, device)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    with offbeat.attach(model, optimizer, offbeat.ZeroOneAdam()):
        for number in range(3):
            step(number)
        assert {each["step"].device.type for each in optimizer.state.values()} == {device.type}
    step(3)
    assert {float(each["step"]) for each in optimizer.state.values()} == {4.0}


def megabatch(rank: int, world_size: int, *, device: str) -> dict[str, float]:
    at = torch.device(device)
    model = net(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = batch(0, 0, torch.device("cpu"))
    data = torch.utils.data.TensorDataset(inputs.repeat(16, 1, 1, 1), labels.repeat(16))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=at.type == "cuda")
    with offbeat.attach(model, optimizer, offbeat.AdaptiveSGD(mega_batch=4)) as session:
        loss = torch.zeros(())
        for inputs, labels in session.loader(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs.to(at)), labels.to(at))
            loss.backward()
            optimizer.step()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    return {"total": total, "loss": float(loss.detach())}


@pytest.mark.ranks
@pytest.mark.needs_gpu
def test_mega_batches_are_merged_on_a_gpu(run_ranks: RunRanks, device: torch.device) -> None:
    ran = run_ranks(megabatch, 2, device=device.type, timeout_s=120.0)
    assert ran[0]["total"] == pytest.approx(ran[1]["total"], rel=1e-9)


def dies(rank: int, world_size: int, *, device: str) -> str:
    at = torch.device(device)
    model = net(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with offbeat.attach(model, optimizer, offbeat.AllReduce()):
            for step in range(1000):
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                inputs, labels = batch(rank, step, at)
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    except PeerError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
@pytest.mark.needs_gpu
def test_a_death_is_named_on_a_gpu(run_ranks: RunRanks, device: torch.device) -> None:
    said = run_ranks(dies, 2, device=device.type, timeout_s=60.0, may_die={1})
    assert "rank 1" in said[0]


def chooses(rank: int, world_size: int, *, device: str) -> dict[str, Any]:
    choice.MOST_WAITING = float("inf")  # type: ignore[misc]  # no early look
    at = torch.device(device)
    model = net(at).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with offbeat.attach(model, optimizer, "auto") as session:
        for step in range(FIRST_LOOK + 10):
            inputs, labels = batch(rank, step, at)
            torch.nn.functional.cross_entropy(model(inputs.float()), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        decisions = [decision.step for decision in session.decisions]
    return {"total": sum(float(p.detach().double().sum()) for p in model.parameters())} | {
        "decisions": decisions
    }


@pytest.mark.ranks
def test_auto_looks_once_and_ranks_end_alike_on_a_gpu(
    run_ranks: RunRanks, device: torch.device
) -> None:
    ran = run_ranks(chooses, 2, device=device.type, timeout_s=120.0)
    assert ran[0]["decisions"] == [FIRST_LOOK]
    assert ran[0] == ran[1]


def computes(rank: int, world_size: int, *, device: str) -> list[list[object]]:
    """Steps of which the device computes for nearly the whole time, and the host for none."""
    at = torch.device(device)
    model = torch.nn.Linear(64, 8).to(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    busy = torch.randn(4096, 4096, dtype=torch.float64, device=at)
    with offbeat.attach(model, optimizer, "auto") as session:
        for _ in range(FIRST_LOOK + 2):
            for _ in range(20):
                busy @ busy
            model(torch.randn(8, 64, device=at)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [[each.step, each.after] for each in session.decisions]


@pytest.mark.ranks
@pytest.mark.needs_gpu
def test_auto_does_not_take_what_the_device_computes_for_waiting(
    run_ranks: RunRanks, device: torch.device
) -> None:
    for decisions in run_ranks(computes, 2, device=device.type, timeout_s=120.0):
        assert decisions == [[FIRST_LOOK, "allreduce"]]
