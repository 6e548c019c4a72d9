"""What a rank does before a framework begins."""

from __future__ import annotations

import os
import warnings

from offbeat.errors import OffbeatWarning


def as_launched(rank: int, world_size: int) -> None:
    """The environment that a launcher gives, for a process group that exists already."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        os.environ |= {rank_name: str(rank), size_name: str(world_size)}


def only_ours_are_errors() -> None:
    """Frameworks warn of much that is no affair of this project's."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", OffbeatWarning)
