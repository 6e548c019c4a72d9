"""PowerSGD against its paper's algorithm in one process, and what it keeps from step to step."""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.errors import CheckpointError
from offbeat.strategies.powersgd import orthonormal
from thread_support.world import ThreadDriver, results_of, session_on

ROWS, COLUMNS, NUM_STEPS = 12, 20, 5


def gradient_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    low = torch.randn(ROWS, 3, generator=draw) @ torch.randn(3, COLUMNS, generator=draw)
    return (low + 0.1 * torch.randn(ROWS, COLUMNS, generator=draw)).double()


def means_of(num_ranks: int, rank_of_matrices: int) -> list[list[torch.Tensor]]:
    """The gradients that each rank's optimizer sees."""

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = torch.nn.Linear(COLUMNS, ROWS, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        means = []
        with session_on(driver, model, optimizer, offbeat.PowerSGD(rank=rank_of_matrices)):
            for step in range(NUM_STEPS):
                (model.weight * gradient_of(driver.rank, step)).sum().backward()
                means.append(model.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
        return means

    return results_of(num_ranks, job)


def papers_means(num_ranks: int, right: torch.Tensor) -> list[torch.Tensor]:
    """Algorithms 1 and 2 of the paper, with QR and the errors of its text."""
    errors = [torch.zeros(ROWS, COLUMNS).double() for _ in range(num_ranks)]
    means = []
    for step in range(NUM_STEPS):
        deltas = [gradient_of(rank, step) + errors[rank] for rank in range(num_ranks)]
        left = torch.linalg.qr(sum(delta @ right for delta in deltas) / num_ranks).Q
        right = sum(delta.T @ left for delta in deltas) / num_ranks
        mean = left @ right.T
        errors = [delta - mean for delta in deltas]
        means.append(mean)
    return means


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("rank_of_matrices", [1, 2])
def test_means_are_those_of_the_paper(num_ranks: int, rank_of_matrices: int) -> None:
    results = means_of(num_ranks, rank_of_matrices)
    name, size = "weight", ROWS * COLUMNS
    draw = torch.Generator().manual_seed(len(name) + size)
    begin = torch.randn(rank_of_matrices, COLUMNS, generator=draw).double().T
    expected = papers_means(num_ranks, begin)
    for means in results:
        for mean, theirs, first in zip(means, expected, results[0], strict=True):
            assert torch.equal(mean, first)
            assert torch.linalg.matrix_rank(mean) == rank_of_matrices
            torch.testing.assert_close(mean, theirs, rtol=1e-9, atol=1e-9)


def test_rows_are_orthonormal_and_dependent_ones_become_zero() -> None:
    rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).double()
    basis = orthonormal(rows)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3).double())
    torch.testing.assert_close((rows @ basis.T) @ basis, rows)
    rows[1] = 2 * rows[0]
    assert not orthonormal(rows)[1].any()
    assert not orthonormal(torch.zeros(2, 4)).any()


def test_a_matrix_that_lies_transposed_in_memory_is_reduced_as_one() -> None:
    draw = torch.Generator().manual_seed(2)
    gradient = torch.randn(ROWS, 1, generator=draw) @ torch.randn(1, COLUMNS, generator=draw)
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(COLUMNS, ROWS).T)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.attach(model, optimizer, offbeat.PowerSGD(rank=1)):
        (model.weight * gradient).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, gradient)


def test_a_matrix_whose_first_gradient_is_zero_is_reduced_later() -> None:
    """As below a layer that begins with zeros."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).double()
    torch.nn.init.zeros_(layers[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 16).double()
    with offbeat.attach(model, optimizer, offbeat.PowerSGD(rank=2)):
        for _ in range(3):
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            gradient = layers[0].weight.grad
    assert torch.linalg.matrix_rank(gradient) == 2


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_with_one_element_that_is_not_finite_is_skipped(bad: float) -> None:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with offbeat.attach(model, optimizer, offbeat.PowerSGD(rank=2)) as session:
        weights = torch.zeros(ROWS, COLUMNS).double()
        weights[3, 7] = bad
        (model.weight * weights).sum().backward()
        optimizer.step()
        assert session.stats.skipped_steps == 1
    assert torch.equal(model.weight, before)


def test_a_state_is_loaded_with_the_rank_that_it_was_saved_with() -> None:
    saved = []
    for rank in (1, 2):
        model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, offbeat.PowerSGD(rank=rank)) as session:
            model.weight.sum().backward()
            optimizer.step()
            saved.append(session.state_dict())
            session.load_state_dict(saved[-1])
            if rank == 2:
                with pytest.raises(CheckpointError, match="another model or strategy.*'right/wei"):
                    session.load_state_dict(saved[0])
