"""Who is late, in a sentence. The figures and the rule are `offbeat_lab.lateness`'s."""

from __future__ import annotations

from offbeat_lab.lateness import Lateness
from offbeat_lab.report.style import SECONDS, write


def lateness_sentence(late: Lateness) -> str:
    """Who comes last, and how late. Whether one worker is slow is decided over all contestants."""
    spread = write(late.spread_s, SECONDS)
    if late.together:
        return f"Workers come together: the last one {spread} after the first on average."
    last = late.slow_worker
    if last is not None:
        share, behind_s = float(late.last_share[last]), float(late.mean_s[last])
        return (
            f"Worker {last} was last in {share:.0%} of steps, {write(behind_s, SECONDS)} behind"
            " the first on average."
        )
    return (
        "Workers take turns at coming last: none was last in more than"
        f" {late.last_share.max():.0%} of steps. The last one came {spread} after the first on"
        " average."
    )
