"""Deadlines after which a rank proceeds without a peer, learned from how long earlier waits took.

    deadline = median + k MAD,  within [floor, cap]

MAD is the median absolute deviation from the median. A few outliers change neither of them. One
rank that was suspended therefore does not lengthen the deadline, and the first steps, in which
caches are cold and libraries load, stop counting after `window` waits. Before enough waits are
known the deadline is `initial_s`: long where a wrong suspicion is costly, short where it costs
little and ends with the peer's next message.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineRule:
    """How a deadline follows from the waits before it.

    Attributes:
        window: the number of latest waits that count, >= 1.
        min_samples: how many waits must be known before the deadline follows from them, >= 1.
        initial_s: the deadline until then, limited by `floor_s` and `cap_s`, in seconds, >= 0.
        num_mads: k, >= 0.
        min_spread: the MAD counts as at least this fraction of the median, >= 0, because waits
            that were all equal do not mean that the next one will be.
        floor_s: the shortest deadline, in seconds, > 0. It should be longer than a busy machine may
            take to schedule a thread.
        cap_s: the longest deadline, in seconds, >= floor_s.
    """

    window: int = 128
    min_samples: int = 8
    initial_s: float = 30.0
    num_mads: float = 8.0
    min_spread: float = 0.05
    floor_s: float = 0.25
    cap_s: float = 30.0


def deadline_s(waits_s: Collection[float], rule: DeadlineRule) -> float:
    """The time after which to proceed without a peer, in seconds.

    Args:
        waits_s: the earlier waits in seconds, the latest last, each >= 0. They include waits that
            ended only after their deadline.
        rule: how the deadline follows from them.

    >>> deadline_s([], DeadlineRule())
    30.0
    >>> deadline_s([1.0] * 8 + [100.0], DeadlineRule(num_mads=4.0, min_spread=0.25))
    2.0
    """
    latest_s = [*waits_s][-rule.window :]
    if len(latest_s) < rule.min_samples:
        return min(max(rule.initial_s, rule.floor_s), rule.cap_s)
    median_s = median(latest_s)
    mad_s = median([abs(wait_s - median_s) for wait_s in latest_s])
    mad_s = max(mad_s, rule.min_spread * median_s)
    return min(max(median_s + rule.num_mads * mad_s, rule.floor_s), rule.cap_s)
