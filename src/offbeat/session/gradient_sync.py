"""Whether backward passes exchange what they have accumulated, under the names by which frameworks
ask a DistributedDataParallel model for that.

Accelerate, and with it the Trainer of transformers, looks for `no_sync` on the model where it
accumulates gradients; other loops set `require_backward_grad_sync`. Without these names they would
exchange in each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch

_FLAG: Final = "require_backward_grad_sync"
_CONTEXT: Final = "no_sync"


class GradientSync:
    """Puts `no_sync` and `require_backward_grad_sync` on `model`, and takes them off again.

    A name that the model has already, and that no session has left there, stays as it is.

    Args:
        model: the root module.
        notify: is told of such a name.
    """

    def __init__(self, model: torch.nn.Module, notify: Callable[[str], None]) -> None:
        self._model = model
        self._set: list[str] = []
        for name, value in ((_FLAG, True), (_CONTEXT, _NoSync(self))):
            own = getattr(model, name, None)
            if own is None or _is_of_a_copy(own) or isinstance(own, bool):
                setattr(model, name, value)
                self._set.append(name)
            else:
                notify(
                    f"the model has a {name!r} of its own, which this session leaves alone; where"
                    " gradients are accumulated, use session.no_sync()"
                )

    @property
    def wanted(self) -> bool:
        """Whether a backward pass that begins now is to exchange."""
        return bool(getattr(self._model, _FLAG, True))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally."""
        before = self.wanted
        self._write(wanted=False)
        try:
            yield
        finally:
            self._write(wanted=before)

    def remove(self) -> None:
        """Take the names off. Idempotent."""
        while self._set:
            delattr(self._model, self._set.pop())

    def _write(self, *, wanted: bool) -> None:
        if _FLAG in self._set:
            setattr(self._model, _FLAG, wanted)


class _NoSync:
    """What `model.no_sync` is. Copies of the model, and what is pickled of it, get a context that
    does nothing.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync

    def __call__(self) -> AbstractContextManager[None]:
        return self._sync.no_sync()

    def __deepcopy__(self, memo: object) -> Any:
        return partial(nullcontext)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object]]:
        return partial, (nullcontext,)


def _is_of_a_copy(value: object) -> bool:
    return isinstance(value, partial) and value.func is nullcontext
