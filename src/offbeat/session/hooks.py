"""When does a backward pass begin, when is a gradient ready, when is it over? PyTorch's answers,
turned into events.

A pass is noticed, whichever comes first,
- from the root module's outputs, as soon as backward reaches one of them: so it is the outermost
  pass even where parts of the model run inside re-entrant checkpoints, whose backward passes are
  nested; or
- from a parameter, just before its gradient is accumulated, for losses that bypass the root's
  outputs.

Noticing it queues a callback that autograd runs when the outermost pass is over. If an exception
ends the pass first, that callback never runs: the next forward pass, optimizer step or the end of
the session finds the pass still open while no backward is running, and reports it as failed. A pass
that accumulates nothing, as `torch.autograd.grad` does, is reported as one without gradients.

Refused, with the reason: a root module that is itself run inside a re-entrant checkpoint, compiled
autograd, and a forward pass for training inside DistributedDataParallel, which exchanges gradients
too.

What this needs and PyTorch has no public name for is in `offbeat.torch_private`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node, get_gradient_edge

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import UnsupportedError
from offbeat.torch_private import (
    NO_BACKWARD_PASS,
    active_ddp_module,
    call_after_backward_pass,
    current_backward_pass,
    tensors_in,
)


class BackwardListener(Protocol):
    """Whoever wants to know."""

    def forward_begins(self, *, trains: bool) -> None: ...

    def backward_begins(self) -> None: ...

    def gradient_ready(self, index: int) -> None: ...

    def backward_done(self) -> None: ...

    def backward_failed(self) -> None: ...


class BackwardHooks:
    """Hooks on a model's root and parameters. `remove` takes all of them out again.

    Args:
        model: the root module.
        parameters: its trainable parameters.
        listener: is told of events, in the order forward_begins (at each call of the root module,
            for training or not), backward_begins, gradient_ready for each parameter
            that got one, and backward_done or, when the pass ended in an exception,
            backward_failed.
        each_gradient: whether the listener hears of gradient_ready.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        listener: BackwardListener,
        *,
        each_gradient: bool = True,
    ) -> None:
        self._listener = listener
        self._open = False
        self._removed = False
        self._recomputing_pass = NO_BACKWARD_PASS
        # Accumulation nodes are made on demand and forgotten with their hooks unless somebody keeps
        # them.
        self._nodes: list[Node] = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles: list[Any] = self._hook_forward(model)
        self._handles += [node.register_prehook(self._on_progress) for node in self._nodes]
        if each_gradient:
            self._handles += [
                parameter.register_post_accumulate_grad_hook(partial(self._on_accumulated, index))
                for index, parameter in enumerate(parameters)
            ]

    def remove(self) -> None:
        """Take every hook out. Idempotent."""
        self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def report_failed_pass(self) -> None:
        """If a pass was begun and an exception ended it, say so now."""
        if self._open and current_backward_pass() == NO_BACKWARD_PASS:
            self._open = False
            self._listener.backward_failed()

    def _hook_forward(self, model: torch.nn.Module) -> list[Any]:
        """Hook the root alone: copies of it, such as averaged models, stay out of it."""

        def begins(module: torch.nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                _refuse_second_exchange(module)
                self.report_failed_pass()
                self._recomputing_pass = current_backward_pass()
            self._listener.forward_begins(trains=module.training and torch.is_grad_enabled())

        def ends(module: torch.nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._on_progress)

        return [
            model.register_forward_pre_hook(ModuleHook(model, begins)),
            model.register_forward_hook(ModuleHook(model, ends)),
        ]

    def _on_progress(self, gradient: Any) -> None:
        if not self._open and not self._removed:
            self._begin()

    def _on_accumulated(self, index: int, parameter: torch.nn.Parameter) -> None:
        self._listener.gradient_ready(index)

    def _begin(self) -> None:
        if self._recomputing_pass not in (NO_BACKWARD_PASS, current_backward_pass()):
            raise UnsupportedError(
                "the attached model itself runs inside a re-entrant checkpoint, so its backward"
                " pass is nested in another one; use torch.utils.checkpoint.checkpoint(...,"
                " use_reentrant=False), or checkpoint modules inside the model"
            )
        try:
            call_after_backward_pass(torch.compiler.disable(self._on_done))
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise UnsupportedError(
                f"this backward pass cannot be observed ({error}); compiled autograd is not"
                " supported: switch it off, plain torch.compile works"
            ) from error
        self._open = True
        torch.compiler.disable(self._listener.backward_begins)()

    def _on_done(self) -> None:
        self._open = False
        if not self._removed:
            self._listener.backward_done()


def _refuse_second_exchange(model: torch.nn.Module) -> None:
    """Raise if this forward pass runs inside a DDP of `model` that will exchange its gradients."""
    ddp = active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync:
        return
    exchanged = {id(parameter) for parameter in ddp.parameters()}
    if any(id(parameter) in exchanged for parameter in model.parameters()):
        raise UnsupportedError(
            "the attached model is called inside DistributedDataParallel, so its gradients would be"
            " exchanged twice; call the model itself in your loop, and do not let a framework wrap"
            " it (Lightning, Fabric, Accelerate, the Trainer of transformers)"
        )
