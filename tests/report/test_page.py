"""The page is whole, harmless and honest, whatever the records hold."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat.callbacks.callback import Decision
from offbeat.errors import RecordError
from offbeat.run.records import (
    Evaluation,
    EventWriter,
    RunDirectory,
    begin_attempt,
    create,
    write_summary,
)
from offbeat_lab.comparison import ComparedStrategy, read_comparison, write_comparison
from offbeat_lab.config import Request, resolve
from offbeat_lab.records import Record
from offbeat_lab.report.page import report_of_comparison, report_of_run, write_report
from report_support.synthetic import (
    CLUSTER,
    Made,
    comparison_of,
    config_of,
    write_comparison_of,
    write_run,
)

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)> & "quoted" \u2028'


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its visible text, the contents
    of scripts.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._within = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts[-1] += data
        elif self._within != "style":
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_comparison_has_all_its_parts(comparison: Path) -> None:
    page = Page(comparison / "report.html")
    recorded = json.loads((comparison / "comparison.json").read_text())
    for sentence in (
        recorded["verdict"],
        *recorded["findings"],
        recorded["command"],
        CLUSTER.describe(),
    ):
        assert words(sentence) in words(page.text)
    for text in (
        "Worker 3 was last in 100% of steps",
        "Worker 3 is slow: its peers wait for it under ddp",
        "the tree was chosen by cost",
        "no netem",
        "Example CPU",
        "940 Mbit/s",
    ):
        assert text in words(page.text)
    assert {figure.get("data-chart") for figure in page.of("figure")} == {
        "metric-seconds",
        "metric-steps",
        "metric-bytes_sent",
        None,
    }


def test_a_page_begins_with_a_picture_the_verdict_and_three_numbers(
    comparison: Path, run: Path
) -> None:
    for directory in (comparison, run):
        page = Page(directory / "report.html")
        tags = [
            (tag, attributes.get("class") or "")
            for tag, attributes in page.elements
            if tag in ("figure", "h2", "strong") or attributes.get("class", "") == "verdict"
        ]
        assert tags[:5] == [("figure", "first"), ("p", "verdict"), *[("strong", "")] * 3]
        assert tags[5][0] == "h2"
    (first, *_) = Page(comparison / "report.html").of("figure")
    assert first["data-chart"] == "metric-seconds"


def test_a_run_has_all_its_parts(run: Path) -> None:
    page = Page(run / "report.html")
    assert {figure.get("data-chart") for figure in page.of("figure")} >= {
        "step-loss",
        "step-duration",
        "metric-seconds",
        None,
    }
    assert "values travelled as float16" in page.text
    assert "Another worker is late each time, and waiting takes" in words(page.text)
    assert (
        "offbeat train --task digits --strategy gtopk --workers 8 --steps 120 --seed 0" in page.text
    )
    assert "Nothing was emulated" in page.text


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("gtopk", ["warmup=none"]),
        ("allreduce", ["batch_shares=1/1/0.5/0.5"]),
        ("auto", ["allow=gtopk+localsgd"]),
    ],
)
def test_the_command_of_a_page_starts_the_same_run(
    strategy: str, settings: list[str], tmp_path: Path
) -> None:
    asked = Request(task="digits", strategy=strategy, steps=9, settings=settings, emulation="none")
    config = resolve(asked)
    path = create(tmp_path / "run", config)
    for rank in range(config.workers):
        EventWriter(path, rank=rank, attempt=0).close()
    words = shlex.split(report_of_run(path).command)[2:]
    flags = list(zip(words[::2], words[1::2], strict=True))
    given = {flag: value for flag, value in flags if flag != "--set"}
    assert given.keys() == {"--task", "--strategy", "--workers", "--steps", "--seed", "--emulation"}
    again = Request(
        task=given["--task"],
        strategy=given["--strategy"],
        workers=int(given["--workers"]),
        steps=int(given["--steps"]),
        seed=int(given["--seed"]),
        settings=[value for flag, value in flags if flag == "--set"],
        emulation="none",
    )
    assert given["--emulation"] == "none"
    assert resolve(again) == config


def test_the_page_needs_nothing_else(comparison: Path) -> None:
    page = Page(comparison / "report.html")
    fetching = {"src", "href", "srcset", "data", "action", "poster"}
    assert [attributes for _, attributes in page.elements if fetching & attributes.keys()] == []
    assert not re.search(
        r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)",
        (comparison / "report.html").read_text(),
    )


def test_who_was_at_work_when_is_listed_and_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Made(strategy="auto", options={}))
    summary = RunDirectory(run).summary()
    assert summary is not None
    made = [
        Decision(step=30, before="allreduce", after="gtopk", why="links carry 84 <Mbit/s>"),
        Decision(step=50, before="gtopk", after="gtopk", why="nothing is faster"),
    ]
    write_summary(replace(summary, decisions=made))
    page = Page(write_report(run))
    rows = "30 allreduce gtopk links carry 84 <Mbit/s> 50 gtopk stays nothing is faster"
    assert rows in words(page.text)
    charts = json.loads(page.scripts[0])["charts"]
    assert charts["step-duration"]["changes"] == [[30, "gtopk"]]
    assert charts["metric-seconds"]["changes"] == []
    plain = Page(write_report(write_run(tmp_path / "plain", Made())))
    assert "Which strategy was at work" not in plain.text


def test_only_the_pages_own_script_may_run(comparison: Path) -> None:
    page = Page(comparison / "report.html")
    (policy,) = [
        meta["content"]
        for meta in page.of("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    data, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy
    assert json.loads(data)["strategies"] == ["ddp", "gtopk", "ddp-powersgd", "ddp-fp16"]


def test_what_records_hold_is_text_and_nothing_else(tmp_path: Path) -> None:
    name = "runs/" + EVIL.replace("/", "")
    write_run(tmp_path / name, Made(steps=5))
    entry = ComparedStrategy(
        label=EVIL,
        strategy=EVIL,
        options={EVIL: EVIL},
        summary=EVIL,
        runs=[name, f"runs/missing {EVIL}"],
        notices=[EVIL],
        failure=EVIL,
        lateness_s=[],
    )
    evil = {
        "verdict": EVIL,
        "findings": [EVIL],
        "task": EVIL,
        "command": EVIL,
        "metric_name": EVIL,
        "environment": {EVIL: EVIL},
    }
    plain = comparison_of(Made(), [entry, entry.model_copy(update={"label": "other"})], [0])
    write_comparison(tmp_path, plain.model_copy(update=evil))
    page = Page(write_report(tmp_path))
    assert len(page.scripts) == 2
    assert page.of("img") == []
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert json.loads(page.scripts[0])["strategies"] == [EVIL, "other"]
    assert words(page.text).count(words(EVIL)) > 8


def test_everything_has_a_name_for_those_who_cannot_see_it(comparison: Path, run: Path) -> None:
    for directory in (comparison, run):
        page = Page(directory / "report.html")
        assert all(cell.get("scope") in ("col", "row") for cell in page.of("th"))
        assert all(svg.get("aria-label") or svg.get("aria-hidden") for svg in page.of("svg"))
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {str(element.get("aria-labelledby")) for element in page.of("section")} <= set(
            map(str, ids)
        )
        assert page.of("html") == [{"lang": "en"}]


def test_a_comparison_that_goes_on_says_so(tmp_path: Path) -> None:
    made = Made(steps=8)
    write_run(tmp_path / "runs/gtopk-seed-0", made, finished=False)
    entry = ComparedStrategy(
        label="gtopk",
        strategy="gtopk",
        options={},
        summary="",
        runs=["runs/gtopk-seed-0", "runs/gtopk-seed-1"],
    )
    comparison = comparison_of(
        made, [entry, entry.model_copy(update={"label": "ddp", "runs": []})], [0, 1]
    )
    write_comparison(tmp_path, comparison.model_copy(update={"status": "running"}))
    page = Page(write_report(tmp_path))
    assert "This comparison is running" in page.text
    assert "the charts leave out runs/gtopk-seed-1" in page.text


def test_a_comparison_that_was_stopped_says_how_long_the_step_is_that_a_slow_worker_delays(
    comparison: Path, tmp_path: Path
) -> None:
    """Its figures were never computed, and its events are there."""
    shutil.copytree(comparison, tmp_path, dirs_exist_ok=True)
    found = read_comparison(tmp_path)
    without = [one.model_copy(update={"measures": {}}) for one in found.strategies]
    write_comparison(
        tmp_path, found.model_copy(update={"status": "stopped", "strategies": without})
    )
    text = words(Page(write_report(tmp_path)).text)
    assert re.search(
        r"Worker 3 is slow: its peers wait for it under ddp, \S+ m?s in a step of \d", text
    )


def test_a_run_without_a_summary_says_so(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", Made(steps=6), finished=False)))
    assert "it has no summary" in page.text
    assert "6 steps are recorded" in words(page.text)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_short_and_lonely_runs_have_a_page(tmp_path: Path, workers: int, steps: int) -> None:
    made = Made(workers=workers, steps=max(1, steps), exchanges=workers > 1)
    directory = write_run(tmp_path / "run", made)
    if steps == 0:
        for path in directory.glob("events-rank-*.jsonl"):
            path.write_text(path.read_text().split("\n")[0] + "\n")
    page = Page(write_report(directory))
    assert ("Who waits for whom" in page.text) == (steps > 0)


def test_diverged_losses_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", Made(steps=6))
    for path in directory.glob("events-rank-*.jsonl"):
        path.write_text(re.sub(r'"loss": [\d.e-]+', '"loss": null', path.read_text()))
    page = Page(write_report(directory))
    assert "step-loss" not in {figure.get("data-chart") for figure in page.of("figure")}


def test_a_resumed_run_shows_its_last_attempt(tmp_path: Path) -> None:
    made = Made(steps=30)
    directory = write_run(tmp_path / "run", made)
    begin_attempt(directory, config_of(made), start_step=20)
    page = Page(write_report(directory))
    assert "has no summary" in page.text


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds neither a run nor a comparison"):
        write_report(tmp_path)
    with pytest.raises(RecordError, match="holds neither a run nor a comparison"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["comparison.json", "config.json"])
def test_a_newer_version_and_a_damaged_file_are_refused(tmp_path: Path, name: str) -> None:
    if name == "comparison.json":
        directory = write_comparison_of(tmp_path / "it", [Made(steps=3)], seeds=[0])
    else:
        directory = write_run(tmp_path / "it", Made(steps=3))
    content = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(content | {"schema_version": 99}))
    with pytest.raises(RecordError, match="99, this version reads"):
        write_report(directory)
    (directory / name).write_text(json.dumps(content)[:-30])
    with pytest.raises(RecordError):
        write_report(directory)
    assert not (directory / "report.html").exists()


def test_a_full_disk_leaves_the_earlier_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_run(tmp_path / "run", Made(steps=3))
    write_report(directory).write_text("the earlier page")
    before = sorted(path.name for path in directory.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match="No space left on device"):
        write_report(directory)
    assert sorted(path.name for path in directory.iterdir()) == before
    assert (directory / "report.html").read_text() == "the earlier page"


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
    (before,) = report_of_run(path).strategies
    assert not any("is that of a mean without" in notice for notice in before.notices)
    measure_without(path)
    assert [list(one.without) for one in Record(path).evaluations()][-1] == [2, 3]
    (after,) = report_of_run(path).strategies
    assert any(notice.startswith(REMARK) for notice in after.notices)


def test_the_page_of_a_comparison_says_whose_models_a_measured_mean_lacks(tmp_path: Path) -> None:
    write_comparison_of(tmp_path, [Made(strategy="wagma", options={})], seeds=[1])
    (run,) = {path.parent for path in tmp_path.rglob("evaluations.jsonl")}
    measure_without(run)
    (strategy,) = report_of_comparison(tmp_path).strategies
    assert any(REMARK in notice for notice in strategy.notices)
