"""What a rank says of its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.codec.tally import is_finite


@pytest.mark.parametrize(
    ("dtype", "large"),
    [
        (torch.float16, 6e4),
        (torch.bfloat16, 3e38),
        (torch.float32, 3e38),
        (torch.float64, 1e308),
        (torch.complex64, 3e38),
    ],
)
def test_what_is_not_finite_is_found_and_what_only_sums_to_infinity_is_not(
    dtype: torch.dtype, large: float
) -> None:
    for bad in ({7: math.inf}, {7: math.inf, 8: -math.inf}, {8: math.nan}):
        numbers = torch.full((1000,), large, dtype=dtype)
        assert is_finite(numbers)
        for place, value in bad.items():
            numbers[place] = value
        assert not is_finite(numbers)
