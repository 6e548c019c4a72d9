"""Reads a cluster from a TOML file, a preset or flags, and says where in it a mistake is. Links and
delays may be written in a few characters: `1gbit/0.2ms`, `2x320ms`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from offbeat.errors import ConfigError, nearest
from offbeat_lab.cluster.model import Cluster
from offbeat_lab.cluster.parts import (
    ClusterFault,
    InvalidClusterError,
    LinkSpec,
    RackSpec,
    SpeedChange,
    Straggling,
    path_text,
)
from offbeat_lab.cluster.quantities import parse_duration, parse_rate
from offbeat_lab.cluster.toml_writer import toml_key

PRESETS: Final[Mapping[str, str]] = {
    "ethernet-1g": "four equal workers on Gigabit Ethernet",
    "mixed-gpus": "four workers on 10 Gbit/s, one of them half as fast",
    "stragglers": "eight workers, of which two at random come 320 ms late in each step",
    "flaky": "four workers; one freezes, one loses its link, one is killed, each for a while",
}
"""Clusters that come with the package: name and a line about each."""

MAX_CHARACTERS: Final = 1 << 20
"""Longest description of a cluster."""

_LISTS: Final[Mapping[str, type[BaseModel]]] = {"changes": SpeedChange, "faults": ClusterFault}


def load(path: Path) -> Cluster:
    """The cluster that a file describes; a file without `name` names it after itself, and the path
    of a record starts from its directory.

    Raises:
        ConfigError: no such file, no TOML, or not a cluster. The message names the file and the
            key.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8; a cluster is described in TOML") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read cluster {path}: {error.strerror}; presets are {', '.join(PRESETS)}"
        ) from None
    cluster = parse_cluster(text, str(path))
    if "name" in cluster.model_fields_set:
        return cluster
    return cluster.changed(name=path.stem)


def preset(name: str) -> Cluster:
    """The preset called `name`. Raises `ConfigError` with the nearest name that exists."""
    if name not in PRESETS:
        raise ConfigError(
            f"no preset {name!r}; allowed are {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    file = resources.files("offbeat_lab").joinpath("presets", f"{name}.toml")
    return parse_cluster(file.read_text(encoding="utf-8"), f"preset {name}")


def parse_cluster(text: str, source: str) -> Cluster:
    """The cluster that TOML `text` describes; `source` names it in errors.

    Raises:
        ConfigError: no TOML, an unknown key, or a value that is not allowed.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{source} has {len(text)} characters, allowed are {MAX_CHARACTERS}; is it the"
            " description of a cluster?"
        )
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no TOML: {error}") from None
    values = _fields(Cluster, table, f"{source}: ")
    try:
        return Cluster(**values)
    except InvalidClusterError as error:
        path = tuple(toml_key(part) if isinstance(part, str) else part for part in error.path)
        raise ConfigError(f"{source}: {path_text(path)} {error.reason}") from None


def _fields(kind: type[BaseModel], table: object, where: str) -> dict[str, Any]:
    """The fields of `kind` from a TOML table: keys get their units, quantities become numbers."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}; allowed is a table")
    names = {toml_key(name): name for name in kind.model_fields}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(
                f"{_join(where, key)} is no key; allowed are"
                f" {', '.join(names)}{nearest(key, names)}"
            )
        values[names[key]] = _field(names[key], value, _join(where, key))
    return values


def _field(name: str, value: object, where: str) -> object:
    if name.endswith("_bit_per_s"):
        return parse_rate(value, where)
    if name.endswith("_s"):
        return parse_duration(value, where)
    if name == "link":
        return _read_link(value, where)
    if name == "links" and isinstance(value, Mapping):
        return {worker: _read_link(link, _join(where, worker)) for worker, link in value.items()}
    if name == "racks":
        return _fields(RackSpec, value, where)
    if name == "straggling":
        parts = value if isinstance(value, list) else [value]
        return [
            late
            for number, part in enumerate(parts)
            for late in _read_straggling(part, f"{where}[{number}]")
        ]
    if name in _LISTS and isinstance(value, list):
        return [
            _fields(_LISTS[name], part, f"{where}[{number}]") for number, part in enumerate(value)
        ]
    return value


def _read_link(value: object, where: str) -> LinkSpec | dict[str, Any]:
    if isinstance(value, int | float):
        parse_rate(value, where)  # says that a unit is missing
    return parse_link(value, where) if isinstance(value, str) else _fields(LinkSpec, value, where)


def _read_straggling(value: object, where: str) -> list[object]:
    return (
        list(parse_delays(value, where))
        if isinstance(value, str)
        else [_fields(Straggling, value, where)]
    )


def _join(where: str, key: str) -> str:
    return f"{where}{key}" if where.endswith(" ") else f"{where}.{key}"


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


_FLAGS: Final = {
    "workers": "--workers",
    "speeds": "--speeds",
    "straggling": "--delay",
    "step_s": "--step-time",
}


def from_flags(
    *,
    cluster: str | None = None,
    workers: int | None = None,
    link: str | None = None,
    latency: str | None = None,
    speeds: str | None = None,
    delay: str | None = None,
    step_time: str | None = None,
) -> Cluster:
    """The cluster that the command line asks for. Flags override what a file or preset says;
    without any it is plain.

    Args:
        cluster: name of a preset, or path of a file.
        workers: how many.
        link: rate of every link that the file gives no own one, `1gbit`, `1gbit/0.2ms` with its
            latency, or `none`.
        latency: one way, `0.2ms`.
        speeds: `1,1,1,0.5`, repeated in turn.
        delay: in place of all stragglers of the file; see `parse_delays`.
        step_time: padded duration of forward and backward, `200ms`, or `none`.

    Raises:
        ConfigError: a flag that cannot be read, or a cluster that cannot be.
    """
    base = Cluster() if cluster is None else _named(cluster)
    given = {"workers": workers, "speeds": speeds, "straggling": delay, "step_s": step_time}
    values = dict(base) | {
        "speeds": base.speed_pattern,
        "link": _link_from_flags(base.link, link, latency),
    }
    if workers is not None:
        values["workers"] = workers
    if speeds is not None:
        values["speeds"] = _parse_speeds(speeds)
    if delay is not None:
        values["straggling"] = parse_delays(delay, "--delay")
    if step_time is not None:
        values["step_s"] = None if is_none(step_time) else parse_duration(step_time, "--step-time")
    try:
        return Cluster(**values)
    except InvalidClusterError as error:
        field = str(error.path[0])
        blame = (
            f"cluster {base.name!r}"
            if given.get(field) is None
            else f"{_FLAGS[field]} {given[field]}"
        )
        raise ConfigError(f"{blame}: {error}") from None


def _named(cluster: str) -> Cluster:
    """A preset by name, or a file by path; whatever looks like a path is one."""
    if cluster in PRESETS:
        return preset(cluster)
    path = Path(cluster)
    if path.suffix == ".toml" or path.name != cluster or path.exists():
        return load(path)
    raise ConfigError(
        f"--cluster {cluster}: no such preset and no such file; presets are"
        f" {', '.join(PRESETS)}{nearest(cluster, PRESETS)}"
    )


def _link_from_flags(base: LinkSpec, link: str | None, latency: str | None) -> LinkSpec:
    """`base` with what was said; what was not said stays."""
    values: dict[str, Any] = {} if link is not None and is_none(link) else dict(base)
    if link is not None:
        asked = parse_link(link, "--link")
        if latency is not None and "latency_s" in asked.model_fields_set:
            raise ConfigError(
                f"--link {link} and --latency {latency} both give a latency; leave one out"
            )
        values |= {name: getattr(asked, name) for name in asked.model_fields_set}
    if latency is not None:
        values["latency_s"] = parse_duration(latency, "--latency")
    try:
        return LinkSpec(**values)
    except InvalidClusterError as error:  # a link by itself has been checked
        raise ConfigError(f"--latency {latency}: {error}") from None


def _parse_speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--speeds is {text!r}; allowed is numbers with commas between them, such as 1,1,1,0.5"
        ) from None
