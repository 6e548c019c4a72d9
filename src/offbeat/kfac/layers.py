"""The layers that K-FAC covers: how each lays out its matrix, and what it sums its factors over.

Of normalisations scales and biases are covered: y_i = scale_i x_i + bias_i for each channel i,
where x is the input after normalisation. A channel is a layer of one output and one input, and of a
second input, 1, if there is a bias. So A is of 2 x 2 matrices, one for each channel, or of one
number each, and G of one number each:

    A_i = mean of [x_i, 1] [x_i, 1]^T        G_i = 1 / N sum of g_i^2

Channels are independent of each other, as in the unit-wise blocks of arXiv 2002.06015, section 4,
which has mean g_i^2 [x_i, 1] [x_i, 1]^T in place of the product of two means. Cost per step with
factors: a few passes over inputs and gradients; nothing of the forward pass is kept.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.kfac.blocks import Block, Covered, LayerBlock, Moment, as_real
from offbeat.kfac.convolution import IntPair, Window, patch_moment, row_moments
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.factors import FactorShape, factor_shape, moment_of, packed_pieces


class RowsBlock(LayerBlock):
    """A layer that maps the last dimensions of its inputs, or each number, and treats all positions
    alike.

    Args:
        curvature: as for all blocks.
        batch_dim: which dimension of the input counts examples; None: as `curvature` says.
        num_mapped: how many dimensions it maps, >= 0.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        curvature: Curvature,
        *,
        batch_dim: int | None = None,
        num_mapped: int = 1,
        **covered: Unpack[Covered],
    ) -> None:
        super().__init__(name, module, **covered)
        self._curvature = curvature
        self._batch_dim = curvature.batch_dim if batch_dim is None else batch_dim
        self._num_mapped = num_mapped

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        num_others = inputs.ndim - self._num_mapped
        return None if num_others == 0 else min(self._batch_dim, num_others - 1)

    def num_positions(self, inputs: torch.Tensor) -> int:
        dim = self.example_dim(inputs)
        return 1 if dim is None else self._num_rows(inputs) // max(inputs.shape[dim], 1)

    def num_terms(self, inputs: torch.Tensor) -> int:
        is_each = self._curvature.loss_terms == "position"
        return self._num_rows(inputs) if is_each else super().num_terms(inputs)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = _rows(gradient)
        grouped = rows.unflatten(1, self.matrix_shape[:2]).movedim(1, 0)
        return Moment(moment_of(grouped, self.outputs), rows.shape[0])

    def _num_rows(self, inputs: torch.Tensor) -> int:
        return inputs.shape[: inputs.ndim - self._num_mapped].numel()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """All positions of all examples, shape (rows, d)."""
    return as_real(tensor.reshape(-1, tensor.shape[-1]))


class LinearBlock(RowsBlock):
    """y = W x + b for inputs of shape (N, ..., d); also one projection of an attention, or three
    that share their input.

    Args:
        curvature: as for all blocks.
        groups: projections that share the input and lie one after the other in the weight.
        batch_dim: which dimension of the input counts examples; None: as `curvature` says.
        is_transposed: whether the weight has a row for each input, and not for each output.
        outputs: shape of G, where it is another than `max_dim` makes it.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        curvature: Curvature,
        *,
        groups: int = 1,
        batch_dim: int | None = None,
        is_transposed: bool = False,
        outputs: FactorShape | None = None,
        **covered: Unpack[Covered],
    ) -> None:
        super().__init__(name, module, curvature, batch_dim=batch_dim, **covered)
        self._is_transposed = is_transposed
        num_outputs, num_inputs = self._upright(self.weight[self.rows]).shape
        self._num_inputs = num_inputs
        width, max_dim = num_inputs + self.has_bias, curvature.max_dim
        self._lay_out(groups, num_outputs // groups, width, max_dim, shares_inputs=True)
        self.outputs = outputs or self.outputs

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.shape[-1] == self._num_inputs

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = _rows(inputs)
        return Moment(moment_of(rows[None], self.inputs, ones=self.has_bias), rows.shape[0])

    def _upright(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT if self._is_transposed else weight

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return super().to_matrix(self._upright(weight))


class BiasBlock(RowsBlock):
    """The bias of a linear layer, alone: the only input is 1."""

    def __init__(self, name: str, module: nn.Module, curvature: Curvature) -> None:
        super().__init__(name, module, curvature, weight_name="bias", bias_name=None)
        self._lay_out(1, self._weight_shape[0], 1, curvature.max_dim, shares_inputs=True)

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = _rows(inputs)
        return Moment(rows.new_full((1, 1), rows.shape[0]), rows.shape[0])

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[None, :, None]


class ConvBlock(LayerBlock):
    """A Conv2d, or a Conv1d, which is one of images of one row. Its matrix has the inputs in the
    order (tap, channel), in which factors are cheapest.
    """

    def __init__(
        self,
        name: str,
        module: nn.Conv1d | nn.Conv2d,
        curvature: Curvature,
        *,
        bias_name: str | None,
    ) -> None:
        super().__init__(name, module, bias_name=bias_name)
        self._conv = module
        self._num_axes = len(module.kernel_size)
        num_outputs, per_group, *_ = self._weight_shape
        groups = module.groups
        self._taps = self._pair(module.kernel_size, 1)
        self._num_channels = per_group * groups
        width = per_group * self._taps[0] * self._taps[1] + self.has_bias
        max_dim = curvature.max_dim
        self._lay_out(groups, num_outputs // groups, width, max_dim, shares_inputs=False)
        # A factor that is cut is cut between rows of taps, if that makes pieces small enough.
        in_a_row = per_group * self._taps[1]
        whole = self.inputs.dim == self.matrix_shape[2]
        self._is_cut_by_rows = not whole and not self.has_bias and in_a_row <= curvature.max_dim
        if self._is_cut_by_rows:
            self.inputs = FactorShape(groups=groups * self._taps[0], dim=in_a_row)

    def fits(self, inputs: torch.Tensor) -> bool:
        channels = inputs.shape[: -self._num_axes][-1:]  # none of a wrong input, which raises later
        return self.keeps_shape() and channels == (self._num_channels,)

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return None if inputs.ndim == 1 + self._num_axes else 0

    def num_positions(self, inputs: torch.Tensor) -> int:
        return inputs.shape[-self._num_axes :].numel()

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        images = self._images(inputs)
        conv = self._conv
        before, after = self._padding()
        if conv.padding_mode != "zeros":
            padding = (before[1], after[1], before[0], after[0])
            images = F.pad(images, padding, mode=conv.padding_mode)
            before = after = (0, 0)
        window = Window(
            taps=self._taps,
            stride=self._pair(conv.stride, 1),
            dilation=self._pair(conv.dilation, 1),
            before=before,
            after=after,
        )
        groups = self.matrix_shape[0]
        if self._is_cut_by_rows:
            positions = window.positions((images.shape[2], images.shape[3]))
            packed = row_moments(images, window, groups=groups)
            return Moment(packed, len(images) * positions[0] * positions[1])
        moment, num_patches = patch_moment(images, window, groups=groups, ones=self.has_bias)
        return Moment(packed_pieces(moment, self.inputs), num_patches)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        maps = self._images(gradient)
        rows = maps.movedim(1, 0).flatten(1).unflatten(0, self.matrix_shape[:2]).mT
        return Moment(moment_of(rows, self.outputs), rows.shape[1])

    def _images(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shape (N, C, H, W)."""
        batch = as_real(tensor if self.example_dim(tensor) is not None else tensor[None])
        return batch if self._num_axes == 2 else batch[:, :, None]

    def _pair(self, values: tuple[int, ...], of_rows: int) -> IntPair:
        """(vertical, horizontal), of which a Conv1d has the second one."""
        return (values[0], values[1]) if self._num_axes == 2 else (of_rows, values[0])

    def _padding(self) -> tuple[IntPair, IntPair]:
        """Above and left, below and right. "same" puts the odd one below and right, as
        Conv2d does.
        """
        conv = self._conv
        if conv.padding == "valid":
            return (0, 0), (0, 0)
        if conv.padding == "same":
            dilation = self._pair(conv.dilation, 1)
            total = [dilation[axis] * (self._taps[axis] - 1) for axis in (0, 1)]
            before = total[0] // 2, total[1] // 2
            return before, (total[0] - before[0], total[1] - before[1])
        assert not isinstance(conv.padding, str)
        padding = self._pair(conv.padding, 0)
        return padding, padding

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        images = weight if self._num_axes == 2 else weight[:, :, None]
        return super().to_matrix(images).permute(0, 1, 3, 4, 2)


class EmbeddingBlock(RowsBlock):
    """An Embedding, whose input is one-hot, so that A is the diagonal matrix of the rows'
    frequencies.

    Positions that hold the padding index are inputs of zero, through which no gradient flows.
    """

    def __init__(self, name: str, module: nn.Embedding, curvature: Curvature) -> None:
        super().__init__(name, module, curvature, num_mapped=0, bias_name=None)
        self._padding = module.padding_idx
        self.masks_outputs = self._padding is not None
        num_rows, num_outputs = self._weight_shape
        self.matrix_shape = 1, num_outputs, num_rows
        self.inputs = FactorShape(groups=1, dim=num_rows, is_diagonal=True)
        self.outputs = factor_shape(1, num_outputs, curvature.max_dim)

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT[None]

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        # For bincount the host would wait on a GPU.
        counts = torch.zeros(self.inputs.dim, dtype=dtype, device=inputs.device)
        rows = inputs.flatten().long()
        counts.scatter_add_(0, rows, torch.ones_like(rows, dtype=dtype))
        if self._padding is not None:
            counts[self._padding] = 0
        return Moment(counts[None], inputs.numel())

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        if inputs is not None and self._padding is not None:
            gradient = _rows(gradient) * (inputs != self._padding).reshape(-1, 1)
        return super().output_moment(gradient, inputs)


SECOND_DIM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm
"""Layers whose channels are the second dimension."""

ENOUGH_VALUES = 4096
"""From as many the variance of a channel is known well enough."""


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
    """A LayerNorm or an RMSNorm."""

    def __init__(
        self, name: str, module: nn.Module, curvature: Curvature, *, bias_name: str | None
    ) -> None:
        num_mapped = module.get_parameter("weight").ndim
        super().__init__(name, module, curvature, bias_name=bias_name, num_mapped=num_mapped)
        _lay_out_channels(self)

    def fits(self, inputs: torch.Tensor) -> bool:
        dims = self._weight_shape
        return self.keeps_shape() and inputs.shape[-len(dims) :] == dims

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        values, dims, norm = as_real(inputs), list(self._weight_shape), self.module
        if isinstance(norm, nn.LayerNorm):
            values = F.layer_norm(values, dims, eps=norm.eps)
        else:
            values = F.rms_norm(values, dims, eps=_epsilon(norm))
        rows = _rows(self._flat(values))
        return _moment_of_inputs(rows, (0,), has_bias=self.has_bias)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = _rows(self._flat(gradient))
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
            statistics = as_real(norm.running_mean), as_real(norm.running_var)
            values = F.batch_norm(values, *statistics, eps=norm.eps)
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
