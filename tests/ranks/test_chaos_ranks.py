"""A part of the fault matrix; `make chaos` runs all of it (docs/faults.md)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from chaos_support.matrix import Cell
from chaos_support.play import Stage
from ranks_support.templates import Templates

pytestmark = pytest.mark.ranks

CELLS = (
    ("killed-in-exchange", "LocalSGD"),
    ("killed-in-exchange", "LocalSGD with a quorum"),
    ("killed-while-saving", "WAGMA"),
    ("stopped-short", "AllReduce"),
    ("exception", "EagerSGD"),
)
"""What the other tests of ranks do not bring about: a rank that is killed between steps or leaves
early, a gradient that is NaN and options that differ are in the tests of each kind of strategy.
"""
SLACK = 8.0
"""The tests may share the machine; what hangs is found all the same."""

LIMIT_S = 6.0
"""Of silence: much longer than a rank is stopped here, and than a busy machine keeps a thread."""


def test_what_is_promised_under_faults_is_kept(templates: Templates, tmp_path: Path) -> None:
    make = partial(Cell, slack=SLACK, limit_s=LIMIT_S)
    cells = [make(strategy=strategy, fault=fault) for fault, strategy in CELLS]
    cells.append(make(strategy="WAGMA", fault="killed", ranks=4, shards=2))
    with Stage(tmp_path, templates) as stage, ThreadPoolExecutor(3) as pool:
        outcomes = pool.map(stage.play, cells)
        broken = {
            cell.name: str(outcome)
            for cell, outcome in zip(cells, outcomes, strict=True)
            if outcome.wrong
        }
    assert not broken
