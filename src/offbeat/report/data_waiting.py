"""Who is late, in a sentence. The figures and the rule are `offbeat.lab.lateness`'s."""

from __future__ import annotations

from offbeat.lab.lateness import Lateness
from offbeat.report.style import SECONDS, write


def lateness_sentence(late: Lateness) -> str:
    """Names the slow worker, or says that there is none."""
    spread = write(late.spread_s, SECONDS)
    if late.together:
        return f"Workers come together: the last one {spread} after the first on average."
    slow = late.slow_worker
    if slow is not None:
        share, behind_s = float(late.last_share[slow]), float(late.mean_s[slow])
        return (
            f"Worker {slow} was last in {share:.0%} of steps, {write(behind_s, SECONDS)} behind"
            " the first on average."
        )
    return (
        "No single worker is the slow one: none was last in more than"
        f" {late.last_share.max():.0%} of steps. The last one came {spread} after the first on"
        " average."
    )
