"""What MkDocs cannot do by itself: pages for files outside of `docs`, such as the README and the
examples, links to them, and the reference of the API.

In the repository a link such as `../examples/plain_loop.py` leads to the file; on the site it leads
to a page that holds it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
LANGUAGES: Final = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
NAMED: Final = {
    "README.md": "readme-of-the-project.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that have pages of their own, in the navigation."""

_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")

_SESSIONS: Final = {
    "attach": "offbeat.session.attach.attach",
    "log": "offbeat.session.metrics.log",
    "Session": "offbeat.session.session.Session",
    "Stats": "offbeat.session.session.Stats",
    "reshard": "offbeat.session.state.reshard",
}
_REFERENCE: Final = {
    "reference/sessions.md": ("Sessions", _SESSIONS),
    "reference/loggers.md": ("Loggers", {"": "offbeat.session.loggers"}),
    "reference/records.md": (
        "Records and clusters",
        {
            "Cluster": "offbeat_lab.cluster.Cluster",
            "Record": "offbeat_lab.records.Record",
            "write_report": "offbeat_lab.report.page.write_report",
        },
    ),
    "reference/errors.md": ("Errors", {"": "offbeat.errors"}),
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere or are made here."""
    for source in _outside():
        files.append(File.generated(config, _page_of(source), content=_text_of(source)))
    for page, (title, names) in _REFERENCE.items():
        files.append(File.generated(config, page, content=_reference(title, names)))
    files.append(File.generated(config, "reference/strategies.md", content=_strategies()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links out of `docs` to the pages that stand for these files.

    Args:
        markdown: of the page.
        page, config, files: as MkDocs hands them over.
    """
    here = _source_of(page.file.src_uri)
    if here is None:
        return markdown

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2]))
        page_uri = _page_of(target)
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"{link[1]}{posixpath.relpath(page_uri, start)}{link[3] or ''})"

    return _LINK.sub(led, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take from `docs` the script by which search works without a server: the theme asks a host.

    Args:
        output: the page as HTML.
        page, config: as MkDocs hands them over.
    """
    own = posixpath.relpath("iframe-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def _outside() -> list[str]:
    """Files that pages link to and that lie outside of `docs`, as paths in the repository."""
    found = set(NAMED)
    for page in [
        *ROOT.glob("docs/**/*.md"),
        *map(ROOT.joinpath, NAMED),
        *ROOT.glob("examples/*.md"),
    ]:
        here = page.relative_to(ROOT).as_posix()
        for _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
            if not path.startswith("docs/") and (ROOT / path).is_file():
                found.add(path)
    return sorted(found)


def _page_of(source: str) -> str:
    """The page of a file of the repository, as MkDocs names it."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source in NAMED:
        return NAMED[source]
    return f"files/{source.removesuffix('.md')}.md" if Path(source).suffix else f"files/{source}.md"


def _source_of(page: str) -> str | None:
    """The file of the repository that a page shows; None for pages that are made here."""
    if (ROOT / "docs" / page).is_file():
        return f"docs/{page}"
    return {_page_of(source): source for source in _outside()}.get(page)


def _text_of(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(source).suffix, "text")
    return f"# {source}\n\n````{language}\n{text}````\n"


def _reference(title: str, names: dict[str, str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {path}" for path in names.values()), ""])


def _strategies() -> str:
    """Every strategy, after its registry; options stand on the methods' pages."""
    blocks = ["# Strategies", "The table of each one's options stands on the page of its method."]
    for name, path in _registered():
        blocks += [
            f"::: {path}\n    options: {{members: false}}",
            f"[Method, options and cost](../methods/{name}.md)",
        ]
    return "\n\n".join([*blocks, ""])


def _registered() -> Iterator[tuple[str, str]]:
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from offbeat.strategies.registry import REGISTRY
    finally:
        sys.path.pop(0)
    for entry in REGISTRY.entries.values():
        yield entry.name, f"{entry.module}.{entry.class_name}"
