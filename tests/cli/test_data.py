"""`offbeat data`: tables for people, JSON for programs, and one sentence for every line that cannot
be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat_lab.cli.main import main

OLD = "3 6 4\n0,3 1:0.5 5:2\n 2:1\n\n"


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[object, str, str]]:
    """Run a command in a directory with a file `old.txt`; returns status, standard output and
    standard error.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.txt").write_text(OLD)

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_an_inspection_is_a_table_or_a_line_of_json(call) -> None:
    status, out, err = call("inspect", "old.txt")
    assert (status, err) == (0, "")
    assert all(
        word in out
        for word in ("old.txt: 3 rows", "features", "labels", "rows without any", "entries")
    )
    status, out, _ = call("inspect", "old.txt", "--json")
    assert (status, out.count("\n")) == (0, 1)
    found = json.loads(out)
    assert (
        found["num_rows"],
        found["num_features"],
        found["num_labels"],
        found["num_entries"],
    ) == (3, 6, 4, 3)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("1 6 4\n0 1:1\n", "pass --first-feature 1"),
        ("1 6 4\n1 0:1\n", "pass --first-label 1"),
        ("0 0:1\n", "has no header"),
        ("1 6 4\n0 0:1\n", None),
    ],
)
def test_what_may_be_meant_otherwise_is_said(
    call, tmp_path: Path, content: str, hint: str | None
) -> None:
    (tmp_path / "file.txt").write_text(content)
    _, out, _ = call("inspect", "file.txt")
    assert out.count("note:") == (hint is not None)
    assert hint is None or hint in out


def test_layouts_are_converted_back_and_forth(call, tmp_path: Path) -> None:
    from_one = ("--target-first-feature", "1", "--target-first-label", "1")
    status, out, err = call(
        "convert", "old.txt", "X.txt", "--target-labels-file", "Y.txt", *from_one
    )
    assert (status, out, err) == (0, "3 rows in X.txt and Y.txt\n", "")
    assert (tmp_path / "X.txt").read_text() == "3 6\n2:0.5 6:2\n3:1\n\n"
    assert (tmp_path / "Y.txt").read_text() == "3 4\n1:1 4:1\n\n\n"
    back = call(
        "convert",
        "X.txt",
        "again.txt",
        "--labels-file",
        "Y.txt",
        "--first-feature",
        "1",
        "--first-label",
        "1",
    )
    assert back[0] == 0
    assert (tmp_path / "again.txt").read_text() == "3 6 4\n0,3 1:0.5 5:2\n 2:1\n \n"
    assert call("convert", "old.txt", "bare.txt", "--no-header")[0] == 0
    assert (tmp_path / "bare.txt").read_text() == "0,3 1:0.5 5:2\n 2:1\n \n"


def test_generated_data_can_be_inspected(call) -> None:
    arguments = (
        "--rows",
        "50",
        "--features",
        "30",
        "--labels",
        "7",
        "--draws",
        "9",
        "--mean-labels",
        "2",
    )
    assert call("generate", "made.txt", *arguments)[:2] == (0, "50 rows in made.txt\n")
    assert call("generate", "test.txt", *arguments, "--split", "test")[0] == 0
    assert Path("made.txt").read_text() != Path("test.txt").read_text()
    found = json.loads(call("inspect", "made.txt", "--json")[1])
    assert (found["num_rows"], found["num_features"], found["num_labels"]) == (50, 30, 7)


BROKEN = {
    "value": (
        "2 6 4\n0 1:1\n3 1:x\n",
        "broken.txt, line 3, character 5: expected a finite number of 32 bits after the colon",
    ),
    "label": (
        "1 6 4\n4 1:1\n",
        "broken.txt, line 2, character 1: label 4 is out of range; allowed are 0 to 3",
    ),
    "cut off": ("3 6 4\n0 1:1\n", "says in line 1 that it has 3 rows, and has 1; was it cut off?"),
    "header": ("2 6\n0 1:1\n", "broken.txt, line 1: a header of 3 numbers was expected"),
    "binary": ("\x00\x01\x7fELF\n", "broken.txt, line 1, character 1: expected a label"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "command", [("inspect", "broken.txt"), ("convert", "broken.txt", "new.txt")]
)
def test_a_broken_file_is_one_sentence_with_the_line(
    call, tmp_path: Path, kind: str, command: tuple[str, ...]
) -> None:
    content, words = BROKEN[kind]
    (tmp_path / "broken.txt").write_text(content)
    status, out, err = call(*command)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert {path.name for path in tmp_path.iterdir()} == {"old.txt", "broken.txt"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "nowhere.txt"), "no data at nowhere.txt"),
        (("inspect", "."), "no data at ."),
        (
            ("inspect", "old.txt", "--first-label", "2"),
            "first_label is 2; numbers count from 0 or from 1",
        ),
        (("inspect", "old.txt", "--labels", "0"), "num_labels is 0; at least 1 is needed"),
        (
            ("inspect", "old.txt", "--labels-file", "old.txt"),
            "old.txt, line 1: a header of 2 numbers was expected",
        ),
        (
            ("convert", "old.txt", "old.txt"),
            "old.txt exists; choose another name, or remove it first",
        ),
        (
            ("convert", "old.txt", "new.txt", "--target-labels-file", "new.txt"),
            "both to be written to new.txt",
        ),
        (("convert", "old.txt", "none/new.txt"), "there is no directory none for new.txt"),
        (("generate", "new.txt", "--rows", "0"), "0 samples are asked for"),
        (
            ("generate", "new.txt", "--rows", "5", "--features", "1"),
            "num_features is 1; allowed are 2",
        ),
        (
            ("generate", "new.txt", "--rows", "5", "--split", "tset"),
            "--split is 'tset'; allowed are train, test",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    call, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = call(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == OLD
