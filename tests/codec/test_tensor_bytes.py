"""Tensors as bytes, whatever memory they share."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from offbeat.codec.tensor_bytes import packed, to_bytes, unpacked
from offbeat.errors import WireError


def test_tensors_that_share_memory_come_back_whole_under_each_name() -> None:
    flat = torch.arange(12.0)
    tensors = {
        "flat": flat,
        "part": flat[3:7],
        "overlapping": flat[5:9],
        "transposed": flat.view(3, 4).t(),
        "expanded": flat[:1].expand(5),
        "scalar": flat[2],
        "none": flat[:0],
    }
    read = safetensors.torch.load(to_bytes(tensors))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


def test_a_model_with_tied_weights_is_read_into_another_one() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    first, second = tied(), tied()
    second.load_state_dict(safetensors.torch.load(to_bytes(first.state_dict())))
    assert second[1].weight is second[0].weight
    assert torch.equal(second[0].weight, first[0].weight)


SENT = {
    "half": torch.arange(3.0, dtype=torch.bfloat16),
    "narrow": torch.tensor(1 - 2j, dtype=torch.complex64),
    "wide": torch.tensor([[1 + 2j, 3j]], dtype=torch.complex128),
    "numbers": torch.tensor([1, 2]),
}


def test_what_a_worker_sends_of_any_type_is_read_to_the_bit() -> None:
    read = unpacked(packed(SENT), "the state")
    assert read.keys() == SENT.keys()
    for name, tensor in SENT.items():
        assert torch.equal(read[name], tensor), name
        assert read[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    "content", [b"", packed(SENT)[:-8], to_bytes({"pairs/of none": torch.zeros(3)})]
)
def test_what_nobody_has_packed_is_refused(content: bytes) -> None:
    with pytest.raises(WireError, match="the state is damaged"):
        unpacked(content, "the state")
