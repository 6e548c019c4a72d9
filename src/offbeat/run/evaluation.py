"""The mean of all ranks' models, in the place of a rank's own where a script evaluates and saves.

Where a strategy averages weights the ranks' models differ between steps, and the mean is what they
stand for. But scripts evaluate and save as they like, often on one rank alone, so nothing may be
collective there:

    model.eval()            the mean is put into the parameters
    model.state_dict()      returns the mean; so does that of a part of the model
    model.train(), a forward pass with gradients, optimizer.step()
                            this rank's own weights are put back
    DDP(model)              of a model that is wrapped anew: the mean stays, in the place of what
                            rank 0 has alone, which DDP would write into all ranks
    model.load_state_dict() what is loaded counts as the mean from then on; after the last step, as
                            where the best model is loaded at the end, the session ends with it
    parameter.copy_()       what the script puts into the parameters between two steps, such as a
                            moving average of them, is evaluated and saved in the place of the mean,
                            unless it writes there after every step; what it puts over the mean
                            stays there

Where the mean comes from:

- strategies whose ranks average alone, such as WAGMA, are asked for it when it is needed;
- with LocalSGD all ranks hold the same after each average, which is kept;
- with the others all ranks average for it every `MEAN_EVERY` steps, together, and in the first of
  these after 1, 2, 4, ... steps: else a short run would save one rank's model.

So what is evaluated and saved is up to one period, or `MEAN_EVERY` steps, old.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from typing_extensions import override

from offbeat.callbacks.context import LOGGER
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import OffbeatError
from offbeat.session.metrics import SessionObserver
from offbeat.session.session import Session
from offbeat.session.sharded import reshard_modules
from offbeat.weights.shard import local_of

MEAN_EVERY: Final = 50
"""Steps between two means, where they cost an exchange of their own: 2% of the bytes of a strategy
that sends the weights in each step.
"""

_NUM_SAMPLED: Final = 8
"""Of how many parameters a few elements are looked at after each step."""


_OVER_MEAN: Final = (
    "the script has written into the parameters while they held the mean of all ranks' models: this"
    " rank trains on from that, and its own steps since the last average are gone. What writes"
    " there for an evaluation, such as optimizer.eval() or a moving average, is to do so before"
    " model.eval(), and to undo it after model.train()"
)


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
        self._comes_together = False  # by itself, so that no mean need be made for evaluations
        # This rank's own weights, and the mean that is in their place.
        self._own: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
        trained = [p for p in model.parameters() if p.requires_grad and local_of(p).numel()]
        self._sampled = trained[:: max(1, len(trained) // _NUM_SAMPLED)]
        # What the last step has left, and what the one before had left and the last one has found.
        self._left: list[torch.Tensor] = []
        self._between: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._has_told_of_writing = self._has_told_of_loss = False
        self._loaded_since_step: dict[str, torch.Tensor] | None = None
        self._num_steps = 0
        self._rest = ExitStack()
        self._handles: list[Any] = [
            model.register_load_state_dict_post_hook(ModuleHook(model, self._loaded)),
            optimizer.register_step_pre_hook(self._step_begins),
        ]
        for module in model.modules():
            hook = ModuleHook(module, self._state_dict_made)
            self._handles.append(module.register_state_dict_post_hook(hook))
        session.observers.append(self)

    @override
    def step_ended(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._loaded_since_step = None
        self._left = self._sample()
        session = self._session
        if session.averages_alone or not session.acting.replicas_differ:
            self._mean, self._comes_together = None, False
        elif session.replicas_agree:
            self._mean, self._comes_together = self._copies(), True
        elif not self._comes_together and (
            not num_steps % MEAN_EVERY or (num_steps < MEAN_EVERY and num_steps.bit_count() == 1)
        ):
            self._mean = session.averaged_tensors()

    def mode_changed(self, *, training: bool) -> None:
        """The module was put into training mode, or out of it."""
        if training:
            self.training_goes_on()
        elif self._own is None:
            if (mean := self._newest_mean()) is not None:
                self._own = self._copies(), mean
                self._write(mean)
            self._rest.enter_context(self._session.resting())

    def training_goes_on(self) -> None:
        """Put this rank's own weights back where the mean is in their place."""
        if self._own is not None:
            own, mean = self._own
            if not (self._write(own, over=mean) or self._has_told_of_loss):
                self._has_told_of_loss = True
                LOGGER.warning("%s", _OVER_MEAN)
            self._own = None
        self._rest.close()

    def take_mean(self, *, ends: bool = True) -> None:
        """Put the mean of all ranks' models into the parameters, for good: the script goes on with
        it. Collective.

        Args:
            ends: whether the session is about to, so that no rank has to wait for this one.
        """
        self.training_goes_on()
        try:
            if ends and self._session.averages_alone:
                self._session.finish()
            mean = self._session.averaged_tensors()
            self._write(mean)
            self._left, self._mean = self._sample(), mean
        except OffbeatError as error:
            LOGGER.warning("this rank keeps its own weights: %s", error)

    def close(self) -> None:
        """The session is about to end. A model that is not in training mode stays the mean."""
        self._rest.close()

    @override
    def closed(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()
        # A session that has ended well may have put an average into the model.
        if error is None and self._loaded_since_step is not None:
            self._write(self._loaded_since_step)

    def _step_begins(self, *_: Any) -> None:
        self.training_goes_on()
        self._between = self._left, self._sample()

    def _sample(self) -> list[torch.Tensor]:
        """The first elements of some parameters."""
        tensors = [local_of(parameter.detach()) for parameter in self._sampled]
        return [
            tensor[(0,) * (tensor.dim() - 1)].reshape(-1)[:_NUM_SAMPLED].clone()
            for tensor in tensors
        ]

    def _is_written(self) -> bool:
        """Whether the script has put something else into the parameters since the last step, which
        it had not done before that.
        """
        if _are_equal(self._left, self._sample()) or not _are_equal(*self._between):
            return False
        if not self._has_told_of_writing:
            self._has_told_of_writing = True
            LOGGER.warning(
                "the script has written into the parameters since its last step, as it does to"
                " evaluate a moving average of them: it evaluates and saves what it has written,"
                " and not the mean of all ranks' models"
            )
        return True

    def _newest_mean(self) -> dict[str, torch.Tensor] | None:
        """None where nothing is known of a mean: then this rank's own weights have to do; or where
        the script has put others into their place.
        """
        session = self._session
        if self._is_written() or (self._mean is None and not session.averages_alone):
            return None
        if self._mean is None and self._num_steps:
            try:
                with session.resting():
                    self._mean = session.averaged_tensors()
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
        self._left = self._sample()
        self._mean = self._loaded_since_step = self._copies()

    def _copies(self) -> dict[str, torch.Tensor]:
        tensors = self._session.tensors().items()
        return {name: tensor.detach().clone() for name, tensor in tensors}

    @torch.no_grad()
    def _write(
        self, values: Mapping[str, torch.Tensor], over: Mapping[str, torch.Tensor] | None = None
    ) -> bool:
        """`over`: what a tensor has to hold to be written; None: anything. Returns whether each
        parameter was.
        """
        are_written = True
        for name, tensor in self._session.tensors().items():
            if over is None or torch.equal(local_of(tensor), local_of(over[name])):
                tensor.copy_(values[name])
            elif isinstance(tensor, torch.nn.Parameter):
                are_written = False
        reshard_modules(self._model)
        return are_written


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """As far as both go, where what is no number has stayed as it was; before the first step there
    is nothing to compare with.
    """
    same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    return all(map(same, one, other))
