"""1-bit Adam against its paper's algorithm in one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.codec.value_codecs import ValueCodec
from offbeat.errors import UnsupportedError
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on

SHAPE, LR, BETA1, BETA2, EPS, DECAY = (5, 6), 0.01, 0.8, 0.9, 1e-3, 0.1
FREEZE, NUM_STEPS = 3, 8


@dataclass(frozen=True, kw_only=True)
class Lossless(offbeat.OneBitAdam):
    values: ClassVar[ValueCodec] = VALUE_CODECS["float32"]


class Net(torch.nn.Module):
    """`dead` gets no gradient before the freeze."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(SHAPE, generator=draw).double())
        self.dead = torch.nn.Parameter(torch.ones(2).double())


def gradient_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    gradient = torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    if step < FREEZE:
        gradient[:, 0] = 0
    return gradient


def optimizer_of(net: torch.nn.Module, **options: Any) -> torch.optim.Adam:
    kind = torch.optim.AdamW if options.pop("decoupled", False) else torch.optim.Adam
    return kind(net.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, **options)


def step_of(net: Net, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss = (net.weight * gradient_of(rank, step)).sum()
    if step >= FREEZE:
        loss = loss + net.dead.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def signs(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, -1.0, 1.0) * values.abs().mean()


class Reference:
    """The paper's algorithm, of `Net.weight` alone."""

    def __init__(self, num_ranks: int, *, decoupled: bool, maximize: bool, lossless: bool) -> None:
        self.net = Net()
        self.decoupled, self.sign, self.lossless = decoupled, -1 if maximize else 1, lossless
        self.mean = self.square = torch.zeros(SHAPE, dtype=torch.float64)
        self.owed = [torch.zeros(30, dtype=torch.float64) for _ in range(num_ranks)]
        self.bounds = [30 * owner // num_ranks for owner in range(num_ranks + 1)]

    def step(self, step: int) -> None:
        weight, ranks = self.net.weight.detach(), range(len(self.owed))
        gradients = [self.sign * gradient_of(rank, step) for rank in ranks]
        if self.decoupled:
            weight *= 1 - LR * DECAY
        else:
            gradients = [gradient + DECAY * weight for gradient in gradients]
        if step < FREEZE:
            gradient = sum(gradients) / len(gradients)
            self.mean = BETA1 * self.mean + (1 - BETA1) * gradient
            self.square = BETA2 * self.square + (1 - BETA2) * gradient**2
        else:
            momenta = [BETA1 * self.mean + (1 - BETA1) * gradient for gradient in gradients]
            divisor = self.divisor(FREEZE)
            self.mean = self.mean_of([momentum / divisor for momentum in momenta])
            self.mean *= torch.where(divisor.isinf(), 0, divisor)
        moves = LR * self.mean / (1 - BETA1 ** (step + 1))
        weight -= moves / self.divisor(min(step + 1, FREEZE))

    def divisor(self, num_updates: int) -> torch.Tensor:
        root = (self.square / (1 - BETA2**num_updates)).sqrt() + EPS
        return torch.where(self.square > 0, root, torch.inf)

    def mean_of(self, momenta: list[torch.Tensor]) -> torch.Tensor:
        if self.lossless:
            return torch.stack(momenta).mean(0)
        mine = [
            momentum.flatten() + owed for momentum, owed in zip(momenta, self.owed, strict=True)
        ]
        total = torch.zeros(30, dtype=torch.float64)
        for owner in range(len(mine)):
            here = slice(*self.bounds[owner : owner + 2])
            region = mine[owner][here].clone()
            for rank, each in enumerate(mine):
                if rank != owner:
                    region += signs(each[here])
                    self.owed[rank][here] = each[here] - signs(each[here])
            total[here] = signs(region)
            self.owed[owner][here] = region - total[here]
        return total.view(SHAPE) / len(mine)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("lossless", "decoupled", "maximize"),
    [(True, False, False), (False, True, False), (False, True, True)],
)
def test_steps_are_those_of_the_paper(
    num_ranks: int,
    lossless: bool,
    decoupled: bool,
    maximize: bool,
) -> None:
    kind = Lossless if lossless else offbeat.OneBitAdam
    # A bucket for each parameter:
    strategy = lent(kind(freeze_step=FREEZE), bucket_mib=1e-4)

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        net = Net()
        optimizer = optimizer_of(net, decoupled=decoupled, weight_decay=DECAY, maximize=maximize)
        found = []
        with session_on(driver, net, optimizer, strategy):
            for step in range(NUM_STEPS):
                step_of(net, optimizer, driver.rank, step)
                state = optimizer.state_dict()["state"][0]
                found += [net.weight.detach().clone(), state["exp_avg"].clone()]
                assert float(state["step"]) == step + 1
            square = state["exp_avg_sq"].clone()
        assert torch.equal(net.dead, torch.ones(2))  # it has no second moment to be divided by
        return [*found, square]

    results = results_of(num_ranks, job)
    reference = Reference(num_ranks, decoupled=decoupled, maximize=maximize, lossless=lossless)
    expected = []
    for step in range(NUM_STEPS):
        reference.step(step)
        expected += [reference.net.weight.detach().clone(), reference.mean]
    expected.append(reference.square)
    for found in results:
        for mine, right, first in zip(found, expected, results[0], strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
            assert torch.equal(mine, first)


def test_second_moments_that_are_loaded_are_frozen_at_once() -> None:
    net, plain = Net(), Net()
    optimizer, adam = optimizer_of(net), optimizer_of(plain)
    for step in range(FREEZE):
        step_of(plain, adam, 0, step)
    net.load_state_dict(plain.state_dict())
    before = {name: each.clone() for name, each in adam.state_dict()["state"][0].items()}
    with offbeat.attach(net, optimizer, Lossless(freeze_step=FREEZE)):
        optimizer.load_state_dict(adam.state_dict())
        step_of(net, optimizer, 0, FREEZE)
        after = optimizer.state_dict()["state"][0]
        assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
        assert not torch.equal(after["exp_avg"], before["exp_avg"])


@pytest.mark.parametrize("saved_after", [1, FREEZE + 2])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(saved_after: int) -> None:
    def begin() -> tuple[Net, torch.optim.Optimizer, offbeat.Session]:
        net = Net()
        optimizer = optimizer_of(net, weight_decay=DECAY)
        strategy = offbeat.OneBitAdam(freeze_step=FREEZE)
        return net, optimizer, offbeat.attach(net, optimizer, strategy)

    net, optimizer, session = begin()
    with session:
        for step in range(NUM_STEPS):
            step_of(net, optimizer, 0, step)
            if step == saved_after:
                states = [net.state_dict(), optimizer.state_dict(), session.state_dict()]
                saved = copy.deepcopy(states)
    resumed, optimizer, session = begin()
    with session:
        resumed.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        session.load_state_dict(saved[2])
        for step in range(saved_after + 1, NUM_STEPS):
            step_of(resumed, optimizer, 0, step)
    assert torch.equal(resumed.weight, net.weight)


def test_two_passes_in_a_step_are_one_with_the_sum_of_their_gradients() -> None:
    nets = []
    for num_passes in (1, 2):
        net = Net()
        optimizer = optimizer_of(net, weight_decay=DECAY)
        with offbeat.attach(net, optimizer, Lossless(freeze_step=FREEZE)):
            for step in range(NUM_STEPS):
                for _ in range(num_passes):
                    (net.weight * gradient_of(0, step) / num_passes).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        nets.append(net)
    torch.testing.assert_close(nets[0].weight, nets[1].weight, rtol=1e-9, atol=1e-9)


def test_passes_in_a_step_may_use_different_parameters() -> None:
    """As those of two losses do."""
    found = []
    for num_passes in (1, 2):
        net = torch.nn.ModuleList([Net(), Net()])
        optimizer = optimizer_of(net, weight_decay=DECAY)
        with offbeat.attach(net, optimizer, Lossless(freeze_step=FREEZE)):
            for step in range(NUM_STEPS):
                losses = [(each.weight * gradient_of(0, step)).sum() for each in net]
                for loss in losses if num_passes == 2 else [sum(losses)]:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.stack([each.weight.detach() for each in net]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_gradient_is_not_added_to_what_has_become_momentum() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    with offbeat.attach(net, optimizer, offbeat.OneBitAdam(freeze_step=1)) as session:
        for is_frozen in (False, True):
            refused = pytest.raises(UnsupportedError, match="unsynchronised passes of a step first")
            net.weight.sum().backward()
            with session.no_sync(), refused if is_frozen else contextlib.nullcontext():
                net.weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_parameter_that_no_rank_uses_keeps_its_momentum() -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        net = Net()
        optimizer = optimizer_of(net)
        with session_on(driver, net, optimizer, offbeat.OneBitAdam(freeze_step=1)) as session:
            (net.weight.sum() + net.dead.sum()).backward()
            optimizer.step()
            for step in range(1, 4):
                optimizer.zero_grad()
                (net.weight * gradient_of(driver.rank, step)).sum().backward()
                optimizer.step()
            owed = session.state_dict()["callbacks"]["gradients"]["additive"]["residual/dead"]
        return [optimizer.state[net.dead]["exp_avg"], owed.clone()]

    results = results_of(3, job)
    for momentum, _ in results:
        torch.testing.assert_close(momentum, torch.full((2,), 1 - BETA1).double())
    torch.testing.assert_close(sum(owed for _, owed in results), torch.zeros(2).double())


@pytest.mark.parametrize(
    "strategy", [offbeat.OneBitAdam(freeze_step=5), offbeat.ZeroOneAdam(freeze_step=5, period=2)]
)
def test_elements_with_smaller_gradients_than_their_neighbours_make_no_larger_steps(
    strategy: Strategy,
) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    optimizer.param_groups[0]["eps"] = 1e-12
    sizes = torch.logspace(0, -8, SHAPE[1])
    with offbeat.attach(net, optimizer, strategy):
        for step in range(20):
            before = net.weight.detach().clone()
            (net.weight * gradient_of(0, FREEZE + step) * sizes).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert float((net.weight - before).detach().abs().max()) < 3 * LR


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RAdam])
def test_another_optimizer_is_refused(kind: Any) -> None:
    net = Net()
    with pytest.raises(UnsupportedError, match=kind.__name__):
        offbeat.attach(net, kind(net.parameters(), lr=LR), offbeat.OneBitAdam())


def test_a_parameter_that_was_used_in_some_steps_alone_has_the_second_moment_of_those() -> None:
    """Its own number of steps goes on after the freeze, and its second moment stays."""
    net = Net()
    optimizer = optimizer_of(net)
    with offbeat.attach(net, optimizer, Lossless(freeze_step=20)):
        for step in range(60):
            loss = net.weight.sum()
            if step == 0 or step >= 20:
                loss = loss + net.dead.sum()
            before = net.dead.detach().clone()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # The gradient has always been 1, so that Adam moves by the learning rate.
    torch.testing.assert_close(
        before - net.dead.detach(), torch.full((2,), LR).double(), rtol=0.01, atol=0
    )


def test_adam_goes_on_after_the_session_with_steps_of_the_same_size() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)

    def step() -> float:
        before = net.weight.detach().clone()
        net.weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return float((before - net.weight.detach()).mean())

    with offbeat.attach(net, optimizer, Lossless(freeze_step=2)):
        sizes = [step() for _ in range(50)]
    # The gradient has always been 1, so that Adam moves by the learning rate.
    assert [*sizes, step(), step()] == pytest.approx([LR] * 52, rel=0.01)


def test_a_group_that_comes_after_the_freeze_is_told_of_once() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(net[0].parameters(), lr=LR)

    def step() -> None:
        net.zero_grad()
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    with offbeat.attach(net, optimizer, offbeat.OneBitAdam(freeze_step=1)) as session:
        step()
        step()
        assert not any("larger freeze_step" in notice for notice in session.notices)
        optimizer.add_param_group({"params": [*net[1].parameters()]})
        step()
        step()
        assert sum("larger freeze_step" in notice for notice in session.notices) == 1


def test_a_parameter_that_some_ranks_use_has_all_of_its_weight_decay() -> None:
    """As a layer that each rank leaves out now and then: as if its gradient were zero there."""

    def trained(driver: ThreadDriver, leaves_out: bool) -> torch.Tensor:
        net = Net()
        optimizer = optimizer_of(net, weight_decay=DECAY)
        with session_on(driver, net, optimizer, Lossless(freeze_step=FREEZE)):
            for step in range(NUM_STEPS):
                loss = net.dead.sum()
                if driver.rank == 0 or step < FREEZE:
                    loss = loss + (net.weight * gradient_of(driver.rank, step)).sum()
                elif not leaves_out:
                    loss = loss + (0 * net.weight).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return net.weight.detach()

    used = results_of(2, lambda driver: trained(driver, False))
    left_out = results_of(2, lambda driver: trained(driver, True))
    torch.testing.assert_close(left_out, used, rtol=1e-12, atol=1e-12)


def test_a_state_of_before_the_freeze_that_is_loaded_trains_as_it_did() -> None:
    """As each fold of a cross-validation begins."""
    net = Net()
    optimizer = optimizer_of(net)
    begun = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    found = []
    with offbeat.attach(net, optimizer, Lossless(freeze_step=FREEZE)):
        for _ in range(2):
            net.load_state_dict(begun[0])
            optimizer.load_state_dict(begun[1])
            for step in range(NUM_STEPS):
                step_of(net, optimizer, 0, step)
            found.append(net.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
