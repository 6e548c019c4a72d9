"""What torch itself ships, to be measured beside offbeat's strategies: by name, on the command line
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offbeat_lab.native.base import Native
from offbeat_lab.native.ddp import DDP, BFloat16, Float16, PostLocalSGD, PowerSGDHook
from offbeat_lab.native.session import CommunicationMeter, NativeSession

NATIVE: Final[Mapping[str, type[Native]]] = {
    native.name: native for native in (DDP, Float16, BFloat16, PowerSGDHook, PostLocalSGD)
}

__all__ = ["NATIVE", "CommunicationMeter", "Native", "NativeSession"]
