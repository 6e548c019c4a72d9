"""Writes the page: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from itertools import chain
from pathlib import Path

import jinja2
from markupsafe import Markup

from offbeat.errors import RecordError
from offbeat_lab.comparison import is_comparison
from offbeat_lab.report import page_factors as factors
from offbeat_lab.report import page_sections as sections
from offbeat_lab.report import page_summary as summary
from offbeat_lab.report.charts import line_charts
from offbeat_lab.report.charts_dispatch import dispatches
from offbeat_lab.report.charts_timeline import timelines
from offbeat_lab.report.data import PageContent
from offbeat_lab.report.data_records import report_of_comparison, report_of_run
from offbeat_lab.report.page_factors import factor_timelines
from offbeat_lab.report.style import BITS_PER_S, SECONDS, SHARE, write, write_option

NAME = "report.html"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[µm]?s|min|h|[kMGT]?B|[kMG]?bit/s|times|steps)\b)")
"""Where a sentence must not break."""


def write_report(directory: Path) -> Path:
    """Write the report of the run or comparison in `directory` as its `report.html`, and return
    that path.

    Raises:
        RecordError: there is nothing to report on, a newer version wrote it, or the page cannot be
            written. An earlier page is then left as it was.
    """
    page = render(read_report(directory))
    path = directory / NAME
    try:
        _replace(path, page)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}; make room, or report on a copy elsewhere"
        ) from None
    return path


def read_report(directory: Path) -> PageContent:
    """What is to be said of the run or comparison in `directory`. Raises `RecordError`, see
    `write_report`.
    """
    if is_comparison(directory):
        return report_of_comparison(directory)
    if (directory / "config.json").exists():
        return report_of_run(directory)
    raise RecordError(
        f"{directory} holds neither a run nor a comparison; give the directory that offbeat train"
        " or offbeat compare printed"
    )


def render(report: PageContent) -> str:
    """The page as text. Everything that comes from records is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": lambda value: write(value, SECONDS),
        "rate": lambda value: write(value, BITS_PER_S),
        "share": lambda value: write(value, SHARE),
    }
    environment.filters |= {
        "option": write_option,
        "together": lambda text: _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text),
    }
    charts, advice = line_charts(report), summary.advice(report)
    windows = list(timelines(report))
    second_order, divided = list(factor_timelines(report)), list(dispatches(report))
    script = _asset("report.js")
    return environment.from_string(_asset("report.html")).render(
        report=report,
        rows=list(sections.rows(report)),
        numbers=summary.key_numbers(report),
        advice=advice.text if advice is not None else "",
        differences=list(sections.difference_rows(report)),
        charts=charts,
        timelines=windows,
        step_bars=sections.step_bars(report),
        lateness=list(sections.lateness_bars(report)),
        traffic=list(sections.traffic_bars(report)),
        dispatches=divided,
        factor_timelines=second_order,
        factor_sentences=list(factors.sentences(report)),
        factor_bars=list(factors.message_bars(report)),
        factor_parts=factors.PARTS,
        placements=list(factors.placements(report)),
        shares=sections.SHARES,
        style=Markup(_asset("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_embed(
            {
                "contestants": [contestant.label for contestant in report.contestants],
                "seeds": [
                    [run.seed for run in contestant.runs] for contestant in report.contestants
                ],
                "charts": {
                    chart.key: asdict(chart)
                    for chart in chain(charts, *(one.charts for one in divided))
                },
                "advised": 0 if advice is None else advice.contestant,
                "timelines": [asdict(window) for window in windows],
                "factors": [asdict(timeline) for timeline in second_order],
            }
        ),
    )


def _asset(name: str) -> str:
    """A file of the page. Its script and style are put between tags as they are, so they must not
    hold an end of one.
    """
    return (resources.files("offbeat_lab.report") / "assets" / name).read_text(encoding="utf-8")


def _embed(values: Mapping[str, object]) -> Markup:
    """JSON that no HTML parser can take for the end of its element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _replace(path: Path, text: str) -> None:
    """Write all of `text` to `path`, or leave what is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
