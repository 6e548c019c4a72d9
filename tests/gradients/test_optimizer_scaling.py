"""Adam's scaling, taken over by a sparse strategy: against the formulas written out, and given back
where it cannot be had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import offbeat
from offbeat.errors import CheckpointError, OffbeatWarning
from offbeat.gradients.density import START
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on

WORLD_SIZE, STEPS, K = 3, 6, 4
SPARSE = offbeat.GTopK(density=K / 30, collective="all_gather", warmup=None)
Between = Callable[[torch.nn.Module, int], None]


def linear() -> torch.nn.Linear:
    net = torch.nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.arange(30).view(5, 6) / 30 + 0.1)
    return net


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    net.zero_grad()
    net(x.to(next(net.parameters()).dtype)).square().mean().backward()


def lr_at(step: int) -> float:
    return 0.1 if step < 3 else 0.05


def trained(
    driver: ThreadDriver,
    strategy: Strategy,
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = STEPS,
    between: Between = lambda net, step: None,
    notices: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    net = linear().to(dtype)
    optimizer = make(net.parameters(), lr=0.1, **options)
    with session_on(driver, net, optimizer, strategy) as session:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            backward(net, driver.rank, step)
            between(net, step)
            optimizer.step()
            assert net.weight.grad is not None
        if notices is not None:
            notices += session.notices
    return net.weight.detach().flatten()


def gradient_at(weights: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    net = linear()
    net.weight.data = weights.view(5, 6)
    backward(net, rank, step)
    assert net.weight.grad is not None
    return net.weight.grad.flatten()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("maximize", [False, True])
def test_each_rank_scales_before_it_selects(make: type[torch.optim.Adam], maximize: bool) -> None:
    decay, betas, eps = 0.1, (0.8, 0.9), 1e-3
    options = {"weight_decay": decay, "betas": betas, "eps": eps, "maximize": maximize}
    ranks = results_of(WORLD_SIZE, lambda driver: trained(driver, SPARSE, make, **options))
    decoupled, sign = make is torch.optim.AdamW, -1.0 if maximize else 1.0

    weights = linear().weight.detach().flatten().double()
    mean, square, owed = (torch.zeros(WORLD_SIZE, 30).double() for _ in range(3))
    first = make([torch.nn.Parameter(weights.clone())], lr=0.1, **options)
    for step in range(STEPS):
        lr, sent = lr_at(step), torch.zeros(30).double()
        if step and lr != lr_at(step - 1):
            owed *= lr_at(step - 1) / lr
        for rank in range(WORLD_SIZE):
            gradient = gradient_at(weights.float(), rank, step).double()
            if step and not decoupled:
                gradient += sign * decay * weights
            mean[rank] = betas[0] * mean[rank] + (1 - betas[0]) * gradient
            square[rank] = betas[1] * square[rank] + (1 - betas[1]) * gradient**2
            m, v = (
                mean[rank] / (1 - betas[0] ** (step + 1)),
                square[rank] / (1 - betas[1] ** (step + 1)),
            )
            noise = (1 - betas[0]) / (1 + betas[0])
            signal = ((m**2 - noise * v) / (1 - noise)).clamp_min(0)
            scale = (signal + (v - signal) / WORLD_SIZE).sqrt() + eps
            owed[rank] += gradient / scale if step else gradient
            largest = owed[rank].abs().topk(K).indices
            sent[largest] += owed[rank][largest]
            owed[rank][largest] = 0
        if step == 0:  # Adam's own
            (parameter,) = first.param_groups[0]["params"]
            parameter.grad = sent / WORLD_SIZE
            first.step()
            weights = parameter.detach().clone()
            # What was owed from it is scaled as the next gradient would have been: with this one
            # counted twice.
            for rank in range(WORLD_SIZE):
                gradient = gradient_at(linear().weight.detach().flatten(), rank, 0).double()
                m2 = betas[0] * mean[rank] + (1 - betas[0]) * gradient
                v2 = betas[1] * square[rank] + (1 - betas[1]) * gradient**2
                m2, v2 = m2 / (1 - betas[0] ** 2), v2 / (1 - betas[1] ** 2)
                signal = ((m2**2 - noise * v2) / (1 - noise)).clamp_min(0)
                owed[rank] /= (signal + (v2 - signal) / WORLD_SIZE).sqrt() + eps
            continue
        if decoupled:
            weights *= 1 - lr * decay
        weights -= sign * lr * sent / WORLD_SIZE
    for rank_weights in ranks:
        torch.testing.assert_close(rank_weights, weights.float(), rtol=1e-3, atol=1e-4)
        assert torch.equal(rank_weights, ranks[0])


def clip(net: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def clip_data(net: torch.nn.Module, step: int) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def test_a_loop_that_clips_keeps_its_adam() -> None:
    notices: list[str] = []

    def job(driver: ThreadDriver, strategy: Strategy) -> torch.Tensor:
        here = notices if driver.rank == 0 else None
        return trained(driver, strategy, torch.optim.AdamW, between=clip, notices=here)

    clipped = results_of(WORLD_SIZE, lambda driver: job(driver, SPARSE))
    assert any("gradients are changed between backward() and step()" in said for said in notices)
    left_alone = offbeat.GTopK(
        density=K / 30,
        collective="all_gather",
        warmup=None,
        momentum_correction=None,
    )
    assert torch.equal(clipped[0], results_of(WORLD_SIZE, lambda d: job(d, left_alone))[0])


@pytest.mark.parametrize("clip_here", [clip, clip_data])
def test_a_loop_that_clips_later_is_warned_and_goes_on(clip_here: Between) -> None:
    """Each clipped step moves the model by less, and that is all."""
    moves = list[float]()

    def late(net: torch.nn.Module, step: int) -> None:
        moves.append(float(torch.linalg.vector_norm(net.weight.detach())))
        if step == 3:
            clip_here(net, step)

    with pytest.warns(OffbeatWarning, match=r"clip_norm.*momentum_correction=None"):
        results_of(1, lambda d: trained(d, SPARSE, torch.optim.Adam, between=late, steps=6))
    changes = [abs(after - before) for before, after in pairwise(moves)]
    assert 0 < changes[3] <= 0.01 * lr_at(3) < changes[2]
    assert changes[4] > changes[3]


def of_adam(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    (entry,) = optimizer.state_dict()["state"].values()
    return {key: entry[key] for key in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("maximize", [False, True])
def test_the_optimizers_state_is_what_adam_would_have(maximize: bool) -> None:
    """On one rank, whose mean square is that of the mean over ranks."""
    plain, net = linear(), linear()
    theirs, ours = (
        torch.optim.AdamW(each.parameters(), lr=0.0, maximize=maximize) for each in (plain, net)
    )
    backward_all = range(4)
    for step in backward_all:
        backward(plain, 0, step)
        theirs.step()

    def job(driver: ThreadDriver) -> None:
        with session_on(driver, net, ours, SPARSE):
            for step in backward_all:
                backward(net, 0, step)
                ours.step()
            torch.testing.assert_close(of_adam(ours), of_adam(theirs))
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for each, optimizer in ((net, ours), (plain, theirs)):
                backward(each, 0, 4)
                optimizer.step()
            torch.testing.assert_close(of_adam(ours), of_adam(theirs))

    results_of(1, job)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_adam_has_gathered_is_gone_on_with(world_size: int) -> None:
    """Loaded before the session or during it, and shown again as it was."""
    saved = linear()
    before = torch.optim.AdamW(saved.parameters(), lr=0.0)
    for step in range(50):
        backward(saved, 0, step)
        before.step()
    state = before.state_dict()

    def job(driver: ThreadDriver, during: bool) -> dict[str, torch.Tensor]:
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
        if not during:
            optimizer.load_state_dict(copy.deepcopy(state))
        with session_on(driver, net, optimizer, SPARSE):
            backward(net, driver.rank, 50)
            optimizer.step()
            if during:
                optimizer.load_state_dict(copy.deepcopy(state))
                # The mean that was loaded has less noise than a rank's own, which the estimate of
                # the noise takes it for.
                torch.testing.assert_close(of_adam(optimizer), of_adam(before), rtol=0.1, atol=1e-6)
                backward(net, driver.rank, 50)
                optimizer.step()
            return of_adam(optimizer)

    for during in (False, True):
        for shown in results_of(world_size, lambda driver, during=during: job(driver, during)):
            assert shown["step"] == 51
            # One gradient of its own in fifty of the mean's; another number of ranks in the
            # estimate of the noise would change it threefold.
            torch.testing.assert_close(
                shown["exp_avg_sq"], of_adam(before)["exp_avg_sq"], rtol=0.5, atol=1e-6
            )


@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.GTopK(collective="dense"),
        offbeat.GTopK(collective="dense", density=0.01),
        offbeat.GTopK(collective="all_gather", density=1.0),
        offbeat.TopK(density=1.0),
    ],
    ids=str,
)
def test_where_everything_is_sent_adam_is_adam(strategy: Strategy) -> None:
    def job(driver: ThreadDriver, strategy: Strategy) -> torch.Tensor:
        return trained(driver, strategy, torch.optim.AdamW, dtype=torch.float64)

    ours = results_of(WORLD_SIZE, lambda driver: job(driver, strategy))
    theirs = results_of(WORLD_SIZE, lambda driver: job(driver, offbeat.AllReduce()))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-14)


BEGINS = replace(SPARSE, warmup="auto")


def test_training_begins_with_adams_own_steps() -> None:
    """Everything travels in them, and the steps after them are scaled."""

    said: list[str] = []

    def job(driver: ThreadDriver, strategy: Strategy, steps: int) -> torch.Tensor:
        return trained(
            driver, strategy, torch.optim.Adam, steps=steps, dtype=torch.float64, notices=said
        )

    for steps, is_alike in ((START, True), (START + 1, False)):
        ours, theirs = (
            results_of(WORLD_SIZE, lambda d, each=each, steps=steps: job(d, each, steps))[0]
            for each in (BEGINS, offbeat.AllReduce())
        )
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14) is is_alike
    assert any(f"the first {START} exchanges send everything" in one for one in said)


def test_named_stages_are_a_beginning_too() -> None:
    """Adam sees what was sent for as long as much is, as without the takeover."""
    staged = replace(SPARSE, warmup=((0.5, 3), (0.14, 1)))
    left = replace(staged, momentum_correction=None)
    for steps, is_alike in ((3, True), (4, False)):
        ours, theirs = (
            results_of(
                2, lambda d, each=each, n=steps: trained(d, each, torch.optim.Adam, steps=n)
            )[0]
            for each in (staged, left)
        )
        assert torch.equal(ours, theirs) is is_alike


def test_a_loop_that_clips_before_training_has_begun_keeps_its_adam() -> None:
    notices: list[str] = []

    def clip_fifth(net: torch.nn.Module, step: int) -> None:
        if step == 4:
            clip(net, step)

    results_of(
        1,
        lambda d: trained(
            d, BEGINS, torch.optim.Adam, steps=START + 2, between=clip_fifth, notices=notices
        ),
    )
    assert any("gradients are changed between" in said for said in notices)


@pytest.mark.parametrize("stop", [START // 2, START])
def test_a_run_that_is_resumed_as_training_begins_goes_on_alike(stop: int) -> None:
    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        whole = trained(driver, BEGINS, torch.optim.AdamW, steps=START + 3)
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        states: list[dict[str, Any]] = []
        for steps in (range(stop), range(stop, START + 3)):
            with session_on(driver, net, optimizer, BEGINS) as session:
                for state, each in zip(states, (optimizer, session), strict=False):
                    each.load_state_dict(state)
                for step in steps:
                    optimizer.param_groups[0]["lr"] = lr_at(step)
                    backward(net, driver.rank, step)
                    optimizer.step()
                states = [copy.deepcopy(each.state_dict()) for each in (optimizer, session)]
        return whole, net.weight.detach().flatten()

    for whole, resumed in results_of(WORLD_SIZE, job):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("way", [1, -1], ids=["optimizer first", "session first"])
def test_a_run_that_goes_back_to_where_training_begins_goes_on_alike(way: int) -> None:
    """Adam's own steps come again, with what it had gathered by then."""

    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        def train(steps: range) -> torch.Tensor:
            for step in steps:
                backward(net, driver.rank, step)
                optimizer.step()
            return net.weight.detach().clone()

        with session_on(driver, net, optimizer, BEGINS) as session:
            parts: list[Any] = [net, *[optimizer, session][::way]]
            train(range(5))
            saved = [copy.deepcopy(each.state_dict()) for each in parts]
            whole = train(range(5, START))
            train(range(START, START + 2))  # which are scaled
            for each, state in zip(parts, saved, strict=True):
                each.load_state_dict(state)
            return whole, train(range(5, START))

    for whole, again in results_of(WORLD_SIZE, job):
        assert torch.equal(whole, again)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_resumed_run_goes_on_alike(is_over: bool) -> None:
    """The state is saved before the end of the session or after it."""

    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        whole = trained(driver, SPARSE, torch.optim.AdamW)
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        state: dict[str, Any] = {}
        for steps in (range(3), range(3, STEPS)):
            with session_on(driver, net, optimizer, SPARSE) as session:
                if steps.start:
                    session.load_state_dict(state)
                for step in steps:
                    optimizer.param_groups[0]["lr"] = lr_at(step)
                    backward(net, driver.rank, step)
                    optimizer.step()
                state = session.state_dict()
            state = session.state_dict() if is_over else state
        return whole, net.weight.detach().flatten()

    for whole, resumed in results_of(WORLD_SIZE, job):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_rank_of_another_world_remembers_what_an_old_one_does(world_size: int) -> None:
    """A new one that knew no squares would take each of its first gradients for 1 or -1."""

    def job(driver: ThreadDriver) -> dict[str, Any]:
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, SPARSE) as session:
            for step in range(3):
                backward(net, driver.rank, step)
                optimizer.step()
            return session.state_dict()

    states = results_of(2, job)

    def squares(state: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = state["callbacks"]["gradient_transform"]["local"]["square/weight"]
        return found

    def resumed(driver: ThreadDriver) -> dict[str, Any]:
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, SPARSE) as session:
            session.load_state_dict(offbeat.reshard(states, world_size, driver.rank))
            return session.state_dict()

    for rank, state in enumerate(results_of(world_size, resumed)):
        assert torch.equal(squares(state), squares(states[rank % 2]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weight_decay_that_ranks_have_left_out_keeps_its_mean_in_another_world(
    world_size: int,
) -> None:
    """Rank 1 has used the parameter in none of the steps."""

    def job(driver: ThreadDriver, saved: list[dict[str, Any]]) -> dict[str, Any]:
        net = torch.nn.ParameterList([torch.ones(20)])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.002, weight_decay=0.02)
        strategy = offbeat.GTopK(density=0.05, collective="all_gather", warmup=None)
        with session_on(driver, net, optimizer, strategy) as session:
            if saved:
                session.load_state_dict(offbeat.reshard(saved, driver.world_size, driver.rank))
            for _ in range(0 if saved else 4):
                if driver.rank == 0:
                    net[0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.state_dict()

    def left_out(states: list[dict[str, Any]]) -> float:
        parts = [state["callbacks"]["gradient_transform"] for state in states]
        return sum(float(part["additive"]["undecayed"]) for part in parts) / len(parts)

    states = results_of(2, partial(job, saved=[]))
    assert left_out(states) > 0
    resumed = results_of(world_size, partial(job, saved=states))
    assert left_out(resumed) == pytest.approx(left_out(states))


@pytest.mark.filterwarnings("ignore::offbeat.errors.OffbeatWarning")
def test_a_skipped_step_leaves_no_trace() -> None:
    def job(driver: ThreadDriver, fails: bool) -> torch.Tensor:

        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, SPARSE):
            for step in range(4):
                if fails and step == 2:
                    net.zero_grad()
                    x = torch.full((1, 6), float("nan") if driver.rank == 1 else 1.0)
                    net(x).sum().backward()
                    optimizer.step()
                backward(net, driver.rank, step)
                optimizer.step()
        return net.weight.detach().flatten()

    usual = results_of(WORLD_SIZE, lambda driver: job(driver, False))
    assert torch.equal(usual[0], results_of(WORLD_SIZE, lambda driver: job(driver, True))[0])


def test_what_is_owed_keeps_its_rate() -> None:
    """With a rate of 0.1 that falls to a hundredth, all that was owed still moves the model by what
    it was meant to.
    """

    def job(driver: ThreadDriver) -> torch.Tensor:
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, offbeat.TopK(density=0.05)):
            for step in range(40):
                optimizer.param_groups[0]["lr"] = 0.1 if step == 0 else 0.001
                net.zero_grad()
                gradient = torch.arange(30.0).view(5, 6) if step == 0 else torch.zeros(5, 6)
                (net.weight * gradient).sum().backward()
                optimizer.step()
        return net.weight.detach()

    expected = linear().weight.detach() - 0.1 * torch.arange(30.0).view(5, 6)
    torch.testing.assert_close(results_of(2, job)[1], expected)


def alone(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    net: torch.nn.Module,
    steps: range,
    *,
    state: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Train in a session of one rank, from `state` on. Returns the state and the notices."""
    with offbeat.attach(net, optimizer, strategy) as session:
        if state is not None:
            session.load_state_dict(state)
        for step in steps:
            backward(net, 0, step)
            optimizer.step()
        return session.state_dict(), session.notices


LEFT = replace(SPARSE, momentum_correction=None)


def test_a_run_that_began_without_it_goes_on_without_it() -> None:
    """What is owed then are gradients of many steps. Where the first gradient after the resume is
    nearly zero, they would be divided by nearly nothing.
    """
    net = linear()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state, _ = alone(LEFT, optimizer, net, range(20))
    del state["callbacks"]["gradient_transform"]  # as an older version wrote it
    before = net.weight.detach().clone()
    with offbeat.attach(net, optimizer, SPARSE) as session:
        session.load_state_dict(state)
        for _ in range(20):
            net.zero_grad()
            (net(torch.zeros(1, 6)).sum() * 0).backward()
            optimizer.step()
        assert any("since the run was begun without it" in said for said in session.notices)
        assert next(iter(optimizer.state.values()))["step"] == 40
    assert (net.weight.detach() - before).abs().max() < 20 * 0.02


@pytest.mark.parametrize("left", [LEFT, replace(SPARSE, density=0.5)], ids=["None", "density"])
def test_what_is_owed_and_scaled_is_no_gradient(left: Strategy) -> None:
    net = linear()
    state, notices = alone(SPARSE, torch.optim.Adam(net.parameters()), net, range(3))
    assert any("rest until the session ends" in said for said in notices)
    with pytest.raises(CheckpointError, match="had taken over Adam.s scaling"):
        alone(left, torch.optim.Adam(net.parameters()), net, range(0), state=state)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_nor_is_it_with_another_optimizer(make: Callable[..., torch.optim.Optimizer]) -> None:
    net = linear()
    state, _ = alone(SPARSE, torch.optim.AdamW(net.parameters()), net, range(3))
    with pytest.raises(CheckpointError, match="resume with the same optimizer"):
        alone(SPARSE, make(net.parameters(), lr=0.01), net, range(0), state=state)


def test_the_state_of_a_beginning_is_no_scaled_one() -> None:
    """A session that has left Adam its scaling loads what it was before it had decided."""
    net = linear()
    optimizer = torch.optim.AdamW(net.parameters())
    with offbeat.attach(net, optimizer, SPARSE) as session:
        beginning = session.state_dict()
        for step in range(3):
            backward(net, 0, step)
            clip(net, step)
            optimizer.step()
        session.load_state_dict(beginning)
        backward(net, 0, 3)
        optimizer.step()
        assert optimizer.state


@pytest.mark.filterwarnings("ignore::offbeat.errors.OffbeatWarning")
def test_a_run_whose_only_step_was_skipped_has_not_begun() -> None:
    net = linear()
    optimizer = torch.optim.AdamW(net.parameters())
    with offbeat.attach(net, optimizer, SPARSE) as session:
        net(torch.full((1, 6), float("nan"))).sum().backward()
        optimizer.step()
        state = session.state_dict()
    _, notices = alone(SPARSE, optimizer, net, range(2), state=state)
    assert any("gradients are scaled as Adam does it" in said for said in notices)


def test_two_gradients_of_one_step_are_one() -> None:
    """Both halves are known only in the second exchange, so steps are not the same to the bit; each
    half scaled by itself would make them twice as long.
    """

    def trained_in(passes: int) -> torch.Tensor:
        net = linear()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(2)
        with offbeat.attach(net, optimizer, SPARSE):
            for _ in range(80):
                gradient = 1 + torch.randn(net.weight.shape, generator=draw)
                for part in range(passes):
                    share = (0.25, 0.75)[part] if passes == 2 else 1.0
                    (net.weight * gradient * share).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return net.weight.detach() - linear().weight.detach()

    whole, halves = trained_in(1), trained_in(2)
    assert float(halves.norm() / whole.norm()) == pytest.approx(1.0, abs=0.15)


def test_changes_that_autograd_does_not_count_are_seen_too() -> None:
    notices: list[str] = []
    results_of(
        1, lambda d: trained(d, SPARSE, torch.optim.Adam, between=clip_data, notices=notices)
    )
    assert any("gradients are changed between" in said for said in notices)


def test_a_pass_that_accumulates_nothing_changes_nothing() -> None:
    def look(net: torch.nn.Module, step: int) -> None:
        x = torch.ones(2, 6, requires_grad=True)
        torch.autograd.grad(net(x).sum(), x)

    plain = results_of(2, lambda driver: trained(driver, SPARSE, torch.optim.AdamW))
    looking = results_of(2, lambda d: trained(d, SPARSE, torch.optim.AdamW, between=look))
    assert torch.equal(plain[0], looking[0])


def test_a_step_by_a_closure_that_does_nothing_changes_no_gradients() -> None:
    def job(driver: ThreadDriver) -> list[str]:
        net = linear()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, SPARSE) as session:
            for step in range(2):
                backward(net, driver.rank, step)
                optimizer.step(lambda: 0.0)
        return session.notices

    for notices in results_of(2, job):
        assert any("gradients are scaled as Adam does it" in said for said in notices)


@pytest.mark.parametrize("change", [clip, clip_data])
def test_a_change_before_such_a_pass_is_not_forgotten(change: Between) -> None:
    def late(net: torch.nn.Module, step: int) -> None:
        if step == 3:
            change(net, step)
            for _ in range(2):
                x = torch.ones(2, 6, requires_grad=True)
                torch.autograd.grad(net(x).sum(), x)

    with pytest.warns(OffbeatWarning, match="clip_norm"):
        results_of(1, lambda driver: trained(driver, SPARSE, torch.optim.AdamW, between=late))


def test_after_the_session_adam_begins_anew() -> None:
    net = linear()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    alone(SPARSE, optimizer, net, range(3))
    assert not optimizer.state
    other = linear()
    other.load_state_dict(net.state_dict())
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    for model, its in ((net, optimizer), (other, fresh)):
        backward(model, 0, 9)
        its.step()
    assert torch.equal(net.weight, other.weight)


class Odd(torch.nn.Module):
    """A weight that one rank alone uses, one that is frozen later, and two groups."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.common, self.rare, self.frozen = (
            torch.nn.Parameter(torch.randn(6, 6, generator=draw).to(dtype)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, *, uses_rare: bool) -> torch.Tensor:
        hidden = torch.tanh(x @ self.common)
        hidden = hidden @ self.rare if uses_rare else hidden
        return hidden @ self.frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"fused": True},
        {"maximize": True},
        {"capturable": False, "amsgrad": False},
    ],
    ids=str,
)
def test_ranks_stay_alike_whatever_is_odd(dtype: torch.dtype, options: dict[str, Any]) -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        net = Odd(dtype)
        optimizer = torch.optim.AdamW(
            [
                {"params": [net.common], "betas": (0.8, 0.9), "weight_decay": 0.1},
                {"params": [net.rare, net.frozen], "lr": 0.02},
            ],
            lr=0.01,
            **options,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], total_steps=12)
        with session_on(driver, net, optimizer, SPARSE):
            for step in range(10):
                net.frozen.requires_grad_(step < 5)
                before = net.frozen.detach().clone()
                draw = torch.Generator().manual_seed(10 * step + driver.rank)
                x = torch.randn(4, 6, generator=draw).to(dtype)
                net(x, uses_rare=driver.rank == 0).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                scheduler.step()
                assert step < 5 or torch.equal(net.frozen, before)
        return [parameter.detach() for parameter in net.parameters()]

    first, *others = results_of(2, job)
    begun = Odd(dtype)
    for mine, start in zip(first, begun.parameters(), strict=True):
        assert bool(mine.isfinite().all())
        assert not torch.equal(mine, start)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_a_parameter_that_is_used_late_moves_as_with_adam_and_leaves_others_their_share() -> None:
    """Its second moment begins then: divided by that of all steps it would be a thousandth."""
    model = torch.nn.ModuleList([torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    early, late = model[0].weight, model[1].weight
    draw = torch.Generator().manual_seed(0)
    with offbeat.attach(model, optimizer, offbeat.TopK(density=0.1)):
        for step in range(110):
            if step == 100:
                before = [each.detach().clone() for each in (early, late)]
            x = torch.randn(8, 20, generator=draw)
            y = model[0](x) + model[1](x) if step >= 100 else model[0](x)
            (y - x.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = [
            float((now - then).detach().norm())
            for now, then in zip((early, late), before, strict=True)
        ]
    assert moved[1] < 10 * 0.001 * 20  # ten steps of the learning rate in each of 400 elements
    assert moved[0] > moved[1] / 3


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_parameter_that_few_ranks_use_in_a_step_has_all_of_its_weight_decay(
    in_turns: bool,
) -> None:
    """As an expert has: if each rank uses it now and then. Of one that a single rank uses all the
    time the others' decay is not scaled up to a gradient's size.
    """

    def mean_of(driver: ThreadDriver, strategy: Strategy, decay: float) -> float:
        net = torch.nn.ParameterList([torch.ones(20)])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.002, weight_decay=decay)
        with session_on(driver, net, optimizer, strategy):
            for step in range(150):
                draw = torch.Generator().manual_seed(7919 * step + driver.rank)
                if driver.rank == (step % 3 if in_turns else 0):
                    (net[0] * torch.randn(20, generator=draw)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return float(net[0].detach().mean())

    def shrunk(strategy: Strategy) -> float:
        with_decay, without = (
            results_of(3, partial(mean_of, strategy=strategy, decay=decay))[0]
            for decay in (0.02, 0.0)
        )
        return without - with_decay

    sparse = offbeat.GTopK(density=0.05, collective="all_gather", warmup=None)
    found, plain = shrunk(sparse), shrunk(offbeat.AllReduce())
    assert found <= 1.2 * plain
    assert not in_turns or found >= 0.8 * plain


def test_after_a_state_of_before_the_first_step_was_loaded_adam_begins_anew() -> None:
    net = linear()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    begun = copy.deepcopy(optimizer.state_dict())
    with offbeat.attach(net, optimizer, SPARSE):
        for step in range(3):
            backward(net, 0, step)
            optimizer.step()
        optimizer.load_state_dict(begun)
        backward(net, 0, 3)
        optimizer.step()
        assert of_adam(optimizer)["step"] == 1


def test_what_a_rank_owes_of_its_peers_gradients_is_scaled_though_it_has_had_none_itself() -> None:
    """An owner owes what it leaves out of its peers' entries, as of rows that they alone use."""

    def job(driver: ThreadDriver) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(8), torch.zeros(8)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        strategy = offbeat.GTopK(density=2 / 16, collective="reduce_scatter", warmup=None)
        with session_on(driver, model, optimizer, strategy):
            for _ in range(4):
                (model[0].sum() if driver.rank else 100 * model[1].sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model[0].detach().abs().max()

    assert max(results_of(2, job)) <= 4 * 0.1 + 1e-6
