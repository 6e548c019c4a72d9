"""A plan as one self-contained page: tables, efficiency over the number of workers, and a map of
which strategy is best over link rate and workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from offbeat_lab.cluster.quantities import display_rate
from offbeat_lab.plan.predictions import Plan
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.table import column_words, plan_tables

_COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6a3d9a",
    "#7f7f7f",
)
_DASHES: Final = ("", "6 3", "2 3")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 60, 40, 16
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } caption { text-align: left; font-weight: 600; }
td, th { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } tr.best td { font-weight: 600; }
.wide, figure { overflow-x: auto; } figure svg { min-width: 36rem; } td { white-space: nowrap; }
svg text { font-size: 12px; } figure { margin: 1.5rem 0; } .note { color: #555; }
pre { overflow-x: auto; padding: .6rem; background: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e6e6e6; } svg text { fill: #e6e6e6; }
  td, th { border-color: #444; } .note { color: #aaa; } pre { background: #24272d; }
}
"""


def write_page(plan: Plan, path: Path, commands: Sequence[str] = ()) -> None:
    """Write the page to `path`, with the commands that check what is recommended."""
    path.write_text(render_plan(plan, commands), encoding="utf-8")


def render_plan(plan: Plan, commands: Sequence[str] = ()) -> str:
    """The page as HTML."""
    profile = plan.request.profile
    title = f"Plan for {profile.name} on {profile.device}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in plan.crossovers),
        *(_command(sentence) for sentence in commands),
        *_efficiency_figures(plan),
        _map_figure(plan),
        *_tables(plan),
        "<h2>What to know</h2><ul>",
        *(f"<li>{_with_code(remark)}</li>" for remark in plan.remarks),
        "</ul><h2>Where the numbers come from</h2><ul>",
        *_sources(profile),
        "</ul></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _command(sentence: str) -> str:
    """Words, and the command behind the colon."""
    words, _, command = sentence.partition(": ")
    return f"<p>{escape(words)}:</p><pre><code>{escape(command)}</code></pre>"


def _with_code(remark: str) -> str:
    """What stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(remark))


def _sources(profile: ModelProfile) -> Iterator[str]:
    """One line for all fields that have the same source."""
    for source in dict.fromkeys(one.source for one in profile.sources):
        fields = [one.field for one in profile.sources if one.source == source]
        names = ", ".join(f"<code>{escape(field)}</code>" for field in fields)
        yield f"<li>{names}: {escape(source)}</li>"


def _rates(plan: Plan) -> list[float]:
    return sorted({one.rate_bit_per_s for one in plan.predictions})


def _workers(plan: Plan) -> list[int]:
    return sorted({one.workers for one in plan.predictions})


def _colour(plan: Plan, strategy: str) -> str:
    return _COLOURS[plan.request.strategies.index(strategy) % len(_COLOURS)]


def _tables(plan: Plan) -> Iterator[str]:
    yield f'<h2>Predictions</h2><p class="note">{escape(column_words(plan))}</p>'
    for table in plan_tables(plan):
        yield f'<div class="wide"><table><caption>{escape(table.title)}</caption><tr>'
        yield "".join(f"<th>{escape(head)}</th>" for head in table.heads) + "</tr>"
        for number, cells in enumerate(table.rows):
            mark = ' class="best"' if number == table.best else ""
            yield f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        yield "</table></div>"


def _efficiency_figures(plan: Plan) -> Iterator[str]:
    workers = _workers(plan)
    if len(workers) < 2:
        return
    yield "<h2>Efficiency over the number of workers</h2>"
    for rate in _rates(plan):
        yield f"<figure><figcaption>{escape(display_rate(rate))}</figcaption>"
        yield f'<svg viewBox="0 0 {_WIDTH + 190} {_HEIGHT}" role="img">'
        yield f"<title>Share of the ideal speed at {escape(display_rate(rate))}</title>"
        yield from _axes(workers)
        for number, strategy in enumerate(plan.request.strategies):
            ones = sorted(
                (
                    one
                    for one in plan.predictions
                    if (one.rate_bit_per_s, one.strategy) == (rate, strategy)
                ),
                key=lambda one: one.workers,
            )
            points = " ".join(
                f"{_x(one.workers, workers):.1f},{_y(one.share_of_ideal):.1f}" for one in ones
            )
            colour = _colour(plan, strategy)
            dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
            yield (
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"'
                f' stroke-dasharray="{dash}"/>'
            )
            y = _TOP + 8 + 16 * number
            yield f'<rect x="{_WIDTH + 8}" y="{y - 8}" width="14" height="4" fill="{colour}"/>'
            yield f'<text x="{_WIDTH + 28}" y="{y}">{escape(strategy)}</text>'
        yield "</svg></figure>"


def _axes(workers: Sequence[int]) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#bbb"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>'
    for number in workers:
        x = _x(number, workers)
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{number}</text>'
    yield f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">workers</text>'


def _x(number: int, workers: Sequence[int]) -> float:
    span = math.log(workers[-1] / workers[0]) or 1.0
    return _LEFT + 20 + (_WIDTH - _LEFT - 40) * math.log(number / workers[0]) / span


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, share))


def _map_figure(plan: Plan) -> str:
    """A cell for each rate and number of workers, with the strategy that is recommended there."""
    workers, rates = _workers(plan), _rates(plan)
    width, height = max(90, 560 // len(workers)), 34
    total = f"{120 + width * len(workers)} {30 + height * len(rates)}"
    cells = [f'<svg viewBox="0 0 {total}" role="img"><title>The best strategy</title>']
    for column, number in enumerate(workers):
        x = 120 + width * (column + 0.5)
        cells.append(f'<text x="{x}" y="18" text-anchor="middle">{number}</text>')
    for row, rate in enumerate(reversed(rates)):
        y = 26 + height * row
        cells.append(f'<text x="110" y="{y + 21}" text-anchor="end">{display_rate(rate)}</text>')
        for column, number in enumerate(workers):
            best = plan.best(number, rate)
            x = 120 + width * column
            colour = _colour(plan, best.strategy)
            cells.append(
                f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{colour}"'
                f' fill-opacity=".35"><title>{escape(best.strategy)}: {best.step_s:.3g} s,'
                f" {best.share_of_ideal:.0%} of the ideal</title></rect>"
                f'<text x="{x + width / 2}" y="{y + 21}" text-anchor="middle">'
                f"{escape(best.strategy.partition(':')[0])}</text>"
            )
    cells.append("</svg>")
    heading = "<h2>Which strategy is best, by link rate and workers</h2>"
    return f"{heading}<figure>{''.join(cells)}</figure>"
