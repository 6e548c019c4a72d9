"""Factors: how they are multiplied out, packed and averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from offbeat.kfac import convolution
from offbeat.kfac.callback import RunningFactor, damping_of, mean_eigenvalue, update_
from offbeat.kfac.convolution import Window, by_patches, by_shifts, patch_moment
from offbeat.kfac.factors import (
    FactorShape,
    cholesky_,
    diagonal_of,
    gram,
    num_packed,
    pack,
    sum_outer_products_,
    unpack,
)


@given(dim=st.integers(1, 90), groups=st.integers(1, 3))
def test_triangles_come_back_as_symmetric_matrices(dim: int, groups: int) -> None:
    matrices = torch.randn(groups, dim, dim, generator=torch.Generator().manual_seed(dim))
    packed = pack(matrices)
    assert packed.shape == (groups, num_packed(dim))
    expected = np.stack([matrix[np.triu_indices(dim)] for matrix in matrices.numpy()])
    np.testing.assert_array_equal(packed.numpy(), expected)
    upper = matrices.triu()
    assert torch.equal(
        unpack(packed, dim), upper + upper.mT - torch.diag_embed(matrices.diagonal(dim1=1, dim2=2))
    )
    found = diagonal_of(packed, FactorShape(groups=len(matrices), dim=dim))
    assert torch.equal(found, matrices.diagonal(dim1=1, dim2=2))
    assert torch.equal(pack(unpack(packed, dim)), packed)


# Decompositions and inverses in place, against numpy's.


def positive(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(
        num, 2 * dim, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
    )
    return (rows.mT @ rows / dim + 0.1 * torch.eye(dim)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num", "dim"), [(1, 1), (3, 2), (2, 33)])
def test_upper_triangles_are_those_of_u_or_of_inverses(
    num: int, dim: int, dtype: torch.dtype
) -> None:
    matrices = positive(num, dim, dtype)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-10
    triangles, inverses = matrices.clone(), matrices.clone()
    assert cholesky_(triangles, inverts=False).tolist() == [True] * num
    assert cholesky_(inverses, inverts=True).tolist() == [True] * num
    for matrix, triangle, inverse in zip(matrices, triangles, inverses, strict=True):
        upper = np.triu(triangle.numpy())
        np.testing.assert_allclose(upper.T @ upper, matrix.numpy(), atol=tolerance)
        np.testing.assert_allclose(
            np.triu(inverse.numpy()), np.triu(np.linalg.inv(matrix.numpy())), atol=tolerance
        )


@pytest.mark.parametrize("inverts", [False, True])
def test_one_that_is_not_positive_definite_does_not_hurt_the_others(inverts: bool) -> None:
    matrices = positive(3, 5, torch.float32)
    alone = matrices[2:].clone()
    matrices[1, 3, 3] = -1.0
    assert cholesky_(matrices, inverts=inverts).tolist() == [True, False, True]
    assert cholesky_(alone, inverts=inverts).tolist() == [True]
    assert torch.equal(matrices[2].triu(), alone[0].triu())


@pytest.mark.parametrize("layout", ["by rows", "by columns", "every second row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_outer_products_are_those_of_any_layout(dtype: torch.dtype, layout: str) -> None:
    whole = torch.randint(-3, 4, (2, 14, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = {
        "by rows": whole,
        "by columns": whole.mT.contiguous().mT,
        "every second row": whole[:, ::2],
    }[layout]
    squares = torch.full((2, 5, 5), 7.0, dtype=dtype)
    sum_outer_products_(squares, rows)
    assert torch.equal(squares.triu(), (rows.mT @ rows).triu())
    assert (squares.tril(-1) == torch.full((5, 5), 7.0, dtype=dtype).tril(-1)).all()


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = [pool["num_threads"] for pool in threadpool_info()]
    cholesky_(positive(1, 4, torch.float32), inverts=True)
    assert [pool["num_threads"] for pool in threadpool_info()] == before


# Two ways to one moment.


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
    assert torch.equal(by_shifts(images, window, ones=ones).triu(), expected)
    assert torch.equal(by_patches(images, window, ones=ones).triu(), expected)


@given(stride=pairs, taps=pairs)
def test_patches_may_lie_apart(stride: tuple[int, int], taps: tuple[int, int]) -> None:
    window = Window(taps=taps, stride=stride, before=(1, 0), after=(0, 1))
    images = torch.randint(-3, 4, (2, 2, 5, 5), generator=torch.Generator().manual_seed(1)).double()
    expected = slowly(images, window, True).triu()
    assert torch.equal(by_patches(images, window, ones=True).triu(), expected)


def test_shifts_are_precise_in_float32() -> None:
    images = torch.randn(8, 16, 16, 16, generator=torch.Generator().manual_seed(0)).relu()
    window = Window(taps=(3, 3), before=(1, 1), after=(1, 1))
    exact = by_patches(images.double(), window).triu()
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
    noting("by_patches")
    images = torch.randn(2, 3, size, size)
    moment, num_patches = patch_moment(images, window, ones=True)
    assert ways == ["by_shifts" if shifted else "by_patches"]
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
    ways = by_shifts, by_patches
    whole = [way(images, window, groups=2, ones=True).triu() for way in ways]
    monkeypatch.setattr(convolution, "MAX_SUMMED", 80)
    monkeypatch.setattr(convolution, "MAX_LAID_OUT_ON_HOST", 2 * 4 * 9 * 36)
    pieces = [way(images, window, groups=2, ones=True).triu() for way in ways]
    assert all(torch.equal(piece, whole[0]) for piece in (*pieces, *whole))


# Averages over steps, free of damping.


SHAPE = FactorShape(groups=2, dim=3)


def running() -> RunningFactor:
    zeros = torch.zeros(SHAPE.packed, dtype=torch.float64)
    return RunningFactor(zeros, zeros.new_zeros(()))


def increment(seed: int) -> torch.Tensor:
    return torch.rand(
        SHAPE.packed, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@given(
    st.lists(st.tuples(*[st.sampled_from(["good", "nan", "inf", "nobody"])] * 3), max_size=8),
    st.floats(0, 0.99),
)
def test_averages_are_the_weighted_means_of_what_was_good(
    steps: list[tuple[str, ...]], decay: float
) -> None:
    factors = [running() for _ in range(3)]
    good: list[list[torch.Tensor]] = [[] for _ in factors]
    for seed, kinds in enumerate(steps):
        new = [increment(3 * seed + place) for place in range(3)]
        for each, kind, seen in zip(new, kinds, good, strict=True):
            if kind in ("nan", "inf"):
                each[0, 2] = float(kind)
            if kind == "good":
                seen.append(each.clone())
        weights = torch.tensor([0.0 if kind == "nobody" else 5.0 for kind in kinds])
        update_(factors, new, weights, decay=decay)
    for factor, seen in zip(factors, good, strict=True):
        shares = [(1 - decay) * decay ** (len(seen) - 1 - place) for place in range(len(seen))]
        expected = sum(
            (w * each for w, each in zip(shares, seen, strict=True)), torch.zeros(SHAPE.packed)
        )
        if seen:
            torch.testing.assert_close(factor.average(), expected / sum(shares))
        else:
            assert factor.mass == 0
            assert not factor.average().any()


def test_packed_state_is_at_most_half_of_the_square_and_a_bit() -> None:
    shape = FactorShape(groups=4, dim=100)
    assert shape.num_elements == 4 * 100 * 101 / 2
    assert FactorShape(groups=1, dim=100, is_diagonal=True).num_elements == 100


def test_damping_is_shared_in_proportion_to_the_factors() -> None:
    a, g = torch.tensor(9.0), torch.tensor(0.25)
    plain = damping_of(a, g, damping=0.04, pi=False)
    assert [float(value) for value in plain] == pytest.approx([0.04, 0.04])
    shared = damping_of(a, g, damping=0.04, pi=True)
    assert float(shared[0] * shared[1]) == pytest.approx(0.04)
    assert float(shared[0] / shared[1]) == pytest.approx(9 / 0.25)


def test_the_released_scaling_of_convolutions_matters_without_pi_alone() -> None:
    """SPD-KFAC's code has A / S and G S for our A and G: how much of each is damping?"""
    a, g, positions = torch.tensor(9.0), torch.tensor(0.25), 64
    for pi, times in ((True, 1), (False, positions)):
        ours = damping_of(a, g, damping=0.04, pi=pi)
        released = damping_of(a / positions, g * positions, damping=0.04, pi=pi)
        assert float(released[0] / (a / positions)) == pytest.approx(float(times * ours[0] / a))
        assert float(released[1] / (g * positions)) == pytest.approx(float(ours[1] / g / times))


def test_without_a_trace_nothing_is_shared() -> None:
    for pair in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        a, g = map(torch.tensor, pair)
        found = [float(value) for value in damping_of(a, g, damping=0.09, pi=True)]
        assert found == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize(
    ("matrices", "shape"),
    [
        (9 * torch.eye(4)[None], FactorShape(groups=1, dim=4)),
        (
            torch.diag_embed(torch.tensor([[9.0, 9.0], [9.0, 0.0]])),
            FactorShape(groups=2, dim=2, padding=1),
        ),
    ],
)
def test_rows_that_stand_for_nothing_have_no_eigenvalues(
    matrices: torch.Tensor, shape: FactorShape
) -> None:
    assert float(mean_eigenvalue(pack(matrices), shape)) == 9
