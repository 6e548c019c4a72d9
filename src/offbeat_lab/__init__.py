"""Local runs: tasks, workers, supervisor, records. Needs the extra `offbeat[lab]`."""

from __future__ import annotations

from importlib.util import find_spec

from offbeat.errors import ConfigError

_NEEDED = (
    "jinja2",
    "markupsafe",
    "psutil",
    "pydantic",
    "rich",
    "sklearn",
    "threadpoolctl",
    "typer",
)

# Asked here, since every module of the command line and of the lab imports this package first: a
# sentence says what to install where an import in the middle of a run would not.
if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ConfigError(
        f"offbeat's command line and offbeat.Cluster need {', '.join(_missing)}, which"
        " `pip install 'offbeat[lab]'` installs"
    )
