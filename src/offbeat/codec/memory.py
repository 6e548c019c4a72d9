"""What the allocator does with memory that is freed."""

from __future__ import annotations

from functools import cache

import numpy as np

_KEPT_BYTES = 16 << 20


@cache
def keep_freed_memory() -> None:
    """Let the allocator keep what is freed, up to twice `_KEPT_BYTES`.

    glibc gives freed memory at the end of the heap back to the system at once, and fetches it anew
    with a fault for each 4 KiB: this took as long as merging sparse vectors itself, and as adding
    up models. It stops when one larger block has been freed (mallopt(3), M_MMAP_THRESHOLD); the
    block below is never touched, so it costs nothing. Other allocators are not affected.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)
