"""Bands that are fitted to made cells, and those that are shipped."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from _band_fit import COVERAGE, FASTER, MeasuredCell, fit_band, holds
from offbeat_lab.plan.bands import Band, band_of


def made(sets: int = 8, cells: int = 40, *, slower: float = 0.3) -> list[MeasuredCell]:
    """Of sets that differ by chance, where what overlaps takes `slower` longer in logarithms."""
    draw, found = Random(7), []
    for number in range(sets):
        own = draw.gauss(0.0, 0.03)
        for _ in range(cells):
            overlapped = draw.uniform(0, 0.6)
            noise = own + draw.gauss(0.0, 0.03)
            found.append(
                MeasuredCell(
                    of=f"set {number}",
                    strategy="ddp",
                    workers=2 + number,
                    rate_bit_per_s=1e9,
                    exposed=draw.uniform(0, 0.3),
                    overlapped=overlapped,
                    ratio=math.exp(slower * overlapped + noise),
                )
            )
    return found


def test_a_band_holds_what_is_asked_for_of_sets_that_it_was_not_fitted_to() -> None:
    seen, unseen = made()[: 6 * 40], made()[6 * 40 :]
    band, held = fit_band(seen, is_shifted=True)
    assert sum(one.inside / one.cells for one in held) / len(held) >= COVERAGE
    assert sum(holds(band, one) for one in unseen) >= 0.7 * len(unseen)


def test_the_middle_follows_what_overlaps_and_leaves_exposed_exchanges_as_simulated() -> None:
    band, _ = fit_band(made(), is_shifted=True)
    assert band.middle.overlapped == pytest.approx(0.3, abs=0.1)
    assert band.middle.exposed == 0.0
    assert band.low.exposed <= -FASTER
    assert fit_band(made(), is_shifted=False)[0].middle.overlapped == 0.0


def test_every_set_counts_as_much_however_many_cells_it_has() -> None:
    slow = [replace(one, of="slow", ratio=2.0, overlapped=0.0) for one in made(1, 9)]
    usual = [replace(one, ratio=1.0, overlapped=0.0) for one in made(2, 45)]
    band, _ = fit_band([*slow, *usual], is_shifted=True)
    assert band.high.of(exposed=0.0, overlapped=0.0) > 1.9
    assert band.middle.of(exposed=0.0, overlapped=0.0) == pytest.approx(1.0, abs=0.01)


def test_a_cell_is_like_those_with_half_to_twice_as_many_workers_and_as_fast_links() -> None:
    band, _ = fit_band(made(), is_shifted=False)  # sets of 2 to 9 workers at 1 Gbit/s
    assert {one.of for one in band.like("ddp", 18, 2e9)} == {"set 7"}
    assert sum(one.cells for one in band.like("ddp", 2, 1e9)) == 3 * 40  # of 2, 3 and 4
    assert band.like("ddp", 19, 1e9) == []
    assert band.like("ddp", 4, 4e9) == []
    assert band.like("wagma", 4, 1e9) == []


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_shipped_bands_lie_on_both_sides_of_what_is_predicted(kind: str) -> None:
    band: Band = band_of(kind)  # type: ignore[arg-type]
    assert sum(one.cells for one in band.seen) >= 40
    for exposed, overlapped in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.3, 0.3)):
        low, middle, high = (
            factor.of(exposed=exposed, overlapped=overlapped)
            for factor in (band.low, band.middle, band.high)
        )
        assert low <= middle <= high
    assert band.low.of(exposed=0.9, overlapped=0.0) < 0.97


RECORDED = Path(__file__).parents[2] / "benchmarks/studies/results/bands.jsonl"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_shipped_bands_are_those_of_the_recorded_cells(kind: str) -> None:
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for line in RECORDED.read_text().splitlines():
        figure = json.loads(line)
        if figure.get("table") == f"{kind}: cells":
            rows[figure["case"]][figure["column"]] = figure["value"]
    cells = [MeasuredCell(**{**row, "workers": int(row["workers"])}) for row in rows.values()]
    fitted, _ = fit_band(cells, is_shifted=kind == "gpu")
    shipped = band_of(kind)  # type: ignore[arg-type]
    assert len(cells) == sum(one.cells for one in shipped.seen)
    assert fitted == shipped
