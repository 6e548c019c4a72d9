"""Scripts of a few lines, each with a habit of its own: with `offbeat run --strategy allreduce`
every rank ends with what it has with DistributedDataParallel alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import offbeat
from offbeat.run.coupling import ModelListener, ScriptSessions
from offbeat.run.recipes import StrategyRecipe
from offbeat.run.worker import patched_for, run_as_main
from offbeat_lab.config import ScriptCommand
from offbeat_lab.rendezvous import StoreServer
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common")


def run_plainly_and_coupled(
    rank: int, world_size: int, *, script: str, directories: list[str], stores: list[dict[str, str]]
) -> int:
    """Run `script` as torchrun would, and then as `offbeat run` does; how many sessions that
    attached.
    """
    dist.destroy_process_group()
    recipe = StrategyRecipe(offbeat.AllReduce())
    sessions = ScriptSessions(recipe, ModelListener())
    for directory, store in zip(directories, stores, strict=True):
        os.environ |= store | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="default"))
            if directory == directories[1]:
                stack.enter_context(patched_for(recipe, sessions))
                stack.callback(sessions.close, None)
            run_as_main(ScriptCommand(path=script, arguments=[directory]))
        dist.destroy_process_group()
        sys.modules.pop("common")
    return sessions.num_attached


def results_in(directory: Path) -> list[Any]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_as_with_ddp(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    directories = [tmp_path / "plain", tmp_path / "coupled"]
    for directory in directories:
        directory.mkdir()
    servers = [StoreServer() for _ in directories]
    attached = run_ranks(
        run_plainly_and_coupled,
        2,
        timeout_s=30,
        script=str(SCRIPTS / f"{name}.py"),
        directories=[str(directory) for directory in directories],
        stores=[server.environment(0, 2) for server in servers],
    )
    assert min(attached) >= 1
    plain, coupled = map(results_in, directories)
    assert coupled == plain


@pytest.mark.outside
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_as_under_torchrun(tmp_path: Path, name: str) -> None:
    """The same by the commands that a user types."""
    commands = {
        "torchrun": [
            "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        ],
        "offbeat": [
            "-m", "offbeat_lab.cli", "run", "--strategy", "allreduce", "--workers", "2",
            "--out", str(tmp_path / "record"),
        ],
    }  # fmt: skip
    for launcher, words in commands.items():
        (tmp_path / launcher).mkdir()
        subprocess.run(
            [sys.executable, *words, str(SCRIPTS / f"{name}.py"), str(tmp_path / launcher)],
            check=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert results_in(tmp_path / "offbeat") == results_in(tmp_path / "torchrun")
