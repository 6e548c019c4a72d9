"""Factors against their definition: autograd, one position at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from curvature_support.reference import capture_all, look, square, take_square
from offbeat.curvature.options import FactorOptions

# PyTorch says so of kernels of even size.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def losses(output: torch.Tensor) -> torch.Tensor:
    """Some loss of each example that mixes everything."""
    weights = torch.linspace(-1, 1, output[0].numel()).view(output[0].shape)
    return ((output * weights).sum(dim=tuple(range(1, output.ndim))).tanh()) + 0.1 * output.square().flatten(1).sum(1)


def layer_of(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    if kind.startswith("linear"):
        return nn.Linear(4, 3, bias="plain" not in kind), torch.randn(4, 5, 4) if "positions" in kind else torch.randn(6, 4)
    if kind.startswith("embedding"):
        return nn.Embedding(7, 3, padding_idx=2 if "padding" in kind else None), torch.randint(0, 7, (4, 5))
    layer = copy.deepcopy(CONVOLUTIONS[kind])
    return layer, torch.randn(2, layer.in_channels, 5, 6)


CONVOLUTIONS = {
    "conv": nn.Conv2d(2, 3, 3, dtype=torch.float64),
    "conv padded": nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64),
    "conv uneven": nn.Conv2d(2, 3, (3, 2), padding=(2, 0), bias=False, dtype=torch.float64),
    "conv strided": nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64),
    "conv uneven stride": nn.Conv2d(2, 3, (2, 3), stride=(1, 3), padding=(1, 2), dtype=torch.float64),
    "conv dilated": nn.Conv2d(2, 3, 3, dilation=2, padding=2, dtype=torch.float64),
    "conv dilated uneven": nn.Conv2d(2, 3, (2, 3), dilation=(3, 1), padding=(1, 2), dtype=torch.float64),
    "conv same": nn.Conv2d(2, 3, 4, padding="same", dtype=torch.float64),
    "conv same dilated": nn.Conv2d(2, 3, (2, 3), dilation=(1, 2), padding="same", dtype=torch.float64),
    "conv valid": nn.Conv2d(2, 3, 2, padding="valid", dtype=torch.float64),
    "conv circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dtype=torch.float64),
    "conv reflect": nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect", dtype=torch.float64),
    "conv replicate same": nn.Conv2d(2, 3, 4, padding="same", padding_mode="replicate", dtype=torch.float64),
    "conv groups": nn.Conv2d(4, 6, 3, padding=1, groups=2, dtype=torch.float64),
    "conv depthwise": nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False, dtype=torch.float64),
    "conv depthwise many": nn.Conv2d(2, 4, 3, groups=2, stride=2, dtype=torch.float64),
    "conv one": nn.Conv2d(3, 2, 1, dtype=torch.float64),
    "conv one strided": nn.Conv2d(3, 2, 1, stride=2, dtype=torch.float64),
    "conv padded far": nn.Conv2d(2, 2, 2, padding=3, dtype=torch.float64),
}

KINDS = ["linear", "linear plain", "linear positions", "embedding", *CONVOLUTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_what_they_are_defined_to_be(kind: str) -> None:
    layer, x = layer_of(kind)
    blocks, capture = capture_all(layer)
    losses(layer(x)).mean().backward()
    a, g = take_square(capture, blocks)
    capture.remove()
    expected_a, expected_g = look(layer, x, losses).factors()
    torch.testing.assert_close(a, expected_a)
    torch.testing.assert_close(g, expected_g)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_of_gradients_goes_with_the_factors(kind: str) -> None:
    """Sum of g a^T over examples and positions is the gradient: rows and columns are in the factors' order."""
    layer, x = layer_of(kind)
    blocks, capture = capture_all(layer)
    losses(layer(x)).sum().backward()
    capture.remove()
    (block,) = blocks
    seen = look(layer, x, losses)
    matrix = torch.empty(block.matrix_shape)
    block.read_gradient(matrix)
    torch.testing.assert_close(matrix, torch.einsum("gnro,gnri->goi", seen.gradients, seen.inputs))
    before = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    block.write_gradient_(2 * matrix)
    for old, parameter in zip(before, layer.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * old)


@pytest.mark.parametrize("kind", ["linear", "conv whole", "embedding one"])
def test_one_example_at_one_position_has_an_exact_fisher_matrix(kind: str) -> None:
    layer: nn.Module
    if kind == "linear":
        layer, x = nn.Linear(3, 2), torch.randn(1, 3)
    elif kind == "conv whole":
        layer, x = nn.Conv2d(2, 3, 4), torch.randn(1, 2, 4, 4)
    else:
        layer, x = nn.Embedding(4, 3), torch.tensor([[2]])
    blocks, capture = capture_all(layer)
    losses(layer(x)).mean().backward()
    a, g = take_square(capture, blocks)
    capture.remove()
    matrix = torch.empty(blocks[0].matrix_shape)
    blocks[0].read_gradient(matrix)
    torch.testing.assert_close(torch.kron(g[0], a[0]), torch.outer(matrix.flatten(), matrix.flatten()))


def test_reduce_takes_means_of_inputs_and_sums_of_gradients() -> None:
    layer, x = layer_of("linear positions")
    blocks, capture = capture_all(layer, FactorOptions(sharing="reduce"))
    losses(layer(x)).mean().backward()
    a, g = take_square(capture, blocks)
    capture.remove()
    expected_a, expected_g = look(layer, x, losses).factors("reduce")
    torch.testing.assert_close(a, expected_a)
    torch.testing.assert_close(g, expected_g)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_time_may_come_first(sharing: Any) -> None:
    layer, x = layer_of("linear positions")
    factors = []
    for batch_dim in (0, 1):
        blocks, capture = capture_all(layer, FactorOptions(sharing=sharing, batch_dim=batch_dim))
        output = layer(x.movedim(0, batch_dim))
        losses(output.movedim(batch_dim, 0)).mean().backward()
        factors.append(take_square(capture, blocks))
        capture.remove()
    torch.testing.assert_close(factors[0], factors[1])


def test_positions_with_a_loss_each_are_examples() -> None:
    layer, x = layer_of("linear positions")
    factors = []
    for terms, inputs in (("position", x), ("example", x.flatten(0, 1))):
        blocks, capture = capture_all(layer, FactorOptions(loss_terms=terms))  # type: ignore[arg-type]
        layer(inputs).square().mean(-1).mean().backward()
        factors.append(take_square(capture, blocks))
        capture.remove()
    torch.testing.assert_close(factors[0], factors[1])


@pytest.mark.parametrize("kind", ["linear", "linear positions", "embedding padding", "conv padded", "conv groups"])
def test_factors_know_neither_the_size_of_the_batch_nor_the_kind_of_mean(kind: str) -> None:
    layer, x = layer_of(kind)

    def factors(loss: Any, *batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, capture = capture_all(layer, FactorOptions(loss=loss))
        for batch in batches:
            values = losses(layer(batch))
            (values.mean() / len(batches) if loss == "mean" else values.sum()).backward()
        found = take_square(capture, blocks)
        capture.remove()
        return found

    once = factors("mean", x)
    torch.testing.assert_close(factors("mean", torch.cat([x, x, x])), once)
    torch.testing.assert_close(factors("sum", x), once)
    torch.testing.assert_close(factors("sum", torch.cat([x, x])), once)
    torch.testing.assert_close(factors("mean", x, x), once)
    half = len(x) // 2
    torch.testing.assert_close(factors("mean", x[:half], x[half:]), once)


def test_padding_takes_no_part_in_an_embedding() -> None:
    layer, x = layer_of("embedding padding")
    assert (x == 2).any()
    blocks, capture = capture_all(layer)
    losses(layer(x)).mean().backward()
    a, g = take_square(capture, blocks)
    capture.remove()
    seen = look(layer, x, losses)
    there = (x != 2).view(1, *x.shape, 1)
    seen.gradients = seen.gradients * there
    assert not seen.inputs[0][x == 2].any()
    torch.testing.assert_close((a, g), seen.factors())


@pytest.mark.parametrize("kind", ["conv padded", "conv strided", "conv groups", "conv depthwise many", "conv circular"])
@pytest.mark.parametrize("every", [2, 3])
def test_sampled_positions_together_are_all_positions(kind: str, every: int) -> None:
    layer, x = layer_of(kind)
    rows, columns = layer(x).shape[2:]
    options = FactorOptions(position_stride=every)
    a_sum, num_rows, g_sum = 0.0, 0.0, 0.0
    starts = [(y, x_) for y in range(min(every, rows)) for x_ in range(min(every, columns))]
    for y, x_ in starts:
        blocks, capture = capture_all(layer, options, step=y + every * x_)
        losses(layer(x)).mean().backward()
        (a, weight), (g, _) = capture.take(0, "input"), capture.take(0, "output")
        capture.remove()
        a_sum = a_sum + square(blocks[0], "input", a) * weight
        num_rows += weight
        share = len(range(y, rows, every)) * len(range(x_, columns, every)) / (rows * columns)
        g_sum = g_sum + square(blocks[0], "output", g) * share
    expected_a, expected_g = look(layer, x, losses).factors()
    assert num_rows == len(x) * rows * columns
    torch.testing.assert_close(a_sum / num_rows, expected_a)
    torch.testing.assert_close(g_sum, expected_g)


@pytest.mark.parametrize("x", [torch.randn(4), torch.randn(2, 4)])
def test_an_unbatched_input_is_one_example(x: torch.Tensor) -> None:
    layer, x = nn.Linear(4, 3), x.double()
    blocks, capture = capture_all(layer)
    layer(x).sum().backward()
    a, _ = take_square(capture, blocks)
    capture.remove()
    rows = torch.cat([x, torch.ones(*x.shape[:-1], 1)], dim=-1).view(-1, 5)
    torch.testing.assert_close(a[0], rows.mT @ rows / len(rows))


def test_an_unbatched_image_is_one_example() -> None:
    layer, image = nn.Conv2d(2, 3, 3), torch.randn(2, 5, 5)
    found = []
    for x in (image, image[None]):
        blocks, capture = capture_all(layer)
        layer(x).square().sum().backward()
        found.append(take_square(capture, blocks))
        capture.remove()
    torch.testing.assert_close(found[0], found[1])
