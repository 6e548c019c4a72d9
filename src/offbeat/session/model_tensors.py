"""Names and tensors of the attached model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch


def digest_of_frozen(model: torch.nn.Module, ignored: Collection[str] = ()) -> str:
    """Of what is not averaged and yet has to be the same on all ranks, but for parameters of the
    names `ignored`.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in ignored:
            digest.update(plain_name(name).encode())
            digest.update(
                parameter.detach()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    return digest.hexdigest()


def persistent_buffers(
    model: torch.nn.Module, ignored: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, but for those of the names `ignored`; the
    others are derived from something else.
    """
    saved = model.state_dict(keep_vars=True).keys() - set(ignored)
    return {plain_name(name): buffer for name, buffer in model.named_buffers() if name in saved}


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile's wrapper puts in front."""
    return name.replace("_orig_mod.", "")
