"""A parameter that is frozen while what it has learned travels in a code, or that nobody uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offbeat
from thread_support.nets import make_model, step_of
from thread_support.world import ThreadDriver, results_of, session_on

RANKS, FROZEN_AT = 3, 10
FEW = offbeat.WeightCodec(density=0.1)
STRATEGIES: dict[str, Any] = {
    "in 8 bits": offbeat.LocalSGD(period=4, warmup=0, codec="linear8"),
    "few": offbeat.LocalSGD(period=4, codec=FEW, outer="diloco"),
    "signs": offbeat.LocalSGD(period=4, warmup=0, codec="sign"),
    "streaming": offbeat.LocalSGD(period=4, exchange="2x1", codec="linear8"),
    "0/1 Adam": offbeat.ZeroOneAdam(freeze_step=5, period=1),
    "DEF": offbeat.DEFSGD(ratio=4, ahead=0.0),
    "CROSSBOW": offbeat.Crossbow(alpha=0.3),
    "CROSSBOW in 4 bits": offbeat.Crossbow(alpha=0.3, codec="linear4"),
}


def held(driver: ThreadDriver, strategy: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """After each step the parameter that is frozen, and what is owed to it."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    with session_on(driver, model, optimizer, strategy) as session:
        for step in range(FROZEN_AT + 12):
            if step == FROZEN_AT:
                model[0].weight.requires_grad_(False)
            step_of(model, optimizer, driver.rank, step)
            owed = [
                tensor.clone()
                for state in session.state_dict()["callbacks"].values()
                for key, tensor in state.get("additive", {}).items()
                if key.endswith("0.weight")
            ]
            found.append((model[0].weight.detach().clone(), owed))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_the_same_on_all_ranks_and_what_is_owed_to_it_waits(name: str) -> None:
    by_rank = results_of(RANKS, lambda driver: held(driver, STRATEGIES[name]))
    averaged = FROZEN_AT + 3
    for steps in by_rank:
        first, owed_first = steps[averaged]
        for weight, owed in steps[averaged:]:
            assert torch.equal(weight, by_rank[0][averaged][0])
            assert all(map(torch.equal, owed, owed_first))
        assert not torch.equal(first, steps[FROZEN_AT - 4][0])
    if name in ("in 8 bits", "streaming") or name.startswith("CROSSBOW"):
        mean = sum(steps[FROZEN_AT - 1][0] for steps in by_rank) / RANKS
        apart = max(float((steps[FROZEN_AT - 1][0] - mean).abs().max()) for steps in by_rank)
        assert float((by_rank[0][averaged][0] - mean).abs().max()) < 0.2 * apart


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_parameter_that_no_rank_uses_stays_where_it_is(name: str) -> None:
    def job(driver: ThreadDriver) -> None:
        model = make_model()
        unused, before = model[2].weight, model[2].weight.detach().clone()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: setattr(unused, "grad", None))
        with session_on(driver, model, optimizer, STRATEGIES[name]):
            for step in range(12):
                step_of(model, optimizer, driver.rank, step)
                assert torch.equal(unused, before)

    results_of(RANKS, job)
