from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests out to others runs none, and need not import torch for them."""
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("ranks_support.frame")
