"""DeAR against AllReduce, which it must equal but for the order in which sums are rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat import Session
from offbeat.errors import CheckpointError, PeerError, UnsupportedError
from offbeat.torch_private import version_of
from thread_support.world import ThreadDriver, in_threads, results_of, session_on

Optimizers: TypeAlias = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
Found: TypeAlias = list[torch.Tensor]
Way: TypeAlias = Callable[[Session, torch.nn.Module, int, int], None]

NUM_STEPS = 10
SMALL = lent(offbeat.DeAR(), bucket_mib=5e-4, replica_check_interval=7)
"""Some 65 elements of float64 in a bucket, so that parts begin within parameters."""

OPTIMIZERS: dict[str, Optimizers] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    # The gradient of a key's bias is rounding alone, which a smaller eps would blow up.
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:3]}, {"params": p[3:], "lr": 0.02, "betas": (0.8, 0.9)}], lr=0.01
    ),
}


class Attended(torch.nn.Module):
    """A layer whose parameters the module around it computes with, a channels-last convolution, a
    scalar, and a parameter that two modules have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.unused = torch.nn.Linear(3, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(x).flatten(2).transpose(1, 2)
        hidden = self.attention(hidden, hidden, hidden)[0]
        return self.scale * self.second(torch.tanh(self.first(hidden)))


with torch.random.fork_rng():
    torch.manual_seed(0)
    FIRST = Attended()


def attended() -> Attended:
    """The same in every thread; threads share a source of random numbers."""
    return copy.deepcopy(FIRST)


def loss_of(net: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(3, 2, 4, 4, generator=draw, dtype=torch.float64)
    loss: torch.Tensor = (net(x) - x.mean()).square().mean()
    return loss


def plain(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    loss_of(net, rank, step).backward()


def clipped(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    loss_of(net, rank, step).backward()
    assert session.clip_grad_norm_(0.01) > 0.01


def accumulated(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    """Two exchanges in a step."""
    for half in (0, 50):
        loss_of(net, rank, step + half).backward()


def unsynchronised(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    with session.no_sync():
        loss_of(net, rank, step + 50).backward()
    loss_of(net, rank, step).backward()


def weighed(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    session.weigh(rank + step % 3 + 1)
    loss_of(net, rank, step).backward()


def non_finite(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    """On one rank, now and then."""
    factor = float("inf") if rank == step % 2 and step % 5 == 3 else 1.0
    (factor * loss_of(net, rank, step)).backward()


def evaluated(session: Session, net: torch.nn.Module, rank: int, step: int) -> None:
    """By the first rank alone."""
    if rank == 0:
        with torch.no_grad():
            loss_of(net, rank, step)
        copy.deepcopy(net).load_state_dict(net.state_dict())
    loss_of(net, rank, step).backward()


WAYS = (clipped, accumulated, unsynchronised, weighed, non_finite, evaluated)


def trained(
    driver: ThreadDriver,
    strategy: Any,
    make: Optimizers,
    way: Way = plain,
) -> tuple[Found, dict[str, Any], int]:
    """The parameters and the optimizer's state at the end, and steps that were skipped."""
    net = attended()
    optimizer = make(list(net.parameters()))
    with session_on(driver, net, optimizer, strategy) as session:
        for step in range(NUM_STEPS):
            way(session, net, driver.rank, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        skipped = session.stats.skipped_steps
    return [p.detach() for p in net.parameters()], optimizer.state_dict(), skipped


def assert_close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(1, "groups"), *((3, name) for name in OPTIMIZERS)]
)
def test_training_ends_as_with_all_reduce(num_ranks: int, name: str) -> None:
    """With the optimizer's state, which is whole at the end."""
    make = OPTIMIZERS[name]
    theirs = results_of(num_ranks, lambda driver: trained(driver, offbeat.AllReduce(), make))
    mine = results_of(num_ranks, lambda driver: trained(driver, SMALL, make))
    for found in mine:
        assert_close(found[:2], theirs[0][:2])
        assert all(map(torch.equal, found[0], mine[0][0]))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_the_loop_does_it_ends_as_with_all_reduce(way: Way) -> None:
    make = OPTIMIZERS["adam"]
    theirs = results_of(3, lambda driver: trained(driver, offbeat.AllReduce(), make, way))
    mine = results_of(3, lambda driver: trained(driver, SMALL, make, way))
    for found in mine:
        assert_close(found, theirs[0])
    assert (mine[0][2] > 0) == (way is non_finite)


@pytest.mark.parametrize(("new_size", "make"), [(1, "adam"), (2, "adagrad"), (3, "adam")])
def test_a_resumed_run_goes_on_with_its_share_of_the_state(new_size: int, make: str) -> None:
    """Two ranks are followed by as many as there are then, all of which see one rank's batches."""

    def train(session: Session, net: torch.nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def first(driver: ThreadDriver) -> tuple[Any, Any, Any]:
        net = attended()
        optimizer = OPTIMIZERS[make](list(net.parameters()))
        with session_on(driver, net, optimizer, SMALL) as session:
            train(session, net, optimizer, range(10))
            saved = session.state_dict(), copy.deepcopy(net.state_dict()), optimizer.state_dict()
            assert any("session.state_dict()" in notice for notice in session.notices)
        return saved

    saved = results_of(2, first)
    states, model, optimizer_state = [each[0] for each in saved], saved[0][1], saved[1][2]

    def second(driver: ThreadDriver) -> Found:
        net = attended()
        optimizer = OPTIMIZERS[make](list(net.parameters()))
        with session_on(driver, net, optimizer, SMALL) as session:
            net.load_state_dict(model)
            session.load_state_dict(offbeat.reshard(states, new_size, driver.rank))
            optimizer.load_state_dict(optimizer_state)
            train(session, net, optimizer, range(10, 20))
        return [p.detach() for p in net.parameters()]

    straight = attended()
    optimizer = OPTIMIZERS[make](list(straight.parameters()))
    for step in range(20):
        loss_of(straight, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in results_of(new_size, second):
        assert_close(found, [p.detach() for p in straight.parameters()])


def test_an_optimizer_that_has_stepped_before_goes_on() -> None:
    """Its state is divided when it is attached, and whole again in between."""
    nets = [attended(), attended()]
    optimizers = [OPTIMIZERS["adam"](list(net.parameters())) for net in nets]
    for strategy in (None, offbeat.DeAR(), None, offbeat.DeAR()):
        with offbeat.attach(nets[0], optimizers[0], strategy) if strategy else nullcontext() as on:
            for net, optimizer in zip(nets, optimizers, strict=True):
                for step in range(3):
                    loss_of(net, 0, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if on is not None:
                assert on.state_dict()["callbacks"]["sharded_steps"]["owned"]
        assert_close(optimizers[0].state_dict(), optimizers[1].state_dict())
    assert_close(list(nets[0].parameters()), list(nets[1].parameters()))


def test_steps_after_finish_are_whole_on_every_rank_too() -> None:
    def job(driver: ThreadDriver) -> tuple[Found, list[int]]:
        net = attended()
        optimizer = OPTIMIZERS["adam"](list(net.parameters()))
        num_states = []
        with session_on(driver, net, optimizer, offbeat.DeAR()) as session:
            for step in range(3):
                loss_of(net, driver.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                session.finish()
                num_states.append(len(optimizer.state_dict()["state"]))
        return [p.detach().clone() for p in net.parameters()], num_states

    (first, num_states), (second, _) = results_of(2, job)
    assert_close(first, second)
    assert num_states == [num_states[0]] * 3
    assert num_states[0] > 0


def test_state_that_lacks_a_rank_is_refused() -> None:
    def job(driver: ThreadDriver) -> Any:
        net = attended()
        optimizer = OPTIMIZERS["adam"](list(net.parameters()))
        with session_on(driver, net, optimizer, offbeat.DeAR()) as session:
            loss_of(net, 0, 0).backward()
            optimizer.step()
            return session.state_dict()

    state = results_of(2, job)[0]
    net = attended()
    optimizer = OPTIMIZERS["adam"](list(net.parameters()))
    with (
        offbeat.attach(net, optimizer, offbeat.DeAR()) as session,
        pytest.raises(CheckpointError, match="lacks elements, .* with the same bucket_mib"),
    ):
        session.load_state_dict(offbeat.reshard([state], 1, 0) | {"world_size": 1, "rank": 0})


def test_state_of_the_optimizer_is_divided_by_the_number_of_ranks() -> None:
    def job(driver: ThreadDriver) -> int:
        net = attended()
        optimizer = OPTIMIZERS["adam"](list(net.parameters()))
        with session_on(driver, net, optimizer, offbeat.DeAR()) as session:
            loss_of(net, 0, 0).backward()
            optimizer.step()
            assert not optimizer.state
            owned = session.state_dict()["callbacks"]["sharded_steps"]["owned"]
            return sum(each.numel() for name, each in owned.items() if "exp_avg" in name)

    num_elements = sum(p.numel() for p in attended().parameters()) - 20  # of the unused layer
    held = results_of(3, job)
    assert sum(held) == 2 * num_elements
    assert max(held) < 0.4 * sum(held)


def clip(parameters: Iterable[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def centre(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad - parameter.grad.mean()


@pytest.mark.parametrize("change", [clip, centre])
def test_gradients_of_parts_that_the_loop_changes_are_refused(
    change: Callable[[Iterable[torch.nn.Parameter]], None],
) -> None:
    net = attended()
    optimizer = OPTIMIZERS["momentum"](list(net.parameters()))
    with offbeat.attach(net, optimizer, offbeat.DeAR()):
        loss_of(net, 0, 0).backward()
        change(net.parameters())
        with pytest.raises(UnsupportedError, match=r"session\.clip_grad_norm_"):
            optimizer.step()


def test_a_parameter_that_is_changed_while_it_is_gathered_is_refused() -> None:
    net = attended()
    optimizer = OPTIMIZERS["momentum"](list(net.parameters()))
    session = offbeat.attach(net, optimizer, lent(offbeat.DeAR(), replica_check_interval=0))
    loss_of(net, 0, 0).backward()
    optimizer.step()
    with torch.no_grad():
        net.scale.clamp_(0, 0.1)
    with pytest.raises(UnsupportedError, match="'scale' was changed"):
        loss_of(net, 0, 1)
    session.close()
    (group,) = optimizer.param_groups
    assert all(
        mine is theirs for mine, theirs in zip(group["params"], net.parameters(), strict=True)
    )


def test_what_cannot_be_divided_is_refused() -> None:
    net = attended()
    strategies = (offbeat.DeAR(), offbeat.DKFAC(exchange=offbeat.DeAR()))
    optimizers = (torch.optim.Adafactor, torch.optim.SGD)
    for strategy, make, reason in zip(
        strategies, optimizers, ("each element by itself", "a part of"), strict=True
    ):
        with pytest.raises(UnsupportedError, match=reason):
            offbeat.attach(net, make(net.parameters(), lr=0.1), strategy)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_ends_earlier_is_an_error_on_all(num_ranks: int) -> None:
    def job(driver: ThreadDriver) -> None:
        net = attended()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with session_on(driver, net, optimizer, SMALL):
            for step in range(3 if driver.rank == 1 else 5):
                loss_of(net, driver.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()

    outcomes = in_threads(num_ranks, job)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, PeerError)
        says = "rank 0 takes further steps" if rank == 1 else "rank 1 takes no more steps"
        assert says in str(outcome)


def test_parameters_are_waited_for_one_module_after_the_other() -> None:
    """From the second pass on, the first layers do not wait for those of the last."""
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    net, last = torch.nn.Sequential(*layers), layers[-1].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strategy = lent(offbeat.DeAR(), bucket_mib=1e-6, replica_check_interval=0)
    seen: list[int] = []
    with offbeat.attach(net, optimizer, strategy):
        for layer in layers[1:]:
            layer.register_forward_pre_hook(lambda *_: seen.append(version_of(last)))
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    before, within = seen[0::2], seen[1::2]
    assert [later - sooner for sooner, later in zip(before, within, strict=True)] == [0, 1, 1]


def test_a_state_is_resumed_where_a_modules_name_holds_a_slash() -> None:
    net = torch.nn.Sequential()
    net.add_module("a/b", torch.nn.Linear(3, 2))
    optimizer = OPTIMIZERS["adam"](list(net.parameters()))
    with offbeat.attach(net, optimizer, offbeat.DeAR()) as session:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        saved = session.state_dict()
        session.load_state_dict(saved)
        states = [each["callbacks"]["sharded_steps"] for each in (session.state_dict(), saved)]
        assert_close(*states)


def test_what_another_optimizer_has_stepped_is_refused() -> None:
    net = attended()
    first = torch.optim.SGD([net.first.weight], lr=0.1)
    second = torch.optim.AdamW([p for p in net.parameters() if p is not net.first.weight])
    with offbeat.attach(net, second, offbeat.DeAR()):
        loss_of(net, 0, 0).backward()
        first.step()
        with pytest.raises(UnsupportedError, match=r"'first\.weight' .* another optimizer"):
            second.step()
