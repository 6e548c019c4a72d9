"""The table of strategies agrees with the classes, and lists all of them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import offbeat
from offbeat import strategies
from offbeat.codec.described_options import describe_options, first_sentence
from offbeat.errors import ConfigError
from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import REGISTRY, StrategyEntry

each_entry = pytest.mark.parametrize(
    "entry", REGISTRY.entries.values(), ids=lambda entry: entry.name
)


def concrete_strategies() -> Iterator[type[Strategy]]:
    for module in pkgutil.iter_modules(strategies.__path__):
        loaded = import_module(f"{strategies.__name__}.{module.name}")
        defined = [value for value in vars(loaded).values() if inspect.isclass(value)]
        for kind in defined:
            is_own = kind.__module__ == loaded.__name__
            if is_own and issubclass(kind, Strategy) and hasattr(kind, "name"):
                yield kind


@each_entry
def test_an_entry_says_what_its_class_says(entry: StrategyEntry) -> None:
    kind = REGISTRY[entry.name]
    assert issubclass(kind, Strategy)
    assert (kind.name, kind.__name__, kind.__module__) == (
        entry.name,
        entry.class_name,
        entry.module,
    )
    assert first_sentence(kind.__doc__) == entry.summary


@each_entry
def test_a_module_or_its_class_names_the_paper(entry: StrategyEntry) -> None:
    number = entry.paper.removeprefix("arXiv ")
    module = import_module(entry.module)
    assert number in f"{module.__doc__} {REGISTRY[entry.name].__doc__}"


def test_every_strategy_has_an_entry() -> None:
    assert set(REGISTRY.values()) == set(concrete_strategies())
    assert len(REGISTRY) == len(set(REGISTRY.values()))


def test_a_name_that_is_not_there_is_no_key() -> None:
    assert "gtopk" in REGISTRY
    assert "gtopc" not in REGISTRY
    with pytest.raises(KeyError):
        REGISTRY["gtopc"]


@each_entry
def test_text_is_no_number_and_no_truth_value(entry: StrategyEntry) -> None:
    kind: Any = REGISTRY[entry.name]
    for option in describe_options(kind):
        if isinstance(option.default, bool | int | float):
            with pytest.raises(ConfigError, match=f"{option.name} of {kind.__name__}: got 'false'"):
                kind(**{option.name: "false"})


def test_nor_is_it_within_an_object_among_the_options() -> None:
    text: Any = "false"
    with pytest.raises(ConfigError, match="pi of Curvature: got 'false'"):
        offbeat.SPDKFAC(curvature=offbeat.Curvature(pi=text))
    with pytest.raises(ConfigError, match="offload of Outer: got 'false'"):
        offbeat.LocalSGD(outer=offbeat.Outer(offload=text))
