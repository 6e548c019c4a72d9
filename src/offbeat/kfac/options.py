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
            "expand". The mean is then over the positions that get a gradient, so that padding
            (`ignore_index`) is no term. It scales the gradients' factors only.
        batch_dim: which dimension of the input of a Linear or Embedding counts examples; 0, or 1
            where time comes first. MultiheadAttention knows by its own `batch_first`.
        sample_stride: of the examples of each batch every n-th is looked at, >= 1; 1 looks at all.
            Which ones changes from step to step; of a batch of fewer than n it is one.
        cross_attention: names of MultiheadAttention modules whose query, key and value are not one
            and the same tensor, or that are called without a batch dimension. Those inside torch's
            decoder layers are known.
        max_dim: a factor of more rows is cut into pieces of about so many, along its diagonal, and
            one that would need more than eight is kept as its diagonal: inverting takes max_dim
            ** 3 operations for each piece.
        plain: names of layers, or of classes of layers, that get plain gradients.
    """

    loss: Literal["mean", "sum"] = "mean"
    sharing: Sharing = "expand"
    loss_terms: Literal["example", "position"] = "example"
    batch_dim: int = 0
    sample_stride: int = 1
    cross_attention: tuple[str, ...] = ()
    max_dim: int = 2048
    plain: tuple[str, ...] = ()

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


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACSettings:
    """What all K-FAC strategies do alike: how factors are taken, averaged, damped and used.

    Attributes:
        damping: as of `kfac.averages.damping_of`, > 0.
        pi: the same.
        eigen: whether factors are decomposed instead of inverted. With `pi` their product is damped
            then, without it each.
        bfloat16: whether inverses are kept in bfloat16.
        decay: how much of the running averages to keep in each step with factors, in [0, 1).
        kl_clip: limit of a step's predicted change, > 0; None: no limit.
        factor_interval: steps from one with factors to the next, >= 1.
        inverse_interval: steps from one with inversions to the next, >= 1.
        ramp: whether the first steps, as many as an interval has, are denser.
        options: how factors are counted.
    """

    damping: float
    pi: bool
    eigen: bool
    bfloat16: bool
    decay: float
    kl_clip: float | None
    factor_interval: int
    inverse_interval: int
    ramp: bool
    options: FactorOptions

    def has_factors(self, step: int) -> bool:
        """Whether factors are averaged in `step`."""
        return step % self.factor_interval == 0 or (self.ramp and step < self.factor_interval)

    def num_with_factors(self, step: int) -> int:
        """How many steps before `step`, which has factors, had them too."""
        if self.ramp:
            return min(step, self.factor_interval - 1 + step // self.factor_interval)
        return step // self.factor_interval

    def has_inversions(self, step: int) -> bool:
        """Whether factors are inverted in `step`. On the ramp that is in steps 0, 1, 2,
        4, 8, ...
        """
        is_power_of_two = not step & (step - 1)
        return step % self.inverse_interval == 0 or (
            self.ramp and step < self.inverse_interval and is_power_of_two
        )

    def is_noted(self, step: int) -> bool:
        """Whether the record says what happens in `step`: some steps with inversions, and some with
        factors, ever more rarely.
        """
        return any(
            step % interval == 0 and has_few_digits(step // interval, digits)
            for interval, digits in ((self.inverse_interval, 3), (self.factor_interval, 2))
        )


def has_few_digits(number: int, digits: int) -> bool:
    """Whether `number` has at most so many binary digits before its zeros: of n numbers that is
    about 2^(digits-1) log2 n.

    >>> [number for number in range(40) if has_few_digits(number, 2)]
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    num_zeros = max(number.bit_length() - digits, 0)
    return number >> num_zeros << num_zeros == number
