"""What the codecs compute that strategies can name, timed on this machine's processor: messages of
all devices are laid out there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch

from offbeat.codec.index_codecs import INDEX_CODECS, IndexCodec
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.codec.value_codecs import ValueCodec
from offbeat_lab.plan.clock import usual_s
from offbeat_lab.plan.profile import SELECTED_DENSITY, CodecCost

_ENTRIES: Final = 1 << 16


def time_codecs() -> tuple[CodecCost, ...]:
    """Value codecs and index codecs by name, on entries at random places at `SELECTED_DENSITY`."""
    draws = np.random.default_rng(0)
    indices = np.cumsum(draws.geometric(SELECTED_DENSITY, _ENTRIES)).astype(np.int64)
    values = draws.standard_normal(_ENTRIES).astype(np.float32)
    num_elements = int(indices[-1]) + 1

    def code_indices(codec: IndexCodec) -> None:
        layout, coded = codec.encode(indices, num_elements)
        codec.decode(layout, coded.view(np.uint8), _ENTRIES, num_elements)

    def code_values(codec: ValueCodec) -> None:
        codec.decode(codec.encode(values).view(np.uint8), _ENTRIES)

    return (
        *(_cost(name, partial(code_values, codec)) for name, codec in VALUE_CODECS.items()),
        *(_cost(name, partial(code_indices, codec)) for name, codec in INDEX_CODECS.items()),
    )


def _cost(name: str, both: Callable[[], None]) -> CodecCost:
    both()  # the first call compiles
    return CodecCost(name=name, s_per_entry=usual_s(both, torch.device("cpu")) / _ENTRIES)
