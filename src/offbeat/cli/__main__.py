"""`python -m offbeat.cli`: the `offbeat` command where no script is installed, as under
torchrun.
"""

from offbeat.cli.main import start

start()
