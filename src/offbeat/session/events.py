"""From hooks to events: what happens in the model and the optimizer is told to the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from offbeat.callbacks.callback import Callback
from offbeat.errors import UnsupportedError
from offbeat.session.gradient_sync import GradientSync
from offbeat.session.hooks import BackwardHooks
from offbeat.session.scaler_watch import refuse_unknown_scaler
from offbeat.session.step_watch import StepWatch
from offbeat.torch_private import call_first_after_steps

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _without_grad(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """As `torch.no_grad()` on a method, at no price where autograd records nothing anyway, as in
    most backward passes: there a method is called for each parameter.
    """

    @wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        with torch.no_grad():
            return method(*args, **kwargs)

    return call


class EventDispatcher:
    """Hooks on a model and an optimizer, whose events go to each part in order.

    Args:
        model: the root module.
        optimizer: the user's; None: nobody hears of steps.
        parts: who gets the events; may grow.
        parameters: the model's trainable parameters by name, in the model's order.
        frozen: its other parameters by name, which must stay frozen.
        has_scaler: whether the session knows of a GradScaler.
        step_ended: is called after each optimizer step with the number of steps so far.
        issue_warnings: is called where a warning that is an exception harms nobody.
        notify: for remarks.
        watch: looks whether the optimizer is stepped; None where it need not be.

    Attributes:
        sync: whether backward passes exchange; they accumulate locally inside its `no_sync`.
        num_steps: optimizer steps so far.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parts: Sequence[Callback],
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, torch.nn.Parameter],
        has_scaler: bool,
        step_ended: Callable[[int], None],
        issue_warnings: Callable[[], None],
        notify: Callable[[str], None],
        watch: StepWatch | None,
    ) -> None:
        self.parts = parts
        self.num_steps = 0
        self._hearers: dict[str, tuple[int, list[Callback]]] = {}
        self._known = {id(parameter) for parameter in model.parameters()}
        self._frozen = frozen
        self._has_scaler = has_scaler
        self._step_ended = step_ended
        self._issue_warnings = issue_warnings
        self._watch = watch
        self._hooks = BackwardHooks(model, list(parameters.values()), self)
        # A loop may compile what steps the optimizer, and what parts do is nothing to be compiled.
        self._step_handles = (
            []
            if optimizer is None
            else [
                optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
                # The user's own hooks find weights, and options of the optimizer, as they are after
                # a step.
                call_first_after_steps(optimizer, torch.compiler.disable(self._after_step)),
            ]
        )
        self.sync = GradientSync(model, notify)

    def report_failed_pass(self) -> None:
        """If an exception ended a backward pass that was begun, say so now."""
        self._hooks.report_failed_pass()

    def session_ends(self) -> None:
        """The loop has ended well."""
        if self._watch is not None:
            self._watch.session_ends()

    def remove(self) -> None:
        """Take every hook out. Idempotent."""
        self._hooks.remove()
        self.sync.remove()
        for handle in self._step_handles:
            handle.remove()

    def _hearing(self, event: str) -> list[Callback]:
        """The parts that override `event`."""
        num_parts, hearing = self._hearers.get(event, (0, []))
        if num_parts != len(self.parts):
            silent = getattr(Callback, event)
            hearing = [part for part in self.parts if getattr(type(part), event) is not silent]
            self._hearers[event] = len(self.parts), hearing
        return hearing

    # Under backward(create_graph=True) autograd records; what is done with finished gradients is
    # not to be recorded.

    @_without_grad
    def forward_begins(self, *, trains: bool) -> None:
        self._issue_warnings()
        for part in self._hearing("on_forward_begins"):
            part.on_forward_begins(trains=trains)

    @_without_grad
    def backward_begins(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"parameter {name!r} was frozen when the session was attached and requires a"
                    " gradient now; close the session and attach again after unfreezing"
                )
        synchronised = self.sync.wanted
        for part in self._hearing("on_backward_begins"):
            part.on_backward_begins(synchronised=synchronised)

    @_without_grad
    def gradient_ready(self, index: int) -> None:
        synchronised = self.sync.wanted
        for part in self._hearing("on_gradient_ready"):
            part.on_gradient_ready(index, synchronised=synchronised)

    @_without_grad
    def backward_done(self) -> None:
        synchronised = self.sync.wanted
        for part in self._hearing("on_backward_done"):
            part.on_backward_done(synchronised=synchronised)
        if self._watch is not None:
            self._watch.backward_done()

    @_without_grad
    def backward_failed(self) -> None:
        for part in self._hearing("on_backward_failed"):
            part.on_backward_failed()

    @_without_grad
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.report_failed_pass()
        self._refuse_added(optimizer)
        if self._watch is not None:
            self._watch.stepped()
        if not (self._has_scaler or self.num_steps):
            refuse_unknown_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):  # it will run backward, and that exchanges
            for part in self._hearing("on_closure"):
                part.on_closure()
            return args[:1], {**kwargs, "closure": self._then_update(closure)}
        for part in self._hearing("on_before_step"):
            part.on_before_step()
        self._before_update()
        return None

    def _refuse_added(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer has got a parameter that no rank would exchange."""
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._known and parameter.requires_grad:
                    raise UnsupportedError(
                        f"the optimizer's group {number} has a parameter of shape"
                        f" {list(parameter.shape)} that the model did not have when the session was"
                        " attached, so it would not be exchanged; close the session and attach"
                        " again after adding or replacing parameters"
                    )

    def _then_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            loss = closure()
            self._before_update()
            return loss

        return called

    @_without_grad
    def _before_update(self) -> None:
        for part in self._hearing("on_before_update"):
            part.on_before_update()

    @_without_grad
    def _after_step(self, *_: Any) -> None:
        self.num_steps += 1
        for part in self._hearing("on_after_step"):
            part.on_after_step()
        self._step_ended(self.num_steps)
        self._issue_warnings()
