"""Reads a cluster from a TOML file or a preset, and says where in it a mistake is."""

from __future__ import annotations

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
from offbeat_lab.cluster.shorthand import parse_delays, parse_link
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
    more: dict[str, str] = {}
    if "name" not in cluster.model_fields_set:
        more["name"] = path.stem
    if cluster.straggling_record is not None:
        more["straggling_record"] = str(path.parent / cluster.straggling_record)
    return Cluster(**{**cluster.fields(), **more}) if more else cluster


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
