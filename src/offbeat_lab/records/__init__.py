"""Run records: what a run leaves behind, and the only thing that reports and comparisons read.

    RUN/config.json            what was asked for, resolved; where and with what it ran; one entry
    for each attempt RUN/events-rank-N.jsonl    one line for each step of rank N
    RUN/evaluations.jsonl      the metric as it was measured on the way RUN/mega-batches.jsonl
    who did how much between merges, where samples are claimed RUN/summary.json           how it
    ended RUN/checkpoint/            see `offbeat.session.checkpoint` RUN/logs/rank-N.log
    what the worker printed

`docs/records.md` lists every field. Files are added to or replaced whole, never cut: after a resume
the steps that were lost stay in the file, and the reader leaves them out.
"""

from offbeat_lab.records.layout import (
    SCHEMA,
    Attempt,
    Evaluation,
    Head,
    MegaBatch,
    Share,
    StepEvent,
    Summary,
    WorkerLoss,
)
from offbeat_lab.records.reading import Record, complete_lines, describe, last_step, read_versioned
from offbeat_lab.records.writing import (
    EventWriter,
    add_to_summary,
    begin_attempt,
    create,
    environment,
    lock,
    write_summary,
)

__all__ = [
    "SCHEMA",
    "Attempt",
    "Evaluation",
    "EventWriter",
    "Head",
    "MegaBatch",
    "Record",
    "Share",
    "StepEvent",
    "Summary",
    "WorkerLoss",
    "add_to_summary",
    "begin_attempt",
    "complete_lines",
    "create",
    "describe",
    "environment",
    "last_step",
    "lock",
    "read_versioned",
    "write_summary",
]
