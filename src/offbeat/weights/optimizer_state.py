"""The local optimizers' own memory (momentum, second moments), averaged as the weights are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, Collective
from offbeat.weights.model_weights import average_

Have = dict[str, list[bool]]
"""By name of a state such as "momentum_buffer": which parameters have it, in the model's order."""


def average_optimizer_state_(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    *,
    driver: Driver,
    stream: Stream,
    weight: float,
) -> float:
    """Replace every state of a parameter's own shape and a real type by its weighted mean over the
    ranks that have it.

    A rank on which a parameter never had a gradient has no state for it; it counts for nothing and
    gets none. Step counters and states of other shapes stay local. Collective.

    Returns:
        Seconds as `average_` counts them.

    Raises:
        NonFiniteError: as `average_`.
    """
    tensors = list(parameters.values())
    states = [
        {
            key: value
            for key, value in dense_state(optimizer, parameter).items()
            if isinstance(value, torch.Tensor)
            and value.shape == parameter.shape
            and value.is_floating_point()
            and value.dim()
        }
        for parameter in tensors
    ]
    mine: Have = {
        key: [key in state for state in states]
        for key in sorted({key for state in states for key in state})
    }
    somewhere = driver.run(_union(mine, len(tensors)), stream.next())
    places = [(key, i) for key, have in somewhere.items() for i in np.flatnonzero(have).tolist()]
    return average_(
        [states[i].get(key) for key, i in places],
        [tensors[i] for _, i in places],
        driver=driver,
        stream=stream,
        weight=weight,
    )


def dense_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """The state of `parameter`. What is sparse in it becomes dense for good: torch's SGD keeps such
    a momentum.

    It has every row that ever had a gradient, so this takes no more memory in the end.
    """
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_sparse:
            state[key] = value.to_dense()
    return state


def _union(mine: Have, num_parameters: int) -> Collective[Have]:
    """What any rank has, with names in the same order on all of them."""
    packed = {key: np.packbits(have).tobytes().hex() for key, have in mine.items()}
    answers = [
        json.loads(bytes(payload)) for payload in (yield AllGather(json.dumps(packed).encode()))
    ]
    union: Have = {}
    for key in sorted({key for answer in answers for key in answer}):
        bits = np.zeros(num_parameters, dtype=np.bool_)
        for answer in answers:
            raw = np.frombuffer(bytes.fromhex(answer.get(key, "")), dtype=np.uint8)
            bits |= np.unpackbits(raw, count=num_parameters).astype(np.bool_)
        union[key] = bits.tolist()
    return union
