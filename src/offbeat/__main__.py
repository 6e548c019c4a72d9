"""`python -m offbeat`: the command line of the library alone, as under torchrun."""

from __future__ import annotations

from offbeat.run.command import main_and_exit

if __name__ == "__main__":
    main_and_exit()
