"""The cluster description: one small TOML file, read here, emulated by the lab, simulated by the
virtual driver.
"""

from offbeat_lab.cluster.model import Cluster
from offbeat_lab.cluster.parts import ClusterFault, LinkSpec, RackSpec, SpeedChange, Straggling
from offbeat_lab.cluster.reading import PRESETS, from_flags, load, parse_cluster, preset

__all__ = [
    "PRESETS",
    "Cluster",
    "ClusterFault",
    "LinkSpec",
    "RackSpec",
    "SpeedChange",
    "Straggling",
    "from_flags",
    "load",
    "parse_cluster",
    "preset",
]
