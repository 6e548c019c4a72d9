"""What `Auto` takes a strategy's steps to be worth is what was measured."""

from __future__ import annotations

from statistics import fmean

import pytest

from _results import STUDIES, ResultFile
from offbeat.strategies.choice import CANDIDATES

MEASURED = {"gtopk": "GTopK", "powersgd": "PowerSGD", "localsgd": "LocalSGD"}
COLUMNS = {"sgd": {"images"}, "adam": {"text", "charlm"}}


@pytest.mark.parametrize("optimizer", COLUMNS)
@pytest.mark.parametrize("name", MEASURED)
def test_steps_are_worth_what_was_measured(name: str, optimizer: str) -> None:
    factors = [
        result.figure.value
        for result in ResultFile(STUDIES / "steps_to_equal.jsonl").results
        if result.figure.table == "steps to equal"
        and result.figure.case.startswith(MEASURED[name])
        and result.figure.column in COLUMNS[optimizer]
    ]
    numbers = [factor for factor in factors if isinstance(factor, float)]
    assert len(numbers) == len(factors) >= 1
    mean, uncertainty = getattr(CANDIDATES[name], optimizer)
    # Nobody is taken to be better than AllReduce, at the rate that suits AllReduce.
    assert mean == pytest.approx(max(1.0, fmean(numbers)), abs=0.06)
    assert max(numbers) <= mean * (1 + uncertainty)


def test_all_are_measured_but_for_one() -> None:
    """WAGMA's worth is LocalSGD's, which averages as often, with more doubt."""
    assert CANDIDATES.keys() - MEASURED.keys() == {"allreduce", "wagma"}
    for optimizer in COLUMNS:
        wagma, local = (getattr(CANDIDATES[name], optimizer) for name in ("wagma", "localsgd"))
        assert wagma.mean >= local.mean
        assert wagma.uncertainty >= local.uncertainty
    assert CANDIDATES["allreduce"].sgd.mean == CANDIDATES["allreduce"].adam.mean == 1.0
