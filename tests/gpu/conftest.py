"""Tests of what differs on a GPU. `make test-gpu` runs them on one; elsewhere some run on the CPU,
so that nobody is the first to run them on a machine that is rented by the minute.
"""

from __future__ import annotations

import pytest
import torch

from gpu_support import DEVICE


@pytest.fixture(scope="session")
def device() -> torch.device:
    chosen = torch.device(DEVICE)
    if chosen.type == "cuda":
        assert torch.cuda.is_available(), "OFFBEAT_TEST_DEVICE=cuda, but torch sees no GPU"
    return chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "needs_gpu" in item.keywords and DEVICE != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
