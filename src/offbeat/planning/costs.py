"""The alpha-beta model: a message of m bytes takes alpha + m * beta seconds. And the choice of what is cheapest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one message costs.

    Attributes:
        alpha_s: seconds a message takes however short it is, >= 0.
        beta_s_per_byte: seconds each further byte takes, >= 0.
    """

    alpha_s: float
    beta_s_per_byte: float

    def time_s(self, *, num_messages: float, num_bytes: float) -> float:
        """Seconds for messages sent one after the other."""
        return num_messages * self.alpha_s + num_bytes * self.beta_s_per_byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The slowest rank's measured costs.

    Attributes:
        messages: between two ranks, everyone sending and receiving at once.
        dense: of the dense all-reduce, per hop of a ring.
        select_s_per_element: local cost of residual and selection, for each element of the gradient.
    """

    messages: Link
    dense: Link
    select_s_per_element: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def cheapest(costs_s: Mapping[str, float]) -> str:
    """The name with the least cost; among equals the first.

    >>> cheapest({"dense": 2.0, "all_gather": 1.0})
    'all_gather'
    """
    return min(costs_s, key=lambda name: costs_s[name])
