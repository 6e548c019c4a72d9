"""The mean of several ranks' models, from the parts of a checkpoint."""

from __future__ import annotations

import pytest
import torch

from offbeat.errors import CheckpointError
from offbeat.lab.saving import mean_of_models


def part(weight: float, **tensors: torch.Tensor) -> dict[str, object]:
    return {"weight": weight, "model": tensors}


def test_the_mean_is_weighted_and_of_integers_the_largest() -> None:
    mean = mean_of_models(
        [
            part(1.0, w=torch.tensor([1.0, -2.0]), steps=torch.tensor(4), mask=torch.tensor([True, False])),
            part(3.0, w=torch.tensor([5.0, 2.0]), steps=torch.tensor(7), mask=torch.tensor([False, False])),
        ]
    )
    assert mean["w"].tolist() == [4.0, 1.0]
    assert (mean["steps"].item(), mean["mask"].tolist()) == (7, [True, False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
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
