"""PyTorch's own tests of DistributedDataParallel, from the installed wheel, on two ranks that are
patched as under `offbeat run --strategy allreduce`.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest, TestCase

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.script.coupling import ModelListener, ScriptSessions
from offbeat.script.recipes import StrategyRecipe
from offbeat.script.worker import patched_for
from ranks_support.launch import RanksError, RunRanks

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


def run_test_of_torch(
    rank: int, world_size: int, *, name: str, directory: str, coupled: bool
) -> dict[str, Any]:
    """Run one test; what became of it."""
    os.environ["TEMP_DIR"] = directory
    num_made = 0
    recipe = StrategyRecipe(offbeat.AllReduce())
    sessions = ScriptSessions(recipe, ModelListener())
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        module = import_suite()

        class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            pass

        if coupled:
            stack.enter_context(patched_for(recipe, sessions))
        original = DistributedDataParallel.__init__

        def counted(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            nonlocal num_made
            num_made += 1
            original(self, *args, **kwargs)

        stack.callback(setattr, DistributedDataParallel, "__init__", original)
        DistributedDataParallel.__init__ = counted  # type: ignore[method-assign]
        torch.testing._internal.common_utils.set_rng_seed()
        suite = Suite(name)
        suite.rank = rank
        skipped = False
        try:
            getattr(suite, name)()
        except (SkipTest, SystemExit):
            skipped = True
        if coupled:
            sessions.close(None)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"skipped": skipped, "made": num_made, "attached": sessions.num_attached}


def names_of_tests(rank: int, world_size: int) -> list[str]:
    """Those that have to do with DistributedDataParallel, by their names or their code."""
    suite = import_suite().DistributedTest._DistTestBase
    return [
        name
        for name, test in vars(suite).items()
        if name.startswith("test_")
        and ("ddp" in (name + inspect.getsource(test)).lower() or "DistributedData" in inspect.getsource(test))
    ]
