"""Strategies that find in their context what a test wants there, whoever attaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.strategies.base import Strategy

S = TypeVar("S", bound=Strategy)


def lent(strategy: S, **changes: float) -> S:
    """`strategy`, as if it were attached with `changes`."""
    of: Any = type(strategy)
    everything = {**getattr(of, "changes", {}), **changes}
    kind = _lent(getattr(of, "base", of), tuple(sorted(everything.items())))
    return kind(**{field.name: getattr(strategy, field.name) for field in fields(strategy)})


def lent_from(strategy: Strategy) -> type[Strategy]:
    """The class of a strategy, or of the one that was made it by `lent`."""
    base: type[Strategy] = getattr(strategy, "base", type(strategy))
    return base


@cache
def _lent(kind: Any, changes: tuple[tuple[str, float], ...]) -> Any:
    named = dict(changes)

    class Lent(kind):
        base: ClassVar[Any] = kind
        changes: ClassVar[dict[str, float]] = named

        @property
        def made_by(self) -> tuple[Any, dict[str, Any]]:
            options = {field.name: getattr(self, field.name) for field in fields(self)}
            return lent, {"strategy": kind(**options), **named}

        def build(self, context: Context) -> Sequence[Callback]:
            built: Sequence[Callback] = super().build(replace(context, **named))
            return built

        def build_exchange(self, context: Context, **given: Any) -> Any:
            return super().build_exchange(replace(context, **named), **given)

    Lent.__name__, Lent.__qualname__ = kind.__name__, kind.__qualname__
    return Lent
