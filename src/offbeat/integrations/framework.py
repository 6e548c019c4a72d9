"""A session in the training loop of a framework.

    forward pass without gradients,      the mean of all ranks' models is put into the parameters
    outside of training mode
    forward pass with gradients,         this rank's own weights are put back
    optimizer.step()

So validation sees what the ranks' models stand for, and so does what is saved, without a word of
the framework's. Where ranks hold the same model anyway nothing is moved.

Some frameworks wrap the model in DistributedDataParallel before anybody can object. Its exchange is
switched off then, by the names by which a loop would do it, and its `no_sync` is the session's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch.distributed.algorithms import JoinHook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import offbeat
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import UnsupportedError
from offbeat.run.evaluation import EvaluationWeights
from offbeat.session.attach import strategy_of, unwrapped
from offbeat.session.sharded import is_sharded
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.registry import REGISTRY
from offbeat.strategies.sparse_gradient import SparseGradientStrategy
from offbeat.torch_private import active_ddp_module


class _RefusedJoin(JoinHook):
    """In the place of that of a DDP model which exchanges nothing: it would wait for its peers'
    next forward pass, and they wait for this rank in the session's exchange.
    """

    @override
    def main_hook(self) -> None:
        raise UnsupportedError(
            "this rank runs out of batches before its peers, and join_uneven_inputs and"
            " Join([model]) count on DistributedDataParallel's own exchange, whose place a session"
            " takes; give every rank equally many batches, as even_batches=True does"
        )


class FrameworkSession:
    """A session, and what a framework's loop does not say by itself. A context manager that closes
    itself. Made collectively, and refused as by `offbeat.attach`.

    Args:
        model: to be attached.
        optimizer: that steps it, or what the framework has wrapped around that one, perhaps with
            its scaler.
        strategy: as for `offbeat.attach`.
        scaler: of losses, where the optimizer has none.
        options: further ones of `offbeat.attach`.

    Attributes:
        session: attached.
        model: as given.
        optimizer: that steps it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        *,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        scaler = scaler or getattr(optimizer, "scaler", None)
        self.session = offbeat.attach(model, optimizer, strategy, scaler=scaler, **options)
        self.model = model
        self.optimizer = unwrapped(optimizer)
        self._evaluation: EvaluationWeights | None = None
        if strategy.replicas_differ:
            self._evaluation = EvaluationWeights(self.session, model, self.optimizer)
        self._evaluates = False
        self._quiet: DistributedDataParallel | None = None
        self._num_blocks = 0
        # Before the session's own hook, which refuses a model inside DDP.
        self._hook = model.register_forward_pre_hook(
            ModuleHook(model, self._forward_begins), prepend=True
        )

    def evaluates(self) -> None:
        """The loop evaluates from now on: the model is the mean of all ranks'."""
        if self._evaluation is not None and not self._evaluates:
            self._evaluates = True
            self._evaluation.mode_changed(training=False)

    def trains(self) -> None:
        """The loop trains from now on: the model is this rank's own."""
        if self._evaluation is not None and self._evaluates:
            self._evaluates = False
            self._evaluation.training_goes_on()

    def state_to_save(self) -> dict[str, Any]:
        """The session's state, for a checkpoint of the framework's.

        Raises:
            UnsupportedError: that could not be read, since the optimizer of a model that is divided
                has no state: its momentum is at work in the session.
        """
        optimizer = self.optimizer
        if is_sharded(self.model) and any(g.get("momentum") for g in optimizer.param_groups):
            entries = optimizer.state_dict()["state"].values()
            if not any(torch.is_tensor(value) for entry in entries for value in entry.values()):
                raise UnsupportedError(
                    f"{self.session.strategy.name} has taken over SGD's momentum, and the framework"
                    " could not load a checkpoint of a divided model without it; pass the strategy"
                    " momentum_correction=None"
                )
        return self.session.state_dict()

    def silence(self, ddp: DistributedDataParallel) -> None:
        """`ddp` exchanges nothing any more, until the session ends."""
        self._quiet = ddp
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
        ddp.no_sync = self._no_sync  # type: ignore[method-assign]
        ddp.join_hook = lambda **_: _RefusedJoin()  # type: ignore[method-assign]

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._num_blocks += 1
        try:
            yield
        finally:
            self._num_blocks -= 1

    def close(self, error: BaseException | None = None) -> None:
        """End the session, as one that `error` has ended if there is one. Idempotent, and
        collective with strategies that average weights.
        """
        self._hook.remove()
        self.trains()
        if (ddp := self._quiet) is not None:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
            del ddp.no_sync, ddp.join_hook
            self._quiet = None
        if error is None:
            self.session.close()
        else:
            self.session.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _forward_begins(self, model: torch.nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            if not model.training:
                self.evaluates()
            return
        self.trains()
        ddp = active_ddp_module()
        if ddp is not None and ddp.module is model:
            # A loop that accumulates may be inside DDP's own `no_sync` when DDP is met.
            wanted = self._quiet is ddp or ddp.require_backward_grad_sync
            self.silence(ddp)
            model.require_backward_grad_sync = wanted and not self._num_blocks


def as_strategy(strategy: Strategy | str, *, clip_norm: float | None = None) -> Strategy:
    """A strategy by itself or by its name, for a loop that the framework owns.

    Args:
        strategy: such as `offbeat.GTopK(density=0.01)`, or "gtopk:density=0.01".
        clip_norm: to which the framework clips gradients; a strategy that has to clip before it
            selects, and was told no norm itself, is given it, also what K-FAC sends gradients by.

    Raises:
        ConfigError: there is no such strategy, or option of it.
        UnsupportedError: it shares samples out, while the framework divides its data itself.
    """
    strategy = strategy_of(strategy)
    if strategy.shares_samples:
        raise UnsupportedError(
            f"{strategy.name} shares samples out to whichever worker is free, and here the"
            " framework divides the data; write the loop yourself with offbeat.attach and"
            " session.loader, or choose another strategy"
        )
    exchange = strategy.gradients if isinstance(strategy, KFACStrategy) else strategy
    if clip_norm and isinstance(exchange, SparseGradientStrategy) and exchange.clip_norm is None:
        clips = replace(exchange, clip_norm=clip_norm)
        return replace(strategy, exchange=clips) if isinstance(strategy, KFACStrategy) else clips
    return strategy


def names_for_frameworks() -> list[str]:
    """The strategies that work where the framework divides the data."""
    return [name for name, kind in REGISTRY.items() if not kind.shares_samples]
