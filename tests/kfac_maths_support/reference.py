"""Kronecker factors the slow way, from their definition and autograd alone: one example, one
position, one output at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from offbeat.kfac.blocks import Block, Side
from offbeat.kfac.capture import Capture, Increment
from offbeat.kfac.options import FactorOptions
from offbeat.kfac.survey import survey
from offbeat.kfac.symmetric import unpack

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

    def factors(self, sharing: str = "expand") -> tuple[torch.Tensor, torch.Tensor]:
        groups, num_examples, num_positions, _ = self.inputs.shape
        a, g = self.inputs, self.gradients
        if sharing == "reduce":
            a, g, num_positions = a.mean(2, keepdim=True), g.sum(2, keepdim=True), 1
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
    is_conv, groups = isinstance(layer, nn.Conv2d), getattr(layer, "groups", 1)
    weight = layer.get_parameter("weight")
    bias = getattr(layer, "bias", None)
    output = layer(x)
    flat = (
        output.flatten(2).mT if is_conv else output.reshape(output.shape[0], -1, output.shape[-1])
    )
    (gradient,) = torch.autograd.grad(losses(output).sum(), output, retain_graph=True)
    gradient = gradient.flatten(2).mT if is_conv else gradient.reshape(flat.shape)
    num_examples, num_positions, num_outputs = flat.shape
    per_group = num_outputs // groups
    rows = []
    for group in range(groups):
        first = group * per_group
        for n in range(num_examples):
            for r in range(num_positions):
                wrt = [weight] if bias is None else [weight, bias]
                found = torch.autograd.grad(flat[n, r, first], wrt, retain_graph=True)
                by_output = found[0].mT if isinstance(layer, nn.Embedding) else found[0]
                row = by_output[first].permute(1, 2, 0).flatten() if is_conv else by_output[first]
                rows.append(row if bias is None else torch.cat([row, found[1][first : first + 1]]))
    inputs = torch.stack(rows).view(groups, num_examples, num_positions, -1)
    return Seen(inputs, gradient.unflatten(2, (groups, per_group)).permute(2, 0, 1, 3))


def capture_all(
    model: nn.Module,
    options: FactorOptions | None = None,
    *,
    grad_scale: float = 1.0,
    step: int = 0,
) -> tuple[list[Block], Capture]:
    """A capture of every block of `model` that has begun to look. Warnings are errors."""

    def warn(message: str) -> None:
        raise AssertionError(message)

    options = options or FactorOptions()
    blocks = list(survey(model, options).blocks)
    capture = Capture(model, blocks, options, warn=warn, grad_scale=lambda: grad_scale)
    capture.start(step)
    return blocks, capture


def square(block: Block, side: Side, packed: torch.Tensor) -> torch.Tensor:
    """(groups, d, d) from a packed factor of `block`."""
    shape = block.shape(side)
    return torch.diag_embed(packed) if shape.is_diagonal else unpack(packed, shape.dim)


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
