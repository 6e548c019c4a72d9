"""`attach(..., recorder=...)` in a world of one: the record is that of any run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import ConfigError, RecordError
from offbeat.run.recording import higher_is_better
from offbeat_lab.records import Record
from offbeat_lab.report.page import write_report


def train(session: offbeat.Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        loss = model(torch.ones(5, 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=step + 0.5, accuracy=torch.tensor(step / 4))
        offbeat.log(loss=step + 0.5)


def test_a_session_writes_a_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = offbeat.GTopK(density=0.5, codec="exact")
    with offbeat.attach(
        model, optimizer, strategy, recorder=offbeat.Recorder(tmp_path / "mine")
    ) as session:
        train(session, model, optimizer)
    record = Record(tmp_path / "mine")
    assert [(e.step, e.loss, e.batch_size) for e in record.events(0)] == [
        (1, 0.5, 5),
        (2, 1.5, 5),
        (3, 2.5, 5),
    ]
    assert [(e.step, e.metric) for e in record.evaluations()] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    summary = record.summary()
    assert summary is not None
    assert (summary.steps, summary.metric_name, summary.metric) == (3, "accuracy", 0.5)
    assert summary.higher_is_better
    assert record.config.strategy_options["density"] == 0.5
    assert "Accuracy 0.5" in write_report(record.path).read_text()


def test_a_directory_in_use_is_refused_and_nothing_stays_attached(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordError, match="not empty"):
        offbeat.attach(model, optimizer, offbeat.AllReduce(), recorder=offbeat.Recorder(tmp_path))
    offbeat.attach(model, optimizer, offbeat.AllReduce()).close()


def test_without_a_record_logging_does_nothing_but_check() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offbeat.log(loss=1.0)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        train(session, model, optimizer)
        for log in (session.log, offbeat.log):
            with pytest.raises(ConfigError, match="tensors of one element"):
                log(loss=torch.ones(2))
            with pytest.raises(ConfigError, match="numbers"):
                log(loss="low")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        ("val/acc", True),
        ("mAP50", True),
        ("top1", True),
        ("top1_error", False),
        ("dice_loss", False),
        ("mape", False),
        ("perplexity", False),
    ],
)
def test_a_name_says_whether_more_is_better(name: str, higher: bool) -> None:
    assert higher_is_better(name) is higher
