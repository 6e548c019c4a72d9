"""Hooks that stay behind when a module is copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch


class ModuleHook:
    """A forward hook, or forward pre-hook, that belongs to one module alone.

    A copy of the module, and what `torch.save` writes of it, get a hook that does nothing in its
    place. That one is made of the standard library, so that a saved module can be loaded where
    offbeat is not installed. `torch.compile` does not look into the hook.

    Args:
        module: the only module for which `function` is called.
        function: is called with what the hook gets.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., None]) -> None:
        # A number and not the module, which would keep itself alive by its own hook.
        self._number = id(module)
        self._function = function
        _hide_from_compiler()

    def __call__(self, module: torch.nn.Module, *rest: Any) -> None:
        if id(module) == self._number:
            self._function(module, *rest)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # The method takes any arguments and returns None, as a hook does that changes nothing.
        return getattr, (nullcontext(), "__exit__")


@cache
def _hide_from_compiler() -> None:
    # No decorator: this imports the compiler, for nearly 2 s. Only a process that makes a hook
    # needs it, and that one has an optimizer, which has imported it already.
    ModuleHook.__call__ = torch.compiler.disable(  # type: ignore[method-assign]
        ModuleHook.__call__
    )
