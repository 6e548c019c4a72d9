"""How long a rank may be silent before it counts as dead: one setting for every wait on peers."""

from __future__ import annotations

import math
import os
from typing import Final

from offbeat.errors import ConfigError

SILENCE_VARIABLE: Final = "OFFBEAT_SILENCE_S"
"""Environment variable with that time in seconds, the same on every rank."""

DEFAULT_S: Final = 20.0


def silence_s() -> float:
    """The time that is set, in seconds.

    A rank that merely computes is never silent: threads and the kernel answer for it. One that is
    stopped (SIGSTOP, a debugger, a suspended machine) or cut off is.

    Raises:
        ConfigError: the variable holds no number of seconds above 0.
    """
    given = os.environ.get(SILENCE_VARIABLE, "")
    if not given:
        return DEFAULT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{SILENCE_VARIABLE} is {given!r}, allowed is any number of seconds above 0; leave it"
            f" unset for {DEFAULT_S:g}"
        )
    return seconds
