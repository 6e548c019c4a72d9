"""Options that would do nothing beside the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

import offbeat
from offbeat.errors import ConfigError

IDLE: list[tuple[type[Any], str, Any, dict[str, Any], dict[str, Any]]] = [
    (offbeat.GTopK, "codec", "bfloat16", {"collective": "dense"}, {"collective": "all_gather"}),
    (offbeat.WAGMA, "group_size", 4, {"interval": 10}, {"interval": 5}),
    (offbeat.LocalSGD, "warmup", 5, {"period": 1}, {"period": 2}),
]
"""A strategy, an option, a value of it, others beside which it does nothing, and beside which it
does something.
"""


@pytest.mark.parametrize(("strategy", "option", "value", "beside", "where_used"), IDLE)
def test_an_option_that_would_do_nothing_is_refused(
    strategy: type[Any],
    option: str,
    value: Any,
    beside: dict[str, Any],
    where_used: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=f"{option}=.* would do nothing, because .*; leave it"):
        strategy(**beside, **{option: value})
    strategy(**beside)
    strategy(**where_used, **{option: value})


def test_there_is_no_rule_of_momentum_to_choose() -> None:
    with pytest.raises(TypeError, match="momentum_rule"):
        offbeat.TopK(momentum_rule="masked")  # type: ignore[call-arg]
