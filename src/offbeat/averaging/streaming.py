"""Averages that travel while training goes on, one fragment of the model after the other.

    every period / F steps, of the next of F fragments, in turn:
        begun   = x                                     its parameters as they leave
        change  = begun - anchor                        travels for `delay` steps
    `delay` steps later:
        anchor  = the outer optimizer's step from the anchor with the mean of all ranks' changes
        x       = x + anchor - begun                    what was learned meanwhile is kept whole
        or x    = mix x + (1 - mix) anchor

With fragments, an outer optimizer and a mix this is Streaming DiLoCo (arXiv 2501.18512, algorithm
2, without quantisation, which a `WeightCodec` does). With one fragment and the mean as it is, it is
DaSGD (arXiv 2006.00441), whose weighted correction is replaced by the exact one, so that nothing of
a rank's progress is lost and the mean over ranks is that of Local SGD.

Cost per period: the bytes of Local SGD, a fragment at a time, hidden behind `delay` steps; memory
for the anchor, and a copy of one fragment. What answers the peers' messages, such as the second
half of a sum in few bits, leaves as a backward pass begins or a step ends.

Differences from Streaming DiLoCo: a fragment is a run of parameters of about equal elements, and
not of strided layers; statistics are averaged with the first fragment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from offbeat.averaging.outer import OuterFactory, OuterOptimizer
from offbeat.averaging.periodic import (
    EncodedChanges,
    Everyone,
    WeightExchange,
    coded_reduction,
)
from offbeat.callbacks.callback import CallbackState
from offbeat.codec.option_value import OptionValue
from offbeat.codec.topk_codec import WeightCodec, another_codec
from offbeat.errors import ConfigError
from offbeat.weights.model_weights import ModelWeights, average_


class Streaming(OptionValue):
    """How averages travel while training goes on.

    Args:
        fragments: of the model, averaged in turn, >= 1.
        delay: steps in which a fragment travels, >= 0, less than period / fragments.
        mix: weight of a rank's own parameters when the average comes, in [0, 1); None: they keep
            what they have learned meanwhile, and only what left is replaced.
    """

    def __init__(self, *, fragments: int = 1, delay: int = 0, mix: float | None = None) -> None:
        if fragments < 1 or delay < 0 or not (mix is None or 0 <= mix < 1):
            raise ConfigError(
                "Streaming needs fragments >= 1, delay >= 0 and mix in [0, 1) or None, got"
                f" {fragments}, {delay} and {mix}"
            )
        self.fragments, self.delay, self.mix = fragments, delay, mix

    @classmethod
    def of(cls, text: str) -> Streaming:
        """The one that text such as "4x2" (fragments, delay) or "4x2x0.5" (and mix) describes."""
        try:
            fragments, delay, *mixes = text.split("x")
            (mix,) = mixes or ("",)
            numbers = int(fragments), int(delay), float(mix) if mix else None
        except ValueError as error:
            raise ConfigError(
                "exchange must be a Streaming, or fragments x delay, or fragments x delay x mix,"
                " such as '4x2' or '4x2x0.5'; or 'pairs', 'members', or a quorum and seconds of"
                f" grace, such as '75%+2s', got {text!r}"
            ) from error
        return cls(fragments=numbers[0], delay=numbers[1], mix=numbers[2])


class _Fragment:
    """Some parameters, where their last average left them, and what travels of them."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        peers: Everyone,
        codec: WeightCodec | None,
        outer: OuterFactory,
    ) -> None:
        self.parameters = parameters
        self.rule = OuterOptimizer(parameters, make=outer)
        reduce_by = partial(coded_reduction, codec)
        self._make_changes = partial(EncodedChanges, parameters, reduce_by, peers)
        # Without a codec nothing is owed, so memory for changes is held only while they travel.
        self.owes = codec is not None
        self.changes = self._make_changes() if self.owes else None
        self.begun: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []  # once they have come, for a state that is saved

    def launch(self) -> None:
        self.begun = [each.detach().clone() for each in self.parameters.values()]
        self.changes = self.changes or self._make_changes()
        self.changes.launch(self.rule.changes())

    def go_on(self) -> None:
        if self.changes is not None and not self.means:
            self.changes.go_on()

    def arrived(self) -> list[torch.Tensor]:
        """The mean changes. All ranks have launched them, so they come."""
        if not self.means:
            assert self.changes is not None, "nothing was launched"
            self.means = self.changes.mean()
        return self.means

    def forget(self) -> None:
        """Nothing of it is under way any more."""
        if self.begun and not self.means and self.changes is not None:
            self.changes.discard()
        self.begun, self.means = [], []
        if not self.owes:
            self.changes = None


class StreamingMean(WeightExchange):
    """Fragments of all ranks' weights, averaged in turn and merged later.

    Args:
        weights: what is averaged.
        parameters: those among it, by name.
        peers: all ranks.
        streaming: fragments, delay and mix.
        outer: makes the optimizer that is applied to means.
        codec: how changes travel; None: as they are.
    """

    state_key = "streaming_average"

    def __init__(
        self,
        weights: ModelWeights,
        parameters: Mapping[str, torch.nn.Parameter],
        peers: Everyone,
        *,
        streaming: Streaming,
        outer: OuterFactory,
        codec: WeightCodec | None,
    ) -> None:
        self.delay, self._mix = streaming.delay, streaming.mix
        self._weights, self._peers = weights, peers
        self._fragments = [
            _Fragment(fragment, peers, codec, outer)
            for fragment in fragments_of(parameters, streaming.fragments)
        ]
        self._num_turns = streaming.fragments
        self._under_way: int | None = None  # the place of a fragment

    @override
    def begin(self) -> None:
        for fragment in self._fragments:
            fragment.rule.begin()

    @override
    def launch(self, number: int) -> None:
        place = number % self._num_turns
        if place < len(self._fragments):
            self._fragments[place].launch()
            self._under_way = place

    @override
    def go_on(self) -> None:
        if self._under_way is not None:
            self._fragments[self._under_way].go_on()

    @override
    def merge(self) -> None:
        place, driver, stream = self._under_way, self._peers.driver, self._peers.stream
        if place is None:
            return  # the model has fewer parameters than fragments were asked for
        if not place:
            if statistics := self._weights.statistics():
                self.encode_s += average_(
                    statistics, statistics, driver=driver, stream=stream, weight=1.0
                )
            self._weights.average_counters_(driver, stream)
        fragment = self._fragments[place]
        means = fragment.arrived()
        begin_s = time.perf_counter()
        for parameter, kept in zip(fragment.parameters.values(), fragment.begun, strict=True):
            if self._keeps_what_it_learned(parameter):
                torch.sub(parameter.detach(), kept, out=kept)
            else:
                kept.copy_(parameter.detach())
        # The parameters hold the anchor afterwards.
        fragment.rule.merge_(means)
        for parameter, kept in zip(fragment.parameters.values(), fragment.begun, strict=True):
            if self._keeps_what_it_learned(parameter):
                parameter.detach().add_(kept)
            else:
                assert self._mix is not None, "else what was learned is kept whole"
                parameter.detach().lerp_(kept, self._mix)
        fragment.forget()
        self._under_way = None
        self.encode_s += time.perf_counter() - begin_s

    def _keeps_what_it_learned(self, parameter: torch.nn.Parameter) -> bool:
        """Whole, while its last average was under way."""
        return self._mix is None or not parameter.requires_grad

    @override
    def state(self) -> CallbackState:
        local = {"world_size": self._peers.driver.world_size}
        state: dict[str, Any] = {"additive": {}, "local": local, "replicated": {}}
        for place, fragment in enumerate(self._fragments):
            # What comes decides what is owed.
            means = fragment.arrived() if place == self._under_way else []
            state["replicated"] |= fragment.rule.state()
            if fragment.changes is not None:
                owed = fragment.changes.state()
                state["additive"] |= owed["additive"]
                state["local"] |= owed["local"]
            if means:
                for name, mean, begun in zip(
                    fragment.parameters, means, fragment.begun, strict=True
                ):
                    state["replicated"][f"arrived/{name}"] = mean
                    state["local"][f"begun/{name}"] = begun
        return state

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """With other fragments than before, what was under way is given up. With another number of
        ranks all of them go on from the averaged model, which began where the means lead from the
        anchor.
        """
        if state.get("additive") and not any(fragment.owes for fragment in self._fragments):
            raise another_codec()
        self._under_way = None
        replicated, local = state["replicated"], state["local"]
        is_another_world = local.get("world_size") != self._peers.driver.world_size
        arrived = {key for key in replicated if key.startswith("arrived/")}
        for place, fragment in enumerate(self._fragments):
            fragment.forget()
            if fragment.changes is not None:
                fragment.changes.load(state)
            mine = {
                key: value
                for key, value in replicated.items()
                if _parameter_of(key) in fragment.parameters
            }
            fragment.rule.load(mine)
            if arrived and arrived == {f"arrived/{name}" for name in fragment.parameters}:
                self._under_way = place
                for name, parameter in fragment.parameters.items():
                    # What was read of a file is on the host.
                    mean = replicated[f"arrived/{name}"].to(parameter.device, copy=True)
                    begun = local.get(f"begun/{name}", parameter)  # a rank that was not there
                    if is_another_world:
                        begun = fragment.rule.anchor[name] + mean
                    fragment.begun.append(begun.detach().clone().to(parameter))
                    fragment.means.append(mean)

    @property
    @override
    def is_under_way(self) -> bool:
        return self._under_way is not None


def _parameter_of(key: str) -> str:
    """The name of a parameter, which may hold slashes, in that of an entry: what an optimizer keeps
    has two further words before it.
    """
    return key.split("/", 3 if key.startswith("outer/") else 1)[-1]


def fragments_of(
    parameters: Mapping[str, torch.nn.Parameter], count: int
) -> Sequence[Mapping[str, torch.nn.Parameter]]:
    """The parameters in `count` runs of about equal elements, in the model's order; in fewer where
    there are fewer parameters. A large one leaves no run empty.
    """
    total = max(1, sum(parameter.numel() for parameter in parameters.values()))
    fragments: list[dict[str, torch.nn.Parameter]] = []
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        place = min(count - 1, int(middle * count / total))
        if place >= len(fragments):
            fragments.append({})
        fragments[min(place, len(fragments) - 1)][name] = parameter
        before += parameter.numel()
    return fragments
