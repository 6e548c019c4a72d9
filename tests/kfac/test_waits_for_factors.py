"""How often the host waits for a device in a step of K-FAC.

On a CPU that costs nothing, so the way of a GPU is taken there, and what it asks for is counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import offbeat
from offbeat.kfac import inverses, preconditioner

_ASK = {
    *("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__"),
    *("nonzero", "masked_select", "bincount", "unique", "cholesky", "cholesky_inverse", "inv"),
}


class Waits(TorchFunctionMode):
    """Notes calls for which the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.num_seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", "")
        # A number is copied to a GPU as a tensor, from memory that is not pinned.
        copies = name == "where" and any(isinstance(each, int | float) for each in args)
        self.num_seen += 1
        if name in _ASK or copies:
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


def network(num_layers: int) -> nn.Module:
    """Convolutions of equal shape and of shapes of their own, with norms, and a head."""
    layers: list[nn.Module] = []
    channels = 3
    for number in range(num_layers):
        wide = 4 + number // 2
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
        channels = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 5))


def waits_of_steps(num_layers: int, strategy: offbeat.SPDKFAC) -> list[list[str]]:
    """What the host waits for in steps 4 to 8, of which 4 and 8 have factors and inversions."""
    torch.manual_seed(0)
    model = network(num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noted = []
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(9):
            images, labels = torch.randn(16, 3, 4, 4), torch.randint(5, (16,))
            with Waits() as waits:
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert waits.num_seen > 10 * num_layers
            noted.append(waits.noted)
    return noted[4:]


@pytest.mark.parametrize("inverse_dtype", ["float32", "bfloat16"])
def test_waits_of_a_step_do_not_grow_with_the_number_of_layers(
    inverse_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (inverses, preconditioner):
        monkeypatch.setattr(module, "is_asynchronous", lambda device: True)
    strategy = offbeat.SPDKFAC(
        factor_interval=4,
        inverse_interval=4,
        curvature=offbeat.Curvature(inverse_dtype=inverse_dtype),
    )
    few, many = (waits_of_steps(num_layers, strategy) for num_layers in (3, 12))
    assert few == many
    updates, others = [few[0], few[4]], few[1:4]
    assert all(len(waits) <= 1 for waits in others), others
    assert all(len(waits) <= 4 for waits in updates), updates
