"""Text files of rows that are damaged, or name numbers that take memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_support import altered_bytes, bounded_memory, succeeds_or_refuses
from offbeat.errors import ConfigError
from offbeat.xmc.xmlrepo import XmlFiles, load
from offbeat_lab.tasks import build_task

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
