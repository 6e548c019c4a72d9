"""Data and runs small enough for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    """A data set for task `mnist`: 64 random images to train on, 10 held out."""
    random = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    np.savez(
        path,
        x_train=random.integers(0, 256, (64, 28, 28), dtype=np.uint8),
        y_train=np.arange(64) % 10,
        x_test=random.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        y_test=np.arange(10),
    )
    return path
