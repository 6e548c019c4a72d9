"""Proof, every now and then, that the ranks' parameters are still identical to the bit."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.errors import DivergedError
from offbeat.parts.part import Part
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, Collective

_CHECKSUM = struct.Struct("<q")


def checksum(parameters: Sequence[torch.Tensor]) -> int:
    """A number that changes when any bit of any parameter does, except for changes that cancel out.

    One pass over the bits, at memory speed; it finds drift and corruption, and is no defence
    against intent.
    """
    total = 0
    for position, parameter in enumerate(parameters):
        flat = parameter.detach().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        bits = flat.view(torch.uint8)
        whole = bits.numel() // 8 * 8
        words = int(bits[:whole].view(torch.int64).sum()) + int(bits[whole:].sum())
        total = (total + (2 * position + 1) * words) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 63)


class ReplicaCheck(Part):
    """After every `interval` optimizer steps, compares a checksum of the parameters over all ranks.

    Cost: one pass over the parameters and one 8-byte all-gather, each `interval` steps.

    Args:
        parameters: the model's, by name; in the same order on all ranks.
        driver: carries the comparison out.
        stream: channels for it.
        interval: in steps, >= 1.
    """

    state_key: ClassVar[str] = "replica_check"

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        driver: Driver,
        stream: Stream,
        interval: int,
    ) -> None:
        self._parameters = list(parameters.values())
        self._driver = driver
        self._stream = stream
        self._interval = interval
        self._num_steps = 0

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            self.verify()

    def verify(self) -> None:
        """Compare now. Raises `DivergedError` on every rank if they differ."""
        checksums = self._driver.run(self._gather(), self._stream.next())
        odd = [rank for rank, value in enumerate(checksums) if value != checksums[0]]
        if odd:
            raise DivergedError(
                f"after step {self._num_steps} the parameters of ranks {odd} are no longer those of"
                " rank 0. Does every rank run the same code and library versions on the same kind"
                " of device, and does nothing but the optimizer change parameters? Resume from the"
                " last checkpoint, or set replica_check_interval=0 to go on regardless"
            )

    def _gather(self) -> Collective[list[int]]:
        payloads = yield AllGather(_CHECKSUM.pack(checksum(self._parameters)))
        return [_CHECKSUM.unpack(payload)[0] for payload in payloads]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"num_steps": self._num_steps}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state["replicated"]["num_steps"])
