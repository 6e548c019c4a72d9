"""A real task that needs no download: which names does a function of Python's standard library
call?

1. Every outermost function and method of the library's modules is a sample. Passed over are tests,
   packages that some systems leave out, and character tables, whose functions are all the same.
2. Its labels are the names it calls, `read` for `file.read(4)`; those that fewer than `MIN_LABEL`
   training functions call are left out, and so are functions that call nothing else.
3. Its features are the words in it: identifiers, and their parts (`read_file` gives `read_file`,
   `read` and `file`), words of its strings, kinds of syntax, and its module's package. A name that
   it calls is none of them.
4. Values are (1 + ln occurrences) ln(functions / functions with that word), rows are scaled to
   length 1.

Modules, not functions, are dealt to training and test, one in `TEST_EVERY` by the checksum of its
name. For one release of Python the data are always the same. Python 3.11.7 gives 6,815 functions to
train on and 1,884 to test, 5,843 words, 747 names; 37 words and 2.9 names a function. The most
frequent name, `len`, is called by 12% of them.
"""

from __future__ import annotations

import ast
import math
import re
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples, SparseRows

MIN_LABEL = 5
MIN_FEATURE = 3
TEST_EVERY = 5

_PASSED_OVER = frozenset(
    (
        *("test", "tests"),
        *("distutils", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "tkinter", "turtledemo"),
        *("encodings", "pydoc_data"),
    )
)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_LONGEST_STRING = 2000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calls:
    """The task.

    Attributes:
        train: samples.
        test: samples of other modules.
        features: the words, by column.
        labels: the names, by column.
    """

    train: Examples
    test: Examples
    features: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Function:
    words: Counter[str]
    calls: frozenset[str]


@cache
def load_standard_library() -> Calls:
    """Read the library's source, which takes a few seconds, and keep the task in memory.

    Raises:
        ConfigError: this Python comes without its library's source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[_Function] = []
    test: list[_Function] = []
    for path in _modules(root):
        name = path.relative_to(root).with_suffix("").as_posix()
        functions = test if zlib.crc32(name.encode()) % TEST_EVERY == 0 else train
        functions.extend(functions_of(path.read_bytes(), name.partition("/")[0]))
    labels = _frequent((function.calls for function in train), MIN_LABEL)
    train, test = (
        [each for each in part if not each.calls.isdisjoint(labels)] for part in (train, test)
    )
    if not train or not test:
        raise ConfigError(
            f"there is hardly any Python source in {root}; give data by path, or use a Python with"
            " its library's source"
        )
    features = _frequent((function.words for function in train), MIN_FEATURE)
    seen = Counter(word for function in train for word in function.words)
    rarity = {word: math.log(len(train) / seen[word]) for word in features}
    return Calls(
        train=_examples(train, rarity, labels),
        test=_examples(test, rarity, labels),
        features=tuple(features),
        labels=tuple(labels),
    )


def _modules(root: Path) -> Iterator[Path]:
    """The library's files in order, without descending into installed packages, of which there may
    be many.
    """
    for path in sorted(root.iterdir()):
        if path.stem in _PASSED_OVER or path.name.startswith(
            ("__pycache__", "_sysconfigdata", "config-")
        ):
            continue
        if path.is_dir() and not path.name.endswith("-packages"):
            yield from _modules(path)
        elif path.suffix == ".py":
            yield path


def functions_of(source: bytes, package: str) -> Iterator[_Function]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings, which are the library's business
        tree = ast.parse(source)
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield _read(node, package)
            elif isinstance(node, ast.stmt | ast.ExceptHandler):
                waiting.append(node)


def _read(function: ast.AST, package: str) -> _Function:
    calls: set[str] = set()
    words: list[str] = [package]
    for node in ast.walk(function):
        words.append(f"<{type(node).__name__}>")
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                calls.add(name)
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
            ):
                words.append(name)
            case (
                ast.keyword(arg=str(name)) | ast.alias(name=name) | ast.AsyncFunctionDef(name=name)
            ):
                words.append(name)
            case ast.Constant(value=str(text)):
                words.extend(word.lower() for word in _WORD.findall(text[:_LONGEST_STRING]))
    kept: Counter[str] = Counter()
    for word, count in Counter(words).items():
        if word not in calls:
            kept[word] += count
            for part in _parts(word):
                kept[part] += count
    return _Function(kept, frozenset(calls))


@cache
def _parts(word: str) -> tuple[str, ...]:
    parts = tuple(part.lower() for part in _PART.findall(word))
    return parts if parts != (word,) and not word.startswith("<") else ()


def _frequent(bags: Iterable[Iterable[str]], least: int) -> list[str]:
    counts = Counter(word for bag in bags for word in bag)
    return sorted(word for word, count in counts.items() if count >= least)


def _examples(functions: list[_Function], rarity: dict[str, float], labels: list[str]) -> Examples:
    feature_columns = {word: column for column, word in enumerate(rarity)}
    label_columns = {name: column for column, name in enumerate(labels)}
    features = SparseRows.from_entries(
        (
            sorted(
                (feature_columns[word], (1 + math.log(count)) * rarity[word])
                for word, count in function.words.items()
                if word in feature_columns
            )
            for function in functions
        ),
        num_columns=len(rarity),
    )
    called = SparseRows.from_entries(
        (
            sorted((label_columns[name], 1.0) for name in function.calls if name in label_columns)
            for function in functions
        ),
        num_columns=len(labels),
    )
    return Examples(features=features.normalised(), labels=called)
