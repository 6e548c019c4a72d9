"""Factors against their definition: autograd, one position at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kfac_maths_support.reference import (
    Conv1D,
    OwnRMSNorm,
    capture_all,
    look,
    square,
    take_all,
    take_square,
)
from offbeat import Curvature
from offbeat.kfac.capture import Increment

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
    return (
        (output * weights).sum(dim=tuple(range(1, output.ndim))).tanh()
    ) + 0.1 * output.square().flatten(1).sum(1)


def layer_of(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    if kind.startswith("linear"):
        return nn.Linear(4, 3, bias="plain" not in kind), torch.randn(
            4, 5, 4
        ) if "positions" in kind else torch.randn(6, 4)
    if kind in NORMS:
        layer = copy.deepcopy(NORMS[kind])
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        size = (3, 4, 5, 6) if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) else (4, 5, 6)
        return layer, 1 + torch.randn(size)
    if kind == "conv1D":
        return Conv1D(3, 4), torch.randn(4, 5, 4)
    if kind.startswith("embedding"):
        return nn.Embedding(7, 3, padding_idx=2 if "padding" in kind else None), torch.randint(
            0, 7, (4, 5)
        )
    layer = copy.deepcopy(CONVOLUTIONS[kind])
    size = (5, 6)[-len(layer.kernel_size) :]
    return layer, torch.randn(2, layer.in_channels, *size)


CONVOLUTIONS = {
    "conv": nn.Conv2d(2, 3, 3, dtype=torch.float64),
    "conv padded": nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64),
    "conv uneven": nn.Conv2d(2, 3, (3, 2), padding=(2, 0), bias=False, dtype=torch.float64),
    "conv strided": nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64),
    "conv uneven stride": nn.Conv2d(
        2, 3, (2, 3), stride=(1, 3), padding=(1, 2), dtype=torch.float64
    ),
    "conv dilated": nn.Conv2d(2, 3, 3, dilation=2, padding=2, dtype=torch.float64),
    "conv dilated uneven": nn.Conv2d(
        2, 3, (2, 3), dilation=(3, 1), padding=(1, 2), dtype=torch.float64
    ),
    "conv same": nn.Conv2d(2, 3, 4, padding="same", dtype=torch.float64),
    "conv same dilated": nn.Conv2d(
        2, 3, (2, 3), dilation=(1, 2), padding="same", dtype=torch.float64
    ),
    "conv valid": nn.Conv2d(2, 3, 2, padding="valid", dtype=torch.float64),
    "conv circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dtype=torch.float64),
    "conv reflect": nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect", dtype=torch.float64),
    "conv replicate same": nn.Conv2d(
        2, 3, 4, padding="same", padding_mode="replicate", dtype=torch.float64
    ),
    "conv groups": nn.Conv2d(4, 6, 3, padding=1, groups=2, dtype=torch.float64),
    "conv depthwise": nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False, dtype=torch.float64),
    "conv depthwise many": nn.Conv2d(2, 4, 3, groups=2, stride=2, dtype=torch.float64),
    "conv one": nn.Conv2d(3, 2, 1, dtype=torch.float64),
    "conv one strided": nn.Conv2d(3, 2, 1, stride=2, dtype=torch.float64),
    "conv padded far": nn.Conv2d(2, 2, 2, padding=3, dtype=torch.float64),
    "conv of rows": nn.Conv1d(2, 3, 3, stride=2, padding=1, dtype=torch.float64),
    "conv of rows same": nn.Conv1d(4, 2, 2, padding="same", groups=2, dtype=torch.float64),
}

NORMS = {
    "layer norm": nn.LayerNorm(6, dtype=torch.float64),
    "layer norm of rows": nn.LayerNorm((5, 6), dtype=torch.float64),
    "layer norm plain": nn.LayerNorm(6, bias=False, dtype=torch.float64),
    "rms norm": nn.RMSNorm(6, dtype=torch.float64),
    "own rms norm": OwnRMSNorm(6).double(),
    "batch norm": nn.BatchNorm2d(4, dtype=torch.float64),
    "batch norm evaluating": nn.BatchNorm2d(4, dtype=torch.float64).eval(),
    "group norm": nn.GroupNorm(2, 4, dtype=torch.float64),
}

KINDS = [
    "linear",
    "linear plain",
    "linear positions",
    "conv1D",
    "embedding",
    *CONVOLUTIONS,
    *NORMS,
]


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


def diagonal_pieces(whole: torch.Tensor, length: int) -> torch.Tensor:
    """`whole`, without what lies between pieces of `length` rows."""
    numbers = torch.arange(whole.shape[-1]) // length
    return whole * (numbers[:, None] == numbers)


IN_ALL_LENGTHS = ("linear", "embedding", "conv padded", "conv groups", "layer norm", "batch norm")


@pytest.mark.parametrize(
    ("kind", "max_dim"),
    [
        (kind, length)
        for number, kind in enumerate(KINDS)
        for length in ((1, 3, 6) if kind in IN_ALL_LENGTHS else [(1, 3, 6)[number % 3]])
    ],
)
def test_large_factors_are_pieces_of_whole_ones(kind: str, max_dim: int) -> None:
    layer, x = layer_of(kind)
    blocks, capture = capture_all(layer, Curvature(max_dim=max_dim))
    losses(layer(x)).mean().backward()
    found = take_square(capture, blocks)
    capture.remove()
    for side, factor, whole in zip(
        ("input", "output"), found, look(layer, x, losses).factors(), strict=True
    ):
        shape = blocks[0].shape(side)  # type: ignore[arg-type]
        length = 1 if shape.is_diagonal else shape.dim
        assert length <= max_dim + (side == "input")
        torch.testing.assert_close(factor, diagonal_pieces(whole, length))


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_of_gradients_goes_with_the_factors(kind: str) -> None:
    """Sum of g a^T over examples and positions is the gradient: rows and columns are in the
    factors' order.
    """
    layer, x = layer_of(kind)
    blocks, capture = capture_all(layer)
    losses(layer(x)).sum().backward()
    capture.remove()
    (block,) = blocks
    seen = look(layer, x, losses)
    matrix = block.gradient().matrix()
    torch.testing.assert_close(matrix, torch.einsum("gnro,gnri->goi", seen.gradients, seen.inputs))
    before = [
        parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None
    ]
    block.gradient().write_(2 * matrix)
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
    matrix = blocks[0].gradient().matrix()
    torch.testing.assert_close(
        torch.kron(g[0], a[0]), torch.outer(matrix.flatten(), matrix.flatten())
    )


def test_time_may_come_first() -> None:
    layer, x = layer_of("linear positions")
    factors = []
    for batch_dim in (0, 1):
        blocks, capture = capture_all(layer, Curvature(batch_dim=batch_dim))
        output = layer(x.movedim(0, batch_dim))
        losses(output.movedim(batch_dim, 0)).mean().backward()
        factors.append(take_square(capture, blocks))
        capture.remove()
    torch.testing.assert_close(factors[0], factors[1])


def test_positions_with_a_loss_each_are_examples() -> None:
    layer, x = layer_of("linear positions")
    factors = []
    for terms, inputs in (("position", x), ("example", x.flatten(0, 1))):
        blocks, capture = capture_all(layer, Curvature(loss_terms=terms))  # type: ignore[arg-type]
        layer(inputs).square().mean(-1).mean().backward()
        factors.append(take_square(capture, blocks))
        capture.remove()
    torch.testing.assert_close(factors[0], factors[1])


@pytest.mark.parametrize(
    "kind", ["linear", "linear positions", "embedding padding", "conv padded", "conv groups"]
)
def test_factors_do_not_know_the_size_of_the_batch(kind: str) -> None:
    layer, x = layer_of(kind)

    def factors(*batches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, capture = capture_all(layer, Curvature())
        for batch in batches:
            (losses(layer(batch)).mean() / len(batches)).backward()
        found = take_square(capture, blocks)
        capture.remove()
        return found

    once = factors(x)
    torch.testing.assert_close(factors(torch.cat([x, x, x])), once)
    torch.testing.assert_close(factors(x, x), once)
    half = len(x) // 2
    torch.testing.assert_close(factors(x[:half], x[half:]), once)


def test_a_channel_that_few_examples_use_counts_as_in_the_whole_batch() -> None:
    """Of a large batch some positions of all examples are looked at, not all of some examples."""
    norm = nn.BatchNorm2d(2, eps=0.5)
    x = torch.randn(64, 2, 32, 32)
    x[torch.arange(64) % 8 != 3, 1] = 0
    blocks, capture = capture_all(norm, Curvature(sample_stride=1))
    norm(x).square().mean().backward()
    a, _ = take_all(capture, blocks)
    capture.remove()
    variances = x.var(dim=(0, 2, 3), unbiased=False)
    torch.testing.assert_close(a.packed[:, 0], variances / (variances + 0.5), rtol=0.05, atol=0)


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


def mean_over_samples(
    model: nn.Module,
    x: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    every: int,
    **options: Any,
) -> list[Increment]:
    """The factors of all blocks, as a mean by weight over steps that look at every n-th example,
    from each of n on once.
    """
    found = []
    for phase in range(every):
        blocks, capture = capture_all(model, Curvature(sample_stride=every, **options), step=phase)
        run(x).backward()
        found.append(take_all(capture, blocks))
        capture.remove()
    weights = [sum(increment.weight for increment in each) for each in zip(*found, strict=True)]
    sums = [
        sum((packed * weight for packed, weight in each), torch.zeros(()))
        for each in zip(*found, strict=True)
    ]
    return [Increment(total / weight, weight) for total, weight in zip(sums, weights, strict=True)]


def assert_samples_make_up_the_whole(
    model: nn.Module,
    x: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    every: int,
    **options: Any,
) -> None:
    whole, found = (mean_over_samples(model, x, run, n, **options) for n in (1, every))
    assert [increment.weight for increment in found] == [increment.weight for increment in whole]
    for some, all_ in zip(found, whole, strict=True):
        torch.testing.assert_close(some.packed, all_.packed)


SAMPLED = [*(kind for kind in KINDS if "batch norm" not in kind), "embedding padding"]


@pytest.mark.parametrize(
    ("kind", "num_examples"),
    [
        (kind, size)
        for number, kind in enumerate(SAMPLED)
        for size in ((6, 5) if kind in IN_ALL_LENGTHS else [(6, 5)[number % 2]])
    ],
)
def test_samples_together_are_the_whole_batch(kind: str, num_examples: int) -> None:
    layer, x = layer_of(kind)
    x = torch.cat([x, x.flip(-1), x])[:num_examples]
    assert_samples_make_up_the_whole(layer, x, lambda x: losses(layer(x)).mean(), 3)


@pytest.mark.parametrize(
    ("kind", "shape", "every"),
    [
        ("conv", (32, 4, 4), 4),
        ("conv", (20, 4, 4), 2),
        ("conv", (32, 3, 3), 1),
        ("linear", (32,), 1),
    ],
)
def test_where_there_are_many_positions_not_all_examples_are_looked_at(
    kind: str, shape: tuple[int, ...], every: int
) -> None:
    """Unless the user says how many are."""
    layer: nn.Module = nn.Conv2d(2, 3, 3, padding=1) if kind == "conv" else nn.Linear(2, 3)
    x = torch.randn(shape[0], 2, *shape[1:])

    def factors(**options: Any) -> list[Increment]:
        blocks, capture = capture_all(layer, Curvature(**options), step=1)
        losses(layer(x)).mean().backward()
        found = take_all(capture, blocks)
        capture.remove()
        return found

    for mine, wanted in zip(factors(), factors(sample_stride=every), strict=True):
        assert mine.weight == wanted.weight
        torch.testing.assert_close(mine.packed, wanted.packed)


def test_samples_of_an_even_batch_count_alike() -> None:
    """So the plain mean over steps is the factor of the whole batch as well."""
    layer, x = layer_of("linear")
    for phase in range(3):
        blocks, capture = capture_all(layer, Curvature(sample_stride=3), step=phase)
        losses(layer(x)).mean().backward()
        (a, rows), (g, terms) = take_all(capture, blocks)
        capture.remove()
        mine = x[phase::3]
        with_ones = torch.cat([mine, torch.ones(2, 1)], dim=1)
        torch.testing.assert_close(square(blocks[0], "input", a)[0], with_ones.mT @ with_ones / 2)
        torch.testing.assert_close(
            square(blocks[0], "output", g), look(layer, mine, losses).factors()[1]
        )
        assert (rows, terms) == (2, 2)


@pytest.mark.parametrize(
    "options",
    [{"loss_terms": "position"}, {"batch_dim": 1}],
)
def test_samples_are_examples_however_they_are_counted(options: dict[str, Any]) -> None:
    layer, x = layer_of("linear positions")
    assert_samples_make_up_the_whole(
        layer, x, lambda x: layer(x).square().sum(-1).mean(), 2, **options
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_of_attention_are_examples(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    x, keys = torch.randn(5, 3, 4), torch.randn(5, 2, 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        pair = (x, keys) if batch_first else (x.movedim(0, 1), keys.movedim(0, 1))
        output, _ = attention(pair[0], pair[1], pair[1])
        return output.square().sum() / 5  # type: ignore[no-any-return]

    assert_samples_make_up_the_whole(attention, x, run, 2, cross_attention=("",))


def test_samples_of_accumulated_batches_together_are_all_of_them() -> None:
    """Of three and of two examples, by their share of the loss. Those of a batch smaller than the
    stride take turns as well.
    """
    layer, x = layer_of("linear")
    blocks, capture = capture_all(layer, Curvature(sample_stride=4), step=3)
    for some in (x[:3], x[3:5]):
        (losses(layer(some)).sum() / 5).backward()
    (a, rows), (g, terms) = take_all(capture, blocks)
    capture.remove()
    seen = torch.stack([x[0], x[4]])
    assert (rows, terms) == (2, 2)
    torch.testing.assert_close(square(blocks[0], "input", a)[0, :4, :4], seen.mT @ seen / 2)
    torch.testing.assert_close(
        square(blocks[0], "output", g), look(layer, seen, losses).factors()[1]
    )


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
