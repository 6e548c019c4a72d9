"""Auto: begins as S-SGD (arXiv 2006.15704), measures, and lets the strategy take over that will be
done first.

    20 steps of AllReduce, of which the last 15 are timed on every rank; 8, of which the last 5 are,
        if more than three quarters of a step are waiting
    if less than a tenth of a step is waiting: stay
    probe links and device
    for each candidate: predict its step, by its own callbacks on a virtual cluster of what was
        measured (`simulation.measured`), each rank some of them
    correct what is not computing by what the prediction of the strategy at work was wrong by
    cost = predicted step, in the mean of the coming 2,000, x steps to equal quality, with the
        uncertainty of both
    the cheapest takes over, if it is cheaper than what is at work by more than that uncertainty;
        where ranks compute at unlike speeds, and `session.loader` shares samples out, strategies
        that exchange gradients come with batches that follow the speeds
    every 250 steps: look again if steps take another time than expected, at least 500 steps after
        the last change

What is at work is judged by its measured step, so a prediction that was wrong is taken back at the
next look. How many steps a strategy takes to the quality of AllReduce is what was measured for
optimizers of that kind (`benchmarks/studies/steps_to_equal.py`). On fast links the usual answer is
AllReduce.

A change happens between two steps. What a strategy owes is sent in the step before, densely, and
models that differ become one, with rank 0's state of the optimizer. Then the optimizer is the
user's for a moment, and the next strategy begins as if it had just been attached.

Cost: the links are probed with 30 MiB each way, and 3 MiB more each time the ranks double; links of
100 Mbit/s with 4 MiB, slower ones with less. The candidates are predicted by the ranks together, in
less than a second of a processor for each.

WAGMA's ranks wait for each other at a look, which is the only time. They go on when one has died,
with WAGMA, since they have lost the connections over which they would choose; a worker that comes
back takes part in WAGMA.
With more than 64 ranks nothing is predicted, and AllReduce stays. Adaptive SGD is no candidate:
its ranks take unequal numbers of steps, which schedulers of a loop that is under way cannot follow.
Its batches that follow speeds are what candidates have of it: an epoch keeps its steps, a step its
samples, and gradients are averaged over samples, so that they are the same but for rounding, and
what a layer sees of a whole batch.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost
from offbeat.callbacks.callback import Callback, Decision
from offbeat.callbacks.context import Context
from offbeat.codec.device_copies import fastest_s
from offbeat.codec.option_value import require_one_of
from offbeat.collectives.dense import gather_values
from offbeat.errors import ConfigError, OffbeatError, PeerError
from offbeat.gradients.collective_choice import measured_costs, probe_pairs
from offbeat.simulation.measured import MeasuredRun, predict, unlike_ports
from offbeat.simulation.training import TensorProfile
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import build_strategy, parse_spec
from offbeat.strategies.choice import (
    BY_SPEED,
    CANDIDATES,
    SETTLING,
    USABLE,
    SeenSteps,
    Standing,
    StepsToEqual,
    choose,
    in_vain,
    outlook,
)
from offbeat.transport.host import free_bytes, processor_limits
from offbeat.weights.optimizer_state import divides_by_squares

_SEEN: Final = 15
NAMES: Final = tuple(dict.fromkeys(parse_spec(spec)[0] for spec in CANDIDATES))
"""What `allow` and `exclude` may have."""
_MOST_RANKS: Final = 64
_LIKE: Final = 1.1
"""Batches count as alike unless one rank has had more than so many times another one's samples."""


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

    trains_islands = True
    replicas_differ: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True
    runs_compiled: ClassVar[bool] = True

    allow: tuple[str, ...] | str = ()
    exclude: tuple[str, ...] | str = ()
    quality: Literal["equal", "faster"] = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("allow", "exclude"):
            for name in _names(getattr(self, option)):
                require_one_of(option, name, NAMES)
        if "allreduce" in _names(self.exclude):
            raise ConfigError(
                "exclude has 'allreduce', which every run begins with; name the strategy to train"
                " with in the place of 'auto' if it is to be another one"
            )

    @override
    def begins_as(self, *, returns: bool = False) -> Strategy:
        """A worker that comes back finds at work what goes on without it."""
        survivors = (one for one in map(built, self.allowed()) if one.survives_death)
        return next(survivors, AllReduce()) if returns else AllReduce()

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.begins_as().check(model, optimizer)

    def allowed(self) -> list[str]:
        """The strategies to choose among, as `CANDIDATES` has them."""
        allowed = {"allreduce", *(_names(self.allow) or NAMES)} - {*_names(self.exclude)}
        return [spec for spec in CANDIDATES if parse_spec(spec)[0] in allowed]

    def candidates(self, context: Context) -> dict[str, Strategy]:
        """Those that can train what `context` has, by name."""
        found = {}
        optimizer = context.optimizer
        groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        # The way back brings the step and the state of this optimizer together, and no other's.
        is_whole = optimizer is None or all(id(p) in stepped for p in context.parameters.values())
        for name, strategy in ((name, built(name)) for name in self.allowed()):
            try:
                if context.model is not None and context.optimizer is not None:
                    strategy.check(context.model, context.optimizer)
                strategy.check_world(context.driver.world_size)
            except OffbeatError:
                continue
            if context.clips_by_value() and hasattr(strategy, "clip_norm"):
                continue  # what is cut off of entries that have travelled is owed by nobody
            # A GradScaler skips steps on one rank alone where each has a model of its own.
            may_differ = is_whole and not context.has_scaler
            if (may_differ or not strategy.replicas_differ) and (
                context.island.size == 1 or strategy.trains_islands
            ):
                found[name] = strategy
        return found

    def steps(
        self,
        optimizer: torch.optim.Optimizer | None,
        averages: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, StepsToEqual]:
        """To equal quality, by name, where so many `averages` come in a step."""
        if self.quality == "faster":
            return dict.fromkeys(CANDIDATES, StepsToEqual(1.0, 0.0))
        scales = optimizer is not None and divides_by_squares(optimizer)
        return {
            name: (one.adam if scales else one.sgd).with_averages(averages.get(name, 1.0))
            for name, one in CANDIDATES.items()
        }

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        rank, world_size = context.driver.rank, context.driver.world_size
        if context.returns and rank >= world_size:
            raise ConfigError(
                f"RANK is {rank}, and the run was begun with {world_size} workers: with auto, which"
                " may go over to a strategy that needs all of them, a worker only comes back in the"
                " place of one that has died"
            )
        acting = self.begins_as(returns=context.returns)
        callbacks = acting.build(context)
        standing = Standing(
            at_work=acting.name, num_steps=max(each.start_step for each in callbacks)
        )
        return [*callbacks, Chooser(self, context, standing)]


def built(name: str) -> Strategy:
    """The strategy called `name`, as it comes."""
    return build_strategy(*parse_spec(name))


def _names(given: tuple[str, ...] | str) -> tuple[str, ...]:
    # A command line makes a tuple of whatever it is given.
    parts = (given,) if isinstance(given, str) else given
    return tuple(name for part in parts for name in part.split("+") if name)


class _Step(NamedTuple):
    """Of this rank, in seconds; without waits, but for the whole. `processors_s` is what all
    threads took.
    """

    whole_s: float
    computed_s: float
    backward_s: float
    optimizer_s: float
    processors_s: float


class _Predicted(NamedTuple):
    """Of a candidate: a step in seconds, the mean of the coming ones, and averages in a step."""

    step_s: float
    coming_s: float
    averages: float


class _BatchSizes(NamedTuple):
    """Of the ranks, in samples of a step; together always as many.

    Attributes:
        asked: what the user wants.
        now: what the steps had that were seen.
        by_speed: with which all ranks would compute for as long, or `now`.
    """

    asked: tuple[int, ...]
    now: tuple[int, ...]
    by_speed: tuple[int, ...]

    def of(self, name: str) -> tuple[int, ...]:
        """With which the strategy called `name` was predicted."""
        if name.endswith(BY_SPEED):
            return self.by_speed
        return self.asked if built(name).replicas_differ else self.now

    @property
    def are_outdated(self) -> bool:
        """Whether batches follow speeds, which are others by now."""
        return self.by_speed != self.now != self.asked

    def divided(self, run: MeasuredRun, sizes: tuple[int, ...]) -> MeasuredRun:
        """What was measured, if batches had had these sizes."""
        return replace(run, computed_s=run.computed_s * (np.array(sizes) / np.array(self.now)))


class Chooser(Callback):
    """Measures steps, and lets another strategy take over. It stays when one does, and gets events
    behind that one's callbacks.

    Args:
        auto: says what is allowed.
        context: lent by the session.
        standing: where the run is.
    """

    state_key: ClassVar[str] = "auto"
    may_begin_anew: ClassVar[bool] = True

    def __init__(self, auto: Auto, context: Context, standing: Standing) -> None:
        self._auto, self._context = auto, context
        self._stream = context.new_stream()
        self._clock = partial(context.driver.now_s, context.new_stream().next())
        self._standing = standing
        self._must_agree = False
        has_connections = not context.returns  # but those of its generation
        self._is_connected = has_connections and 1 < context.driver.world_size <= _MOST_RANKS
        self._seen: deque[_Step] = deque(maxlen=_SEEN)
        self._to_settle = SETTLING
        self._ready_s = [0.0] * len(context.parameters)
        # Whose gradient came last, in this pass and in the one before.
        self._last_ready, self._last_before = -1, -1
        # The end of the last step on all clocks; when the backward pass and the optimizer's step
        # began.
        self._ended: tuple[float, float, float] | None = None
        self._began_s = self._updates_s = self._backward_s = 0.0
        self._num_samples = 0

    @override
    def on_batch_claimed(self, num_samples: int) -> None:
        self._num_samples += num_samples

    # Timing

    def _worked_s(self) -> float:
        """A clock that stands still while this rank waits for its peers."""
        return self._clock() - self._context.waited_s()

    def _clocks(self) -> tuple[float, float, float]:
        """All of them; the last one is that of the processors."""
        return self._clock(), self._worked_s(), time.process_time()

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        self._began_s = self._worked_s()

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        if self._standing.is_due(ahead=1):
            self._ready_s[index] = self._worked_s() - self._began_s
        self._last_ready = index
        if index == self._last_before:
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        """In the steps that are timed, before the exchange waits for it: what a device computes
        would be taken for waiting.
        """
        device = next(iter(self._context.parameters.values())).device
        is_timed = any(self._standing.is_due(ahead=steps) for steps in range(1, _SEEN + 1))
        if device.type == "cuda" and is_timed:
            torch.cuda.current_stream(device).synchronize()

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self._last_before = self._last_ready
        if synchronised:  # nothing is exchanged beside the others
            self._backward_s += self._worked_s() - self._began_s

    @override
    def on_before_update(self) -> None:
        self._updates_s = self._worked_s()

    @override
    def on_after_step(self) -> None:
        clocks = self._clocks()
        if self._ended is not None and not self._to_settle:
            whole_s, computed_s, processors_s = np.subtract(clocks, self._ended).tolist()
            optimizer_s = clocks[1] - self._updates_s
            self._seen.append(
                _Step(whole_s, computed_s, self._backward_s, optimizer_s, processors_s)
            )
        self._backward_s, self._to_settle = 0.0, max(0, self._to_settle - 1)
        self._standing.num_steps += 1
        if self._must_agree:
            self._meet(self._agree)
        if self._standing.wanted:
            self._change_together()
        elif self._standing.is_due(seen=len(self._seen)) and self._may_look():
            self._meet(self._look)
        self._ended = self._clocks()

    # Choosing

    @property
    def _keeps_step(self) -> bool:
        """Whether ranks take their steps together."""
        return CANDIDATES[self._standing.at_work].keeps_step

    def _may_look(self, at_work: str = "") -> bool:
        """Not all columns of islands that go on without each other would hear of a death."""
        is_alone = self._context.island.size == 1
        keeps_step = CANDIDATES[at_work or self._standing.at_work].keeps_step
        return self._is_connected and (is_alone or keeps_step)

    def _meet(self, ask: Callable[[], object]) -> None:
        """Collective, unless one of ranks that go on without it has died. They may be at other
        steps, and whoever comes first waits here.
        """
        try:
            with self._context.resting():
                ask()
        except PeerError:
            if self._keeps_step:
                raise
            self._is_connected = False
            self._context.notices.notify(in_vain(self._standing))

    def _agree(self) -> None:
        """Ranks that keep no step were saved at different ones, and some had perhaps come back
        without what was decided before. Collective.
        """
        self._must_agree = False
        said = self._gather(self.state_dict()["replicated"])
        newest = max(said, key=lambda one: (len(json.loads(one["decisions"])), one["num_steps"]))
        self._take(newest)
        self._seen.clear()

    def _look(self) -> None:
        """Collective."""
        device = next(iter(self._context.parameters.values())).device
        said = self._gather(
            {
                "whole_s": [step.whole_s for step in self._seen],
                "computed_s": [step.computed_s for step in self._seen],
                "backward_s": median(step.backward_s for step in self._seen),
                "optimizer_s": median(step.optimizer_s for step in self._seen),
                "ready_s": self._ready_s,
                "num_samples": self._num_samples,
                "shared_out": self._shares(),
                "processors_s": median(step.processors_s for step in self._seen),
                "places": self._context.island.gather(_place(device)),
            }
        )
        whole_s, computed_s = (
            np.array([each[k] for each in said]).T for k in ("whole_s", "computed_s")
        )
        standing = self._standing
        seen = SeenSteps.of(standing.at_work, whole_s, computed_s)
        sizes = self._batch_sizes(said, seen)
        # Where a rank is as fast again as the others, who have its samples, a step takes as long.
        is_news = standing.is_news(seen.step_s) or (sizes is not None and sizes.are_outdated)
        if not is_news or (standing.is_early and not seen.mostly_waits()):
            return
        measured, predicted = str(seen), dict[str, _Predicted]()
        if not seen.hardly_waits():
            run = self._measured(said, seen)
            measured += f"; {run.links()}"
            counts = [each["num_samples"] for each in said]
            if are_unlike := max(counts) > _LIKE * min(counts) and sizes is None:
                measured += "; their batches are unlike, and averages of models count them alike"
            predicted = self._predict(run, said, sizes, weighs=are_unlike)
        averages = {name: one.averages for name, one in predicted.items()}
        choice = choose(
            seen,
            {name: one.step_s for name, one in predicted.items()},
            self._auto.steps(self._context.optimizer, averages),
            {name: one.coming_s for name, one in predicted.items()},
        )
        name = choice.name.removesuffix(BY_SPEED)
        if sizes is not None:
            self._share_out(sizes.of(choice.name))
        verb = "stays with" if choice.name == seen.at_work else "goes over to"
        for remark in (
            f"auto, step {standing.num_steps}: {measured}",
            f"auto {verb} {choice.name}; {choice.why}",
            outlook(
                choice,
                seen,
                looks_again=self._may_look(name),
                shares_out=self._context.training_loader() is not None,
            ),
        ):
            self._context.notices.inform(remark)
        standing.expected_s = choice.step_s
        standing.decisions.append(
            Decision(
                step=standing.num_steps,
                before=seen.at_work,
                after=choice.name,
                why=f"{measured}; {choice.why}",
            )
        )
        if name != seen.at_work:
            standing.wanted = name
            if hasattr(built(name), "clip_norm"):
                self._context.notices.inform(
                    f"{name} clips before it selects entries: a loop that calls"
                    " torch.nn.utils.clip_grad_norm_ is to call session.clip_grad_norm_ in its"
                    " place, as offbeat run and integrations do"
                )
            self._change()

    def _shares(self) -> dict[str, Any] | None:
        """What shares samples out, and how many this rank can have in the place of one."""
        loader = self._context.training_loader()
        if loader is None:
            return None
        device = next(iter(self._context.parameters.values())).device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        growth = 1 + USABLE * free_bytes(device) / peak if peak else float(sum(loader.asked))
        return {
            "asked": [*loader.asked],
            "now": [*loader.batch_sizes],
            "place": [*loader.place],
            "growth": growth,
        }

    def _batch_sizes(
        self, said: Sequence[Mapping[str, Any]], seen: SeenSteps
    ) -> _BatchSizes | None:
        """None unless ranks share out the samples of the same step, of which the user wants all of
        them to have as many, and average over samples.
        """
        shares = [each["shared_out"] for each in said]
        if not all(shares) or not built(seen.at_work).weighs_samples:
            return None
        first = shares[0]
        is_alike = all(each["place"] == first["place"] for each in shares)
        if not is_alike or max(first["asked"]) > _LIKE * min(first["asked"]):
            return None
        now, by_speed = tuple(first["now"]), tuple(first["now"])
        if seen.speeds_are_unlike():
            largest = [int(size * each["growth"]) for size, each in zip(now, shares, strict=True)]
            by_speed = seen.by_speed(now, largest)
        # One sample alone has no variance, without which layers such as BatchNorm1d raise.
        if min(by_speed) == 1 < min(first["asked"]):
            by_speed = now
        return _BatchSizes(tuple(first["asked"]), now, by_speed)

    def _share_out(self, sizes: tuple[int, ...]) -> None:
        loader = self._context.training_loader()
        if loader is not None and sizes != tuple(loader.batch_sizes):
            loader.share_out(sizes)
            said = ", ".join(map(str, sizes))
            self._context.notices.inform(f"batches have {said} samples now, by rank")
            self._standing.changed_at = self._standing.num_steps
            self._seen.clear()
            self._to_settle, self._num_samples = SETTLING, 0

    def _gather(self, mine: Any) -> list[Any]:
        """What every rank says; of an island, what the ranks like its first one do."""
        said = self._context.driver.run(gather_values(mine), self._stream.next())
        return self._context.island.first(said)

    def _measured(self, said: Sequence[Mapping[str, Any]], seen: SeenSteps) -> MeasuredRun:
        """Probes links and device. Collective."""
        context = self._context
        parameters = list(context.parameters.values())
        # What most elements are like: the first parameter may be a single number.
        sample, driver = max(parameters, key=torch.Tensor.numel), context.driver
        network = measured_costs(driver, self._stream, sample=sample)
        work = probe_pairs(driver.rank, driver.world_size)
        heard = [
            (rank, *astuple(cost)) for rank, cost in driver.run(work, self._stream.next()).items()
        ]
        pairs = {
            (source, rank): LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
            for rank, costs_to in enumerate(self._gather(heard))
            for source, alpha_s, beta_s_per_byte in costs_to
        }
        # All ranks compute at once, as they do in training.
        device = self._gather(_device_costs(sample, self._clock))
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
                    num_elements=p.numel(), ready=float(share), rows=len(p) if p.dim() > 1 else 1
                )
                for p, share in zip(parameters, ready, strict=True)
                if p.numel()
            ],
            forward_s=max(0.0, seen.mean_computed_s - backward_s - optimizer_s),
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            computed_s=seen.computed_s,
            network=network,
            ports=unlike_ports(pairs, driver.world_size),
            copy_s_per_byte=max(copy_s for copy_s, _ in device),
            multiply_s_per_element=max(multiply_s for _, multiply_s in device),
            moments=sum(
                isinstance(value, torch.Tensor) and value.shape == sample.shape
                for value in states.values()
            ),
            dtype=sample.dtype,
        )

    def _predict(
        self,
        run: MeasuredRun,
        said: Sequence[Mapping[str, Any]],
        sizes: _BatchSizes | None,
        *,
        weighs: bool,
    ) -> dict[str, _Predicted]:
        """By candidate. Collective: each rank simulates some of them. `weighs`: samples must count
        alike, and not batches.
        """
        context = self._context
        places = [place for each in said for place in each["places"]]
        sharing = Counter(place["memory"] for place in places)
        free_bytes = min(place["free_bytes"] / sharing[place["memory"]] for place in places)
        cores = cores_of_one(places)
        processors_s = fmean(each["processors_s"] for each in said)
        num_elements = sum(tensor.num_elements for tensor in run.tensors)
        at_work = self._standing.at_work
        possible = {
            name: strategy
            for name, strategy in self._auto.candidates(context).items()
            if not (weighs and strategy.replicas_differ) or name == at_work
        }
        too_large = [
            name
            for name in possible
            if name != at_work
            and not CANDIDATES[name].fits(num_elements, run.moments, free_bytes=free_bytes)
        ]
        if too_large:
            context.notices.inform(
                f"auto leaves {', '.join(too_large)} out, for which"
                f" {free_bytes / 1e9:.3g} GB of free memory may be too little"
            )
        runs = dict.fromkeys(possible, run)
        if sizes is not None:
            for name, strategy in possible.items():
                if strategy.replicas_differ:
                    runs[name] = sizes.divided(run, sizes.asked)
                elif sizes.by_speed != sizes.now:
                    runs[name + BY_SPEED] = sizes.divided(run, sizes.by_speed)
        mine: dict[str, _Predicted] = {}
        for number, (key, divided) in enumerate(runs.items()):
            name = key.removesuffix(BY_SPEED)
            strategy, candidate = possible[name], CANDIDATES[name]
            if number % context.driver.world_size == context.driver.rank and name not in too_large:
                try:
                    predicted = predict(strategy, divided, period=candidate.period)
                    coming_s = step_s = predicted.step_s
                    if name != at_work:  # whose work is in `processors_s` already
                        coming_s = step_s = candidate.on_processors_s(
                            step_s, num_elements, processors_s=processors_s, cores=cores
                        )
                    if candidate.begins_as and name != at_work:
                        begins_s = predict(built(candidate.begins_as), divided).step_s
                        coming_s += candidate.beginning * (begins_s - step_s)
                except Exception as error:  # noqa: BLE001 - a prediction must not end a run
                    context.notices.notify(
                        f"auto leaves {name} out, since predicting failed: {error!r}"
                    )
                    continue
                mine[key] = _Predicted(step_s, coming_s, predicted.exchanges)
        found = {key: one for theirs in self._gather(mine) for key, one in theirs.items()}
        return {key: _Predicted(*found[key]) for key in runs if key in found}

    def _change_together(self) -> None:
        """`_change`, unless one of ranks that go on without it has died since they looked."""
        if not self._keeps_step:
            self._meet(lambda: self._gather(None))
        if self._is_connected:
            self._change()
        else:
            self._standing.wanted = ""

    def _change(self) -> None:
        standing = self._standing
        if self._context.switch(built(standing.wanted), self, standing.num_steps):
            standing.at_work, standing.wanted = standing.wanted, ""
            standing.changed_at = standing.num_steps
            self._seen.clear()

    # State

    @override
    def decisions(self) -> Sequence[Decision]:
        return self._standing.decisions

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        standing = asdict(self._standing)
        return {"replicated": standing | {"decisions": json.dumps(standing["decisions"])}}

    @override
    def strategy_of(self, state: Mapping[str, Mapping[str, Any]]) -> Strategy:
        return built(state["replicated"]["at_work"])

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._take(state["replicated"])
        self._must_agree = not self._keeps_step and self._may_look()
        if self._standing.wanted and not self._must_agree:
            self._change()  # the coming step is the last one, as it was to be

    def _take(self, standing: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        decisions = [Decision(**each) for each in json.loads(standing["decisions"])]
        self._standing = Standing(**{**standing, "decisions": decisions})


def _place(device: torch.device) -> dict[str, Any]:
    """What this rank may take of its host and its device. Ranks that share memory, or processors,
    name it alike.
    """
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
    booted = Path("/proc/sys/kernel/random/boot_id")
    host = booted.read_text() if booted.exists() else platform.node()
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    return {
        "memory": f"{host} {uuid}",
        "free_bytes": free_bytes(device),
        "host": host,
        "cores": [*cores],
        "processors": {f"{host} {name}": each for name, each in processor_limits().items()},
    }


def cores_of_one(places: Sequence[Mapping[str, Any]]) -> float:
    """How many the rank has that has the fewest to itself. SLURM gives each rank cores of its own,
    and torchrun gives all of a host the same ones; a container has the time of so many.
    """
    ranks_on, cores_on = Counter[str](), defaultdict[str, set[int]](set)
    for place in places:
        ranks_on.update([place["host"], *place["processors"]])
        cores_on[place["host"]] |= {*place["cores"]}
    found = list[float]()
    for place in places:
        shared = {place["host"]: len(cores_on[place["host"]]), **place["processors"]}
        found.append(len(place["cores"]))
        found += [number / ranks_on[name] for name, number in shared.items()]
    return min(found)


def _device_costs(sample: torch.Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds to copy a byte, and to multiply an element of a matrix by a column."""
    matrix = sample.new_zeros((1024, 1024))
    thin, copied = sample.new_zeros((1024, 2)), torch.empty_like(matrix)
    copy_s = fastest_s(sample, lambda: copied.copy_(matrix), clock) / matrix.nbytes
    return copy_s, fastest_s(sample, lambda: matrix @ thin, clock) / matrix.numel() / 2
