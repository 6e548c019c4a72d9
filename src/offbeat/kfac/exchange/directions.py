"""Directions, found by the owners of their layers and sent to everyone.

Each owner's message holds the directions of its blocks, for each block whether there is one, and
what its directions would change. Nobody multiplies what others have multiplied, so all ranks get
the same bits on any mixture of devices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce

import torch

from offbeat.collectives.dense import dense_broadcast
from offbeat.kfac.blocks import Block
from offbeat.kfac.exchange.spans import Spans
from offbeat.kfac.precondition import Curvature
from offbeat.transport.driver import Driver, Stream


@torch.no_grad()
def precondition_by_owners_(
    blocks: Sequence[Block],
    inverses: Sequence[Curvature | None],
    owners: Sequence[int],
    *,
    driver: Driver,
    stream: Stream,
    lrs: Sequence[float],
    kl_clip: float | None,
    spans: Spans,
) -> None:
    """Replace the gradients of `blocks`, the same on all ranks, by directions. Collective.

    Args:
        blocks: the same on all ranks. Those without gradient are passed over.
        inverses: of the blocks that this rank owns.
        owners: a rank for each block.
        driver, stream: carry the broadcasts out.
        lrs: learning rates, one for each block.
        kl_clip: as of `kfac.precondition.precondition_`.
        spans: notes what is done when.
    """
    live = [number for number, block in enumerate(blocks) if block.has_gradient()]
    messages = [
        _Message([blocks[number] for number in live if owners[number] == rank], rank)
        for rank in range(driver.world_size)
    ]
    pending = []
    for message in messages:
        if not message.blocks:
            continue
        if message.owner == driver.rank:
            own = [number for number in live if owners[number] == driver.rank]
            found = [inverse for number in own if (inverse := inverses[number]) is not None]
            message.fill(found, [lrs[number] for number in own])
        launched_s = time.monotonic()
        pending.append(driver.launch(dense_broadcast(message.flat, message.owner), stream.next()))
        spans.launched(
            "broadcast", f"directions of worker {message.owner}", launched_s, pending[-1:]
        )
    for broadcast in pending:
        with spans.timed("wait for inverses"):
            broadcast.wait()
        spans.arrived()
    changes = [
        message.change.to(device="cpu", dtype=torch.float64)
        for message in messages
        if message.blocks
    ]
    change = sum(changes, torch.zeros((), dtype=torch.float64)).abs()
    scale = 1.0 if kl_clip is None else float((kl_clip / change).sqrt().clamp(max=1))
    for message in messages:
        message.show(scale)


class _Message:
    """One owner's directions."""

    def __init__(self, blocks: Sequence[Block], owner: int) -> None:
        self.blocks, self.owner = blocks, owner
        weights = [block.weight for block in blocks]
        dtype = reduce(torch.promote_types, (weight.dtype for weight in weights), torch.float32)
        sizes = [torch.Size(block.matrix_shape).numel() for block in blocks]
        device = weights[0].device if weights else None
        self.flat = torch.zeros(sum(sizes) + len(blocks) + 1, dtype=dtype, device=device)
        *parts, self._there, change = self.flat.split([*sizes, len(blocks), 1])
        self._directions = [
            part.view(block.matrix_shape) for part, block in zip(parts, blocks, strict=True)
        ]
        self.change = change[0]

    def fill(self, inverses: Sequence[Curvature], lrs: Sequence[float]) -> None:
        gradient_of = [torch.empty_like(direction) for direction in self._directions]
        for number, (block, inverse, lr) in enumerate(zip(self.blocks, inverses, lrs, strict=True)):
            gradient, direction = gradient_of[number], self._directions[number]
            block.read_gradient(gradient)
            self._there[number] = inverse.apply(gradient, block, out=direction)
            self.change.add_(torch.dot(direction.flatten(), gradient.flatten()) * lr**2)

    def show(self, scale: float) -> None:
        for number, (block, direction) in enumerate(
            zip(self.blocks, self._directions, strict=True)
        ):
            gradient = torch.empty_like(direction)
            block.read_gradient(gradient)
            block.write_gradient_(torch.where(self._there[number] > 0, direction * scale, gradient))
