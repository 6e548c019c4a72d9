"""How long entries wait before they are sent: counted on a sample of a bucket's elements.

An entry that waits brings the gradients of many steps at once, computed where the model was then.
So its age, the exchanges since the same entry was sent last, says how stale training is: about 1 /
density where all entries take turns. Exchanges of everything do not count: those of a warm-up, or
of small parameters, would hide how long entries wait in the others.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_SAMPLES: Final = 4096


class EntryAges:
    """Of one bucket of one rank. What was not sent at all yet does not count.

    Args:
        num_elements: of the bucket.
        num_samples: how many of them are watched, spread evenly.

    Attributes:
        num_sent: entries of the sample that were sent so far, each time counted.
        total_age: their ages, added up.
    """

    def __init__(self, num_elements: int, num_samples: int = NUM_SAMPLES) -> None:
        self.num_sent = self.total_age = 0
        # Evenly spread places with a common distance would meet the same columns of a layer, so
        # each lies somewhere in its part.
        parts = np.linspace(0, num_elements, min(num_samples, num_elements) + 1)
        draw = np.random.default_rng(0).random(parts.size - 1)
        self._watched = (parts[:-1] + draw * np.diff(parts)).astype(np.int64)
        self._sent_at = np.zeros(self._watched.size, dtype=np.int64)
        self._now = 0

    def after_exchange(self, indices: NDArray[np.int64] | None) -> None:
        """Entries at `indices`, ascending, were sent; None: all were, densely."""
        self._now += 1
        if indices is None:
            self._sent_at[:] = self._now
            return
        places = np.searchsorted(indices, self._watched)
        there = places < indices.size
        there[there] = indices[places[there]] == self._watched[there]
        hits = np.flatnonzero(there)
        self.num_sent += hits.size
        self.total_age += int((self._now - self._sent_at[hits]).sum())
        self._sent_at[hits] = self._now
