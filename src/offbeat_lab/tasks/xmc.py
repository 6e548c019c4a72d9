"""`xmc`: many labels for sparse rows (extreme multi-label classification), by default from Python's
own standard library.

The data are those of `load_standard_library`, or files of the Extreme Classification
Repository. The model is that of the papers: a sparse input, hidden units with ReLU,
softmax over all labels.

Parameters: (features + 1) hidden + labels (hidden + 1); 844,395 with 128 hidden units and the
library of Python 3.11.7.
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
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from offbeat.errors import ConfigError
from offbeat.xmc.label_loss import SparseClassifier
from offbeat.xmc.metrics import RankingMetrics, propensities
from offbeat.xmc.row_optimizers import RowAdagrad, RowAdam, RowSGD
from offbeat.xmc.rows import Examples, SparseRows
from offbeat.xmc.xmlrepo import XmlFiles, load, shaped
from offbeat_lab.tasks.base import AbsolutePath, Batch, Task, TaskOptions

_EVALUATION_BATCH = 1024
_DEPTHS = (1, 3, 5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Samples to train on and held out, with equally many features and labels."""

    train: Examples
    test: Examples


class XmcOptions(TaskOptions):
    """Options of `xmc`."""

    batch_size: int = Field(64, ge=1, description="samples in one worker's batch")
    lr: float = Field(
        0.05,
        gt=0,
        description="learning rate; try 0.01 with optimizer=adam, 2 and more epochs with sgd",
    )
    path: AbsolutePath | None = Field(
        None,
        description=(
            "training data in the Extreme Classification Repository's format; default: the standard"
            " library"
        ),
    )
    test_path: AbsolutePath | None = Field(None, description="data held out; needed with path")
    labels_path: AbsolutePath | None = Field(
        None, description="labels of path, where they have a file of their own"
    )
    test_labels_path: AbsolutePath | None = Field(None, description="labels of test_path, likewise")
    first_feature: int = Field(
        0, ge=0, le=1, description="the number of the first feature in the files"
    )
    first_label: int = Field(
        0, ge=0, le=1, description="the number of the first label in the files"
    )
    normalise: bool = Field(True, description="scale every row to Euclidean length 1")
    hidden: int = Field(128, ge=1, description="hidden units")
    drawn_labels: int | None = Field(
        None,
        ge=1,
        description=(
            "labels drawn for each batch beside its own; default: the loss looks at all labels"
        ),
    )
    optimizer: Literal["adagrad", "sgd", "adam"] = Field(
        "adagrad", description="optimizer, of rows"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")


class Xmc(Task):
    """Multi-label classification of sparse rows."""

    name = "xmc"
    summary = (
        "many labels for sparse rows (default: the names that functions of Python's standard"
        " library call; or --set path=...), one hidden layer, precision of the first label"
    )
    metric_name = "precision_at_1"
    higher_is_better = True
    default_epochs = 4
    options_type = XmcOptions
    options: XmcOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        given = self.options
        paths = (given.path, given.test_path, given.labels_path, given.test_labels_path)
        if (given.path is None) != (given.test_path is None):
            there, missing = (
                ("path", "test_path") if given.test_path is None else ("test_path", "path")
            )
            raise ConfigError(
                f"{there} was given without {missing}; give both, or neither for the standard"
                " library"
            )
        if (given.labels_path is None) != (given.test_labels_path is None) or (
            given.path is None and given.labels_path
        ):
            raise ConfigError(
                "labels_path and test_labels_path belong together, and to path and test_path; give"
                " all four"
            )
        for path in paths:
            if path is not None and not path.is_file():
                raise ConfigError(
                    f"no data at {path}; a file of the Extreme Classification Repository's format"
                    " is needed"
                )

    @cached_property
    def _data(self) -> Data:
        if self.options.path is None:
            return load_standard_library()
        train, test = (load(files) for files in self._files())
        return Data(train=self._scaled(train), test=self._scaled(test))

    def _files(self) -> tuple[XmlFiles, XmlFiles]:
        """Training and test files of one shape: whatever either of them has."""
        options = self.options
        assert options.path is not None
        assert options.test_path is not None
        train = XmlFiles(
            path=options.path,
            labels_path=options.labels_path,
            first_feature=options.first_feature,
            first_label=options.first_label,
        )
        both = [
            shaped(train),
            shaped(replace(train, path=options.test_path, labels_path=options.test_labels_path)),
        ]
        num_features = max(files.num_features or 0 for files in both)
        num_labels = max(files.num_labels or 0 for files in both)
        first, second = (
            replace(files, num_features=num_features, num_labels=num_labels) for files in both
        )
        return first, second

    def _scaled(self, samples: Examples) -> Examples:
        return (
            replace(samples, features=samples.features.normalised())
            if self.options.normalise
            else samples
        )

    @property
    def num_samples(self) -> int:
        return len(self._data.train)

    def model(self) -> nn.Module:
        train = self._data.train
        self._check_size(train.features.num_columns, train.labels.num_columns)
        return SparseClassifier(
            train.features.num_columns,
            train.labels.num_columns,
            num_hidden=self.options.hidden,
            num_drawn_labels=self.options.drawn_labels,
        )

    def _check_size(self, num_features: int, num_labels: int) -> None:
        """The first line of a file may name any numbers of columns."""
        hidden = self.options.hidden
        num_bytes = 4 * ((num_features + 1) * hidden + num_labels * (hidden + 1))
        if num_bytes > (memory := psutil.virtual_memory().total):
            raise ConfigError(
                f"a model of {num_features} features, {num_labels} labels and {hidden} hidden units"
                f" takes {num_bytes >> 20} MiB, this machine has {memory >> 20}; is the first line"
                " of the data right?"
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        match self.options.optimizer:
            case "adagrad":
                return RowAdagrad(model.parameters(), self.options.lr)
            case "sgd":
                return RowSGD(model.parameters(), self.options.lr, momentum=self.options.momentum)
            case "adam":
                return RowAdam(model.parameters(), self.options.lr)

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        taken = self._data.train.take(samples)
        return taken.features.to_batch(), taken.labels.to_batch()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(*batch)
        return loss

    def evaluate(self, model: nn.Module) -> float:
        return self.metrics(model)[self.metric_name]

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """P@1, P@3, P@5, and likewise nDCG and propensity-scored precision; at 1, nDCG is the same
        as P.
        """
        assert isinstance(model, SparseClassifier)
        metrics = RankingMetrics(_DEPTHS, propensities=self._propensities)
        for part in self._data.test.batches(_EVALUATION_BATCH):
            metrics.add(
                model.top_labels(part.features.to_batch(), max(_DEPTHS)).numpy(), part.labels
            )
        found = metrics.result()
        others = {
            name: value
            for name, value in found.items()
            if name not in ("P@1", "nDCG@1") and math.isfinite(value)
        }
        return {self.metric_name: found["P@1"]} | others

    @cached_property
    def _propensities(self) -> NDArray[np.float64]:
        return propensities(self._data.train.labels)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls(Data):
    """Samples of functions; those held out are of other modules.

    Attributes:
        features: the words, by column.
        labels: the names, by column.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Function:
    words: Counter[str]
    calls: frozenset[str]


@cache
def load_standard_library() -> Calls:
    """A real task that needs no download: which names does a function of Python's standard library
    call? Reads the library's source, which takes a few seconds, and keeps the task in memory.

    1. Every outermost function and method of the library's modules is a sample. Passed over are
       tests, packages that some systems leave out, and character tables, whose functions are all
       the same.
    2. Its labels are the names it calls, `read` for `file.read(4)`; those that fewer than
       `MIN_LABEL` training functions call are left out, and so are functions that call nothing
       else.
    3. Its features are the words in it: identifiers, and their parts (`read_file` gives
       `read_file`, `read` and `file`), words of its strings, kinds of syntax, and its module's
       package. A name that it calls is none of them.
    4. Values are (1 + ln occurrences) ln(functions / functions with that word), rows are scaled to
       length 1.

    Modules, not functions, are dealt to training and test, one in `TEST_EVERY` by the checksum of
    its name. For one release of Python the data are always the same. Python 3.11.7 gives 6,815
    functions to train on and 1,884 to test, 5,843 words, 747 names; 37 words and 2.9 names a
    function. The most frequent name, `len`, is called by 12% of them.

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
