"""Where the `offbeat` command begins, also as `python -m offbeat_lab.cli` where no script is
installed, as under torchrun. Imports nothing that `offbeat[lab]` brings before it is known to be
there.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from offbeat.run import command

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
_OF_THE_LIBRARY = {"run", "strategies", "--help", "-h", "--version"}


def start() -> None:
    """Run the command line. Where `offbeat[lab]` is not installed, it is that of the library alone,
    and other commands say in one sentence what they need.
    """
    missing = [name for name in _NEEDED if not _is_there(name)]
    if not missing:
        from offbeat_lab.cli.main import start as start_command_line

        start_command_line()
        return
    if sys.argv[1:] and sys.argv[1] not in _OF_THE_LIBRARY:
        sys.stderr.write(
            f"offbeat: this command needs {', '.join(missing)}, which the extra `lab` brings: pip"
            " install 'offbeat[lab]', or from a checkout pip install -e '.[lab]'. `offbeat run` and"
            " `offbeat strategies` work without\n"
        )
        sys.exit(command.EXIT_MISUSED)
    command.main_and_exit()


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # as of a module that was hidden
        return False


if __name__ == "__main__":
    start()
