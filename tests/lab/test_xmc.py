"""The task of extreme multi-label data, and data that are made for it."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab_support.data import ROWS, write_rows
from lab_support.rows import write
from offbeat.errors import ConfigError
from offbeat.xmc import xmlrepo
from offbeat.xmc.label_loss import SparseClassifier
from offbeat.xmc.rows import Examples, SparseBatch
from offbeat.xmc.xmlrepo import XmlFiles
from offbeat_lab.config import Request, resolve, steps_to_do, task_of
from offbeat_lab.sparse_data import AMAZON_670K, BLOCK_ROWS, Synthetic
from offbeat_lab.tasks import build_task, num_samples_of, xmc
from offbeat_lab.tasks.xmc import Calls, Xmc, load_standard_library

# Task `xmc`: files in either layout, the standard library where there are none, and batches of
# sparse rows.


NUM_TRAIN, NUM_TEST = 300, 80


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Options that name files to train on and to test with."""
    return write_rows(tmp_path, num_train=NUM_TRAIN, num_test=NUM_TEST)


def train(task: Xmc, num_epochs: int) -> SparseClassifier:
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    for epoch in range(num_epochs):
        for batch in task.batches(seed=0, epoch=epoch, rank=0, world_size=1):
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model, SparseClassifier)
    return model


def build(options: dict[str, str]) -> Xmc:
    task = build_task("xmc", options)
    assert isinstance(task, Xmc)
    return task


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "0.1"},
        {"lr": "0.1", "drawn_labels": "6"},
        {"optimizer": "sgd", "lr": "1", "momentum": "0.5"},
        {"optimizer": "adam", "lr": "0.01"},
        {"lr": "0.1", "normalise": "false"},
    ],
)
def test_it_learns_more_than_which_label_is_frequent(
    options: dict[str, str], paths: dict[str, str]
) -> None:
    task = build(options | paths | {"batch_size": "16", "hidden": "16"})
    before = task.evaluate(task.build_model(0))
    after = task.evaluate(train(task, 4))
    most_frequent = ROWS.load(NUM_TEST, split="test").labels.counts().max() / NUM_TEST
    assert 0 <= before <= 1
    assert most_frequent < after <= 1


def test_the_metric_is_told_with_others(paths: dict[str, str]) -> None:
    task = build(paths | {"hidden": "16"})
    model = task.build_model(0)
    metrics = task.metrics(model)
    assert metrics.pop("precision_at_1") == task.evaluate(model)
    assert set(metrics) == {"P@3", "P@5", "nDCG@3", "nDCG@5", "PSP@1", "PSP@3", "PSP@5"}
    assert all(0 <= value <= 1 for value in metrics.values())


def test_a_batch_is_sparse_rows_and_knows_how_many(paths: dict[str, str]) -> None:
    task = build(paths)
    features, labels = batch = task.batch(np.array([5, 0, 7]))
    assert isinstance(features, SparseBatch)
    assert isinstance(labels, SparseBatch)
    assert num_samples_of(batch) == features.num_rows == labels.num_rows == 3
    assert num_samples_of((torch.zeros(4, 2), torch.zeros(4))) == 4


def test_rows_are_scaled_unless_told_otherwise(paths: dict[str, str]) -> None:
    doubled = Path(paths["path"]).with_name("doubled.txt")
    doubled.write_text("2 60 12\n3 1:3 2:4\n 5:2\n")
    lengths = {}
    for normalise in ("true", "false"):
        features, _ = build(
            {"path": str(doubled), "test_path": paths["test_path"], "normalise": normalise}
        ).batch(np.arange(2))
        assert isinstance(features, SparseBatch)
        lengths[normalise] = [features.values[:2].norm().item(), features.values[2:].norm().item()]
    assert lengths == {"true": pytest.approx([1.0, 1.0]), "false": pytest.approx([5.0, 2.0])}


def test_two_files_counted_from_one_are_the_same_data(
    paths: dict[str, str], tmp_path: Path
) -> None:
    options = {"first_feature": "1", "first_label": "1"}
    for option, labels_option in (("path", "labels_path"), ("test_path", "test_labels_path")):
        target = XmlFiles(
            path=tmp_path / f"{option}_X",
            labels_path=tmp_path / f"{option}_Y",
            first_feature=1,
            first_label=1,
        )
        rows = xmlrepo.load(XmlFiles(path=Path(paths[option])))
        columns = rows.features.num_columns, rows.labels.num_columns
        write(target, [rows], header=(len(rows), *columns))
        options |= {option: str(target.path), labels_option: str(target.labels_path)}
    one, two = build(paths), build(options)
    assert one.num_parameters() == two.num_parameters()
    for ours, theirs in zip(one.batch(np.arange(9)), two.batch(np.arange(9)), strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert torch.equal(left, right)


def test_without_headers_there_are_as_many_columns_as_either_file_has(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("1 5:1\n0 2:1\n")
    (tmp_path / "test").write_text("3 1:1\n")
    task = build(
        {"path": str(tmp_path / "train"), "test_path": str(tmp_path / "test"), "hidden": "2"}
    )
    model = task.model()
    assert isinstance(model, SparseClassifier)
    assert (model.hidden.weight.shape[0], model.labels.num_labels) == (6, 4)
    assert 0 <= task.evaluate(model) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "train.txt"}, "path was given without test_path; give both, or neither"),
        ({"test_path": "test.txt"}, "test_path was given without path"),
        ({"labels_path": "train.txt"}, "labels_path and test_labels_path belong together"),
        (
            {"labels_path": "train.txt", "test_labels_path": "test.txt"},
            "belong together, and to path and test_path",
        ),
        ({"path": "nowhere.txt", "test_path": "test.txt"}, r"no data at .*nowhere.txt"),
        ({"first_label": "2"}, "option first_label .* less than or equal to 1"),
        ({"optimizer": "adamw"}, "'adagrad', 'sgd' or 'adam'"),
        ({"drawn_labels": "0"}, "option drawn_labels .* greater than or equal to 1"),
        ({"size": "tiny"}, "no option 'size'"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    options: dict[str, str], message: str, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(paths["path"]).parent)
    with pytest.raises(ConfigError, match=message):
        build(options)


def test_a_wrong_line_is_named_before_anything_starts(
    paths: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken.txt").write_text("2 60 12\n3 1:1\n3 1;1\n")
    settings = [f"path={tmp_path / 'broken.txt'}", f"test_path={paths['test_path']}"]
    with pytest.raises(
        ConfigError, match=r"broken.txt, line 3, character 3: expected 'feature:value'"
    ):
        resolve(Request(task="xmc", strategy="localsgd", workers=2, settings=settings))


def test_a_run_keeps_its_paths_wherever_it_is_resumed(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(paths["path"]).parent)
    settings = ["path=train.txt", "test_path=test.txt", "drawn_labels=3", "batch_size=8"]
    config = resolve(Request(task="xmc", strategy="localsgd", workers=2, settings=settings))
    assert config.task_options["path"] == paths["path"]
    assert task_of(config).options == build_task("xmc", config.task_options).options
    assert steps_to_do(config, task_of(config)) == 4 * (NUM_TRAIN // 16)


def test_by_default_it_is_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which a part is there, since the whole takes seconds to read."""
    library = Path(sysconfig.get_path("stdlib"))
    for package in ("asyncio", "email", "json", "logging", "multiprocessing"):
        (tmp_path / package).symlink_to(library / package)
    monkeypatch.setattr(xmc.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(xmc, "load_standard_library", load_standard_library.__wrapped__)
    task = build({})
    assert task.num_samples > 300
    features, labels = task.batch(np.arange(3))
    assert isinstance(features, SparseBatch)
    assert features.values[: int(features.offsets[1])].norm().item() == pytest.approx(1.0)
    assert labels.row_of_entry().unique().tolist() == [0, 1, 2]


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
    monkeypatch.setattr(xmc.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(xmc, "load_standard_library", load_standard_library.__wrapped__)
    return make_library(tmp_path)


def load() -> Calls:
    return xmc.load_standard_library()


def test_functions_give_the_names_they_call_and_the_words_they_hold() -> None:
    found = xmc.functions_of(SOURCE.encode(), "pkg")
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
    (function,) = xmc.functions_of(
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


# Generated data: the same from a seed however they are read, of the law that was asked for, and
# with something to learn.


SMALL = Synthetic(num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=7)


def content(samples: Examples) -> list[bytes]:
    return [
        array.tobytes()
        for rows in (samples.features, samples.labels)
        for array in (rows.offsets, rows.columns, rows.values)
    ]


@given(num_samples=st.integers(1, 2500), num_rows=st.integers(1, 3000))
def test_longer_data_begin_with_shorter_ones(num_samples: int, num_rows: int) -> None:
    whole = SMALL.load(2500)
    read = Examples.concatenate(list(SMALL.read(num_samples, num_rows=num_rows)))
    assert content(read) == content(whole.part(0, num_samples))


def test_splits_and_seeds_differ() -> None:
    other = Synthetic(num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=8)
    found = [SMALL.load(10), SMALL.load(10, split="test"), other.load(10)]
    assert len({content(samples)[1] for samples in found}) == 3


def test_rows_hold_different_columns_in_order_at_length_one() -> None:
    samples = SMALL.load(BLOCK_ROWS + 10)
    for rows in (samples.features, samples.labels):
        assert rows.lengths().min() >= 1
        inside = np.repeat(np.arange(len(rows)), rows.lengths())
        assert np.all(np.diff(inside * rows.num_columns + rows.columns) > 0)
    features = samples.features
    squares = np.bincount(
        np.repeat(np.arange(len(features)), features.lengths()), weights=features.values**2.0
    )
    assert squares == pytest.approx(1, rel=1e-5)


def test_lengths_are_log_normal_and_labels_follow_zipfs_law() -> None:
    like = Synthetic(
        num_features=200_000,
        num_labels=50,
        mean_draws=40.0,
        mean_labels=1.0,
        feature_exponent=0.0,
        signal=0.0,
    )
    samples = like.load(8 * BLOCK_ROWS)
    logs = np.log(samples.features.lengths())  # so many features that hardly any is drawn twice
    assert samples.features.lengths().mean() == pytest.approx(40, rel=0.1)
    assert logs.std() == pytest.approx(0.7, rel=0.1)
    assert abs(np.mean((logs - logs.mean()) ** 3)) < 0.1 * logs.std() ** 3 + 0.02
    counts = np.sort(samples.labels.counts())[::-1]
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(counts), 1)[0]
    assert slope == pytest.approx(-like.label_exponent, abs=0.1)


def test_labels_can_be_guessed_from_features_and_without_a_signal_they_cannot() -> None:
    """Rows of the same rare label have more features in common than others, if there is
    a signal.
    """

    def likeness(samples: Examples) -> float:
        features = np.zeros((len(samples), 500))
        features[
            np.repeat(np.arange(len(samples)), samples.features.lengths()), samples.features.columns
        ] = samples.features.values
        products = features @ features.T
        single = samples.labels.lengths() == 1
        first = samples.labels.columns[samples.labels.offsets[:-1]]
        same = (
            (first[:, None] == first) & single[:, None] & single & ~np.eye(len(samples), dtype=bool)
        )
        different = (first[:, None] != first) & single[:, None] & single
        return float(products[same].mean() / products[different].mean())

    silent = Synthetic(
        num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=7, signal=0.0
    )
    assert likeness(SMALL.load(1000)) > 2
    assert likeness(silent.load(1000)) == pytest.approx(1, abs=0.1)


def test_amazons_shape_streams() -> None:
    quick = replace(AMAZON_670K, features_per_label=1)  # to begin takes a while with all of them
    samples = next(islice(quick.read(490_449, num_rows=256), 1))
    assert (samples.features.num_columns, samples.labels.num_columns) == (135_909, 670_091)
    assert len(samples) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_features": 1}, "num_features .*got 1; allowed is .*from 2 to 2147483647"),
        ({"num_labels": 0}, "num_labels .*got 0"),
        ({"mean_draws": float("nan")}, "mean_draws .*got nan"),
        ({"spread": -1.0}, "spread .*got -1.0; allowed is number of at least 0"),
        ({"signal": 1.5}, "signal .*got 1.5; allowed is number in .0, 1."),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Synthetic(**{"num_features": 5, "num_labels": 5, **change})  # type: ignore[arg-type]


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples are asked for"):
        list(SMALL.read(0))
