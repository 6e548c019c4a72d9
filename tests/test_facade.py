"""What `import offbeat` offers, and how little it costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
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
        "Auto",
        "Crossbow",
        "DPSGD",
        "DeAR",
        "EF21",
        "DeMo",
        "EagerSGD",
        "ElasticSGD",
        "GTopK",
        "LocalSGD",
        "PowerSGD",
        "SGP",
    }
    strategies |= {"A2SGD", "DEFSGD", "OneBitAdam", "QGenX", "TopK", "WAGMA", "ZeroOneAdam"}
    strategies |= {"DKFAC", "DPKFAC", "MPDKFAC", "SPDKFAC"}
    others = {"Curvature", "OffbeatError", "Outer", "Recorder", "Session"}
    others |= {"TopKCodec", "WeightCodec"}
    others |= {"attach", "island_mesh", "log", "reshard", "step"}
    assert sorted(offbeat.__all__) == sorted(strategies | others)


@pytest.mark.parametrize("name", offbeat.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    assert getattr(offbeat, name).__doc__
    assert dir(offbeat) == sorted([*offbeat.__all__, "__version__"])


def test_every_strategy_is_public_under_its_class_name() -> None:
    for entry in REGISTRY.entries.values():
        assert getattr(offbeat, entry.class_name) is REGISTRY[entry.name]


def test_type_checkers_see_what_is_there() -> None:
    """They read the imports under `TYPE_CHECKING`, which nothing runs."""
    block = next(
        node
        for node in ast.parse(Path(offbeat.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    shown = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "only `X as X` is public to type checkers"
            shown[alias.name] = getattr(import_module(str(node.module)), alias.name)
    assert shown == {name: getattr(offbeat, name) for name in offbeat.__all__}


def test_the_root_of_all_errors_is_public() -> None:
    assert offbeat.OffbeatError is OffbeatError


def test_importing_the_package_loads_nothing_heavy() -> None:
    report = (
        f"import json, sys; sys.path.insert(0, {str(SOURCE)!r}); import offbeat;"
        " from offbeat.strategies import REGISTRY; list(REGISTRY), dir(offbeat);"
        " print(json.dumps(list(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-I", "-c", report], check=True, capture_output=True, text=True
    ).stdout
    assert not set(json.loads(output)) & set(HEAVY)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GTopk'; it has .*GTopK"):
        offbeat.GTopk  # noqa: B018
