"""Every module of PyTorch that has parameters, as PyTorch's own tests construct and call it: where
nothing is left out of an exchange, the parameters are those that a single process would train, and
at a large damping K-FAC's gradients are plain ones divided by it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

import offbeat
from outside_support.serial import Losses, Serial

NUM_STEPS: Final = 3
TOLERANCE: Final = 1e-9

DAMPING: Final = 1e17

STRATEGIES: dict[str, Any] = {
    "allreduce": offbeat.AllReduce(),
    "gtopk": offbeat.GTopK(density=1.0, collective="reduce_scatter"),
}
KFAC: Final[dict[str, tuple[Any, float]]] = {
    # The root of the damping is added to the eigenvalues of each factor.
    "spdkfac": (offbeat.SPDKFAC(damping=DAMPING, kl_clip=None), 1e-6),
}
"""With how far scaled gradients may be from plain ones."""

REFUSED: Final = {
    f"Lazy{kind}{num_dims}d": "has no shape yet"
    for kind in ("Conv", "ConvTranspose")
    for num_dims in (1, 2, 3)
}
"""What is refused, with the reason that is given."""

PRECONDITIONED: Final = frozenset(
    {
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "Conv1d",
        "Conv2d",
        "Embedding",
        "GroupNorm",
        "LayerNorm",
        "Linear",
        "MultiheadAttention",
        "RMSNorm",
        "Transformer",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerEncoderLayer",
    }
)
"""The modules of which K-FAC preconditions something. The others get plain gradients."""

UNSEEN: Final = frozenset({"LinearCrossEntropyLoss"})
"""What uses a layer's weight without calling the layer, of which K-FAC warns."""

Calls = list[list[Any]]
"""By module and the way in which it was constructed: what it is called with."""


def infos() -> list[Any]:
    # Takes seconds to import, and only ranks need it.
    from torch.testing._internal.common_modules import module_db

    return [info for info in module_db if any(map(has_parameters, constructed(info, 1)))]


def inputs_of(info: Any, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
    )


def constructed(info: Any, at_most: int | None) -> list[nn.Module]:
    given = [each.constructor_input for each in inputs_of(info, 0)[:at_most]]
    return [info.module_cls(*each.args, **each.kwargs) for each in given]


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def name_of(info: Any) -> str:
    return str(info.name).removeprefix("nn.")


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    """Of what modules return, however it is nested."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from tensors_in(each)


class Bundle(nn.Module):
    """Modules of one kind or of many, each constructed in many ways, side by side.

    Args:
        chosen: the kinds.
        at_most: so many ways of each; None: all.
    """

    def __init__(self, chosen: Sequence[Any], at_most: int | None) -> None:
        super().__init__()
        self._chosen, self._at_most = chosen, at_most
        torch.manual_seed(1)
        for info in chosen:
            self.add_module(name_of(info), nn.ModuleList(constructed(info, at_most)))

    def forward(self, calls: Calls) -> list[Any]:
        return [
            module(*each.args, **each.kwargs)
            for modules, inputs in zip(self.children(), calls, strict=True)
            for module, each in zip(modules, inputs, strict=True)
        ]

    def calls(self, rank: int, step: int) -> Calls:
        seed = 1 + 100 * step + rank
        return [
            [each.forward_input for each in inputs_of(info, seed)[: self._at_most]]
            for info in self._chosen
        ]

    def losses(self, world_size: int, step: int) -> Losses:
        """The loss of each rank: what all modules return that is real, squared."""

        def loss(rank: int, net: nn.Module) -> torch.Tensor:
            calls = self.calls(rank, step)
            torch.manual_seed(rank)  # of dropout
            real = [each for each in tensors_in(net(calls)) if each.is_floating_point()]
            return torch.stack([each.square().mean() for each in real]).sum()

        return [partial(loss, rank) for rank in range(world_size)]


def bundles(*, alone: bool) -> Iterator[Bundle]:
    """All kinds together, each constructed in one way; `alone`: by themselves, in all ways."""
    accepted = [info for info in infos() if name_of(info) not in REFUSED]
    groups = [[info] for info in accepted] if alone else [accepted]
    for group in groups:
        yield Bundle(group, None if alone else 1).double()


def sgd(net: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def off_after_training(bundle: Bundle, strategy: Any, rank: int, world_size: int) -> list[str]:
    serial, optimizer = Serial(bundle, world_size, sgd), sgd(bundle)
    with offbeat.attach(bundle, optimizer, strategy):
        for step in range(NUM_STEPS):
            losses = bundle.losses(world_size, step)
            losses[rank](bundle).backward()
            optimizer.step()
            optimizer.zero_grad()
            serial.step_together(losses)
    expected = dict(serial.nets[0].named_parameters())
    return [
        f"{name} is off by {error:.1g}"
        for name, parameter in bundle.named_parameters()
        if not (error := apart(parameter.detach(), expected[name].detach())) < TOLERANCE
    ]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def why_refused(info: Any) -> str | None:
    """What attach says of a module; None: nothing."""
    net = constructed(info, 1)[0].double()
    try:
        offbeat.attach(net, sgd(net), offbeat.AllReduce()).close()
    except offbeat.OffbeatError as error:
        return str(error)
    return None


def kfac_outcome(
    bundle: Bundle, label: str, rank: int, world_size: int
) -> tuple[list[str], list[str]]:
    """The parameters that are preconditioned, and what is wrong with them and with the others."""
    strategy, tolerance = KFAC[label]
    preconditioned, wrong = [], []
    serial, optimizer = Serial(bundle, world_size, sgd), sgd(bundle, lr=0.0)
    losses = bundle.losses(world_size, 0)
    with offbeat.attach(bundle, optimizer, strategy):
        losses[rank](bundle).backward()
        optimizer.step()
    plain = serial.gradients(losses)
    for (name, parameter), expected in zip(bundle.named_parameters(), plain, strict=True):
        if expected is None or parameter.grad is None:
            if expected is not parameter.grad:
                wrong.append(f"one of {name}'s gradients is None")
        elif apart(parameter.grad, expected) > TOLERANCE:
            error = apart(parameter.grad * DAMPING, expected)
            preconditioned.append(name)
            if not error < tolerance:
                wrong.append(f"{name}'s preconditioned gradient is off by {error:.1g}")
    return preconditioned, wrong


def outcomes(rank: int, world_size: int, *, alone: bool) -> dict[str, Any]:
    for own in ("enable_nested_tensor", "linear_cross_entropy"):  # PyTorch warns of its own inputs
        warnings.filterwarnings("ignore", own)
    for name in UNSEEN:
        warnings.filterwarnings("ignore", f"K-FAC has not seen '{name}")
    refused = {name_of(info): why_refused(info) for info in infos() if info.is_lazy or alone}
    preconditioned, wrong = set[str](), list[str]()
    for bundle in bundles(alone=alone):
        for label, strategy in STRATEGIES.items():
            found = off_after_training(copy.deepcopy(bundle), strategy, rank, world_size)
            wrong += [f"{label}: {problem}" for problem in found]
        if not alone or {name for name, _ in bundle.named_children()} <= PRECONDITIONED:
            for label in KFAC:
                names, found = kfac_outcome(copy.deepcopy(bundle), label, rank, world_size)
                preconditioned |= {name.partition(".")[0] for name in names}
                wrong += [f"{label}: {problem}" for problem in found]
    return {"refused": refused, "preconditioned": sorted(preconditioned), "wrong": wrong}
