"""Scripts of a few lines, each with a habit of its own: with `offbeat run --strategy allreduce`
every rank ends with what it has with DistributedDataParallel alone, and with a sparse strategy all
ranks end with the same.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from outside_support.stores import find_by, stores
from ranks_support.coupled import coupled_to
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common")

STRATEGIES: dict[str, Any] = {
    "plain": None,
    "allreduce": offbeat.AllReduce(),
    "gtopk": offbeat.GTopK(density=0.5, collective="reduce_scatter"),
}

OWN = {
    "accumulated": {"gradients"},
    "ignored": {"0.bias", "1.running_mean", "1.running_var"},
    "not_synchronised": {
        f"{model}.1.{name}" for model in "01" for name in ("running_mean", "running_var")
    },
}
"""By script: what is each rank's own."""

DENSE_ONLY = {"accumulated"}
"""Synchronises twice before a step, which a sparse strategy refuses."""

WITHOUT_OPTIMIZER = {"by_hand"}
"""Has its gradients exchanged as DistributedDataParallel does it, whatever the strategy is."""

TORCHRUN = [
    sys.executable,
    *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
]
OFFBEAT_RUN = [str(Path(sys.executable).with_name("offbeat")), "run", "--workers", "2"]


def run_with_each(
    rank: int, world_size: int, *, script: str, directory: str, labels: list[str], ports: list[int]
) -> list[int]:
    """Run `script` once with each strategy; how many sessions each of them attached."""
    dist.destroy_process_group()
    attached, kept = [], list[Any]()
    sys.path[0] = str(Path(script).parent)
    for label, port in zip(labels, ports, strict=True):
        find_by(port, rank, world_size)
        sys.argv = [script, f"{directory}/{label}"]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="default"))
            strategy = STRATEGIES[label]
            found = None if strategy is None else stack.enter_context(coupled_to(strategy))
            runpy.run_path(script, run_name="__main__")
        if found is not None:
            attached.append(found.num_attached)
        if dist.is_initialized():
            # DDP's reducer must not be the last that refers to a group, as in `run.patches`.
            kept.append(dist.group.WORLD)
            dist.destroy_process_group()
        sys.modules.pop("common")
    return attached


def results_in(directory: Path) -> list[Any]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def shared_results_in(directory: Path, name: str) -> list[Any]:
    return [
        {key: value for key, value in of_rank.items() if key not in OWN.get(name, ())}
        for of_rank in results_in(directory)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_as_with_ddp(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    labels = [label for label in STRATEGIES if label != "gtopk" or name not in DENSE_ONLY]
    for label in labels:
        (tmp_path / label).mkdir()
    with stores(len(labels)) as ports:
        attached = run_ranks(
            run_with_each,
            2,
            timeout_s=60,
            script=str(SCRIPTS / f"{name}.py"),
            directory=str(tmp_path),
            labels=labels,
            ports=ports,
        )
    for with_allreduce, *with_others in attached:
        assert with_allreduce >= 1
        assert all(bool(count) == (name not in WITHOUT_OPTIMIZER) for count in with_others)
    assert results_in(tmp_path / "allreduce") == results_in(tmp_path / "plain")
    for label in labels:
        first, second = shared_results_in(tmp_path / label, name)
        assert first == second


@pytest.mark.outside
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_ends_as_under_torchrun(tmp_path: Path, name: str) -> None:
    """The same by the commands that a user types."""
    record = str(tmp_path / "record")
    commands = {
        "torchrun": TORCHRUN,
        "offbeat": [*OFFBEAT_RUN, "--strategy", "allreduce", "--out", record],
    }
    for launcher, words in commands.items():
        (tmp_path / launcher).mkdir()
        subprocess.run(
            [*words, str(SCRIPTS / f"{name}.py"), str(tmp_path / launcher)],
            # PyTorch's threads now and then abort a process that leaves, after all is written.
            check=launcher == "offbeat",
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert results_in(tmp_path / "offbeat") == results_in(tmp_path / "torchrun")


def weights_when_wrapped_anew(rank: int, world_size: int) -> list[float]:
    """Of a model that each rank has trained by steps of its own length: once a new wrapper is made,
    and after a step through the first one.
    """
    weights = []
    with coupled_to(offbeat.LocalSGD(period=8, warmup=0)):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            (-(rank + 1) * ddp(torch.ones(1))).backward()
            optimizer.step()

        for _ in range(4):
            step()
        DistributedDataParallel(model)
        weights.append(model.weight.item())
        step()
        weights.append(model.weight.item())
    return weights


def test_a_model_that_is_wrapped_anew_has_what_all_ranks_have_learned(run_ranks: RunRanks) -> None:
    assert run_ranks(weights_when_wrapped_anew, 2) == [[6.0, 7.0], [6.0, 8.0]]
