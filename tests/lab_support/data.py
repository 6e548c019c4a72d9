"""Data and runs small enough for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab_support.rows import write
from offbeat.xmc.xmlrepo import XmlFiles
from offbeat_lab.sparse_data import Synthetic

ROWS = Synthetic(num_features=60, num_labels=12, mean_draws=15.0, mean_labels=1.5, seed=1)


def write_rows(directory: Path, *, num_train: int, num_test: int) -> dict[str, str]:
    """Rows of `ROWS` in files. The options of task `xmc` that name them."""
    for split, num_rows in (("train", num_train), ("test", num_test)):
        files = XmlFiles(path=directory / f"{split}.txt")
        read = ROWS.read(num_rows, split="train" if split == "train" else "test")
        write(files, read, header=(num_rows, ROWS.num_features, ROWS.num_labels))
    return {"path": str(directory / "train.txt"), "test_path": str(directory / "test.txt")}


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
