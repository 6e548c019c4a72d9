"""DEF-SGD against its paper's algorithm in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offbeat
from offbeat.errors import CheckpointError, ConfigError
from thread_support.world import ThreadDriver, results_of, session_on

SIZES, RATIO, MOMENTUM, NUM_STEPS = (20, 7), 4, 0.9, 12
LENGTHS = (5, 2)  # of the blocks


def rate_of(step: int) -> float:
    return 0.1 if step < 5 else 0.03


def noise(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in SIZES]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.ParameterList(torch.ones(size).double() for size in SIZES)


def step_of(net: Net, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """The gradient at x is x plus noise."""
    optimizer.param_groups[0]["lr"] = rate_of(step)
    pairs = zip(net.both, noise(rank, step), strict=True)
    torch.stack([(x * x / 2 + x * each).sum() for x, each in pairs]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def anchors_of(session: offbeat.Session) -> list[torch.Tensor]:
    state = session.state_dict()["callbacks"]["periodic_average"]["replicated"]
    return [state[f"anchor/both.{which}"] for which in range(len(SIZES))]


@pytest.mark.parametrize("ahead", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_steps_are_those_of_the_paper_with_the_blocks_that_were_drawn(
    num_ranks: int, ahead: float
) -> None:
    def job(driver: ThreadDriver) -> list[Any]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=MOMENTUM)
        found = []
        with session_on(
            driver, net, optimizer, offbeat.DEFSGD(ratio=RATIO, ahead=ahead)
        ) as session:
            for step in range(NUM_STEPS):
                step_of(net, optimizer, driver.rank, step)
                found.append((anchors_of(session), [each.detach().clone() for each in net.both]))
        return found

    results = results_of(num_ranks, job)
    momenta, owed = (
        [[torch.zeros(size).double() for size in SIZES] for _ in range(num_ranks)] for _ in range(2)
    )
    sync = [torch.ones(size).double() for size in SIZES]
    starts = set()
    for step in range(NUM_STEPS):
        before = [each.clone() for each in sync]
        for rank in range(num_ranks):
            for which, each in enumerate(noise(rank, step)):
                x = sync[which] - ahead * owed[rank][which]
                momenta[rank][which] = MOMENTUM * momenta[rank][which] + x + each
                owed[rank][which] += rate_of(step) * momenta[rank][which]
        for which, size in enumerate(SIZES):
            anchor = results[0][step][0][which]
            moved = (anchor != before[which]).nonzero().flatten().tolist()
            start = next(place for place in moved if (place - 1) % size not in moved)
            block = [(start + place) % size for place in range(LENGTHS[which])]
            assert sorted(block) == moved
            sync[which][block] -= sum(each[which][block] for each in owed) / num_ranks
            for rank in range(num_ranks):
                owed[rank][which][block] = 0
                anchors, models = results[rank][step]
                assert torch.equal(anchors[which], anchor)
                # What was applied so far is compared, so that nothing of it adds up.
                torch.testing.assert_close(anchors[which], sync[which], rtol=1e-9, atol=1e-9)
                expected = sync[which] - ahead * owed[rank][which]
                torch.testing.assert_close(models[which], expected, rtol=1e-9, atol=1e-9)
            sync[which] = anchor.clone()
        starts.add(start)
    assert len(starts) > 3  # of the last parameter


def test_every_element_has_travelled_after_a_while() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DEFSGD(ratio=RATIO)) as session:
        for _ in range(60):
            torch.stack([each.sum() for each in net.both]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(bool((each < 0).all()) for each in anchors_of(session))


def test_a_parameter_that_is_frozen_meanwhile_stays_where_it_is() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DEFSGD(ratio=RATIO)) as session:
        for step in range(3):
            step_of(net, optimizer, 0, step)
        net.both[0].requires_grad_(False)
        kept = net.both[0].clone()
        owed = session.state_dict()["callbacks"]["periodic_average"]["additive"]["residual/both.0"]
        assert owed.any()
        for _ in range(5):
            (net.both[1] ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(net.both[0], kept)


def test_what_is_written_into_parameters_between_steps_is_not_undone() -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with session_on(driver, net, optimizer, offbeat.DEFSGD(ratio=RATIO)) as session:
            for step in range(60):
                for each in net.both if step else []:
                    each.data.clamp_(max=0.5)
                (net.both[0] * net.both[0]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert all(bool((each <= 0.5).all()) for each in anchors_of(session))
        return [each.detach().clone() for each in net.both]

    for both in results_of(2, job):
        assert all(bool((each <= 0.5).all()) for each in both)


def test_a_resumed_run_begins_where_its_state_says_whatever_the_model_holds() -> None:
    def aims(state: dict[str, Any]) -> list[torch.Tensor]:
        found = state["callbacks"]["periodic_average"]
        names = [f"both.{which}" for which in range(len(SIZES))]
        anchors, owed = found["replicated"], found["additive"]
        return [anchors[f"anchor/{name}"] + owed[f"residual/{name}"] for name in names]

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DEFSGD(ratio=RATIO)) as session:
        for step in range(3):
            step_of(net, optimizer, 0, step)
        saved = session.state_dict()
    with offbeat.attach(net, optimizer, offbeat.DEFSGD(ratio=RATIO)) as session:
        session.load_state_dict(saved)
        for each in net.both:
            each.data.zero_()
        optimizer.param_groups[0]["lr"] = 0.0
        torch.stack([(each * each).sum() for each in net.both]).sum().backward()
        optimizer.step()
        torch.testing.assert_close(aims(session.state_dict()), aims(saved))


def test_an_anchor_of_another_model_is_refused() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DEFSGD()) as session:
        step_of(net, optimizer, 0, 0)
        state = session.state_dict()
        anchors = state["callbacks"]["periodic_average"]["replicated"]
        anchors["anchor/both.0"] = anchors["anchor/both.0"][1:]
        with pytest.raises(CheckpointError, match="anchor was saved with another model"):
            session.load_state_dict(state)


@pytest.mark.parametrize("ahead", [-0.1, 1.1, "far"])
def test_a_share_that_is_none_is_refused(ahead: Any) -> None:
    with pytest.raises(ConfigError, match=r"ahead .* in \[0, 1\]"):
        offbeat.DEFSGD(ahead=ahead)
