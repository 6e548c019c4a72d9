"""Drivers around a driver: they count, delay, fail and record what passes, whatever carries it out.

They nest in any order and work under the virtual driver too, since they take their time from the
inner driver's `Now` and let it pass with the inner driver's `Sleep`.
"""

from offbeat.transport.operations import Traffic
from offbeat.transport.wrappers.base import Wrapper
from offbeat.transport.wrappers.counting import Arrival, Counting
from offbeat.transport.wrappers.delaying import Delaying, Delivery
from offbeat.transport.wrappers.failing import Failing, ScriptedFault
from offbeat.transport.wrappers.recording import Recorded, RecordingDriver

__all__ = [
    "Arrival",
    "Counting",
    "Delaying",
    "Delivery",
    "Failing",
    "Recorded",
    "RecordingDriver",
    "ScriptedFault",
    "Traffic",
    "Wrapper",
]
