"""Gradients of half precision: what rounding the mean loses is owed, so that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from thread_support.world import ThreadDriver, results_of, session_on

NUM_RANKS, NUM_STEPS = 3, 6  # a third is not exact in any binary type

STRATEGIES: dict[str, Any] = {
    "powersgd": offbeat.PowerSGD(rank=1),
    "allreduce in 4 bits": offbeat.AllReduce(codec="linear4"),
    "topk": offbeat.TopK(density=0.1),
    "gtopk by reduce-scatter": offbeat.GTopK(density=0.1, collective="reduce_scatter"),
    "gtopk by all-gather": lent(
        offbeat.GTopK(density=0.1, collective="all_gather", codec="bfloat16"), bucket_mib=1e-4
    ),
    "gtopk by tree": offbeat.GTopK(density=0.1, collective="tree"),
    "gtopk with few entries and then all": offbeat.GTopK(
        density=0.1, collective="tree", warmup=((0.25, 1), (0.15, 2))
    ),
}


def net(dtype: torch.dtype) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model.to(dtype)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All of them in one float64 vector; zeros where there is none."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten()
            for p in model.parameters()
        ]
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in STRATEGIES),
        *((name, torch.float16) for name in ("powersgd", "allreduce in 4 bits", "topk")),
    ],
)
def test_applied_plus_owed_is_the_sum_of_all_ranks_gradients(name: str, dtype: torch.dtype) -> None:
    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model, plain = net(dtype), net(dtype)
        draw = torch.Generator().manual_seed(driver.rank)
        applied = owed = contributed = torch.zeros(0, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(driver, model, optimizer, STRATEGIES[name]) as session:
            steps = []
            for _ in range(NUM_STEPS):
                x = torch.randn(8, 20, generator=draw).to(dtype)
                for each in (model, plain):
                    each(x).float().square().mean().backward()
                steps.append((gradients(model), gradients(plain)))
                optimizer.step()
                for each in (model, plain):
                    each.zero_grad()
            applied, contributed = (sum(of) for of in zip(*steps, strict=True))
            residual = session.state_dict()["callbacks"]["gradients"]["additive"]
            owed = torch.cat(
                [residual[f"residual/{n}"].double().flatten() for n, _ in model.named_parameters()]
            )
        return applied, owed, contributed

    ranks = results_of(NUM_RANKS, job)
    applied, *others = (rank[0] for rank in ranks)
    assert all(torch.equal(other, applied) for other in others)
    owed, contributed = (sum(rank[place] for rank in ranks) for place in (1, 2))
    torch.testing.assert_close(NUM_RANKS * applied + owed, contributed, rtol=1e-5, atol=1e-6)


def test_where_all_is_sent_what_the_division_rounds_is_owed() -> None:
    """Sums of small whole numbers are exact in bfloat16, and a third of them is not."""

    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = torch.nn.Linear(100, 1, bias=False).bfloat16()
        x = torch.randint(-9, 10, (100,), generator=torch.Generator().manual_seed(driver.rank))
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.0)
        strategy = offbeat.GTopK(collective="dense")
        with session_on(driver, weights, optimizer, strategy) as session:
            weights(x.bfloat16()).sum().backward()
            owed = session.state_dict()["callbacks"]["gradients"]["additive"]["residual/weight"]
            return gradients(weights), owed.double().flatten(), x.double()

    ranks = results_of(NUM_RANKS, job)
    owed, contributed = (sum(rank[place] for rank in ranks) for place in (1, 2))
    assert owed.any()
    torch.testing.assert_close(NUM_RANKS * ranks[0][0] + owed, contributed, rtol=1e-6, atol=1e-6)
