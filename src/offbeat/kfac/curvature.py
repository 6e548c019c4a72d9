"""What the Kronecker factors of layers are taken over, and in which steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from offbeat.codec.described_options import BelowOne, NotNegative, OneOrMore, check_options

Grafting: TypeAlias = Literal["none", "floor", "layer"]
"""Whose length a layer's preconditioned gradient has (`kfac.preconditioner`); "none": its own."""

AUTO_STRIDE, MANY_POSITIONS, FEWEST_EXAMPLES = 4, 16, 8
"""What `sample_stride="auto"` means: a layer that sees many positions of each example knows enough
from a part of the examples.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curvature:
    """How the curvature of a model is estimated: what its layers' Kronecker factors are taken over,
    averaged over and damped by, and what their inverses are kept in.

    The loss whose gradient the optimizer gets is the mean over the step's examples, so the gradient
    of one example's loss is the number of examples times what the backward pass delivers, and
    factors do not depend on the batch size: divide a sum by the number of examples. When gradients
    are accumulated over several batches, that means each batch's mean loss divided by the number of
    batches, as with DistributedDataParallel.

    Args:
        loss_terms: whether each "example" has a loss, or each "position", as in language models; a
            position without a gradient, such as padding, has none.
        batch_dim: which dimension of inputs counts examples; 0, or 1 where time comes first.
        sample_stride: factors are of every n-th example of each batch, other ones each time, >= 1.
            "auto": of every fourth where a layer sees 16 positions of each or more, but of no fewer
            than eight.
        max_dim: a factor of more rows than this, >= 1, is cut into pieces of about so many along
            its diagonal, and one that would need more than eight is kept as its diagonal:
            inverting takes max_dim ** 3 operations for each piece.
        plain: names of layers, or of classes such as BatchNorm2d, that get plain gradients.
        cross_attention: names of MultiheadAttention modules whose query, key and value differ, or
            that are called without a batch dimension. Those inside torch's decoder layers are
            known.
        decay: how much of the running averages each step with factors keeps, in [0, 1).
        pi: whether the square root of the damping is divided between A and G by the ratio of their
            mean eigenvalues, which comes near to damping their product; False: all of the damping
            is added to each of them.
        factor_codec: what factors travel in: "float32" (float64 where the model is), "bfloat16" for
            half the bytes, in which they are also summed, or "linear8" for a quarter, in messages
            that owners sum; running averages stay as they are.
        inverse_dtype: what inverses are kept, sent and multiplied by in: "float32" (float64 where
            the model is), or "bfloat16", which is fast on hardware for it and precise to two or
            three digits. "auto": bfloat16 on such hardware where `inverse_interval` is above 25 or
            factors are on a GPU, and none is in float64.
    """

    loss_terms: Literal["example", "position"] = "example"
    batch_dim: NotNegative = 0
    sample_stride: OneOrMore | Literal["auto"] = "auto"
    max_dim: OneOrMore = 2048
    plain: tuple[str, ...] = ()
    cross_attention: tuple[str, ...] = ()
    decay: BelowOne = 0.95
    pi: bool = True
    factor_codec: Literal["float32", "bfloat16", "linear8"] = "float32"
    inverse_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("plain", "cross_attention"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"Curvature({', '.join(changed)})"

    def stride(self, num_examples: int, num_positions: int) -> int:
        """Of `num_examples`, of each of which a layer sees `num_positions`, every how-manieth is
        looked at.

        >>> curvature = Curvature()
        >>> [curvature.stride(*each) for each in ((128, 1), (128, 64), (20, 64))]
        [1, 4, 2]
        """
        if self.sample_stride != "auto":
            return max(min(self.sample_stride, num_examples), 1)
        if num_positions < MANY_POSITIONS:
            return 1
        return max(min(AUTO_STRIDE, num_examples // FEWEST_EXAMPLES), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACSettings:
    """What all K-FAC strategies do alike: how factors are taken, averaged, damped and used.

    Attributes:
        damping: as of `kfac.callback.damping_of`, > 0.
        kl_clip: limit of a step's predicted change, > 0; None: no limit.
        grafting: whose length a layer's preconditioned gradient has.
        factor_interval: from one step with factors to the next, >= 1.
        inverse_interval: from one step with inversions to the next, >= 1.
        curvature: how factors are taken, averaged and damped.
    """

    damping: float
    kl_clip: float | None
    grafting: Grafting
    factor_interval: int
    inverse_interval: int
    curvature: Curvature

    def has_factors(self, step: int) -> bool:
        """Whether factors are averaged in `step`: in each of the first ones."""
        return not step % self.factor_interval or step < self.factor_interval

    def num_with_factors(self, step: int) -> int:
        """How many steps before `step`, which has factors, had them too."""
        return step if step < (first := self.factor_interval) else first - 1 + step // first

    def has_inversions(self, step: int) -> bool:
        """Whether factors are inverted in `step`: of the first ones in 0, 1, 2, 4, 8, ..."""
        is_one_of_the_first = step < self.inverse_interval and step.bit_count() == 1
        return is_one_of_the_first or not step % self.inverse_interval
