"""All that `offbeat run` changes in PyTorch and Python: the whole list, each with its reason.

Nothing is changed outside of `offbeat run`, and `patched` puts everything back. A test of each
entry fails when a new version of PyTorch changes what it stands on (tests/run/test_patches.py).

- `torch.distributed.Reducer`, `Logger`: DistributedDataParallel makes both when it is made, and the
  reducer would exchange gradients; a stand-in does nothing. DDP's class, its first broadcast, its
  names of parameters, `no_sync` and copies stay genuine.
- `DistributedDataParallel.__init__`: to know each such model, and to refuse options that exchange
  by themselves.
- `DistributedDataParallel._pre_forward`: a session is attached there, and told what the pass is to
  do; see `torch_private.PREPARES_FORWARD_OF_DDP`.
- `DistributedDataParallel._run_ddp_forward`: see `torch_private.CALLS_MODULE_OF_DDP`. `replicate`
  says the same by an attribute before it calls `_pre_forward`, which takes it back there.
- `DistributedDataParallel.register_comm_hook`, `_register_builtin_comm_hook`: they hand the reducer
  to C++, which takes no stand-in; what is exchanged is the strategy's affair.
- `DistributedDataParallel.join_hook`, which `ddp.join()` and `Join([ddp])` call: it counts on the
  reducer's buckets.
- `torch.distributed.fsdp.fully_shard`: to know each module that a script divides inside a node, and
  when it is called. Of a mesh of two dimensions (HSDP) it is given the one along which it shards:
  along the other one FSDP would exchange gradients.
- `Optimizer.__init__`, `GradScaler.__init__`: a script hands neither to DDP; `attach` needs them.
- `GradScaler.scale`: of several scalers, the last one that has scaled is that of the backward pass.
- `GradScaler.step`: where it leaves the optimizer's step out, what was seen since the step before
  belongs to none, for the record.
- `register_optimizer_step_pre_hook`, which is public: to know of each step. A session is attached
  there where a closure makes the first forward pass: its own hooks have to be on the optimizer
  before the step.
- `Module.train`: by it a script says that it evaluates, and where ranks' models differ the mean is
  what counts then.
- `Tensor.backward`: the tensor that it is called on is the loss, for the record.
- `torch.nn.utils.clip_grad_norm_`, and its second half `clip_grads_with_norm_`: where entries are
  selected within `backward()`, what it shortens comes back from the residual. It becomes the
  strategy's `clip_norm`.
- `torch.nn.utils.clip_grad_value_`: it is refused there, since that cannot be done before entries
  are selected.
- `torch.distributed.destroy_process_group`: sessions end before the default group does; and groups
  are kept until the script has ended, since DDP's reducer must not be the last that refers to one.
  It waits then for gloo's threads and holds the interpreter's lock, which they need to let go of a
  tensor, so a script whose model outlives the group hangs now and then.
- `torch.distributed.init_process_group`, `get_rank`, `get_world_size`: only in a worker that comes
  back, since the process group of its peers was made without it and cannot be joined; and the first
  of them in processes that a script starts as ranks while `offbeat run` has started ranks too.
- `multiprocessing.Process`: children that a script starts afresh, as `torch.multiprocessing.spawn`
  does, have to be patched too.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing.process
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import has_torch_function

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import UnsupportedError
from offbeat.torch_private import (
    CALLS_MODULE_OF_DDP,
    PREPARES_FORWARD_OF_DDP,
    REGISTERS_BUILTIN_HOOK,
    TELLS_WHAT_DDP_LOGGED,
    forget_active_ddp_module,
)


class ScriptListener:
    """Hears what a script does. Does nothing unless a subclass overrides it."""

    def ddp_begins(self, module: torch.nn.Module) -> None:
        """The script wraps `module`, and DDP is about to write rank 0's values into it."""

    def ddp_made(self, ddp: DistributedDataParallel, copied: bool) -> None:
        """The script has wrapped a model; `copied`: DDP has made it rank 0's on all ranks, as it
        does unless it was made with `init_sync=False`.
        """

    def forward_begins(self, ddp: DistributedDataParallel, args: Sequence[Any]) -> None:
        """A forward pass begins with these arguments, those by name behind the others."""

    def sharded_forward_begins(self, module: torch.nn.Module, args: Sequence[Any]) -> None:
        """A forward pass begins of a module that `fully_shard` has divided."""

    def hook_ignored(self, ddp: DistributedDataParallel) -> None:
        """It has registered a communication hook, which is not used."""

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """It has made an optimizer."""

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """`optimizer.step()` was called, and none of the optimizer's own hooks has run."""

    def scaler_made(self, scaler: torch.amp.GradScaler) -> None:
        """It has made a scaler of losses."""

    def scaler_used(self, scaler: torch.amp.GradScaler) -> None:
        """It has scaled a loss by `scaler`."""

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler has taken a step of `optimizer`, or left it out."""

    def mode_changed(self, module: torch.nn.Module) -> None:
        """`module` trains now, or is evaluated, as `module.training` says."""

    def backward_begins(self, loss: torch.Tensor) -> None:
        """`loss.backward()` was called."""

    def backward_ended(self) -> None:
        """It is about to return."""

    def clips(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor | None:
        """It wants to clip the gradients of `parameters`; returns their norm where that has been
        done, None: let PyTorch do it.
        """
        return None

    def clips_by_value(self, parameters: Sequence[torch.Tensor]) -> None:
        """It wants to clip each element of the gradients of `parameters`."""

    def exchange_prepared(self, reducer: object) -> None:
        """DDP, or the script itself, told a reducer that the next backward pass exchanges."""

    def group_ends(self) -> None:
        """The process group is about to be destroyed."""


class IdleReducer:
    """Stands where DDP's reducer would, or its logger: every method is there and returns None, but
    for the one that tells what was logged.
    """

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        logged = SimpleNamespace(strs_map={}, ints_map={})
        return lambda *_, **__: logged if name == TELLS_WHAT_DDP_LOGGED else None


def _reducer_for(listener: ScriptListener) -> type[IdleReducer]:
    # A class, for a copy of a DDP model makes its reducer anew and is not to copy the listener.
    class ListeningReducer(IdleReducer):
        def prepare_for_backward(self, *_: object) -> None:
            listener.exchange_prepared(self)

    return ListeningReducer


class _Changes(ExitStack):
    """What stands in the place of something else until this is closed."""

    def put(self, owner: object, name: str, value: object) -> None:
        """Let `owner` have `value` under this name."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def around(self, name: str, *owners: object) -> Callable[[Callable[..., Any]], None]:
        """Let the first of `owners`, and the others with it, have a function under this name that
        calls the decorated one, with what is there now as its first argument.
        """
        original = getattr(owners[0], name)

        def decorate(call: Callable[..., Any]) -> None:
            @wraps(original)
            def changed(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            for owner in owners:
                self.put(owner, name, changed)

        return decorate


@contextmanager
def patched(
    listener: ScriptListener, *, exchanges: bool, ddp_options: Mapping[str, object]
) -> Iterator[None]:
    """PyTorch as a script under `offbeat run` finds it, while the block runs.

    Args:
        listener: hears what the script does.
        exchanges: whether DDP itself exchanges gradients, as it does outside of `offbeat run`.
        ddp_options: what DDP is made with, in the place of what the script says.
    """
    with _Changes() as changes:
        _change_ddp(changes, listener, exchanges, ddp_options)
        _change_fully_shard(changes, listener, exchanges)
        _change_steps(changes, listener)
        _change_clipping(changes, listener)
        kept: list[dist.ProcessGroup | None] = []
        changes.callback(kept.clear)

        @changes.around("destroy_process_group", dist, distributed_c10d)
        def destroy(original: Callable[..., Any], group: dist.ProcessGroup | None = None) -> Any:
            if group is None or group is dist.group.WORLD:
                listener.group_ends()
            kept.append(dist.group.WORLD if group is None else group)
            return original(group)

        yield


def _change_ddp(
    changes: _Changes, listener: ScriptListener, exchanges: bool, options: Mapping[str, object]
) -> None:
    ddp = DistributedDataParallel
    signature = inspect.signature(ddp.__init__)

    @changes.around("__init__", ddp)
    def init(original: Callable[..., None], made: Any, *args: Any, **kw: Any) -> None:
        for option in ("mixed_precision", "delay_all_reduce_named_params"):
            if not exchanges and kw.get(option):
                raise UnsupportedError(
                    f"DistributedDataParallel({option}=...) exchanges gradients in a way of its"
                    " own, which no strategy can take over; leave it out"
                )
        asked = signature.bind(made, *args, **kw).arguments
        listener.ddp_begins(asked["module"])
        original(made, *args, **{**kw, **options})
        listener.ddp_made(made, bool(asked.get("init_sync", True)))

    def tell(ddp: DistributedDataParallel, args: Sequence[Any]) -> None:
        if not exchanges:
            forget_active_ddp_module()
        listener.forward_begins(ddp, args)

    tell_uncompiled = torch.compiler.disable(tell)

    @changes.around(PREPARES_FORWARD_OF_DDP, ddp)
    def pre_forward(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        tell_uncompiled(model, [*args, *kwargs.values()])
        return original(model, *args, **kwargs)

    if exchanges:
        return
    changes.put(dist, "Reducer", _reducer_for(listener))
    changes.put(dist, "Logger", IdleReducer)
    changes.put(ddp, CALLS_MODULE_OF_DDP, lambda model, *args, **kw: model.module(*args, **kw))
    for name in ("register_comm_hook", REGISTERS_BUILTIN_HOOK):
        changes.put(ddp, name, lambda model, *_, **__: listener.hook_ignored(model))

    def join_hook(self: DistributedDataParallel, **_: Any) -> Any:
        raise UnsupportedError(
            "ddp.join() and Join([ddp]) are of DDP's own exchange, which offbeat run replaces; give"
            " every rank equally many batches, as DistributedSampler does"
        )

    changes.put(ddp, "join_hook", join_hook)


def _change_fully_shard(changes: _Changes, listener: ScriptListener, exchanges: bool) -> None:
    def begins(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        listener.sharded_forward_begins(module, [*args, *kwargs.values()])

    @changes.around("fully_shard", fsdp)
    def fully_shard(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = kwargs.get("mesh")
        if not exchanges and mesh is not None and mesh.ndim == 2 and mesh.mesh_dim_names:
            kwargs["mesh"] = mesh[mesh.mesh_dim_names[1]]
        result = original(module, *args, **kwargs)
        for each in module if isinstance(module, list) else [module]:
            # In front of FSDP's own hook, which puts whole parameters into the module.
            hook = ModuleHook(each, begins)
            each.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return result


def _change_steps(changes: _Changes, listener: ScriptListener) -> None:
    def tell_after(owner: type, name: str, tell: Callable[[Any], None]) -> None:
        @changes.around(name, owner)
        def both(original: Callable[..., Any], it: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(it, *args, **kwargs)
            tell(it)
            return result

    tell_after(torch.optim.Optimizer, "__init__", listener.optimizer_made)
    tell_after(torch.amp.GradScaler, "__init__", listener.scaler_made)
    tell_after(torch.amp.GradScaler, "scale", listener.scaler_used)
    tell_after(torch.nn.Module, "train", listener.mode_changed)

    @changes.around("step", torch.amp.GradScaler)
    def scaler_step(
        original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(scaler, optimizer, *args, **kwargs)
        listener.scaler_steps(optimizer)
        return result

    def before_step(
        optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        listener.step_begins(optimizer, has_closure=callable(closure))

    changes.callback(register_optimizer_step_pre_hook(before_step).remove)

    @changes.around("backward", torch.Tensor)
    def backward(original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kw: Any) -> None:
        if has_torch_function([loss]):  # the tensor's class calls this method again
            original(loss, *args, **kw)
            return
        listener.backward_begins(loss)
        original(loss, *args, **kw)
        listener.backward_ended()


_Given: TypeAlias = torch.Tensor | Iterable[torch.Tensor]
"""Parameters, as functions of `torch.nn.utils` take them."""


def _change_clipping(changes: _Changes, listener: ScriptListener) -> None:
    def listed(parameters: _Given) -> list[torch.Tensor]:
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    @changes.around("clip_grad_norm_", torch.nn.utils, clip_grad)
    def clip_grad_norm_(
        original: Callable[..., Any],
        parameters: _Given,
        max_norm: float,
        norm_type: float = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = listed(parameters)
        norm = listener.clips(given, float(max_norm), float(norm_type))
        if norm is None and float(max_norm) == math.inf:
            # PyTorch would multiply by 1, and whoever looks for changes of gradients finds one.
            gradients = [each.grad for each in given if each.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type, *args, **kwargs)
        return original(given, max_norm, norm_type, *args, **kwargs) if norm is None else norm

    @changes.around("clip_grads_with_norm_", torch.nn.utils)
    def clip_grads_with_norm_(
        original: Callable[..., None], parameters: _Given, max_norm: float, *args: Any, **kw: Any
    ) -> None:
        given = listed(parameters)
        # Nobody is told of which kind the norm is; usually it is the Euclidean one.
        if listener.clips(given, float(max_norm), 2.0) is None and float(max_norm) != math.inf:
            original(given, max_norm, *args, **kw)

    @changes.around("clip_grad_value_", torch.nn.utils, clip_grad)
    def clip_grad_value_(
        original: Callable[..., None], parameters: _Given, *args: Any, **kw: Any
    ) -> None:
        given = listed(parameters)
        listener.clips_by_value(given)
        original(given, *args, **kw)


@contextmanager
def beside_the_group(rank: int, world_size: int) -> Iterator[None]:
    """In a worker that comes back: `init_process_group` makes a group of this process alone, and
    the script is told its rank and the number of workers all the same.

    What a script exchanges by itself through torch.distributed does not reach its peers then.
    """

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        backend = args[0] if args else kwargs.get("backend")
        initialise(backend, store=dist.HashStore(), rank=0, world_size=1)

    initialise = dist.init_process_group
    with _Changes() as changes:
        for module in (dist, distributed_c10d):
            changes.put(module, "init_process_group", init_process_group)
            changes.put(module, "get_rank", lambda group=None: rank)
            changes.put(module, "get_world_size", lambda group=None: world_size)
        yield


_TAKEN_BY_NAME: Final[Sequence[tuple[ModuleType, str]]] = (
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (fsdp, "fully_shard"),
    (dist, "destroy_process_group"),
    (dist, "init_process_group"),
)
"""Functions that are changed, and that scripts import by name."""


def functions_in_place() -> Mapping[int, tuple[ModuleType, str]]:
    """Where the functions stand that may be changed, by the id of what stands there now."""
    return {id(getattr(module, name)): (module, name) for module, name in _TAKEN_BY_NAME}


def renew_names(before: Mapping[int, tuple[ModuleType, str]]) -> None:
    """Let modules that have imported one of `functions_in_place` by name have what stands there
    now: a fresh interpreter has imported the script before anything can be changed in it.
    """
    for owner, module in [*sys.modules.items()]:
        if owner.partition(".")[0] in ("torch", "offbeat"):
            continue
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if (place := before.get(id(value))) is not None:
                setattr(module, key, getattr(*place))


STARTED_TWICE: Final = (
    "the script starts its ranks itself, in processes of its own, and so does offbeat run; add"
    " --workers 1, and the script decides how many there are"
)
FORKED: Final = (
    "the script forks its ranks, and they would share what this process has open, such as its"
    " record; let it start fresh interpreters, by multiprocessing.set_start_method('spawn'), and"
    " run it with --workers 1"
)


@contextmanager
def no_group(refusal: str | None) -> Iterator[None]:
    """`init_process_group` raises while the block runs, unless `refusal` is None."""

    def init_process_group(*_: Any, **__: Any) -> None:
        raise UnsupportedError(refusal or "")

    with _Changes() as changes:
        for module in () if refusal is None else (dist, distributed_c10d):
            changes.put(module, "init_process_group", init_process_group)
        yield


@contextmanager
def processes_wrapped(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """The function of each process that the script starts goes through `wrap`, while the block
    runs. What `wrap` returns is pickled where the process is a fresh interpreter.
    """
    with _Changes() as changes:

        @changes.around("__init__", multiprocessing.process.BaseProcess)
        def init(
            original: Callable[..., None],
            process: Any,
            group: Any = None,
            target: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            original(process, group, None if target is None else wrap(target), *args, **kwargs)

        yield
