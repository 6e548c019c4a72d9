"""Kronecker factors the slow way, from their definition and autograd alone: one example, one
position, one output at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from offbeat import Curvature
from offbeat.kfac.blocks import Block, Side
from offbeat.kfac.capture import Capture, Increment
from offbeat.kfac.factors import unpack
from offbeat.kfac.survey import survey

Losses = Callable[[torch.Tensor], torch.Tensor]
"""The loss of each example, shape (N,), from a layer's output."""


@dataclass
class Seen:
    """What a layer saw of each example at each position.

    Attributes:
        inputs: (groups, N, R, d_in), a 1 behind each where there is a bias, convolutions in the
            order (tap, channel).
        gradients: (groups, N, R, d_out), of one example's loss.
    """

    inputs: torch.Tensor
    gradients: torch.Tensor

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        groups, num_examples, num_positions, _ = self.inputs.shape
        a, g = self.inputs, self.gradients
        inputs = torch.zeros(groups, a.shape[-1], a.shape[-1], dtype=a.dtype)
        outputs = torch.zeros(groups, g.shape[-1], g.shape[-1], dtype=g.dtype)
        for group in range(groups):
            for n in range(num_examples):
                for r in range(num_positions):
                    inputs[group] += torch.outer(a[group, n, r], a[group, n, r]) / (
                        num_examples * num_positions
                    )
                    outputs[group] += torch.outer(g[group, n, r], g[group, n, r]) / num_examples
        return inputs, outputs


def look(layer: nn.Module, x: torch.Tensor, losses: Losses) -> Seen:
    """The input of an output is the gradient of that output with respect to the weights that make
    it.
    """
    weight = layer.get_parameter("weight")
    is_conv = isinstance(layer, nn.Conv1d | nn.Conv2d)
    is_norm = weight.ndim == 1 or isinstance(layer, nn.LayerNorm)
    has_channels = isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)
    groups = weight.numel() if is_norm else getattr(layer, "groups", 1)
    bias = getattr(layer, "bias", None)
    output = layer(x)
    (gradient,) = torch.autograd.grad(losses(output).sum(), output, retain_graph=True)
    width = groups if is_norm else output.shape[-1]
    flat, gradient = (
        each.flatten(2).mT if is_conv or has_channels else each.reshape(len(x), -1, width)
        for each in (output, gradient)
    )
    num_examples, num_positions, num_outputs = flat.shape
    per_group = num_outputs // groups
    rows = []
    for group in range(groups):
        first = group * per_group
        for n in range(num_examples):
            for r in range(num_positions):
                wrt = [weight] if bias is None else [weight, bias]
                found = torch.autograd.grad(flat[n, r, first], wrt, retain_graph=True)
                found = tuple(each.flatten() for each in found) if is_norm else found
                has_input_rows = isinstance(layer, nn.Embedding) or hasattr(layer, "nf")
                row = (found[0].mT if has_input_rows else found[0])[first]
                row = row.movedim(0, -1).flatten() if is_conv else row.reshape(-1)
                rows.append(row if bias is None else torch.cat([row, found[1][first : first + 1]]))
    inputs = torch.stack(rows).view(groups, num_examples, num_positions, -1)
    return Seen(inputs, gradient.unflatten(2, (groups, per_group)).permute(2, 0, 1, 3))


class Conv1D(nn.Module):
    """As in `transformers`: a linear layer with a row of its weight for each input."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class OwnRMSNorm(nn.Module):
    """As models bring it themselves."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def capture_all(
    model: nn.Module,
    options: Curvature | None = None,
    *,
    grad_scale: float = 1.0,
    step: int = 0,
) -> tuple[list[Block], Capture]:
    """A capture of every block of `model` that has begun to look. Warnings are errors."""

    def warn(message: str) -> None:
        raise AssertionError(message)

    options = options or Curvature()
    blocks = list(survey(model, options).blocks)
    capture = Capture(model, blocks, options, warn=warn, grad_scale=lambda: grad_scale)
    capture.start(step)
    return blocks, capture


def square(block: Block, side: Side, packed: torch.Tensor) -> torch.Tensor:
    """(groups, d, d) from a packed factor of `block`."""
    shape = block.shape(side)
    if shape.is_diagonal:
        return torch.diag_embed(packed)
    _, outputs, inputs = block.matrix_shape
    dim = inputs if side == "input" else outputs
    pieces = unpack(packed, shape.dim).unflatten(0, (-1, -(-dim // shape.dim)))
    return torch.stack([torch.block_diag(*some)[:dim, :dim] for some in pieces])


def take_square(
    capture: Capture, blocks: list[Block], index: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and G of one block, each (groups, d, d)."""
    a, g = capture.take(index, "input"), capture.take(index, "output")
    assert a.weight > 0
    assert g.weight > 0
    return square(blocks[index], "input", a.packed), square(blocks[index], "output", g.packed)


def take_all(capture: Capture, blocks: list[Block]) -> list[Increment]:
    return [
        capture.take(index, side) for index in range(len(blocks)) for side in ("input", "output")
    ]  # type: ignore[arg-type]
