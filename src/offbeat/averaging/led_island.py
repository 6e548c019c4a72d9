"""Averages that wait for nobody, over islands: the first rank of an island takes part for all of
it.

Each rank of such a strategy decides alone, by its clock, whose models are in its next average. The
shards of one replica would soon be of different mixtures. So one rank of an island decides: its
first has the whole replica on the host, and runs the strategy with it as a rank does that holds a
whole model. The others give it their shards at the end of a step, and take what has become of them.

    shard 0                                      shard 1
    optimizer.step()                             optimizer.step()
      mirror of shard 1       <-  what it holds    |
      averages of whole replicas                   |
      mirror of shard 1       ->  what it holds    |

So protocols, membership, merge rules and the models of newcomers are those of whole models, and an
average is in all shards of a replica or in none. What travels between islands is sent and received
by their first ranks. Inside, each of the others sends and receives its shard once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, cast

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context, Notices
from offbeat.errors import CheckpointError
from offbeat.membership.island import Island
from offbeat.weights.model_weights import BufferNames, ModelWeights

Build: TypeAlias = Callable[[Context, ModelWeights], list[Callback]]
"""Makes the one callback that exchanges weights."""


def led_by_first_rank(
    context: Context, weights: ModelWeights, build: Build, *, changes_gradients: bool
) -> Callback:
    """What `build` makes on the first rank of an island, for all ranks of it. Collective.

    Args:
        context: of the session.
        weights: this rank's shards, and its buffers.
        build: makes the callback of a whole model.
        changes_gradients: whether that acts on gradients before a step.
    """
    island, notices = context.island, _Overheard(context.notices)
    described = [(name, list(t.shape), _name_of(t.dtype)) for name, t in _tensors(weights).items()]
    said = island.gather((described, [*weights.parameters], weights.chosen))
    if island.rank:
        shards, inner = {island.rank: weights}, Callback()
    else:
        shards = {shard: _mirror(*each) for shard, each in enumerate(said) if shard}
        whole = _joined([weights, *shards.values()])
        # The replica is one rank of those that exchange.
        led = replace(
            context,
            parameters=cast("Mapping[str, torch.nn.Parameter]", whole.parameters),
            buffers=whole.buffers,
            island=Island(),
            model=None,
            notices=notices,
        )
    island.collect({number: _all_of(shard) for number, shard in shards.items()})
    if not island.rank:
        (inner,) = build(led, whole)
    # One that comes later has the model of those who train.
    island.spread({number: _all_of(shard) for number, shard in shards.items()})
    return LedIsland(island, weights, shards, inner, notices, changes_gradients=changes_gradients)


class _Overheard(Notices):
    """Notices of a session, of which those that come by this way are for the whole island.

    Attributes:
        new: that the others have not been told.
    """

    def __init__(self, notices: Notices) -> None:
        super().__init__(0)
        self.kept, self.due, self.new = notices.kept, notices.due, list[str]()
        self._notices = notices

    @override
    def _add(self, remark: str, level: int) -> None:
        self.new.append(remark)
        self._notices._add(remark, level)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mirror(
    described: Sequence[tuple[str, Sequence[int], str]],
    parameters: Sequence[str],
    chosen: Sequence[Sequence[str]],
) -> ModelWeights:
    """Memory for what another rank has."""
    made = {name: torch.zeros(shape, dtype=getattr(torch, of)) for name, shape, of in described}
    buffers = {name: tensor for name, tensor in made.items() if name not in parameters}
    return ModelWeights(
        parameters={name: torch.nn.Parameter(made[name]) for name in parameters},
        buffers=lambda: buffers,
        chosen=BufferNames(*map(tuple, chosen)),
    )


def _joined(shards: Sequence[ModelWeights]) -> ModelWeights:
    """All shards of a replica as one model."""

    def named(each: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {_at(name, n): t for n, tensors in enumerate(each) for name, t in tensors.items()}

    def chosen(kind: int) -> tuple[str, ...]:
        return tuple(_at(name, n) for n, shard in enumerate(shards) for name in shard.chosen[kind])

    return ModelWeights(
        parameters=named(shard.parameters for shard in shards),
        buffers=lambda: named(shard.buffers() for shard in shards),
        chosen=BufferNames(chosen(0), chosen(1)),
    )


def _at(name: str, shard: int) -> str:
    return f"{name}@{shard}"


def _tensors(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """All that is averaged, in an order that both ends of a transfer have."""
    buffers, chosen = weights.buffers(), weights.chosen
    names = (*chosen.statistics, *chosen.counters)
    return {**weights.parameters, **{name: buffers[name] for name in names}}


def _gradients(weights: ModelWeights) -> list[torch.Tensor]:
    return [p.grad for p in weights.parameters.values() if p.grad is not None]


def _trains(weights: ModelWeights) -> list[torch.Tensor]:
    """Which parameters are not frozen, in one tensor, shape (any,)."""
    return [torch.tensor([p.requires_grad for p in weights.parameters.values()], dtype=torch.uint8)]


def _used(weights: ModelWeights) -> list[bool]:
    return [p.grad is not None for p in weights.parameters.values()]


class LedIsland(Callback):
    """A rank of an island whose first rank takes part in averages for all of it. All ranks of an
    island come to each event together.

    Args:
        island: these ranks.
        weights: this rank's.
        shards: at the first rank, mirrors of the others' weights, by rank; at another one, its own.
        inner: at the first rank, averages the whole replica; at another one it does nothing.
        notices: what `inner` remarks.
        changes_gradients: as of `led_by_first_rank`.
    """

    state_key: ClassVar[str] = "led_island"
    averages_models = True

    def __init__(
        self,
        island: Island,
        weights: ModelWeights,
        shards: Mapping[int, ModelWeights],
        inner: Callback,
        notices: _Overheard,
        *,
        changes_gradients: bool,
    ) -> None:
        self._notices = notices
        self._island, self._weights, self._shards, self._inner = island, weights, shards, inner
        self._changes_gradients = changes_gradients
        self._is_published = False
        self._said: dict[str, Any] = {}
        self._tell()
        self.start_step = int(self._said["start_step"])
        self.averages_alone = bool(self._said["averages_alone"])

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        self._publish()

    @override
    def on_before_step(self) -> None:
        self._publish()
        self._inner.on_before_step()

    @override
    def on_before_update(self) -> None:
        if not self._changes_gradients:
            self._inner.on_before_update()
        else:
            (trains,) = _trains(self._weights)
            said = self._island.gather((_used(self._weights), trains.tolist()))
            self._agree_on_used([used for used, _ in said])
            self._freeze_mirrors(dict(enumerate(trains for _, trains in said)))
            self._island.collect(self._of_shards(_gradients))
            self._inner.on_before_update()
            whole = [self._weights, *self._shards.values()]
            self._agree_on_used(self._island.first([*map(_used, whole)]))
            self._island.spread(self._of_shards(_gradients))

    @override
    def on_closure(self) -> None:
        self._publish()
        self._inner.on_closure()

    @override
    def on_after_step(self) -> None:
        self._act(self._inner.on_after_step)

    @override
    def on_finish(self) -> None:
        self._act(self._inner.on_finish)

    @override
    def on_rest(self) -> None:
        self._inner.on_rest()

    @override
    def on_resume(self) -> None:
        self._inner.on_resume()

    @override
    def on_abandon(self, reason: str) -> None:
        self._inner.on_abandon(reason)

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        self._publish()
        missing: frozenset[int] = frozenset()
        self._island.collect(self._of_shards(_all_of))  # the loop may have written into it since
        if self._island.rank == 0:
            means = {number: _copied(shard) for number, shard in self._shards.items()}
            missing = self._inner.average_into(_joined([weights, *means.values()]))
        else:
            means = {self._island.rank: weights}
        # Where a peer came for an average, the first shard holds that now, and so must the others;
        # before the mean, which may be asked for in the place of the model.
        self._island.spread(self._of_shards(_all_of))
        self._island.spread({number: _all_of(shard) for number, shard in means.items()})
        return frozenset(self._island.first(sorted(missing)))

    @override
    def counters(self) -> Mapping[str, float]:
        return dict(self._said["counters"])

    @override
    def gauges(self) -> Mapping[str, float]:
        return dict(self._said["gauges"])

    @override
    def steps_behind(self) -> int:
        return int(self._said["steps_behind"])

    @override
    def replicas_agree(self) -> bool:
        return bool(self._said["replicas_agree"])

    @override
    def state_dict(self) -> CallbackState:
        state = self._inner.state_dict()
        numbers = {
            kind: {key: value for key, value in entries.items() if not torch.is_tensor(value)}
            for kind, entries in state.items()
        }
        of_first = [
            (kind, key.removesuffix("@0"), _name_of(value.dtype), bool(value.dim()))
            for kind, entries in state.items()
            for key, value in entries.items()
            if torch.is_tensor(value) and key.endswith("@0")
        ]
        found, described = self._island.first((numbers, of_first))
        if self._island.rank:
            mine = [_room(self._weights, key, dtype, sized) for _, key, dtype, sized in described]
            self._island.spread({self._island.rank: mine})
        else:
            mine = [state[kind][_at(key, 0)] for kind, key, *_ in described]
            self._island.spread(
                {n: [state[kind][_at(key, n)] for kind, key, *_ in described] for n in self._shards}
            )
        for (kind, key, *_), tensor in zip(described, mine, strict=True):
            found.setdefault(kind, {})[key] = tensor
        return found

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        # The weights are loaded too, before or after this, so what was published is out of date.
        self._is_published = False
        mine = {
            (kind, key): value
            for kind, entries in state.items()
            for key, value in entries.items()
            if torch.is_tensor(value)
        }
        keys = [(kind, key) for kind, key in self._island.first([*mine])]
        shapes = {name: parameter.shape for name, parameter in self._weights.parameters.items()}
        if any(
            key not in mine or mine[key].shape not in ((), shapes.get(_parameter(key[1], shapes)))
            for key in keys
        ):
            raise CheckpointError("the state of another rank was saved with another model")
        own = [mine[key] for key in keys]
        if self._island.rank:
            self._island.collect({self._island.rank: own})
            return
        theirs = {
            n: [
                _room(shard, key, _name_of(mine[kind, key].dtype), bool(mine[kind, key].dim()))
                for kind, key in keys
            ]
            for n, shard in self._shards.items()
        }
        self._island.collect(theirs)
        whole = {kind: dict(entries) for kind, entries in state.items()}
        for n, tensors in {0: own, **theirs}.items():
            for (kind, key), tensor in zip(keys, tensors, strict=True):
                whole[kind].pop(key, None)
                whole[kind][_at(key, n)] = tensor
        self._inner.load_state_dict(whole)

    @override
    def close(self) -> None:
        self._inner.close()

    def _publish(self) -> None:
        """Let peers have the model, which the user may have loaded after attaching."""
        if not self._is_published:
            self._is_published = True
            self._island.collect(self._of_shards(_all_of))
            self._inner.on_backward_begins(synchronised=True)
            # Nobody changes its shard before it has arrived.
            self._tell()

    def _act(self, event: Callable[[], None]) -> None:
        """The first rank acts on `event` with the whole replica, and the others take the result."""
        self._is_published = True
        trains = self._of_shards(_trains)
        self._island.collect({n: [*_all_of(each), *trains[n]] for n, each in self._shards.items()})
        self._freeze_mirrors({n: each[0] for n, each in trains.items()})
        event()
        self._island.spread(self._of_shards(_all_of))
        self._tell()

    def _freeze_mirrors(self, trains: Mapping[int, Iterable[Any]]) -> None:
        """Mirrors are frozen where what they are of is, as `_trains` says by rank."""
        for number, mirror in () if self._island.rank else self._shards.items():
            for parameter, its in zip(mirror.parameters.values(), trains[number], strict=True):
                parameter.requires_grad_(bool(its))

    def _tell(self) -> None:
        """Learn what the first rank has counted and remarked."""
        inner, new = self._inner, self._notices.new
        said = {
            "notices": [new.pop(0) for _ in range(len(new))],
            "counters": dict(inner.counters()),
            "gauges": dict(inner.gauges()),
            "steps_behind": inner.steps_behind(),
            "replicas_agree": inner.replicas_agree(),
            "start_step": inner.start_step,
            "averages_alone": inner.averages_alone,
        }
        self._said = self._island.first(said)
        for remark in self._said["notices"] if self._island.rank else ():
            self._notices.inform(remark)
            new.clear()

    def _of_shards(
        self, tensors: Callable[[ModelWeights], Sequence[torch.Tensor]]
    ) -> dict[int, Sequence[torch.Tensor]]:
        return {number: tensors(shard) for number, shard in self._shards.items()}

    def _agree_on_used(self, used: Sequence[Sequence[bool]]) -> None:
        """Have gradients where the other end of a transfer has."""
        for number, shard in self._shards.items():
            for parameter, is_used in zip(shard.parameters.values(), used[number], strict=True):
                if not is_used:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def _copied(weights: ModelWeights) -> ModelWeights:
    """The same, in memory of its own."""
    made = {name: tensor.detach().clone() for name, tensor in _tensors(weights).items()}
    buffers = {name: tensor for name, tensor in made.items() if name not in weights.parameters}
    parameters = {name: made[name] for name in weights.parameters}
    return replace(weights, parameters=parameters, buffers=lambda: buffers)


def _all_of(weights: ModelWeights) -> list[torch.Tensor]:
    return [*_tensors(weights).values()]


def _room(weights: ModelWeights, key: str, dtype: str, sized: bool) -> torch.Tensor:
    """Memory for an entry of a state, which may be wider than its parameter, or a single number."""
    parameter = weights.parameters[_parameter(key, weights.parameters)]
    return parameter.new_zeros(parameter.shape if sized else (), dtype=getattr(torch, dtype))


def _parameter(key: str, names: Container[str]) -> str:
    """Which of `names`, which may hold slashes, ends that of an entry; "": none."""
    while key and key not in names:
        key = key.partition("/")[2]
    return key
