"""Scales and biases of normalisations: y_i = scale_i x_i + bias_i for each channel i, where x is
the input after normalisation.

A channel is a layer of one output and one input, and of a second input, 1, if there is a bias. So A
is of 2 x 2 matrices, one for each channel, or of one number each, and G of one number each:

    A_i = mean of [x_i, 1] [x_i, 1]^T        G_i = 1 / N sum of g_i^2

Channels are independent of each other, as in the unit-wise blocks of arXiv 2002.06015, section 4,
which has mean g_i^2 [x_i, 1] [x_i, 1]^T in place of the product of two means. Cost per step with
factors: a few passes over inputs and gradients; nothing of the forward pass is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.kfac.blocks import Block, LayerBlock, Moment, as_real
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.factors import FactorShape
from offbeat.kfac.layers import RowsBlock

LAST_DIMS = nn.LayerNorm, nn.RMSNorm
"""Layers whose channels are the last dimensions."""

SECOND_DIM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm
"""Layers whose channels are the second dimension."""

ENOUGH_VALUES = 4096
"""From as many the variance of a channel is known well enough."""

Normalise: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def is_own_rms_norm(module: nn.Module) -> bool:
    """Whether `module` looks like the RMSNorm that models bring themselves, as those of
    `transformers` do: one scale for each channel, and an epsilon.
    """
    own = dict(module.named_parameters(recurse=False))
    return (
        set(own) == {"weight"}
        and own["weight"].ndim == 1
        and (hasattr(module, "variance_epsilon") or "RMSNorm" in type(module).__name__)
        and _epsilon(module) is not None
    )


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


class LastDimsNormBlock(RowsBlock):
    """A LayerNorm or an RMSNorm.

    Args:
        normalise: what the layer does before it scales.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        curvature: Curvature,
        *,
        bias_name: str | None,
        normalise: Normalise,
    ) -> None:
        super().__init__(
            name,
            module,
            curvature,
            bias_name=bias_name,
            batch_dim=curvature.batch_dim,
            num_mapped=module.get_parameter("weight").ndim,
        )
        self._normalise = normalise
        _lay_out_channels(self)

    def fits(self, inputs: torch.Tensor) -> bool:
        dims = self._weight_shape
        return self.keeps_shape() and inputs.shape[-len(dims) :] == dims

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = self._rows(self._flat(self._normalise(as_real(inputs))), "mean")
        return _moment_of_inputs(rows, (0,), has_bias=self.has_bias)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = self._rows(self._flat(gradient), "sum")
        return Moment(_squares(rows, (0,))[:, None], rows.shape[0])

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(-len(self._weight_shape))

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.flatten()[:, None, None]


class SecondDimNormBlock(LayerBlock):
    """A BatchNorm or a GroupNorm. Its positions are expanded, as a convolution's.

    A BatchNorm that normalises by the batch has channels of mean 0, so that A is known from their
    variances: it is 1 but for variances as small as epsilon. So they are of about `ENOUGH_VALUES`
    of a channel, where there are as many positions, and of all examples, whichever are looked at.
    """

    def __init__(
        self,
        name: str,
        module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.GroupNorm,
        *,
        bias_name: str | None,
    ) -> None:
        super().__init__(name, module, bias_name=bias_name)
        self._norm = module
        self.samples_inputs = isinstance(module, nn.GroupNorm)
        _lay_out_channels(self)

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.ndim > 1 and inputs.shape[1] == self._weight_shape[0]

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return 0

    def num_positions(self, inputs: torch.Tensor) -> int:
        return inputs.shape[2:].numel()

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        values, norm = as_real(inputs), self._norm
        others = _other_dims(values)
        if isinstance(norm, nn.GroupNorm):
            values = F.group_norm(values, norm.num_groups, eps=norm.eps)
        elif norm.training or norm.running_mean is None or norm.running_var is None:
            values = _some_positions(values)
            others = _other_dims(values)
            num = values.numel() // values.shape[1]
            # torch's var takes seven times as long. What a sum of squares loses where the mean is
            # large does not matter beside epsilon: A is 1 but for variances as small as that.
            means = values.sum(dim=others) / num
            variances = (_squares(values, others) / num - means.square()).clamp(min=0)
            squares = num * variances / (variances + norm.eps)
            return _from_sums(torch.zeros_like(squares), squares, num, has_bias=self.has_bias)
        else:
            values = F.batch_norm(values, norm.running_mean, norm.running_var, eps=norm.eps)
        return _moment_of_inputs(values, others, has_bias=self.has_bias)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        values = as_real(gradient)
        num = values.numel() // values.shape[1]
        return Moment(_squares(values, _other_dims(values))[:, None], num)

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, None, None]


def _lay_out_channels(block: Block) -> None:
    channels, num_inputs = block.weight.numel(), 1 + block.has_bias
    block.matrix_shape = channels, 1, num_inputs
    block.inputs = FactorShape(groups=channels, dim=num_inputs)
    block.outputs = FactorShape(groups=channels, dim=1)


def _some_positions(values: torch.Tensor) -> torch.Tensor:
    """About `ENOUGH_VALUES` of each channel, of as many positions of every example. A few whole
    examples would not do: a channel behind a ReLU may be zero in these and nowhere else.
    """
    num, positions = values.numel() // values.shape[1], values.shape[2:].numel()
    stride = min(num // ENOUGH_VALUES, positions)
    if stride <= 1:
        return values
    while math.gcd(stride, values.shape[-1]) > 1:  # else it would be the same columns of all rows
        stride += 1
    return values.flatten(2)[..., ::stride]


def _other_dims(values: torch.Tensor) -> tuple[int, ...]:
    return 0, *range(2, values.ndim)


def _squares(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=dims)
    return norms.square()


def _moment_of_inputs(values: torch.Tensor, dims: tuple[int, ...], *, has_bias: bool) -> Moment:
    """A's of normalised `values`, summed over `dims`."""
    num = values.shape[dims[0]] if len(dims) == 1 else values.numel() // values.shape[1]
    return _from_sums(values.sum(dim=dims), _squares(values, dims), num, has_bias=has_bias)


def _from_sums(sums: torch.Tensor, squares: torch.Tensor, num: int, *, has_bias: bool) -> Moment:
    """A's from each channel's sum and sum of squares over `num` rows."""
    parts = [squares, sums, torch.full_like(sums, num)] if has_bias else [squares]
    return Moment(torch.stack(parts, dim=1), num)


def norm_block(
    name: str, module: Any, curvature: Curvature, *, bias_name: str | None
) -> LastDimsNormBlock | SecondDimNormBlock:
    """The block of a normalisation, `module`, whose scale is trained."""
    if isinstance(module, SECOND_DIM):
        return SecondDimNormBlock(name, module, bias_name=bias_name)
    dims = list(module.weight.shape)
    normalise: Normalise = (
        partial(F.layer_norm, normalized_shape=dims, eps=module.eps)
        if isinstance(module, nn.LayerNorm)
        else partial(F.rms_norm, normalized_shape=dims, eps=_epsilon(module))
    )
    return LastDimsNormBlock(name, module, curvature, bias_name=bias_name, normalise=normalise)
