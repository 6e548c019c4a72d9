"""How statistics are averaged beside training: floating-point buffers, such as BatchNorm's.

Parameters may be moved by differences (average + now - then), because every step adds to them. A
statistic may not: a running variance that fell from 100 to 1 while the average of 30 was on its way
would become -69. A statistic therefore always takes a plain mean of values that ranks have held, so
that it never leaves their range.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

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


def merge_sums(mine: Statistic, theirs: Statistic, before: Statistic) -> Statistic:
    """What two changes of a sum, such as a parameter, come to, element by element: both of them,
    theirs + (mine - before). An element that only one side has changed has that side's bits.

    Args:
        mine: what this rank holds.
        theirs: an average that contains `before`, of the same shape and type.
        before: what this rank held when it contributed to the average.

    >>> merge_sums(*map(np.array, ([1.0, 1.0, 4.0], [3.0, 1.0, 2.0], [1.0, 0.0, 9.0])))
    array([ 3.,  1., -3.])
    """
    where: Any = np.where if isinstance(mine, np.ndarray) else torch.where
    one: Any = mine
    two: Any = theirs
    both = two + (one - before)
    merged: Statistic = where(one == before, two, where(two == before, one, both))
    return merged
