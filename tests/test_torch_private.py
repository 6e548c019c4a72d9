"""Each private part of PyTorch that we rely on does what we need it for. A failure here names what
a new version of PyTorch has changed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from offbeat.torch_private import (
    CALLS_MODULE_OF_DDP,
    NO_BACKWARD_PASS,
    REGISTERS_BUILTIN_HOOK,
    TELLS_WHAT_DDP_LOGGED,
    WeightlessReads,
    accumulates,
    active_ddp_module,
    attention_functions,
    call_after_backward_pass,
    call_first_after_steps,
    current_backward_pass,
    for_each,
    has_avx512_bfloat16,
    inside_transform,
    is_compiled_module,
    is_in_flat_parameter,
    iterates_by_itself,
    new_gloo_backend,
    new_gloo_device,
    new_nccl_backend,
    only_makes_state,
    stored_entries,
    tensors_in,
    unscales_gradients_itself,
    version_of,
)


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter([1])


def test_a_loader_with_an_iterator_of_its_own_is_told_from_one_of_pytorch() -> None:
    dataset = TensorDataset(torch.zeros(1))
    own = OwnIterator(dataset)
    assert list(own) == [1], "PyTorch calls it by this name"
    assert iterates_by_itself(own)
    assert not iterates_by_itself(DataLoader(dataset))


def test_a_change_of_a_view_is_a_new_version() -> None:
    flat = torch.zeros(6)
    view = flat.as_strided((2, 2), (2, 1), 1)
    before = version_of(flat)
    torch.nn.utils.clip_grad_norm_(_parameter_with(view), 1.0)
    after = version_of(flat)
    assert after > before
    assert view.sum() == flat.sum()
    assert version_of(flat) == after


def test_a_pass_that_adds_to_a_gradient_is_told_from_one_that_does_not() -> None:
    weight, x, told = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    output = (weight * x).sin()
    output.register_hook(lambda _: told.append(accumulates(weight)))
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    torch.autograd.grad(output.sum(), weight, retain_graph=True)
    output.sum().backward()
    assert told == [False, False, True]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # what torch.func imports is scripted
def test_a_transform_is_seen_while_it_runs() -> None:
    told = []

    def told_of(x: torch.Tensor) -> torch.Tensor:
        told.append(inside_transform())
        return x.sin().sum()

    x = torch.ones(2, 2)
    torch.func.grad(told_of)(x)
    torch.func.vmap(told_of)(x)
    torch.func.jvp(told_of, (x,), (x,))
    assert told == [True] * 3
    told_of(x)
    assert not told[-1]


def test_a_compiled_module_is_known() -> None:
    linear = torch.nn.Linear(2, 2)
    assert not is_compiled_module(linear)
    assert is_compiled_module(torch.compile(linear, backend="eager"))
    linear.compile(backend="eager")
    assert is_compiled_module(linear)


def _parameter_with(gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_a_backward_pass_has_a_number_and_none_runs_outside() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen: list[int] = []
    weight.register_hook(lambda gradient: seen.append(current_backward_pass()))
    before = current_backward_pass()
    weight.sum().backward()
    weight.sum().backward()
    assert before == current_backward_pass() == NO_BACKWARD_PASS
    first, second = seen
    assert len({first, second, NO_BACKWARD_PASS}) == 3


def test_after_an_exception_no_backward_pass_runs() -> None:
    weight = torch.ones(2, requires_grad=True)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        weight.sum().backward()
    assert current_backward_pass() == NO_BACKWARD_PASS


def test_a_callback_runs_once_when_the_outermost_pass_is_over() -> None:
    weight = torch.ones(2, requires_grad=True)
    events: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    begins = torch.ones(2, requires_grad=True)
    outputs = checkpoint(inner, begins, use_reentrant=True)

    def queue(gradient: torch.Tensor) -> None:
        call_after_backward_pass(lambda: events.append("over"))

    outputs.register_hook(queue)
    begins.register_hook(lambda gradient: events.append("last gradient"))
    outputs.sum().backward()
    assert events == ["last gradient", "over"]
    weight.sum().backward()
    assert events == ["last gradient", "over"]


def test_a_ddp_model_is_seen_while_its_forward_pass_runs() -> None:
    class Seeing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(active_ddp_module())
            return super().forward(x)

    seen: list[torch.nn.Module | None] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Seeing(2, 1)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(torch.ones(1, 2))
        model(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    assert seen == [ddp, None]


def test_a_callback_needs_a_backward_pass() -> None:
    with pytest.raises(RuntimeError):
        call_after_backward_pass(lambda: None)


class Outputs(NamedTuple):
    logits: torch.Tensor
    hidden: dict[str, list[torch.Tensor]]
    num_tokens: int


def test_tensors_are_found_in_nested_outputs() -> None:
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    outputs = (Outputs(first, {"layers": [second]}, 7), None, third)
    assert [id(tensor) for tensor in tensors_in(outputs)] == [id(first), id(second), id(third)]


def test_a_hook_may_be_the_first_after_a_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    called = list[str]()
    optimizer.register_step_post_hook(lambda *_: called.append("registered first"))
    handle = call_first_after_steps(optimizer, lambda *_: called.append("called first"))
    optimizer.step()
    assert called == ["called first", "registered first"]
    handle.remove()
    optimizer.step()
    assert called[2:] == ["registered first"]


def test_fused_optimizers_unscale_gradients_themselves() -> None:
    weight = torch.zeros(2, requires_grad=True)
    assert unscales_gradients_itself(torch.optim.Adam([weight], fused=True))
    assert not unscales_gradients_itself(torch.optim.Adam([weight], fused=False))


def test_a_sparse_gradient_shows_its_entries_whether_it_is_coalesced_or_not() -> None:
    embedding = torch.nn.Embedding(4, 1, sparse=True)
    embedding(torch.tensor([3, 1, 3])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    indices, values = stored_entries(gradient)
    assert (indices.tolist(), values.tolist()) == ([[3, 1, 3]], [[1.0], [1.0], [1.0]])
    assert values.data_ptr() == stored_entries(gradient)[1].data_ptr()
    coalesced = gradient.coalesce()
    assert stored_entries(coalesced)[0].tolist() == coalesced.indices().tolist()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore")  # of a world of one
def test_fsdp_marks_the_parameters_that_it_shards(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = torch.nn.Linear(3, 1)
        assert not any(map(is_in_flat_parameter, plain.parameters()))
        sharded = FullyShardedDataParallel(
            plain, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        assert all(map(is_in_flat_parameter, sharded.parameters()))
    finally:
        dist.destroy_process_group()


def test_attention_computes_its_projections_by_these_functions() -> None:
    functions = attention_functions()
    forward = functions["multi_head_attention_forward"]
    assert "multi_head_attention_forward" in torch.nn.MultiheadAttention.forward.__code__.co_names
    assert {"_in_projection_packed", "_in_projection", "linear"} <= set(forward.__code__.co_names)
    for name in ("_in_projection_packed", "_in_projection"):
        assert "linear" in functions[name].__code__.co_names
        assert functions[name].__globals__["linear"] is F.linear


def test_bfloat16_instructions_are_there_or_not() -> None:
    assert has_avx512_bfloat16() in (True, False)


def test_a_gloo_group_of_our_own_sums_and_has_two_limits() -> None:
    backend = new_gloo_backend(
        dist.HashStore(),
        0,
        1,
        device=new_gloo_device("127.0.0.1"),
        connect_limit=timedelta(seconds=30),
        wait_limit=timedelta(hours=7),
    )
    tensor = torch.tensor([1.0, 2.0])
    backend.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.tolist() == [1.0, 2.0]
    assert backend.options._timeout == timedelta(hours=7)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of PyTorch has no NCCL")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_an_nccl_group_of_our_own_has_a_limit() -> None:
    backend = new_nccl_backend(dist.HashStore(), 0, 1, wait_limit=timedelta(hours=7))
    assert backend.options._timeout == timedelta(hours=7)


def test_ddp_calls_its_module_by_one_method_and_that_method_announces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Seeing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(active_ddp_module())
            return super().forward(x)

    def call(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    seen: list[torch.nn.Module | None] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(Seeing(2, 1))
        ddp(torch.ones(1, 2))
        monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, CALLS_MODULE_OF_DDP, call)
        ddp(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    assert seen == [ddp, None]


def test_a_builtin_hook_is_registered_by_a_method_of_ddp() -> None:
    assert callable(getattr(torch.nn.parallel.DistributedDataParallel, REGISTERS_BUILTIN_HOOK))


def test_ddps_logger_tells_what_it_logged() -> None:
    assert callable(getattr(torch.distributed.Logger, TELLS_WHAT_DDP_LOGGED))


def test_every_tensor_of_a_list_undergoes_an_operation() -> None:
    tensors, factor = [torch.ones(2), torch.full((1, 3), 2.0)], torch.tensor(3.0)
    for_each("mul_", tensors, factor)
    for_each("div_", tensors, [torch.tensor(1.0), torch.tensor(2.0)])
    for_each("lerp_", tensors, [torch.zeros(2), torch.zeros(1, 3)], 0.5)
    assert all(torch.equal(each, torch.full_like(each, 1.5)) for each in tensors)
    assert [float(each) for each in for_each("norm", tensors, ord=float("inf"))] == [1.5, 1.5]
    copied = [torch.empty_like(each) for each in tensors]
    for_each("copy_", copied, tensors)
    assert all(map(torch.equal, copied, tensors))


def test_a_tensor_without_content_can_be_read() -> None:
    size = torch.empty(3, device="meta")
    with WeightlessReads():
        assert bool(torch.isfinite(size.sum(dtype=torch.float32)))
        assert float(torch.nn.utils.get_total_norm([size, size])) == 1.0
        assert size.to("cpu", torch.float64).tolist() == size.tolist() == [0.0] * 3
        assert torch.ones(3).copy_(size).tolist() == [0.0] * 3
        assert size.mul_(2).add_(1) is size
        for_each("mul_", [size, size], 2.0)
        for other in (size, torch.empty(2, 3, dtype=torch.float64, device="meta")):
            for _ in range(2):  # what was found is remembered, by size and type
                assert (size + other).shape == other.shape
                assert (size + other).dtype == other.dtype
                assert (size > other).dtype == torch.bool
    with pytest.raises(RuntimeError, match="meta"):
        size.sum().item()


def test_each_tensor_of_a_list_is_copied_and_divided_as_it_would_be_alone() -> None:
    sources = [torch.randn(3, 2), torch.randn(5).double(), torch.randn(()), torch.randn(4)]
    targets = [torch.empty(3, 2), torch.empty(5), torch.empty(()), torch.empty(8)[::2].bfloat16()]
    for_each("copy_", targets, sources)
    alone = [source.to(target.dtype) for source, target in zip(sources, targets, strict=True)]
    torch.testing.assert_close(targets, alone, rtol=0, atol=0)
    divisors = [
        torch.tensor(float(3 + place), dtype=each.dtype) for place, each in enumerate(alone)
    ]
    for_each("div_", targets, divisors)
    alone = [each / float(divisor) for each, divisor in zip(alone, divisors, strict=True)]
    torch.testing.assert_close(targets, alone, rtol=0, atol=0)
    for_each("copy_", [], [])
    for_each("div_", [], [])


def test_a_step_that_makes_state_for_a_checkpoint_is_told_from_one_of_training() -> None:
    model, told = torch.nn.Linear(2, 1), list[bool]()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: told.append(only_makes_state()))
    get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert told == [True, False]
