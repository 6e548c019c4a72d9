"""What `Auto` takes a strategy's steps to be worth is what was measured."""

from __future__ import annotations

from statistics import fmean

import pytest

from _results import STUDIES, ResultFile
from offbeat.strategies.choice import CANDIDATES

MEASURED = {
    "gtopk": ("GTopK, what any rank sent", "GTopK, k of the sum"),
    "powersgd": ("PowerSGD",),
    "localsgd": ("LocalSGD",),
    "localsgd:codec=linear4": ("LocalSGD, 4 bits, growing period",),
    "wagma": ("WAGMA",),
}
COLUMNS = {"sgd": {"images"}, "adam": {"text", "charlm"}}


def factors_of(cases: tuple[str, ...], optimizer: str) -> list[float]:
    found = [
        result.figure.value
        for result in ResultFile(STUDIES / "steps_to_equal.jsonl").results
        if result.figure.table == "steps to equal"
        and result.figure.case in cases
        and result.figure.column in COLUMNS[optimizer]
    ]
    factors = [factor for factor in found if isinstance(factor, float)]
    assert len(factors) == len(found) == len(cases) * len(COLUMNS[optimizer])
    return factors


@pytest.mark.parametrize("optimizer", COLUMNS)
@pytest.mark.parametrize("name", MEASURED)
def test_steps_are_worth_what_was_measured(name: str, optimizer: str) -> None:
    factors = factors_of(MEASURED[name], optimizer)
    worth = getattr(CANDIDATES[name], optimizer)
    # Nobody is taken to be better than AllReduce, at the rate that suits AllReduce.
    assert worth.mean == pytest.approx(max(1.0, fmean(factors)), abs=0.06)
    assert max(factors) <= worth.mean * (1 + worth.uncertainty)


@pytest.mark.parametrize("optimizer", COLUMNS)
@pytest.mark.parametrize(("case", "in_a_step"), [("2nd", 0.5), ("5th", 0.2)])
def test_steps_of_models_that_are_averaged_rarely(
    case: str, in_a_step: float, optimizer: str
) -> None:
    factors = factors_of((f"WAGMA, every {case} step",), optimizer)
    worth = getattr(CANDIDATES["wagma"], optimizer).with_averages(in_a_step)
    assert worth.mean == pytest.approx(fmean(factors), abs=0.1)


def test_all_are_measured() -> None:
    assert {"allreduce", *MEASURED} == CANDIDATES.keys()
    assert CANDIDATES["allreduce"].sgd.mean == CANDIDATES["allreduce"].adam.mean == 1.0
