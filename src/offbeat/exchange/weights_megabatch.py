"""All ranks' weights, merged after every mega-batch with weights of their own; batch sizes and learning rates follow speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offbeat.collectives.control import gather_values
from offbeat.engine.claims import Claim, Span, Work
from offbeat.errors import CheckpointError, ConfigError
from offbeat.exchange.weights import ModelWeights
from offbeat.planning.batch_sizes import BatchRule, Bounds, Proportional, binding, learning_rate
from offbeat.planning.merging import Weighting, merge_weights, perturbed, with_momentum
from offbeat.transport.driver import Driver, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatchPlan:
    """How mega-batches are dealt out and merged.

    Attributes:
        mega_batch: samples between merges, >= 1.
        base: b_base, the batch size that the user's learning rate is for, >= 1.
        bounds: of every rank's batch size.
        rule: how batch sizes follow speeds; None: they stay, and each rank gets an equal share.
        weighting: what merge weights follow.
        delta: of the perturbation, in [0, 1); 0: none.
        threshold: no perturbation where a model's norm per parameter reaches it.
        momentum: gamma, in [0, 1).
    """

    mega_batch: int
    base: int
    bounds: Bounds
    rule: BatchRule | None
    weighting: Weighting
    delta: float = 0.0
    threshold: float = 0.1
    momentum: float = 0.0


class ScaledRate:
    """eta_0 b_i / b_base during one optimizer step, and eta_0 before and after it, so that schedulers see what they set.

    Args:
        optimizer: the user's.
        base: b_base.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, base: int) -> None:
        self._optimizer = optimizer
        self._base = base
        self._before: list[Any] = []

    def scale(self, num_samples: int) -> None:
        self.restore()
        self._before = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(group["lr"], num_samples, self._base)

    def restore(self) -> None:
        """Also after a step that raised, which has no end that anybody is told of."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            group["lr"] = before
        self._before = []


class MegaBatches:
    """Merges when the loader says that a mega-batch is computed.

    Without a loader the ranks feed themselves, with batches of b_base samples as far as this part knows: it merges after every
    `mega_batch / (ranks x b_base)` steps, with equal weights, and batch sizes stay what they are.

    Args:
        weights: what is merged.
        plan: how.
        optimizer: the user's, for its learning rates.
        driver: carries collectives out.
        stream: this part's channels.
        notify: for remarks.

    Attributes:
        batch_sizes: what each rank claims at a time.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        plan: MegaBatchPlan,
        optimizer: torch.optim.Optimizer,
        driver: Driver,
        stream: Stream,
        notify: Callable[[str], None],
    ) -> None:
        self.mega_batch = plan.mega_batch
        self.deals_equally = plan.rule is None
        self.batch_sizes: tuple[int, ...] = (plan.base,) * driver.world_size
        self._weights, self._plan, self._driver, self._stream, self._notify = weights, plan, driver, stream, notify
        self._bounds = [plan.bounds] * driver.world_size
        self._rate = ScaledRate(optimizer, plan.base)
        self._in_hand = 0
        self._is_fed = False
        self._steps_alone = self._num_merges = 0
        self._encode_s = 0.0
        self._binding: Mapping[int, str] = {}
        self._momentum = _Momentum(weights.parameters, gamma=plan.momentum) if plan.momentum else None

    # The loader's side

    def limit(self, largest: Sequence[int | None]) -> None:
        """A loader feeds this rank from now on. `largest`: what fits into each rank's memory, by rank.

        Raises:
            ConfigError: less fits than the smallest batch allowed, or a loader is there already.
        """
        if self._is_fed:
            raise ConfigError("the session has a loader already, which merges the models; attach once for each")
        smallest = self._plan.bounds.smallest
        for rank, most in enumerate(largest):
            if most is not None and most < smallest:
                raise ConfigError(f"rank {rank} can hold batches of {most} samples, but min_batch_size is {smallest}; lower it")
        limits = [
            bound.limit if most is None else min(most, bound.limit) for bound, most in zip(self._bounds, largest, strict=True)
        ]
        self._bounds = [Bounds(smallest=smallest, largest=None if limit == Bounds().limit else limit) for limit in limits]
        self.batch_sizes = tuple(b.clip(size) for b, size in zip(self._bounds, self.batch_sizes, strict=True))
        self._is_fed = True

    def on_batch_claimed(self, num_samples: int) -> None:
        """One that the loader has claimed; those of a user's own loop are as large as the user likes."""
        if self._is_fed:
            self._in_hand += num_samples

    def settle(self) -> None:
        """A device that computes in the background must not claim more than it gets done."""
        device = next(iter(self._weights.parameters.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def merge(self, work: Work) -> list[Work]:
        with torch.no_grad():
            mine = [work.updates, work.batch_size, work.busy_s, [claim.spans for claim in work.claims], self._norm()]
            stated = self._driver.run(gather_values(mine), self._stream.next())
            works = [_work(other) for other in stated]
            shares = self._shares(works, [float(other[4]) for other in stated])
            self._merge(shares[self._driver.rank])
        self._resize(works)
        self._in_hand = 0
        return [replace(work, weight=share / sum(shares)) for work, share in zip(works, shares, strict=True)]

    # Events

    def on_backward_begins(self, *, synchronised: bool) -> None:
        """Where the first mega-batch begins is seen as late as can be: the user may load weights after attaching."""
        if self._momentum is not None:
            self._momentum.begin()

    def on_before_step(self) -> None:
        if self._momentum is not None:
            self._momentum.begin()
        self._scale_rate()

    def on_closure(self) -> None:
        self.on_before_step()

    def on_after_step(self) -> None:
        self._rate.restore()
        self._in_hand = 0
        if self._is_fed:
            return
        self._steps_alone += 1
        if self._steps_alone % max(1, round(self.mega_batch / (self._driver.world_size * self._plan.base))) == 0:
            self._merge(1.0)

    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_merges, "encode_s": self._encode_s}

    # One merge

    def _shares(self, works: Sequence[Work], norms: Sequence[float]) -> tuple[float, ...]:
        updates = [work.updates for work in works]
        if not any(updates):
            return (1.0,) * len(works)
        shares = merge_weights(
            self._plan.weighting,
            updates=updates,
            batch_sizes=[work.batch_size for work in works],
            samples=[work.samples for work in works],
        )
        return perturbed(shares, norms, delta=self._plan.delta, threshold=self._plan.threshold)

    def _merge(self, weight: float) -> None:
        self._encode_s += self._weights.average_(self._driver, self._stream, weight=weight)
        if self._momentum is not None:
            self._momentum.add_()
        self._num_merges += 1

    def _resize(self, works: Sequence[Work]) -> None:
        if self._plan.rule is None:
            return
        # Updates a second of computing say the same as updates, less coarsely.
        finely = isinstance(self._plan.rule, Proportional) and all(work.busy_s > 0 for work in works if work.updates)
        made = [work.samples / work.batch_size / work.busy_s if finely and work.updates else work.updates for work in works]
        self.batch_sizes = self._plan.rule.resize([work.batch_size for work in works], made, self._bounds)
        bound = binding(self.batch_sizes, self._bounds)
        if bound != self._binding:
            which = ", ".join(f"rank {rank} at its {end} ({self.batch_sizes[rank]})" for rank, end in bound.items())
            self._notify(f"merge {self._num_merges}: batch sizes are held by bounds: {which or 'none any more'}")
        self._binding = bound

    def _scale_rate(self) -> None:
        if self._in_hand and self._plan.rule is not None:
            self._rate.scale(self._in_hand)

    def _norm(self) -> float:
        """||w|| / (number of parameters); 0 where nobody asks."""
        if not self._plan.delta:
            return 0.0
        parameters = [p.detach() for p in self._weights.parameters.values() if p.numel()]
        return float(torch.nn.utils.get_total_norm(parameters)) / sum(p.numel() for p in parameters)

    # State

    def state_dict(self) -> dict[str, dict[str, Any]]:
        counts = {"num_merges": self._num_merges, "steps_alone": self._steps_alone, "batch_sizes": list(self.batch_sizes)}
        return {"replicated": counts | ({} if self._momentum is None else self._momentum.state())}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_merges" not in saved:
            raise CheckpointError("the state lacks 'num_merges'; it was saved by another strategy")
        if self._momentum is not None:
            self._momentum.load({key: value for key, value in saved.items() if isinstance(value, torch.Tensor)})
        self._num_merges, self._steps_alone = int(saved["num_merges"]), int(saved["steps_alone"])
        sizes = tuple(map(int, saved["batch_sizes"]))
        if len(sizes) == len(self.batch_sizes):  # other workers have other speeds: begin anew
            self.batch_sizes = tuple(bound.clip(size) for bound, size in zip(self._bounds, sizes, strict=True))
        self._in_hand = 0

    def close(self) -> None:
        self._rate.restore()


class _Momentum:
    """gamma (w - w_before) of the last merge, added in each; in float32 or float64, the same on every rank."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, gamma: float) -> None:
        self._parameters = parameters
        self._gamma = gamma
        self._latest: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the parameters as they are for where the first mega-batch begins, unless that is known."""
        if not self._latest:
            self._latest = {name: _wide(parameter).clone() for name, parameter in self._parameters.items()}

    def add_(self) -> None:
        """The parameters hold the mean: add the momentum. One that was frozen meanwhile stays at the mean."""
        self.begin()
        for name, parameter in self._parameters.items():
            latest, before = self._latest[name], self._before.get(name)
            merged = _wide(parameter)
            if parameter.requires_grad:
                merged = with_momentum(merged, latest, before, gamma=self._gamma)
                parameter.detach().copy_(merged)
            self._before[name], self._latest[name] = latest, merged.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """By kind and parameter name. Tensors are live ones."""
        kept = {"latest": self._latest, "before": self._before}
        return {f"{kind}/{name}": tensor for kind, tensors in kept.items() for name, tensor in tensors.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        kinds: dict[str, dict[str, torch.Tensor]] = {"latest": {}, "before": {}}
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind not in kinds or name not in self._parameters or tensor.shape != self._parameters[name].shape:
                raise CheckpointError(f"the merges' momentum was saved with another model or strategy: see {key!r}")
            kinds[kind][name] = tensor.to(_wide(self._parameters[name])).clone()
        self._latest, self._before = kinds["latest"], kinds["before"]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _work(stated: Sequence[Any]) -> Work:
    updates, batch_size, busy_s, claims, _ = stated
    if not math.isfinite(busy_s):
        raise ConfigError(f"a rank was busy for {busy_s} seconds; its clock cannot be used")
    spans = [Claim(tuple(Span(*span) for span in claim)) for claim in claims]
    return Work(claims=tuple(spans), updates=updates, batch_size=batch_size, busy_s=busy_s)
