"""What a script evaluates and saves where ranks' models differ."""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.run.evaluation import EvaluationWeights
from offbeat.strategies.base import Strategy
from thread_support.nets import make_model, step_of
from thread_support.world import ThreadDriver, results_of, session_on


@pytest.mark.parametrize(
    "strategy", [offbeat.DPSGD(), offbeat.SGP(), offbeat.Crossbow()], ids=lambda each: each.name
)
def test_a_run_of_few_steps_saves_the_same_model_on_all_ranks(strategy: Strategy) -> None:
    def job(driver: ThreadDriver) -> list[list[torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        saved = []
        with session_on(driver, model, optimizer, strategy) as session:
            evaluation = EvaluationWeights(session, model, optimizer)
            for step in range(7):
                step_of(model, optimizer, driver.rank, step)
                saved.append([*model.state_dict().values()])
            evaluation.close()
        return saved

    first, *others = results_of(4, job)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(map(torch.equal, one, two))
    assert not all(map(torch.equal, first[0], first[-1]))
