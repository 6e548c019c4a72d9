"""The page in a real browser: it draws, it answers, it fits a phone, it loads nothing, it complains
of nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat_lab.report.page import write_report
from report_support.browser import DESKTOP, PHONE, Browser
from report_support.synthetic import Made, write_comparison_of, write_run

MOST_ELEMENTS = 3_000
"""Of a page that opens quickly. How long it takes depends on the machine; what it has to draw does
not.
"""

MARKS = """[...document.querySelectorAll("figure > svg")].map((svg) => svg.querySelectorAll("path, rect, line").length)"""
WIDEST = "document.documentElement.scrollWidth"


@pytest.fixture(params=["comparison", "run", "shared_out"])
def page(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.getfixturevalue(request.param)
    return directory / "report.html"


def failed(browser: Browser) -> object:
    return browser.evaluate("document.documentElement.dataset.failed ?? null")


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, True), (PHONE, False)])
def test_every_chart_is_drawn_and_nothing_is_wrong(
    browser: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.open(page, size=size, dark=dark)
    marks = browser.evaluate(MARKS)
    assert len(marks) == int(browser.evaluate("document.documentElement.dataset.drawn"))
    assert min(marks) > 5
    assert browser.console == []
    assert failed(browser) is None
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 24, 27)" if dark else "rgb(253, 253, 252)"
    )


OUTSIDE = """[...document.querySelectorAll("svg text, .bar-text, .bar-label, h1, h2, h3, p, dd, select")].filter((one) => {
    const box = one.getBoundingClientRect();
    return !one.closest(".scroll, .unseen") && box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((one) => one.textContent)"""
TOUCHING = """[...document.querySelectorAll("figure > svg")].flatMap((svg) => {
    const boxes = [...svg.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
    return boxes.flatMap(([text, a], k) => boxes.slice(k + 1)
        .filter(([, b]) => a.width && a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
        .map(([other]) => text + " | " + other));
})"""


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1280])
def test_nothing_sticks_out_of_the_screen_and_no_label_of_a_chart_lies_on_another(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, size=(width, 740))
    assert browser.evaluate(WIDEST) <= width
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(TOUCHING) == []


def test_on_a_phone_the_table_of_figures_needs_no_scrolling(
    browser: Browser, comparison: Path
) -> None:
    browser.open(comparison / "report.html", size=(390, 844))
    browser.evaluate(
        """document.querySelectorAll("details").forEach((one) => { one.open = true; })"""
    )
    for table in ("table.main", "table.figures", "table.differences"):
        right = f"""Math.max(...[...document.querySelectorAll("{table} td")].map((one) => one.getBoundingClientRect().right))"""
        assert browser.evaluate(right) <= 390


def test_the_first_picture_tells_close_results_apart(browser: Browser, tmp_path: Path) -> None:
    """0.983 and 0.989 are one line on an axis from 0 to 1."""
    directory = write_comparison_of(
        tmp_path,
        [Made(strategy="ddp", best=0.989), Made(best=0.983)],
        seeds=[0],
    )
    browser.open(write_report(directory))
    ends = """[...document.querySelectorAll("figure.first g:has(> .line)")].map((one) => one.lastChild.getBoundingClientRect().y)"""
    ddp, gtopk = sorted(browser.evaluate(ends))
    assert gtopk - ddp > 15


def test_a_window_that_changes_its_width_is_drawn_anew(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html")
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=740,
        deviceScaleFactor=1,
        mobile=True,
    )
    browser.evaluate(
        "new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go))).then(() => 1)"
    )
    widths = browser.evaluate(
        """[...document.querySelectorAll("figure > svg")].map((svg) => svg.viewBox.baseVal.width)"""
    )
    assert max(widths) <= 360


def test_strategies_can_be_hidden(browser: Browser, comparison: Path) -> None:
    lines = """document.querySelectorAll("figure[data-chart=metric-seconds] .line").length"""
    browser.open(comparison / "report.html")
    before = browser.evaluate(lines)
    assert before == 4 * (3 + 1)
    browser.evaluate("""document.querySelector("#shown input[value='0']").click()""")
    assert browser.evaluate(lines) == before - 4
    browser.evaluate(
        """document.querySelectorAll("#shown input:checked").forEach((box) => box.click())"""
    )
    assert browser.evaluate(lines) == 0
    browser.evaluate("""document.querySelector("#shown input[value='0']").click()""")
    assert browser.evaluate(lines) == 4
    assert browser.console == []


def choose(browser: Browser, name: str, value: object) -> str:
    """Set one of the timeline's filters; returns the sentence below it."""
    browser.evaluate(f"""(() => {{
            const field = document.getElementById("timeline-{name}");
            field.value = "{value}";
            field.dispatchEvent(new Event("input"));
        }})()""")
    return str(browser.evaluate("""document.getElementById("timeline-says").textContent"""))


def test_the_timeline_shows_what_was_chosen(browser: Browser, comparison: Path) -> None:
    drawn = """document.querySelector("#timeline > svg").innerHTML"""
    browser.open(comparison / "report.html")
    seen = [browser.evaluate(drawn)]
    for name, value in (("strategy", 1), ("run", 2), ("count", 3), ("from", 7)):
        sentence = choose(browser, name, value)
        seen.append(browser.evaluate(drawn))
    assert len(set(seen)) == len(seen)
    assert sentence.startswith("gtopk, seed 2: steps ")
    first, last = (int(word) for word in sentence.split() if word.isdigit() and int(word) > 4)
    assert last - first == 2
    assert browser.evaluate("""document.querySelectorAll("#timeline .last").length""") == 3
    assert browser.console == []


def test_bars_show_seconds_or_shares(browser: Browser, comparison: Path) -> None:
    widths = """[...document.querySelectorAll(".stacked .bar")].map((bar) => Math.round(bar.getBoundingClientRect().width))"""
    browser.open(comparison / "report.html")
    seconds = browser.evaluate(widths)
    assert len(set(seconds)) == 4
    browser.evaluate("""document.querySelector("#step-scale input[value=share]").click()""")
    assert set(browser.evaluate(widths)) == {max(seconds)}


def test_the_pointer_is_told_what_it_points_at(browser: Browser, comparison: Path) -> None:
    browser.open(comparison / "report.html")
    tip = """document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent"""
    for selector, expected in (
        ("figure[data-chart=metric-steps] .marker", "accuracy"),
        ("#timeline .phase-waiting", "worker 3"),
    ):
        box = browser.evaluate(f"""(() => {{
                const mark = document.querySelector("{selector}");
                mark.scrollIntoView({{ block: "center" }});
                const box = mark.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()""")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        assert expected in browser.evaluate(tip)
    assert browser.console == []


def test_many_thousand_events_are_no_more_to_draw_than_a_few(
    browser: Browser, tmp_path: Path
) -> None:
    directory = write_run(tmp_path / "run", Made(workers=4, steps=5_000, random_late_s=0.1))
    path = write_report(directory)
    assert path.stat().st_size < 1_000_000
    browser.open(path)
    assert browser.evaluate("document.documentElement.dataset.drawn") is not None
    elements = browser.evaluate("document.querySelectorAll('*').length")
    assert elements < MOST_ELEMENTS
    points = browser.evaluate(
        """Math.max(...[...document.querySelectorAll("path.line")].map((line) => line.getAttribute("d").length))"""
    )
    assert points < 20_000
