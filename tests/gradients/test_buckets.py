"""What a bucket asks of its parameters' memory."""

from __future__ import annotations

import pytest
import torch

from offbeat.gradients.buckets import is_dense


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(()), True),
    ],
    ids=["contiguous", "transposed", "channels last", "with gaps", "expanded", "scalar"],
)
def test_dense_is_what_decides_the_strides_of_a_gradient(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense
    weight = tensor.clone(memory_format=torch.preserve_format).requires_grad_()
    if dense:
        (weight * 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.stride() == tensor.stride()
