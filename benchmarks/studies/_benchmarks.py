"""Lets a study import what the benchmarks above it share, whatever it is started as."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
