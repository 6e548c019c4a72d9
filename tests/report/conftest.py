"""A browser for whoever needs one, and the pages it opens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat_lab.report.page import write_report
from report_support.browser import Browser, find_browser
from report_support.synthetic import Made, write_comparison_of, write_run


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium found: install the package chromium to test the page in a browser")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four strategies, three seeds, worker 3 slow, and the page of it."""
    late = {3: 0.21}
    directory = write_comparison_of(
        tmp_path_factory.mktemp("comparison"),
        [
            Made(
                strategy="ddp",
                options={},
                transfer_s=1.27,
                bytes_per_step=150_000_000,
                encode_s=0.0,
                late_s=late,
            ),
            Made(strategy="gtopk", late_s=late, notices=["the tree was chosen by cost"]),
            Made(
                strategy="ddp-powersgd",
                options={"rank": 4},
                transfer_s=0.42,
                bytes_per_step=4_100_000,
                late_s=late,
            ),
            Made(
                strategy="ddp-fp16",
                options={},
                transfer_s=0.62,
                bytes_per_step=75_000_000,
                late_s=late,
            ),
        ],
    )
    write_report(directory)
    return directory


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of eight workers, of which another one is late in every step, and the page of it."""
    made = Made(workers=8, steps=120, random_late_s=0.32, notices=["values travelled as float16"])
    directory = write_run(tmp_path_factory.mktemp("runs") / "run", made)
    write_report(directory)
    return directory


@pytest.fixture(scope="session")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four workers that share samples out between twenty merges, and the page of it."""
    made = Made(strategy="adaptive", options={}, steps=200, exchanges=False, mega_batches=20)
    directory = write_run(tmp_path_factory.mktemp("runs") / "shared-out", made)
    write_report(directory)
    return directory
