"""What K-FAC sees in a layer: a matrix of gradients, and two factors whose Kronecker product stands
for its Fisher matrix.

A layer computes W [a, 1] for inputs a; let g be the gradient of one example's loss with respect to
an output. Over N examples with R positions each,

    A = 1 / (N R) sum [a, 1] [a, 1]^T        G = 1 / N sum g g^T        Fisher of vec(W) ~ A x G

(arXiv 1503.05671, 1602.01407 for convolutions, 2311.00636 for other shared weights). The empirical
Fisher: g belongs to the true label. With "reduce", a is the mean and g the sum over the R
positions. A is thus a plain second moment whatever the number of positions; the sum over positions
sits in G.

A block covers one weight, or rows of one, and its bias. Grouped convolutions and attention's three
projections make several independent blocks of one shape, which are kept together along a first
dimension, `groups`. A factor of more rows than `max_dim` is cut into blocks along its diagonal,
which are further groups, and one that would need many of them is kept as its diagonal
(`factor_shape`).

A tied weight is used by several layers. Each use sees inputs and output gradients of its own; where
the uses lie the same way round, the factors add up as those of one layer that is called several
times. `kfac.callback` says what happens to the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Required, TypeAlias, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.factors import FactorShape, factor_shape
from offbeat.torch_private import for_each
from offbeat.transport.driver import Stream

Side: TypeAlias = Literal["input", "output"]
"""Which factor of a block: "input" is A, "output" is G."""

SIDES: tuple[Side, Side] = ("input", "output")

EVERYTHING = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorSlot:
    """One factor of the model, and its place in what all ranks plan.

    Attributes:
        index: the slot's number. Slot 2 l is A of block l, slot 2 l + 1 its G.
        side: "input" for A, "output" for G.
        block_name: the block's name, without what `torch.compile` puts before it.
        shape: of the factor.
        dtype, device: of the factor. Factors are summed in float32, or in float64 where the weight
            is.
    """

    index: int
    side: Side
    block_name: str
    shape: FactorShape
    dtype: torch.dtype
    device: torch.device

    @property
    def block_index(self) -> int:
        return self.index // 2

    @property
    def name(self) -> str:
        """For people, such as ``A of 'conv1'``."""
        return f"{'A' if self.side == 'input' else 'G'} of {self.block_name!r}"

    @property
    def key(self) -> str:
        """For checkpoints, such as ``conv1/input``."""
        return f"{self.block_name}/{self.side}"

    @property
    def size_bytes(self) -> int:
        """Of the packed factor."""
        return self.shape.num_elements * self.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        """A packed factor of zeros."""
        return torch.zeros(self.shape.packed, dtype=self.dtype, device=self.device)


class Moment(NamedTuple):
    """A sum of outer products, packed, and how many there were."""

    packed: torch.Tensor
    num_rows: int


class Use(NamedTuple):
    """One way in which a block's weight is used.

    Attributes:
        block: says what the use's inputs and output gradients add to factors of its own.
        modules: the layers that use the weight so.
        names: of the modules.
        is_flipped: whether what is A for the use is G for the whole block, and the reverse.
    """

    block: LayerBlock
    modules: Sequence[nn.Module]
    names: Sequence[str]
    is_flipped: bool = False


class BlockGradient(NamedTuple):
    """Views of the gradients of a block's weight and bias.

    Attributes:
        weight: shape (groups, outputs, inputs without bias), inputs maybe in several dimensions.
        bias: shape (groups, outputs, 1); None where there is none.
        fixes_bias: whether there is a bias that has no gradient, as it is frozen by now.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    fixes_bias: bool = False

    def matrix(self) -> torch.Tensor:
        """Both side by side, of the block's `matrix_shape`, in float32 or float64: a view where it
        can be one.
        """
        weight = as_real(self.weight).flatten(2)
        if self.bias is None:
            return F.pad(weight, (0, 1)) if self.fixes_bias else weight
        return torch.cat([weight, as_real(self.bias)], dim=2)

    def write_(self, matrix: torch.Tensor) -> None:
        """The inverse of `matrix`."""
        if self.bias is not None:
            self.bias.copy_(matrix[..., -1:])
        if self.bias is not None or self.fixes_bias:
            matrix = matrix[..., :-1]
        shape = self.weight.shape[2:]
        self.weight.copy_(matrix if len(shape) == 1 else matrix.unflatten(-1, shape))

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class JoinedGradients(NamedTuple):
    """Gradients of several blocks of one kind, as if their groups were groups of one block.

    Attributes:
        members: the gradients, at least one; all have a bias, or none.
    """

    members: list[BlockGradient]

    @property
    def sizes(self) -> list[int]:
        """Groups of each block."""
        return [len(each.weight) for each in self.members]

    def matrix(self) -> torch.Tensor:
        """As of `BlockGradient`: a copy."""
        weights = torch.cat([as_real(each.weight).flatten(2) for each in self.members])
        biases = [each.bias for each in self.members if each.bias is not None]
        return torch.cat([weights, as_real(torch.cat(biases))], dim=2) if biases else weights

    def write_(self, matrix: torch.Tensor) -> None:
        """The inverse of `matrix`, by one call for all weights and one for all biases."""
        biases = [each.bias for each in self.members if each.bias is not None]
        if biases:
            theirs = matrix[..., -1:].contiguous()
            for_each("copy_", biases, list(theirs.split(self.sizes)))
            matrix = matrix[..., :-1]
        parts = matrix.contiguous().split(self.sizes)
        weights = [each.weight for each in self.members]
        views = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        for_each("copy_", weights, views)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part for each in self.members for part in each.parts]


class Covered(TypedDict, total=False):
    """What of a module's parameters belongs to a block.

    Attributes:
        weight_name, bias_name: the parameters' names; no bias, or one that is not trained: None.
        rows, bias_rows: which rows of weight and bias.
    """

    weight_name: str
    bias_name: Required[str | None]
    rows: slice
    bias_rows: slice


class Block(ABC):
    """One weight matrix, or a few of the same shape, and what is needed to estimate its factors.

    Args:
        name: of the block, unique in the model: the module's, or that and a projection's.
        module: holds the parameters. They are looked up at each use, since they may be replaced.
        covered: what of them belongs to the block, as of `Covered`.

    Attributes:
        matrix_shape: (groups, outputs, inputs), the shape of the matrix of gradients, the bias as
            last column.
        inputs, outputs: shapes of the factors A and G. A of one group may serve all groups.
    """

    matrix_shape: tuple[int, int, int]
    inputs: FactorShape
    outputs: FactorShape

    def __init__(self, name: str, module: nn.Module, **covered: Unpack[Covered]) -> None:
        self.name = name
        self.module = module
        self.weight_name = covered.get("weight_name", "weight")
        self.bias_name = covered["bias_name"]
        self.rows = covered.get("rows", EVERYTHING)
        self.bias_rows = covered.get("bias_rows", EVERYTHING)
        self._weight_shape = self.weight.shape
        self._bias_shape = None if self.bias is None else self.bias.shape

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.weight_name)
        return found

    @property
    def bias(self) -> nn.Parameter | None:
        return None if self.bias_name is None else getattr(self.module, self.bias_name)

    @property
    def has_bias(self) -> bool:
        return self.bias_name is not None

    @property
    @abstractmethod
    def uses(self) -> Sequence[Use]:
        """Whose inputs and output gradients the factors are of: at most one of each way round."""

    @property
    def num_parameters(self) -> int:
        """How many numbers of the model the block covers."""
        return torch.Size(self.matrix_shape).numel()

    def shape(self, side: Side) -> FactorShape:
        return self.inputs if side == "input" else self.outputs

    def _lay_out(
        self, groups: int, num_outputs: int, num_inputs: int, max_dim: int, *, shares_inputs: bool
    ) -> None:
        """Set the shapes: `groups` matrices of `num_outputs` x `num_inputs`, the bias's column
        counted, whose A is one for all with `shares_inputs`.
        """
        self.matrix_shape = groups, num_outputs, num_inputs
        self.inputs = factor_shape(
            1 if shares_inputs else groups, num_inputs, max_dim, spare=self.has_bias
        )
        self.outputs = factor_shape(groups, num_outputs, max_dim)

    def keeps_shape(self) -> bool:
        """Whether the parameters still have the shapes that the block was made for."""
        bias = self.bias
        return bool(
            self.weight.shape == self._weight_shape
            and (None if bias is None else bias.shape) == self._bias_shape
        )

    def has_gradient(self) -> bool:
        """Whether the weight has one, and parameters the shapes that the block was made for."""
        return self.keeps_shape() and self.weight.grad is not None

    def gradient(self) -> BlockGradient:
        """Views of the gradient. `has_gradient` must hold."""
        weight, bias = gradient_of(self.weight), self.bias
        if self.rows != EVERYTHING:
            weight = weight[self.rows]
        matrix = self.to_matrix(weight)
        if bias is None or bias.grad is None:
            return BlockGradient(matrix, None, fixes_bias=bias is not None)
        return BlockGradient(matrix, gradient_of(bias)[self.bias_rows].view(*matrix.shape[:2], 1))

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A view of `weight`, or of its gradient, as (groups, outputs, inputs without bias), inputs
        maybe in several dimensions.
        """
        matrix: torch.Tensor = weight.unflatten(0, self.matrix_shape[:2])
        return matrix


class LayerBlock(Block):
    """A block of one layer, which says what the layer's inputs and output gradients add.

    Attributes:
        masks_outputs: whether inputs decide which output gradients count.
        samples_inputs: whether A is of the examples that are looked at; False: of all.
    """

    masks_outputs: bool = False
    samples_inputs: bool = True

    @property
    def uses(self) -> Sequence[Use]:
        return (Use(self, (self.module,), (self.name,)),)

    def fits(self, inputs: torch.Tensor) -> bool:
        """Whether the layer has the shape that the block was made for."""
        return self.keeps_shape()

    @abstractmethod
    def example_dim(self, inputs: torch.Tensor) -> int | None:
        """Which dimension of `inputs`, and of what comes of them, counts examples; None: they are
        one example.
        """

    @abstractmethod
    def num_positions(self, inputs: torch.Tensor) -> int:
        """About how many positions of each example factors are summed over."""

    def num_terms(self, inputs: torch.Tensor) -> int:
        """Terms of the loss that these inputs belong to."""
        dim = self.example_dim(inputs)
        return 1 if dim is None else inputs.shape[dim]

    @abstractmethod
    def input_moment(self, inputs: torch.Tensor) -> Moment:
        """The sum of a a^T."""

    @abstractmethod
    def output_moment(self, gradient: torch.Tensor, inputs: torch.Tensor | None) -> Moment:
        """The sum of g g^T, for g as the backward pass delivers it. `inputs` are there if the block
        masks outputs.
        """


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "has_gradient() was not asked"
    return parameter.grad


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Factors are summed in float32, or in float64 where the model is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def slots_of(blocks: Sequence[Block]) -> list[FactorSlot]:
    """The factors of `blocks`, A before G, in the order of the blocks."""
    return [
        FactorSlot(
            index=2 * number + (side == "output"),
            side=side,
            block_name=block.name.replace("_orig_mod.", ""),
            shape=block.shape(side),
            dtype=torch.promote_types(block.weight.dtype, torch.float32),
            device=block.weight.device,
        )
        for number, block in enumerate(blocks)
        for side in SIDES
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACContext:
    """What the parts of K-FAC on one rank know.

    Attributes:
        session: what the session lends; its model and optimizer are there.
        blocks: what is preconditioned; the same on all ranks.
        slots: the factors of `blocks`.
        settings: what all K-FAC strategies do alike.
        stream: the channels of everything that K-FAC sends.
    """

    session: Context
    blocks: Sequence[Block]
    slots: Sequence[FactorSlot]
    settings: KFACSettings
    stream: Stream


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
