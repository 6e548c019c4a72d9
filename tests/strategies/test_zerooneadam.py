"""0/1 Adam against its paper's algorithm with plain vectors."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError, OffbeatWarning, UnsupportedError
from thread_support.world import ThreadDriver, results_of, session_on

SHAPE, BETA1, BETA2, EPS, DECAY = (5, 6), 0.8, 0.9, 1e-3, 0.1
FREEZE, UPDATES, PERIOD, GROWTH, NUM_STEPS = 7, 2, 4, 3, 22
OPTIONS: dict[str, Any] = {"freeze_step": FREEZE, "period": PERIOD}


@dataclass(frozen=True, kw_only=True)
class Often(offbeat.ZeroOneAdam):
    updates: ClassVar[int] = UPDATES
    growth: ClassVar[int] = GROWTH


@dataclass(frozen=True, kw_only=True)
class NearlyLossless(Often):
    written_as: ClassVar[str] = "linear8"


@dataclass(frozen=True, kw_only=True)
class InEightBits(offbeat.ZeroOneAdam):
    written_as: ClassVar[str] = "linear8"


@dataclass(frozen=True, kw_only=True)
class SoonRare(offbeat.ZeroOneAdam):
    growth: ClassVar[int] = 30


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(SHAPE, generator=draw))


def rate_of(step: int) -> float:
    return 0.01 * min(1.0, step / 3)


def gradient_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SHAPE, generator=draw) + 1


def optimizer_of(net: torch.nn.Module, *, decoupled: bool) -> torch.optim.Adam:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(net.parameters(), lr=0.01, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


def step_of(net: Net, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.param_groups[0]["lr"] = rate_of(step)
    (net.weight * gradient_of(rank, step)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def distance(num_local: int) -> int:
    return min(PERIOD, 2 ** (num_local // GROWTH))


def reference(num_ranks: int, *, decoupled: bool) -> torch.Tensor:
    """Without codes; the model at the last average."""
    anchor = Net().weight.detach().clone()
    x = [anchor.clone() for _ in range(num_ranks)]
    m = [torch.zeros(SHAPE) for _ in range(num_ranks)]
    u = [torch.zeros(SHAPE) for _ in range(num_ranks)]
    v, rates, num_updates, next_update, averaged_at = torch.zeros(SHAPE), 0.0, 0, 0, 0
    result, last_rate = anchor, 0.0
    for step in range(NUM_STEPS):
        rate = rate_of(step) or 1e-12
        # A difference from the paper: where the rate rises, momentum becomes smaller by as much.
        kept = BETA1 * min(1.0, last_rate / rate)
        last_rate = rate
        gradients = [gradient_of(rank, step) for rank in range(num_ranks)]
        if not decoupled:
            gradients = [g + DECAY * each for g, each in zip(gradients, x, strict=True)]
        updates = step < FREEZE and step == next_update
        if updates:
            mean = torch.stack(gradients).mean(0)
            gradients = [mean] * num_ranks
            v = BETA2 * v + (1 - BETA2) * mean**2
            num_updates += 1
            next_update += 2 ** (num_updates // UPDATES)
        if decoupled:
            anchor = anchor * (1 - rate * DECAY)
        divisor = (v / (1 - BETA2**num_updates)).sqrt() + EPS
        rate /= 1 - BETA1 ** (step + 1)
        rates += rate
        for rank in range(num_ranks):
            m[rank] = kept * m[rank] + (1 - BETA1) * gradients[rank]
            u[rank] = u[rank] + rate * m[rank]
            x[rank] = anchor - u[rank] / divisor
        due = step + 1 - averaged_at >= distance(max(0, step + 1 - FREEZE))
        if updates or due:
            averaged_at = step + 1 if not updates else averaged_at
            mean = torch.stack(u).mean(0)
            anchor = anchor - mean / divisor
            x, m = [anchor] * num_ranks, [mean / rates] * num_ranks
            u, rates = [torch.zeros(SHAPE)] * num_ranks, 0.0
            result = anchor
    return result


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_the_paper(num_ranks: int, decoupled: bool) -> None:
    def job(driver: ThreadDriver) -> tuple[torch.Tensor, int]:
        net = Net()
        optimizer = optimizer_of(net, decoupled=decoupled)
        with session_on(driver, net, optimizer, NearlyLossless(**OPTIONS)) as session:
            for step in range(NUM_STEPS):
                step_of(net, optimizer, driver.rank, step)
            state = session.state_dict()["callbacks"]["local_adam"]["replicated"]
            return state["anchor/weight"].clone(), session.stats.exchanges

    results = results_of(num_ranks, job)
    expected = reference(num_ranks, decoupled=decoupled)
    moved = float((expected - Net().weight).detach().abs().max())
    for found, num_exchanges in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * moved)
        assert torch.equal(found, results[0][0])
        # 7 steps of which 4 update, 3 at a distance of 1, and then at 2 and at 4.
        assert num_exchanges == 8


def test_signs_train_as_well_as_adam_does() -> None:
    target = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))

    def job(driver: ThreadDriver) -> float:
        net = Net()
        optimizer = optimizer_of(net, decoupled=True)
        optimizer.param_groups[0] |= {"lr": 0.05, "weight_decay": 0.0}
        strategy = SoonRare(freeze_step=30, period=4)
        with session_on(driver, net, optimizer, strategy):
            for step in range(300):
                noise = 0.3 * gradient_of(driver.rank, step)
                ((net.weight - target).square() / 2 + net.weight * (noise - 0.3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 0.99
        return float((net.weight - target).detach().square().mean())

    before = float((Net().weight - target).detach().square().mean())
    losses = results_of(3, job)
    assert max(losses) < before / 50


@pytest.mark.parametrize("saved_after", [3, 15])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(saved_after: int) -> None:
    def begin() -> tuple[Net, torch.optim.Optimizer, offbeat.Session]:
        net = Net()
        optimizer = optimizer_of(net, decoupled=True)
        return net, optimizer, offbeat.attach(net, optimizer, Often(**OPTIONS))

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


def test_a_rate_that_has_fallen_and_is_raised_again_does_no_harm() -> None:
    """As a cosine with warm restarts does."""

    def moved(rates: list[float]) -> float:
        def job(driver: ThreadDriver) -> float:
            net = Net()
            optimizer = optimizer_of(net, decoupled=True)
            with session_on(driver, net, optimizer, offbeat.ZeroOneAdam(freeze_step=5, period=1)):
                for step, rate in enumerate(rates):
                    optimizer.param_groups[0]["lr"] = rate
                    (net.weight * gradient_of(driver.rank, step)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return float((net.weight - Net().weight).detach().abs().max())

        return max(results_of(2, job))

    assert moved([0.01] * 20 + [1e-6] * 3 + [0.01] * 10) < moved([0.01] * 33)


def test_what_is_frozen_meanwhile_stays_and_what_is_written_into_parameters_is_kept() -> None:
    def job(driver: ThreadDriver) -> tuple[float, float]:
        net = torch.nn.ModuleList([Net(), Net()])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with session_on(driver, net, optimizer, offbeat.ZeroOneAdam(freeze_step=5, period=1)):
            for step in range(12):
                if step == 8:
                    net[0].weight.requires_grad_(False)
                    kept = net[0].weight.detach().clone()
                    net[1].weight.data.fill_(3)
                for each in net:
                    if each.weight.requires_grad:
                        (each.weight * gradient_of(driver.rank, step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        moved = (net[0].weight - kept, net[1].weight - 3)
        return float(moved[0].detach().abs().max()), float(moved[1].detach().abs().max())

    for frozen, written in results_of(2, job):
        assert frozen == 0
        assert 0 < written < 0.1


@pytest.mark.parametrize("clips", [False, True])
def test_a_loop_that_writes_into_parameters_between_averages_is_warned(clips: bool) -> None:
    """As one that clips the weights of a critic: local steps go on from the last average."""

    def job(driver: ThreadDriver) -> list[str]:
        net = Net()
        optimizer = optimizer_of(net, decoupled=True)
        with session_on(driver, net, optimizer, Often(**OPTIONS)) as session:
            for step in range(NUM_STEPS + 12):
                step_of(net, optimizer, driver.rank, step)
                if clips:
                    net.weight.data.clamp_(-0.1, 0.1)
            return [each for each in session.notices if "undone" in each]

    with pytest.warns(OffbeatWarning, match="undone") if clips else nullcontext():
        found = results_of(2, job)
    assert [len(each) for each in found] == [clips, clips]


@pytest.mark.parametrize(("at", "is_undone"), [(9, False), (10, True), (13, True)])
def test_a_model_that_is_loaded_is_kept_after_an_average_and_else_said_to_be_undone(
    at: int, is_undone: bool
) -> None:
    def job(driver: ThreadDriver) -> tuple[bool, bool]:
        net = Net()
        optimizer = optimizer_of(net, decoupled=True)
        with session_on(driver, net, optimizer, Often(**OPTIONS)) as session:
            for step in range(at + 1):
                if step == at:
                    net.load_state_dict({"weight": torch.full(SHAPE, 9.0)})
                step_of(net, optimizer, driver.rank, step)
            is_kept = bool((net.weight - 9).abs().max() < 1)
            return is_kept, any("was written is undone" in each for each in session.notices)

    with pytest.warns(OffbeatWarning, match="undone") if is_undone else nullcontext():
        found = results_of(2, job)
    assert found == [(not is_undone, is_undone)] * 2


def test_what_no_rank_uses_does_not_fade_and_the_user_hears_how_much_that_is() -> None:
    def job(driver: ThreadDriver) -> tuple[torch.Tensor, list[str]]:
        net = torch.nn.ModuleList([Net(), Net()])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
        strategy = offbeat.ZeroOneAdam(freeze_step=5, period=2)
        with session_on(driver, net, optimizer, strategy) as session:
            for step in range(8):
                (net[0].weight * gradient_of(driver.rank, step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return net[1].weight.detach().clone(), session.notices

    for unused, notices in results_of(2, job):
        assert torch.equal(unused, Net().weight)
        assert any("30 of 60 elements have had no gradient" in each for each in notices)


def test_what_adam_has_gathered_before_is_gone_on_with() -> None:
    def moved(*, attached: bool) -> torch.Tensor:
        net = Net()
        optimizer = optimizer_of(net, decoupled=True)
        for step in range(20):
            step_of(net, optimizer, 0, step)
        before = net.weight.detach().clone()
        strategy = offbeat.ZeroOneAdam(freeze_step=9)
        session = offbeat.attach(net, optimizer, strategy) if attached else nullcontext()
        with session:
            for step in range(20, 23):
                step_of(net, optimizer, 0, step)
        return net.weight.detach() - before

    torch.testing.assert_close(moved(attached=True), moved(attached=False), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_goes_on_after_the_session_with_steps_of_the_same_size(dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    with torch.no_grad():
        net.weight.mul_(2**-4)  # which bfloat16 can still tell from where it is a step later
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def step() -> float:
        before = net.weight.detach().clone()
        net.weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return float((before - net.weight.detach()).mean())

    with offbeat.attach(net, optimizer, offbeat.ZeroOneAdam(freeze_step=2)):
        sizes = [step() for _ in range(50)]
    sizes += [step() for _ in range(3)]
    # The gradient has always been 1, so that Adam moves by the learning rate.
    assert sizes == pytest.approx([0.01] * len(sizes), rel=0.02 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("is_added", [False, True], ids=["thawed", "added"])
def test_what_begins_to_train_later_takes_steps_of_the_same_size(is_added: bool) -> None:
    """Its own moments begin then, and their bias corrections with them."""
    net = torch.nn.ModuleList([Net(), Net()])
    late = net[1].weight
    optimizer = torch.optim.Adam(net[0].parameters() if is_added else net.parameters(), lr=0.01)
    with offbeat.attach(net, optimizer, InEightBits()):
        late.requires_grad_(is_added)
        for step in range(140):
            if step == 100:
                late.requires_grad_(True)
                if is_added:
                    optimizer.add_param_group({"params": [late]})
            sum(each.weight.sum() for each in net if each.weight.requires_grad).backward()
            optimizer.step()
            net.zero_grad()
    moved = float((Net().weight - late).detach().mean())
    # The gradient has always been 1: 40 steps of 0.01, but for those before the first update of v.
    assert 0.25 < moved < 0.44


def test_after_the_session_adam_begins_with_what_has_no_second_moment() -> None:
    net = torch.nn.ModuleList([Net(), Net()])
    late = net[1].weight
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def step() -> None:
        sum(each.weight.sum() for each in net if each.weight.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()

    with offbeat.attach(net, optimizer, offbeat.ZeroOneAdam(freeze_step=2)):
        for number in range(10):
            late.requires_grad_(number >= 5)
            step()
    assert torch.equal(late, Net().weight)
    step()
    torch.testing.assert_close(Net().weight - late, torch.full(SHAPE, 0.01))


@pytest.mark.parametrize("stop", [4, FREEZE, 13])
def test_a_run_in_half_precision_resumes_to_the_bit(stop: int) -> None:
    """Adam's moments are kept in float32, and loaded as bfloat16 by the optimizer."""

    def job(driver: ThreadDriver, steps: list[range]) -> torch.Tensor:
        saved: list[Any] = []
        for some in steps:
            net = Net().to(torch.bfloat16)
            torch.nn.init.zeros_(net.weight)  # near which bfloat16 tells small steps apart
            optimizer = optimizer_of(net, decoupled=False)
            with session_on(driver, net, optimizer, Often(**OPTIONS)) as session:
                parts = (net, optimizer, session)
                for part, state in zip(parts, saved, strict=False):
                    part.load_state_dict(state)
                for step in some:
                    step_of(net, optimizer, driver.rank, step)
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
        found: torch.Tensor = saved[0]["weight"]
        return found

    whole = results_of(2, lambda driver: job(driver, [range(NUM_STEPS)]))
    parts = [range(stop), range(stop, NUM_STEPS)]
    for one, other in zip(whole, results_of(2, lambda driver: job(driver, parts)), strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_is_refused() -> None:
    net = Net()
    with pytest.raises(UnsupportedError, match="ZeroOneAdam freezes"):
        offbeat.attach(net, torch.optim.SGD(net.parameters()), offbeat.ZeroOneAdam())
    with pytest.raises(ConfigError, match="period .* of at least 1"):
        offbeat.ZeroOneAdam(period=0)


def test_what_another_optimizer_steps_is_averaged_as_it_is() -> None:
    def job(driver: ThreadDriver) -> torch.Tensor:
        net = torch.nn.ModuleList([Net(), Net()])
        adam = torch.optim.AdamW(net[0].parameters(), lr=0.01)
        other = torch.optim.SGD(net[1].parameters(), lr=0.1)
        with session_on(driver, net, adam, offbeat.ZeroOneAdam(freeze_step=5, period=1)):
            for step in range(8):
                for each in net:
                    (each.weight * gradient_of(driver.rank, step)).sum().backward()
                other.step()
                adam.step()
                net.zero_grad()
            return net[1].weight.detach().clone()

    first, second = results_of(2, job)
    mean = sum(gradient_of(rank, step) for rank in range(2) for step in range(8)) / 2
    assert torch.equal(first, second)
    torch.testing.assert_close(first, Net().weight.detach() - 0.1 * mean)
