"""The layers that K-FAC covers: how each lays out its matrix, and what it sums its factors over."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.kfac.blocks import EVERYTHING, Block, FactorShape, Moment, as_real
from offbeat.kfac.convolution import IntPair, Window, patch_moment
from offbeat.kfac.options import FactorOptions
from offbeat.kfac.symmetric import gram, pack


class LinearBlock(Block):
    """y = W x + b for inputs of shape (N, ..., d); also one projection of an attention, or three
    that share their input.

    Args:
        options: as for all blocks.
        groups: projections that share the input and lie one after the other in the weight.
        batch_dim: which dimension of the input counts examples.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        options: FactorOptions,
        *,
        weight_name: str = "weight",
        bias_name: str | None,
        rows: slice = EVERYTHING,
        bias_rows: slice = EVERYTHING,
        groups: int = 1,
        batch_dim: int,
    ) -> None:
        super().__init__(
            name,
            module,
            weight_name=weight_name,
            bias_name=bias_name,
            rows=rows,
            bias_rows=bias_rows,
        )
        self._options = options
        self._batch_dim = batch_dim
        num_outputs, num_inputs = self.weight[self.rows].shape
        self.inputs = FactorShape(groups=1, dim=num_inputs + self.has_bias)
        self.outputs = FactorShape(groups=groups, dim=num_outputs // groups)

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.shape[-1] == self._weight_shape[1]

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return None if inputs.ndim == 1 else min(self._batch_dim, inputs.ndim - 2)

    def num_terms(self, inputs: torch.Tensor) -> int:
        return (
            inputs.shape[:-1].numel()
            if self._options.loss_terms == "position"
            else super().num_terms(inputs)
        )

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        rows = as_real(self._rows(inputs, "mean"))
        return Moment(pack(gram(rows[None], ones=self.has_bias)), rows.shape[0])

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        rows = as_real(self._rows(gradient, "sum"))
        grouped = rows.unflatten(1, (self.outputs.groups, self.outputs.dim)).movedim(1, 0)
        return Moment(pack(gram(grouped)), rows.shape[0])

    def _rows(self, tensor: torch.Tensor, how: Literal["mean", "sum"]) -> torch.Tensor:
        """Shape (rows, d): positions expanded, or reduced to one for each example."""
        if self._options.sharing == "expand" or tensor.ndim < 3:
            return tensor.reshape(-1, tensor.shape[-1])
        positions = as_real(tensor).movedim(min(self._batch_dim, tensor.ndim - 2), 0).flatten(1, -2)
        return positions.mean(dim=1) if how == "mean" else positions.sum(dim=1)


class ConvBlock(Block):
    """A Conv2d. Its matrix has the inputs in the order (tap, channel), in which factors are
    cheapest.
    """

    def __init__(self, name: str, module: nn.Conv2d, *, bias_name: str | None) -> None:
        super().__init__(name, module, bias_name=bias_name)
        self._conv = module
        num_outputs, per_group, *_ = self._weight_shape
        groups = module.groups
        self._taps: IntPair = (self._weight_shape[2], self._weight_shape[3])
        self.inputs = FactorShape(
            groups=groups, dim=per_group * self._taps[0] * self._taps[1] + self.has_bias
        )
        self.outputs = FactorShape(groups=groups, dim=num_outputs // groups)

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape() and inputs.shape[-3] == self._weight_shape[1] * self.inputs.groups

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return None if inputs.ndim == 3 else 0

    def input_moment(self, inputs: torch.Tensor) -> Moment:
        images = as_real(inputs if inputs.ndim == 4 else inputs[None])
        conv = self._conv
        before, after = self._padding()
        if conv.padding_mode != "zeros":
            images = F.pad(
                images, (before[1], after[1], before[0], after[0]), mode=conv.padding_mode
            )
            before = after = (0, 0)
        window = Window(
            taps=self._taps,
            stride=(conv.stride[0], conv.stride[1]),
            dilation=(conv.dilation[0], conv.dilation[1]),
            before=before,
            after=after,
        )
        moment, num_patches = patch_moment(
            images, window, groups=self.inputs.groups, ones=self.has_bias
        )
        return Moment(pack(moment), num_patches)

    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        maps = as_real(gradient if gradient.ndim == 4 else gradient[None])
        rows = (
            maps.movedim(1, 0).flatten(1).unflatten(0, (self.outputs.groups, self.outputs.dim)).mT
        )
        return Moment(pack(gram(rows)), rows.shape[1])

    def _padding(self) -> tuple[IntPair, IntPair]:
        """Above and left, below and right. "same" puts the odd one below and right, as
        Conv2d does.
        """
        conv = self._conv
        if conv.padding == "valid":
            return (0, 0), (0, 0)
        if conv.padding == "same":
            total = [conv.dilation[axis] * (self._taps[axis] - 1) for axis in (0, 1)]
            before = total[0] // 2, total[1] // 2
            return before, (total[0] - before[0], total[1] - before[1])
        padding = int(conv.padding[0]), int(conv.padding[1])
        return padding, padding

    def _to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return super()._to_matrix(weight).permute(0, 1, 3, 4, 2)


class EmbeddingBlock(Block):
    """An Embedding, whose input is one-hot, so that A is the diagonal matrix of the rows'
    frequencies.

    Positions that hold the padding index are inputs of zero, through which no gradient flows.
    """

    def __init__(self, name: str, module: nn.Embedding, options: FactorOptions) -> None:
        super().__init__(name, module, bias_name=None)
        self._options = options
        self._padding = module.padding_idx
        self.masks_outputs = self._padding is not None
        num_rows, num_outputs = self._weight_shape
        self.inputs = FactorShape(groups=1, dim=num_rows, is_diagonal=True)
        self.outputs = FactorShape(groups=1, dim=num_outputs)

    def _to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT[None]

    def fits(self, inputs: torch.Tensor) -> bool:
        return self.keeps_shape()

    def example_dim(self, inputs: torch.Tensor) -> int | None:
        return None if inputs.ndim == 0 else min(self._options.batch_dim, inputs.ndim - 1)

    def num_terms(self, inputs: torch.Tensor) -> int:
        return (
            inputs.numel() if self._options.loss_terms == "position" else super().num_terms(inputs)
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
        return Moment(pack(gram(rows[None])), rows.shape[0])
