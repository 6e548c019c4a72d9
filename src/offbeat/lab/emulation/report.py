"""What was emulated, and how: part of every record, and shown on its page."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

EmulationMode: TypeAlias = Literal["auto", "namespaces", "delaying", "none"]


class LinkCheck(BaseModel):
    """What a worker's link was found to carry, both ways at once, before anything was measured on it.

    Attributes:
        worker: whose link.
        asked_bit_per_s: its rate by the description.
        measured_bit_per_s: the smaller of the two directions.
        round_trip_s: of a small message.
    """

    model_config = ConfigDict(frozen=True)

    worker: int
    asked_bit_per_s: float
    measured_bit_per_s: float
    round_trip_s: float


class EmulationReport(BaseModel):
    """How a cluster description was carried out.

    Attributes:
        kind: by network namespaces of the kernel, by delays in user space, or not at all.
        network: how the links were made, in a sentence.
        compute: how the speeds were made, in a sentence.
        checks: of the links.
        notices: what could not be emulated, why, and what stands in for it.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["none", "namespaces", "delaying"]
    network: str
    compute: str
    checks: list[LinkCheck] = []
    notices: list[str] = []
