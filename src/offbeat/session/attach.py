"""`offbeat.attach`, the one line that puts a strategy into a training loop: what cannot work is
refused, ranks are connected, and a session begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offbeat.codec.jit import keep_freed_memory
from offbeat.codec.option_value import require_at_least, require_one_of, require_positive
from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError, UnsupportedError
from offbeat.session.loggers import LiveMetrics, MetricsLogger
from offbeat.session.session import ATTACHED_MODELS, Adopted, Finish, Session
from offbeat.session.sharded import Replica, check_sharded
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import build_strategy, parse_spec
from offbeat.transport.connect import (
    RETURN_VARIABLE,
    Connection,
    connect,
    is_returning,
    join_island,
    join_process_group,
    reconnect,
)
from offbeat.transport.driver import Driver
from offbeat.transport.grid import GlobalRanks, connect_island, in_run, meet


class SessionRecorder(Protocol):
    """What writes a session's steps down."""

    def begin(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the steps of `session`, which was just attached, until it is closed.
        Collective.

        Raises:
            RecordError: its directory is in use; on every rank.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachOverride:
    """What `offbeat run` does to each `attach` of the script that it runs.

    Attributes:
        replace: gives the strategy to be attached, of the one that the script asks for.
        wrap: puts a wrapper around the driver, as in `attach_through`.
        attached: is called with each session, its model and its optimizer.
    """

    replace: Callable[[Strategy | str], Strategy]
    wrap: Callable[[Driver], Driver]
    attached: Callable[[Session, torch.nn.Module, torch.optim.Optimizer], None]


_overrides: Final[list[AttachOverride]] = []


@contextmanager
def overriding(override: AttachOverride) -> Iterator[None]:
    """`attach` does what `override` says while the block runs."""
    _overrides.append(override)
    try:
        yield
    finally:
        _overrides.remove(override)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    scaler: torch.amp.GradScaler | None = None,
    finish: Finish = "average",
    bucket_mib: float | None = None,
    replica_check_interval: int = 100,
    recorder: SessionRecorder | None = None,
    loggers: Sequence[MetricsLogger] = (),
) -> Session:
    """Let `strategy` decide what ranks tell each other in training. Collective: every rank calls
    it.

    One that exchanges gradients decides what `param.grad` holds when `backward()` returns; one that
    exchanges weights, what the parameters hold when `optimizer.step()` returns.

    Rank 0's parameters and buffers are copied to all ranks. If torch.distributed is not initialised
    but the environment is that of torchrun or srun, it is initialised; with neither, the session
    trains alone, on the same code path. glibc is told to keep freed memory for the next step,
    unless a variable of malloc's is set, such as MALLOC_PERTURB_=0.

    Args:
        model: a plain module, not wrapped in DistributedDataParallel; or, with `mesh`, one that
            `fully_shard` has divided.
        optimizer: one of torch.optim's, over parameters of `model`; or what a framework such as
            Accelerate wraps around one, with that one in its attribute `optimizer`.
        strategy: such as `offbeat.GTopK(density=0.001)`, or as the command line names it,
            "gtopk:density=0.001"; the same on every rank.
        group: the ranks that take part; all by default. It is never used for communication.
        mesh: for a model that `fully_shard(..., mesh=mesh["shard"])` has divided inside a node: the
            other dimension of the same device mesh, `mesh["replicate"]`, along which replicas are
            trained. Every rank of the process group takes part.
        scaler: the GradScaler in use with AMP, so that residuals are kept unscaled and all ranks
            skip the same steps.
        finish: what a rank's model is when the session has ended well, with a strategy that
            averages weights: "average", the mean of all ranks' models, the same on every rank; or
            "keep", its own.
        bucket_mib: gradients that are exchanged leave in buckets of at most this size, > 0, as
            backward completes them. None: 25; 1 with A2SGD; all in one with those of which a part
            travels, since each bucket has a top-k of its own.
        replica_check_interval: where gradients are exchanged, compare the ranks' parameters after
            the first, the tenth, and every this many steps; 0 never does.
        recorder: writes the session's steps down, such as `offbeat.Recorder("runs/mine")`. Given
            on every rank or on none.
        loggers: what hears metrics while training runs, such as
            `offbeat.session.loggers.TensorBoardLogger("runs/tb")`: what `Session.log` is told, and
            every tenth step time, waits, bytes, residual and staleness. Rank 0's are used. They
            count steps from `attach` on: where a run resumes at step n, append
            `LiveMetrics(session, loggers, steps_before=n)` to rank 0's `session.observers` in their
            place.

    Raises:
        ConfigError, UnsupportedError: this cannot work, with the reason. Every rank raises; none is
            left waiting.
        MismatchError: the ranks disagree, with the first difference.
        RecordError: the recorder's directory is in use.
    """
    if recorder is not None and not hasattr(recorder, "begin"):
        raise ConfigError(
            f'recorder must be one such as offbeat.Recorder("runs/mine"), got {recorder!r}'
        )
    if not all(hasattr(logger, "log") for logger in loggers):
        raise ConfigError(
            "loggers must be a list of objects such as"
            f' offbeat.session.loggers.TensorBoardLogger("runs/tb"), got {loggers!r}'
        )
    override = _overrides[-1] if _overrides else None
    session = attach_through(
        (lambda driver: driver) if override is None else override.wrap,
        model,
        optimizer,
        strategy if override is None else override.replace(strategy),
        group=group,
        mesh=mesh,
        scaler=scaler,
        finish=finish,
        bucket_mib=bucket_mib,
        replica_check_interval=replica_check_interval,
    )
    if override is not None:
        override.attached(session, model, optimizer)
    if loggers and session.rank == 0:
        session.observers.append(LiveMetrics(session, loggers))
    if recorder is not None:
        try:
            recorder.begin(session, model, optimizer)
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
    return session


def attach_through(
    wrap: Callable[[Driver], Driver],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy | str,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    scaler: torch.amp.GradScaler | None = None,
    finish: Finish = "average",
    bucket_mib: float | None = None,
    replica_check_interval: int = 100,
    ignored: Collection[str] = (),
    adopted: Adopted = "model",
    finds_islands: bool = False,
) -> Session:
    """`offbeat.attach` with a wrapper around the transport: to delay or to fail. Collective.

    Args:
        wrap: puts the wrapper around the driver that it is given.
        model, strategy, group, mesh, scaler, finish, bucket_mib, replica_check_interval: have the
            meaning that they have in `offbeat.attach`.
        optimizer: the user's; None where updates are made in another way, for strategies that need
            none.
        ignored: names of parameters and buffers that are each rank's own affair: they are neither
            copied nor exchanged nor compared.
        adopted: what all ranks take of rank 0's model at first.
        finds_islands: whether the model is sharded and the ranks ask each other who has the same
            shards, without `mesh`.

    Raises:
        ConfigError, UnsupportedError: this cannot work, with the reason. Every rank raises; none is
            left waiting.
        MismatchError: the ranks disagree, with the first difference.
    """
    _refuse_attached(model)
    _refuse_default_device()
    keep_freed_memory()
    returns = is_returning()
    if optimizer is not None:
        optimizer = unwrapped(optimizer)
    if not returns:
        join_process_group()
    grid = None
    over_islands = dist.is_initialized() and (mesh is not None or finds_islands)
    if over_islands and mesh is not None and getattr(mesh, "ndim", 0) == 1:
        group = mesh.get_group()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    refusal: OffbeatError | None = None
    try:
        require_one_of("finish", finish, get_args(Finish))
        require_at_least("replica_check_interval", replica_check_interval, 0)
        if bucket_mib is not None:
            require_positive("bucket_mib", bucket_mib)
        strategy = strategy_of(strategy)
        _check(model, optimizer, strategy, world_size=world_size, returns=returns)
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        check_sharded(model, strategy, mesh, enabled, finds_islands=finds_islands)
    except OffbeatError as error:
        refusal = error
    if over_islands:
        first: Any = None if refusal is not None else next(model.parameters())
        # The ranks among which `fully_shard` has divided the model.
        island = None if first is None else first.device_mesh.get_group()
        grid = meet(island, group, refusal=refusal)
    if refusal is not None and (world_size == 1 or returns):
        raise refusal
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    device = next((p.device for p in parameters if p.is_cuda), None)
    replica = None
    if grid is None:
        connection = reconnect() if returns else connect(group, device=device)
    else:
        place = in_run(grid) if returns else grid
        # Those who come later find the column that leads.
        leads = place.island.index(place.rank) == 0
        connection = (
            reconnect(place.column.index(place.rank))
            if returns
            else connect(grid.column, device=device, founds=leads)
        )
    try:
        if grid is not None:
            replica = Replica(model, place, connect_island(grid.island, place.island))
            named = GlobalRanks(connection.driver, place.column)
            connection = Connection(driver=named, network=connection.network)
        return Session(
            model,
            optimizer,
            cast(Strategy, strategy),  # one that was refused is not looked at
            connection=connection,
            wrap=wrap,
            scaler=scaler,
            refusal=refusal,
            returns=returns,
            finish=finish,
            bucket_mib=bucket_mib,
            replica_check_interval=replica_check_interval,
            ignored=ignored,
            adopted=adopted,
            replica=replica,
        )
    except BaseException as error:
        # All ranks come to a refusal and to the difference between ranks alike. Of anything else
        # the others must hear whose fault it was before the connections go: one that is slower
        # would take this rank for the cause.
        if error is not refusal and not isinstance(error, MismatchError):
            blame = error.rank if isinstance(error, PeerError) else None
            with suppress(OffbeatError):
                connection.driver.abort(f"{type(error).__name__}: {error}", blame=blame)
        connection.driver.close()
        if replica is not None:
            replica.island.driver.close()
        raise


def strategy_of(given: Strategy | str) -> Strategy:
    """A strategy that is given by itself or by its name. Raises `ConfigError`: it is neither, or
    there is no such strategy or option of it.
    """
    strategy = build_strategy(*parse_spec(given)) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy must be one such as offbeat.GTopK(density=0.001), or its name, got"
            f" {given!r}; did you pass the class?"
        )
    return strategy


def island_mesh(device_type: str, num_shards: int) -> DeviceMesh:
    """The mesh of a run whose islands are of `num_shards` ranks: give `mesh["shard"]` to
    `fully_shard` and `mesh["replicate"]` to `attach`. Collective.

    A worker that was started to come back (`OFFBEAT_RETURN`) gets that of its island, once all of
    that have come. `init_device_mesh` does the same for all others.

    Args:
        device_type: "cuda" or "cpu".
        num_shards: of the ranks with neighbouring numbers that hold a replica together.

    Raises:
        ConfigError: the number of ranks is no multiple of `num_shards`, or this worker cannot come
            back.
    """
    world_size = num_shards
    if is_returning():
        join_island(num_shards)
    else:
        world_size = dist.get_world_size() if join_process_group() else 1
    if world_size % num_shards:
        raise ConfigError(
            f"{world_size} ranks cannot be islands of {num_shards}; start a multiple of that"
        )
    shape = (world_size // num_shards, num_shards)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the steps, of one that a framework has wrapped.

    Accelerate's is a `torch.optim.Optimizer` by its class and was never initialised as one; its
    `step` calls that of the optimizer inside. A wrapper that takes hooks is left alone, since it
    may do more in its step than the inner one does.
    """
    while not _takes_hooks(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def _takes_hooks(optimizer: object) -> bool:
    """Whether step hooks can be put on `optimizer`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def _refuse_attached(model: torch.nn.Module) -> None:
    """Raise at once, without a word to the peers: where one rank alone attaches again by mistake
    nobody else comes to hear of it.
    """
    if not isinstance(model, torch.nn.Module):
        return  # which is refused below
    taken = {id(parameter) for attached in ATTACHED_MODELS for parameter in attached.parameters()}
    if any(id(parameter) in taken for parameter in model.parameters()):
        raise ConfigError(
            "the model, or a part of it, is attached already; close that session first"
        )


def _refuse_default_device() -> None:
    """Raise at once: the ranks could not even be connected to tell each other."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise UnsupportedError(
            f"the default device is {device}, so what a session keeps on the host, such as its"
            " messages, would be made there; call torch.set_default_device('cpu') before training"
            " begins, and name the device of what the loop makes, as in torch.randn(...,"
            f" device='{device}')"
        )


def _check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategy: Strategy,
    *,
    world_size: int,
    returns: bool,
) -> None:
    """Refuse what cannot work, before anything is sent."""
    if returns and not strategy.begins_as(returns=True).survives_death:
        raise ConfigError(
            f"{RETURN_VARIABLE} is set, but a run with {strategy.name} ends with the first worker"
            " that does, so none can join it; start all workers again, or use a strategy that goes"
            " on, such as offbeat.WAGMA()"
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            where = f"holds, as {name!r}, a" if name else "is wrapped in"
            raise UnsupportedError(
                f"the model {where} DistributedDataParallel, which exchanges gradients itself; pass"
                " the plain model that is inside it, and call that one in your loop"
            )
    if optimizer is not None or strategy.needs_optimizer:
        _check_optimizer(optimizer, strategy)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"parameter {name!r} has no shape yet; run the model once on a sample batch before"
                " attaching"
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"parameter {name!r} is on the meta device, so it has no values; call"
                " model.to_empty(device=...) and initialise or load the model before attaching"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "the model has no parameter that requires a gradient, so there is nothing to train"
        )
    if optimizer is not None:
        known = {id(parameter) for parameter in parameters.values()}
        foreign = sum(
            id(parameter) not in known
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if foreign:
            raise ConfigError(
                f"{foreign} of the optimizer's parameters are not the model's; build the optimizer"
                " from model.parameters(), after moving the model to its device; where it steps"
                " several models, give each an optimizer of its own, or attach, or wrap, one module"
                " that holds all of them"
            )
        strategy.check(model, optimizer)
    # Such a worker does not know yet how many there are; the others have passed this check.
    if not returns:
        strategy.check_world(world_size)


def _check_optimizer(optimizer: torch.optim.Optimizer | None, strategy: Strategy) -> None:
    """Refuse an optimizer that no session, or none with `strategy`, could see the steps of."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer must be one of torch.optim's or made like them, got"
            f" {type(optimizer).__name__}"
        )
    if not _takes_hooks(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} takes no step hooks, so this session would not see its"
            " steps; pass the optimizer that it wraps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS runs several backward passes inside step(), each rank as many as it likes; use"
            " another optimizer"
        )
    if strategy.replicas_differ and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            "ZeroRedundancyOptimizer lets one rank step each parameter and sends it to all, so"
            f" nothing is left for {strategy.name} to average; use the optimizer that it wraps"
        )
