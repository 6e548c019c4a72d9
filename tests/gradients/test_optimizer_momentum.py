"""SGD's momentum, taken over by a sparse strategy: where everything is sent it is SGD's own, and
when the session ends it is the optimizer's again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from conformance_support.nets import Net, assert_same, loss_of, train
from thread_support.world import ThreadDriver, results_of, session_on

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def with_buffers(state: dict[str, Any]) -> dict[int, torch.Tensor]:
    """A buffer of zeros is as good as none."""
    buffers = {number: entry["momentum_buffer"] for number, entry in state["state"].items()}
    return {number: one for number, one in buffers.items() if one is not None and one.any()}


def two_groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "momentum": 0.9},
        {"params": others, "momentum": 0.5, "nesterov": True},
    ]


def sgd(**options: Any) -> MakeOptimizer:
    return lambda net: torch.optim.SGD(net.parameters(), lr=0.05, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": sgd(momentum=0.9),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "weight decay": sgd(momentum=0.9, weight_decay=0.1),
    "maximize": sgd(momentum=0.5, weight_decay=0.1, maximize=True),
    "fused": sgd(momentum=0.9, nesterov=True, fused=True),
    "two groups": lambda net: torch.optim.SGD(two_groups(net), lr=0.05),
    "one group without": lambda net: torch.optim.SGD(
        [
            {"params": [net.conv.weight], "momentum": 0.9},
            {"params": [net.head.weight, net.head.bias], "weight_decay": 0.1},
        ],
        lr=0.05,
    ),
}
SEND_ALL: dict[str, Any] = {
    "densely": offbeat.GTopK(collective="dense"),
    "as entries": offbeat.GTopK(density=1.0, collective="reduce_scatter"),
    "in small buckets": lent(offbeat.TopK(density=1.0), bucket_mib=1e-4),
}
SPARSE = offbeat.GTopK(density=0.2, collective="reduce_scatter")
AT_ONCE = offbeat.GTopK(density=0.1, collective="reduce_scatter")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SEND_ALL)
def test_where_all_is_sent_it_is_the_plain_loop(name: str, kind: str) -> None:
    """And what one sees of the optimizer is what PyTorch shows, before, while and afterwards."""
    net, plain = Net(), Net()
    optimizer, plain_optimizer = (OPTIMIZERS[kind](each) for each in (net, plain))
    train(plain, plain_optimizer, range(5))
    with offbeat.attach(net, optimizer, SEND_ALL[name]) as session:
        assert any("momentum" in notice for notice in session.notices)
        assert optimizer.state_dict()["state"] == {}
        train(net, optimizer, range(5))
        shown, expected = optimizer.state_dict(), plain_optimizer.state_dict()
        assert shown["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(with_buffers(shown), with_buffers(expected), **CLOSE)
        assert options_of(optimizer) == options_of(plain_optimizer)
    assert_same(net, plain, **CLOSE)
    assert options_of(optimizer) == options_of(plain_optimizer)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "weight decay"])
def test_several_exchanges_in_a_step_are_one_step_of_momentum(kind: str) -> None:
    net, plain = Net(), Net()
    optimizer, plain_optimizer = (OPTIMIZERS[kind](each) for each in (net, plain))
    with offbeat.attach(net, optimizer, SEND_ALL["as entries"]):
        for model, opt in ((net, optimizer), (plain, plain_optimizer)):
            for step in range(0, 9, 3):
                for part in range(3):
                    loss_of(model, step + part).backward()
                opt.step()
                opt.zero_grad()
    assert_same(net, plain, **CLOSE)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "weight decay"])
@pytest.mark.parametrize("name", SEND_ALL)
def test_exchanges_of_a_step_may_be_of_different_parameters(name: str, kind: str) -> None:
    """As those of two losses are."""
    net, plain = Net(), Net()
    optimizer, plain_optimizer = (OPTIMIZERS[kind](each) for each in (net, plain))
    with offbeat.attach(net, optimizer, SEND_ALL[name]):
        for model, opt in ((net, optimizer), (plain, plain_optimizer)):
            for step in range(5):
                for model.use_branch in (False, True):
                    loss_of(model, step).backward()
                opt.step()
                opt.zero_grad()
    assert_same(net, plain, **CLOSE)


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_scheduler_may_change_it(attach_first: bool) -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["weight decay"](net) for net in nets]

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    schedulers = [] if attach_first else [schedule(optimizer) for optimizer in optimizers]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        schedulers = schedulers or [schedule(optimizer) for optimizer in optimizers]
        for net, optimizer, scheduler in zip(nets, optimizers, schedulers, strict=True):
            for step in range(8):
                train(net, optimizer, range(step, step + 1))
                scheduler.step()
    assert_same(*nets, **CLOSE)
    momenta = [optimizer.param_groups[0]["momentum"] for optimizer in optimizers]
    assert momenta[0] == momenta[1] != 0


@pytest.mark.parametrize("option", ["momentum", "weight_decay"])
def test_it_may_be_switched_off(option: str) -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["weight decay"](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(2))
            optimizer.param_groups[0][option] = 0
            train(net, optimizer, range(2, 4))
            optimizer.param_groups[0][option] = 0.2
            train(net, optimizer, range(4, 6))
            optimizer.param_groups[0][option] = 0.0
    assert_same(*nets, **CLOSE)
    assert [optimizer.param_groups[0][option] for optimizer in optimizers] == [0, 0]


@pytest.mark.parametrize("option", ["momentum", "weight_decay"])
def test_it_may_be_changed_relative_to_what_it_is(option: str) -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["weight decay"](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(2))
            for group in optimizer.param_groups:
                group[option] *= 0.5
            train(net, optimizer, range(2, 4))
    assert_same(*nets, **CLOSE)


def test_what_the_optimizer_alone_has_saved_is_gone_on_with() -> None:
    """A script that saves model and optimizer, and resumes with them."""
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["nesterov"](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        train(nets[0], optimizers[0], range(3))
        saved = copy.deepcopy((nets[0].state_dict(), optimizers[0].state_dict()))
        train(nets[0], optimizers[0], range(3, 6))
    nets[1].load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    train(nets[1], optimizers[1], range(3, 6))  # by PyTorch alone
    assert_same(*nets, **CLOSE)


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("option", ["lr", "momentum", "weight_decay"])
def test_a_hook_after_steps_reads_and_changes_what_the_user_has_set(
    option: str, attach_first: bool
) -> None:
    net = Net()
    optimizer = OPTIMIZERS["weight decay"](net)
    expected = optimizer.param_groups[0][option] * 0.5**2

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group[option] *= 0.5

    if not attach_first:
        optimizer.register_step_post_hook(halve)
    with offbeat.attach(net, optimizer, AT_ONCE):
        if attach_first:
            optimizer.register_step_post_hook(halve)
        train(net, optimizer, range(2))
        assert optimizer.param_groups[0][option] == expected
    assert optimizer.param_groups[0][option] == expected


@pytest.mark.parametrize(("strategy", "says"), [("at once", 1), ("spread", 0)])
def test_a_state_without_momentum_says_so_once(strategy: str, says: int) -> None:
    net = Net()
    optimizer = OPTIMIZERS["momentum"](net)
    with offbeat.attach(net, optimizer, AT_ONCE if strategy == "at once" else SPARSE) as session:
        train(net, optimizer, range(2))
        states = [optimizer.state_dict() for _ in range(2)]
        assert all(bool(with_buffers(state)) == (not says) for state in states)
        assert sum("has no momentum_buffer" in notice for notice in session.notices) == says


GRADIENT_OF_ONE_STEP: dict[str, Any] = {
    "at once": offbeat.TopK(density=0.01, warmup=None),
    "spread": offbeat.TopK(density=0.5, warmup=None),
    "first spread, then at once": offbeat.TopK(density=0.01, warmup=((1.0, 3), (0.3, 2))),
}


@pytest.mark.parametrize(("num_before", "nesterov"), [(0, True), (1, False), (3, True), (3, False)])
@pytest.mark.parametrize("strategy", GRADIENT_OF_ONE_STEP.values(), ids=GRADIENT_OF_ONE_STEP)
def test_one_gradient_moves_a_parameter_as_far_as_it_does_in_pytorch(
    strategy: Any, nesterov: bool, num_before: int
) -> None:
    """Whenever it came: `num_before` steps before the session, whose buffer it is in then."""
    net = torch.nn.Linear(20, 10, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    momentum = 0.8
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum, nesterov=nesterov)

    def step(gradient: float) -> None:
        (gradient * net.weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(num_before):
        step(0.0 if number else -1.0)
    with offbeat.attach(net, optimizer, strategy):
        for number in range(num_before, 200):
            step(0.0 if number else -1.0)
    moved = torch.full_like(net.weight, 1 / (1 - momentum))
    torch.testing.assert_close(net.weight.detach(), moved)


def test_a_step_that_raises_hides_nothing() -> None:
    net = Net()
    optimizer = OPTIMIZERS["weight decay"](net)
    before = options_of(optimizer)

    def closure() -> torch.Tensor:
        loss_of(net, 0).backward()
        raise ZeroDivisionError

    with offbeat.attach(net, optimizer, SPARSE):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert options_of(optimizer) == before
        net.zero_grad()
        train(net, optimizer, range(2))
        assert options_of(optimizer) == before


def test_a_step_that_is_interrupted_takes_no_momentum_from_the_next_one() -> None:
    net = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.2

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def step() -> float:
        before = net.weight.item()
        optimizer.zero_grad()
        net(torch.ones(1, 1).double()).sum().backward()
        optimizer.step()
        return before - net.weight.item()

    def interrupted_step() -> None:
        handle = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
        handle.remove()

    with offbeat.attach(net, optimizer, offbeat.TopK(density=1.0)):
        interrupted_step()
        assert step() == pytest.approx(0.1 * 1.9)
        interrupted_step()
        optimizer.load_state_dict(saved)
        step()
        assert optimizer.param_groups[0]["lr"] == 0.2


def test_parameters_may_come_later() -> None:
    nets = [Net(), Net()]
    optimizers = [
        torch.optim.SGD(net.conv.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        for net in nets
    ]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(2))
            net.zero_grad()
            optimizer.add_param_group({"params": list(net.head.parameters()), "momentum": 0.5})
            train(net, optimizer, range(2, 5))
            net.zero_grad()
    assert_same(*nets, **CLOSE)


def test_momentum_without_end_stays_in_the_optimizer() -> None:
    net = Net()
    optimizer = sgd(momentum=1.0)(net)
    with offbeat.attach(net, optimizer, SPARSE) as session:
        assert any("momentum 1 never ends" in notice for notice in session.notices)
        train(net, optimizer, range(2))
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_where_momentum_is_applied_at_once_who_clips_clips_the_gradient() -> None:
    net = Net()
    optimizer = OPTIMIZERS["momentum"](net)
    with offbeat.attach(net, optimizer, offbeat.GTopK(density=0.1, collective="reduce_scatter")):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        loss_of(net, 0).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
    moved = [after - start for start, after in zip(before, net.parameters(), strict=True)]
    norm = float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in moved]).detach()))
    assert norm == pytest.approx(0.05 * 1e-3 / (1 - 0.9), rel=1e-2)  # as SGD's in the end


def test_what_the_optimizer_has_gathered_is_not_lost() -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["two groups"](net) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(3))
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["densely"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(3, 6))
    assert_same(*nets, **CLOSE)


def test_what_is_shown_of_it_is_not_written_into_the_optimizer() -> None:
    """Each rank has its own, so that replicas would part once the session is over."""
    net = Net()
    optimizer = OPTIMIZERS["momentum"](net)
    train(net, optimizer, range(2))  # so that there is an entry
    with offbeat.attach(net, optimizer, SPARSE):
        train(net, optimizer, range(2, 4))
        shown = optimizer.state_dict()["state"].values()
        assert any("momentum_buffer" in entry for entry in shown)
    assert not any("momentum_buffer" in entry for entry in optimizer.state.values())


def states(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, session: offbeat.Session
) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "session": session.state_dict(),
        }
    )


@pytest.mark.parametrize("kind", ["nesterov", "two groups"])
@pytest.mark.parametrize(
    "order", [("session", "optimizer"), ("optimizer", "session"), ("before attach",)]
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(kind: str, order: Iterable[str]) -> None:
    straight = Net()
    optimizer = OPTIMIZERS[kind](straight)
    with offbeat.attach(straight, optimizer, SPARSE) as session:
        train(straight, optimizer, range(3))
        saved = states(straight, optimizer, session)
        train(straight, optimizer, range(3, 6))
    shown = [group["momentum"] for group in saved["optimizer"]["param_groups"]]
    assert shown == [group["momentum"] for group in optimizer.param_groups]
    resumed = Net()
    resumed.load_state_dict(saved["model"])
    optimizer = OPTIMIZERS[kind](resumed)
    if "before attach" in order:
        optimizer.load_state_dict(saved["optimizer"])
    with offbeat.attach(resumed, optimizer, SPARSE) as session:
        for name in order if "before attach" not in order else ["session"]:
            {"session": session, "optimizer": optimizer}[name].load_state_dict(saved[name])
        train(resumed, optimizer, range(3, 6))
    assert_same(resumed, straight)


def test_a_run_saved_with_the_momentum_in_its_optimizer_goes_on_with_it() -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["momentum"](net) for net in nets]
    strategy = SEND_ALL["as entries"]
    left = offbeat.GTopK(density=1.0, collective="reduce_scatter", momentum_correction=None)
    with offbeat.attach(nets[0], optimizers[0], left) as session:
        train(nets[0], optimizers[0], range(3))
        saved = states(nets[0], optimizers[0], session)
        train(nets[0], optimizers[0], range(3, 6))
    nets[1].load_state_dict(saved["model"])
    with offbeat.attach(nets[1], optimizers[1], strategy) as session:
        optimizers[1].load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
        train(nets[1], optimizers[1], range(3, 6))
    assert_same(*nets, **CLOSE)


def test_a_session_that_fails_gives_it_back() -> None:
    net = Net()
    optimizer = OPTIMIZERS["momentum"](net)

    def fail() -> None:
        with offbeat.attach(net, optimizer, SPARSE):
            train(net, optimizer, range(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [
        (OPTIMIZERS["weight decay"], SPARSE, "momentum 0.9 and weight decay of SGD works before"),
        (lambda net: torch.optim.NAdam(net.parameters()), SPARSE, "the optimizer is NAdam, and"),
        (
            lambda net: torch.optim.Adam(net.parameters(), amsgrad=True),
            SPARSE,
            "since amsgrad=True",
        ),
        (
            lambda net: torch.optim.Adam([p for p in net.parameters() if p.requires_grad][1:]),
            offbeat.TopK(density=0.05),
            "since the optimizer does not have all of the model's parameters",
        ),
        (
            lambda net: torch.optim.AdamW(net.parameters()),
            offbeat.TopK(density=0.5),
            "at a density of 0.5 that would be less accurate",
        ),
        (sgd(momentum=0.9, dampening=0.1), SPARSE, "since the optimizer dampens it"),
        (sgd(), SPARSE, None),
        (OPTIMIZERS["momentum"], offbeat.TopK(momentum_correction=None), None),
        (
            OPTIMIZERS["momentum"],
            offbeat.GTopK(collective="paper", density=0.2),
            None,
        ),
        (OPTIMIZERS["momentum"], offbeat.SPDKFAC(exchange=SPARSE), None),
    ],
)
def test_it_is_said_whether_it_is_taken_over(
    make: MakeOptimizer, strategy: Any, said: str | None
) -> None:
    net = Net()
    optimizer = make(net)
    during = list[Any]()
    with offbeat.attach(net, optimizer, strategy) as session:
        remarks = [notice for notice in session.notices if "momentum" in notice]
        if said is None:
            assert not remarks
        else:
            assert said in remarks[0]
        before = [group.get("momentum") for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(  # which comes after the session's own
            lambda *_: during.extend(group.get("momentum") for group in optimizer.param_groups)
        )
        train(net, optimizer, range(1))
    assert (during != before) == (said is not None and "works before" in said)


def test_ranks_stay_alike_and_momentum_is_that_of_each_rank() -> None:
    """DGC's recipe with all ranks in one process, against ranks with an optimizer of their own."""

    def linear() -> torch.nn.Linear:
        net = torch.nn.Linear(6, 5, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.arange(30).view(5, 6) / 30)
        return net

    def gradient(net: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        net.zero_grad()
        net(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    def job(driver: ThreadDriver) -> torch.Tensor:
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        strategy = offbeat.GTopK(density=0.2, collective="all_gather")
        with session_on(driver, net, optimizer, strategy):
            for step in range(6):
                gradient(net, driver.rank, step)
                optimizer.step()
        return net.weight.detach().flatten()

    ranks = results_of(3, job)
    net = linear()
    weights = net.weight.detach().view(-1)
    velocity, residual = torch.zeros(3, 30), torch.zeros(3, 30)
    for step in range(6):
        total = torch.zeros(30)
        for rank in range(3):
            velocity[rank] = 0.9 * velocity[rank] + gradient(net, rank, step) + 0.01 * weights
            residual[rank] += velocity[rank]
            largest = residual[rank].abs().topk(6).indices
            total[largest] += residual[rank][largest]
            residual[rank][largest] = 0
        weights -= 0.1 * total / 3
    for rank in ranks:
        torch.testing.assert_close(rank, weights)


def test_what_is_saved_when_a_step_was_interrupted_has_the_options_that_the_user_has_set() -> None:
    """As by a script that saves at Ctrl-C."""
    net = Net()
    optimizer = sgd(momentum=0.9, weight_decay=0.1)(net)
    wanted = options_of(optimizer)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with offbeat.attach(net, optimizer, AT_ONCE) as session:
        train(net, optimizer, range(2))
        handle = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(net, optimizer, range(2, 3))
        handle.remove()
        saved = optimizer.state_dict()["param_groups"]
        session.close(average=False)
    assert [{k: v for k, v in group.items() if k != "params"} for group in saved] == wanted


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.TopK(density=1.0),
        offbeat.GTopK(density=0.1, collective="all_gather", warmup=None),
    ],
)
def test_a_parameter_that_few_ranks_use_has_all_of_its_weight_decay(
    strategy: Any, nesterov: bool
) -> None:
    """As an expert has to which one rank's samples go: its mean gradient has all of the decay."""

    def shrunk(driver: ThreadDriver, leaves_out: bool) -> float:
        net = torch.nn.ParameterList([torch.ones(10), torch.ones(10)])
        optimizer = torch.optim.SGD(
            net.parameters(), 0.05, momentum=0.8, weight_decay=0.1, nesterov=nesterov
        )
        with session_on(driver, net, optimizer, strategy):
            for step in range(60):
                uses = driver.rank == step % 3 or not leaves_out
                (0 * net[0].sum() + (0 * net[1].sum() if uses else 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return float(1 - net[1].detach().mean())

    used, left_out = (results_of(3, partial(shrunk, leaves_out=each)) for each in (False, True))
    assert left_out == pytest.approx(used, rel=0.1)


def test_a_state_of_before_the_first_step_that_is_loaded_has_no_momentum() -> None:
    """As a search for a learning rate goes back to where it began."""
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["momentum"](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            begun = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            train(net, optimizer, range(3))
            net.load_state_dict(begun[0])
            optimizer.load_state_dict(begun[1])
            train(net, optimizer, range(3, 6))
    assert_same(*nets, **CLOSE)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "weight decay"])
def test_parameters_may_be_frozen_in_turn_within_a_step(kind: str) -> None:
    """As a generator and its critic are, each for the loss of the other."""
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS[kind](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            for step in range(4):
                for part in range(2):
                    net.head.requires_grad_(part == 0)
                    net.shared.requires_grad_(part == 1)
                    loss_of(net, 2 * step + part).backward()
                net.head.requires_grad_(True)
                optimizer.step()
                optimizer.zero_grad()
    assert_same(*nets, **CLOSE)


def test_what_waits_in_no_sync_has_its_momentum_though_its_parameter_is_frozen_by_then() -> None:
    nets = [Net(), Net()]
    optimizers = [OPTIMIZERS["momentum"](net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], SEND_ALL["as entries"]) as session:
        for net, optimizer, context in (
            (nets[0], optimizers[0], session.no_sync),
            (nets[1], optimizers[1], contextlib.nullcontext),
        ):
            for step in range(2):
                with context():
                    loss_of(net, 2 * step).backward()
                net.head.requires_grad_(False)
                loss_of(net, 2 * step + 1).backward()
                net.head.requires_grad_(True)
                optimizer.step()
                optimizer.zero_grad()
    assert_same(*nets, **CLOSE)
