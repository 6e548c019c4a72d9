"""Optimizers of rows against torch's, which see the same gradients as dense ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.xmc.row_optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD

NUM_ROWS, WIDTH = 7, 3

MakeOurs = Callable[[Sequence[torch.Tensor]], RowOptimizer]
MakeTorchs = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

LEAVE_OTHER_ROWS: dict[str, tuple[MakeOurs, MakeTorchs]] = {
    "sgd": (lambda p: RowSGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (lambda p: RowAdagrad(p, 0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
}
MOVE_OTHER_ROWS: dict[str, tuple[MakeOurs, MakeTorchs]] = {
    "momentum": (
        lambda p: RowSGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    ),
    "adam": (lambda p: RowAdam(p, 0.1), lambda p: torch.optim.Adam(p, 0.1)),
}
ALL = LEAVE_OTHER_ROWS | MOVE_OTHER_ROWS
touched_in_steps = st.lists(st.sets(st.integers(0, NUM_ROWS - 1)), min_size=1, max_size=6)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.sin(torch.arange(float(NUM_ROWS * WIDTH))).view(NUM_ROWS, WIDTH)
    )


def gradient(rows: set[int], step: int) -> torch.Tensor:
    """A dense gradient that is zero outside of `rows`."""
    dense = torch.cos(torch.arange(float(NUM_ROWS * WIDTH)) * (step + 1.3)).view(NUM_ROWS, WIDTH)
    return dense * torch.tensor([row in rows for row in range(NUM_ROWS)])[:, None]


def sparse(dense: torch.Tensor, rows: set[int]) -> torch.Tensor:
    listed = torch.tensor(sorted(rows), dtype=torch.int64)
    return torch.sparse_coo_tensor(
        listed[None], dense[listed], dense.shape, is_coalesced=True, check_invariants=True
    )


def train(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> None:
    for each in gradients:
        weight.grad = each
        optimizer.step()


@pytest.mark.parametrize("name", LEAVE_OTHER_ROWS)
@given(steps=touched_in_steps)
def test_where_other_rows_stay_the_result_is_torchs(name: str, steps: list[set[int]]) -> None:
    make_ours, make_torchs = LEAVE_OTHER_ROWS[name]
    ours, torchs = parameter(), parameter()
    dense = [gradient(rows, step) for step, rows in enumerate(steps)]
    train(
        make_ours([ours]),
        ours,
        [sparse(each, rows) for each, rows in zip(dense, steps, strict=True)],
    )
    train(make_torchs([torchs]), torchs, dense)
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("as_sparse", [True, False])
def test_where_all_rows_are_touched_the_result_is_torchs(name: str, as_sparse: bool) -> None:
    make_ours, make_torchs = ALL[name]
    ours, torchs = parameter(), parameter()
    everything = set(range(NUM_ROWS))
    dense = [gradient(everything, step) for step in range(6)]
    train(
        make_ours([ours]), ours, [sparse(each, everything) if as_sparse else each for each in dense]
    )
    train(make_torchs([torchs]), torchs, dense)
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("name", MOVE_OTHER_ROWS)
@given(steps=touched_in_steps)
def test_momentum_of_a_row_is_frozen_while_it_has_no_gradient(
    name: str, steps: list[set[int]]
) -> None:
    """Each row behaves as a parameter of its own that torch trains in the steps that touch it."""
    make_ours, make_torchs = MOVE_OTHER_ROWS[name]
    ours, rows_apart = (
        parameter(),
        [torch.nn.Parameter(row.detach().clone()) for row in parameter()],
    )
    optimizers = [make_torchs([row]) for row in rows_apart]
    ours_optimizer = make_ours([ours])
    for step, rows in enumerate(steps):
        dense = gradient(rows, step)
        train(ours_optimizer, ours, [sparse(dense, rows)])
        for row in range(NUM_ROWS):
            state = optimizers[row].state[rows_apart[row]]
            if row in rows:
                if "step" in state:
                    state["step"].fill_(
                        step
                    )  # bias is corrected by the number of the step, not by the row's own count
                elif name == "adam":
                    state.update(
                        step=torch.tensor(float(step)),
                        exp_avg=torch.zeros(WIDTH),
                        exp_avg_sq=torch.zeros(WIDTH),
                    )
                train(optimizers[row], rows_apart[row], [dense[row]])
    torch.testing.assert_close(ours.detach(), torch.stack([row.detach() for row in rows_apart]))


def test_adam_is_torchs_for_sparse_gradients() -> None:
    ours, torchs = parameter(), parameter()
    steps = [{1, 2}, {2}, {0, 6}, {1}]
    ours_optimizer, torchs_optimizer = (
        RowAdam([ours], 0.1, eps=1e-12),
        torch.optim.SparseAdam([torchs], 0.1, eps=1e-12),
    )
    for step, rows in enumerate(steps):
        dense = gradient(rows, step)
        train(ours_optimizer, ours, [sparse(dense, rows)])
        train(torchs_optimizer, torchs, [sparse(dense, rows)])
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("name", ALL)
@given(steps=touched_in_steps)
def test_rows_without_a_gradient_stay_as_they_are(name: str, steps: list[set[int]]) -> None:
    weight, before = parameter(), parameter().detach()
    train(
        ALL[name][0]([weight]),
        weight,
        [sparse(gradient(rows, step), rows) for step, rows in enumerate(steps)],
    )
    changed = (weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == sorted(set().union(*steps))


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_optimizer_goes_on_the_same(name: str) -> None:
    make, steps = ALL[name][0], [{1, 2}, {2, 5}, {0, 6}, {1}]
    gradients = [sparse(gradient(rows, step), rows) for step, rows in enumerate(steps)]
    whole, first = parameter(), parameter()
    train(make([whole]), whole, gradients)
    optimizer = make([first])
    train(optimizer, first, gradients[:2])
    second = torch.nn.Parameter(first.detach().clone())
    resumed = make([second])
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, second, gradients[2:])
    assert torch.equal(second, whole)


def test_rows_listed_twice_add_up() -> None:
    weight = parameter()
    before = weight.detach().clone()
    twice = torch.sparse_coo_tensor(
        torch.tensor([[3, 3]]), torch.ones(2, WIDTH), (NUM_ROWS, WIDTH), check_invariants=True
    )
    train(RowSGD([weight], 0.5), weight, [twice])
    torch.testing.assert_close(weight.detach()[3], before[3] - 1.0)


def test_momentum_that_is_set_after_some_steps_is_torchs() -> None:
    """The next step ended with a KeyError."""
    ours, torchs = parameter(), parameter()
    everything = set(range(NUM_ROWS))
    both = ((ours, RowSGD([ours], 0.1)), (torchs, torch.optim.SGD([torchs], 0.1)))
    for weight, optimizer in both:
        for step in range(5):
            optimizer.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
            train(optimizer, weight, [gradient(everything, step)])
    torch.testing.assert_close(ours, torchs)


def test_schedulers_and_closures_work() -> None:
    weight = parameter()
    before = weight.detach().clone()
    optimizer = RowSGD([weight], 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(before.sum().item())
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), before - 1.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: RowSGD(p, -1.0), "lr is -1.0; it must be at least 0.0"),
        (lambda p: RowSGD(p, float("nan")), "lr is nan"),
        (
            lambda p: RowSGD(p, 1.0, momentum=1.0),
            "momentum is 1.0; it must be at least 0.0 and below 1.0",
        ),
        (lambda p: RowAdam(p, betas=(0.9, 1.5)), "each of betas is 1.5"),
        (lambda p: RowAdagrad(p, 0.1, eps=-1.0), "eps is -1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: MakeOurs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make([parameter()])


def test_a_gradient_that_is_sparse_in_both_dimensions_is_refused() -> None:
    weight = parameter()
    with pytest.raises(
        ConfigError, match="sparse in 2 dimensions; it may be so in the first one only"
    ):
        train(RowSGD([weight], 0.1), weight, [gradient({1}, 0).to_sparse()])
