"""What is said of a worker that has ended before its time: one sentence, and where to look."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.run.local_worker import description_of_end
from offbeat.run.progress import Failure

IN_ANOTHER_PROCESS = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: the file is empty
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the file is empty"), "ValueError: the file is empty"),
        (ValueError(), "ValueError: "),
        (RuntimeError(IN_ANOTHER_PROCESS), "RuntimeError: ValueError: the file is empty"),
        (RuntimeError("\nout of memory\nallocated: 4 GB\n"), "RuntimeError: out of memory"),
        (ConfigError("add\n    these lines"), "add\n    these lines"),
    ],
)
def test_a_failure_says_in_one_line_what_was_wrong(error: Exception, message: str) -> None:
    assert Failure.of(error, rank=2).message == message


def test_it_is_said_where_a_traceback_is(tmp_path: Path) -> None:
    failure = Failure.of(ValueError("no"), rank=2)
    silent = Failure.of(ConfigError("no"), rank=2, has_printed=False)

    def said(failure: Failure | None, *, code: int = 1, is_shown: bool = False) -> str:
        return description_of_end(tmp_path, 2, 77, code, failure, is_shown=is_shown)

    before = "before its first step was recorded"
    assert said(None, code=4).endswith(f"with status 4 {before}")  # it has no log
    log = tmp_path / "logs" / "rank-2.log"
    log.parent.mkdir()
    log.write_text("what it printed")
    assert said(failure).endswith(f"before its first step was recorded: ValueError: no (see {log})")
    assert said(failure, is_shown=True).endswith("ValueError: no (see what it printed above)")
    assert said(silent) == "worker 2 (pid 77) failed before its first step was recorded: no"
    assert said(None, code=4).endswith(f"with status 4 {before}; see {log}")
    assert said(None, code=-11).endswith(f"by SIGSEGV {before}; see {log}")
