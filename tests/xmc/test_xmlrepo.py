"""Files of sparse rows: every layout reads as the same samples, and what is wrong is named by its
line.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from lab_support.rows import write
from offbeat.errors import ConfigError
from offbeat.xmc import xmlrepo
from offbeat.xmc.rows import Examples, SparseRows
from offbeat.xmc.xmlrepo import XmlFiles, load

NUM_FEATURES, NUM_LABELS = 40, 12

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
samples = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_LABELS - 1), max_size=3, unique=True),
        st.dictionaries(st.integers(0, NUM_FEATURES - 1), values, max_size=4),
    ),
    min_size=1,
    max_size=12,
)
Listed = list[tuple[list[int], dict[int, float]]]
no_reset = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example overwrites its files


def build(listed: Listed) -> Examples:
    return Examples(
        features=SparseRows.from_entries(
            [row.items() for _, row in listed], num_columns=NUM_FEATURES
        ),
        labels=SparseRows.from_entries(
            [[(label, 1.0) for label in labels] for labels, _ in listed], num_columns=NUM_LABELS
        ),
    )


def same(found: Examples, expected: Examples) -> bool:
    return all(
        a.num_columns == b.num_columns
        and np.array_equal(a.offsets, b.offsets)
        and np.array_equal(a.columns, b.columns)
        and np.array_equal(a.values, b.values)
        for a, b in ((found.features, expected.features), (found.labels, expected.labels))
    )


@no_reset
@given(listed=samples, data=st.data())
def test_text_written_by_hand_reads_as_it_was_meant(
    tmp_path: Path, listed: Listed, data: st.DataObject
) -> None:
    first_label, first_feature = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    blank, end = (
        data.draw(st.sampled_from([" ", "\t", "  "])),
        data.draw(st.sampled_from(["\n", "\r\n", " \n"])),
    )
    style = data.draw(st.sampled_from(["r", ".17g", ".8e", "+.9E"]))
    lines = [
        blank.join(
            [
                ",".join(str(label + first_label) for label in labels),
                *(
                    f"{column + first_feature}:"
                    + (repr(value) if style == "r" else format(value, style))
                    for column, value in row.items()
                ),
            ]
        )
        for labels, row in listed
    ]
    header = [f"{len(listed)} {NUM_FEATURES} {NUM_LABELS}"] if data.draw(st.booleans()) else []
    path = tmp_path / "data.txt"
    text = end.join([*header, *lines, ""])
    ends_open = lines[-1].strip() != "" and data.draw(
        st.booleans()
    )  # at a blank row it would have a row less
    path.write_bytes((text.removesuffix("\n") if ends_open else text).encode())
    files = XmlFiles(
        path=path,
        num_features=NUM_FEATURES,
        num_labels=NUM_LABELS,
        first_label=first_label,
        first_feature=first_feature,
    )
    assert same(load(files), build(listed))


@no_reset
@given(listed=samples, header=st.booleans(), first=st.integers(0, 1), in_two=st.booleans())
def test_what_was_written_is_read_again(
    tmp_path: Path, listed: Listed, header: bool, first: int, in_two: bool
) -> None:
    expected = build(listed)
    files = XmlFiles(
        path=tmp_path / "x.txt",
        labels_path=tmp_path / "y.txt" if in_two else None,
        first_label=first,
        first_feature=1 - first,
        num_features=NUM_FEATURES,
        num_labels=NUM_LABELS,
    )
    shape = (len(listed), NUM_FEATURES, NUM_LABELS) if header else None
    assert write(files, expected.batches(5), header=shape) == len(listed)
    assert same(load(files), expected)


@pytest.mark.parametrize(("from_two", "to_two"), list(product([False, True], repeat=2)))
def test_layouts_convert_into_each_other(tmp_path: Path, from_two: bool, to_two: bool) -> None:
    expected = build([([3, 1], {5: 0.25, 9: 1.0}), ([], {0: 1e-7}), ([11], {}), ([], {})])
    source = XmlFiles(path=tmp_path / "a", labels_path=tmp_path / "b" if from_two else None)
    target = XmlFiles(
        path=tmp_path / "c", labels_path=tmp_path / "d" if to_two else None, first_feature=1
    )
    write(source, [expected], header=(4, NUM_FEATURES, NUM_LABELS))
    write(target, [load(source)], header=(4, NUM_FEATURES, NUM_LABELS))
    assert same(load(target), expected)


def test_the_text_is_the_usual_one(tmp_path: Path) -> None:
    expected = build([([3, 1], {5: 0.25, 9: 1.0}), ([], {0: 1e-7}), ([11], {}), ([], {})])
    write(XmlFiles(path=tmp_path / "x", first_label=1), [expected], header=(4, 40, 12))
    assert (tmp_path / "x").read_text() == "4 40 12\n4,2 5:0.25 9:1\n 0:1e-07\n12 \n \n"
    assert {path.name for path in tmp_path.iterdir()} == {"x"}


@pytest.mark.parametrize("block_bytes", [1, 7, 64])
def test_blocks_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    expected = build([([row % 12], {row % 40: row / 8, 39: 2.0}) for row in range(50)])
    files = XmlFiles(path=tmp_path / "x")
    write(files, [expected], header=(50, NUM_FEATURES, NUM_LABELS))
    monkeypatch.setattr(xmlrepo, "BLOCK_BYTES", block_bytes)
    assert same(load(files), expected)


def test_without_a_header_the_shape_is_found(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("3 5:1\n1 7:1\n")
    found = load(XmlFiles(path=tmp_path / "x"))
    assert (len(found), found.features.num_columns, found.labels.num_columns) == (2, 8, 4)


def test_what_the_caller_says_counts_more_than_the_header(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1 8 4\n3 5:1\n")
    assert load(XmlFiles(path=tmp_path / "x", num_features=20)).features.num_columns == 20


def test_blank_lines_may_follow_the_last_row(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("2 8 4\n3 5:1\n\n\n  \n")
    assert len(load(XmlFiles(path=tmp_path / "x"))) == 2


WRONG = {
    "a b:1": "line 2, character 1: expected a label, which is a whole number, got 'a'",
    "1, 2:1": "line 2, character 3: expected a label, which is a whole number$",
    "1,x 2:1": "line 2, character 3: expected a label, which is a whole number, got 'x'",
    "1;2 3:1": "line 2, character 2: expected a blank, or the end of the line, got ';2'",
    "-1 3:1": "line 2, character 1: expected a label, which is a whole number, got '-1'",
    "1 3:1 4": (
        "line 2, character 7: expected 'feature:value' with a whole number before the colon,"
        " got '4'"
    ),
    "1 -3:1": (
        "line 2, character 3: expected 'feature:value' with a whole number before the colon, got"
        " '-3:1'"
    ),
    "1 3:": "line 2, character 5: expected a finite number of 32 bits after the colon$",
    "1 3:x": "line 2, character 5: expected a finite number of 32 bits after the colon, got 'x'",
    "1 3:nan": (
        "line 2, character 5: expected a finite number of 32 bits after the colon, got 'nan'"
    ),
    "1 3:1e": "line 2, character 5: expected a finite number of 32 bits after the colon, got '1e'",
    "1 3:4e38": (
        "line 2, character 5: expected a finite number of 32 bits after the colon, got '4e38'"
    ),
    "1 3:1.2.3": "line 2, character 8: expected a blank, or the end of the line, got '.3'",
    "4 3:1": (
        "line 2, character 1: label 4 is out of range; allowed are 0 to 3; does the file count"
        " labels from 1?"
    ),
    "1 9:1": "line 2, character 3: feature 9 is out of range; allowed are 0 to 7$",
    "1 8:1": (
        "line 2, character 3: feature 8 is out of range; allowed are 0 to 7; does the file count"
        " features from 1?"
    ),
    "1 99999999999999999999:1": "line 2, character 3: feature 99999999999999999999 is out of range",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x"
    path.write_text(f"0 1:1\n{line}\n1 1:1\n")
    with pytest.raises(ConfigError, match=WRONG[line]):
        load(XmlFiles(path=path, num_features=8, num_labels=4))


def test_lines_are_counted_over_blocks_and_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xmlrepo, "BLOCK_BYTES", 16)
    (tmp_path / "x").write_text("100 8 4\n" + "1 3:1\n" * 70 + "1 3:x\n" + "1 3:1\n" * 29)
    with pytest.raises(ConfigError, match="line 72, character 5"):
        load(XmlFiles(path=tmp_path / "x"))


def test_zero_is_out_of_range_where_numbers_count_from_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1 0:1\n")
    with pytest.raises(
        ConfigError,
        match="feature 0 is out of range; allowed are 1 to 8; does the file count features from 0?",
    ):
        load(
            XmlFiles(
                path=tmp_path / "x", num_features=8, num_labels=4, first_feature=1, first_label=1
            )
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 8 4\n1 3:1\n", "says in line 1 that it has 3 rows, and has 1; was it cut off?"),
        (
            "1 8 4\n1 3:1\n2 3:1\n",
            "line 3: the end was expected, since line 1 says that there are 1 rows",
        ),
        ("1 8\n1 3:1\n", "line 1: a header of 3 numbers was expected, or none, got '1 8'"),
        ("1 9999999999 4\n1 3:1\n", "line 1: there may be 2147483647 columns, got 9999999999"),
        ("", "has no rows"),
        ("0 8 4\n", "has no rows"),
    ],
)
def test_a_header_must_be_true(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(XmlFiles(path=tmp_path / "x"))


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        ("5:1\n", "3:1\n2:1\n", "different numbers of rows"),
        ("5:1\n" * 5000, "3:1\n" * 4096, "different numbers of rows"),
        ("2 8\n5:1\n5:1\n", "1 4\n3:1\n", "x has 2 rows and .*y has 1 rows"),
        ("2 8\n5:1\n5:1\n", "3:1\n3:1\n", "x has 2 rows and .*y has no header"),
        (
            "1 8\n5:1\n",
            "1 4\n3\n",
            (
                "y, line 2, character 1: expected 'label:value' with a whole number before the"
                " colon, got '3'"
            ),
        ),
        (
            "1 8\n5:1\n",
            "1 4\n4:1\n",
            "y, line 2, character 1: label 4 is out of range; allowed are 0 to 3",
        ),
        (
            "1 8 4\n5:1\n",
            "1 4\n4:1\n",
            "line 1: a header of 2 numbers was expected, or none, got '1 8 4'",
        ),
    ],
)
def test_two_files_must_belong_together(
    tmp_path: Path, features: str, labels: str, message: str
) -> None:
    (tmp_path / "x").write_text(features)
    (tmp_path / "y").write_text(labels)
    with pytest.raises(ConfigError, match=message):
        load(
            XmlFiles(path=tmp_path / "x", labels_path=tmp_path / "y", num_features=8, num_labels=4)
        )


def test_values_of_labels_are_kept_in_a_file_of_their_own_and_refused_elsewhere(
    tmp_path: Path,
) -> None:
    graded = Examples(
        features=SparseRows.from_entries([[(1, 1.0)]], num_columns=NUM_FEATURES),
        labels=SparseRows.from_entries([[(2, 0.5)]], num_columns=NUM_LABELS),
    )
    files = XmlFiles(path=tmp_path / "x", labels_path=tmp_path / "y")
    write(files, [graded], header=(1, NUM_FEATURES, NUM_LABELS))
    assert same(load(files), graded)
    with pytest.raises(
        ConfigError, match="labels with values other than 1 do not fit into one file"
    ):
        write(XmlFiles(path=tmp_path / "z"), [load(files)], header=None)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "y"}


def test_a_line_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xmlrepo, "LONGEST_LINE_BYTES", 1 << 20)
    (tmp_path / "x").write_bytes(b"7" * 3_000_000)
    with pytest.raises(
        ConfigError, match="has a line of more than 1 MiB; is it a text file of rows"
    ):
        load(XmlFiles(path=tmp_path / "x"))


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="first_label is 2; numbers count from 0 or from 1"):
        XmlFiles(path=tmp_path, first_label=2)
    with pytest.raises(ConfigError, match="num_features is 0"):
        XmlFiles(path=tmp_path, num_features=0)
    with pytest.raises(ConfigError, match="no data at"):
        load(XmlFiles(path=tmp_path / "nothing"))


PAIR = r"(\d+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
LINE = re.compile(rf"(?:(\d+(?:,\d+)*)?((?:[ \t]+{PAIR})*)|({PAIR}(?:[ \t]+{PAIR})*))[ \t]*\r?")


def read_slowly(text: str) -> Listed | None:
    """What `text` says, or None if it cannot be read."""
    rows: Listed = []
    for line in text.removesuffix("\n").split("\n"):
        if (match := LINE.fullmatch(line)) is None:
            return None
        labels = [int(label) for label in match[1].split(",")] if match[1] else []
        pairs = [
            (int(column), float(value))
            for column, value in re.findall(PAIR, match[2] or match[5] or "")
        ]
        if (
            max([0, *labels]) >= NUM_LABELS
            or max([0, *(column for column, _ in pairs)]) >= NUM_FEATURES
        ):
            return None
        with np.errstate(over="ignore"):
            if not np.isfinite(np.array([value for _, value in pairs]).astype(np.float32)).all():
                return None
        rows.append((labels, dict(pairs)))
        if len(rows[-1][1]) != len(pairs):
            reject()
    return rows


pieces_of_text = st.sampled_from(
    [*"0123456789:,.+-eE \n\tx", "\r\n", " 3:", ":1", " 7:2.5", "1,2 ", "\n4 ", "e38", "e-45"]
)


@no_reset
@given(pieces=st.lists(pieces_of_text, max_size=12))
def test_any_text_is_read_as_a_slow_reader_does_or_refused(
    tmp_path: Path, pieces: list[str]
) -> None:
    text = "0 0:1\n" + "".join(pieces)
    (tmp_path / "x").write_bytes(text.encode())
    files = XmlFiles(path=tmp_path / "x", num_features=NUM_FEATURES, num_labels=NUM_LABELS)
    expected = read_slowly(text)
    if expected is None:
        with pytest.raises(ConfigError, match="line "):
            load(files)
    else:
        assert same(load(files), build(expected))
