"""Weights that several layers use, against definitions in float64: one use, one position at a
time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from kfac_maths_support.reference import Conv1D, capture_all, square, take_all
from offbeat import Curvature
from offbeat.kfac.callback import joined_factors
from offbeat.kfac.factors import FactorShape, pack
from offbeat.kfac.survey import survey

NUM_EXAMPLES, LENGTH, ROWS, WIDTH = 3, 4, 7, 5


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class LanguageModel(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(words)).tanh())  # type: ignore[no-any-return]


def words() -> torch.Tensor:
    return torch.randint(ROWS, (NUM_EXAMPLES, LENGTH))


def losses(output: torch.Tensor) -> torch.Tensor:
    return output.log_softmax(-1)[..., 0].sum(1) + output.square().mean((1, 2))


def joined(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """U_1 + pi U_2 and W_1 + W_2 / pi, to a factor: pi^2 = tr U_1 tr W_2 / (tr U_2 tr W_1)."""
    (u1, w1), (u2, w2) = first, second
    pi = (u1.trace() * w2.trace() / (u2.trace() * w1.trace())).sqrt()
    return u1 + pi * u2, w1 + w2 / pi


def test_each_use_of_a_weight_has_the_factors_of_its_own_layer() -> None:
    model, x = LanguageModel(), words()
    blocks, capture = capture_all(model)
    losses(model(x)).mean().backward()
    (u, terms), (w, _) = take_all(capture, blocks)[:2]
    capture.remove()
    assert terms == NUM_EXAMPLES

    embedded = model.embed(x).detach().requires_grad_()
    hidden = model.mix(embedded).tanh()
    inside = hidden.detach()
    output = model.head(hidden)
    of_output, of_embedded = torch.autograd.grad(losses(output).sum(), [output, embedded])
    expected_u, expected_w = torch.zeros(2, ROWS, ROWS), torch.zeros(2, WIDTH, WIDTH)
    for n in range(NUM_EXAMPLES):
        for r in range(LENGTH):
            word = torch.zeros(ROWS)
            word[x[n, r]] = 1
            expected_u[0] += torch.outer(word, word) / x.numel()
            expected_w[0] += torch.outer(of_embedded[n, r], of_embedded[n, r]) / NUM_EXAMPLES
            expected_u[1] += torch.diag(of_output[n, r].square()) / NUM_EXAMPLES
            expected_w[1] += torch.outer(inside[n, r], inside[n, r]) / x.numel()
    torch.testing.assert_close(torch.diag_embed(u), expected_u)
    torch.testing.assert_close(square(blocks[0], "output", w), expected_w)


def test_both_uses_are_joined_to_the_trace_of_their_sum() -> None:
    def some(dim: int, scale: float) -> torch.Tensor:
        rows = torch.randn(2 * dim, dim)
        return scale * rows.mT @ rows

    us, ws = [some(3, 1.0), some(3, 50.0)], [some(4, 0.2), some(4, 3.0)]
    shapes = [FactorShape(groups=1, dim=dim, uses=2) for dim in (3, 4)]
    u, w = joined_factors((pack(torch.stack(us)), shapes[0]), (pack(torch.stack(ws)), shapes[1]))
    expected_u, expected_w = joined((us[0], ws[0]), (us[1], ws[1]))
    trace = us[0].trace() * ws[0].trace() + us[1].trace() * ws[1].trace()
    found, expected = (
        torch.kron(*pair)
        for pair in (
            (square_of(u, 3), square_of(w, 4)),
            (expected_u, expected_w),
        )
    )
    torch.testing.assert_close(found, expected * trace / expected.trace())
    torch.testing.assert_close(found.trace(), trace)


def square_of(packed: torch.Tensor, dim: int) -> torch.Tensor:
    full = torch.zeros(dim, dim)
    full[torch.triu_indices(dim, dim).unbind()] = packed[0]
    return full + full.triu(1).mT


def test_a_use_that_was_not_seen_counts_for_nothing() -> None:
    shapes = [FactorShape(groups=1, dim=dim, is_diagonal=True, uses=2) for dim in (3, 2)]
    us = torch.stack([torch.rand(3), torch.zeros(3)])
    ws = torch.stack([torch.rand(2), torch.rand(2)])
    u, w = joined_factors((us, shapes[0]), (ws, shapes[1]))
    torch.testing.assert_close(u.mT @ w, us[:1].mT @ ws[:1])
    for each in joined_factors((0 * us, shapes[0]), (ws, shapes[1])):
        assert not each.any()


def test_layers_that_use_a_weight_the_same_way_round_are_one_layer_called_twice() -> None:
    once = nn.Linear(WIDTH, WIDTH)
    twice = nn.Sequential(once, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    twice[2].weight, twice[2].bias = once.weight, once.bias
    x = torch.randn(NUM_EXAMPLES, LENGTH, WIDTH)
    found = []
    for model in (twice, nn.Sequential(once, nn.Tanh(), once)):
        blocks, capture = capture_all(model)
        losses(model(x)).mean().backward()
        found.append(take_all(capture, blocks))
        capture.remove()
    for mine, theirs in zip(*found, strict=True):
        assert mine.weight == theirs.weight
        torch.testing.assert_close(mine.packed, theirs.packed)


def test_a_transposed_layer_and_a_linear_one_are_the_two_ways_round() -> None:
    model = nn.Sequential(Conv1D(ROWS, WIDTH), nn.Tanh(), nn.Linear(ROWS, WIDTH, bias=False))
    model[2].weight = model[0].weight
    blocks = survey(model, Curvature()).blocks
    assert [block.name for block in blocks] == ["0", "0.bias"]
    assert blocks[0].matrix_shape == (1, ROWS, WIDTH)


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    losses(model(x)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_use_without_gradient_is_named() -> None:
    model, x = LanguageModel(), words()
    model.embed.register_forward_hook(lambda module, args, output: output.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = "not seen 'embed' at work, which shares its weight with 'head'"
    with offbeat.attach(model, optimizer, offbeat.SPDKFAC()) as session:
        step(model, x, optimizer)
        assert sum(said in notice for notice in session.notices) == 1
        assert any(notice.startswith("K-FAC covers 100% of") for notice in session.notices)


@pytest.mark.parametrize("strategy", [offbeat.SPDKFAC, offbeat.DPKFAC])
@pytest.mark.parametrize("options", [{}, {"pi": False}])
def test_a_step_of_a_tied_weight_is_that_of_the_joined_factors(
    strategy: Any, options: dict[str, Any]
) -> None:
    """Undone from the outside: (G + dG) P (A + dA), the factors joined by hand, is the gradient."""
    damping, curvature = 0.1, offbeat.Curvature(**options)
    model, x = LanguageModel(), words()
    blocks, capture = capture_all(model)
    losses(model(x)).mean().backward()
    u, w = (each.packed for each in take_all(capture, blocks)[:2])
    capture.remove()
    gradient = model.embed.weight.grad.mT.clone()
    w = square(blocks[0], "output", w)
    a, g = joined((torch.diag(u[0]), w[0]), (torch.diag(u[1]), w[1]))
    trace = u[0].sum() * w[0].trace() + u[1].sum() * w[1].trace()
    a, g = (each * (trace / (a.trace() * g.trace())).sqrt() for each in (a, g))
    assert torch.allclose(a.trace() * g.trace(), trace)
    if not options:
        ratio = ((a.trace() / ROWS) / (g.trace() / WIDTH)).sqrt()
        product = torch.kron(
            g + damping**0.5 / ratio * torch.eye(WIDTH), a + damping**0.5 * ratio * torch.eye(ROWS)
        )
    else:
        # without pi the two factors' own scale matters: it is that of equal traces
        scale = (g.trace() / a.trace()).sqrt()
        a, g = a * scale, g / scale
        product = torch.kron(g + damping * torch.eye(WIDTH), a + damping * torch.eye(ROWS))
    expected = torch.linalg.solve(product, gradient.flatten()).view_as(gradient)

    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.embed.weight.detach().clone()
    with offbeat.attach(
        model, optimizer, strategy(damping=damping, kl_clip=None, curvature=curvature)
    ):
        step(model, x, optimizer)
    torch.testing.assert_close((before - model.embed.weight.detach()).mT, expected)
