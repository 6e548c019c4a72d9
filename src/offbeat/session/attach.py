"""`attach`: what cannot work is refused, ranks are connected, and a session begins."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from offbeat.errors import ConfigError, OffbeatError, UnsupportedError
from offbeat.session.session import ATTACHED_MODELS, Session
from offbeat.strategies.base import Strategy
from offbeat.transport.connect import (
    RETURN_VARIABLE,
    connect,
    is_returning,
    join_process_group,
    reconnect,
)
from offbeat.transport.driver import Driver


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Session:
    """Let `strategy` decide what ranks tell each other in training. Collective: every rank calls
    it.

    One that exchanges gradients decides what `param.grad` holds when `backward()` returns; one that
    exchanges weights, what the parameters hold when `optimizer.step()` returns.

    Rank 0's parameters and buffers are copied to all ranks. If torch.distributed is not initialised
    but the environment is that of torchrun or srun, it is initialised; with neither, the session
    trains alone, on the same code path.

    Args:
        model: a plain module: not wrapped in DistributedDataParallel, not sharded.
        optimizer: one of torch.optim's, over parameters of `model`.
        strategy: such as `offbeat.GTopK(density=0.001)`; the same on every rank.
        group: the ranks that take part; all by default. It is never used for communication.
        scaler: the GradScaler in use with AMP, so that residuals are kept unscaled and all ranks
            skip the same steps.

    Raises:
        ConfigError, UnsupportedError: this cannot work, with the reason. Every rank raises; none is
            left waiting.
        MismatchError: the ranks disagree, with the first difference.
    """
    return attach_through(
        lambda driver: driver, model, optimizer, strategy, group=group, scaler=scaler
    )


def attach_through(
    wrap: Callable[[Driver], Driver],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Session:
    """`attach` with a wrapper of `offbeat.transport.wrappers` around the transport: to delay, to
    fail, to record.

    Args:
        wrap: puts the wrapper around the driver that it is given.
        model, optimizer, strategy, group, scaler: as in `attach`, which also says what is raised.
    """
    returns = is_returning()
    if not returns:
        join_process_group()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    refusal: OffbeatError | None = None
    try:
        _check(model, optimizer, strategy, world_size=world_size, returns=returns)
    except OffbeatError as error:
        refusal = error
    if refusal is not None and (world_size == 1 or returns):
        raise refusal
    cuda = any(parameter.is_cuda for parameter in model.parameters())
    connection = reconnect() if returns else connect(group, cuda=cuda)
    try:
        return Session(
            model,
            optimizer,
            strategy,
            connection=connection,
            wrap=wrap,
            scaler=scaler,
            refusal=refusal,
            returns=returns,
        )
    except BaseException:
        connection.driver.close()
        raise


def _check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    world_size: int,
    returns: bool,
) -> None:
    """Refuse what cannot work, before anything is sent."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy must be one such as offbeat.GTopK(density=0.001), got {strategy!r}; did you"
            " pass the class?"
        )
    if returns and not strategy.survives_death:
        raise ConfigError(
            f"{RETURN_VARIABLE} is set, but a run with {strategy.name} ends with the first worker"
            " that does, so none can join it; start all workers again, or use a strategy that goes"
            " on, such as offbeat.WAGMA()"
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "the model is wrapped in DistributedDataParallel, which exchanges gradients itself;"
            " pass model.module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer must be one of torch.optim's or made like them, got"
            f" {type(optimizer).__name__}"
        )
    parameters = dict(model.named_parameters())
    sharded = [
        name for name, parameter in parameters.items() if type(parameter.data).__name__ == "DTensor"
    ]
    if sharded or type(model).__name__ == "FullyShardedDataParallel":
        raise UnsupportedError(
            f"the model is sharded (FSDP2 or DTensor{f', see {sharded[0]!r}' if sharded else ''});"
            " offbeat needs every rank to hold whole parameters: pass the model before"
            " fully_shard()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS runs several backward passes inside step(), each rank as many as it likes; use"
            " another optimizer"
        )
    lazy = next(
        (
            name
            for name, p in parameters.items()
            if isinstance(p, torch.nn.parameter.UninitializedParameter)
        ),
        None,
    )
    if lazy is not None:
        raise UnsupportedError(
            f"parameter {lazy!r} has no shape yet; run the model once on a sample batch before"
            " attaching"
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "the model has no parameter that requires a gradient, so there is nothing to train"
        )
    known = {id(parameter) for parameter in parameters.values()}
    foreign = sum(
        id(parameter) not in known
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if foreign:
        raise ConfigError(
            f"{foreign} of the optimizer's parameters are not the model's; build the optimizer from"
            " model.parameters(), after moving the model to its device"
        )
    taken = {id(parameter) for attached in ATTACHED_MODELS for parameter in attached.parameters()}
    if any(id(parameter) in taken for parameter in parameters.values()):
        raise ConfigError(
            "the model, or a part of it, is attached already; close that session first"
        )
    strategy.check(model, optimizer)
    if (
        not returns
    ):  # such a worker does not know yet how many there are; the others have passed this check
        strategy.check_world(world_size)
