"""How statistics are averaged beside training: floating-point buffers, such as BatchNorm's.

Parameters may be moved by differences (average + now - then), because every step adds to them. A
statistic may not: a running variance that fell from 100 to 1 while the average of 30 was on its way
would become -69. A statistic therefore always takes a plain mean of values that ranks have held, so
that it never leaves their range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.jit import kernel

Statistic = TypeVar("Statistic", torch.Tensor, NDArray[np.floating])


def merge_statistics(mine: Statistic, theirs: Statistic, before: Statistic) -> Statistic:
    """What two changes of a statistic come to, element by element.

    An element that only one side has changed has that side's value. One that both have changed has
    the mean of the two, so that neither this rank's batches nor those of its peers are lost.

    Args:
        mine: what this rank holds.
        theirs: an average that contains `before`, of the same shape and type.
        before: what this rank held when it contributed to the average.

    >>> merge_statistics(*map(np.array, ([1.0, 1.0, 4.0], [3.0, 1.0, 2.0], [1.0, 0.0, 9.0])))
    array([3., 1., 3.])
    """
    where: Any = np.where if isinstance(mine, np.ndarray) else torch.where
    one: Any = mine
    two: Any = theirs
    merged: Statistic = where(one == before, two, where(two == before, one, (one + two) / 2))
    return merged


def merge_sums_(mine: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> None:
    """Write into `mine` what two changes of a sum, such as a parameter, come to, element by
    element: both of them, theirs + (mine - before). An element that only one side has changed has
    that side's bits. In main memory it is one pass, without the interpreter's lock.

    Args:
        mine: what this rank holds.
        theirs: an average that contains `before`, of the same shape, in float32 or wider.
        before: what this rank held when it contributed to the average.

    >>> mine = torch.tensor([1.0, 1.0, 4.0])
    >>> merge_sums_(mine, torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 9.0]))
    >>> mine
    tensor([ 3.,  2., -3.])
    """
    tensors = (mine, theirs, before)
    if all(_is_plain(tensor) and tensor.dtype == theirs.dtype for tensor in tensors):
        _merge_sums(*(tensor.detach().reshape(-1).numpy() for tensor in tensors))
        return
    one, past = mine.detach().to(theirs.dtype), before.to(theirs.dtype)
    merged = torch.where(theirs == past, one, theirs + (one - past))
    mine.detach().copy_(torch.where(one == past, theirs, merged))


def merge_running_average_(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    before: torch.Tensor,
    *,
    kept: float,
    only_grows: bool = False,
) -> None:
    """Write into `mine` what it would be if it had begun with `theirs` in the place of `before`. If
    nothing of it has changed, it is `theirs`: a parameter without a gradient is not stepped.

    Args:
        mine: what this rank holds: a part of `before`, and what it has added since.
        theirs: an average that contains `before`, of the same shape, in float32 or wider.
        before: what this rank held when it contributed to the average.
        kept: the part of `before` that steps have left, in [0, 1].
        only_grows: whether nothing negative is ever added, such as to an average of squares.

    >>> mine = torch.tensor([1.0, 5.0])
    >>> merge_running_average_(mine, torch.tensor([4.0, 4.0]), torch.tensor([2.0, 2.0]), kept=0.5)
    >>> mine
    tensor([2., 6.])
    """
    one, past = mine.detach().to(theirs.dtype), before.to(theirs.dtype)
    added = one - kept * past
    if only_grows:
        added.clamp_(min=0)  # Rounding may have made it less.
    stepped = added.add_(theirs, alpha=kept)
    # Decided on the device, for which the host does not wait.
    mine.detach().copy_(torch.where((one == past).all(), theirs, stepped))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.is_contiguous()
    )


def warm(dtypes: Iterable[torch.dtype]) -> None:
    """Compile the kernel for tensors of these types, or load it from numba's cache on disk."""
    for dtype in set(dtypes):
        merge_sums_(
            torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)
        )


@kernel
def _merge_sums(
    mine: NDArray[np.floating], theirs: NDArray[np.floating], before: NDArray[np.floating]
) -> None:
    for i in range(mine.size):
        both = theirs[i] + (mine[i] - before[i])
        changed = mine[i] if theirs[i] == before[i] else both
        mine[i] = theirs[i] if mine[i] == before[i] else changed
