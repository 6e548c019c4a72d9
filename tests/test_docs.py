"""What the documentation shows runs, what it links to exists, and every option has a
place in it.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategy_tables
import typer

from offbeat import errors
from offbeat.errors import OffbeatError
from offbeat.run import command
from offbeat.run.config import RunConfig
from offbeat.run.records import Attempt, Evaluation, Head, StepEvent, Summary, WorkerLoss
from offbeat.strategies import REGISTRY
from offbeat_lab.cli.main import app
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.records import MegaBatch

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        ROOT / "benchmarks" / "studies" / "README.md",
    ]
)
OWN_PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EXAMPLES = {
    "plain_loop.py": ["--epochs", "1"],
    "amp_accumulation.py": ["--steps", "3"],
    "digits_ddp.py": ["--epochs", "1", "--width", "16"],
    "coda.py": ["--epochs", "1"],
    "pswa.py": ["--epochs", "4", "--first", "1", "--restart", "2"],
    "unlike_threads.py": ["--epochs", "1"],
    "sharded_gpt.py": ["--steps", "2"],
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks of all pages, as (page and number, content)."""
    for page in PAGES:
        for number, content in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        ):
            yield f"{name_of(page)} {number}", content


PYTHON_BLOCKS = dict(blocks("python"))
DIFF_BLOCKS = dict(blocks("diff"))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Commands of `offbeat` in indented blocks of all pages, as (page and number, words)."""
    for page in PAGES:
        lines = re.findall(
            r"^ {4}[^#\n]*\b(offbeat [a-z](?:[^\n\\]|\\\n)*)", page.read_text(), re.MULTILINE
        )
        for number, line in enumerate(lines):
            whole = re.sub(r"\$\{[^}]*\}|\$\w+", "0", line.replace("\\\n", " ")).rstrip("'")
            _, *words = shlex.split(re.split(r"(?<=\S) {4,}(?=[a-z])", whole)[0], comments=True)
            yield f"{name_of(page)} {number}", words


COMMANDS = dict(commands())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A world of one, in an empty directory."""
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def run(code: str) -> None:
    script = Path("block.py")
    script.write_text(code)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("where", PYTHON_BLOCKS)
def test_python_blocks_run(where: str) -> None:
    run(PYTHON_BLOCKS[where])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("where", DIFF_BLOCKS)
@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_a_diff_run(where: str, side: str) -> None:
    lines = [line for line in DIFF_BLOCKS[where].splitlines() if line[:1] in ("", " ", side)]
    run("\n".join(line[1:] for line in lines))


def test_the_readme_shows_the_loop_as_a_diff() -> None:
    assert any(where.startswith("README.md") for where in DIFF_BLOCKS)


def test_every_example_is_run_here() -> None:
    assert {path.name for path in ROOT.glob("examples/*.py")} == set(EXAMPLES)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_alone(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [example, *EXAMPLES[example]])
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert "step" in capsys.readouterr().out


@pytest.mark.parametrize("where", COMMANDS)
def test_commands_are_understood(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not carried out: that takes minutes and files. Words, options and strategies are read."""
    name, *words = COMMANDS[where]
    strategies: list[str] = []
    if name == "run":
        monkeypatch.setattr(
            command, "_run", lambda given, finished: strategies.append(given.strategy)
        )
        command.run_command(words)
    else:
        group: Any = typer.main.get_command(app)
        context = group.commands[name].make_context(name, words)
        given = context.params.get("strategies") or context.params.get("strategy") or ""
        strategies += [text for text in given.split(",") if text]
        assert not [word for word in context.args if word.startswith("-")]
    for strategy in strategies:
        build_strategy(*parse_spec(strategy))


def test_there_are_commands_on_the_pages_that_one_reads_first() -> None:
    for page in ("README.md", "docs/index.md", "docs/your-script.md"):
        assert any(where.startswith(page) for where in COMMANDS)


def anchors(page: Path) -> set[str]:
    """What links can point to within a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.is_file():
            yield f"{target}: the site has no page for what is not a file"
        elif anchor and anchor not in anchors(linked):
            yield f"{target}: no such heading"


def test_links_resolve() -> None:
    assert {name_of(page): broken for page in PAGES if (broken := [*broken_links(page)])} == {}


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / path).resolve() for path in re.findall(r"\]\(([^)#]+)", index.read_text())
    }
    assert {page.resolve() for page in PAGES} - {index.resolve()} <= linked


@pytest.mark.parametrize("page", strategy_tables.pages(), ids=lambda page: page.stem)
def test_tables_of_strategies_are_made_from_their_docstrings(page: Path) -> None:
    assert strategy_tables.written(page) == page.read_text(), "run python docs/strategy_tables.py"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_of_a_strategy_stands_on_its_page_with_its_default(name: str) -> None:
    methods = ROOT / "docs" / "methods"
    other = strategy_tables.beside(methods / f"{name}.md")
    told = "".join((methods / f"{page}.md").read_text() for page in (name, other) if page)
    for field in dataclasses.fields(REGISTRY[name]):
        row = re.search(rf"^\| `{field.name}` \| .*? \| `([^`]*)` \|", told, re.MULTILINE)
        assert row, field.name
        assert row[1].replace('"', "'") == repr(field.default), field.name


def prose(page: Path) -> Iterator[str]:
    """The lines of a page without tables, examples and what is made from result files."""
    text = re.sub(
        r"^<!-- (table: |list ).*?<!-- end of table -->", "", page.read_text(), flags=re.M | re.S
    )
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for line in text.splitlines():
        if not line.startswith(("|", "    ")):
            yield line


def test_a_line_of_prose_has_at_most_100_characters() -> None:
    long = [(name_of(page), line) for page in OWN_PROSE for line in prose(page) if len(line) > 100]
    assert long == []


def names_in_the_glossary() -> list[str]:
    """What the last column of its tables says a thing is called in the code."""
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [name for row in rows if len(row) == 3 for name in re.findall(r"`([^`]+)`", row[2])]


def test_what_the_glossary_names_is_in_the_code() -> None:
    source = ROOT / "src"
    words = {word for path in source.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}

    def is_there(name: str) -> bool:
        if "/" in name:
            return any(
                path.exists()
                for path in (source / "offbeat" / name, source / "offbeat_lab" / name, ROOT / name)
            )
        return words.issuperset(name.split("."))

    names = names_in_the_glossary()
    assert names
    assert [name for name in names if not is_there(name)] == []


def test_every_error_has_a_section_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, OffbeatError)
    ]
    assert [
        kind.__name__
        for kind in kinds
        if f"`{kind.__name__}`" not in page and kind is not OffbeatError
    ] == []


def test_every_field_of_a_record_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "records.md").read_text()
    kinds = (RunConfig, Attempt, Head, StepEvent, Evaluation, MegaBatch, Summary, WorkerLoss)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


def test_every_dependency_is_accounted_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    required = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    assert required
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for name in re.findall(r'"([\w-]+)', required[1]):
        assert f"| {name} |" in page, name
