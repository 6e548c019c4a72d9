"""Two ways to one moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.kfac import convolution
from offbeat.kfac.convolution import Window, by_rows, by_shifts, patch_moment
from offbeat.kfac.factors import gram


def slowly(images: torch.Tensor, window: Window, ones: bool) -> torch.Tensor:
    """One patch, one tap at a time."""
    num_images, channels, height, width = images.shape
    rows, columns = window.positions((height, width))
    total = torch.zeros(
        1, *[window.taps[0] * window.taps[1] * channels + ones] * 2, dtype=images.dtype
    )
    for n in range(num_images):
        for y in range(rows):
            for x in range(columns):
                patch = []
                for i in range(window.taps[0]):
                    for j in range(window.taps[1]):
                        u = y * window.stride[0] + i * window.dilation[0] - window.before[0]
                        v = x * window.stride[1] + j * window.dilation[1] - window.before[1]
                        inside = 0 <= u < height and 0 <= v < width
                        patch.append(
                            images[n, :, u, v]
                            if inside
                            else torch.zeros(channels, dtype=images.dtype)
                        )
                row = torch.cat([*patch, torch.ones(int(ones), dtype=images.dtype)])
                total[0] += torch.outer(row, row)
    return total


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))


@given(
    taps=pairs,
    dilation=pairs,
    size=sizes,
    ones=st.booleans(),
    data=st.data(),
    channels=st.integers(1, 2),
)
def test_shifts_equal_patches_equal_the_definition(
    taps: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
    ones: bool,
    data: st.DataObject,
    channels: int,
) -> None:
    reach = (taps[0] - 1) * dilation[0], (taps[1] - 1) * dilation[1]
    side = st.tuples(st.integers(0, reach[0]), st.integers(0, reach[1]))
    window = Window(taps=taps, dilation=dilation, before=data.draw(side), after=data.draw(side))
    if 0 in window.positions(size) or any(
        size[a] + window.before[a] + window.after[a] <= reach[a] for a in (0, 1)
    ):
        return
    images = torch.randint(
        -3, 4, (2, channels, *size), generator=torch.Generator().manual_seed(1)
    ).double()
    expected = slowly(images, window, ones).triu()
    assert torch.equal(by_rows(images, window, ones=ones).triu(), expected)
    assert torch.equal(by_shifts(images, window, ones=ones).triu(), expected)


@given(stride=pairs, taps=pairs)
def test_patches_may_lie_apart(stride: tuple[int, int], taps: tuple[int, int]) -> None:
    window = Window(taps=taps, stride=stride, before=(1, 0), after=(0, 1))
    images = torch.randint(-3, 4, (2, 2, 5, 5), generator=torch.Generator().manual_seed(1)).double()
    assert torch.equal(
        by_rows(images, window, ones=True).triu(), slowly(images, window, True).triu()
    )


def test_shifts_are_precise_in_float32() -> None:
    images = torch.randn(8, 16, 16, 16, generator=torch.Generator().manual_seed(0)).relu()
    window = Window(taps=(3, 3), before=(1, 1), after=(1, 1))
    exact = by_rows(images.double(), window).triu()
    error = (by_shifts(images, window).triu() - exact).norm() / exact.norm()
    assert error < 1e-6


@pytest.mark.parametrize(
    ("size", "window", "shifted"),
    [
        (16, Window(taps=(3, 3), before=(1, 1), after=(1, 1)), True),
        (1, Window(taps=(3, 3), before=(1, 1), after=(1, 1)), False),
        (16, Window(taps=(3, 3), stride=(2, 2)), False),
        (16, Window(taps=(1, 1)), False),
        (16, Window(taps=(3, 3), before=(3, 3), after=(3, 3)), False),
    ],
)
def test_the_cheaper_way_is_taken(
    size: int, window: Window, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []

    def noting(name: str) -> None:
        original = getattr(convolution, name)

        def way(*args: Any, **kwargs: Any) -> torch.Tensor:
            ways.append(name)
            result: torch.Tensor = original(*args, **kwargs)
            return result

        monkeypatch.setattr(convolution, name, way)

    noting("by_shifts")
    noting("by_rows")
    images = torch.randn(2, 3, size, size)
    moment, num_patches = patch_moment(images, window, ones=True)
    assert ways == ["by_shifts" if shifted else "by_rows"]
    assert moment[0, -1, -1] == num_patches


@given(st.integers(1, 500), st.booleans(), st.integers(1, 2))
def test_grams_are_symmetric_products(dim: int, ones: bool, groups: int) -> None:
    rows = torch.randint(
        -3, 4, (groups, 7, dim), generator=torch.Generator().manual_seed(dim)
    ).float()
    whole = torch.cat([rows, torch.ones(groups, 7, int(ones))], dim=2)
    assert torch.equal(gram(rows, ones=ones).triu(), (whole.mT @ whole).triu())


def test_long_sums_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(-3, 4, (5, 4, 6, 6), generator=torch.Generator().manual_seed(0)).double()
    window = Window(taps=(3, 3), before=(1, 1), after=(1, 1))
    whole = [way(images, window, groups=2, ones=True).triu() for way in (by_rows, by_shifts)]
    monkeypatch.setattr(convolution, "MAX_SUMMED", 80)
    pieces = [way(images, window, groups=2, ones=True).triu() for way in (by_rows, by_shifts)]
    assert all(torch.equal(piece, whole[0]) for piece in (*pieces, whole[1]))
