"""What of the metadata follows from the repository's address, which pyproject.toml names once: the
project's URLs, and the README as a package index shows it. Beside a package there are no other
files, so links lead to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


class AddressesOfTheRepository(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        files = f"{repository}/blob/main/"
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": f"{files}docs/index.md",
            "Changelog": f"{files}CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = _LINK.sub(lambda link: f"]({files}{link[1]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
