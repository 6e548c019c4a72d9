"""The layers that K-FAC covers: how each lays out its matrix, and what it sums its factors over."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.kfac.blocks import Covered, LayerBlock, Moment, as_real
from offbeat.kfac.convolution import IntPair, Window, patch_moment, row_moments
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.factors import FactorShape, factor_shape, moment_of, packed_pieces


class RowsBlock(LayerBlock):
    """A layer that maps the last dimension of its inputs, or several, and treats all positions
    alike.

    Args:
        curvature: as for all blocks.
        batch_dim: which dimension of the input counts examples.
        num_mapped: how many dimensions it maps, >= 1.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        curvature: Curvature,
        *,
        batch_dim: int,
        num_mapped: int = 1,
        **covered: Unpack[Covered],
    ) -> None:
        super().__init__(name, module, **covered)
        self._curvature = curvature
        self._batch_dim = batch_dim
        self._num_mapped = num_mapped

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        num_others = inputs.ndim - self._num_mapped
        return None if num_others == 0 else min(self._batch_dim, num_others - 1)

    def num_positions(self, inputs: torch.Tensor) -> int:
        dim = self.example_dim(inputs)
        if dim is None or self._curvature.sharing == "reduce":
            return 1
        return inputs.shape[: -self._num_mapped].numel() // max(inputs.shape[dim], 1)

    def num_terms(self, inputs: torch.Tensor) -> int:
        return (
            inputs.shape[: -self._num_mapped].numel()
            if self._curvature.loss_terms == "position"
            else super().num_terms(inputs)
        )

    def _rows(self, tensor: torch.Tensor, how: Literal["mean", "sum"]) -> torch.Tensor:
        """Shape (rows, d): positions expanded, or reduced to one for each example."""
        if self._curvature.sharing == "expand" or tensor.ndim < 3:
            return as_real(tensor.reshape(-1, tensor.shape[-1]))
        positions = as_real(tensor).movedim(min(self._batch_dim, tensor.ndim - 2), 0).flatten(1, -2)
        return positions.mean(dim=1) if how == "mean" else positions.sum(dim=1)


class LinearBlock(RowsBlock):
    """y = W x + b for inputs of shape (N, ..., d); also one projection of an attention, or three
    that share their input.

    Args:
        curvature: as for all blocks.
        groups: projections that share the input and lie one after the other in the weight.
        batch_dim: which dimension of the input counts examples.
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
        batch_dim: int,
        is_transposed: bool = False,
        outputs: FactorShape | None = None,
        **covered: Unpack[Covered],
    ) -> None:
        super().__init__(name, module, curvature, batch_dim=batch_dim, **covered)
        self._is_transposed = is_transposed
        num_outputs, num_inputs = self._upright(self.weight[self.rows]).shape
        self._num_inputs = num_inputs
        self._lay_out(
            groups,
            num_outputs // groups,
            num_inputs + self.has_bias,
            curvature.max_dim,
            shares_inputs=True,
        )
        self.outputs = outputs or self.outputs

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.shape[-1] == self._num_inputs

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = self._rows(inputs, "mean")
        return Moment(moment_of(rows[None], self.inputs, ones=self.has_bias), rows.shape[0])

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = self._rows(gradient, "sum")
        grouped = rows.unflatten(1, self.matrix_shape[:2]).movedim(1, 0)
        return Moment(moment_of(grouped, self.outputs), rows.shape[0])

    def _upright(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT if self._is_transposed else weight

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return super().to_matrix(self._upright(weight))


class BiasBlock(RowsBlock):
    """The bias of a linear layer, alone: the only input is 1."""

    def __init__(
        self, name: str, module: nn.Module, curvature: Curvature, *, bias_name: str
    ) -> None:
        super().__init__(
            name,
            module,
            curvature,
            weight_name=bias_name,
            bias_name=None,
            batch_dim=curvature.batch_dim,
        )
        self._lay_out(1, self._weight_shape[0], 1, curvature.max_dim, shares_inputs=True)

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape()

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = self._rows(inputs, "mean")
        return Moment(rows.new_full((1, 1), rows.shape[0]), rows.shape[0])

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = self._rows(gradient, "sum")
        return Moment(moment_of(rows[None], self.outputs), rows.shape[0])

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
        self._lay_out(
            groups,
            num_outputs // groups,
            per_group * self._taps[0] * self._taps[1] + self.has_bias,
            curvature.max_dim,
            shares_inputs=False,
        )
        # A factor that is cut is cut between rows of taps, if that makes pieces small enough.
        in_a_row = per_group * self._taps[1]
        whole = self.inputs.dim == self.matrix_shape[2]
        self._is_cut_by_rows = not whole and not self.has_bias and in_a_row <= curvature.max_dim
        if self._is_cut_by_rows:
            self.inputs = FactorShape(groups=groups * self._taps[0], dim=in_a_row)

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.shape[-1 - self._num_axes] == self._num_channels

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


class EmbeddingBlock(LayerBlock):
    """An Embedding, whose input is one-hot, so that A is the diagonal matrix of the rows'
    frequencies.

    Positions that hold the padding index are inputs of zero, through which no gradient flows.
    """

    def __init__(self, name: str, module: nn.Embedding, curvature: Curvature) -> None:
        super().__init__(name, module, bias_name=None)
        self._curvature = curvature
        self._padding = module.padding_idx
        self.masks_outputs = self._padding is not None
        num_rows, num_outputs = self._weight_shape
        self.matrix_shape = 1, num_outputs, num_rows
        self.inputs = FactorShape(groups=1, dim=num_rows, is_diagonal=True)
        self.outputs = factor_shape(1, num_outputs, curvature.max_dim)

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT[None]

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape()

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return None if inputs.ndim == 0 else min(self._curvature.batch_dim, inputs.ndim - 1)

    def num_positions(self, inputs: torch.Tensor) -> int:
        dim = self.example_dim(inputs)
        return 1 if dim is None else inputs.numel() // max(inputs.shape[dim], 1)

    def num_terms(self, inputs: torch.Tensor) -> int:
        return (
            inputs.numel()
            if self._curvature.loss_terms == "position"
            else super().num_terms(inputs)
        )

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        counts = torch.bincount(inputs.flatten(), minlength=self.inputs.dim).to(dtype)
        if self._padding is not None:
            counts[self._padding] = 0
        return Moment(counts[None], inputs.numel())

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = as_real(gradient.reshape(-1, gradient.shape[-1]))
        if inputs is not None and self._padding is not None:
            rows = rows * (inputs != self._padding).reshape(-1, 1)
        return Moment(moment_of(rows[None], self.outputs), rows.shape[0])
