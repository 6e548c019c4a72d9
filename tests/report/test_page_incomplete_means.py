"""A measurement of a mean that lacks models of living workers is marked in record and page."""

from __future__ import annotations

from pathlib import Path

from offbeat.run.records import Evaluation, EventWriter
from offbeat_lab.records import Record
from offbeat_lab.report.page import report_of_comparison, report_of_run
from report_support.synthetic import Made, write_comparison_of, write_run

REMARK = "the metric at step 40 is that of a mean without worker 2, 3"


def measure_without(path: Path) -> None:
    with_gaps = Evaluation(
        step=40, seconds=9.0, bytes_sent=0, metric=0.5, at_s=1009.0, without=(2, 3)
    )
    writer = EventWriter(path, rank=0, attempt=1)
    writer.add_evaluation(with_gaps)
    writer.close()


def test_the_page_of_a_run_says_whose_models_a_measured_mean_lacks(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Made(strategy="wagma", options={}))
    (before,) = report_of_run(path).contestants
    assert not any("is that of a mean without" in notice for notice in before.notices)
    measure_without(path)
    assert [list(one.without) for one in Record(path).evaluations()][-1] == [2, 3]
    (after,) = report_of_run(path).contestants
    assert any(notice.startswith(REMARK) for notice in after.notices)


def test_so_does_the_page_of_a_comparison(tmp_path: Path) -> None:
    write_comparison_of(tmp_path, [Made(strategy="wagma", options={})], seeds=[1])
    (run,) = {path.parent for path in tmp_path.rglob("evaluations.jsonl")}
    measure_without(run)
    (contestant,) = report_of_comparison(tmp_path).contestants
    assert any(REMARK in notice for notice in contestant.notices)
