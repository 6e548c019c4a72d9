"""What the Kronecker factors of a layer are taken over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offbeat.errors import ConfigError

Sharing = Literal["expand", "reduce"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorOptions:
    """How examples, positions and the loss are counted.

    With "mean" the loss whose gradient the optimizer gets is the mean over the step's examples, so
    the gradient of one example's loss is the number of examples times what the backward pass
    delivers, and factors do not depend on the batch size. When gradients are accumulated over
    several batches, that means each batch's mean loss divided by the number of batches, as with
    DistributedDataParallel.

    Attributes:
        loss: whether the loss is the "mean" or the "sum" over examples. Both give the same factors.
        sharing: for layers that see several positions of each example (arXiv 2311.00636): "expand"
            treats the positions as independent, "reduce" averages inputs and sums gradients over
            them first. Convolutions and embeddings always expand.
        loss_terms: what one term of the loss is. "example": the batch dimension counts. "position":
            each position of a sequence has a loss of its own, as in language models; needs
            "expand". It scales the gradients' factors only.
        batch_dim: which dimension of the input of a Linear or Embedding counts examples; 0, or 1
            where time comes first. MultiheadAttention knows by its own `batch_first`.
        sample_stride: of the examples of each batch every n-th is looked at, >= 1; 1 looks at all.
            Which ones changes from step to step; of a batch of fewer than n it is one.
        cross_attention: names of MultiheadAttention modules whose query, key and value are not one
            and the same tensor, or that are called without a batch dimension. Those inside torch's
            decoder layers are known.
        max_dim: layers with a larger factor than this get plain gradients: inverting takes max_dim
            ** 3 operations.
    """

    loss: Literal["mean", "sum"] = "mean"
    sharing: Sharing = "expand"
    loss_terms: Literal["example", "position"] = "example"
    batch_dim: int = 0
    sample_stride: int = 1
    cross_attention: tuple[str, ...] = ()
    max_dim: int = 8192

    def __post_init__(self) -> None:
        for name, allowed in (
            ("loss", ("mean", "sum")),
            ("sharing", ("expand", "reduce")),
            ("loss_terms", ("example", "position")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, allowed are"
                    f" {' and '.join(map(repr, allowed))}"
                )
        if self.loss_terms == "position" and self.sharing == "reduce":
            raise ConfigError(
                'sharing="reduce" supposes one loss for each example, which loss_terms="position"'
                ' denies; use sharing="expand"'
            )
        for name, lowest in (("batch_dim", 0), ("sample_stride", 1), ("max_dim", 1)):
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed is {lowest} or more")
