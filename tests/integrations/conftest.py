"""These tests need the frameworks, which `make test-integrations` installs; elsewhere they are not
collected.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

WARNINGS_OF_FRAMEWORKS = "default"

collect_ignore_glob = []
if find_spec("lightning") is None or find_spec("transformers") is None:
    collect_ignore_glob.append("test_*.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "integrations":
            item.add_marker(pytest.mark.filterwarnings(WARNINGS_OF_FRAMEWORKS))
