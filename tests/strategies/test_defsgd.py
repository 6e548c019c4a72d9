"""DEF-SGD against its paper's algorithm in one process."""

from __future__ import annotations

import pytest
import torch

import offbeat
from thread_support.world import ThreadDriver, results_of, session_on

SIZES, RATIO, MOMENTUM, NUM_STEPS = (20, 7), 4, 0.9, 12
LENGTHS = (5, 2)  # of the blocks


def rate_of(step: int) -> float:
    return 0.1 if step < 5 else 0.03


def gradients_of(rank: int, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for size in SIZES]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.ParameterList(torch.ones(size).double() for size in SIZES)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_steps_are_those_of_the_paper_with_the_blocks_that_were_drawn(num_ranks: int) -> None:
    def job(driver: ThreadDriver) -> list[list[torch.Tensor]]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=MOMENTUM)
        found = []
        with session_on(driver, net, optimizer, offbeat.DEFSGD(ratio=RATIO)):
            for step in range(NUM_STEPS):
                optimizer.param_groups[0]["lr"] = rate_of(step)
                pairs = zip(net.both, gradients_of(driver.rank, step), strict=True)
                torch.stack([(mine * gradient).sum() for mine, gradient in pairs]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append([parameter.detach().clone() for parameter in net.both])
        return found

    results = results_of(num_ranks, job)
    momenta = [[torch.zeros(size).double() for size in SIZES] for _ in range(num_ranks)]
    changes = [[torch.zeros(size).double() for size in SIZES] for _ in range(num_ranks)]
    x = [torch.ones(size).double() for size in SIZES]
    starts = set()
    for step in range(NUM_STEPS):
        before = [each.clone() for each in x]
        for rank in range(num_ranks):
            for which, gradient in enumerate(gradients_of(rank, step)):
                momenta[rank][which] = MOMENTUM * momenta[rank][which] + gradient
                changes[rank][which] += rate_of(step) * momenta[rank][which]
        for which, size in enumerate(SIZES):
            moved = (results[0][step][which] != before[which]).nonzero().flatten().tolist()
            start = next(place for place in moved if (place - 1) % size not in moved)
            block = [(start + place) % size for place in range(LENGTHS[which])]
            assert sorted(block) == moved
            x[which][block] -= sum(each[which][block] for each in changes) / num_ranks
            for each in changes:
                each[which][block] = 0
            # What was applied so far is compared, so that nothing of it adds up.
            for found in results:
                torch.testing.assert_close(found[step][which], x[which], rtol=1e-9, atol=1e-9)
                assert torch.equal(found[step][which], results[0][step][which])
            x[which] = results[0][step][which].clone()
        starts.add(start)
    assert len(starts) > 3  # of the last parameter


def test_every_element_has_travelled_after_a_while() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DEFSGD(ratio=RATIO)):
        for _ in range(60):
            torch.stack([each.sum() for each in net.both]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(bool((each < 0).all()) for each in net.both)
