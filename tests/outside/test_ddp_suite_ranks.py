"""PyTorch's own tests of DistributedDataParallel, from the installed wheel, on two ranks that are
patched as under `offbeat run --strategy allreduce`.

They are for GPUs. Here the CPU stands for each of them, so that a test which passes plainly says
what DistributedDataParallel does, and has to pass under the strategy too.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from offbeat.script.coupling import ModelListener, ScriptSessions
from offbeat.script.recipes import StrategyRecipe
from offbeat.script.worker import patched_for
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


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
        for name in ("set_device", "synchronize", "manual_seed"):
            patch.setattr(torch.cuda, name, lambda *_, **__: None)
        yield


def without_conditions(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test without the decorators that skip it where there are no GPUs."""
    while hasattr(test, "__wrapped__") and "skip" in test.__code__.co_qualname:
        test = test.__wrapped__
    return test


def run_test_of_torch(
    rank: int, world_size: int, *, name: str, directory: str, coupled: bool
) -> dict[str, Any]:
    """Run one test; what became of it."""
    for folder in ("barrier", "test_dir", "init_dir"):
        (Path(directory) / folder).mkdir(exist_ok=True)
    (Path(directory) / "lockfile").touch()
    os.environ["TEMP_DIR"] = directory
    recipe = StrategyRecipe(offbeat.AllReduce())
    sessions = ScriptSessions(recipe, ModelListener())
    made: list[DistributedDataParallel] = []
    skipped = False
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        module = import_suite()

        class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            pass

        torch.testing._internal.common_utils.set_rng_seed()
        if coupled:
            stack.enter_context(patched_for(recipe, sessions))
        stack.enter_context(cpus_for_gpus(made))
        suite = Suite(name)
        suite.rank = rank
        try:
            without_conditions(getattr(Suite, name))(suite)
        except (SkipTest, SystemExit):
            skipped = True
        if coupled:
            sessions.close(None)
    num_made = len(made)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"skipped": skipped, "made": num_made, "attached": sessions.num_attached}


def names_of_tests(rank: int, world_size: int) -> list[str]:
    """Those that have to do with DistributedDataParallel, by their names or their code."""
    suite = import_suite().DistributedTest._DistTestBase
    return [
        name
        for name, test in vars(suite).items()
        if name.startswith("test_") and "ddp" in inspect.getsource(test).lower()
    ]
