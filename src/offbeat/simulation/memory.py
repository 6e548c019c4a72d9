"""How much memory callbacks hold, from the tensors that they keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from types import ModuleType
from typing import Any

import torch

from offbeat.transport.driver import Driver


def kept_bytes(owners: Iterable[object], *, besides: Iterable[torch.Tensor]) -> int:
    """Memory of the tensors that `owners`, and the objects in their attributes, hold.

    Args:
        owners: where to begin.
        besides: tensors whose memory does not count.
    """
    storages = {id(one): one for one in (tensor.untyped_storage() for tensor in besides)}
    num_others = sum(one.nbytes() for one in storages.values())
    waiting, seen = list(owners), dict[int, object]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner  # so that no other object gets its identifier
        if isinstance(owner, torch.Tensor):
            storage = owner.untyped_storage()
            storages[id(storage)] = storage
        else:
            waiting.extend(_parts(owner))
    return sum(one.nbytes() for one in storages.values()) - num_others


def _parts(owner: Any) -> Iterator[object]:
    if isinstance(owner, Mapping):
        yield from owner.values()
    elif isinstance(owner, list | tuple | deque | Set):
        yield from owner
    elif not isinstance(owner, Driver | ModuleType | type):
        yield from getattr(owner, "__dict__", {}).values()
        slots = (name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(owner, name, None) for name in slots)
