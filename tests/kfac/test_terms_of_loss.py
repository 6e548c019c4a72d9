"""How many terms a loss has, where a layer's own inputs do not show it: position embeddings without
a batch dimension, and padding. Held against gradients of one example's loss at a time, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_maths_support.reference import capture_all, square, take_square
from offbeat import Curvature

NUM_EXAMPLES, NUM_POSITIONS, NUM_TOKENS, WIDTH = 16, 6, 11, 4
POSITION_BLOCK, HEAD_BLOCK = 1, 2


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class LanguageModel(nn.Module):
    """Token and position embeddings, and a head for each position.

    Args:
        indices: shape of the position embedding's input: "row" is (1, T), "flat" (T,), "batch"
            (N, T).
        returns: what a forward pass returns: "logits", "loss", or "both".
    """

    def __init__(self, indices: str, returns: str = "logits") -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_TOKENS, WIDTH)
        self.position = nn.Embedding(NUM_POSITIONS, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        self.indices, self.returns = indices, returns
        self.positions_out: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> object:
        positions = torch.arange(NUM_POSITIONS)
        if self.indices != "flat":
            positions = positions[None]
        if self.indices == "batch":
            positions = positions.expand(len(x), -1)
        self.positions_out = self.position(positions)
        logits = self.head(torch.tanh(self.token(x) + self.positions_out))
        loss = example_losses(logits, y).mean()
        return {"logits": logits, "loss": loss, "both": (loss, {"logits": logits})}[self.returns]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self(x, y)
        if self.returns == "logits":
            return example_losses(output, y).mean()  # type: ignore[arg-type]
        return output[0] if self.returns == "both" else output  # type: ignore[index, return-value]


def example_losses(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.mT, y, reduction="none").sum(dim=1)


def tokens(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_TOKENS, (NUM_EXAMPLES, NUM_POSITIONS), generator=draw)


def factors(model: LanguageModel, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """A and G of the position embedding."""
    blocks, capture = capture_all(model)
    model.loss(x, y).backward()
    found = take_square(capture, blocks, POSITION_BLOCK)
    capture.remove()
    return list(found)


@pytest.mark.parametrize("indices", ["row", "flat"])
@pytest.mark.parametrize("returns", ["logits", "loss", "both"])
def test_positions_without_a_batch_dimension_belong_to_all_examples(
    indices: str, returns: str
) -> None:
    """At position t the examples' gradients meet in one row, s_t = sum over n of g_nt. Gradients of
    different examples are independent, so sum of s_t s_t^T / N estimates sum of g g^T / N.
    """
    model, x, y = LanguageModel(indices, returns), tokens(1), tokens(2)
    _, found = factors(model, x, y)
    met = torch.zeros(NUM_POSITIONS, WIDTH)
    for n in range(NUM_EXAMPLES):
        loss = model.loss(x[n : n + 1], y[n : n + 1])
        (gradient,) = torch.autograd.grad(loss, model.positions_out)  # type: ignore[arg-type]
        met += gradient.reshape(NUM_POSITIONS, WIDTH)
    torch.testing.assert_close(found[0], met.mT @ met / NUM_EXAMPLES)


@pytest.mark.parametrize("indices", ["row", "flat"])
def test_their_fisher_matrix_is_that_of_positions_repeated_for_each_example(indices: str) -> None:
    """Over labels that the model draws itself, gradients have a mean of zero."""
    x = tokens(1)
    torch.manual_seed(5)
    models = {kind: LanguageModel(kind) for kind in (indices, "batch")}
    models["batch"].load_state_dict(models[indices].state_dict())
    with torch.no_grad():
        drawn = torch.distributions.Categorical(logits=models[indices](x, x))
    means = {kind: [torch.zeros(()), torch.zeros(())] for kind in models}
    for _ in range(60):
        y = drawn.sample()
        for kind, model in models.items():
            for mean, factor in zip(means[kind], factors(model, x, y), strict=True):
                mean += factor.diagonal(dim1=-2, dim2=-1).sum() / 60
    for mean, expected in zip(means[indices], means["batch"], strict=True):
        torch.testing.assert_close(mean, expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("block", [0, HEAD_BLOCK])
@pytest.mark.parametrize("how", ["ignored", "shifted"])
def test_positions_that_do_not_reach_the_loss_are_no_terms(how: str, block: int) -> None:
    """The loss is a mean over the positions that count, as `ignore_index` makes it."""
    model, x, y = LanguageModel("batch"), tokens(1), tokens(2)
    if how == "ignored":
        y[torch.rand(y.shape, generator=torch.Generator().manual_seed(7)) < 0.4] = -100
    else:
        y[:, -1] = -100
    counts = y != -100
    blocks, capture = capture_all(model, Curvature(loss_terms="position"))
    logits = model(x, y.clamp(min=0))
    if how == "ignored":
        F.cross_entropy(logits.mT, y, ignore_index=-100).backward()
    else:
        F.cross_entropy(logits[:, :-1].mT, y[:, :-1]).backward()
    assert capture.take(block, "input").weight == y.numel()
    increment = capture.take(block, "output")
    capture.remove()
    assert increment.weight == counts.sum()

    rows = []
    for n, t in counts.nonzero().tolist():
        hidden = model.token(x[n, t])
        logits = model.head(torch.tanh(hidden + model.position.weight[t]))
        seen = logits if block == HEAD_BLOCK else hidden
        rows.append(torch.autograd.grad(F.cross_entropy(logits, y[n, t]), seen)[0])
    gradients = torch.stack(rows)
    (found,) = square(blocks[block], "output", increment.packed)
    torch.testing.assert_close(found, gradients.mT @ gradients / len(rows))


def test_a_position_with_a_loss_of_zero_counts_where_examples_are_terms() -> None:
    """A hinge loss has examples without gradient, and its mean is over all of them."""
    layer, x = nn.Linear(3, 2), torch.randn(8, 3)
    blocks, capture = capture_all(layer)
    torch.relu(layer(x)).sum(1).mean().backward()
    _, g = take_square(capture, blocks)
    capture.remove()
    output = layer(x).detach().requires_grad_()
    (each,) = torch.autograd.grad(torch.relu(output).sum(), output)
    assert (each == 0).all(dim=1).any()
    torch.testing.assert_close(g[0], each.mT @ each / 8)
