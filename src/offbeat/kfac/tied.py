"""Tied weights: one parameter that several layers use, such as a language model's embedding and its
last layer.

Uses that lie the same way round (two Embeddings, two Linear) are one layer that is called several
times: A is the mean over the inputs of all, G the sum over their output gradients. An Embedding and
a Linear use the weight the opposite ways round: the rows that one picks are the other's outputs. Of
the sum of their two Fisher matrices, U_1 x W_1 + U_2 x W_2, one Kronecker product is made, of the
same trace, in which each use counts by the root s of its own trace:

    s_i^2 = tr U_i tr W_i
    U = c (s_1 U_1 / tr U_1 + s_2 U_2 / tr U_2)        W = c (s_1 W_1 / tr W_1 + s_2 W_2 / tr W_2)
    c^2 = (s_1^2 + s_2^2) / (s_1 + s_2)^2

Up to c these are U_1 + pi U_2 and W_1 + W_2 / pi with the pi that makes the traces of what is added
by that, pi U_2 x W_1 and U_1 x W_2 / pi, smallest together, as in arXiv 1503.05671, section 6.3. So
the factors of both uses are averaged over ranks and steps apart, and joined before they are
inverted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from offbeat.kfac.blocks import Block, FactorShape, Use
from offbeat.kfac.symmetric import diagonal


class TiedBlock(Block):
    """A weight with all of its uses.

    Args:
        uses: at most one of each way round, the first of them not flipped. The weight lies as the
            first one's does.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        first = uses[0].block
        super().__init__(
            first.name, first.module, weight_name=first.weight_name, bias_name=first.bias_name
        )
        self._uses = uses
        self.matrix_shape = first.matrix_shape
        self.inputs = replace(first.inputs, uses=len(uses))
        self.outputs = replace(first.outputs, uses=len(uses))

    @property
    @override
    def uses(self) -> Sequence[Use]:
        return self._uses

    @override
    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return self._uses[0].block.to_matrix(weight)


def joined_factors(
    inputs: tuple[torch.Tensor, FactorShape], outputs: tuple[torch.Tensor, FactorShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for the sum of all uses' Fisher matrices.

    Args:
        inputs, outputs: averages of the factors of all uses, packed, with their shapes.

    Returns:
        The factors, packed as the shapes that are `joined` say.
    """
    num_uses = inputs[1].uses
    if num_uses == 1:
        return inputs[0], outputs[0]
    sides = [
        (packed.unflatten(0, (num_uses, shape.groups)), _traces(packed, shape))
        for packed, shape in (inputs, outputs)
    ]
    traces_of_products = sides[0][1] * sides[1][1]
    weights = traces_of_products.sqrt()
    # c, which is 0 / 0 where no use has been seen
    total = weights.sum()
    scale = torch.where(total > 0, traces_of_products.sum().sqrt() / total, 0.0)
    found = [
        torch.einsum("u,ugn->gn", scale * weights / torch.where(traces > 0, traces, 1.0), each)
        for each, traces in sides
    ]
    return found[0], found[1]


def _traces(packed: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """Of each use's factor, shape (uses,)."""
    diagonals = packed if shape.is_diagonal else diagonal(packed, shape.dim)
    return diagonals.view(shape.uses, -1).sum(dim=1)
