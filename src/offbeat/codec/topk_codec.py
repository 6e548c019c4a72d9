"""How the largest entries of a vector travel: what picks them, and how values and indices are
written. One object, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from offbeat.codec.few_bits import E3M0Values, LevelValues, LinearValues, SignValues
from offbeat.codec.index_codecs import INDEX_CODECS, IndexCodec
from offbeat.codec.option_value import OptionValue
from offbeat.codec.selectors import Exact, KeptThreshold, Selector, ThresholdReuse
from offbeat.codec.sidco import SIDCo
from offbeat.codec.value_codecs import BFloat16Values, Float8Values, Float32Values, ValueCodec
from offbeat.codec.wire import Wire
from offbeat.errors import CheckpointError, ConfigError, nearest

SELECTORS: Final[Mapping[str, Selector]] = {
    "exact": Exact(),
    "reuse": ThresholdReuse(),
    "sidco": SIDCo(),
    "kept": KeptThreshold(),
}
"""Selectors by the names that options may use for them."""

VALUE_CODECS: Final[Mapping[str, ValueCodec]] = {
    "float32": Float32Values(),
    "bfloat16": BFloat16Values(),
    "float8": Float8Values(),
    "linear8": LinearValues(8),
    "linear4": LinearValues(4),
    "linear2": LinearValues(2),
    "stochastic4": LinearValues(4, stochastic=True),
    "e3m0": E3M0Values(),
    "levels4": LevelValues(4),
    "levels2": LevelValues(2),
    "sign": SignValues(),
}
"""Value codecs by the names that options may use for them."""

_KINDS: Final[dict[str, tuple[dict[str, Any], type[Any]]]] = {
    "selector": (dict(SELECTORS), Selector),
    "values": (dict(VALUE_CODECS), ValueCodec),
    "indices": (dict(INDEX_CODECS), IndexCodec),
}


class TopKCodec(OptionValue):
    """The largest entries of a vector, as they travel.

    Args:
        selector: a name of `SELECTORS`, which docs/methods/topk.md describes, or a `Selector` of
            your own.
        values: a name of `VALUE_CODECS`, such as "float32", "bfloat16", "float8" (4, 2 or 1 byte),
            "linear4" or "sign" (4 bits or 1), or a `ValueCodec` of your own; what rounding loses is
            owed.
        indices: "gaps" between indices in whole bytes or as Rice codes, or a bit for each element,
            or plain indices, whichever is shortest; or an `IndexCodec` of your own.
    """

    def __init__(
        self,
        *,
        selector: Selector | str = "exact",
        values: ValueCodec | str = "float32",
        indices: IndexCodec | str = "gaps",
    ) -> None:
        self.selector: Selector = _object("selector", selector)
        self.values: ValueCodec = _object("values", values)
        self.indices: IndexCodec = _object("indices", indices)

    @classmethod
    def of(cls, codec: TopKCodec | str) -> TopKCodec:
        """An object as it is; or the one that text such as "bfloat16" or "reuse+float8" names.

        >>> TopKCodec.of("reuse+float8") == TopKCodec(selector="reuse", values="float8")
        True
        """
        if isinstance(codec, TopKCodec):
            return codec
        chosen: dict[str, str] = {}
        for name in str(codec).split("+"):
            kind = next((kind for kind, (known, _) in _KINDS.items() if name in known), None)
            if kind is None or kind in chosen:
                names = [name for known, _ in _KINDS.values() for name in known]
                raise ConfigError(
                    f"codec must be a TopKCodec, or of {', '.join(map(repr, names))} one that"
                    " selects, one of values and one of indices, joined by '+', such as"
                    f" 'reuse+float8'; got {codec!r}{nearest(name, names)}"
                )
            chosen[kind] = name
        return cls(**chosen)

    def wire(self, num_elements: int, *, num_parameters: int, dtype: np.dtype[np.floating]) -> Wire:
        """Layout of the messages of a vector of so many elements of `dtype`, which are the
        gradients of so many parameters.
        """
        return Wire(
            num_elements=num_elements,
            num_parameters=num_parameters,
            dtype=dtype,
            values=self.values.suited_to(dtype),
            indices=self.indices,
        )


class WeightCodec(OptionValue):
    """The largest entries of the changes of weights, as they travel. The others are owed.

    Args:
        density: fraction of entries that travel, in (0, 1].
        decay: what is owed is multiplied by it with each exchange, in (0, 1]; below 1 that forgets
            changes which waited for long.
        entries: which ones, and how they are written: a `TopKCodec`, or names of its parts such as
            "bfloat16" or "reuse+float8".
        clip_to_median: whether what a rank sends counts for no more than the median of all ranks'
            norms; needs a density below 1.
    """

    def __init__(
        self,
        *,
        density: float,
        decay: float = 1.0,
        entries: TopKCodec | str = "float32",
        clip_to_median: bool = False,
    ) -> None:
        for name, value in (("density", density), ("decay", decay)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} of a WeightCodec must be in (0, 1], got {value!r}")
        if clip_to_median and density == 1:
            raise ConfigError(
                "clip_to_median needs a density below 1: only then each rank sees what every other"
                " one sends"
            )
        self.density, self.decay, self.entries = density, decay, TopKCodec.of(entries)
        self.clip_to_median = clip_to_median


class AllChanges(WeightCodec):
    """All changes, in few bits; what rounding loses is owed.

    Args:
        values: how they are written: a name of `VALUE_CODECS`.
    """

    def __init__(self, values: str) -> None:
        super().__init__(density=1.0, entries=TopKCodec(values=values))


def _object(name: str, value: object) -> Any:
    by_name, kind = _KINDS[name]
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in by_name:
        return by_name[value]
    raise ConfigError(
        f"{name} must be one of {', '.join(map(repr, by_name))}, or a {kind.__name__}, got"
        f" {value!r}{nearest(str(value), by_name)}"
    )


def another_codec() -> CheckpointError:
    """Says that what a state owes of changes of weights would be lost, or is not there."""
    return CheckpointError(
        "what is owed of changes of weights was saved with another model or codec; resume with the"
        " same ones"
    )
