"""The GPU kernel under Triton's interpreter, on CPU tensors. Needs Triton; needs no GPU.

Triton reads TRITON_INTERPRET when it is imported, so the checks run in a process of their own: this
file as a script.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_under_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    outcome = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr


def check_that_it_adds_up_and_finds_all_candidates(num_elements: int, weight: float) -> None:
    from offbeat.codec import triton_kernels

    rng = np.random.default_rng(num_elements)
    flat, residual = (
        torch.from_numpy(rng.standard_normal(num_elements).astype(np.float32)) for _ in range(2)
    )
    flat[0] = float("nan")
    expected = residual + weight * flat
    indices, count = triton_kernels.accumulate(
        flat, residual, weight, torch.tensor(1.5), num_elements
    )
    np.testing.assert_array_equal(flat.numpy(), expected.numpy())
    found = np.flatnonzero(~(np.abs(expected.numpy()) < 1.5))
    assert count == len(found)
    np.testing.assert_array_equal(indices[: len(found)].numpy(), found)
    assert (indices[len(found) :] == num_elements).all()


def check_that_it_counts_beyond_its_room() -> None:
    from offbeat.codec import triton_kernels

    indices, count = triton_kernels.accumulate(
        torch.ones(3000), torch.zeros(3000), 1.0, torch.tensor(0.5), 100
    )
    assert count == 3000
    assert indices.numel() == 100


if __name__ == "__main__":
    for num_elements in (1, 2048, 5000):
        for weight in (1.0, 0.5):
            check_that_it_adds_up_and_finds_all_candidates(num_elements, weight)
    check_that_it_counts_beyond_its_room()
