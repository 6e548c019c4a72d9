"""The mean of all ranks' models, in the place of a rank's own where a script evaluates and saves.

Where a strategy averages weights the ranks' models differ between steps, and the mean is what they
stand for. But scripts evaluate and save as they like, often on one rank alone, so nothing may be
collective there:

    model.eval()            the mean is put into the parameters
    model.state_dict()      returns the mean; so does that of a part of the model
    model.train(), a forward pass with gradients, optimizer.step()
                            this rank's own weights are put back
    model.load_state_dict() what is loaded counts as the mean from then on; after the last step, as
                            where the best model is loaded at the end, the session ends with it

Where the mean comes from:

- strategies whose ranks average alone, such as WAGMA, are asked for it when it is needed;
- with LocalSGD all ranks hold the same after each average, which is kept;
- with the others all ranks average for it every `MEAN_EVERY` steps, together, and in the first of
  these after 1, 2, 4, ... steps: else a short run would save one rank's model.

So what is evaluated and saved is up to one period, or `MEAN_EVERY` steps, old.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final

import torch

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import OffbeatError
from offbeat.session.metrics import SessionObserver
from offbeat.session.session import Session
from offbeat.session.sharded import reshard_modules

MEAN_EVERY: Final = 50
"""Steps between two means, where they cost an exchange of their own: 2% of the bytes of a strategy
that sends the weights in each step.
"""

LOGGER = logging.getLogger("offbeat")


class EvaluationWeights(SessionObserver):
    """The mean for one attached model.

    Args:
        session: at work on it.
        model: the attached module.
        optimizer: that steps it.
    """

    def __init__(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._session = session
        self._model = model
        self._mean: dict[str, torch.Tensor] | None = None
        self._own: dict[str, torch.Tensor] | None = None
        self._loaded_since_step: dict[str, torch.Tensor] | None = None
        self._num_steps = 0
        self._rest = ExitStack()
        self._handles: list[Any] = [
            model.register_load_state_dict_post_hook(ModuleHook(model, self._loaded)),
            optimizer.register_step_pre_hook(lambda *_: self.training_goes_on()),
        ]
        for module in model.modules():
            hook = ModuleHook(module, self._state_dict_made)
            self._handles.append(module.register_state_dict_post_hook(hook))
        session.observers.append(self)

    def step_ended(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._loaded_since_step = None
        session = self._session
        if session.averages_alone or not session.acting.replicas_differ:
            self._mean = None
        elif session.replicas_agree:
            self._mean = self._copies()
        elif not num_steps % MEAN_EVERY or (num_steps < MEAN_EVERY and num_steps.bit_count() == 1):
            self._mean = session.averaged_tensors()

    def mode_changed(self, *, training: bool) -> None:
        """The module was put into training mode, or out of it."""
        if training:
            self.training_goes_on()
        elif self._own is None:
            if (mean := self._newest_mean()) is not None:
                self._own = self._copies()
                self._write(mean)
            self._rest.enter_context(self._session.resting())

    def training_goes_on(self) -> None:
        """Put this rank's own weights back, if the mean is in their place."""
        if self._own is not None:
            self._write(self._own)
            self._own = None
        self._rest.close()

    def take_mean(self) -> None:
        """Put the mean of all ranks' models into the parameters, for good: the session is about to
        end, and the script goes on. Collective.
        """
        self.training_goes_on()
        try:
            if self._session.averages_alone:
                self._session.finish()
            self._write(self._session.averaged_tensors())
        except OffbeatError as error:
            LOGGER.warning("this rank keeps its own weights: %s", error)

    def close(self) -> None:
        """Take hooks out. A model that is not in training mode stays the mean."""
        for handle in self._handles:
            handle.remove()
        if self in self._session.observers:
            self._session.observers.remove(self)
        self._rest.close()

    def session_ended(self) -> None:
        """The session has ended well, and may have put an average into the model."""
        if self._loaded_since_step is not None:
            self._write(self._loaded_since_step)

    def _newest_mean(self) -> dict[str, torch.Tensor] | None:
        """None where nothing is known of a mean: then this rank's own weights have to do."""
        if self._mean is None and self._session.averages_alone and self._num_steps:
            try:
                with self._session.resting():
                    self._mean = self._session.averaged_tensors()
            except OffbeatError as error:
                LOGGER.warning("this rank evaluates, or saves, its own weights: %s", error)
        return self._mean

    def _state_dict_made(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        if self._own is not None or (prefix and module is not self._model):
            return  # the parameters hold the mean already, or the module around is asked
        names = {id(tensor): name for name, tensor in self._session.tensors().items()}
        # What is tied has one name in the mean, and several in what is saved.
        tensors = {
            prefix + name: tensor
            for name, tensor in chain(
                module.named_parameters(remove_duplicate=False),
                module.named_buffers(remove_duplicate=False),
            )
            if id(tensor) in names and prefix + name in state
        }
        # With keep_vars the parameters themselves are asked for, as the session does.
        if any(state[key] is tensor for key, tensor in tensors.items()):
            return
        if tensors and (mean := self._newest_mean()) is not None:
            copies = {number: mean[names[number]].clone() for number in map(id, tensors.values())}
            state |= {key: copies[id(tensor)] for key, tensor in tensors.items()}

    def _loaded(self, *_: Any) -> None:
        self._own = None
        self._mean = self._loaded_since_step = self._copies()

    def _copies(self) -> dict[str, torch.Tensor]:
        tensors = self._session.tensors().items()
        return {name: tensor.detach().clone() for name, tensor in tensors}

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self._session.tensors().items():
            tensor.copy_(values[name])
        reshard_modules(self._model)
