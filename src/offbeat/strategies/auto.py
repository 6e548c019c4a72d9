"""Auto: begins as S-SGD (arXiv 2006.15704), measures, and lets the strategy take over that will be
done first.

    30 steps of AllReduce, of which the last 20 are timed on every rank
    if less than a tenth of a step is waiting: stay
    probe links and device
    for each candidate: predict its step, by its own callbacks on a virtual cluster of what was
        measured (`simulation.measured`), each rank some of them
    correct what is not computing by what the prediction of the strategy at work was wrong by
    cost = predicted step x steps to equal quality, with the uncertainty of both
    the cheapest takes over, if it is cheaper than what is at work by more than that uncertainty
    every 250 steps: look again if steps take another time than expected, at least 500 steps after
        the last change

What is at work is judged by its measured step, so a prediction that was wrong is taken back at the
next look. How many steps a strategy takes to the quality of AllReduce is what was measured for
optimizers of that kind (`benchmarks/studies/steps_to_equal.py`). On fast links the usual answer is
AllReduce.

A change happens between two steps. What a strategy owes is sent in the step before, densely, and
models that differ become one, with rank 0's state of the optimizer. Then the optimizer is the
user's for a moment, and the next strategy begins as if it had just been attached.

Cost: the links are probed with 14 MiB each way, and the candidates are predicted by the ranks
together, in about one second of a processor for each.

Where WAGMA has taken over nobody looks again: its ranks do not keep step, and go on when one dies.
With more than 64 ranks nothing is predicted, and AllReduce stays. Adaptive SGD is no candidate,
because it needs the session's loader.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.collectives.dense import gather_values
from offbeat.errors import ConfigError, OffbeatError
from offbeat.gradients.collective_choice import CheapestCollective
from offbeat.simulation.measured import MeasuredRun, predict
from offbeat.simulation.training import TensorProfile
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import build_strategy, parse_spec
from offbeat.strategies.options import require_one_of

FIRST_LOOK: Final = 30
EVERY: Final = 250
BETWEEN_CHANGES: Final = 500
"""Steps."""

_SEEN: Final = 20
_MOST_RANKS: Final = 64
_REPEATS: Final = 2
LEAST_MARGIN: Final = 0.1
_UNEXPECTED: Final = 0.25
"""By which share a step takes another time than expected, before candidates are looked at again."""

STEPS_OF_AN_AVERAGE: Final = 1
"""Models that are averaged beside training in more than so many steps are further apart than those
of which the steps to equal quality were counted."""

CORES_BESIDE: Final = 2.0
"""Of a rank, where models are averaged beside training."""

_PAUSE: Final = 5.0
"""A step in which a rank computes so many times as long as in others is not looked at."""

_FREE_MEMORY: Final = 0.8


class StepsToEqual(NamedTuple):
    """How many steps a strategy takes to AllReduce's quality, as a multiple of AllReduce's.

    Attributes:
        mean: of what was measured.
        uncertainty: of that, as a share of a step.
    """

    mean: float
    uncertainty: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy that may take over.

    Attributes:
        sgd, adam: steps to equal quality with optimizers that have one moment or none, and with
            those that scale by second moments.
        period: steps after which its exchanges repeat.
        bytes_per_parameter: memory that it needs beyond AllReduce's.
        keeps_step: whether ranks take equally many steps.
    """

    sgd: StepsToEqual
    adam: StepsToEqual
    period: int = 1
    bytes_per_parameter: float = 0.0
    keeps_step: bool = True


CANDIDATES: Final[Mapping[str, Candidate]] = {
    "allreduce": Candidate(sgd=StepsToEqual(1.0, 0.0), adam=StepsToEqual(1.0, 0.0)),
    "gtopk": Candidate(
        sgd=StepsToEqual(1.1, 0.15), adam=StepsToEqual(1.15, 0.1), bytes_per_parameter=8
    ),
    "powersgd": Candidate(
        sgd=StepsToEqual(2.0, 0.2), adam=StepsToEqual(2.1, 0.6), bytes_per_parameter=12
    ),
    "localsgd": Candidate(
        sgd=StepsToEqual(1.05, 0.1), adam=StepsToEqual(1.1, 0.1), period=10, bytes_per_parameter=4
    ),
    "wagma": Candidate(
        sgd=StepsToEqual(1.05, 0.1),
        adam=StepsToEqual(1.25, 0.15),
        bytes_per_parameter=16,
        keeps_step=False,
    ),
}
"""By what the command line calls them."""


def corrected(
    predicted_s: Mapping[str, float], at_work: str, *, measured_s: float, computed_s: float
) -> dict[str, float]:
    """Predictions, where whatever is not computing takes as much more or less, up to twice, as that
    of the strategy at work was measured to.

    Args:
        predicted_s: steps by strategy.
        at_work: the one that was measured.
        measured_s: its step.
        computed_s: the part of a step that every strategy computes.

    >>> corrected({"allreduce": 3.0, "gtopk": 2.0}, "allreduce", measured_s=2.0, computed_s=1.0)
    {'allreduce': 2.0, 'gtopk': 1.5}
    """
    rest_s = predicted_s[at_work] - computed_s
    scale = max(0.5, min(2.0, (measured_s - computed_s) / rest_s)) if rest_s > 0 else 1.0
    return {
        name: computed_s + scale * (seconds - computed_s) if seconds > computed_s else seconds
        for name, seconds in predicted_s.items()
    }


def choose(
    at_work: str,
    measured_s: float,
    predicted_s: Mapping[str, float],
    steps: Mapping[str, StepsToEqual],
) -> str:
    """The strategy that should be at work.

    Args:
        at_work: the one that is.
        measured_s: its step.
        predicted_s: steps by strategy, `at_work` among them, which says how wrong predictions are.
        steps: to equal quality, by strategy.

    >>> equal = {name: StepsToEqual(1.0, 0.05) for name in ("allreduce", "gtopk", "localsgd")}
    >>> predicted_s = {"allreduce": 1.0, "gtopk": 0.5, "localsgd": 0.95}
    >>> choose("allreduce", 1.05, predicted_s, equal)
    'gtopk'
    >>> choose("allreduce", 1.05, predicted_s | {"gtopk": 0.95}, equal)
    'allreduce'
    """
    margin = max(LEAST_MARGIN, abs(predicted_s[at_work] / measured_s - 1))
    costs_s = {
        name: seconds * steps[name].mean * (1 + margin + steps[name].uncertainty)
        for name, seconds in predicted_s.items()
    }
    costs_s[at_work] = measured_s * steps[at_work].mean
    return min(costs_s, key=lambda name: (costs_s[name], name != at_work))


@dataclass(frozen=True, kw_only=True)
class Auto(Strategy):
    """The strategy that is measured and predicted to be done first on this cluster.

    Args:
        allow: names of the strategies to choose among, such as ("gtopk", "localsgd") or
            "gtopk+localsgd"; () allows all. AllReduce always is one.
        exclude: names of strategies that are not considered, in the same form.
        quality: "equal" counts how many steps each strategy takes to the quality of AllReduce;
            "faster" counts seconds of a step alone.
    """

    name: ClassVar[str] = "auto"
    trains_islands = True
    replicas_differ: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True
    runs_compiled: ClassVar[bool] = True

    allow: tuple[str, ...] | str = ()
    exclude: tuple[str, ...] | str = ()
    quality: Literal["equal", "faster"] = "equal"

    def __post_init__(self) -> None:
        require_one_of("quality", self.quality, ("equal", "faster"))
        for option in ("allow", "exclude"):
            for name in _names(getattr(self, option)):
                require_one_of(option, name, tuple(CANDIDATES))
        if "allreduce" in _names(self.exclude):
            raise ConfigError(
                "exclude has 'allreduce', which every run begins with; name the strategy to train"
                " with in the place of 'auto' if it is to be another one"
            )

    @override
    def begins_as(self) -> Strategy:
        return AllReduce()

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.begins_as().check(model, optimizer)

    def candidates(self, context: Context) -> dict[str, Strategy]:
        """Those that can train what `context` has, by name."""
        allowed, found = _names(self.allow) or CANDIDATES, {}
        for name in CANDIDATES:
            if name != "allreduce" and (name not in allowed or name in _names(self.exclude)):
                continue
            strategy = built(name)
            try:
                if context.model is not None and context.optimizer is not None:
                    strategy.check(context.model, context.optimizer)
                strategy.check_world(context.driver.world_size)
            except OffbeatError:
                continue
            if context.island.size == 1 or strategy.trains_islands:
                found[name] = strategy
        return found

    def steps(self, context: Context) -> dict[str, StepsToEqual]:
        """To equal quality, by name."""
        if self.quality == "faster":
            return dict.fromkeys(CANDIDATES, StepsToEqual(1.0, 0.0))
        groups = [] if context.optimizer is None else context.optimizer.param_groups
        is_adam = any("betas" in group for group in groups)
        return {name: one.adam if is_adam else one.sgd for name, one in CANDIDATES.items()}

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        built_callbacks = list(self.begins_as().build(context))
        return [*built_callbacks, Chooser(self, context)]


def built(name: str) -> Strategy:
    """The strategy called `name`, as it comes."""
    return build_strategy(*parse_spec(name))


def _names(given: tuple[str, ...] | str) -> tuple[str, ...]:
    if isinstance(given, str):
        return tuple(name for name in given.split("+") if name)
    return given


@dataclass(slots=True)
class _Step:
    """Of this rank, in seconds."""

    whole_s: float
    computed_s: float
    backward_s: float
    optimizer_s: float


class Chooser(Callback):
    """Measures steps, and lets another strategy take over. It stays when one does, and gets events
    behind that one's callbacks.

    Args:
        auto: says what is allowed.
        context: lent by the session.
    """

    state_key: ClassVar[str] = "auto"
    may_begin_anew: ClassVar[bool] = True

    def __init__(self, auto: Auto, context: Context) -> None:
        self._auto, self._context = auto, context
        self._stream = context.new_stream()
        self._clock = partial(context.driver.now_s, context.new_stream().next())
        self._at_work, self._next = "allreduce", ""
        self._num_steps, self._changed_at = 0, -BETWEEN_CHANGES
        self._expected_s: float | None = None
        self._seen: deque[_Step] = deque(maxlen=_SEEN)
        self._ready_s = np.zeros(len(context.parameters))
        # Clock and waits at the end of the last step, when the backward pass began, and when the
        # optimizer's step did.
        self._ended: tuple[float, float] | None = None
        self._began = self._updates = (0.0, 0.0)
        self._backward_s = 0.0

    # Timing

    def _now(self) -> tuple[float, float]:
        return self._clock(), self._context.waited_s()

    def _since(self, begin: tuple[float, float]) -> tuple[float, float]:
        """Seconds since `begin`: all of them, and those without waits."""
        now_s, waited_s = self._now()
        return now_s - begin[0], now_s - begin[0] - (waited_s - begin[1])

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        self._began = self._now()

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        if self._num_steps == FIRST_LOOK - 1:
            self._ready_s[index] = self._since(self._began)[1]

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self._backward_s += self._since(self._began)[1]

    @override
    def on_before_update(self) -> None:
        self._updates = self._now()

    @override
    def on_after_step(self) -> None:
        optimizer_s = self._since(self._updates)[1]
        if self._ended is not None:
            whole_s, computed_s = self._since(self._ended)
            self._seen.append(
                _Step(
                    whole_s=whole_s,
                    computed_s=computed_s,
                    backward_s=self._backward_s,
                    optimizer_s=optimizer_s,
                )
            )
        self._backward_s = 0.0
        self._num_steps += 1
        if self._next:
            self._change()
        elif self._is_due():
            self._look()
        self._ended = self._now()

    # Choosing

    def _is_due(self) -> bool:
        if not 1 < self._context.driver.world_size <= _MOST_RANKS:
            return False
        if not CANDIDATES[self._at_work].keeps_step:
            return False
        further = self._num_steps - FIRST_LOOK
        return further == 0 or (further > 0 and self._num_steps % EVERY == 0)

    def _look(self) -> None:
        """Collective."""
        seen = list(self._seen)
        mine = {
            "whole_s": [step.whole_s for step in seen],
            "computed_s": [step.computed_s for step in seen],
            "backward_s": median(step.backward_s for step in seen),
            "optimizer_s": median(step.optimizer_s for step in seen),
            "ready_s": self._ready_s.tolist(),
            "free_bytes": _free_bytes(next(iter(self._context.parameters.values())).device),
            "cores": _num_cores() / _ranks_here(),
        }
        said = self._gather(mine)
        whole_s, computed = (
            np.array([each[key] for each in said]).T for key in ("whole_s", "computed_s")
        )
        # An evaluation, or a pause, is no step.
        kept = (computed <= _PAUSE * np.median(computed)).all(axis=1)
        if kept.any():
            whole_s, computed = whole_s[kept], computed[kept]
        step_s = self._context.island.first(float(whole_s.mean()))
        expected_s = self._expected_s
        is_as_expected = expected_s is not None and abs(step_s / expected_s - 1) < _UNEXPECTED
        if is_as_expected or self._num_steps - self._changed_at < BETWEEN_CHANGES:
            return
        computed_s = float(computed.mean())
        waits = self._context.island.first(1 - computed_s / step_s)
        if self._at_work == "allreduce" and waits < LEAST_MARGIN:
            self._expected_s = step_s
            self._context.notices.inform(
                f"auto, step {self._num_steps}: stays with allreduce, since {_ms(computed_s)} of"
                f" the {_ms(step_s)} of a step are computing, which no strategy makes less"
            )
            return
        run = self._measured(said, computed)
        free_bytes, cores = (min(each[key] for each in said) for key in ("free_bytes", "cores"))
        predicted_s = self._predict(run, free_bytes, cores)
        # Where what is at work cannot be predicted, nobody knows how wrong the others' are.
        if self._context.island.first(self._at_work not in predicted_s):
            self._expected_s = step_s
            return
        predicted_s = corrected(
            predicted_s,
            self._at_work,
            measured_s=step_s,
            computed_s=computed_s,
        )
        steps = self._auto.steps(self._context)
        chosen = choose(self._at_work, step_s, predicted_s, steps)
        chosen = self._context.island.first(chosen)
        self._explain(chosen, step_s, predicted_s, steps, run)
        self._expected_s = step_s if chosen == self._at_work else predicted_s[chosen]
        if chosen != self._at_work:
            self._next = chosen
            self._change()

    def _gather(self, mine: Any) -> list[Any]:
        return self._context.driver.run(gather_values(mine), self._stream.next())

    def _measured(
        self, said: Sequence[Mapping[str, Any]], computed_s: NDArray[np.float64]
    ) -> MeasuredRun:
        context = self._context
        parameters = list(context.parameters.values())
        sample = parameters[0]
        costs = CheapestCollective.measure(
            context.driver, self._stream, sample=sample, repeats=_REPEATS
        )
        # All ranks compute at once, as they do in training.
        copy_s, multiply_s = _device_costs(sample, self._clock)
        device = [max(each) for each in zip(*self._gather([copy_s, multiply_s]), strict=True)]
        backward_s, optimizer_s = (
            fmean(each[key] for each in said) for key in ("backward_s", "optimizer_s")
        )
        # Every rank predicts some candidates, so all of them have to know the same.
        ready_s = np.array(said[0]["ready_s"])
        ready = np.clip(ready_s / max(ready_s.max(), 1e-9), 0.0, 1.0)
        optimizer = context.optimizer
        states = {} if optimizer is None else optimizer.state.get(sample, {})
        return MeasuredRun(
            tensors=[
                TensorProfile(
                    num_elements=p.numel(),
                    ready=float(share),
                    rows=len(p) if p.dim() > 1 else 1,
                )
                for p, share in zip(parameters, ready, strict=True)
                if p.numel()
            ],
            forward_s=max(0.0, float(computed_s.mean()) - backward_s - optimizer_s),
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            computed_s=computed_s,
            network=costs.network,
            copy_s_per_byte=device[0],
            multiply_s_per_element=device[1],
            moments=sum(
                isinstance(value, torch.Tensor) and value.shape == sample.shape
                for value in states.values()
            ),
        )

    def _predict(self, run: MeasuredRun, free_bytes: float, cores: float) -> dict[str, float]:
        """Seconds of a step, by candidate. Collective: each rank simulates some of them."""
        context = self._context
        num_elements = sum(tensor.num_elements for tensor in run.tensors)
        possible = self._auto.candidates(context)
        average_s = run.network.messages.time_s(num_messages=2, num_bytes=4 * num_elements)
        mine: dict[str, float] = {}
        for number, (name, strategy) in enumerate(possible.items()):
            candidate = CANDIDATES[name]
            needs = candidate.bytes_per_parameter * num_elements
            fits = needs < _FREE_MEMORY * free_bytes or name == self._at_work
            fits &= candidate.keeps_step or cores >= CORES_BESIDE
            if number % context.driver.world_size == context.driver.rank and fits:
                try:
                    step_s = predict(strategy, run, period=candidate.period).step_s
                except Exception as error:  # noqa: BLE001 - a prediction must not end a run
                    context.notices.notify(
                        f"auto leaves {name} out, since predicting failed: {error!r}"
                    )
                    continue
                if candidate.keeps_step or average_s < STEPS_OF_AN_AVERAGE * step_s:
                    mine[name] = step_s
        found: dict[str, float] = {}
        for theirs in self._gather(mine):
            found |= theirs
        return {name: found[name] for name in possible if name in found}

    def _explain(
        self,
        chosen: str,
        step_s: float,
        predicted_s: Mapping[str, float],
        steps: Mapping[str, StepsToEqual],
        run: MeasuredRun,
    ) -> None:
        computed = run.computed_s
        late = computed.mean(axis=0).argmax()
        rate = 8e-6 / run.network.dense.beta_s_per_byte
        inform = self._context.notices.inform
        inform(
            f"auto, step {self._num_steps}: {self._at_work} takes {_ms(step_s)} a step, of which"
            f" {_ms(computed.mean())} are computing; rank {late} is the slowest with"
            f" {_ms(computed[:, late].mean())}; links carry {rate:,.0f} Mbit/s"
        )
        others = ", ".join(
            f"{name} {_ms(seconds)}" + (f" x {steps[name].mean:g}" if steps[name].mean != 1 else "")
            for name, seconds in sorted(predicted_s.items(), key=lambda item: item[1])
        )
        verb = "stays with" if chosen == self._at_work else "goes over to"
        inform(f"auto {verb} {chosen}; predicted for a step: {others}")
        inform(
            "auto will not look again: ranks do not keep step from here on"
            if not CANDIDATES[chosen].keeps_step
            else f"auto looks again if a step takes {_UNEXPECTED:.0%} more or less than"
            f" {_ms(step_s if chosen == self._at_work else predicted_s[chosen])}, which it sees"
            f" every {EVERY} steps"
        )

    def _change(self) -> None:
        if self._context.switch(built(self._next), self):
            self._at_work, self._next = self._next, ""
            self._changed_at = self._num_steps
            self._seen.clear()

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            "replicated": {
                "at_work": self._at_work,
                "num_steps": self._num_steps,
                "changed_at": self._changed_at,
                "expected_s": self._expected_s,
            }
        }

    @override
    def strategy_of(self, state: Mapping[str, Mapping[str, Any]]) -> Strategy:
        return built(state["replicated"]["at_work"])

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        self._at_work = str(saved["at_work"])
        self._num_steps, self._changed_at = int(saved["num_steps"]), int(saved["changed_at"])
        expected_s = saved["expected_s"]
        self._expected_s = None if expected_s is None else float(expected_s)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_bytes(device: torch.device) -> float:
    """Memory that this rank may still take: its share of the host's, or its GPU's."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(free) / _ranks_here()


def _device_costs(sample: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds to copy a byte, and to multiply an element of a matrix by a column."""
    matrix = sample.new_zeros((1024, 1024))
    thin, copied = sample.new_zeros((1024, 2)), torch.empty_like(matrix)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            _synchronise(sample.device)
            begin_s = clock()
            work()
            _synchronise(sample.device)
            times.append(clock() - begin_s)
        return min(times)

    copy_s = seconds(lambda: copied.copy_(matrix)) / matrix.nbytes
    return copy_s, seconds(lambda: matrix @ thin) / matrix.numel() / 2


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
