"""What the ranks of `test_old_checkpoints.py` do. Each function returns JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from golden.write_checkpoints import (
    FAMILIES,
    HERE,
    SAVED_AT,
    STEPS_MORE,
    begin,
    parameters_of,
    train,
)
from offbeat.session.checkpoint import latest, read_shard


def read(family: str, rank: int, root: Path = HERE) -> dict[str, Any]:
    """A rank's tree: model, optimizer, session."""
    tree = read_shard(latest(root / family), rank)
    assert isinstance(tree, dict)
    return tree


def same(left: Any, right: Any) -> bool:
    """Whether two values of a state are equal; a tensor and an array are if their entries are."""
    if isinstance(left, torch.Tensor | np.ndarray) and isinstance(right, torch.Tensor | np.ndarray):
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        return left.dtype == right.dtype and bool(torch.equal(left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


REUSES_THRESHOLDS = ("topk",)
"""Families that select by the threshold of the step before. All others wrote one and never read
it.
"""


def lost(before: dict[str, Any], after: dict[str, Any], *, family: str) -> list[str]:
    """The parts of `before` whose state no part of `after` has, whatever parts are called."""
    unread = () if family in REUSES_THRESHOLDS else ("threshold/",)
    left = [plain(part) for part in after["parts"].values()]
    missing = []
    for name, part in before["parts"].items():
        wanted = plain(part, unread)
        owned = OWNED if family == "dpkfac" else {}
        found = next((index for index, other in enumerate(left) if has(other, wanted, owned)), None)
        if found is None:
            missing.append(name)
        else:
            left.pop(found)
    return missing


def has(part: dict[str, Any], wanted: dict[str, Any], renamed: dict[str, str]) -> bool:
    """Whether a part's state has all that is wanted; today's parts may have kinds of state more,
    and some kinds have other names.
    """
    return all(
        any(same(entries, part[today]) for today in (kind, renamed.get(kind)) if today in part)
        for kind, entries in wanted.items()
    )


OWNED = {"local": "owned"}
"""What was a rank's own of K-FAC's factors is what it owns for all."""


RENAMED = {"momentum/": "outer/SGD/momentum_buffer/"}
"""What entries of a part's state began with, and what they begin with now."""


def plain(part: dict[str, Any], unread: tuple[str, ...] = ()) -> dict[str, Any]:
    """With today's names of entries, and without kinds of state that are empty."""
    kinds = {
        kind: {today(name): value for name, value in entries.items() if not name.startswith(unread)}
        for kind, entries in part.items()
    }
    return {kind: entries for kind, entries in kinds.items() if entries}


def today(name: str) -> str:
    old = next((old for old in RENAMED if name.startswith(old)), None)
    return name if old is None else RENAMED[old] + name.removeprefix(old)


def resumed(rank: int, world_size: int, *, family: str) -> dict[str, Any]:
    """Loaded into nets of other weights: what is lost, and where do further steps end?"""
    how, tree = FAMILIES[family], read(family, rank)
    net, optimizer, session, loader = begin(how, seed=7 + rank)
    with session:
        for target, name in ((net, "model"), (optimizer, "optimizer"), (session, "session")):
            target.load_state_dict(tree[name])
        missing = lost(tree["session"], session.state_dict(), family=family)
        # A peer that trained already would average in the background, and change this state.
        dist.barrier()
        num_steps = STEPS_MORE if how.repeats else 1
        seen = train(
            net,
            optimizer,
            None if loader is None else iter(loader),
            rank=rank,
            begin=SAVED_AT,
            num_steps=num_steps if loader is None else None,
        )
        parameters = parameters_of(net)
        session.finish()
        return {
            "lost": missing,
            "parameters": parameters,
            "seen": seen,
            "averaged": parameters_of(session.averaged_model()),
        }
