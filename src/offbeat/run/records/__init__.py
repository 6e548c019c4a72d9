"""Run records: what a run leaves behind. `offbeat_lab.records` reads them for reports, comparisons
and predictions, which read nothing else.

    RUN/config.json            what was asked for, resolved; where and with what it ran; one entry
                               for each attempt
    RUN/events-rank-N.jsonl    one line for each step of rank N
    RUN/profile-rank-N.jsonl   few steps of rank N, looked at closely: what was done within them
    RUN/evaluations.jsonl      the metric as it was measured on the way
    RUN/mega-batches.jsonl     who did how much between merges, where samples are claimed
    RUN/summary.json           how it ended
    RUN/checkpoint/            see `offbeat.session.checkpoint`
    RUN/logs/rank-N.log        what the worker printed

`docs/records.md` lists every field. Files are added to or replaced whole, never cut: after a resume
the steps that were lost stay in the file, and the reader leaves them out.
"""

from offbeat.run.records.layout import (
    SCHEMA,
    Attempt,
    EmulationReport,
    Evaluation,
    Head,
    LinkCheck,
    MegaBatch,
    Share,
    StepEvent,
    Summary,
    WorkerLoss,
)
from offbeat.run.records.reading import RunDirectory, last_step, read_versioned
from offbeat.run.records.writing import (
    EventWriter,
    ProfileWriter,
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
    "EmulationReport",
    "Evaluation",
    "EventWriter",
    "Head",
    "LinkCheck",
    "MegaBatch",
    "ProfileWriter",
    "RunDirectory",
    "Share",
    "StepEvent",
    "Summary",
    "WorkerLoss",
    "add_to_summary",
    "begin_attempt",
    "create",
    "environment",
    "last_step",
    "lock",
    "read_versioned",
    "write_summary",
]
