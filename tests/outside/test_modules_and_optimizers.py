"""Every module and every optimizer that PyTorch's own tests list, on two ranks against one process.
`make test` takes one of each kind, and `make test-outside` all ways in which PyTorch makes them.
"""

from __future__ import annotations

from typing import Any

import pytest

from outside_support import modules, optimizers
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def one_of_each_kind(rank: int, world_size: int) -> tuple[dict[str, Any], list[str]]:
    """In one process, since importing PyTorch's lists takes longer than what is done with them."""
    found = modules.outcomes(rank, world_size, alone=False)
    labels = list(optimizers.STRATEGIES)
    return found, optimizers.failures(rank, world_size, labels=labels, whole=False)


def check_modules(ranks: list[dict[str, Any]]) -> None:
    for outcome in ranks:
        reasons = {name: reason for name, reason in outcome["refused"].items() if reason}
        assert reasons.keys() == modules.REFUSED.keys()
        assert all(modules.REFUSED[name] in reason for name, reason in reasons.items())
        assert not outcome["wrong"], "\n".join(outcome["wrong"])
        assert set(outcome["preconditioned"]) == modules.PRECONDITIONED


@pytest.mark.timeout(600)
def test_one_of_each_kind_trains_as_in_a_single_process(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(one_of_each_kind, 2, timeout_s=500)
    check_modules([found for found, _ in by_rank])
    assert [found for _, found in by_rank] == [[], []], "\n".join(by_rank[0][1])


@pytest.mark.outside
@pytest.mark.timeout(1800)
def test_each_module_trains_as_in_a_single_process(run_ranks: RunRanks) -> None:
    check_modules(run_ranks(modules.outcomes, 2, timeout_s=1700, alone=True))


@pytest.mark.outside
@pytest.mark.timeout(900)
@pytest.mark.parametrize("label", optimizers.STRATEGIES)
def test_every_optimizer_with_every_option(run_ranks: RunRanks, label: str) -> None:
    found = run_ranks(optimizers.failures, 2, timeout_s=800, labels=[label], whole=True)
    assert found == [[], []], "\n".join(found[0])
