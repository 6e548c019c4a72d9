"""The private parts of PyTorch that offbeat relies on: one function each, with the reason why no
public name does.

No other file may use a private name of PyTorch, and a test reads the sources to prove it. Each
function has a test of its own, which fails when a new version of PyTorch changes what is used here.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

_NCCL_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

NO_BACKWARD_PASS: Final = -1
"""What `current_backward_pass` returns outside of any backward pass."""


def current_backward_pass() -> int:
    """The number of the backward pass that runs in this thread, or `NO_BACKWARD_PASS`.

    PyTorch has no public name for it. We have to know whether a pass that began has ended with an
    exception (autograd tells nobody), and whether a forward pass is the recomputation of a
    checkpoint.
    """
    return torch._C._current_graph_task_id()


def inside_transform() -> bool:
    """Whether a transform of `torch.func`, such as `vmap` or `grad`, runs what runs now.

    A hook that is called there gets tensors that only the transform may change or keep, and no
    public name tells them from others.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that runs now adds to `parameter.grad`. One of torch.autograd.grad
    does not, and a hook on a tensor sees both alike.

    No public name says what a pass computes. `register_multi_grad_hook` asks in this way.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad was asked for the parameter's own gradient
        return False


def call_after_backward_pass(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` once, when the outermost backward pass that runs now is over.

    PyTorch has no public hook for the end of a backward pass. DistributedDataParallel and FSDP
    queue their callbacks in the same way.

    Raises:
        RuntimeError, NotImplementedError, AssertionError: no backward pass runs, or it is one of
            compiled autograd.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def active_ddp_module() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass runs now; None outside of any.

    A module cannot see what calls it, and no public name tells.
    """
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


def forget_active_ddp_module() -> None:
    """Make `active_ddp_module` say that no forward pass of DistributedDataParallel runs.

    `torch.distributed._composable.replicate` says by this attribute that one runs, and takes it
    back in a hook that does not run where the pass raises. No public name sets it.
    """
    DistributedDataParallel._active_ddp_module = None


def version_of(tensor: torch.Tensor) -> int:
    """How many times `tensor`, or a view of its memory, has been changed in place.

    Autograd checks by it that what it has saved is unchanged; no public name reads it.
    """
    return tensor._version


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile` compiles what calling `module` does, which no
    public name tells.
    """
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether the class of `loader` has a way of its own to make batches, by `__iter__` or by what
    that calls to make an iterator, which has no public name.
    """
    kind = type(loader)
    return (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors inside nested tuples, lists, dictionaries and registered classes, such as the
    outputs of a model.

    PyTorch's own hooks find tensors by this function; the registry of further classes, which
    other libraries add theirs to, has no public name.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def stored_entries(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a sparse COO tensor as it stores them, sharing its memory.

    The public `Tensor.indices` and `Tensor.values` refuse a tensor that is not marked as coalesced,
    and autograd loses that mark when it puts a gradient into `grad`.
    """
    return sparse._indices(), sparse._values()


def call_first_after_steps(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Register a post-hook of `optimizer.step()` that is called before those that are there.

    `register_step_post_hook` has no `prepend`, which the hooks of modules have. Whoever puts back
    what was hidden from a step has to do so before others read it.

    Returns:
        A handle with `remove`.
    """
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def is_in_flat_parameter(parameter: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel has laid `parameter` into a flat one that is sharded, or is
    that one.

    With `use_orig_params=True` it looks like any other parameter, and nothing public tells.
    """
    return bool(getattr(parameter, "_fsdp_flattened", False))


def attention_functions() -> dict[str, FunctionType]:
    """The functions that `torch.nn.MultiheadAttention` computes its projections by, by name.

    K-FAC needs the inputs and outputs of each projection. They are local variables of these
    functions, and no public hook shows them.
    """
    names = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")
    return {name: getattr(F, name) for name in names}


def has_avx512_bfloat16() -> bool:
    """Whether the CPU has the instructions of AVX-512 for bfloat16.

    The public `torch.backends.cpu.get_cpu_capability` does not tell, and ranks that differ in it
    round differently.
    """
    return torch.cpu._is_avx512_bf16_supported()


def new_gloo_device(address: str) -> object:
    """What a gloo process group opens its sockets by: it listens at a free port of `address`.

    The public `torch.distributed.new_group` takes no address.
    """
    return dist.ProcessGroupGloo.create_device(hostname=address)


def new_gloo_backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    device: object,
    connect_limit: timedelta,
    wait_limit: timedelta,
) -> dist.ProcessGroupGloo:
    """A gloo process group of our own. Collective.

    The public `torch.distributed.new_group` takes no device, has one limit for connecting and for
    waiting, and gives a group made after another one of the same ranks the same name in the store.

    Args:
        store: where the ranks find each other.
        rank: this rank.
        world_size: number of ranks.
        device: of `new_gloo_device`.
        connect_limit: how long connecting may take.
        wait_limit: how long a collective may take.

    Raises:
        RuntimeError: connecting took longer.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._devices = [device]
    options._timeout = connect_limit
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    backend._set_default_timeout(wait_limit)
    return backend


def new_nccl_backend(
    store: dist.Store, rank: int, world_size: int, *, wait_limit: timedelta
) -> dist.ProcessGroupNCCL:
    """An NCCL process group of our own, for the current CUDA device, in which a collective may take
    `wait_limit`.

    The reasons are those of `new_gloo_backend`. Its watchdog would end the process when a peer
    dies, before anybody has said which; an environment variable alone tells it not to, and it is
    read while the process group is made.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait_limit
    before = os.environ.get(_NCCL_ERROR_HANDLING)
    os.environ[_NCCL_ERROR_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        del os.environ[_NCCL_ERROR_HANDLING]
        if before is not None:
            os.environ[_NCCL_ERROR_HANDLING] = before


def for_each(
    operation: Literal["add_", "copy_", "div_", "lerp_", "mul_", "norm", "zero_"],
    tensors: Sequence[torch.Tensor],
    *others: Any,
    **options: Any,
) -> Any:
    """Have every tensor of a list undergo an operation: on a GPU, by a few kernels for all of them.

    PyTorch's optimizers do so, and it has no public name.

    Args:
        operation: what `Tensor` calls it.
        tensors: any number.
        others: lists as long as `tensors`, or what is the same for all.
        options: as of the operation.
    """
    if not tensors:
        return []
    return getattr(torch, f"_foreach_{operation}")(list(tensors), *others, **options)


def only_makes_state() -> bool:
    """Whether `torch.distributed.checkpoint` steps the optimizer whose hook asks, to make the state
    of one that has none: with gradients of zeros and a learning rate of 0.

    To a hook it is a step like any other, and no public name tells.
    """
    maker = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(maker, "_init_optim_state", None), "__code__", None)
    frame = None if code is None else inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def unscales_gradients_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `GradScaler` leaves it to `optimizer.step` to divide gradients by the scale, as it
    does with `fused=True`.

    `GradScaler` decides by this attribute, which has no public name.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


CALLS_MODULE_OF_DDP: Final = "_run_ddp_forward"
"""The method of DistributedDataParallel that calls its module, and nothing else of its forward
pass.

It tells torch.compile that the module is a DDP's, which then cuts graphs where DDP's buckets end,
and it tells `active_ddp_module`. Neither holds where another exchange takes DDP's place, and no
public name switches it off.
"""

PREPARES_FORWARD_OF_DDP: Final = "_pre_forward"
"""The method of DistributedDataParallel that prepares each forward pass.

A hook on the module does not see `ddp.forward(x)`, nor `torch.distributed._composable.replicate`,
which calls this method and never the module; and no public name is called by all of them.
"""

REGISTERS_BUILTIN_HOOK: Final = "_register_builtin_comm_hook"
"""The method of DistributedDataParallel by which a script chooses one of its communication hooks in
C++. It has no public name, and it hands the reducer to C++.
"""

TELLS_WHAT_DDP_LOGGED: Final = "_get_ddp_logging_data"
"""The method of DDP's logger that Lightning asks for at the end of a training. It has no public
name.
"""


class WeightlessReads(TorchDispatchMode):
    """A context in which tensors on the device "meta", which have sizes and no content, may be
    read: a number of one is 1, and a copy of one on another device holds zeros. What would change
    content is passed over, and what sizes an operation gives is remembered, because PyTorch takes
    up to a millisecond to find them.

    PyTorch raises where content is asked for, and has no public name for what decides that.

    Args:
        computes: by names of operations, what is called with the tensors that they compute with.
        copied: is told how many bytes are copied from there into a tensor on another device, which
            may be smaller.
    """

    def __init__(
        self,
        computes: Mapping[str, Callable[..., None]] = MappingProxyType({}),
        copied: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._computes, self._copied = computes, copied

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options, first = kwargs or {}, args[0] if args else None
        if isinstance(first, list) and first:
            first = first[0]
        if not isinstance(first, torch.Tensor):
            if str(options.get("device")) == "meta":
                return _remembered(func, args, options)
            return func(*args, **options)
        name, is_inplace, is_new = _kind_of(func)
        if not first.is_meta:
            if name == "copy_" and args[1].is_meta:
                self._copied(args[1].nbytes)
                return first.zero_()
            return func(*args, **options)
        if name in self._computes:
            self._computes[name](*args)
        if is_inplace or "out" in options:
            return options.get("out", None if isinstance(args[0], list) else first)
        if name == "_local_scalar_dense":
            return torch.ones((), dtype=first.dtype).item()
        if name == "_to_copy" and (options.get("device") or first.device).type != "meta":
            return torch.zeros(first.shape, dtype=options.get("dtype") or first.dtype)
        return _remembered(func, args, options) if is_new else func(*args, **options)


_SIZES: Final[dict[Any, tuple[torch.Size, torch.dtype]]] = {}


def _remembered(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What an operation gives, which is new memory, without computing its sizes twice."""
    try:
        key = func, tuple(map(_sizes_of, args)), tuple(options.items())
        if key in _SIZES:
            size, dtype = _SIZES[key]
            return torch.empty(size, dtype=dtype, device="meta")
    except TypeError:  # something that cannot be compared, as a list
        return func(*args, **options)
    result = func(*args, **options)
    if isinstance(result, torch.Tensor) and result.is_contiguous():
        _SIZES[key] = result.shape, result.dtype
    return result


def _sizes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.is_meta, value.is_contiguous()
    return tuple(map(_sizes_of, value)) if isinstance(value, list) else (type(value), value)


@cache
def _kind_of(func: Any) -> tuple[str, bool, bool]:
    """An operation's name, whether it writes content alone into its first argument, and whether
    what it gives is new memory.
    """
    first = func._schema.arguments[0].alias_info
    writes = first is not None and first.is_write and torch.Tag.inplace_view not in func.tags
    all_values = (*func._schema.arguments, *func._schema.returns)
    is_new = all(value.alias_info is None for value in all_values)
    return str(func.__name__).partition(".")[0], writes, is_new
