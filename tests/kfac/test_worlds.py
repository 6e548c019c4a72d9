"""Worlds of five, worlds that change their size, and gradients that are exchanged otherwise: ranks
are threads, and one process with all their examples is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from kfac_support import reference
from kfac_support.plans import FactorsOfEveryone, InTurnWithoutPipelining, WithoutLoadBalancing
from kfac_support.reference import batch_of, loss_of, make_net
from offbeat import Session
from thread_support.world import ThreadDriver, results_of, session_on

HYPER: dict[str, Any] = {
    "damping": 0.01,
    "kl_clip": 0.01,
    "decay": 0.9,
    "factor_interval": 1,
    "inverse_interval": 2,
}
OPTIONS = reference.options(**HYPER)
STRATEGIES: dict[str, Any] = {
    "dkfac": offbeat.DKFAC(**OPTIONS),
    "mpdkfac": offbeat.MPDKFAC(**OPTIONS),
    "spdkfac": offbeat.SPDKFAC(**OPTIONS),
    "spdkfac, no pipelining": InTurnWithoutPipelining(**OPTIONS),
    "spdkfac, no load balancing": WithoutLoadBalancing(**OPTIONS),
    "dpkfac": FactorsOfEveryone(**OPTIONS),
}
LR = 0.05

Job = Callable[[Session, nn.Module, torch.optim.Optimizer, int], Any]


def in_world(world_size: int, strategy: Any, net: nn.Module, job: Job) -> list[Any]:
    """What `job` returns on each rank, which has a session and a copy of `net` of its own."""

    nets = [copy.deepcopy(net) for _ in range(world_size)]

    def work(driver: ThreadDriver) -> Any:
        model = nets[driver.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with session_on(driver, model, optimizer, strategy) as session:
            return job(session, model, optimizer, driver.rank)

    return results_of(world_size, work)


def stepping(steps: Sequence[int]) -> Job:
    def job(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
    ) -> dict[str, torch.Tensor]:
        for step in steps:
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    return job


@cache
def expected_of(*world_sizes: int, **more: Any) -> dict[str, torch.Tensor]:
    """Of one process, with the examples of so many ranks in each step."""
    net = make_net()
    batches = [
        reference.together([batch_of(rank, step) for rank in range(world_size)])
        for step, world_size in enumerate(world_sizes)
    ]
    reference.train(net, batches, lr=LR, **HYPER | more)
    return net.state_dict()


def assert_all_are(found: Sequence[dict[str, torch.Tensor]], expected: Any) -> None:
    for weights in found:
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)
            assert torch.equal(tensor, found[0][name])


@pytest.mark.parametrize("name", STRATEGIES)
def test_five_ranks_do_what_one_does_with_all_examples(name: str) -> None:
    found = in_world(5, STRATEGIES[name], make_net(), stepping(range(5)))
    assert_all_are(found, expected_of(*[5] * 5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["spdkfac", "dpkfac"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_several_exchanges_make_the_step_that_one_of_all_passes_makes(
    name: str, is_tied: bool
) -> None:
    def accumulating(exchanges: bool) -> Job:
        def job(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
            for step in range(4):
                draw = torch.Generator().manual_seed(10 * step + rank)
                x, y = torch.randint(7, (2, 6), generator=draw)
                for number in range(3):
                    with nullcontext() if exchanges or number == 2 else session.no_sync():
                        loss = (
                            nn.functional.cross_entropy(model(x), y)
                            if is_tied
                            else loss_of(model, batch_of(rank, step))
                        )
                        (loss / 3).backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

        return job

    torch.manual_seed(5)
    net = Tied().double() if is_tied else make_net()
    expected, *_ = in_world(2, STRATEGIES[name], net, accumulating(exchanges=False))
    assert_all_are(in_world(2, STRATEGIES[name], net, accumulating(exchanges=True)), expected)


@pytest.mark.parametrize("name", ["spdkfac", "dpkfac"])
def test_gradients_that_were_exchanged_and_dropped_are_no_part_of_the_step(name: str) -> None:
    def job(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        for step in range(4):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
        return model.state_dict()

    assert_all_are(in_world(2, STRATEGIES[name], make_net(), job), expected_of(*[2] * 4))


@pytest.mark.parametrize("name", ["spdkfac", "dpkfac"])
@pytest.mark.parametrize("grafting", ["floor", "layer"])
def test_all_ranks_graft_alike_and_go_on_from_a_checkpoint(name: str, grafting: str) -> None:
    """There is nothing of it to be kept."""
    more = {"damping": 0.1, "grafting": grafting}
    strategy = replace(STRATEGIES[name], **more)
    nets = make_net(), make_net()

    def first(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        weights = stepping(range(2))(session, model, optimizer, rank)
        return weights, copy.deepcopy(session.state_dict())

    saved = in_world(2, strategy, nets[0], first)
    nets[1].load_state_dict(saved[0][0])

    def second(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        session.load_state_dict(saved[rank][1])
        return stepping(range(2, 5))(session, model, optimizer, rank)

    assert_all_are(in_world(2, strategy, nets[1], second), expected_of(*[2] * 5, **more))


@pytest.mark.parametrize("name", ["dkfac", "mpdkfac", "spdkfac", "dpkfac"])
def test_a_run_goes_on_with_another_number_of_ranks(name: str) -> None:
    """Step 3 has the inverses of step 2, which other ranks have made."""
    strategy = STRATEGIES[name]

    def first(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        weights = stepping(range(3))(session, model, optimizer, rank)
        return weights, copy.deepcopy(session.state_dict())

    saved = in_world(3, strategy, make_net(), first)
    net = make_net()
    net.load_state_dict(saved[0][0])
    states = [state for _, state in saved]
    for resumed_with in (1, 5):

        def second(
            session: Session, model: nn.Module, optimizer: Any, rank: int, size: int = resumed_with
        ) -> Any:
            session.load_state_dict(offbeat.reshard(states, size, rank))
            return stepping(range(3, 7))(session, model, optimizer, rank)

        found = in_world(resumed_with, strategy, net, second)
        assert_all_are(found, expected_of(*[3] * 3, *[resumed_with] * 4))


@pytest.mark.parametrize("resumed_with", [1, 2, 5])
def test_owners_of_another_world_get_what_the_old_ones_had(resumed_with: int) -> None:
    """Step 3 has the inverses of step 2, of each owner's own examples; all ranks have one batch in
    it, so that gradients are alike in all worlds.
    """
    seldom = HYPER | {"factor_interval": 100, "inverse_interval": 100}
    strategy = offbeat.DPKFAC(**reference.options(**seldom))

    def last_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        loss_of(model, batch_of(0, 1)).backward()
        optimizer.step()
        return model.state_dict()

    def first(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        weights = copy.deepcopy(stepping([0, 1, 2])(session, model, optimizer, rank))
        state = copy.deepcopy(session.state_dict())
        return weights, state, last_step(model, optimizer)

    saved = in_world(3, strategy, make_net(), first)
    net = make_net()
    net.load_state_dict(saved[0][0])

    def second(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        states = [state for _, state, _ in saved]
        session.load_state_dict(offbeat.reshard(states, resumed_with, rank))
        assert not [notice for notice in session.notices if "the checkpoint" in notice]
        return last_step(model, optimizer)

    assert_all_are(in_world(resumed_with, strategy, net, second), saved[0][2])


class Folding(nn.Module):
    """The first layer sees each position as an example of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.body(x.flatten(0, 1)).tanh()
        return self.head(rows.unflatten(0, x.shape[:2]).mean(1))  # type: ignore[no-any-return]


def test_an_owner_counts_the_terms_of_the_loss_at_layers_of_others_too() -> None:
    def job(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(4, 5, 3, generator=draw, dtype=torch.float64)
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    torch.manual_seed(0)
    net, strategy = Folding().double(), offbeat.DPKFAC(**OPTIONS)
    (expected,) = in_world(1, strategy, net, job)
    assert_all_are(in_world(2, strategy, net, job), expected)


def test_an_owner_without_the_others_states_is_told_so() -> None:
    """A state that is loaded as it is, though the world has changed."""

    def first(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        stepping([0])(session, model, optimizer, rank)
        return copy.deepcopy(session.state_dict())

    saved = in_world(3, offbeat.DPKFAC(**OPTIONS), make_net(), first)
    lone = offbeat.reshard([saved[0]], 1, 0)

    def second(session: Session, model: nn.Module, optimizer: Any, rank: int) -> Any:
        session.load_state_dict(lone)
        stepping(range(1, 4))(session, model, optimizer, rank)
        return session.notices

    (notices,) = in_world(1, offbeat.DPKFAC(**OPTIONS), make_net(), second)
    assert any("the checkpoint has nothing of K-FAC's factors" in notice for notice in notices)


@pytest.mark.parametrize("density", [1.0, 0.2])
def test_sparse_gradients_go_with_dense_factors(density: float) -> None:
    exchange = offbeat.GTopK(density=density)
    strategy = offbeat.SPDKFAC(exchange=exchange, **OPTIONS)
    found = in_world(3, strategy, make_net(), stepping(range(5)))
    if density == 1:
        assert_all_are(found, expected_of(*[3] * 5))
    else:
        assert_all_are(found, found[0])
        assert any((found[0][k] != v).any() for k, v in expected_of(*[3] * 5).items())
