"""Sparse rows, whole and damaged."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuzz_support import altered_bytes, bounded_memory, succeeds_or_refuses
from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples, SparseRows, regroup
from offbeat.xmc.xmlrepo import XmlFiles, load
from offbeat_lab.tasks import build_task

# Sparse rows against dense arrays.


NUM_COLUMNS = 6
entries = st.tuples(st.integers(0, NUM_COLUMNS - 1), st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
many_rows = st.lists(st.lists(entries, max_size=5), min_size=1, max_size=8)


def dense(rows: SparseRows) -> NDArray[np.float64]:
    table = np.zeros((len(rows), rows.num_columns))
    row_of_entry = np.repeat(np.arange(len(rows)), rows.lengths())
    np.add.at(table, (row_of_entry, rows.columns), rows.values)
    return table


def make(listed: list[list[tuple[int, float]]]) -> SparseRows:
    return SparseRows.from_entries(listed, num_columns=NUM_COLUMNS)


@given(listed=many_rows)
def test_entries_lie_where_they_were_put(listed: list[list[tuple[int, float]]]) -> None:
    expected = np.zeros((len(listed), NUM_COLUMNS))
    for row, of_row in enumerate(listed):
        for column, value in of_row:
            expected[row, column] += value
    assert np.array_equal(dense(make(listed)), expected)


@given(listed=many_rows, data=st.data())
def test_rows_are_taken_in_the_order_asked_for(
    listed: list[list[tuple[int, float]]], data: st.DataObject
) -> None:
    rows = make(listed)
    wanted = np.array(
        data.draw(st.lists(st.integers(0, len(listed) - 1), max_size=9)), dtype=np.int64
    )
    assert np.array_equal(dense(rows.take(wanted)), dense(rows)[wanted])


@given(listed=many_rows, size=st.integers(1, 5), bounds=st.lists(st.integers(0, 8), max_size=4))
def test_regrouping_changes_the_sizes_of_pieces_only(
    listed: list[list[tuple[int, float]]], size: int, bounds: list[int]
) -> None:
    rows = make(listed)
    samples = Examples(features=rows, labels=rows)
    cuts = [0, *sorted(min(bound, len(rows)) for bound in bounds), len(rows)]
    pieces = [samples.part(begin, end) for begin, end in pairwise(cuts)]
    groups = list(regroup(pieces, size))
    assert [len(group) for group in groups[:-1]] == [size] * (len(groups) - 1)
    assert 0 < len(groups[-1]) <= size
    assert np.array_equal(dense(Examples.concatenate(groups).labels), dense(rows))


@given(listed=many_rows)
def test_normalised_rows_have_length_one_or_zero(listed: list[list[tuple[int, float]]]) -> None:
    distinct = [list(dict(of_row).items()) for of_row in listed]
    rows = make(distinct)
    before, after = dense(rows), dense(rows.normalised())
    lengths = np.linalg.norm(before, axis=1)
    assert after == pytest.approx(before / np.where(lengths > 0, lengths, 1)[:, None], rel=1e-6)


@given(listed=many_rows)
def test_a_batch_says_which_row_an_entry_is_of(listed: list[list[tuple[int, float]]]) -> None:
    rows = make(listed)
    batch = rows.to_batch()
    table = torch.zeros(batch.num_rows, NUM_COLUMNS)
    table.index_put_((batch.row_of_entry(), batch.columns.long()), batch.values, accumulate=True)
    assert np.array_equal(table.numpy(), dense(rows))
    assert batch.to("cpu").columns is batch.columns


def test_columns_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="columns run from 2 to 6; allowed are 0 to 5"):
        make([[(2, 1.0)], [(6, 1.0)]])


# Text files of rows that are damaged, or name numbers that take memory.


MIB = 1 << 20
LARGEST = 2**31 - 1
ROWS = b"3 500 983\n3,17 5:0.25 9:1\n 5:1e-3\n\n"


@given(
    altered_bytes(ROWS)
    | st.text(alphabet="0123456789,: \t\r\n.-e", max_size=80).map(str.encode)
    | st.binary(max_size=40)
)
def test_rows_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.txt"
    path.write_bytes(content)
    for files in (XmlFiles(path=path), XmlFiles(path=path, labels_path=path)):
        succeeds_or_refuses(lambda files=files: load(files))


@pytest.fixture
def largest(tmp_path: Path) -> Path:
    """One row that names the largest columns there may be."""
    path = tmp_path / "rows.txt"
    last = LARGEST - 1
    path.write_text(f"1 {LARGEST} {LARGEST}\n{last},7 {last}:1 3:1\n")
    return path


@pytest.mark.parametrize(
    "header", ["9" * 4400 + " 1 1", "1 99999999999999999999 1", "99999999999999999999 1 1"]
)
def test_a_header_of_huge_numbers_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "rows.txt"
    path.write_text(header + "\n0 0:1\n")
    with bounded_memory(64 * MIB), pytest.raises(ConfigError):
        load(XmlFiles(path=path))


def test_a_task_does_not_build_a_model_that_no_machine_holds(largest: Path) -> None:
    task = build_task("xmc", {"path": str(largest), "test_path": str(largest)})
    with bounded_memory(64 * MIB), pytest.raises(ConfigError, match="is the first line"):
        task.build_model(0)
