"""What `import offbeat` offers, and how little it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.strategies import REGISTRY

SOURCE = Path(offbeat.__file__).parents[1]
HEAVY = ["torch", "numba", "numpy", "zmq", "scipy"]


def test_the_public_names_are_these_and_no_others() -> None:
    strategies = {
        "ADPSGD",
        "AdaptiveSGD",
        "AllReduce",
        "Crossbow",
        "DPSGD",
        "EagerSGD",
        "ElasticSGD",
        "GTopK",
        "LocalSGD",
        "SGP",
    }
    strategies |= {"TopK", "WAGMA"}
    strategies |= {"DKFAC", "DPKFAC", "MPDKFAC", "SPDKFAC"}
    others = {"Cluster", "OffbeatError", "Outer", "Session", "attach", "reshard"}
    assert sorted(offbeat.__all__) == sorted(strategies | others)


@pytest.mark.parametrize("name", offbeat.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    assert getattr(offbeat, name).__doc__
    assert name in dir(offbeat)


def test_every_strategy_is_public_under_its_class_name() -> None:
    for strategy in REGISTRY.values():
        assert getattr(offbeat, strategy.__name__) is strategy


def test_the_root_of_all_errors_is_public() -> None:
    assert offbeat.OffbeatError is OffbeatError


def test_importing_the_package_loads_nothing_heavy() -> None:
    report = (
        f"import json, sys; sys.path.insert(0, {str(SOURCE)!r}); import offbeat;"
        " print(json.dumps(list(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-I", "-c", report], check=True, capture_output=True, text=True
    ).stdout
    assert not set(json.loads(output)) & set(HEAVY)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GTopk'; it has .*GTopK"):
        offbeat.GTopk  # noqa: B018
