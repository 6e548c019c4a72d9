"""What goes over links that the kernel emulates."""

from __future__ import annotations

import json
import subprocess

from offbeat_lab.emulation import Emulation
from offbeat_lab.emulation.commands import path_of
from offbeat_lab.emulation.plan import DATA


def sent_bytes(emulation: Emulation, worker: int) -> int:
    """Bytes that have gone through the worker's link so far, headers included."""
    namespace = emulation.placement(worker).namespace
    assert namespace is not None
    words = [path_of("tc"), "-n", namespace.name, "-s", "-j", "qdisc", "show", "dev", DATA, "root"]
    shown = subprocess.run(words, text=True, capture_output=True, check=True).stdout
    return int(json.loads(shown)[0]["bytes"])
