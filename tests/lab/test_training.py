"""The mean of several ranks' models, from the parts of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import CheckpointError
from offbeat.run.coordination import Coordinator
from offbeat.run.records import begin_attempt
from offbeat_lab.attaching import attach_recipe
from offbeat_lab.checkpoints import latest, read_shard
from offbeat_lab.config import Request, task_of
from offbeat_lab.records import Record
from offbeat_lab.train import plan, train
from offbeat_lab.training import mean_of_models, restore


def part(weight: float, **tensors: torch.Tensor) -> dict[str, object]:
    return {"weight": weight, "model": tensors}


def test_the_mean_is_weighted_and_of_integers_the_largest() -> None:
    mean = mean_of_models(
        [
            part(
                1.0,
                w=torch.tensor([1.0, -2.0]),
                steps=torch.tensor(4),
                mask=torch.tensor([True, False]),
            ),
            part(
                3.0,
                w=torch.tensor([5.0, 2.0]),
                steps=torch.tensor(7),
                mask=torch.tensor([False, False]),
            ),
        ]
    )
    assert mean["w"].tolist() == [4.0, 1.0]
    assert (mean["steps"].item(), mean["mask"].tolist()) == (7, [True, False])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
)
def test_equal_models_are_their_own_mean(dtype: torch.dtype) -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(3)).to(dtype)
    mean = mean_of_models([part(weight, w=tensor) for weight in (0.3, 0.5, 1.7)])["w"]
    assert mean.dtype == dtype
    torch.testing.assert_close(mean, tensor, rtol=2 * torch.finfo(torch.float64).eps, atol=0.0)


def test_a_mask_to_add_stays_as_it_is() -> None:
    mask = torch.tensor([0.0, -torch.inf])
    assert torch.equal(mean_of_models([part(1.0, mask=mask), part(1.0, mask=mask)])["mask"], mask)


def test_parts_that_weigh_nothing_have_no_mean() -> None:
    with pytest.raises(CheckpointError, match="weigh nothing together"):
        mean_of_models([part(0.0, w=torch.ones(2))])


@pytest.mark.ranks
def test_another_number_of_workers_begins_from_the_mean_of_models_that_differ(
    npz: Path, tmp_path: Path
) -> None:
    settings = [f"path={npz}", "batch_size=4", "period=4", "warmup=0"]
    request = Request(task="mnist", strategy="localsgd", workers=2, steps=6, settings=settings)
    train(plan(request, out=tmp_path / "run"), lambda report: None)
    resumed = plan(Request(steps=9, workers=1), resume=tmp_path / "run")
    begin_attempt(tmp_path / "run", resumed.config, start_step=resumed.start_step)

    record = Record(tmp_path / "run")
    task = task_of(resumed.config)
    model = task.build_model(seed=99)
    optimizer = task.optimizer(model)
    recipe = offbeat.LocalSGD(period=4, warmup=0)
    attached = attach_recipe(recipe, model, optimizer, world_size=1)
    with attached.session:
        position = restore(record, Coordinator(dist.HashStore(), 0, 1), attached)
    assert position.step == 6
    parts: list[Any] = [
        read_shard(latest(record.checkpoint_root), rank)["model"] for rank in range(2)
    ]  # type: ignore[index,call-overload]
    for name, parameter in model.state_dict().items():
        assert not torch.equal(parts[0][name], parts[1][name])
        torch.testing.assert_close(
            parameter, (parts[0][name] + parts[1][name]) / 2, rtol=1e-6, atol=1e-8
        )
