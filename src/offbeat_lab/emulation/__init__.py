"""A cluster made of local processes: the kernel gives each worker its link and its share of the
processors.
"""

from offbeat.run.local_worker import Placement
from offbeat_lab.emulation.base import Emulation
from offbeat_lab.emulation.choice import Mode, emulate
from offbeat_lab.emulation.leftovers import clean

__all__ = ["Emulation", "Mode", "Placement", "clean", "emulate"]
