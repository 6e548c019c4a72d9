"""The table of strategies agrees with the classes, and lists all of them. Every option is described
on the strategy itself, and its text stands once in the source.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

import offbeat
from offbeat import strategies
from offbeat.codec.described_options import describe_options, first_sentence, option_texts
from offbeat.errors import ConfigError
from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import REGISTRY, StrategyEntry

SOURCES = sorted(Path(strategies.__path__[0]).glob("*.py"))

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


@pytest.mark.parametrize("name", REGISTRY)
def test_a_strategys_docstring_describes_its_options_and_no_others(name: str) -> None:
    kind = REGISTRY[name]
    shown = inspect.getdoc(kind) or ""
    described = re.findall(r"^    (\w+): \S", shown, re.MULTILINE)
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(kind))
    assert all(option.meaning for option in describe_options(kind))


def test_help_shows_all_options_of_spdkfac() -> None:
    shown = inspect.getdoc(REGISTRY["spdkfac"]) or ""
    assert shown.count("\nArgs:\n") == 1
    assert all(f"\n    {option}: " in shown for option in ("damping", "curvature"))
    assert len(describe_options(REGISTRY["spdkfac"])) <= 10


def test_the_text_of_an_inherited_option_stands_once_in_the_source() -> None:
    source = re.sub(r"\s+", " ", " ".join(path.read_text() for path in SOURCES))
    texts = {
        (name, re.sub(r"\s+", " ", text))
        for kind in REGISTRY.values()
        for name, text in option_texts(kind).items()
    }
    counts = Counter({(name, text): source.count(f" {name}: {text}") for name, text in texts})
    assert not {name for (name, _), count in counts.items() if count != 1}


@dataclass(frozen=True, kw_only=True)
class Toy(offbeat.AllReduce):
    """A strategy of somebody else. It does nothing.

    Args:
        strength: of nothing at all, with a text that is long enough to need
            a second line.
        codec: this one says it in its own words.

    Raises:
        ConfigError: never.
    """

    name: ClassVar[str] = "toy"

    strength: float
    label: str = ""


def test_a_strategy_outside_the_package_shows_inherited_options_too() -> None:
    assert list(option_texts(Toy)) == ["strength", "codec"]
    lines = (Toy.__doc__ or "").splitlines()
    assert lines[:3] == ["A strategy of somebody else. It does nothing.", "", "Args:"]
    assert lines[4] == "        a second line."
    assert lines[-2:] == ["Raises:", "    ConfigError: never."]
    assert first_sentence(Toy.__doc__) == "A strategy of somebody else"


def test_an_option_without_a_text_is_listed_without_a_meaning() -> None:
    described = {option.name: option for option in describe_options(Toy)}
    assert list(described) == ["strength", "codec", "label"]
    assert described["label"].meaning == ""
    assert described["strength"].default is dataclasses.MISSING
    assert described["strength"].hint is float
    assert described["codec"].meaning == "this one says it in its own words."
