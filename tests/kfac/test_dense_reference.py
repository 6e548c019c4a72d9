"""Several steps of several ranks against K-FAC as its papers write it: every layer is a dense
matrix, every factor a sum over single examples, and owners of DP-KFAC look at their own batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat.kfac.callback import KFACCallback
from thread_support.world import ThreadDriver, results_of, session_on

LR, MOMENTUM, WEIGHT_DECAY, NUM_EXAMPLES, NUM_WORDS, LENGTH = 0.05, 0.9, 0.01, 3, 7, 6
DAMPING, KL_CLIP, DECAY, FACTOR_INTERVAL, INVERSE_INTERVAL = 0.05, 0.02, 0.9, 2, 3
STRATEGIES = [
    kind(
        damping=DAMPING,
        kl_clip=KL_CLIP,
        factor_interval=FACTOR_INTERVAL,
        inverse_interval=INVERSE_INTERVAL,
        curvature=offbeat.Curvature(decay=DECAY, sample_stride=1),
    )
    for kind in (offbeat.DPKFAC, offbeat.SPDKFAC)
]

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Matrices = dict[str, torch.Tensor]
"""Of each layer, shape (groups, outputs, inputs), the bias as last column."""


class Net(nn.Module):
    """Convolutions of all kinds, an attention, a layer that may be left out, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(
            2, 4, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), groups=2, bias=False
        )
        self.b = nn.Conv2d(4, 4, 3, padding="same", groups=4)
        self.embed = nn.Embedding(NUM_WORDS, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.side = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, NUM_WORDS)
        self.head.weight = self.embed.weight

    def forward(self, images: torch.Tensor, words: torch.Tensor, uses_side: bool) -> torch.Tensor:
        x = self.b(self.a(images).tanh()).flatten(2).mT + self.embed(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if uses_side:
            x = x + self.side(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]

    def matrices(self) -> Matrices:
        def conv(weight: torch.Tensor, groups: int) -> torch.Tensor:
            return weight.unflatten(0, (groups, -1)).permute(0, 1, 3, 4, 2).flatten(2)

        def beside(weight: torch.Tensor, bias: torch.Tensor, groups: int = 1) -> torch.Tensor:
            return torch.cat(
                [each.unflatten(0, (groups, -1)) for each in (weight, bias[:, None])], 2
            )

        attention = self.attention
        found = {
            "a": conv(self.a.weight, 2),
            "b": torch.cat([conv(self.b.weight, 4), self.b.bias[:, None, None]], 2),
            "embed": self.embed.weight.mT[None],
            "head.bias": self.head.bias[None, :, None],
            "attention.in_proj": beside(attention.in_proj_weight, attention.in_proj_bias, 3),
            "attention.out_proj": beside(attention.out_proj.weight, attention.out_proj.bias),
            "side": self.side.weight[None],
        }
        return {name: matrix.detach().clone() for name, matrix in found.items()}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def batch_of(rank: int, step: int, number: int) -> Batch:
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    words = torch.randint(NUM_WORDS, (2, NUM_EXAMPLES, LENGTH), generator=draw)
    return torch.randn(NUM_EXAMPLES, 2, 3, 3, generator=draw, dtype=torch.float64), *words


class Seen(NamedTuple):
    """What a layer computes of one example: shapes (groups, positions, inputs) and outputs."""

    inputs: torch.Tensor
    outputs: torch.Tensor


def one_example(
    matrices: Matrices, image: torch.Tensor, words: torch.Tensor, uses_side: bool
) -> tuple[torch.Tensor, dict[str, Seen]]:
    """The model's output, and what its layers see."""
    seen: dict[str, Seen] = {}

    def layer(name: str, inputs: torch.Tensor, matrix: torch.Tensor | None = None) -> torch.Tensor:
        matrix = matrices[name] if matrix is None else matrix
        inputs = inputs.expand(len(matrix), -1, -1)
        if inputs.shape[2] < matrix.shape[2]:
            inputs = F.pad(inputs, (0, 1), value=1.0)
        outputs = inputs @ matrix.mT
        outputs.retain_grad()
        seen[name] = Seen(inputs.detach(), outputs)
        return outputs

    def patches(image: torch.Tensor, groups: int, taps: int, **window: Any) -> torch.Tensor:
        columns = F.unfold(image[None], **window)[0].unflatten(0, (groups, -1, taps))
        return columns.permute(0, 3, 2, 1).flatten(2)

    of_a = layer(
        "a", patches(image, 2, 6, kernel_size=(3, 2), stride=(2, 1), padding=1, dilation=(1, 2))
    )
    maps = of_a.tanh().mT.reshape(4, 2, 3)
    of_b = layer("b", patches(maps, 4, 9, kernel_size=3, padding=1))
    x = of_b[:, :, 0].mT + layer("embed", F.one_hot(words, NUM_WORDS).double()[None])[0]
    query, key, value = (
        each.unflatten(1, (2, 2)).movedim(1, 0) for each in layer("attention.in_proj", x)
    )
    mixed = (query @ key.mT / 2**0.5).softmax(-1) @ value
    x = x + layer("attention.out_proj", mixed.movedim(0, 1).flatten(1))[0]
    if uses_side:
        x = x + layer("side", x)[0].tanh()
    ones = torch.ones(1, len(x), 1, dtype=torch.float64)
    output = layer("head", x[None], matrices["embed"].mT) + layer("head.bias", ones)
    return output[0], seen


class Reference:
    """K-FAC of dense matrices.

    Args:
        matrices: to begin with.

    Attributes:
        matrices: the layers' weights.
        owners: by layer, the only rank of whose examples its factors are; all ranks' where no layer
            has one.
    """

    def __init__(self, matrices: Matrices) -> None:
        self.matrices, self.owners = matrices, dict[str, int]()
        self._averages: dict[str, tuple[Any, Any, float]] = {}
        self._inverses: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._momenta: Matrices = {}

    def step(self, step: int, batches: Sequence[Sequence[Batch]], sides: Sequence[bool]) -> None:
        """`batches` by rank, the batches whose gradients are accumulated; `sides` by rank."""
        examples = [
            (rank, image, words, target)
            for rank, of_rank in enumerate(batches)
            for batch in of_rank
            for image, words, target in zip(*batch, strict=True)
        ]
        gradients: dict[str, torch.Tensor] = {}
        rows: dict[str, list[Seen]] = {}
        for rank, image, words, target in examples:
            weights = {name: each.clone().requires_grad_() for name, each in self.matrices.items()}
            output, seen = one_example(weights, image, words, sides[rank])
            loss_of(output, target).backward()
            for name, weight in weights.items():
                if weight.grad is not None:
                    gradients[name] = gradients.get(name, 0) + weight.grad / len(examples)
            for name, (inputs, outputs) in seen.items():
                owner = self.owners.get("embed" if name == "head" else name, rank)
                if rank == owner:
                    assert outputs.grad is not None
                    rows.setdefault(name, []).append(Seen(inputs, outputs.grad))
        if step % FACTOR_INTERVAL == 0 or step < FACTOR_INTERVAL:
            for name, some in rows.items():
                a = sum(each.inputs.mT @ each.inputs for each in some)
                g = sum(each.outputs.mT @ each.outputs for each in some) / len(some)
                before = self._averages.get(name, (0, 0, 0))
                new = a / sum(each.inputs.shape[1] for each in some), g, 1.0
                self._averages[name] = tuple(
                    DECAY * old + (1 - DECAY) * now for old, now in zip(before, new, strict=True)
                )
        if step in (0, 1, 2) or step % INVERSE_INTERVAL == 0:
            averages = {name: (a / m, g / m) for name, (a, g, m) in self._averages.items()}
            if "head" in averages:
                averages["embed"] = joined(averages["embed"], averages.pop("head")[::-1])
            self._inverses = {name: damped_inverses(*pair) for name, pair in averages.items()}
        preconditioned = {
            name: g @ gradients[name] @ a
            for name, (a, g) in self._inverses.items()
            if name in gradients
        }
        change = sum(LR**2 * (p * gradients[name]).sum() for name, p in preconditioned.items())
        nu = min(1.0, float((KL_CLIP / torch.as_tensor(change)) ** 0.5))
        for name, gradient in gradients.items():
            direction = nu * preconditioned[name] if name in preconditioned else gradient
            direction = direction + WEIGHT_DECAY * self.matrices[name]
            self._momenta[name] = MOMENTUM * self._momenta.get(name, 0) + direction
            self.matrices[name] = self.matrices[name] - LR * self._momenta[name]


def trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum()


def joined(*uses: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One product for both ways in which a weight is used, of which the words' side is diagonal."""
    roots = [(trace(u) * trace(w)).sqrt() for u, w in uses]
    scale = (sum(root**2 for root in roots)) ** 0.5 / sum(roots)
    u, w = (
        scale
        * sum(root * use[side] / trace(use[side]) for root, use in zip(roots, uses, strict=True))
        for side in (0, 1)
    )
    return u * torch.eye(NUM_WORDS).double(), w


def damped_inverses(a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    means = [trace(each) / (len(each) * each.shape[1]) for each in (a, g)]
    pi = (means[0] / means[1]) ** 0.5
    of_a, of_g = DAMPING**0.5 * pi, DAMPING**0.5 / pi
    return (
        torch.linalg.inv(a + of_a * torch.eye(a.shape[1]).double()),
        torch.linalg.inv(g + of_g * torch.eye(g.shape[1]).double()),
    )


class Outcome(NamedTuple):
    matrices: list[Matrices]
    owners: dict[str, int]
    states: tuple[dict[str, Any], ...]


def train(
    world_size: int,
    strategy: Any,
    steps: range,
    num_batches: int,
    uses_side: Callable[[int, int], bool],
    saved: Sequence[Outcome],
) -> list[Outcome]:
    """What each rank has after each step."""
    torch.manual_seed(3)
    start = Net().double()

    def work(driver: ThreadDriver) -> Outcome:
        rank, net = driver.rank, copy.deepcopy(start)
        optimizer = torch.optim.SGD(
            net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        found = []
        if saved:
            net.load_state_dict(saved[0].states[0])
            optimizer.load_state_dict(copy.deepcopy(saved[0].states[1]))
        with session_on(driver, net, optimizer, strategy) as session:
            if saved:
                states = [outcome.states[2] for outcome in saved]
                session.load_state_dict(offbeat.reshard(states, world_size, rank))
            for step in steps:
                for number in range(num_batches):
                    *inputs, target = batch_of(rank, step, number)
                    is_last = number == num_batches - 1
                    with nullcontext() if is_last else session.no_sync():
                        output = net(*inputs, uses_side(step, rank))
                        (loss_of(output, target) / num_batches).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(net.matrices())
            part = next(each for each in session.callbacks if isinstance(each, KFACCallback))
            plan, states = part.plan, (net.state_dict(), optimizer.state_dict())
            names = [block.name for block in part.blocks]
            owners = zip(names, plan.owners[::2], strict=True) if plan.by_owner else ()
            return Outcome(found, dict(owners), copy.deepcopy((*states, session.state_dict())))

    return results_of(world_size, work)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("worlds", [(3,), (2, 3), (3, 1)])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_ranks_take_the_steps_of_dense_matrices_and_others_go_on_with_them(
    strategy: Any, worlds: Sequence[int], num_batches: int
) -> None:
    """Rank 1 leaves a layer out in odd steps, and all ranks do in each third."""

    def uses_side(step: int, rank: int) -> bool:
        return step % 3 != 1 and not (rank == 1 and step % 2)

    torch.manual_seed(3)
    reference, saved, begin = Reference(Net().double().matrices()), list[Outcome](), 0
    for world_size in worlds:
        steps = range(begin, begin + 9 // len(worlds))
        saved = train(world_size, strategy, steps, num_batches, uses_side, saved)
        reference.owners, begin = saved[0].owners, steps.stop
        for place, step in enumerate(steps):
            reference.step(
                step,
                [
                    [batch_of(rank, step, number) for number in range(num_batches)]
                    for rank in range(world_size)
                ],
                [uses_side(step, rank) for rank in range(world_size)],
            )
            for outcome in saved:
                torch.testing.assert_close(
                    outcome.matrices[place], reference.matrices, rtol=1e-9, atol=1e-11
                )
