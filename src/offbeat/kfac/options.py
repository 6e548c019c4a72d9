"""What the Kronecker factors of a layer are taken over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Literal, SupportsFloat, TypeAlias

from offbeat.errors import ConfigError

Sharing = Literal["expand", "reduce"]
Grafting: TypeAlias = Literal["none", "floor", "layer"]
"""Whose length a layer's preconditioned gradient has (`kfac.precondition`); "none": its own."""

AUTO_STRIDE, MANY_POSITIONS, FEWEST_EXAMPLES = 4, 16, 8
"""What `sample_stride="auto"` means: a layer that sees many positions of each example knows enough
from a part of the examples.
"""


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
            Which ones changes from step to step; of a batch of fewer than n it is one. "auto":
            every fourth where a layer sees at least `MANY_POSITIONS` positions of each, but no
            fewer than `FEWEST_EXAMPLES` of a batch.
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
    sample_stride: int | Literal["auto"] = "auto"
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
            if (value := getattr(self, name)) != "auto" and value < lowest:
                raise ConfigError(f"{name} is {value}, allowed is {lowest} or more")

    def stride(self, num_examples: int, num_positions: int) -> int:
        """Of `num_examples`, of each of which a layer sees `num_positions`, every how-manieth is
        looked at.

        >>> options = FactorOptions()
        >>> options.stride(128, 1), options.stride(128, 64), options.stride(20, 64)
        (1, 4, 2)
        """
        if self.sample_stride != "auto":
            return max(min(self.sample_stride, num_examples), 1)
        if num_positions < MANY_POSITIONS:
            return 1
        return max(min(AUTO_STRIDE, num_examples // FEWEST_EXAMPLES), 1)


OfStep: TypeAlias = Callable[[int], float]
"""A number as a function of the step, counted from 0: the same on all ranks."""


class StepsApart:
    """The steps 0, i(0), i(0) + i(i(0)), ... for an interval i, which is a number or a function of
    the step. They depend on nothing but i, so that a resumed run has the same.

    Args:
        name: of the interval, for errors.
        interval: >= 1.
    """

    def __init__(self, name: str, interval: int | OfStep) -> None:
        self._name, self._interval = name, interval
        self._steps = [0]

    @property
    def first_interval(self) -> int:
        """How far the second of the steps is from the first one."""
        return self._after(0)

    def index(self, step: int) -> int | None:
        """Which of the steps `step` is, from 0; None if it is none of them."""
        if not callable(self._interval):
            return None if step % self._interval else step // self._interval
        while self._steps[-1] < step:
            self._steps.append(self._steps[-1] + self._after(self._steps[-1]))
        place = bisect_left(self._steps, step)
        return place if self._steps[place] == step else None

    def num_before(self, step: int) -> int:
        """How many of the steps come before `step`, which is one of them."""
        index = self.index(step)
        assert index is not None
        return index

    def check(self, step: int) -> None:
        """Raise `ConfigError` unless the interval at `step` is allowed."""
        self._after(step)

    def _after(self, step: int) -> int:
        if not callable(self._interval):
            return self._interval
        value = self._interval(step)
        number = _number_of(value)
        if not (isfinite(number) and number >= 1):
            raise ConfigError(
                f"{self._name} must be at least 1, got {value!r} of its schedule at step {step}"
            )
        return round(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACSettings:
    """What all K-FAC strategies do alike: how factors are taken, averaged, damped and used.

    Attributes:
        damping: as of `kfac.averages.damping_of`, > 0; or a function of the step.
        pi: the same.
        eigen: whether factors are decomposed instead of inverted. With `pi` their product is damped
            then, without it each.
        bfloat16: whether inverses are kept in bfloat16; None: where that costs nothing
            (`kfac.eigen.form_of`).
        decay: how much of the running averages to keep in each step with factors, in [0, 1).
        kl_clip: limit of a step's predicted change, > 0, or a function of the step; None: no limit.
        grafting: whose length a layer's preconditioned gradient has; with "layer" nothing limits
            it.
        factor_steps: the steps with factors.
        inverse_steps: the steps with inversions.
        ramp: whether the first steps, as many as an interval has, are denser.
        options: how factors are counted.
    """

    damping: float | OfStep
    pi: bool
    eigen: bool
    bfloat16: bool | None
    decay: float
    kl_clip: float | OfStep | None
    grafting: Grafting
    factor_steps: StepsApart
    inverse_steps: StepsApart
    ramp: bool
    options: FactorOptions

    def damping_at(self, step: int) -> float:
        """Raises `ConfigError` where a schedule's value is not allowed."""
        return positive_at("damping", self.damping, step)

    def kl_clip_at(self, step: int) -> float | None:
        """Raises `ConfigError` where a schedule's value is not allowed."""
        if self.kl_clip is None or self.grafting == "layer":
            return None
        return positive_at("kl_clip", self.kl_clip, step)

    def has_factors(self, step: int) -> bool:
        """Whether factors are averaged in `step`."""
        return self.factor_steps.index(step) is not None or (
            self.ramp and step < self.factor_steps.first_interval
        )

    def num_with_factors(self, step: int) -> int:
        """How many steps before `step`, which has factors, had them too."""
        if self.ramp:
            first = self.factor_steps.first_interval
            return step if step < first else first - 1 + self.factor_steps.num_before(step)
        return self.factor_steps.num_before(step)

    def has_inversions(self, step: int) -> bool:
        """Whether factors are inverted in `step`. On the ramp that is in steps 0, 1, 2,
        4, 8, ...
        """
        is_power_of_two = not step & (step - 1)
        return self.inverse_steps.index(step) is not None or (
            self.ramp and is_power_of_two and step < self.inverse_steps.first_interval
        )

    def is_noted(self, step: int) -> bool:
        """Whether the record says what happens in `step`: some steps with inversions, and some with
        factors, ever more rarely.
        """
        return any(
            (index := steps.index(step)) is not None and has_few_digits(index, digits)
            for steps, digits in ((self.inverse_steps, 3), (self.factor_steps, 2))
        )


def positive_at(name: str, value: float | OfStep, step: int) -> float:
    """The value of an option at `step`.

    Raises:
        ConfigError: its schedule has none that is greater than 0.
    """
    if not callable(value):
        return value
    found = value(step)
    number = _number_of(found)
    if not 0 < number < inf:
        raise ConfigError(
            f"{name} must be greater than 0, got {found!r} of its schedule at step {step}"
        )
    return number


def _number_of(value: object) -> float:
    """What a user's function has returned; nan, which no option may be, where it is no number."""
    return float(value) if isinstance(value, SupportsFloat) else nan


def has_few_digits(number: int, digits: int) -> bool:
    """Whether `number` has at most so many binary digits before its zeros: of n numbers that is
    about 2^(digits-1) log2 n.

    >>> [number for number in range(40) if has_few_digits(number, 2)]
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    num_zeros = max(number.bit_length() - digits, 0)
    return number >> num_zeros << num_zeros == number
