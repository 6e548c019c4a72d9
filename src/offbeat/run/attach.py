"""`offbeat.attach`: the one line that puts a strategy into a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from offbeat.session.attach import attach_through
from offbeat.session.live_metrics import LiveMetrics
from offbeat.session.loggers import MetricsLogger
from offbeat.session.session import Finish, Session
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachOverride:
    """What `offbeat run` does to each `attach` of the script that it runs.

    Attributes:
        replace: gives the strategy to be attached, of the one that the script asks for.
        wrap: as in `attach_through`.
        attached: is called with each session, its model and its optimizer.
    """

    replace: Callable[[Strategy], Strategy]
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
    strategy: Strategy,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    finish: Finish = "average",
    record: str | Path | None = None,
    loggers: Sequence[MetricsLogger] = (),
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
        optimizer: one of torch.optim's, over parameters of `model`; or what a framework such as
            Accelerate wraps around one, with that one in its attribute `optimizer`.
        strategy: such as `offbeat.GTopK(density=0.001)`; the same on every rank.
        group: the ranks that take part; all by default. It is never used for communication.
        scaler: the GradScaler in use with AMP, so that residuals are kept unscaled and all ranks
            skip the same steps.
        finish: what a rank's model is when the session has ended well, with a strategy that
            averages weights: "average", the mean of all ranks' models, the same on every rank; or
            "keep", its own.
        record: directory of a record of the steps, as `offbeat train` writes one, for `offbeat
            report` and `offbeat trace`; what `Session.log` is told is in it. The same on every
            rank; on several hosts a file system that all of them share. Needs `offbeat[lab]`.
        loggers: what hears metrics while training runs, such as
            `offbeat.session.loggers.TensorBoardLogger("runs/tb")`: what `Session.log` is told, and
            every tenth step time, waits, bytes, residual and staleness. Rank 0's are used.

    Raises:
        ConfigError, UnsupportedError: this cannot work, with the reason. Every rank raises; none is
            left waiting.
        MismatchError: the ranks disagree, with the first difference.
        RecordError: the directory of `record` is in use.
    """
    override = _overrides[-1] if _overrides else None
    session = attach_through(
        (lambda driver: driver) if override is None else override.wrap,
        model,
        optimizer,
        strategy if override is None else override.replace(strategy),
        group=group,
        scaler=scaler,
        finish=finish,
    )
    if override is not None:
        override.attached(session, model, optimizer)
    if loggers and session.rank == 0:
        session.observers.append(LiveMetrics(session, loggers))
    if record is not None:
        # Of the lab, which need not be installed where nothing is recorded.
        from offbeat.run.own_record import record_session

        try:
            record_session(session, model, optimizer, Path(record))
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
    return session
