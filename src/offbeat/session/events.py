"""From hooks to events: what happens in the model and the optimizer is told to the callbacks.

When does a backward pass begin, when is a gradient ready, when is it over? A pass is noticed,
whichever comes first,
- from the root module's outputs, as soon as backward reaches one of them: so it is the outermost
  pass even where parts of the model run inside re-entrant checkpoints, whose backward passes are
  nested; or
- from a parameter, just before its gradient is accumulated, for losses that bypass the root's
  outputs.

Noticing it queues a callback that autograd runs when the outermost pass is over. It tells the
sessions of all models that the pass has reached, in the order in which they were attached. There
each waits for its peers, and ranks that reach models in unlike order would wait for each other for
ever. If an exception ends the pass first, that callback never runs: the next forward pass,
optimizer step or the end of the session finds the pass still open while no backward is running, and
reports it as failed. A pass that accumulates nothing, as `torch.autograd.grad` does, is reported as
one without gradients.

What a transform of `torch.func` calls, as for gradients of single examples, is not told to the
callbacks: it is no pass for training, and they must not change parameters inside of it.

Refused, with the reason: a root module that is itself run inside a re-entrant checkpoint, compiled
autograd, a forward pass for training inside DistributedDataParallel, which exchanges gradients too,
and a GradScaler of which the session was not told.

What this needs and PyTorch has no public name for is in `offbeat.torch_private`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import count
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch.autograd.graph import Node, get_gradient_edge

from offbeat.callbacks.callback import EVENTS, Callback, listens
from offbeat.callbacks.context import Notices
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.callbacks.plain_arithmetic import plain_arithmetic
from offbeat.errors import UnsupportedError
from offbeat.session.metrics import SessionObserver
from offbeat.strategies.base import Strategy
from offbeat.torch_private import (
    NO_BACKWARD_PASS,
    active_ddp_module,
    call_after_backward_pass,
    call_first_after_steps,
    current_backward_pass,
    inside_transform,
    is_compiled_module,
    only_makes_state,
    tensors_in,
)
from offbeat.transport.driver import Driver
from offbeat.weights.shard import Shard, whole_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_FLAG: Final = "require_backward_grad_sync"
_CONTEXT: Final = "no_sync"

_FIRST_LOOK: Final = 4
"""In which backward pass parameters are first compared; later looks are at 4 times the last one."""

_SAMPLE: Final = 64
"""How many elements of each parameter are compared."""


_numbers: Final = count()
_reached: Final[dict[int, list[EventDispatcher]]] = {}
"""By backward pass under way, the dispatchers of the models that it has reached."""


def _plainly(
    method: Callable[Concatenate[EventDispatcher, Arguments], Result],
) -> Callable[Concatenate[EventDispatcher, Arguments], Result]:
    """`plain_arithmetic` on a method, which costs little where it would change nothing. Most
    backward passes are such, and there a method is called for each parameter.
    """

    @wraps(method)
    def call(self: EventDispatcher, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if self.has_autocast and torch.is_autocast_enabled(self.device_type):
            with plain_arithmetic(self.device_type):
                return method(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            return method(self, *args, **kwargs)
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return call


class EventDispatcher:
    """Hooks on a model and an optimizer, whose events go to each callback in order. `remove` takes
    all of them out again.

    Args:
        model: the root module.
        optimizer: the user's; None: nobody hears of steps.
        callbacks: those that get the events that they act on. The list may grow, by callbacks that
            do not wait for each gradient.
        parameters: the model's trainable parameters by name, in the model's order.
        frozen: its other parameters by name, which must stay frozen.
        has_scaler: whether the session knows of a GradScaler.
        device_type: of the parameters.
        driver: is told which step begins.
        observers: are told of each optimizer step.
        notices: for remarks; warnings are issued where one that is an exception harms nobody.
        acting: the strategy whose callbacks they are.

    Attributes:
        sync: whether backward passes exchange; they accumulate locally inside its `no_sync`.
        num_steps: optimizer steps so far.
        device_type: as given.
        has_autocast: whether there are autocast regions for such devices.
        number: how many dispatchers this process had made before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        callbacks: Sequence[Callback],
        *,
        parameters: Mapping[str, torch.nn.Parameter],
        device_type: str,
        driver: Driver,
        notices: Notices,
        frozen: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
        has_scaler: bool = False,
        observers: Sequence[SessionObserver] = (),
        acting: Strategy | None = None,
    ) -> None:
        self._model, self._parameters = model, parameters
        self.device_type = device_type
        self.has_autocast = torch.amp.is_autocast_available(device_type)
        self._callbacks = callbacks
        self._listening: dict[str, tuple[Callback, ...]] = {}
        self._num_listening = -1
        self.num_steps, self._makes_state = 0, False
        self._known = {id(parameter) for parameter in model.parameters()}
        self._frozen = frozen
        self._has_scaler = has_scaler
        self._driver = driver
        self._observers = observers
        self._notices = notices
        self._synchronised = True
        self.number = next(_numbers)
        self._open_pass = NO_BACKWARD_PASS
        self._is_removed = False
        self._recomputing_pass = NO_BACKWARD_PASS
        # Accumulation nodes are made on demand and forgotten with their hooks unless somebody keeps
        # them.
        # Those of parameters that FSDP has divided never run: it calls their hooks itself.
        self._nodes: list[Node] = [
            get_gradient_edge(p).node for p in parameters.values() if not isinstance(p, Shard)
        ]
        # The root alone is hooked: copies of it, such as averaged models, stay out of it.
        self._handles: list[Any] = [
            model.register_forward_pre_hook(ModuleHook(model, self._on_forward)),
            model.register_forward_hook(ModuleHook(model, self._on_output)),
            *(node.register_prehook(self._on_progress) for node in self._nodes),
        ]
        self._needed: NeededParameters | None = None
        self._hears_of_gradients = False
        self.listen(acting)
        if optimizer is not None:
            # A loop may compile what steps the optimizer, and what callbacks do is nothing to be
            # compiled.
            self._handles += [
                optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
                # The user's own hooks find weights, and options of the optimizer, as they are after
                # a step.
                call_first_after_steps(optimizer, torch.compiler.disable(self._after_step)),
            ]
        self.sync = GradientSync(model, notices.notify)

    def listen(self, acting: Strategy | None) -> None:
        """Look at the callbacks anew: those of `acting` have taken the place of others."""
        self._num_listening = -1
        differ = acting is not None and acting.replicas_differ and self._driver.world_size > 1
        # Of shards FSDP may have put whole parameters in place by the end.
        wholes = {name: p for name, p in self._frozen.items() if not isinstance(p, Shard)}
        acts_at_steps = acting is not None and acting.acts_at_steps
        self._watch = LoopWatch(
            trained=list(self._parameters.values()) if acts_at_steps else (),
            frozen=wholes if differ else {},
            strategy=type(acting).__name__,
            warn=self._notices.warn,
            num_merges=self._num_merges,
        )
        # Once, because a parameter that is frozen by then takes no hook.
        if self._those_with("on_gradient_ready") and not self._hears_of_gradients:
            self._hears_of_gradients = True
            self._handles += [
                whole_of(parameter).register_post_accumulate_grad_hook(
                    partial(self._on_gradient, index)
                )
                for index, parameter in enumerate(self._parameters.values())
            ]
        if self._needed is not None:
            self._needed.remove()
        self._needed = None
        if self._those_with("on_parameters_needed"):
            self._needed = NeededParameters(self._model, self._parameters, self._parameters_needed)

    def _num_merges(self) -> float:
        return sum(callback.counters().get("merges", 0.0) for callback in self._callbacks)

    def _those_with(self, event: str) -> tuple[Callback, ...]:
        """The callbacks that do something at `event`, in order."""
        if self._num_listening != len(self._callbacks):
            self._num_listening = len(self._callbacks)
            self._listening = {
                name: tuple(c for c in self._callbacks if listens(c, name)) for name in EVENTS
            }
        return self._listening[event]

    def tell(
        self,
        event: Callable[Concatenate[Callback, Arguments], None],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Let each callback act on `event`, a method of `Callback`, in order."""
        for callback in self._those_with(event.__name__):
            getattr(callback, event.__name__)(*args, **kwargs)

    @_plainly
    def report_failed_pass(self) -> None:
        """If a backward pass was begun and an exception ended it, say so now."""
        if self._open_pass != NO_BACKWARD_PASS == current_backward_pass():
            _reached.pop(self._open_pass, None)
            self._open_pass = NO_BACKWARD_PASS
            self.tell(Callback.on_backward_failed)

    def session_ends(self) -> None:
        """The loop has ended well."""
        self._watch.session_ends()

    def remove(self) -> None:
        """Take every hook out. Idempotent."""
        self._is_removed = True
        if current_backward_pass() == NO_BACKWARD_PASS:
            _reached.pop(self._open_pass, None)
        self.sync.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._needed is not None:
            self._needed.remove()
        self._nodes.clear()

    # Under backward(create_graph=True) autograd records; what is done with finished gradients is
    # not to be recorded.

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        if inside_transform():
            return
        if torch.is_grad_enabled():
            _refuse_second_exchange(module)
            self.report_failed_pass()
            self._recomputing_pass = current_backward_pass()
        trains = module.training and torch.is_grad_enabled()
        self._forward_begins(trains=trains and self.sync.wanted)

    @_plainly
    def _forward_begins(self, *, trains: bool) -> None:
        if self._notices.due:
            self._notices.issue_warnings()
        self.tell(Callback.on_forward_begins, trains=trains)

    def parameters_needed(self) -> None:
        """All parameters are about to be copied."""
        if self._needed is not None:
            self._needed.tell_all()

    @_plainly
    def _parameters_needed(self, indices: Sequence[int]) -> None:
        for callback in self._those_with("on_parameters_needed"):
            callback.on_parameters_needed(indices)

    def _on_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if inside_transform():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._on_progress)

    def _on_progress(self, gradient: Any) -> None:
        if self._open_pass != NO_BACKWARD_PASS or self._is_removed:
            return
        number, recomputing = current_backward_pass(), self._recomputing_pass
        if recomputing not in (NO_BACKWARD_PASS, number):
            raise UnsupportedError(
                "the attached model itself runs inside a re-entrant checkpoint, so its backward"
                " pass is nested in another one; use torch.utils.checkpoint.checkpoint(...,"
                " use_reentrant=False), or checkpoint modules inside the model"
            )
        if number not in _reached:
            try:
                call_after_backward_pass(torch.compiler.disable(lambda: _pass_ends(number)))
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                raise UnsupportedError(
                    f"this backward pass cannot be observed ({error}); compiled autograd is not"
                    " supported: switch it off, plain torch.compile works"
                ) from error
        _reached.setdefault(number, []).append(self)
        self._open_pass = number
        torch.compiler.disable(self._backward_begins)()

    @_plainly
    def _backward_begins(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"parameter {name!r} was frozen when the session was attached and requires a"
                    " gradient now; close the session and attach again after unfreezing, or where a"
                    " script has no session, wrap the model in DistributedDataParallel anew"
                )
        self._synchronised = self.sync.wanted
        self.tell(Callback.on_backward_begins, synchronised=self._synchronised)

    @_plainly
    def _on_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._open_pass == NO_BACKWARD_PASS:
            raise UnsupportedError(
                "a gradient came from a loss that does not depend on what the attached model"
                " returned, which is where a sharded model's backward pass is seen to begin;"
                " compute the loss from the outputs of model(...)"
            )
        for callback in self._those_with("on_gradient_ready"):
            callback.on_gradient_ready(index, synchronised=self._synchronised)

    @_plainly
    def backward_done(self) -> None:
        """The pass that has reached the model is over."""
        self._open_pass = NO_BACKWARD_PASS
        if self._is_removed:
            return
        self.tell(Callback.on_backward_done, synchronised=self._synchronised)
        self._watch.backward_done()

    @_plainly
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if inside_own_step(optimizer):
            return None
        # One that makes state for a checkpoint is no step of training, and perhaps of one rank.
        self._makes_state = only_makes_state() and not any(
            callback.holds_state for callback in self._callbacks
        )
        if self._makes_state:
            return None
        self.report_failed_pass()
        self._refuse_added(optimizer)
        self._watch.step_begins()
        if not (self._has_scaler or self.num_steps):
            refuse_unknown_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):  # it will run backward, and that exchanges
            self.tell(Callback.on_closure)
            return args[:1], {**kwargs, "closure": self._then_update(closure)}
        self.tell(Callback.on_before_step)
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

    @_plainly
    def _before_update(self) -> None:
        self.tell(Callback.on_before_update)

    @_plainly
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._makes_state or inside_own_step(optimizer):
            return
        self.num_steps += 1
        self.tell(Callback.on_after_step)
        self._driver.mark_step(self.num_steps)
        for observer in self._observers:
            observer.step_ended(self.num_steps)
        if self._notices.due:
            self._notices.issue_warnings()


def _pass_ends(number: int) -> None:
    for dispatcher in sorted(_reached.pop(number, ()), key=lambda each: each.number):
        dispatcher.backward_done()


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


def inside_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hook asks is a part of another one of `optimizer`, whose class calls
    its base class's: PyTorch runs hooks in both, once anybody has made an optimizer of that one.
    """
    return sum(each is optimizer for each in _under_way(type(optimizer).step)) > 1


def _under_way(method: Callable[..., Any]) -> Iterator[Any]:
    """The objects of which `method` is running now, the innermost call first."""
    code, frame = getattr(method, "__code__", None), inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals.get("self")
        frame = frame.f_back


def refuse_unknown_scaler() -> None:
    """Is called while an optimizer is being stepped, where `attach` was given no GradScaler.

    Raises:
        UnsupportedError: a GradScaler steps it: the loss is scaled by a factor that changes, and
            some steps are left out, both on each rank by itself.
    """
    # `offbeat run` has put another function in its place.
    step = inspect.unwrap(torch.amp.GradScaler.step)
    if any(scaler.is_enabled() for scaler in _under_way(step)):
        raise UnsupportedError(
            "a GradScaler steps the optimizer and this session was not told of it, so ranks would"
            " skip different steps, and what is owed would be scaled by a factor that changes; pass"
            " it: offbeat.attach(..., scaler=scaler)"
        )


class GradientSync:
    """Whether backward passes exchange what they have accumulated, under the names by which
    frameworks ask a DistributedDataParallel model for that: puts `no_sync` and
    `require_backward_grad_sync` on `model`, and takes them off again.

    Accelerate, and with it the Trainer of transformers, looks for `no_sync` on the model where it
    accumulates gradients; other loops set `require_backward_grad_sync`. Without these names they
    would exchange in each backward pass.

    A name that the model has already, and that no session has left there, stays as it is.
    `model.no_sync` is this object; copies of the model have a context that does nothing.

    Args:
        model: the root module.
        notify: is told of such a name.
    """

    def __init__(self, model: torch.nn.Module, notify: Callable[[str], None]) -> None:
        self._model = model
        self._set: list[str] = []
        for name, value in ((_FLAG, True), (_CONTEXT, self)):
            own = getattr(model, name, None)
            is_of_a_copy = isinstance(own, partial) and own.func is nullcontext
            if own is None or is_of_a_copy or isinstance(own, bool):
                setattr(model, name, value)
                self._set.append(name)
            else:
                notify(
                    f"the model has a {name!r} of its own, which this session leaves alone; where"
                    " gradients are accumulated, use session.no_sync()"
                )

    @property
    def wanted(self) -> bool:
        """Whether a backward pass that begins now is to exchange."""
        return bool(getattr(self._model, _FLAG, True))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Backward passes inside accumulate locally."""
        before = self.wanted
        self._write(wanted=False)
        try:
            yield
        finally:
            self._write(wanted=before)

    def remove(self) -> None:
        """Take the names off. Idempotent."""
        while self._set:
            delattr(self._model, self._set.pop())

    def _write(self, *, wanted: bool) -> None:
        if _FLAG in self._set:
            setattr(self._model, _FLAG, wanted)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object]]:
        return partial, (nullcontext,)


@dataclass(kw_only=True)
class LoopWatch:
    """Notices what a loop changes without a word to the strategy.

    - It does not step the attached optimizer, where the strategy acts at steps. Many passes without
      a step may be one accumulated gradient. But if parameters change meanwhile, something else
      than the optimizer changes them, and the strategy does nothing. Where models were merged
      meanwhile, as those of ranks that claim samples, it has done something without a step.
    - Parameters that are not trained change all the same, as those of a momentum encoder inside the
      model do: where ranks' models differ, no average is made of them.

    Args:
        trained: the trainable parameters; none where the strategy does not act at steps.
        frozen: the others by name; none where ranks' models are alike.
        strategy: its name, for the warning.
        warn: is told what is wrong.
        num_merges: how often models were merged so far.
    """

    trained: Sequence[torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    strategy: str
    warn: Callable[[str], None]
    num_merges: Callable[[], float]
    _num_passes: int = 0
    _next_look: int = _FIRST_LOOK
    _first: Sequence[torch.Tensor] = ()  # none, too, once there was a step or all has been said
    _first_frozen: Sequence[torch.Tensor] | None = None
    _merges_before: float = 0.0

    def backward_done(self) -> None:
        """A backward pass is over."""
        if self._first_frozen is not None:
            return  # there was a step
        self._num_passes += 1
        if self._num_passes == 1:
            self._first, self._merges_before = _samples_of(self.trained), self.num_merges()
        elif self._first and self._num_passes == self._next_look:
            self._next_look *= 4
            if self._has_merged:
                self._first = ()
            elif not all(map(torch.equal, _samples_of(self.trained), self._first)):
                self._say("and parameters have changed all the same")

    def step_begins(self) -> None:
        """A step is about to be made. What was loaded before the first one is no change."""
        self._first = ()
        if self._first_frozen is None:
            self._first_frozen = _samples_of(self.frozen.values())

    def session_ends(self) -> None:
        """No step will follow."""
        if self._first and not self._has_merged:
            self._say("and the session ends")
        if self._first_frozen is None:
            return
        now = _samples_of(self.frozen.values())
        pairs = zip(self.frozen, self._first_frozen, now, strict=True)
        if changed := [name for name, first, last in pairs if not torch.equal(first, last)]:
            self.warn(
                f"{len(changed)} parameters that are not trained have changed, such as"
                f" {changed[0]!r}: {self.strategy} averages what is trained, and buffers, so of"
                " these each rank has its own. Where all ranks need the same, as of a momentum"
                " encoder, send rank 0's to all by torch.distributed.broadcast"
            )

    @property
    def _has_merged(self) -> bool:
        return self.num_merges() != self._merges_before

    def _say(self, what: str) -> None:
        self._first = ()
        self.warn(
            f"the attached optimizer was not stepped in {self._num_passes} backward passes,"
            f" {what}: {self.strategy} acts when it is stepped, so it has done nothing to the"
            " model. Attach the optimizer that your loop steps, and change parameters by its step"
        )


def _samples_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.detach().reshape(-1)[:_SAMPLE].clone() for p in parameters]


class NeededParameters:
    """Hooks on each module of a model, which tell what it is about to compute with.

    Some modules are never called, because the one around them computes with their parameters, as
    MultiheadAttention does. The first forward pass shows which: what they have is needed when the
    closest module around them is called. Until that pass is over everything is needed at once.

    Args:
        model: the root module.
        parameters: the trainable ones by name, in the model's order.
        tell: is called with positions in that order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        tell: Callable[[Sequence[int]], None],
    ) -> None:
        numbers = {id(parameter): index for index, parameter in enumerate(parameters.values())}
        self._tell, self._all = tell, range(len(parameters))
        self._own = {
            name: [numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers]
            for name, module in model.named_modules()
        }
        self._called: set[str] = set()
        self._of_module: dict[str, list[int]] | None = None
        # Hooks in a compiled module would divide its graph.
        is_compiled = is_compiled_module(model)
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if not is_compiled or not name:
                before = ModuleHook(module, partial(self._called_with, name))
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            if self._own[name]:
                everything = ModuleHook(module, self.tell_all)
                self._handles += [
                    module.register_state_dict_pre_hook(everything),
                    module.register_load_state_dict_pre_hook(everything),
                ]

    def tell_all(self, *_: Any) -> None:
        """Everything is needed."""
        self._tell(self._all)

    def _called_with(self, name: str, *_: Any) -> None:
        if name == "" and self._called:
            self._of_module = self._of_module or self._by_module()
        if self._of_module is None or name not in self._called or not torch.is_grad_enabled():
            self._called.add(name)
            self.tell_all()
        elif needed := self._of_module[name]:
            self._tell(needed)

    def _by_module(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in self._own}
        for name, own in self._own.items():
            while name and name not in self._called:
                name = name.rpartition(".")[0]
            found[name] += own
        return found

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
