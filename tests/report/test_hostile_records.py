"""`offbeat report` on records that somebody damaged or made up: it writes the page, or says which
file it cannot read, and nothing else.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fuzz_support import altered_text, places_in
from offbeat.errors import OffbeatError
from offbeat_lab.cli.main import app
from report_support.synthetic import Made, write_comparison_of, write_run

NUMBERS = st.sampled_from(
    [
        *(sign * size for sign in (1, -1) for size in (1, 2**31, 2**53, 2**63, 10**30, 10**400)),
        *(sign * size for sign in (1, -1) for size in (1e-300, 1e9, 1e30, 1e300, math.inf)),
        math.nan,
        0,
        0.5,
        True,
        "1e30",
        "9" * 5000,
    ]
)


@st.composite
def with_other_numbers(draw: st.DrawFn, document: Any) -> bytes:
    """The document with other numbers in some places where there are numbers."""
    document = json.loads(json.dumps(document))
    holders = []
    for path in places_in(document):
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        if path and isinstance(holder[path[-1]], int | float):
            holders.append((holder, path[-1]))
    for _ in range(draw(st.integers(1, 2))):
        if holders:
            holder, key = draw(st.sampled_from(holders))
            holder[key] = draw(NUMBERS)
    return json.dumps(document).encode()


def other(document: Any) -> st.SearchStrategy[bytes]:
    return with_other_numbers(document) | altered_text(document)


@st.composite
def other_content(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """A file of a record, with one value or one line changed."""
    if not name.endswith(".jsonl"):
        return draw(other(json.loads(content)))
    lines = content.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = draw(other(json.loads(lines[number])))
    return b"\n".join(lines) + draw(st.sampled_from([b"\n", b""]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(strategy="dkfac", options={}, workers=2, steps=6, mega_batches=2)
    return write_run(tmp_path_factory.mktemp("hostile") / "run", made)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    strategies = [Made(workers=2, steps=6), Made(strategy="ddp", options={}, workers=2, steps=6)]
    directory = tmp_path_factory.mktemp("hostile") / "comparison"
    return write_comparison_of(directory, strategies, seeds=(0,))


def report(directory: Path, name: str, content: bytes) -> str:
    """What `offbeat report` complains of where the file `name` has this content; nothing where it
    writes the page.
    """
    before = (directory / name).read_bytes()
    (directory / name).write_bytes(content)
    try:
        result = CliRunner().invoke(app, ["report", str(directory)])
    finally:
        (directory / name).write_bytes(before)
    if isinstance(result.exception, OffbeatError):
        return str(result.exception)
    if result.exception is not None:
        raise result.exception
    return ""


def changed(draw: st.DataObject, directory: Path, names: list[str]) -> None:
    """One of these files says something else: the page is written, or the complaint names what
    cannot be read.
    """
    name = draw.draw(st.sampled_from(names))
    content = draw.draw(other_content(name, (directory / name).read_bytes()))
    complaint = report(directory, name, content)
    assert not complaint or name in complaint or str(directory) in complaint


@given(data=st.data())
def test_the_page_of_a_run_is_written_or_the_file_is_named(run: Path, data: st.DataObject) -> None:
    changed(data, run, ["config.json", "summary.json", "evaluations.jsonl", "mega-batches.jsonl"])


@given(data=st.data())
def test_it_is_whatever_workers_have_written(run: Path, data: st.DataObject) -> None:
    ranks = [f"events-rank-{rank}.jsonl" for rank in (0, 1)]
    changed(data, run, ranks)


@given(data=st.data())
def test_the_page_of_a_comparison_is_written_or_the_file_is_named(
    comparison: Path, data: st.DataObject
) -> None:
    files = ["config.json", "summary.json", "events-rank-0.jsonl", "evaluations.jsonl"]
    changed(data, comparison, ["comparison.json", *(f"runs/gtopk-seed-0/{one}" for one in files)])


@pytest.mark.parametrize(
    ("name", "number", "field"),
    [
        ("summary.json", 10**30, "bytes_sent_per_step"),
        ("summary.json", 10**30, "steps"),
        ("summary.json", -1, "steps"),
        ("summary.json", 1e300, "metric"),
        ("events-rank-0.jsonl", 10**30, "batch_size"),
        ("events-rank-0.jsonl", 1e30, "began_s"),
        ("events-rank-0.jsonl", math.nan, "duration_s"),
        ("evaluations.jsonl", 10**30, "step"),
        ("evaluations.jsonl", math.inf, "seconds"),
        ("mega-batches.jsonl", -1, "number"),
    ],
)
def test_a_number_that_no_record_holds_is_refused_with_its_file_and_field(
    run: Path, name: str, number: float, field: str
) -> None:
    earlier, last = [], (run / name).read_text()
    if name.endswith(".jsonl"):
        *earlier, last = last.splitlines()
    content = "\n".join([*earlier, json.dumps(json.loads(last) | {field: number})]) + "\n"
    complaint = report(run, name, content.encode())
    assert name in complaint
    assert f"at {field}: " in complaint


def test_a_metric_that_is_not_finite_is_that_of_a_run_that_diverged(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    lines[-1]["metric"] = math.nan
    lines[-2]["metric"] = math.inf
    lines[-3]["metric"] = 3e38
    content = "".join(json.dumps(line) + "\n" for line in lines)
    assert report(run, "evaluations.jsonl", content.encode()) == ""


def test_a_rank_of_a_mega_batch_without_events_is_refused(run: Path) -> None:
    *earlier, last = (run / "mega-batches.jsonl").read_text().splitlines()
    changed = json.loads(last)
    changed["by_rank"][0]["rank"] = 7
    complaint = report(
        run, "mega-batches.jsonl", "\n".join([*earlier, json.dumps(changed)]).encode()
    )
    assert "it names rank 7, which has no events" in complaint
