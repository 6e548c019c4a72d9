"""What the strategies that average weights have in common: what of a model is averaged, and steps
that are skipped alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from offbeat.averaging.led_island import led_by_first_rank
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.topk_codec import WeightCodec
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.gradients.gradient_guard import GradientGuard
from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import WEIGHT_CODECS
from offbeat.weights.model_weights import ModelWeights, choose_buffers
from offbeat.weights.optimizer_state import divides_by_squares

ChangesCodec: TypeAlias = WeightCodec | Annotated[str, WEIGHT_CODECS] | None
"""An option `codec`: how changes of weights travel."""


@dataclass(frozen=True, kw_only=True)
class AveragingStrategy(Strategy):
    """Every rank steps by its own gradient, and weights are averaged afterwards.

    Floating-point buffers, such as BatchNorm's running statistics, are averaged with the weights.
    """

    replicas_differ: ClassVar[bool] = True
    acts_at_steps: ClassVar[bool] = True
    changes_gradients: ClassVar[bool] = False
    """Whether what is exchanged besides weights is gradients, before a step."""
    sends_differences: ClassVar[bool] = False
    """Whether a codec writes differences to what peers hold of this rank's weights, or to a model
    that all of them hold.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = self.weight_codec if self.sends_differences else None
        if codec is not None and (codec.decay != 1 or codec.clip_to_median):
            raise ConfigError(
                f"codec={codec!r} lets what is owed fade or clips to the median of all ranks, and"
                " what does not travel here is part of the next difference to what other ranks"
                " know; use a WeightCodec with decay=1.0 and clip_to_median=False"
            )

    @property
    def weight_codec(self) -> WeightCodec | None:
        """How changes of weights travel, by an option `codec`; None: weights travel whole."""
        codec: WeightCodec | str | None = getattr(self, "codec", None)
        return WEIGHT_CODECS[codec] if isinstance(codec, str) else codec

    @abstractmethod
    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        """What exchanges `weights`."""

    def build(self, context: Context) -> Sequence[Callback]:
        if context.has_scaler:
            raise UnsupportedError(
                f"{type(self).__name__} counts optimizer steps, and a GradScaler skips some of them"
                " on one rank and not on the others; use bfloat16 autocast, which needs no scaler,"
                " or a strategy that exchanges gradients"
            )
        chosen = context.chosen_buffers
        weights = ModelWeights(
            parameters=context.parameters,
            buffers=context.buffers,
            chosen=choose_buffers(context.buffers()) if chosen is None else chosen,
        )
        # First: a gradient that is not finite must be removed before others look at it.
        guard = GradientGuard(context)
        if context.island.size > 1 and self.survives_death:  # whoever goes on alone decides alone
            led = led_by_first_rank(
                context, weights, self.callbacks, changes_gradients=self.changes_gradients
            )
            return [guard, led]
        return [guard, *self.callbacks(context, weights)]


def inform_of_short_steps(context: Context) -> None:
    """Say so where ranks divide their steps by squares of their own gradients.

    With four workers texts have up to 7% more bits at the learning rate that suits `AllReduce`
    (`benchmarks/studies/adam_rules.py`, WAGMA).
    """
    size, optimizer = context.driver.world_size, context.optimizer
    if size > 1 and optimizer is not None and divides_by_squares(optimizer):
        context.notices.inform(
            f"each worker's {type(optimizer).__name__} divides by squares of its own gradients,"
            f" which hold {size} times the noise of the mean's, so that steps are shorter than"
            " AllReduce's at the same learning rate; one that is"
            f" {size**0.25:.2g} to {size**0.5:.2g} times as high may serve better"
        )
