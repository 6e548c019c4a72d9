"""Links and delays in a few characters, as flags and TOML take them: `1gbit/0.2ms`, `2x320ms`."""

from __future__ import annotations

import re
from typing import Any

from offbeat.errors import ConfigError
from offbeat_lab.cluster.parts import InvalidClusterError, LinkSpec, Straggling
from offbeat_lab.cluster.quantities import parse_duration, parse_rate

_DELAY = re.compile(
    r"(?:(?P<count>\d{1,9})|ranks?(?P<ranks>\d{1,9}(?:\+\d{1,9})*))\s*x\s*(?P<delay>[^:]+)(?P<rest>(?::[^:]+)*)"
)
_PER_SECOND = re.compile(r"(bit)/s\b", re.IGNORECASE)


def is_none(text: str) -> bool:
    """Whether a flag takes back what a file says."""
    return text.strip().casefold() == "none"


def parse_link(text: str, where: str) -> LinkSpec:
    """A link out of `"1gbit"`, `"1gbit/0.2ms"` (rate and latency) or `"none"` (nothing is limited).

    Raises:
        ConfigError: neither, or out of range. `where` names the place.
    """
    if is_none(text):
        return LinkSpec()
    rate, slash, latency = _PER_SECOND.sub(r"\1", text).partition("/")
    rate_bit_per_s = parse_rate(rate, where)
    try:
        if slash:
            return LinkSpec(rate_bit_per_s=rate_bit_per_s, latency_s=parse_duration(latency, where))
        return LinkSpec(rate_bit_per_s=rate_bit_per_s)
    except InvalidClusterError as error:
        raise ConfigError(f"{where} is {text!r}: {error}") from None


def parse_delays(text: str, where: str) -> tuple[Straggling, ...]:
    """Stragglers out of `"2x320ms"`, `"2x320ms:permanent"`, `"rank3x1s:10%"`, `"rank1+3x50ms,1x1s"`
    or `"none"`.
    """
    if is_none(text):
        return ()
    return tuple(_parse_delay(part.strip(), where) for part in text.split(","))


def _parse_delay(text: str, where: str) -> Straggling:
    match = _DELAY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{where} is {text!r}; allowed is a count of workers, x and a time, 2x320ms, or certain"
            " ones, rank3x320ms"
        )
    ranks = match["ranks"]
    values: dict[str, Any] = {
        "workers": int(match["count"]) if ranks is None else tuple(map(int, ranks.split("+"))),
        "delay_s": parse_duration(match["delay"], where),
    }
    for word in filter(None, match["rest"].split(":")):
        if re.fullmatch(r"\d+(\.\d+)?%", word):
            values["probability"] = float(word.removesuffix("%")) / 100
        elif word in ("random", "permanent"):
            values["kind"] = word
        else:
            raise ConfigError(
                f"{where} is {text!r}; after a colon allowed are random, permanent and a share such"
                " as 10%"
            )
    try:
        return Straggling(**values)
    except InvalidClusterError as error:
        raise ConfigError(f"{where} is {text!r}: {error}") from None
