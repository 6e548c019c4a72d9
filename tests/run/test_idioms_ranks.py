"""Scripts as people write them, unmodified, on two real ranks with several strategies each."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks_support.coupled import of_two_ranks, run_coupled
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

IDIOMS = Path(__file__).parent / "idioms"
STRATEGIES = ["ddp", "allreduce", "gtopk:density=0.1", "localsgd:period=4", "wagma", "spdkfac"]
FEW = ["ddp", "allreduce", "localsgd:period=4"]
"""Where a script does nothing that concerns the other strategies."""


def run_with_each(
    rank: int,
    world_size: int,
    *,
    script: str,
    arguments: list[str],
    strategies: list[str],
    stores: list[dict[str, str]],
) -> list[int]:
    """Run the script with one strategy after the other; how many sessions each attached."""
    dist.destroy_process_group()
    attached = []
    for number, (spec, store) in enumerate(zip(strategies, stores, strict=True)):
        os.environ |= store | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        compiles = "1" if spec == "wagma" else ""  # it takes seconds
        filled = [word.format(number=number, compiles=compiles) for word in arguments]
        torch.manual_seed(rank)
        with warnings.catch_warnings(action="default"):
            attached.append(run_coupled(spec, script, filled).num_attached)
    return attached


def checkpoints(
    run_ranks: RunRanks,
    directory: Path,
    script: str,
    arguments: list[str],
    name: str,
    strategies: list[str],
) -> dict[str, Any]:
    """What rank 0 has saved, by strategy."""
    for number in range(len(strategies)):
        (directory / str(number)).mkdir()
    results = of_two_ranks(
        run_ranks,
        run_with_each,
        strategies,
        timeout_s=100,
        script=str(IDIOMS / script),
        arguments=[word.format(out=f"{directory}/{{number}}") for word in arguments],
    )
    assert results == [[1] * len(strategies)] * 2
    return {
        spec.partition(":")[0]: torch.load(directory / str(number) / name)
        for number, spec in enumerate(strategies)
    }


def test_nanogpt(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Accumulation by a flag, compile, and evaluation on rank 0 alone."""
    saved = checkpoints(
        run_ranks,
        tmp_path,
        "nanogpt.py",
        # With fewer steps a rank that a busy host holds up is a large part of WAGMA's mean behind.
        ["--out_dir={out}", "--compile={{compiles}}", "--max_iters=60"],
        "ckpt.pt",
        STRATEGIES,
    )
    losses = {name: checkpoint["loss"] for name, checkpoint in saved.items()}
    assert losses["allreduce"] == pytest.approx(losses["ddp"], abs=1e-4)
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["ddp"], abs=0.3), name
    compiled = {f"_orig_mod.{name}" for name in saved["ddp"]["model"]}
    assert set(saved["wagma"]["model"]) == compiled


def test_tutorial(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A Trainer around the model, and snapshots of `model.module`."""
    arguments = ["4", "3", "--snapshot_path={out}/ckpt.pt"]
    saved = checkpoints(run_ranks, tmp_path, "tutorial.py", arguments, "ckpt.pt", FEW)
    weights = {name: each["MODEL_STATE"]["weight"] for name, each in saved.items()}
    torch.testing.assert_close(weights["allreduce"], weights["ddp"], atol=1e-5, rtol=0)
    draw = torch.Generator().manual_seed(3)
    torch.randn(512, 20, generator=draw)
    right = torch.randn(20, 1, generator=draw).T
    for name, found in weights.items():
        assert (found - right).norm() < 0.1 * right.norm(), name


def test_imagenet(run_ranks: RunRanks, tmp_path: Path) -> None:
    """BatchNorm, and a validation whose counts the script sums over all ranks itself."""
    arguments = ["--out={out}/last.pt"]
    saved = checkpoints(run_ranks, tmp_path, "imagenet.py", arguments, "last.pt", STRATEGIES)
    for name, checkpoint in saved.items():
        assert checkpoint["best_acc1"] > 0.9, name
        assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values()), name
