"""How good rankings of labels are: precision, nDCG and propensity-scored precision among the first
k, added up over batches.

With L the labels of a row and r_1, r_2, ... the labels it was given, best first:

    P@k    = |{j <= k: r_j in L}| / k
    nDCG@k = sum over those j of 1 / log2(j + 1), divided by what the best ranking gets, sum over j
    <= min(k, |L|) PSP@k  = sum over those j of 1 / p(r_j), summed over all rows and divided by what
    the best rankings get

where p is the chance that a label that is right was noticed (Jain et al. 2016,
https://doi.org/10.1145/2939672.2939756),

    p(l) = 1 / (1 + C (N_l + B)^-A),  C = (ln N - 1) (B + 1)^A

with N rows to train on, N_l of them with label l. Rows without labels count as 0 in P@k and nDCG@k.
Values of labels are not looked at, but for labels of value 0, which are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.xmc.rows import SparseRows


class PropensityConstants(NamedTuple):
    """A and B of the formula above, as fitted by the paper."""

    a: float = 0.55
    b: float = 1.5


PROPENSITY_CONSTANTS = {
    "amazon": PropensityConstants(a=0.6, b=2.6),
    "wikipedia": PropensityConstants(a=0.5, b=0.4),
    "other": PropensityConstants(),
}
"""By where the data come from."""


def propensities(
    train_labels: SparseRows, constants: PropensityConstants = PROPENSITY_CONSTANTS["other"]
) -> NDArray[np.float64]:
    """p of every label, shape (labels,), from the labels of the rows to train on."""
    num_rows = max(len(train_labels), 3)  # below e rows the formula leaves (0, 1]
    c = (np.log(num_rows) - 1) * (constants.b + 1) ** constants.a
    return np.asarray(1 / (1 + c * (train_labels.counts() + constants.b) ** -constants.a))


class RankingMetrics:
    """Sums over the rows seen so far.

    Args:
        ks: how far to look down the rankings, each at least 1.
        propensities: as of `propensities`; without them PSP@k is left out.
    """

    def __init__(
        self, ks: Sequence[int] = (1, 3, 5), *, propensities: NDArray[np.float64] | None = None
    ) -> None:
        if not ks or min(ks) < 1:
            raise ConfigError(
                f"rankings are looked at down to {tuple(ks)}; give numbers of at least 1"
            )
        self.num_rows = 0
        self._ks = tuple(ks)
        self._inverse = None if propensities is None else 1 / propensities
        self._hits = np.zeros(len(self._ks))
        self._gains = np.zeros(len(self._ks))
        self._rarity = np.zeros(len(self._ks))
        self._best_rarity = np.zeros(len(self._ks))

    def add(self, ranked: NDArray[np.int64], labels: SparseRows) -> None:
        """Count more rows.

        Args:
            ranked: labels given, best first, all of a row different; shape (rows, at least max(ks)
                or all labels).
            labels: of the same rows, all of a row different.

        Raises:
            ConfigError: the shapes do not fit.
        """
        wanted = min(max(self._ks), labels.num_columns)
        if ranked.shape[0] != len(labels) or ranked.ndim != 2 or ranked.shape[1] < wanted:
            raise ConfigError(
                f"rankings of shape {ranked.shape} were given; {len(labels)} rows of at least"
                f" {wanted} are needed"
            )
        ranked = ranked[:, :wanted].astype(np.int64)
        rows = np.repeat(np.arange(len(labels)), labels.lengths())[labels.values != 0]
        columns = labels.columns[labels.values != 0].astype(np.int64)
        hit = np.isin(
            ranked + np.arange(len(labels))[:, None] * labels.num_columns,
            rows * labels.num_columns + columns,
        )
        counts = np.bincount(rows, minlength=len(labels))
        self.num_rows += len(labels)
        discounts = 1 / np.log2(np.arange(wanted) + 2)
        best = np.concatenate([[0.0], np.cumsum(discounts)])
        for i, k in enumerate(self._ks):
            ideal = best[np.minimum(counts, min(k, wanted))]
            self._hits[i] += np.count_nonzero(hit[:, :k]) / k
            self._gains[i] += np.sum((hit[:, :k] @ discounts[:k])[counts > 0] / ideal[counts > 0])
        if self._inverse is not None:
            self._add_rarity(
                np.where(hit, self._inverse[ranked], 0.0), rows, self._inverse[columns]
            )

    def result(self) -> dict[str, float]:
        """Means in [0, 1] over all rows so far, by names such as "P@1", "nDCG@3", "PSP@5"; not a
        number without any row.
        """
        with np.errstate(invalid="ignore"):
            found = {
                "P": self._hits / np.float64(self.num_rows),
                "nDCG": self._gains / np.float64(self.num_rows),
            }
            if self._inverse is not None:
                found["PSP"] = self._rarity / self._best_rarity
        return {
            f"{name}@{k}": float(mean)
            for name, means in found.items()
            for k, mean in zip(self._ks, means, strict=True)
        }

    def _add_rarity(
        self, found: NDArray[np.float64], rows: NDArray[np.int64], inverse: NDArray[np.float64]
    ) -> None:
        order = np.lexsort((-inverse, rows))
        rows, inverse = rows[order], inverse[order]
        # In its row, the rarest label first.
        place = np.arange(rows.size) - np.searchsorted(rows, rows)
        for i, k in enumerate(self._ks):
            self._rarity[i] += found[:, :k].sum()
            self._best_rarity[i] += inverse[place < k].sum()
