"""When parameters are needed: just before a module of the model computes with them, and when they
are saved, loaded or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.torch_private import is_compiled_module


class NeededParameters:
    """Hooks on each module of a model, which tell what it is about to compute with.

    Some modules are never called, because the one around them computes with their parameters, as
    MultiheadAttention does. The first forward pass shows which: what they have is needed when the
    closest module around them is called. Until that pass is over everything is needed at once.

    Args:
        model: the root module.
        parameters: the trainable ones by name, in the model's order.
        tell: is called with positions in that order.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        tell: Callable[[Sequence[int]], None],
    ) -> None:
        numbers = {id(parameter): index for index, parameter in enumerate(parameters.values())}
        self._tell, self._all = tell, range(len(parameters))
        self._own = {
            name: [numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers]
            for name, module in model.named_modules()
        }
        self._called: set[str] = set()
        self._of_module: dict[str, list[int]] | None = None
        # Hooks in a compiled module would divide its graph.
        is_compiled = is_compiled_module(model)
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if not is_compiled or not name:
                before = ModuleHook(module, partial(self._called_with, name))
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            if self._own[name]:
                everything = ModuleHook(module, self.tell_all)
                self._handles += [
                    module.register_state_dict_pre_hook(everything),
                    module.register_load_state_dict_pre_hook(everything),
                ]

    def tell_all(self, *_: Any) -> None:
        """Everything is needed."""
        self._tell(self._all)

    def _called_with(self, name: str, *_: Any) -> None:
        if name == "" and self._called:
            self._of_module = self._of_module or self._by_module()
        if self._of_module is None or name not in self._called or not torch.is_grad_enabled():
            self._called.add(name)
            self.tell_all()
        elif needed := self._of_module[name]:
            self._tell(needed)

    def _by_module(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in self._own}
        for name, own in self._own.items():
            while name and name not in self._called:
                name = name.rpartition(".")[0]
            found[name] += own
        return found

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
