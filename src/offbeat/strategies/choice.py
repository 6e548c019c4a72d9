"""Which strategy should be at work: a function of what all ranks have measured and predicted.

if less than a tenth of a step is waiting: AllReduce stays; if more than three quarters are, not all
    steps before the first look are waited for
correct what is not computing by what the prediction of the strategy at work was wrong by
cost = predicted step, in the mean of the coming 2,000, x steps to equal quality, with the
    uncertainty of both
the cheapest takes over, if it is cheaper than what is at work by more than that uncertainty

Where ranks compute at unlike speeds, and share out a step's samples, gradients are averaged over
samples: then the division of a step that all compute for as long costs nothing of its worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.callbacks.callback import Decision

LEAST_MARGIN: Final = 0.1
UNEXPECTED: Final = 0.25
"""By which share a step takes another time than expected, before candidates are looked at again."""

EARLY_LOOK: Final = 8
FIRST_LOOK: Final = 20
SETTLING: Final = 3
LEAST_SEEN: Final = 5
EVERY: Final = 250
BETWEEN_CHANGES: Final = 500
"""Steps. Those by which a run settles are not seen."""

HORIZON: Final = 2000
"""Steps in whose mean candidates are compared."""

BESIDE_S: Final = 1e-8
"""What a processor takes for each element and step where models are averaged beside training
(`benchmarks/auto.py`, medium, 10 Gbit/s).
"""

MOST_WAITING: Final = 0.75
"""The share of waiting from which on a step says enough after `EARLY_LOOK`, and costs too much."""

BY_SPEED: Final = " by speed"
"""Behind the name of a strategy whose ranks share the samples of a step out by their speeds."""

_ROUNDED: Final = 1e-6
_UNEVEN: Final = 1.25
"""How many times as long one rank computes as another for their speeds to be unlike."""

_PAUSE: Final = 5.0
"""A step in which a rank computes so many times as long as it does in others is not looked at."""

USABLE: Final = 0.8
"""Of the memory that is free."""


class StepsToEqual(NamedTuple):
    """How many steps a strategy takes to AllReduce's quality, as a multiple of AllReduce's.

    Attributes:
        mean: of what was measured.
        uncertainty: of that, as a share of a step.
        apart: what is added where models that are averaged beside training hardly ever are, and
            less where they more often are, down to nothing with an average in each step.
    """

    mean: float
    uncertainty: float
    apart: float = 0.0

    def with_averages(self, in_a_step: float) -> StepsToEqual:
        """Where so many averages come in a step.

        >>> StepsToEqual(1.0, 0.1, apart=0.5).with_averages(0.5).mean
        1.25
        """
        return self._replace(mean=self.mean + self.apart * max(0.0, 1 - in_a_step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy that may take over.

    Attributes:
        sgd, adam: steps to equal quality with optimizers that have one moment or none, and with
            those that scale by second moments.
        period: steps after which its exchanges repeat.
        bytes_per_parameter: memory that it needs beyond AllReduce's.
        bytes_per_moment: memory beyond AllReduce's for each moment that the optimizer keeps of a
            parameter.
        keeps_step: whether ranks take equally many steps.
        begins_as: what it is like when it has just taken over; "": what it is later.
        beginning: which share of `HORIZON` steps is like that, where the rest is like later ones.
    """

    sgd: StepsToEqual
    adam: StepsToEqual
    period: int = 1
    bytes_per_parameter: float = 0.0
    bytes_per_moment: float = 0.0
    keeps_step: bool = True
    begins_as: str = ""
    beginning: float = 0.0

    def fits(self, num_elements: int, moments: int, *, free_bytes: float) -> bool:
        """Whether a rank with so many parameters and moments of each has the memory for it."""
        of_each = self.bytes_per_parameter + self.bytes_per_moment * moments
        return of_each * num_elements < USABLE * free_bytes

    def on_processors_s(
        self, step_s: float, num_elements: int, *, processors_s: float, cores: float
    ) -> float:
        """A step of `step_s` on a rank that has so many cores to itself, where all its threads take
        `processors_s` in each step as it is now.

        >>> CANDIDATES["wagma"].on_processors_s(0.1, 5_000_000, processors_s=0.05, cores=0.5)
        0.2
        """
        if self.keeps_step:
            return step_s  # what it does beside training was seen, or is part of the prediction
        return max(step_s, (processors_s + BESIDE_S * num_elements) / cores)


CANDIDATES: Final[Mapping[str, Candidate]] = {
    "allreduce": Candidate(sgd=StepsToEqual(1.0, 0.0), adam=StepsToEqual(1.0, 0.0)),
    "gtopk": Candidate(
        sgd=StepsToEqual(1.1, 0.15), adam=StepsToEqual(1.15, 0.1), bytes_per_parameter=8
    ),
    # Its period grows: 163 averages in 500 steps, where there are 50 later. Without growth, or with
    # growth in a tenth of the steps, `charlm` ended .4 and .6% worse (two seeds).
    "localsgd": Candidate(
        sgd=StepsToEqual(1.0, 0.1),
        adam=StepsToEqual(1.1, 0.1),
        period=10,
        bytes_per_parameter=4,
        bytes_per_moment=4,  # which are averaged, too
        begins_as="localsgd:period=1",
        beginning=0.0625,
    ),
    # Its optimizers' states are not averaged, which Adam misses.
    "localsgd:codec=linear4": Candidate(
        sgd=StepsToEqual(1.05, 0.1),
        adam=StepsToEqual(1.3, 0.15),
        period=10,
        bytes_per_parameter=12,
        begins_as="localsgd:codec=linear4:period=1",
        beginning=0.0625,
    ),
    "powersgd": Candidate(
        sgd=StepsToEqual(2.0, 0.2), adam=StepsToEqual(2.1, 0.6), bytes_per_parameter=12
    ),
    "wagma": Candidate(
        sgd=StepsToEqual(1.15, 0.1, apart=0.75),
        adam=StepsToEqual(1.25, 0.2, apart=0.15),
        bytes_per_parameter=16,
        keeps_step=False,
    ),
}
"""By what the command line calls them. Ranks take turns at predicting them, in this order."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """Where a run is.

    Attributes:
        at_work: the strategy that is.
        wanted: the one that is about to take over; "": none is.
        num_steps: that were taken.
        changed_at: the step after which a strategy took over last.
        expected_s: what a step should take; None: candidates were never looked at.
        decisions: all that were made.
    """

    at_work: str = "allreduce"
    wanted: str = ""
    num_steps: int = 0
    changed_at: int = -BETWEEN_CHANGES
    expected_s: float | None = None
    decisions: list[Decision] = field(default_factory=list)

    def is_due(self, *, ahead: int = 0, seen: int | None = None) -> bool:
        """Whether all ranks should say what they have seen, now or `ahead` steps later, if it is
        `seen` steps.
        """
        if seen is not None and seen < LEAST_SEEN:
            return False
        num_steps = self.num_steps + ahead
        is_time = num_steps == FIRST_LOOK or (
            num_steps % EVERY == 0 if num_steps > FIRST_LOOK else num_steps == EARLY_LOOK
        )
        return is_time and num_steps - self.changed_at >= BETWEEN_CHANGES

    @property
    def is_early(self) -> bool:
        """Whether more steps should be seen, unless those that were say enough."""
        return self.num_steps < FIRST_LOOK

    def is_news(self, step_s: float) -> bool:
        """Whether candidates should be looked at, now that a step takes `step_s`."""
        expected_s = self.expected_s
        return expected_s is None or abs(step_s / expected_s - 1) >= UNEXPECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenSteps:
    """What all ranks saw of the strategy at work.

    Attributes:
        at_work: its name.
        step_s: seconds of a step.
        computed_s: those that each rank computed in each step, shape (steps, ranks).
    """

    at_work: str
    step_s: float
    computed_s: NDArray[np.float64]

    @classmethod
    def of(
        cls, at_work: str, whole_s: NDArray[np.float64], computed_s: NDArray[np.float64]
    ) -> SeenSteps:
        """Of the seconds of steps, and those that were computed in, shape (steps, ranks). An
        evaluation, or a pause, is no step.

        >>> computed_s = np.array([[1.0, 1.0], [1.0, 9.0], [1.0, 1.0]])
        >>> SeenSteps.of("allreduce", 2 * computed_s, computed_s).step_s
        2.0
        """
        kept = (computed_s <= _PAUSE * np.median(computed_s, axis=0)).all(axis=1)
        if kept.any():
            whole_s, computed_s = whole_s[kept], computed_s[kept]
        return cls(at_work=at_work, step_s=float(whole_s.mean()), computed_s=computed_s)

    @property
    def mean_computed_s(self) -> float:
        return float(self.computed_s.mean())

    def hardly_waits(self) -> bool:
        """Whether no strategy could make a step much shorter."""
        return self.at_work == "allreduce" and self._waits < LEAST_MARGIN

    def mostly_waits(self) -> bool:
        """Whether a few steps say enough, since computing hardly counts."""
        return self._waits > MOST_WAITING

    @property
    def _waits(self) -> float:
        """As a share of a step."""
        return 1 - self.mean_computed_s / self.step_s

    def speeds_are_unlike(self) -> bool:
        """Whether a rank is steadily slower than another. One that is late by chance takes no
        longer than others in its fastest step.
        """
        each_s = np.median(self.computed_s, axis=0), self.computed_s.min(axis=0)
        return all(seconds.max() >= _UNEVEN * seconds.min() > 0 for seconds in each_s)

    def at_summed_speed_s(self) -> float | None:
        """A step if batches followed speeds, and no rank waited; None where speeds are alike.

        >>> computed_s = np.array([[1.0, 3.0], [1.0, 3.0], [9.0, 3.0]])
        >>> SeenSteps(at_work="allreduce", step_s=4.0, computed_s=computed_s).at_summed_speed_s()
        1.5
        """
        usual_s = np.median(self.computed_s, axis=0)
        return float(len(usual_s) / np.sum(1 / usual_s)) if self.speeds_are_unlike() else None

    def by_speed(self, batch_sizes: Sequence[int], largest: Sequence[int]) -> tuple[int, ...]:
        """How many samples of a step each rank should have, for all of them to compute for as long.

        Args:
            batch_sizes: of the steps that were seen, by rank.
            largest: what each rank can have, not less than what it has.

        >>> computed_s = np.array([[1.0, 3.0], [1.0, 3.0], [9.0, 3.0]])
        >>> seen = SeenSteps(at_work="allreduce", step_s=4.0, computed_s=computed_s)
        >>> seen.by_speed([32, 32], [99, 99]), seen.by_speed([32, 32], [40, 99])
        ((48, 16), (40, 24))
        """
        speeds = np.array(batch_sizes) / np.median(self.computed_s, axis=0)
        most, total = np.array(largest, dtype=np.float64), sum(batch_sizes)
        # What a rank cannot have is shared out among the others, whom that may fill, too.
        is_full = np.zeros(len(speeds), dtype=np.bool_)
        while True:
            rest = (total - most[is_full].sum()) * speeds / speeds[~is_full].sum()
            sizes = np.where(is_full, most, rest)
            over = sizes > most + _ROUNDED
            if not over.any():
                return _in_whole_samples(sizes, total)
            is_full |= over

    def __str__(self) -> str:
        late = self.computed_s.mean(axis=0).argmax()
        return (
            f"{self.at_work} takes {ms(self.step_s)} a step, of which {ms(self.mean_computed_s)}"
            f" are computing; rank {late} is the slowest with"
            f" {ms(float(self.computed_s[:, late].mean()))}"
        )


def _in_whole_samples(sizes: NDArray[np.float64], total: int) -> tuple[int, ...]:
    """Numbers near `sizes`, each at least 1, which add up to `total`."""
    whole = np.maximum(1, np.floor(sizes + _ROUNDED)).astype(np.int64)
    while (missing := total - int(whole.sum())) > 0:
        whole[(sizes - whole).argmax()] += 1
    for _ in range(-missing):  # somebody has 1 who should have less
        whole[whole.argmax()] -= 1
    return tuple(whole.tolist())


class Choice(NamedTuple):
    """What should be at work.

    Attributes:
        name: of the strategy, perhaps with `BY_SPEED`.
        step_s: what a step of it should take.
        why: in a sentence or two.
    """

    name: str
    step_s: float
    why: str


def corrected(predicted_s: Mapping[str, float], seen: SeenSteps) -> dict[str, float]:
    """Predictions of steps, where whatever is not computing takes as much more or less, up to
    twice, as that of the strategy at work was seen to.

    >>> seen = SeenSteps(at_work="allreduce", step_s=2.0, computed_s=np.ones((1, 2)))
    >>> corrected({"allreduce": 3.0, "gtopk": 2.0}, seen)
    {'allreduce': 2.0, 'gtopk': 1.5}
    """
    computed_s = seen.mean_computed_s
    rest_s = predicted_s[seen.at_work] - computed_s
    scale = max(0.5, min(2.0, (seen.step_s - computed_s) / rest_s)) if rest_s > 0 else 1.0
    return {
        name: computed_s + scale * (seconds - computed_s) if seconds > computed_s else seconds
        for name, seconds in predicted_s.items()
    }


def cheapest(
    seen: SeenSteps, predicted_s: Mapping[str, float], steps: Mapping[str, StepsToEqual]
) -> str:
    """The strategy that should be at work. What is at work costs what it was seen to.

    Args:
        seen: of what is at work.
        predicted_s: steps by strategy, that at work among them, which says how wrong predictions
            are.
        steps: to equal quality, by strategy.

    >>> equal = {name: StepsToEqual(1.0, 0.05) for name in ("allreduce", "gtopk", "localsgd")}
    >>> predicted_s = {"allreduce": 1.0, "gtopk": 0.5, "localsgd": 0.95}
    >>> seen = SeenSteps(at_work="allreduce", step_s=1.05, computed_s=np.ones((1, 2)))
    >>> cheapest(seen, predicted_s, equal)
    'gtopk'
    >>> cheapest(seen, predicted_s | {"gtopk": 0.95}, equal)
    'allreduce'
    """
    margin = max(LEAST_MARGIN, abs(predicted_s[seen.at_work] / seen.step_s - 1))
    costs_s = {
        name: seconds * worth.mean * (1 + margin + worth.uncertainty)
        for name, seconds in predicted_s.items()
        for worth in [steps[name.removesuffix(BY_SPEED)]]
    }
    costs_s[seen.at_work] = seen.step_s * steps[seen.at_work].mean
    return min(costs_s, key=lambda name: (costs_s[name], name != seen.at_work))


def choose(
    seen: SeenSteps,
    predicted_s: Mapping[str, float],
    steps: Mapping[str, StepsToEqual],
    coming_s: Mapping[str, float] = MappingProxyType({}),
) -> Choice:
    """What should be at work, and why.

    Args:
        seen: of what is at work.
        predicted_s: steps by strategy, as they were simulated; none where a step hardly waits. A
            name may have `BY_SPEED`, beside the one at work too.
        steps: to equal quality, by strategy.
        coming_s: of those whose `HORIZON` steps are not like later ones, their mean.
    """
    why = ""
    if seen.hardly_waits():
        why = f"no strategy makes the {ms(seen.mean_computed_s)} less that are computing"
    elif seen.at_work not in predicted_s:
        why = f"{seen.at_work} cannot be predicted, so nobody knows how wrong predictions are"
    if why:
        return Choice(seen.at_work, seen.step_s, why)
    coming_s = corrected({**predicted_s, **coming_s}, seen)
    predicted_s = corrected(predicted_s, seen)
    name = cheapest(seen, coming_s, steps)
    others = ", ".join(
        f"{other} {ms(seconds)}" + (f" x {worth:.3g}" if worth != 1 else "")
        for other, seconds in sorted(coming_s.items(), key=lambda item: item[1])
        for worth in [steps[other.removesuffix(BY_SPEED)].mean]
    )
    step_s = seen.step_s if name == seen.at_work else predicted_s[name]
    return Choice(name, step_s, f"predicted for a step: {others}")


def outlook(
    choice: Choice, seen: SeenSteps, *, looks_again: bool = True, shares_out: bool = False
) -> str:
    """What would change it, and what could be better that is no candidate.

    Args:
        choice: what it is.
        seen: of what was at work.
        looks_again: whether anybody will see a change.
        shares_out: whether ranks share out a step's samples, so that candidates could by speed.
    """
    if not looks_again:
        said = f"auto will not look again, since islands keep no step with {choice.name}"
    else:
        changes = choice.name != seen.at_work
        earliest = f", {BETWEEN_CHANGES} steps from now at the earliest" if changes else ""
        said = (
            f"auto looks again if a step takes {UNEXPECTED:.0%} more or less than"
            f" {ms(choice.step_s)}, which it sees every {EVERY} steps{earliest}"
        )
    at_best_s = seen.at_summed_speed_s()
    if not shares_out and at_best_s is not None and _UNEVEN * at_best_s < choice.step_s:
        said += (
            ". Ranks compute at unlike speeds: batches of session.loader would follow them, and"
            f" take {ms(at_best_s)} at best"
        )
    return said


def in_vain(standing: Standing) -> str:
    """What is said where a look is due, and a rank has died of those that go on without it."""
    return (
        f"auto, step {standing.num_steps}: {standing.at_work} stays, since a worker has died, and"
        " the others go on without the connections over which they would choose. To choose anew,"
        " start all workers again"
    )


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
