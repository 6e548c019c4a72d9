"""The alpha-beta model: a message of m bytes takes alpha + m * beta seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from offbeat.errors import ConfigError

MESSAGE_S: Final = 40e-6
"""What a message occupies a port for besides its bytes: ZeroMQ's way of a small message on one
machine.
"""


READING: Final = 0.25
"""The share of reading and adding in `NetworkCosts.entry_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
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
class Channel:
    """What messages cost that are sent without waiting for the one before.

    Attributes:
        link: what one of them costs alone.
        gap_s: the part of alpha in which no other message can be under way, 0 <= gap_s <=
            link.alpha_s. With gap_s = alpha messages are sent in sequence; with 0 only their bytes
            are, and latencies overlap.
    """

    link: LinkCost
    gap_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.gap_s <= self.link.alpha_s:
            raise ConfigError(
                f"gap_s is {self.gap_s}, allowed is 0 to alpha_s, {self.link.alpha_s}"
            )

    def last_arrival_s(self, messages: Iterable[tuple[float, int]]) -> float:
        """When the last of `messages`, each (when it is ready, in seconds; its bytes), is there.
        Those ready first go first.

        >>> channel = Channel(link=LinkCost(alpha_s=1.0, beta_s_per_byte=0.1), gap_s=0.5)
        >>> channel.last_arrival_s([(2.0, 10), (0.0, 10)])
        4.0
        >>> channel.last_arrival_s([(0.0, 10)] * 3)
        5.0
        """
        free_s = last_s = 0.0
        for ready_s, num_bytes in sorted(messages):
            busy_s = self.gap_s + num_bytes * self.link.beta_s_per_byte
            free_s = max(free_s, ready_s) + busy_s
            last_s = free_s + self.link.alpha_s - self.gap_s
        return last_s


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCosts:
    """The slowest rank's measured costs.

    Attributes:
        messages: between two ranks, everyone sending and receiving at once.
        dense: of the dense all-reduce, per hop of a ring.
        select_s_per_element: local cost of residual and selection, for each element of the
            gradient.
        entry_s: local cost of each entry, to be selected, written, read and added once; 0 where it
            is not known.
    """

    messages: LinkCost
    dense: LinkCost
    select_s_per_element: float
    entry_s: float = 0.0

    def entries_s(self, k: int, *, read_again: float) -> float:
        """Local cost of `k` entries, of which as many as `read_again` times `k` are received
        besides.
        """
        return k * self.entry_s * (1 + READING * read_again)


def fit_link(samples: Iterable[tuple[int, float]]) -> LinkCost:
    """Alpha and beta of messages that were timed one by one.

    Args:
        samples: (bytes, seconds > 0) of each message, of two sizes or more.

    Raises:
        ConfigError: there are too few sizes to tell alpha from beta, or a duration is no positive
            number.

    >>> fitted = fit_link([(0, 1e-3), (1_000_000, 9e-3)])
    >>> round(fitted.alpha_s, 6), round(fitted.beta_s_per_byte, 12)
    (0.001, 8e-09)
    """
    alpha_s, beta_s_per_byte = fit(samples, [lambda _: 1.0, float])
    return LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)


def fit(
    samples: Iterable[tuple[int, float]], terms: Sequence[Callable[[int], float]]
) -> list[float]:
    """Coefficients, none below zero, with which `terms` of a size sum to its duration.

    Relative errors are what is made small, so that short durations count as much as long ones. Of
    several durations of one size the median counts: one disturbed measurement must not change the
    fit.

    Args:
        samples: (size, seconds > 0), of at least as many different sizes as there are terms.
        terms: functions of a size, all positive for some of the sizes.
    """
    from scipy.optimize import nnls  # late, since it takes a third of a second to import

    durations_s: dict[int, list[float]] = {}
    for size, seconds in samples:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(
                f"size {size} took {seconds} s, allowed is any positive number; was the clock too"
                " coarse?"
            )
        durations_s.setdefault(size, []).append(seconds)
    if len(durations_s) < len(terms):
        raise ConfigError(
            f"{len(durations_s)} sizes were timed, needed are {len(terms)} or more; repetitions do"
            " not count"
        )
    rows = np.array([[term(size) for term in terms] for size in durations_s], dtype=np.float64)
    rows /= np.array([median(seconds) for seconds in durations_s.values()])[:, None]
    scales = np.linalg.norm(rows, axis=0)
    coefficients, _ = nnls(rows / scales, np.ones(len(rows)))
    return [float(coefficient) for coefficient in coefficients / scales]
