"""How large the project is: code lines of each room, files and calls in one training step, options
of each strategy, words of the documentation. ARCHITECTURE.md shows it, and a test keeps it current.

    python docs/growth.py            prints the tables
    python docs/growth.py --write    puts them into ARCHITECTURE.md

A code line is neither blank nor a comment nor part of a docstring. A call counts where it leads
from one file of offbeat to another; polls of a wait are among them, so that the number varies by a
few in a hundred.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "ARCHITECTURE.md"
BEGIN: Final = "<!-- growth -->"
END: Final = "<!-- end of growth -->"

WALKED: Final = ("AllReduce", "GTopK", "LocalSGD", "WAGMA", "AdaptiveSGD", "SPDKFAC")
"""Strategies whose steps are walked through."""


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank nor comments nor docstrings."""
    text = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                left_out.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(text.splitlines(), start=1)
    )


def room_sizes(package: Path) -> dict[str, tuple[int, int]]:
    """Code lines and files of each room of a package, and of the files beside the rooms."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        room = f"{parts[0]}/" if len(parts) > 1 else "beside them"
        lines[room] += code_lines(path)
        files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def num_options() -> dict[str, int]:
    """Constructor options of each strategy, and of the objects that such options take."""
    import offbeat
    from offbeat.strategies import REGISTRY

    kinds = [*REGISTRY.values(), offbeat.Curvature, offbeat.TopKCodec, offbeat.Outer]
    return {kind.__name__: len(inspect.signature(kind).parameters) for kind in kinds}


def num_words() -> dict[str, int]:
    """Words of the documentation, by folder."""
    words: Counter[str] = Counter()
    for path in (ROOT / "docs").rglob("*.md"):
        folder = path.relative_to(ROOT).parent.as_posix()
        words[folder] += len(path.read_text(encoding="utf-8").split())
    return dict(sorted(words.items()))


def step_size(name: str) -> tuple[int, int]:
    """Files of offbeat, and calls between them, in one step of rank 0 of 2. Of AdaptiveSGD it is a
    mega-batch: two batches of each rank, and the merge.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--walk", name],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a step of {name} failed")
    files, calls = json.loads(printed[0].splitlines()[-1])
    return files, calls


class Walk:
    """Counts files of offbeat, and calls from one to another, in all threads while it is on."""

    def __init__(self, package: Path) -> None:
        self._package = str(package)
        self.is_on = False
        self.files: set[str] = set()
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if not self.is_on or event != "call" or not file.startswith(self._package):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._package):
            caller = caller.f_back
        self.calls += caller is None or caller.f_code.co_filename != file


def walk_step(name: str) -> None:
    """As one of two ranks, take a step and print what was counted in it."""
    import torch

    import offbeat

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    asked: Mapping[str, Callable[[], Any]] = {
        "GTopK": lambda: offbeat.GTopK(density=0.01, collective="reduce_scatter"),
        "AdaptiveSGD": lambda: offbeat.AdaptiveSGD(mega_batch=4, warmup=0, overlap=False),
        "LocalSGD": lambda: offbeat.LocalSGD(period=1),
        "SPDKFAC": lambda: offbeat.SPDKFAC(factor_interval=1, inverse_interval=1),
    }
    walk = Walk(Path(offbeat.__file__).parent)
    threading.setprofile(walk)
    data = torch.utils.data.TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
    with offbeat.attach(model, optimizer, asked.get(name, getattr(offbeat, name))()) as session:
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        waiting = iter(session.loader(loader) if name == "AdaptiveSGD" else loader)
        sys.setprofile(walk)
        for number in itertools.count():
            # Where samples are claimed, a merge comes before the next batch.
            walk.is_on = number == 4 if name != "AdaptiveSGD" else 4 <= number < 8
            batch = next(waiting, None)
            if batch is None:
                break
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        walk.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)
    print(json.dumps([len(walk.files), walk.calls]))


def tables(steps: Mapping[str, tuple[int, int]]) -> str:
    """All tables in Markdown. `steps`: files and calls by strategy."""
    found = []
    for package in ("offbeat", "offbeat_lab"):
        sizes = room_sizes(ROOT / "src" / package)
        total = (
            sum(lines for lines, _ in sizes.values()),
            sum(files for _, files in sizes.values()),
        )
        rows = [f"| `{room}` | {lines:,} | {files} |" for room, (lines, files) in sizes.items()]
        found.append(
            f"| room of `{package}` | code lines | files |\n|---|---|---|\n"
            + "\n".join([*rows, f"| together | {total[0]:,} | {total[1]} |"])
        )
    options = num_options()
    rows = [
        f"| {name} | {count} | {' / '.join(map(str, steps[name])) if name in steps else ''} |"
        for name, count in options.items()
    ]
    found.append(
        "| strategy | options | files / calls in a step |\n|---|---|---|\n"
        + "\n".join([*rows, f"| together | {sum(options.values())} | |"])
    )
    words = num_words()
    rows = [f"| `{folder}/` | {count:,} |" for folder, count in words.items()]
    found.append(
        "| documents | words |\n|---|---|\n"
        + "\n".join([*rows, f"| together | {sum(words.values()):,} |"])
    )
    return "\n\n".join(found)


def shown_steps() -> dict[str, tuple[int, int]]:
    """Files and calls as ARCHITECTURE.md has them."""
    rows = re.findall(r"^\| (\w+) \| \d+ \| (\d+) / (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (int(files), int(calls)) for name, files, calls in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="How large the project is.")
    parser.add_argument("--write", action="store_true", help="put the tables into ARCHITECTURE.md")
    parser.add_argument("--steps", action="store_true", help="walk through steps anew")
    parser.add_argument("--walk", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.walk:
        walk_step(given.walk)
        return
    steps = {name: step_size(name) for name in WALKED} if given.steps else shown_steps()
    text = tables(steps)
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
