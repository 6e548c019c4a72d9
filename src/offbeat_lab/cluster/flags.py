"""A cluster from flags of the command line, perhaps on top of a file or a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigError, nearest
from offbeat_lab.cluster.model import Cluster
from offbeat_lab.cluster.parts import InvalidClusterError, LinkSpec
from offbeat_lab.cluster.quantities import parse_duration
from offbeat_lab.cluster.reading import PRESETS, load, preset
from offbeat_lab.cluster.shorthand import is_none, parse_delays, parse_link

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
    values = base.fields() | {
        "speeds": base.speed_pattern,
        "link": _link_from_flags(base.link, link, latency),
    }
    if workers is not None:
        values["workers"] = workers
    if speeds is not None:
        values["speeds"] = _parse_speeds(speeds)
    if delay is not None:
        values["straggling"] = parse_delays(delay, "--delay")
        values["straggling_record"] = None
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
    values: dict[str, Any] = {} if link is not None and is_none(link) else base.fields()
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
