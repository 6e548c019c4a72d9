"""Whether a matrix of which few rows have changed is merged whole, or by those rows alone."""

from __future__ import annotations

from collections.abc import Sequence

INDEX_BYTES = 4


def index_bytes(num_touched: int, num_rows: int) -> int:
    """What it takes to say which rows: a list of numbers, or a bit for each row.

    >>> index_bytes(10, 1000), index_bytes(900, 1000)
    (40, 125)
    """
    return min(INDEX_BYTES * num_touched, -(-num_rows // 8))


def packs(touched: Sequence[int], *, num_rows: int, row_bytes: int) -> bool:
    """Whether to exchange lists of touched rows, and then those rows: 2(P-1)/P of the values, and
    P-1 lists.

    The union has at least as many rows as the longest list; how many it has, nobody knows before
    the lists have been exchanged. It never has more than all, so what can be lost is the lists.

    Args:
        touched: of each rank, how many rows it has changed.
        num_rows: of the matrix.
        row_bytes: of a row.

    >>> packs([2_000, 3_000], num_rows=135_909, row_bytes=512)
    True
    >>> packs([135_909, 3_000], num_rows=135_909, row_bytes=512)
    False
    >>> packs([10], num_rows=1000, row_bytes=512)
    False
    """
    num_ranks = len(touched)
    hops = num_ranks - 1
    lists = hops * max(index_bytes(count, num_rows) for count in touched)
    return (
        2 * hops / num_ranks * max(touched) * row_bytes + lists
        < 2 * hops / num_ranks * num_rows * row_bytes
    )
