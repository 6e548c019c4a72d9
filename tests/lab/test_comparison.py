"""A comparison's file: what is written is read back, and what cannot be read or written harms
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from lab_support.made import comparison, strategy
from offbeat.errors import RecordError
from offbeat_lab.comparison import (
    FILE,
    SCHEMA,
    Difference,
    is_comparison,
    read_comparison,
    write_comparison,
)

WHOLE = comparison(
    [
        strategy("ddp", {"step_s": [1.0, None, 3.0]}, lateness_s=[0.0, 0.25]),
        strategy("gtopk density=0.01", failure="worker 1 was killed"),
    ],
    differences=[
        Difference(
            measure="step_s", a="ddp", b="gtopk", ratio=2.0, low=None, high=None, decided=False
        )
    ],
    target=None,
)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def altered(directory: Path, **values: Any) -> None:
    path = directory / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert not is_comparison(tmp_path)
    write_comparison(tmp_path, WHOLE)
    assert is_comparison(tmp_path)
    assert read_comparison(tmp_path) == WHOLE
    assert names(tmp_path) == [FILE]


def test_a_file_with_an_earlier_name_is_of_another_version_and_not_damaged(tmp_path: Path) -> None:
    write_comparison(tmp_path, WHOLE)
    path = tmp_path / FILE
    content = json.loads(path.read_text()) | {"schema_version": 1}
    content["contestants"] = content.pop("strategies")
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="has comparison schema 1, this version reads 2"):
        read_comparison(tmp_path)


def test_it_is_replaced_whole(tmp_path: Path) -> None:
    write_comparison(tmp_path, WHOLE)
    write_comparison(tmp_path, WHOLE.model_copy(update={"status": "finished", "strategies": []}))
    found = read_comparison(tmp_path)
    assert (found.status, found.strategies) == ("finished", [])
    assert names(tmp_path) == [FILE]


def test_where_there_is_none(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            RecordError,
            match="holds no comparison; give the directory that offbeat compare printed",
        ):
            read_comparison(directory)


@pytest.mark.parametrize("content", ["", "{", "\xff\xfe", '{"kind": "offbeat comp'])
def test_what_is_cut_off_is_said_to_be_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, encoding="latin-1")
    with pytest.raises(
        RecordError, match="is damaged: .*; the comparison cannot be read without it"
    ):
        read_comparison(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"kind": "offbeat run"}'])
def test_what_somebody_else_wrote_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(RecordError, match="was not written by offbeat"):
        read_comparison(tmp_path)


@pytest.mark.parametrize("version", [SCHEMA + 1, None, "1"])
def test_another_version_is_refused_with_both_named(tmp_path: Path, version: object) -> None:
    write_comparison(tmp_path, WHOLE)
    altered(tmp_path, schema_version=version, status="of another kind")
    with pytest.raises(
        RecordError,
        match=f"has comparison schema {version!r}, this version reads {SCHEMA}; use the version",
    ):
        read_comparison(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("status", "perhaps", "status"),
        ("seeds", "many", "seeds"),
        ("strategies", [{"label": "ddp"}], r"strategies\.0\.strategy"),
        ("differences", [{}], r"differences\.0\.ratio"),
        ("cluster", {"workers": 0}, ""),
    ],
)
def test_a_damaged_one_says_where(tmp_path: Path, field: str, value: object, place: str) -> None:
    write_comparison(tmp_path, WHOLE)
    altered(tmp_path, **{field: value})
    with pytest.raises(RecordError, match=f"is damaged at {place}"):
        read_comparison(tmp_path)


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    write_comparison(tmp_path, WHOLE)
    before = (tmp_path / FILE).read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    opened = Path.open

    @contextmanager
    def torn(path: Path, mode: str) -> Iterator[IO[Any]]:
        with opened(path, mode) as file:
            file.write(b"the first of it")
            full()
            yield file

    if fails == "write":
        monkeypatch.setattr(Path, "open", torn)
    else:
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        RecordError, match=r"cannot write .*comparison\.json: No space left on device; make room"
    ):
        write_comparison(tmp_path, WHOLE.model_copy(update={"status": "finished"}))
    monkeypatch.undo()
    assert names(tmp_path) == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_really_is_full_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}.tmp").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left on device"):
        write_comparison(tmp_path, WHOLE)
    assert names(tmp_path) == []
