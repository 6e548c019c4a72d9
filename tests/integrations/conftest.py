"""These tests need the frameworks, which `make test-integrations` installs; elsewhere they are not
collected.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

WARNINGS_OF_FRAMEWORKS = "default"

collect_ignore = []
if find_spec("lightning") is None:
    collect_ignore.append("test_lightning_ranks.py")
if find_spec("transformers") is None:
    collect_ignore.append("test_huggingface_ranks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "integrations":
            item.add_marker(pytest.mark.filterwarnings(WARNINGS_OF_FRAMEWORKS))
