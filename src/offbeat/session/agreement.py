"""Before anything else is sent: do all ranks mean the same thing?

Each rank describes its model, optimizer and strategy, or says why it refuses; everyone sees every
description and comes to the same verdict. So a mistake on one rank is one clear error on all of
them, and nobody hangs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from offbeat.collectives.dense import gather_values
from offbeat.errors import MismatchError, OffbeatError
from offbeat.gradients.replica_check import hyperparameters_of
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Broadcast, Collective

Description = Mapping[str, Any]


def describe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy,
    *,
    session: Mapping[str, object],
    ignored: Collection[str] = (),
) -> Description:
    """What must be the same on all ranks, as JSON.

    Args:
        model: the root module.
        optimizer: the user's, over parameters of `model`; None: there is none.
        strategy: described by its options.
        session: its options.
        ignored: names of parameters and buffers that may differ.
    """
    return {
        "model parameters": {
            name: (
                f"{list(p.shape)} {p.dtype} {p.device.type}"
                f" {'trainable' if p.requires_grad else 'frozen'}"
            )
            for name, p in model.named_parameters()
            if name not in ignored
        },
        "model buffers": {
            name: f"{list(b.shape)} {b.dtype} {b.device.type}"
            for name, b in model.named_buffers()
            if name not in ignored
        },
        "optimizer": {
            "class": type(optimizer).__qualname__,
            **({} if optimizer is None else _hyperparameters(model, optimizer)),
        },
        "strategy": {
            "options": repr(strategy),
            **{name: str(value) for name, value in session.items()},
        },
    }


def _hyperparameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    described: dict[str, str] = {}
    for number, options in enumerate(hyperparameters_of(optimizer)):
        parameters = optimizer.param_groups[number]["params"]
        options["params"] = str([names[id(parameter)] for parameter in parameters])
        described |= {f"group {number} {name}": value for name, value in options.items()}
    return described


def agree(
    driver: Driver,
    stream: Stream,
    mine: Description | OffbeatError,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare every rank's description with rank 0's. Collective. `ranks`: what the driver's ranks
    are called in errors; None: as they are.

    Raises:
        OffbeatError: this rank's own refusal, if it had one.
        MismatchError: another rank refused, or a description differs. On every rank.
    """
    answers = driver.run(gather_values(answer_of(mine)), stream.next())
    names = range(driver.world_size) if ranks is None else ranks
    require_agreement(mine, dict(zip(names, answers, strict=True)))


def answer_of(mine: Description | OffbeatError) -> dict[str, Any]:
    """What this rank says to the others, of JSON's kinds."""
    return {"refusal": str(mine)} if isinstance(mine, OffbeatError) else {"description": mine}


def require_agreement(
    mine: Description | OffbeatError, answers: Mapping[int, Mapping[str, Any]]
) -> None:
    """Compare what all ranks said, `answers` by rank, with what the first of them did. The errors
    are those of `agree`.
    """
    if isinstance(mine, OffbeatError):
        raise mine
    for rank, other in answers.items():
        if "refusal" in other:
            raise MismatchError(f"rank {rank} refused: {other['refusal']}")
    first = min(answers)
    for rank, other in answers.items():
        difference = _first_difference(answers[first]["description"], other["description"], first)
        if difference:
            raise MismatchError(
                f"rank {rank} differs from rank {first} in {difference}; every rank must build the"
                " same"
            )


def _first_difference(reference: Description, other: Description, first: int) -> str | None:
    for section, expected in reference.items():
        actual = other.get(section, {})
        for name in [*expected, *(name for name in actual if name not in expected)]:
            left, right = expected.get(name, "absent"), actual.get(name, "absent")
            if left != right:
                return f"its {section}, {name!r}: {right} there, {left} on rank {first}"
    return None


def adopt_rank_0(driver: Driver, stream: Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite `tensors` with rank 0's, on every rank. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            driver.run(_broadcast(tensor), stream.next())


def adopt_state_of_rank_0(
    driver: Driver,
    stream: Stream,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
) -> None:
    """Give the optimizer rank 0's state, also of parameters that only some ranks have used, and
    the numbers in its groups, where some keep what they have learned. Collective.
    """
    mine = {
        name: {
            key: (list(value.shape), str(value.dtype).removeprefix("torch."), value.is_cpu)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        for name, parameter in parameters.items()
    }
    kept = []
    numbers = [
        {key: value for key, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
    states, options = driver.run(gather_values([mine, numbers]), stream.next())[0]
    for group, theirs in zip(optimizer.param_groups, options, strict=True):
        group |= theirs
    for name, described in states.items():
        parameter = parameters[name]
        if described.keys() != mine[name].keys():  # one of the two has not used it
            optimizer.state[parameter] = {
                key: torch.zeros(
                    shape, dtype=getattr(torch, dtype), device="cpu" if on_cpu else parameter.device
                )
                for key, (shape, dtype, on_cpu) in described.items()
            }
        kept += [optimizer.state[parameter][key] for key in described]
    adopt_rank_0(driver, stream, kept)


def _broadcast(tensor: torch.Tensor) -> Collective[None]:
    dense = tensor.detach().contiguous()
    # As bytes: backends do not know every type.
    yield Broadcast(dense.reshape(-1).view(torch.uint8), 0)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
