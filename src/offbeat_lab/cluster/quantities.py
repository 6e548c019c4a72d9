"""Rates and durations as people write them: a number and a unit, exact in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from offbeat.errors import ConfigError

_BITS: Final = {
    unit: Decimal(10) ** power
    for unit, power in (("tbit", 12), ("gbit", 9), ("mbit", 6), ("kbit", 3), ("bit", 0))
}
_SECONDS: Final = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_SYMBOLS: Final = {
    "bit": "bit/s",
    "kbit": "kbit/s",
    "mbit": "Mbit/s",
    "gbit": "Gbit/s",
    "tbit": "Tbit/s",
}

_QUANTITY = re.compile(
    r"\s*(-?\d+\.?\d*(?:e[+-]?\d{1,3})?)\s*([a-zµμ/]*?)\s*", re.IGNORECASE | re.ASCII
)
_BYTES = re.compile(r"[kmgt]?i?b(/s|ps)?|[kmgt]?bps", re.IGNORECASE)


def parse_rate(given: object, where: str) -> float:
    """Bits per second out of `"1gbit"` or `"100 Mbit/s"`; any case. `where` names the place in an
    error.

    Raises:
        ConfigError: no number with a unit of bits.
    """
    allowed = 'allowed is a number with bit, kbit, mbit, gbit or tbit, such as "100mbit"'
    number, unit = _split(given, where, allowed, fix='"{}mbit"')
    if unit.casefold().removesuffix("/s") not in _BITS:
        fix = "; B stands for bytes here or there: count in bits" if _BYTES.fullmatch(unit) else ""
        raise ConfigError(f"{where} is {given!r}; {allowed}{fix}")
    return float(number * _BITS[unit.casefold().removesuffix("/s")])


def parse_duration(given: object, where: str) -> float:
    """Seconds out of `"1.5s"`, `"320ms"` or `"200us"`. `where` names the place in an error.

    Raises:
        ConfigError: no number with a unit of time.
    """
    allowed = 'allowed is a number with s, ms or us, such as "320ms"'
    number, unit = _split(given, where, allowed, fix='"{}s"')
    if (known := unit.casefold().replace("μ", "u")) not in _SECONDS:
        raise ConfigError(f"{where} is {given!r}; {allowed}")
    return float(number * _SECONDS[known])


def rate_text(rate_bit_per_s: float) -> str:
    """As `parse_rate` reads it, to the last digit: 1e9 is `1gbit`."""
    return "".join(_scaled(rate_bit_per_s, _BITS, otherwise="bit"))


def duration_text(duration_s: float) -> str:
    """As `parse_duration` reads it, to the last digit: 0.32 is `320ms`."""
    return "".join(_scaled(duration_s, _SECONDS, otherwise="s"))


def display_rate(rate_bit_per_s: float) -> str:
    """For people: 1e9 is `1 Gbit/s`."""
    number, unit = _scaled(rate_bit_per_s, _BITS, otherwise="bit")
    return f"{float(number):g} {_SYMBOLS[unit]}"


def display_duration(duration_s: float) -> str:
    """For people: 0.32 is `320 ms`."""
    number, unit = _scaled(duration_s, _SECONDS, otherwise="s")
    return f"{float(number):g} {unit}"


def rounded(value: float, *, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def _split(given: object, where: str, allowed: str, *, fix: str) -> tuple[Decimal, str]:
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise ConfigError(
            f"{where} is {given}, which has no unit; {allowed}; is {fix.format(given)} meant?"
        )
    match = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ConfigError(f"{where} is {given!r}; {allowed}")
    if not match[2]:
        raise ConfigError(
            f"{where} is {given!r}, which has no unit; {allowed}; is {fix.format(match[1])} meant?"
        )
    return Decimal(match[1]), match[2]


def _scaled(value: float, units: Mapping[str, Decimal], *, otherwise: str) -> tuple[str, str]:
    """The value in the largest unit of which it is at least one, without exponent where that stays
    short.
    """
    exact = Decimal(repr(value))
    unit = next(
        (name for name, size in units.items() if abs(exact) >= size),
        list(units)[-1] if exact else otherwise,
    )
    number = (exact / units[unit]).normalize()
    return (f"{number:f}" if abs(number.adjusted()) < 12 else str(number)), unit
