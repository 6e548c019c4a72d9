"""The README as a package index shows it: links lead to the repository, because beside the package
there are no other files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


class ReadmeWithAbsoluteLinks(MetadataHookInterface):
    """Fills in `readme`, by `project.urls.Repository`."""

    def update(self, metadata: dict[str, Any]) -> None:
        files = f"{metadata['urls']['Repository']}/blob/main/"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = _LINK.sub(lambda link: f"]({files}{link[1]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
