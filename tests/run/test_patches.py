"""Each entry of the list in `offbeat.run.patches`: what it stands on in PyTorch is as it was, it
does what the list says, and nothing of it is left afterwards.
"""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, fsdp
from torch.distributed._composable import replicate
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import UnsupportedError
from offbeat.run import patches
from offbeat.run.patches import IdleReducer, beside_the_group, patched, processes_wrapped
from offbeat.torch_private import (
    CALLS_MODULE_OF_DDP,
    PREPARES_FORWARD_OF_DDP,
    REGISTERS_BUILTIN_HOOK,
    TELLS_WHAT_DDP_LOGGED,
    active_ddp_module,
)


class Heard:
    """What a script did, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append((name, arguments[0] if arguments else None))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def heard(group: None) -> Iterator[Heard]:
    listener = Heard()
    with patched(listener, exchanges=False, ddp_options={}):
        yield listener


PLACES: list[tuple[object, str]] = [
    (dist, "Reducer"),
    (dist, "Logger"),
    (DistributedDataParallel, "__init__"),
    (DistributedDataParallel, PREPARES_FORWARD_OF_DDP),
    (DistributedDataParallel, CALLS_MODULE_OF_DDP),
    (DistributedDataParallel, "register_comm_hook"),
    (DistributedDataParallel, REGISTERS_BUILTIN_HOOK),
    (DistributedDataParallel, "join_hook"),
    (fsdp, "fully_shard"),
    (torch.optim.Optimizer, "__init__"),
    (torch.amp.GradScaler, "__init__"),
    (torch.amp.GradScaler, "scale"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.amp.GradScaler, "step"),
    (torch.nn.Module, "train"),
    (torch.Tensor, "backward"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (torch.nn.utils.clip_grad, "clip_grad_value_"),
    (dist, "destroy_process_group"),
    (distributed_c10d, "destroy_process_group"),
]


def test_everything_is_put_back() -> None:
    before = [getattr(owner, name) for owner, name in PLACES]
    with patched(Heard(), exchanges=False, ddp_options={}):
        inside = [getattr(owner, name) for owner, name in PLACES]
    assert [getattr(owner, name) for owner, name in PLACES] == before
    assert all(new is not old for new, old in zip(inside, before, strict=True))


def test_the_list_in_the_docstring_names_each_place() -> None:
    table = str(patches.__doc__)
    for _, name in PLACES:
        assert re.search(rf"\b{name}\b", table), name


def test_ddp_makes_its_reducer_and_its_logger_by_these_names(heard: Heard) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    assert isinstance(ddp.reducer, IdleReducer)
    assert isinstance(ddp.logger, IdleReducer)
    assert heard.events == [("ddp_begins", ddp.module), ("ddp_made", ddp)]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_trains_without_its_reducer_and_nothing_is_exchanged(
    heard: Heard, options: dict[str, Any]
) -> None:
    model = torch.nn.Linear(3, 1)
    ddp = DistributedDataParallel(model, **options)
    for synchronised in (True, False, True):
        with nullcontext() if synchronised else ddp.no_sync():
            ddp(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[6.0, 6.0, 6.0]]
    assert list(ddp.state_dict()) == ["module.weight", "module.bias"]


def test_ddps_logger_has_logged_nothing_for_whoever_asks(heard: Heard) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    assert getattr(ddp, TELLS_WHAT_DDP_LOGGED)() == {}


def test_a_patched_ddp_model_can_be_copied_and_saved(heard: Heard) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    copied = copy.deepcopy(ddp)
    torch.save(ddp, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert torch.equal(other.module.weight, ddp.module.weight)


def test_the_module_does_not_know_that_ddp_calls_it(heard: Heard) -> None:
    seen = []
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    ddp.module.register_forward_pre_hook(lambda *_: seen.append(active_ddp_module()))
    ddp(torch.ones(1, 3))
    assert seen == [None]


def test_neither_does_one_that_is_replicated_nor_what_comes_after_a_pass_that_raised(
    heard: Heard,
) -> None:
    seen = []
    model = replicate(torch.nn.Linear(3, 1))
    model.register_forward_pre_hook(lambda *_: seen.append(active_ddp_module()))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 4))
    assert [*seen, active_ddp_module()] == [None, None]


def test_each_way_to_a_forward_pass_is_heard_of(heard: Heard) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    replicated = replicate(torch.nn.Linear(3, 1))
    for call in (ddp, ddp.forward, copy.deepcopy(ddp), replicated):
        heard.events.clear()
        call(torch.ones(1, 3))
        # What tells the reducer to exchange comes before it or after it.
        assert [name for name in heard.names() if name != "exchange_prepared"][-1] == (
            "forward_begins"
        )


def test_a_model_that_ddp_did_not_copy_from_rank_0_is_told_from_one_that_it_did(
    group: None,
) -> None:
    said = []

    class Listener(patches.ScriptListener):
        def ddp_made(self, ddp: DistributedDataParallel, copied: bool) -> None:
            said.append(copied)

    with patched(Listener(), exchanges=False, ddp_options={}):
        for options in ({}, {"init_sync": True}, {"init_sync": False}):
            DistributedDataParallel(torch.nn.Linear(3, 1), **options)
    assert said == [True, True, False]


def test_a_communication_hook_is_ignored(heard: Heard) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    ddp.register_comm_hook(None, lambda state, bucket: bucket)
    assert heard.names() == ["ddp_begins", "ddp_made", "hook_ignored"]


@pytest.mark.parametrize(
    ("option", "value"), [("mixed_precision", object()), ("delay_all_reduce_named_params", [1])]
)
def test_what_exchanges_in_a_way_of_its_own_is_refused(
    heard: Heard, option: str, value: object
) -> None:
    with pytest.raises(UnsupportedError, match=option):
        DistributedDataParallel(torch.nn.Linear(3, 1), **{option: value})


@pytest.mark.parametrize(
    "join", [lambda ddp: ddp.join(), lambda ddp: Join([ddp])], ids=["ddp.join()", "Join([ddp])"]
)
def test_joining_is_refused(heard: Heard, join: Callable[[DistributedDataParallel], Any]) -> None:
    with pytest.raises(UnsupportedError, match="equally many batches"):
        join(DistributedDataParallel(torch.nn.Linear(3, 1)))


def test_optimizers_scalers_losses_and_modes_are_heard_of(heard: Heard) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    loss = model(torch.ones(1, 3)).sum()
    scaler.scale(loss)
    loss.backward()
    model.weight.grad = torch.full((1, 3), torch.inf)
    scaler.step(optimizer)
    model.eval()
    dist.destroy_process_group()
    assert [event for event in heard.events if event[0] != "backward_ended"] == [
        ("optimizer_made", optimizer),
        ("scaler_made", scaler),
        ("scaler_used", scaler),
        ("backward_begins", loss),
        ("scaler_steps", optimizer),
        ("mode_changed", model),
        ("group_ends", None),
    ]
    assert heard.names()[4] == "backward_ended"


def test_a_forward_pass_of_a_divided_module_is_heard_of(heard: Heard) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    net(torch.ones(1, 3))
    assert heard.events == [("sharded_forward_begins", net)]


@pytest.mark.parametrize("exchanges", [True, False])
def test_fsdp_exchanges_no_gradients_between_islands(group: None, exchanges: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("across", "inside"))
    net: Any = torch.nn.Linear(3, 2)
    with patched(Heard(), exchanges=exchanges, ddp_options={}):
        fsdp.fully_shard(net, mesh=mesh)
    expected = ("across", "inside") if exchanges else ("inside",)
    assert net.weight.device_mesh.mesh_dim_names == expected


def test_ddp_may_exchange_itself_with_other_options(group: None) -> None:
    heard = Heard()
    with patched(heard, exchanges=True, ddp_options={"bucket_cap_mb": 3}):
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1), bucket_cap_mb=1)
    assert type(ddp.reducer) is dist.Reducer
    assert ddp.bucket_bytes_cap == 3 * 2**20
    assert heard.names() == ["ddp_begins", "ddp_made"]


def test_a_group_outlives_the_models_that_were_made_with_it() -> None:
    """DDP's reducer, as the last that refers to a group, now and then hangs: see `patches`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with patched(Heard(), exchanges=True, ddp_options={}):
        ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
        group = weakref.ref(ddp.process_group)
        dist.destroy_process_group()
        del ddp
        gc.collect()
        assert group() is not None
    gc.collect()
    assert group() is None


def test_a_worker_that_comes_back_makes_a_group_of_its_own_and_keeps_its_rank() -> None:
    with beside_the_group(rank=2, world_size=3):
        dist.init_process_group("gloo")
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (2, 3)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1.0
            DistributedDataParallel(torch.nn.Linear(3, 1))
        finally:
            dist.destroy_process_group()
    assert dist.init_process_group.__module__ == "torch.distributed.distributed_c10d"


def answer() -> int:
    return 42


def test_the_function_of_a_process_goes_through_the_wrapper() -> None:
    wrapped = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped.append(function)
        return function

    with processes_wrapped(wrap):
        for method in ("fork", "spawn"):
            multiprocessing.get_context(method).Process(target=answer, args=())
    assert wrapped == [answer, answer]
