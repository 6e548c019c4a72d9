"""Where the `offbeat` command begins, also as `python -m offbeat_lab.cli` where no script is
installed, as under torchrun.
"""

from __future__ import annotations

import sys

from offbeat.errors import ConfigError


def start() -> None:
    """Run the command line, or say in one sentence what it needs where `offbeat[lab]` is not
    installed.
    """
    try:
        import offbeat_lab  # noqa: F401 - refuses where a package is missing
    except ConfigError as error:
        sys.exit(f"offbeat: {error}")
    from offbeat_lab.cli.main import start as start_command_line

    start_command_line()


if __name__ == "__main__":
    start()
