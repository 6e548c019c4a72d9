"""One worker of a measurement on this machine: `python -m offbeat_lab.doctor.worker`. Rank 0 prints
the outcome as JSON.
"""

from __future__ import annotations

import sys

import torch
from pydantic import TypeAdapter

from offbeat.errors import OffbeatError
from offbeat.transport.connect import launched
from offbeat_lab.doctor.measure import Measurement, measure


def main() -> int:
    torch.set_num_threads(1)
    launch = launched()
    assert launch is not None
    try:
        measurement = measure()
    except OffbeatError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if launch.rank == 0:
        sys.stdout.write(TypeAdapter(Measurement).dump_json(measurement).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
