"""A cluster made of local processes: the kernel gives each worker its link and its share of the
processors.
"""

from offbeat_lab.emulation.base import Emulation, EmulationReport, LinkCheck, Placement
from offbeat_lab.emulation.choice import Mode, emulate
from offbeat_lab.emulation.leftovers import clean

__all__ = ["Emulation", "EmulationReport", "LinkCheck", "Mode", "Placement", "clean", "emulate"]
