"""The task made of Python's own library: what a function gives, and that what it calls does not
give itself away.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat_lab.tasks import standard_library
from offbeat_lab.tasks.standard_library import Calls, load_standard_library

SOURCE = '''
"""A module."""
import os

def outer(path, *, encoding="utf-8 text"):
    """Reads the file."""
    def inner():
        return open(path)
    with inner() as file:
        return file.read(4) or os.linesep

class Thing:
    async def fetch_all(self):
        return [self.fetchOne(key) for key in self.keys]

if True:
    def late(): close()
'''


def make_library(root: Path, num_modules: int = 40) -> Path:
    """Modules whose functions call `alpha` where they speak of animals and `beta` where they speak
    of plants.
    """
    for number in range(num_modules):
        subject, called = (("animal", "alpha"), ("plant", "beta"))[number % 2]
        (root / f"module{number}.py").write_text(
            f"def of_{subject}({subject}):\n    return {called}({subject})\n"
        )
    return root


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(standard_library.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(
        standard_library, "load_standard_library", load_standard_library.__wrapped__
    )
    return make_library(tmp_path)


def load() -> Calls:
    return standard_library.load_standard_library()


def test_functions_give_the_names_they_call_and_the_words_they_hold() -> None:
    found = standard_library.functions_of(SOURCE.encode(), "pkg")
    late, fetch, outer = sorted(found, key=lambda function: min(function.calls))
    assert outer.calls == {"inner", "open", "read"}
    assert {
        "path",
        "encoding",
        "utf",
        "text",
        "reads",
        "file",
        "os",
        "linesep",
        "pkg",
        "<With>",
    } <= set(outer.words)
    assert fetch.calls == {"fetchOne"}
    assert {"fetch_all", "fetch", "all", "key", "keys"} <= set(fetch.words)
    assert late.calls == {"close"}


def test_a_called_name_is_no_word() -> None:
    (function,) = standard_library.functions_of(
        b"def f(read_it):\n    read_it()\n    other = read_it\n    x = 'read_it'\n", "pkg"
    )
    assert function.calls == {"read_it"}
    assert "read_it" not in function.words
    assert function.words["it"] == 0


def test_the_task_is_made_of_modules_that_are_apart(library: Path) -> None:
    (library / "tests").mkdir()
    (library / "tests" / "unseen.py").write_text(
        "def of_stone(stone):\n    return gamma(stone)\n" * 20
    )
    found = load()
    assert found.labels == ("alpha", "beta")
    assert len(found.train) + len(found.test) == 40
    assert len(found.test) > 0
    assert "animal" in found.features
    for samples in (found.train, found.test):
        assert samples.labels.lengths().tolist() == [1] * len(samples)
        speaks = [
            samples.features.part(row, row + 1).columns.tolist() for row in range(len(samples))
        ]
        called = [found.labels[column] for column in samples.labels.columns]
        assert [
            "alpha" if found.features.index("animal") in columns else "beta" for columns in speaks
        ] == called


def test_the_same_source_gives_the_same_data(library: Path) -> None:
    first, second = load(), load()
    assert first.features == second.features
    for a, b in ((first.train, second.train), (first.test, second.test)):
        assert np.array_equal(a.features.columns, b.features.columns)
        assert np.array_equal(a.features.values, b.features.values)


def test_a_library_without_source_is_refused(library: Path) -> None:
    for path in library.glob("*.py"):
        path.unlink()
    with pytest.raises(ConfigError, match="hardly any Python source"):
        load()


@pytest.mark.slow
def test_the_real_library_is_a_task_worth_learning() -> None:
    found = load_standard_library()
    assert load_standard_library() is found
    assert len(found.train) > 4000
    assert len(found.test) > 1000
    assert len(found.labels) > 300
    most_frequent = found.test.labels.counts()[found.train.labels.counts().argmax()] / len(
        found.test
    )
    assert most_frequent < 0.25
