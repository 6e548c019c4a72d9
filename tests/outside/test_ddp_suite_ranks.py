"""PyTorch's own tests of DistributedDataParallel, from the installed wheel, on two ranks that are
patched as under `offbeat run --strategy allreduce`.

They are for GPUs. Here the CPU stands for each of them, so that a test which passes plainly says
what DistributedDataParallel does, and has to pass under the strategy too.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest, TestCase

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import offbeat
from outside_support.stores import find_by, stores
from ranks_support.coupled import coupled_to
from ranks_support.launch import RanksError, RunRanks

pytestmark = pytest.mark.ranks


REDUCERS_OWN = {
    "test_ddp_comm_hook_logging": "asks which communication hook the reducer has",
    "test_ddp_logging_data_cpu": "asks for the reducer's statistics",
    "test_static_graph_api_cpu": "expects the reducer to refuse a late static graph",
    "test_ddp_profiling_autograd_profiler": "counts the reducer's collectives in a profile",
    "test_ddp_profiling_torch_profiler": "counts the reducer's collectives in a profile",
    "test_invalid_static_graph": "expects the reducer to notice that a graph is not static",
    "test_different_graph_across_ranks": "asks whether the reducer has built its buckets anew",
    "test_ddp_python_error_logged": "expects the reducer to refuse arguments of wrong types",
    "test_detect_ddp_is_actually_static": "asks the reducer whether the graph is static",
    "test_skip_all_reduce_unused_parameters": "asks how many buckets the reducer has reduced",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": "uses the reducer's logger",
    "test_ddp_control_flow_same_across_ranks": "asks the reducer what was used",
    "test_ddp_control_flow_different_across_ranks": "asks the reducer what was used",
    "test_ddp_unused_params_rebuild_buckets_exception": "expects unused parameters to be refused",
    "test_ddp_multiple_nested_unused_params_error": "expects unused parameters to be refused",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": (
        "expects unused parameters to be refused"
    ),
}
"""Tests of what the reducer says of itself, which a strategy's session says in its record."""

REFUSED = {
    "test_ddp_grad_div_uneven_inputs": "join",
    "test_ddp_join_model_equivalence": "join",
    "test_ddp_uneven_input_join_disable": "join",
    "test_ddp_uneven_input_exception": "join",
    "test_ddp_join_respects_forward_sync_buffers_false": "join",
    "test_ddp_native_mixed_precision_ignored_params": "mixed_precision",
}
"""Tests of what is refused, with the word that names it."""

RACES = {
    "test_post_localSGD_optimizer_step_reload": (
        "rank 0 may remove the file before rank 1 has read it"
    ),
}
"""Tests that fail now and then without offbeat, too; they are not run."""

PASS = (
    "test_DistributedDataParallel",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_compile_static_graph",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_module_states",
    "test_ddp_zero_output_features",
    "test_get_data_parallel_params",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)
"""All other tests that pass plainly on a CPU and make a DDP model."""


def import_suite() -> Any:
    """The module of PyTorch's that has the tests."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2"}
    # The base of PyTorch's test cases is of a package that the wheel does not bring; these tests
    # use nothing of it but that name.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=TestCase))  # type: ignore[arg-type]
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.distributed import distributed_test
    return distributed_test


class CpuForGpu(TorchFunctionMode):
    """Whatever is to be on a GPU is on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1:
            args = [args[0], on_cpu(args[1]), *args[2:]]
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_cpu(place: Any) -> Any:
    is_device = isinstance(place, int | str | torch.device) and not isinstance(place, bool)
    return "cpu" if is_device else place


@contextmanager
def cpus_for_gpus(made: list[DistributedDataParallel]) -> Iterator[None]:
    """The block's GPUs are CPUs; DDP models go to `made`."""
    init, to = DistributedDataParallel.__init__, torch.nn.Module.to

    def make(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(ddp, *args, **{**kwargs, "device_ids": None, "output_device": None})
        made.append(ddp)

    with pytest.MonkeyPatch.context() as patch, CpuForGpu():
        patch.setattr(DistributedDataParallel, "__init__", make)
        patch.setattr(torch.nn.Module, "cuda", lambda module, *_: module)
        patch.setattr(
            torch.nn.Module, "to", lambda module, *a, **k: to(module, *map(on_cpu, a), **k)
        )
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        for name in ("set_device", "synchronize", "manual_seed"):
            patch.setattr(torch.cuda, name, lambda *_, **__: None)
        yield


def without_conditions(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test without the decorators that skip it where there are no GPUs."""
    if not hasattr(test, "__wrapped__"):
        return test
    inner = without_conditions(test.__wrapped__)
    decorator = test.__code__.co_qualname
    if "skip" in decorator:
        return inner
    if "with_dist_debug_levels" in decorator:
        levels = inspect.getclosurevars(test).nonlocals["levels"]
        decorated: Callable[..., Any] = import_suite().with_dist_debug_levels(levels)(inner)
        return decorated
    return test


def run_test_of_torch(
    rank: int, world_size: int, *, name: str, directory: str, coupled: bool
) -> dict[str, Any]:
    """Run one test; whether it was skipped, how many DDP models it made, and, where it failed, what
    was raised.
    """
    for folder in ("barrier", "test_dir", "init_dir"):
        (Path(directory) / folder).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = directory
    made: list[DistributedDataParallel] = []
    skipped, raised = False, ""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        module = import_suite()

        class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            pass

        torch.testing._internal.common_utils.set_rng_seed()
        if coupled:
            stack.enter_context(coupled_to(offbeat.AllReduce()))
        stack.enter_context(cpus_for_gpus(made))
        suite = Suite(name)
        suite.rank = rank
        try:
            without_conditions(getattr(Suite, name))(suite)
        except (SkipTest, SystemExit):
            skipped = True
        except Exception as error:
            if name not in REDUCERS_OWN | REFUSED:
                raise
            raised = repr(error)
    num_made = len(made)
    made.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"skipped": skipped, "made": num_made, "raised": raised}


def run_tests_of_torch(
    rank: int, world_size: int, *, names: list[str], directory: str, ports: list[int]
) -> None:
    """Run several tests of `PASS` in one process, each in a group of its own."""
    for name, port in zip(names, ports, strict=True):
        if not dist.is_initialized():
            find_by(port, rank, world_size)
            dist.init_process_group("gloo")
        found = run_test_of_torch(rank, world_size, name=name, directory=directory, coupled=True)
        assert found == {"skipped": False, "made": found["made"], "raised": ""}
        assert found["made"]


def names_of_other_tests(rank: int, world_size: int) -> list[str]:
    """Those that have to do with DistributedDataParallel and are in none of the lists."""
    methods = vars(import_suite().DistributedTest._DistTestBase)
    sources = {name: inspect.getsource(each) for name, each in methods.items() if callable(each)}

    def uses_ddp(name: str, seen: frozenset[str] = frozenset()) -> bool:
        """Itself or by a method that it calls."""
        source = sources[name]
        called = set(re.findall(r"self\.(\w+)\(", source)) & sources.keys() - seen - {name}
        return bool(re.search("ddp|DistributedDataParallel", source, re.IGNORECASE)) or any(
            uses_ddp(each, seen | {name}) for each in called
        )

    tests = [name for name in sources if name.startswith("test_") and uses_ddp(name)]
    return [name for name in tests if name not in {*PASS, *REDUCERS_OWN, *REFUSED, *RACES}]


SOME = (
    "test_DistributedDataParallel",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_broadcast_buffer",
    "test_ddp_ignore_params_arg",
)


def test_some_of_pytorchs_tests_pass(run_ranks: RunRanks, tmp_path: Path) -> None:
    with stores(len(SOME)) as ports:
        run_ranks(run_tests_of_torch, 2, names=SOME, directory=str(tmp_path), ports=ports)


@pytest.mark.outside
@pytest.mark.parametrize("name", [*PASS, *REDUCERS_OWN, *REFUSED])
def test_a_test_of_pytorchs_passes_unless_it_is_about_what_is_replaced(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    found = {}
    for coupled in (False, True):
        (directory := tmp_path / str(coupled)).mkdir()
        found[coupled] = run_ranks(
            run_test_of_torch, 2, name=name, directory=str(directory), coupled=coupled
        )
    assert all(each["made"] and not each["skipped"] for each in found[False])
    assert not any(each["raised"] for each in found[False])
    for each in found[True]:
        assert bool(each["raised"]) == (name not in PASS)
        assert REFUSED.get(name, "") in each["raised"]


@pytest.mark.outside
@pytest.mark.timeout(1200)
def test_no_other_test_of_pytorchs_says_what_ddp_does(run_ranks: RunRanks, tmp_path: Path) -> None:
    """They fail on a CPU, are skipped, or make no DDP model."""
    (names, _) = run_ranks(names_of_other_tests, 2)
    found = {}
    for name in names:
        (directory := tmp_path / name).mkdir()
        with suppress(RanksError):
            found[name] = run_ranks(
                run_test_of_torch,
                2,
                timeout_s=20,
                name=name,
                directory=str(directory),
                coupled=False,
            )
    say_it = {n for n, ranks in found.items() if any(e["made"] and not e["skipped"] for e in ranks)}
    assert say_it == set()
