"""`Callback`: what a strategy puts into a training loop, and the events that a callback can act on.

A strategy builds callbacks; a session calls their event methods and keeps their state, and does
nothing else with them. A callback overrides the events that it needs. The order within one training
step is

    batch claimed -> parameters needed -> forward begins -> parameters needed (for each module)
    -> backward begins -> gradient ready (for each parameter) -> backward done -> before step
    -> before update -> after step

where batches are claimed only if the loader is the session's or if the user calls `weigh`. In a
step whose closure runs the backward pass, `on_closure` takes the place of `on_before_step`.
Callbacks get each event in the order in which the strategy built them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from offbeat.errors import nearest
from offbeat.weights.model_weights import ModelWeights

CallbackState: TypeAlias = dict[str, dict[str, Any]]
"""A callback's state. Its keys say what becomes of an entry when the number of workers changes:

- "additive": tensors by name whose sum over ranks matters (residuals); they are shared out anew,
  and the sum is preserved;
- "replicated": the same on every rank; copied;
- "owned": of which each rank has some; every rank is handed all, and takes what it owns by then;
- "local": a rank's own; handed to the rank of the same number modulo the old world size.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Which strategy is to be at work from now on.

    Attributes:
        step: after which it was decided.
        before, after: what was at work, and what is to be, by name; the same where all stays as it
            is.
        why: in a sentence.
    """

    step: int
    before: str
    after: str
    why: str


class Callback:
    """A component of a strategy. All methods do nothing unless a subclass overrides them.

    A subclass that keeps state sets `state_key`. A misspelt event is refused when the class is
    defined: every public method whose name begins with `on_` must be one of those below.

    Attributes:
        state_key: the callback's name in checkpoints; unique within a strategy, and never changed.
        may_begin_anew: whether a checkpoint without the callback's state is accepted, because the
            callback is younger than the checkpoint.
        averages_models: whether `average_into` gives the mean of all living ranks' models.
        averages_alone: whether `average_into` needs no call on the other ranks.
        averages_unconnected: whether it does so although the session has no other rank.
        holds_state: whether it keeps the optimizer's state between steps.
        start_step: the step at which this rank came in, for one that joined a run which was under
            way; else 0.
    """

    state_key: ClassVar[str]

    may_begin_anew: ClassVar[bool] = False
    averages_models: bool = False
    averages_alone: bool = False
    averages_unconnected: bool = False
    holds_state: bool = False
    start_step: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and name not in EVENTS:
                raise TypeError(
                    f"{cls.__name__}.{name} is no event, so no session would call it; the events"
                    f" are {', '.join(EVENTS)}{nearest(name, EVENTS)}"
                )

    # Events

    def on_batch_claimed(self, num_samples: int) -> None:
        """The coming optimizer step is taken with `num_samples` further samples."""

    def on_forward_begins(self, *, trains: bool) -> None:
        """The root module is called. `trains`: in training mode, with gradients on that are to be
        exchanged.
        """

    def on_parameters_needed(self, indices: Sequence[int]) -> None:
        """Parameters `indices`, in the model's order, are about to be computed with, by a module of
        the model, or to be saved, loaded or copied.
        """

    def on_backward_begins(self, *, synchronised: bool) -> None:
        """An outermost backward pass begins and has accumulated nothing; `synchronised` is False
        inside `no_sync`.
        """

    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        """Parameter `index`, in the model's order, has its gradient of this backward pass."""

    def on_backward_done(self, *, synchronised: bool) -> None:
        """The backward pass is over. What this raises comes out of the user's `backward()`."""

    def on_backward_failed(self) -> None:
        """An earlier backward pass ended in an exception on this rank; its peers may be waiting."""

    def on_join(self) -> None:
        """This rank takes part in its peers' exchange although it ran no backward pass."""

    def on_before_step(self) -> None:
        """`optimizer.step()` has been called without a closure."""

    def on_closure(self) -> None:
        """`optimizer.step(closure)` has been called; the closure runs the backward pass."""

    def on_before_update(self) -> None:
        """Gradients are final: all callbacks have acted on `on_before_step`, or the closure that
        was given to `step()` has returned.
        """

    def on_after_step(self) -> None:
        """`optimizer.step()` is about to return."""

    def on_last_step(self) -> None:
        """The coming step is the last one before another strategy takes over: nothing must be owed
        after it.
        """

    def on_finish(self) -> None:
        """This rank takes no more steps. Returns when no living rank does."""

    def on_rest(self) -> None:
        """This rank computes no step until `on_resume`: no peer must wait for the end of one."""

    def on_resume(self) -> None:
        """This rank takes steps again."""

    def on_abandon(self, reason: str) -> None:
        """This rank has failed, and `close` follows: no peer must wait for it."""

    # Answers

    def counters(self) -> Mapping[str, float]:
        """Totals so far, summed over callbacks: "exchanges", "skipped_steps", "encode_s" (seconds),
        "merges" (of models, for which the optimizer need not be stepped), and of entries on which
        an eye is kept "watched_entries_sent" and "age_of_watched_entries" (exchanges that they
        waited, added up).
        """
        return {}

    def gauges(self) -> Mapping[str, float]:
        """What can be measured now, at the price of a pass over the model: "residual_norm", the
        norm of what this rank owes, "stale_share", the share of stale contributions in the averages
        so far, and "kl_scale", by what `kl_clip` of K-FAC multiplied the last step, in (0, 1].
        """
        return {}

    def decisions(self) -> Sequence[Decision]:
        """What this callback has decided so far, before a resume too."""
        return ()

    def averaging_weight(self) -> float | None:
        """This rank's weight in the mean of all ranks' models; None: this callback does not say."""
        return None

    def steps_behind(self) -> int:
        """How many steps this rank has made less than half of the ranks have; 0 for these, and
        where ranks keep step.
        """
        return 0

    def replicas_agree(self) -> bool:
        """Whether this callback knows that all ranks hold the same parameters, between two
        steps.
        """
        return False

    def clip_gradients(self, max_norm: float) -> float | None:
        """The norm that this rank's gradient had before this callback clipped it to `max_norm`, in
        its own way; None: this callback leaves clipping to others.

        Raises:
            ConfigError: gradients cannot be clipped to `max_norm` any more.
        """
        return None

    def clip_as_loop_does(self, max_norm: float) -> float | None:
        """Take the place of a loop's own clipping of `param.grad` to `max_norm`, if this callback
        selects entries before that: clip what it selects from, from the next exchange on.

        Returns:
            As `clip_gradients`; None: the loop's clipping does no harm.
        """
        return None

    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        """Write the mean of all living ranks' models into `weights`, which belong to a copy of the
        model. Called only if `averages_models`. Collective unless `averages_alone`.

        Returns:
            The ranks of members whose models the mean lacks.
        """
        raise NotImplementedError

    # State

    def state_dict(self) -> CallbackState:
        """All that a resumed run needs to go on as if it had never stopped. Tensors may be live."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`. Raises `CheckpointError` when the state does not fit."""

    def load_older_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """This rank has come back, and is where its peers are: take of its `state`, which is older,
        only what they do not know. Raises as `load_state_dict`.
        """

    def strategy_of(self, state: Mapping[str, Mapping[str, Any]]) -> Any:
        """The strategy that was at work when `state` of this callback was saved, where it is this
        callback that chooses one; else None.
        """
        return None

    def close(self) -> None:
        """Put back whatever the callback changed in the user's objects."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The names of all events."""


def listens(callback: Callback, event: str) -> bool:
    """Whether `callback` does anything at the event of this name."""
    return getattr(type(callback), event) is not getattr(Callback, event)
