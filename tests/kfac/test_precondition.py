"""Preconditioned gradients against the whole Kronecker product, inverted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from kfac_maths_support.reference import capture_all, square
from offbeat.kfac import preconditioner
from offbeat.kfac.blocks import Block
from offbeat.kfac.callback import damping_of, mean_eigenvalue
from offbeat.kfac.capture import Capture
from offbeat.kfac.curvature import Curvature, Grafting
from offbeat.kfac.factors import FactorShape
from offbeat.kfac.inverses import InverseForm, InversionTask, Inverter
from offbeat.kfac.preconditioner import InversePair, InvertedBlock, kl_scale

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

DAMPING = 0.3


def precondition_(
    blocks: Sequence[Block],
    inverses: Sequence[InversePair],
    *,
    lrs: Sequence[float],
    **options: Any,
) -> torch.Tensor | None:
    members = [
        InvertedBlock(*each, number)
        for number, each in enumerate(zip(blocks, inverses, lrs, strict=True))
    ]
    return preconditioner.precondition_(members, **options)


class Net(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.conv = nn.Conv2d(2, 4, (2, 3), groups=2, padding="same")
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)
        self.offset = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = self.norm(h + self.mix(h, h, h)[0]) + self.offset
        h = self.conv(h.unflatten(1, (2, -1))).flatten(1, 2)
        return self.head(h.tanh()).mean(1)  # type: ignore[no-any-return]


def trained(max_dim: int = 8192) -> tuple[nn.Module, list[Block], Capture]:
    torch.manual_seed(0)
    model = Net().double()
    blocks, capture = capture_all(model, Curvature(max_dim=max_dim))
    x = torch.randint(0, 5, (7, 4))
    model(x).square().sum(1).mean().backward()
    return model, blocks, capture


def gradients_of(blocks: list[Block]) -> list[torch.Tensor]:
    return [block.gradient().matrix().clone() for block in blocks]


def tasks_of(
    capture: Capture, blocks: list[Block], *, pi: bool = False
) -> list[tuple[InversionTask, InversionTask]]:
    pairs = []
    for index, block in enumerate(blocks):
        a, g = (capture.take(index, side).packed for side in ("input", "output"))  # type: ignore[arg-type]
        damping = damping_of(
            mean_eigenvalue(a, block.inputs),
            mean_eigenvalue(g, block.outputs),
            damping=DAMPING,
            pi=pi,
        )
        valid = torch.tensor(True)
        pairs.append(
            (
                InversionTask(
                    name=f"{block.name}:input",
                    packed=a,
                    shape=block.inputs,
                    damping=damping[0],
                    valid=valid,
                ),
                InversionTask(
                    name=f"{block.name}:output",
                    packed=g,
                    shape=block.outputs,
                    damping=damping[1],
                    valid=valid,
                ),
            )
        )
    capture.remove()
    return pairs


def inverses(
    pairs: list[tuple[InversionTask, InversionTask]], how: InverseForm
) -> list[InversePair]:
    tasks = [task for pair in pairs for task in pair]
    found = Inverter(pytest.fail, how).invert(tasks)
    return [InversePair(a, g, how) for a, g in zip(found[::2], found[1::2], strict=True)]


def expected_gradients(
    blocks: list[Block], pairs: list[tuple[InversionTask, InversionTask]]
) -> list[torch.Tensor]:
    """vec(P) = (G x A)^-1 vec(grad), with the Kronecker product written out."""
    found = []
    for block, (a_task, g_task), gradient in zip(blocks, pairs, gradients_of(blocks), strict=True):
        a, g = square(block, "input", a_task.packed), square(block, "output", g_task.packed)
        preconditioned = torch.empty_like(gradient)
        for group in range(block.matrix_shape[0]):
            a_, g_ = a[group % a.shape[0]], g[group]
            product = torch.kron(
                g_ + g_task.damping * torch.eye(len(g_), dtype=g_.dtype),
                a_ + a_task.damping * torch.eye(len(a_), dtype=a_.dtype),
            )
            preconditioned[group] = torch.linalg.solve(product, gradient[group].flatten()).view_as(
                preconditioned[group]
            )
        found.append(preconditioned)
    return found


@pytest.mark.parametrize("how", ["triangle", "inverse"])
@pytest.mark.parametrize(("pi", "max_dim"), [(False, 4), (True, 4), (True, 1), (True, 8192)])
def test_preconditioned_gradients_solve_the_whole_kronecker_product(
    how: InverseForm, pi: bool, max_dim: int
) -> None:
    """Factors that are cut, and diagonal ones, included."""
    model, blocks, capture = trained(max_dim)
    pairs = tasks_of(capture, blocks, pi=pi)
    expected = expected_gradients(blocks, pairs)
    plain = model.offset.grad.clone()
    precondition_(blocks, inverses(pairs, how), lrs=[0.1] * len(blocks), kl_clip=None)
    for matrix, wanted in zip(gradients_of(blocks), expected, strict=True):
        torch.testing.assert_close(matrix, wanted)
    assert torch.equal(model.offset.grad, plain)


@pytest.mark.parametrize("pi", [False, True])
def test_in_bfloat16_preconditioned_gradients_are_as_long_and_lie_the_same_way(pi: bool) -> None:
    """To a few times 2^-9 of their length, in the gradients' own dtype."""
    _, blocks, capture = trained()
    pairs = tasks_of(capture, blocks, pi=pi)
    expected = expected_gradients(blocks, pairs)
    precondition_(blocks, inverses(pairs, "bfloat16"), lrs=[0.1] * len(blocks), kl_clip=None)
    for matrix, wanted in zip(gradients_of(blocks), expected, strict=True):
        assert matrix.dtype == wanted.dtype == torch.float64
        assert 0 < (matrix - wanted).norm() < 2**-6 * wanted.norm()


@pytest.mark.parametrize("grafting", ["floor", "layer"])
def test_grafted_gradients_lie_as_without_and_are_as_long_as_plain_ones_at_least(
    grafting: Grafting,
) -> None:
    _, blocks, capture = trained()
    damped = torch.tensor(40 * DAMPING).double()  # every other layer's are short by that
    pairs = [
        (a, replace(g, damping=damped) if number % 2 else g)
        for number, (a, g) in enumerate(tasks_of(capture, blocks))
    ]
    before, wanted = gradients_of(blocks), expected_gradients(blocks, pairs)
    longer = [float(p.norm() / g.norm()) > 1 for p, g in zip(wanted, before, strict=True)]
    assert set(longer) == {True, False}
    precondition_(
        blocks,
        inverses(pairs, "triangle"),
        lrs=[0.1] * len(blocks),
        kl_clip=None,
        grafting=grafting,
    )
    each = zip(gradients_of(blocks), before, wanted, strict=True)
    for found, plain, preconditioned in each:
        length = plain.norm()
        if grafting == "floor":
            length = max(length, preconditioned.norm())
        torch.testing.assert_close(found, preconditioned * (length / preconditioned.norm()))


@pytest.mark.parametrize("grafting", ["floor", "layer"])
def test_a_gradient_of_zeros_stays_so_when_it_is_grafted(grafting: Grafting) -> None:
    _, blocks, capture = trained()
    pairs = tasks_of(capture, blocks)
    for block in blocks:
        for part in block.gradient().parts:
            part.zero_()
    precondition_(
        blocks,
        inverses(pairs, "triangle"),
        lrs=[0.1] * len(blocks),
        kl_clip=1e-3 if grafting == "floor" else None,
        grafting=grafting,
    )
    assert not any(matrix.any() for matrix in gradients_of(blocks))


@pytest.mark.parametrize("lrs", ["equal", "different"])
def test_steps_are_clipped_together_at_the_limit(lrs: str) -> None:
    _, blocks, capture = trained()
    pairs = tasks_of(capture, blocks)
    rates = [0.1 * (1 + number * (lrs == "different")) for number in range(len(blocks))]
    gradients = gradients_of(blocks)
    preconditioned = expected_gradients(blocks, pairs)
    change = sum(
        lr**2 * float((p * g).sum())
        for lr, p, g in zip(rates, preconditioned, gradients, strict=True)
    )
    precondition_(blocks, inverses(pairs, "triangle"), lrs=rates, kl_clip=change / 9)
    for matrix, wanted in zip(gradients_of(blocks), preconditioned, strict=True):
        torch.testing.assert_close(matrix, wanted / 3)


def test_short_steps_are_not_lengthened() -> None:
    for change in (0.0, 1e-6, -0.5):
        assert kl_scale(torch.tensor(change), 1.0) == 1
    for change in (4e-6, -4e-6):
        assert float(kl_scale(torch.tensor(change), 1e-6)) == pytest.approx(0.5)


@pytest.mark.parametrize("how", ["triangle", "inverse", "bfloat16"])
def test_a_layer_without_an_inverse_keeps_its_gradient_and_counts_for_nothing(
    how: InverseForm,
) -> None:
    _, blocks, capture = trained()
    pairs = tasks_of(capture, blocks)
    found = inverses(pairs, how)
    before, preconditioned = gradients_of(blocks), expected_gradients(blocks, pairs)
    lost = found[1]
    found[1] = replace(lost, outputs=torch.zeros_like(lost.outputs))
    counted = [number for number in range(len(blocks)) if number != 1]
    change = sum(float((preconditioned[number] * before[number]).sum()) for number in counted)
    precondition_(blocks, found, lrs=[1.0] * len(blocks), kl_clip=change / 4)
    after = gradients_of(blocks)
    assert torch.equal(after[1], before[1])
    for number in counted:
        tolerance = (
            {"atol": 2**-6 * float(preconditioned[number].norm()), "rtol": 0.0}
            if how == "bfloat16"
            else {}
        )
        torch.testing.assert_close(after[number], preconditioned[number] / 2, **tolerance)  # type: ignore[arg-type]


class Norms(nn.Module):
    """Norms of several widths, with biases and without."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rows = nn.LayerNorm((2, 4))
        self.lone = nn.LayerNorm(9)
        self.plain = nn.LayerNorm(8, bias=False)
        self.scaled = nn.RMSNorm(12)
        self.last = nn.LayerNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.of_rows(x[:, :8].unflatten(1, (2, 4))).flatten(1)
        found = [first, self.lone(x[:, :9]), self.plain(x[:, :8])]
        return torch.cat([*found, self.scaled(x), self.last(x[:, 2:])], dim=1)


@pytest.mark.parametrize("how", ["triangle", "inverse", "bfloat16"])
def test_norms_have_directions_of_their_own_and_one_without_an_inverse_harms_no_other(
    how: InverseForm,
) -> None:
    torch.manual_seed(0)
    model = Norms().double()
    blocks, capture = capture_all(model)
    (model(torch.randn(7, 12).double()) - 1).square().sum(1).mean().backward()
    pairs = tasks_of(capture, blocks)
    expected, before = expected_gradients(blocks, pairs), gradients_of(blocks)
    failed = replace(pairs[1][0], valid=torch.tensor(False)), pairs[1][1]
    found = inverses([pairs[0], failed, *pairs[2:]], how)
    precondition_(blocks, found, lrs=[0.1] * len(blocks), kl_clip=None)
    for number, matrix in enumerate(gradients_of(blocks)):
        wanted = before[1] if number == 1 else expected[number]
        tolerance = 2**-6 if how == "bfloat16" and number != 1 else 1e-10
        assert (matrix - wanted).norm() <= tolerance * wanted.norm(), blocks[number].name
        assert (matrix - before[number]).norm() > 0.1 * before[number].norm() or number == 1


def test_layers_without_a_gradient_or_of_another_shape_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    blocks, capture = capture_all(model)
    model(torch.randn(4, 3)).sum().backward()
    pairs = tasks_of(capture, blocks)
    expected = expected_gradients(blocks, pairs)[2]
    model[0].bias.grad = None
    model[1].weight = nn.Parameter(torch.randn(3, 5))
    model[1].weight.grad = torch.ones(3, 5)
    precondition_(blocks, inverses(pairs, "triangle"), lrs=[0.1] * 3, kl_clip=None)
    assert torch.equal(model[1].weight.grad, torch.ones(3, 5))
    torch.testing.assert_close(gradients_of(blocks[2:])[0], expected)
    precondition_([], [], lrs=[], kl_clip=1.0)


@pytest.mark.parametrize("how", ["triangle", "inverse"])
@pytest.mark.parametrize("max_dim", [4, 1, 8192])
def test_a_bias_that_is_frozen_by_now_leaves_its_layer_the_inverse_without_it(
    how: InverseForm, max_dim: int
) -> None:
    model, blocks, capture = trained(max_dim)
    pairs = tasks_of(capture, blocks)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                parameter.requires_grad_(False).grad = None
    expected = []
    for block, (a_task, g_task) in zip(blocks, pairs, strict=True):
        a, g = square(block, "input", a_task.packed), square(block, "output", g_task.packed)
        damped = [each + DAMPING * torch.eye(each.shape[-1], dtype=each.dtype) for each in (a, g)]
        num_inputs = block.matrix_shape[2] - block.has_bias
        inputs, outputs = damped[0][:, :num_inputs, :num_inputs], damped[1]
        gradient = block.gradient().matrix()[..., :num_inputs]
        expected.append(torch.linalg.inv(outputs) @ gradient @ torch.linalg.inv(inputs))
    precondition_(blocks, inverses(pairs, how), lrs=[0.1] * len(blocks), kl_clip=None)
    for block, wanted in zip(blocks, expected, strict=True):
        found = block.gradient().matrix()
        torch.testing.assert_close(found[..., : wanted.shape[2]], wanted)


def test_half_precision_gradients_are_preconditioned_in_float32() -> None:
    model = nn.Linear(3, 2).bfloat16()
    blocks, capture = capture_all(model)
    model(torch.randn(4, 3).bfloat16()).sum().backward()
    pairs = tasks_of(capture, blocks)
    (expected,) = expected_gradients(blocks, pairs)
    precondition_(blocks, inverses(pairs, "triangle"), lrs=[0.1], kl_clip=None)
    assert expected.dtype == torch.float32
    assert model.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight.grad, expected[0, :, :3].bfloat16())


def test_one_group_of_inputs_serves_all_projections() -> None:
    _, blocks, _ = trained()
    shapes = {block.name: (block.inputs, block.outputs) for block in blocks}
    assert shapes["mix.in_proj"] == (FactorShape(groups=1, dim=7), FactorShape(groups=3, dim=6))


def test_preconditioned_gradients_do_not_depend_on_how_inputs_are_laid_out() -> None:
    """Without damping, the change of the outputs is the same for inputs x and T x."""
    torch.manual_seed(0)
    turn = torch.randn(4, 4).double() + 2 * torch.eye(4).double()
    first, second = nn.Linear(4, 3, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    second.weight.data = first.weight.data @ torch.linalg.inv(turn)
    x = torch.randn(20, 4).double()
    steps = []
    for model, inputs in ((first, x), (second, x @ turn.mT)):
        blocks, capture = capture_all(model)
        model(inputs).square().sum(1).mean().backward()
        pairs = [
            (
                replace(a, damping=torch.tensor(1e-12).double()),
                replace(g, damping=torch.tensor(1e-12).double()),
            )
            for a, g in tasks_of(capture, blocks)
        ]
        precondition_(blocks, inverses(pairs, "triangle"), lrs=[0.1], kl_clip=None)
        steps.append(inputs @ model.weight.grad.mT)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-6, atol=1e-8)
