"""By how many samples a rank's gradient counts, with ranks as threads."""

from __future__ import annotations

import pytest
import torch

import offbeat
from thread_support.world import ThreadDriver, results_of, session_on

FIRST, SECOND = ((8, 1.0), (8, 3.0)), ((8, 30.0), (4, 60.0))
"""Of two passes, each rank's samples and gradient."""


@pytest.mark.parametrize("is_sent_twice", [True, False], ids=["sent twice", "sent once"])
def test_samples_of_a_pass_that_was_exchanged_do_not_weigh_in_the_next_one(
    is_sent_twice: bool,
) -> None:
    def job(driver: ThreadDriver) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(driver, model, optimizer, offbeat.AllReduce()) as session:
            for number, each in enumerate((FIRST, SECOND)):
                samples, gradient = each[driver.rank]
                session.weigh(samples)
                loss = model(torch.full((1, 1), gradient).double()).sum()
                if is_sent_twice or number:
                    loss.backward()
                else:
                    with session.no_sync():
                        loss.backward()
            optimizer.step()
            return float(model.weight.grad)

    apart = (8 * 1 + 8 * 3) / 16 + (8 * 30 + 4 * 60) / 12
    together = (16 * (1 + 30) + 12 * (3 + 60)) / 28
    wanted = apart if is_sent_twice else together
    assert results_of(2, job) == [pytest.approx(wanted)] * 2


def test_samples_of_an_evaluation_weigh_in_no_later_step() -> None:
    """Ranks evaluate 3 and 4 samples, and train with batches that nobody was told of."""

    def job(driver: ThreadDriver) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(driver, model, optimizer, offbeat.AllReduce()) as session:
            with torch.no_grad():
                for x in session.loader([torch.ones(1).double()] * 7, batch_size=4):
                    model(x)
            model(torch.full((1, 1), float(driver.rank)).double()).sum().backward()
            optimizer.step()
            return float(model.weight.grad)

    assert results_of(2, job) == [0.5] * 2
