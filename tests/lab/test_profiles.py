"""Profiles come back as they were written, without torn lines and without what a resume
took back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.callbacks.profile import FactorAssignment, Span, StepProfile
from offbeat.errors import RecordError
from offbeat.run.records import ProfileWriter, begin_attempt, create
from offbeat_lab.config import Request, resolve
from offbeat_lab.records import Record, read_profiles

CONFIG = resolve(Request(task="digits", strategy="spdkfac", steps=20, workers=2))
DUTY = FactorAssignment(
    factor="A of '0'",
    rows=10,
    matrices=1,
    message=None,
    owner=1,
    sends="preconditioned gradients",
    predicted_s=0.25,
)


def profile(began_s: float, duties: tuple[FactorAssignment, ...] = ()) -> StepProfile:
    return StepProfile(
        spans=[Span("invert", "1 factors", began_s, began_s + 0.5)], assignments=duties
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "run", CONFIG)
    begin_attempt(tmp_path / "run", CONFIG, start_step=0)
    return tmp_path / "run"


def test_what_was_written_is_read(path: Path) -> None:
    writer = ProfileWriter(path, rank=1, attempt=0)
    writer.add(3, profile(1000.0, (DUTY,)))
    writer.add(7, profile(1002.0))
    found = read_profiles(Record(path))
    assert list(found) == [1], "rank 0 wrote none"
    assert [one.step for one in found[1]] == [3, 7]
    assert found[1][0].spans == [Span("invert", "1 factors", 1000.0, 1000.5)]
    assert [list(one.duties) for one in found[1]] == [[DUTY], []]


def test_what_a_resume_took_back_is_left_out_and_a_torn_line_too(path: Path) -> None:
    writer = ProfileWriter(path, rank=0, attempt=0)
    for step in (1, 5, 9):
        writer.add(step, profile(float(step)))
    file = path / "profile-rank-0.jsonl"
    file.write_text(file.read_text() + '{"attempt": 0, "st')
    begin_attempt(path, CONFIG, start_step=5)
    ProfileWriter(path, rank=0, attempt=1).add(9, profile(100.0))
    found = read_profiles(Record(path))[0]
    assert [(one.attempt, one.step) for one in found] == [(0, 1), (0, 5), (1, 9)]


def test_a_line_that_is_something_else_is_refused(path: Path) -> None:
    (path / "profile-rank-0.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RecordError, match="holds a line that is no profile"):
        read_profiles(Record(path))
