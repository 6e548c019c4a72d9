"""Weights, averaged beside training: a progress thread answers for this rank, and the trainer waits
for nobody who computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from typing_extensions import override

from offbeat.averaging.background.progress import Progress
from offbeat.averaging.background.published_model import Replica
from offbeat.codec.model_wire import Values
from offbeat.errors import CheckpointError
from offbeat.membership.generations import Generations
from offbeat.parts.part import Part
from offbeat.weights.model_weights import ModelWeights, require_finite
from offbeat.weights.momenta import Momenta
from offbeat.weights.staging import Staging

R = TypeVar("R", bound=Replica)


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside(Generic[R]):
    """What answers for a rank beside its training.

    Attributes:
        weights: what is averaged.
        momenta: what is averaged with them when everyone meets; None: nothing.
        staging: of `tensors()`.
        replica: the model that the others see.
        progress: answers for it.
        generations: the membership; None in a world of one.
        rank: for errors.
        notify: for remarks.
        stood_still: told from when to when the trainer waited, in seconds of the monotonic clock.
    """

    weights: ModelWeights
    momenta: Momenta | None
    staging: Staging
    replica: R
    progress: Progress
    generations: Generations | None
    rank: int
    notify: Callable[[str], None]
    stood_still: Callable[[float, float], None]

    def close(self, *, over: bool = False) -> None:
        """End what runs beside. `over`: the run has ended for everyone."""
        if self.generations is not None:
            self.generations.close(over=over)
        self.progress.close()

    def tensors(self) -> list[torch.Tensor]:
        """What the vector that is averaged is made of."""
        return averaged_tensors(self.weights, self.momenta)


def averaged_tensors(weights: ModelWeights, momenta: Momenta | None) -> list[torch.Tensor]:
    """A model's tensors, and after them its optimizer's where these are averaged too."""
    return [*weights.tensors(), *([] if momenta is None else momenta.tensors())]


class AnsweredPart(Part, Generic[R]):
    """A part of a rank that is answered for beside its training.

    Attributes:
        start_step: the step at which this rank came in: 0, or that of the member whose model it
            took.
    """

    averages_models = True
    averages_alone = True

    def __init__(self, beside: Beside[R]) -> None:
        self._beside = beside
        self._replica = beside.replica
        self._num_steps = self.start_step = beside.replica.step
        self._encode_s = 0.0
        if beside.replica.ready:  # a newcomer has taken a model over
            self._load()

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """The model is shown as late as can be: the user may load weights after attaching."""
        self._begin()

    @override
    def on_finish(self) -> None:
        """No more steps: return when no living rank takes any."""
        self._begin()
        self._beside.progress.rest()
        averages = self._replica.averages
        if averages.contributions:
            self._beside.notify(
                f"worker {self._beside.rank} had {averages.made} averages and missed"
                f" {averages.missed}; {averages.stale / averages.contributions:.0%} of what they"
                " were made of came from workers that were computing"
            )

    @override
    def on_abandon(self, reason: str) -> None:
        """This rank has failed: the others need not wait for it to part."""
        self._beside.progress.abort(reason)
        self._beside.close()

    @override
    def average_into(self, weights: ModelWeights) -> None:
        """Write the mean of all living ranks' models into `weights`, another model's of the same
        shape. Not collective.
        """
        self._begin()
        values, counters = self._beside.progress.mean()
        staging = self._beside.staging
        own = len(weights.tensors())
        aside = [torch.empty_like(tensor) for tensor in self._beside.tensors()[own:]]
        staging.write_(values.astype(staging.dtype), [*weights.tensors(), *aside])
        weights.write_counters(counters)

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._replica.averages.made, "encode_s": self._encode_s}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {"local": {"num_steps": self._num_steps}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        if "num_steps" not in state.get("local", {}):
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        self._num_steps = int(state["local"]["num_steps"])
        self._replica.forget()  # the model was loaded as well, or is about to be

    @override
    def close(self) -> None:
        """The weights stay as they are: the user's."""
        self._beside.close(over=self._beside.progress.part())

    def _begin(self) -> None:
        if not self._replica.ready:
            self._replica.begin(
                self._read(), self._beside.weights.read_counters(), step=self._num_steps
            )

    def _advance(self) -> None:
        """Show the others the model as it is at the end of a step."""
        begin_s = time.perf_counter()
        self._num_steps += 1
        self._replica.advance(self._read(), self._beside.weights.read_counters())
        self._encode_s += time.perf_counter() - begin_s

    def _arrive(self, must_wait: Callable[[int], bool], *, for_average: bool = True) -> int | None:
        """Arrive at a version, unless this rank need not, and wait for it if it must. Returns
        which.

        `for_average`: whether to wait for the average, too, or for arrivals alone.
        """
        begin_s = time.monotonic()
        version = self._replica.arrive(must_wait)
        if version is not None:
            self._beside.progress.arrive(version)
            if must_wait(version):
                self._replica.wait(for_average=for_average)
        self._beside.stood_still(begin_s, time.monotonic())
        return version

    def _load(self) -> None:
        """Go on from what averages have made of the model."""
        begin_s = time.perf_counter()
        values, counters = self._replica.take()
        beside, tensors = self._beside, self._beside.tensors()
        beside.staging.write_(values, tensors)
        if not beside.staging.exact or not (beside.momenta is None or beside.momenta.complete):
            self._replica.hold(self._read())
        self._beside.weights.write_counters(counters)
        self._encode_s += time.perf_counter() - begin_s

    def _read(self) -> Values:
        values = self._beside.staging.read(self._beside.tensors())
        require_finite([torch.from_numpy(values)], rank=self._beside.rank)
        return values


class GroupAverage(AnsweredPart[Replica]):
    """After every optimizer step: shows the others this rank's model, and takes what averages have
    made of it.

    Args:
        beside: what answers for this rank.
        interval: local steps between arrivals, >= 1.
        overlap: whether the trainer goes on as soon as enough have arrived, at once where that is
            one, and finds the average at the end of a later step; else it waits for the network.
    """

    state_key: ClassVar[str] = "group_average"

    def __init__(self, beside: Beside[Replica], *, interval: int, overlap: bool) -> None:
        super().__init__(beside)
        self._interval = interval
        self._overlap = overlap

    @override
    def on_before_step(self) -> None:
        self._begin()

    @override
    def on_after_step(self) -> None:
        self._advance()
        if self._num_steps % self._interval == 0:
            self._arrive(self._must_wait, for_average=not self._overlap)
        self._load()

    def _must_wait(self, version: int) -> bool:
        return not self._overlap or self._beside.progress.must_wait(version)
