"""Inverses, and how they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat
from kfac_support.inverse import has_inverse
from offbeat import Curvature
from offbeat.kfac import inverses
from offbeat.kfac.blocks import FactorSlot, slots_of
from offbeat.kfac.factors import FactorShape, pack, unpack
from offbeat.kfac.inverses import (
    InverseForm,
    InversionTask,
    Inverter,
    form_for,
    usual_form,
)
from offbeat.kfac.plans import InverseBatch
from offbeat.kfac.preconditioner import InverseExchange
from offbeat.kfac.survey import survey
from offbeat.strategies.kfac import KFACStrategy
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank

# Damped inverses, and what happens to matrices that have none.


def task(
    matrices: torch.Tensor, *, damping: float = 0.1, name: str = "layer:input", valid: bool = True
) -> InversionTask:
    shape = FactorShape(
        groups=matrices.shape[0], dim=matrices.shape[-1], is_diagonal=matrices.ndim == 2
    )
    return InversionTask(
        name=name,
        packed=matrices if shape.is_diagonal else pack(matrices),
        shape=shape,
        damping=torch.tensor(damping, dtype=matrices.dtype),
        valid=torch.tensor(valid),
    )


def moment(groups: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rows = torch.randn(
        groups, 2 * dim, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )
    return rows.mT @ rows / (2 * dim)


def inverse_of(packed: torch.Tensor, of: InversionTask, form: InverseForm) -> torch.Tensor:
    if form == "inverse" or of.shape.is_diagonal:
        return square(packed, of)
    if form == "bfloat16":
        return packed.unflatten(1, (of.shape.dim, of.shape.dim)).float()
    upper = square(packed, of).triu()
    return torch.linalg.inv(upper.mT @ upper)


def square(packed: torch.Tensor, of: InversionTask) -> torch.Tensor:
    return torch.diag_embed(packed) if of.shape.is_diagonal else unpack(packed, of.shape.dim)


forms = pytest.mark.parametrize("form", ["triangle", "inverse"])


@forms
@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=6
    )
)
def test_batches_of_any_mixture_are_inverted_each_with_its_damping(
    form: InverseForm, kinds: list[tuple[int, int, bool]]
) -> None:
    tasks = []
    for seed, (groups, dim, is_diagonal) in enumerate(kinds):
        matrices = moment(groups, dim, seed)
        if is_diagonal:
            matrices = matrices.diagonal(dim1=1, dim2=2)[:1].contiguous()
        tasks.append(task(matrices, damping=0.1 * (seed + 1)))
    for each, inverse in zip(tasks, Inverter(pytest.fail, form).invert(tasks), strict=True):
        assert inverse.shape == each.shape.packed
        assert has_inverse(inverse)
        damped = square(each.packed, each) + each.damping * torch.eye(
            each.shape.dim, dtype=torch.float64
        )
        np.testing.assert_allclose(
            inverse_of(inverse, each, form_for(form, each.shape)).numpy(),
            np.linalg.inv(damped.numpy()),
            rtol=1e-8,
            atol=1e-10,
        )


def test_matrices_of_one_size_are_inverted_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attempt = inverses.damp_and_invert_
    monkeypatch.setattr(
        inverses,
        "damp_and_invert_",
        lambda matrices, *rest: (calls.append(matrices.shape), attempt(matrices, *rest))[1],
    )
    Inverter(pytest.fail, "inverse").invert(
        [task(moment(groups, dim, 1)) for groups, dim in ((1, 4), (2, 3), (3, 4), (1, 3), (1, 4))]
    )
    assert calls == [(5, 4, 4), (3, 3, 3)]


def indefinite(lowest: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with one eigenvalue that is negative."""
    turn, _ = torch.linalg.qr(
        torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    )
    values = torch.tensor([lowest, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    return (turn * values @ turn.mT).to(dtype)[None]


@given(kinds=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=6))
def test_in_bfloat16_inverses_are_the_same_rounded_and_square(kinds: list[tuple[int, int]]) -> None:
    tasks = [task(moment(groups, dim, seed)) for seed, (groups, dim) in enumerate(kinds)]
    exact, rounded = (Inverter(pytest.fail, form).invert(tasks) for form in ("inverse", "bfloat16"))
    for each, one, other in zip(tasks, exact, rounded, strict=True):
        assert other.shape == Inverter(pytest.fail, "bfloat16").stored_shape(each.shape)
        assert has_inverse(other)
        assert torch.equal(other, square(one, each).bfloat16().flatten(1))


@forms
def test_ten_times_the_damping_may_help(form: InverseForm) -> None:
    matrix = indefinite(-0.5)
    each = task(matrix, damping=0.1)
    (inverse,) = Inverter(pytest.fail, form).invert([each])
    expected = torch.linalg.inv(matrix + torch.eye(5))
    torch.testing.assert_close(inverse_of(inverse, each, form), expected, rtol=1e-4, atol=1e-5)


@forms
def test_float64_may_help(form: InverseForm) -> None:
    """Beside elements of 2^20, float32 has no room for a damping of 1 / 100."""
    dim = 6
    row = torch.tensor([1.0, 2, -1, 4, 2, -2]) * 2**10
    packed = pack(torch.outer(row, row)[None])
    rungs = []
    attempt = inverses.damp_and_invert_

    def noting(
        matrices: torch.Tensor, damping: torch.Tensor, form: InverseForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, good = attempt(matrices, damping, form)
        rungs.append((matrices.dtype, bool(good.all())))
        return result, good

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inverses, "damp_and_invert_", noting)
        each = task(unpack(packed, dim), damping=0.01)
        (inverse,) = Inverter(pytest.fail, form).invert([each])
    assert rungs == [(torch.float32, False), (torch.float32, False), (torch.float64, True)]
    assert has_inverse(inverse)
    assert (torch.linalg.eigvalsh(inverse_of(inverse.double(), each, form)) > 0).all()


@forms
def test_a_hopeless_factor_has_no_inverse_harms_no_other_and_is_named_once(
    form: InverseForm,
) -> None:
    warnings: list[str] = []
    inverter = Inverter(warnings.append, form)
    broken = moment(1, 5, 1, torch.float32)
    broken[0, 1, 1] = float("nan")
    good = moment(2, 5, 2, torch.float32)
    tasks = [task(indefinite(-50.0), name="bad:input"), task(good), task(broken, name="nan:output")]
    for _ in range(2):
        found = inverter.invert(tasks)
        assert not found[0].any()
        assert not found[2].any()
        assert not has_inverse(found[0])
        damped = good + 0.1 * torch.eye(5)
        torch.testing.assert_close(
            inverse_of(found[1], tasks[1], form) @ damped,
            torch.eye(5).expand(2, 5, 5),
            rtol=1e-4,
            atol=1e-5,
        )
    assert len(warnings) == 2
    assert "bad:input" in warnings[0]
    assert "nan:output" in warnings[1]


@pytest.mark.parametrize("form", ["triangle", "bfloat16"])
def test_one_bad_group_leaves_the_whole_factor_without_an_inverse(form: InverseForm) -> None:
    matrices = torch.cat([moment(1, 5, 2, torch.float32), indefinite(-50.0)])
    (inverse,) = Inverter(lambda warning: None, form).invert([task(matrices)])
    assert not has_inverse(inverse)


@pytest.mark.parametrize("form", ["triangle", "inverse", "bfloat16"])
def test_what_was_never_averaged_has_no_inverse_and_needs_no_warning(form: InverseForm) -> None:
    found = Inverter(pytest.fail, form).invert(
        [task(torch.zeros(1, 3, 3), valid=False), task(torch.zeros(1, 3), valid=False)]
    )
    assert not any(inverse.any() for inverse in found)


def test_gpus_multiply_and_so_do_others_where_an_inverse_serves_many_steps() -> None:
    assert usual_form(torch.device("cuda"), 1) == usual_form(torch.device("cpu"), 100) == "inverse"
    assert usual_form(torch.device("cpu"), 1) == "triangle"


@pytest.mark.parametrize("fast", [True, False])
def test_inverses_are_rounded_where_that_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(inverses, "multiplies_bfloat16_fast", lambda device: fast)
    often, seldom = offbeat.SPDKFAC(inverse_interval=25), offbeat.SPDKFAC(inverse_interval=26)
    single = slots_of(survey(nn.Linear(3, 2), Curvature()).blocks)
    double = slots_of(survey(nn.Linear(3, 2).double(), Curvature()).blocks)

    def form(slots: list[FactorSlot], strategy: KFACStrategy, *, alike: bool = True) -> str:
        return inverses.form_of(slots, strategy.settings(), same_devices=alike)

    assert form(single, seldom) == ("bfloat16" if fast else "inverse")
    assert form(single, often) == "triangle"
    assert form(single, seldom, alike=False) == form(double, seldom) == "inverse"
    for dtype, expected in (("float32", "inverse"), ("bfloat16", "bfloat16")):
        assert form(single, replace(seldom, curvature=Curvature(inverse_dtype=dtype))) == expected


# The phase of inversions: what is inverted when messages arrive, while waiting, and at the end.


SHAPE = FactorShape(groups=1, dim=2)


class Noting(Inverter):
    """Notes whose turn it was."""

    def __init__(self) -> None:
        super().__init__(lambda warning: None, "inverse")
        self.noted: list[str] = []

    def invert(
        self, tasks: Sequence[InversionTask], *, rooms: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        self.noted.append("".join(task_of.name for task_of in tasks))
        return super().invert(tasks, rooms=rooms)


def task_of(slot: int) -> InversionTask:
    packed = torch.tensor([[1.0, 0.0, 1.0]]) * (slot + 1)
    return InversionTask(
        name=str(slot),
        packed=packed,
        shape=SHAPE,
        damping=torch.zeros(()),
        valid=torch.tensor(True),
    )


@pytest.fixture
def inverter() -> Noting:
    return Noting()


@pytest.fixture
def phase(inverter: Noting) -> InverseExchange:
    """Slots 0 and 1 have an owner, 2 to 4 have not; 1 and 4 need both of two messages."""
    batches = [((0,), 0, 1), ((1,), 0, 2), ((2,), None, 1), ((3,), None, 1), ((4,), None, 2)]
    order = [
        InverseBatch(slots=slots, owner=owner, num_messages=needed)
        for slots, owner, needed in batches
    ]
    slots = [
        FactorSlot(
            index=index,
            side="output" if index % 2 else "input",
            block_name=str(index // 2),
            shape=SHAPE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for index in range(6)
    ]
    exchange = InverseExchange(slots, inverter, driver=SingleRank(), stream=Stream(1))
    exchange.adopt(order, travels=True)
    return exchange


def test_owners_invert_as_messages_arrive_and_others_while_they_wait(
    phase: InverseExchange, inverter: Noting
) -> None:
    answers = iter([False, True])
    phase.start(lambda slots: list(map(task_of, slots)))
    phase.fill(lambda: False)
    assert inverter.noted == [], "no message has arrived"
    phase.advance(1)
    assert inverter.noted == ["0"]
    phase.fill(lambda: next(answers))
    assert inverter.noted == ["0", "2"]
    phase.advance(2)
    assert inverter.noted == ["0", "2", "1"]
    phase.finish()
    assert inverter.noted == ["0", "2", "1", "3", "4"]
    for slot, inverse in enumerate(phase.packed[:5]):
        assert inverse is not None
        torch.testing.assert_close(inverse, torch.tensor([[1.0, 0.0, 1.0]]) / (slot + 1))


def test_without_messages_all_is_inverted_at_the_end_and_every_time_anew(
    phase: InverseExchange, inverter: Noting
) -> None:
    for _ in range(2):
        inverter.noted.clear()
        phase.start(lambda slots: list(map(task_of, slots)))
        phase.finish()
        assert inverter.noted == ["0", "1", "2", "3", "4"]
