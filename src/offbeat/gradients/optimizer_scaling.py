"""Adam's scaling, taken over from the user's optimizer for as long as a session lasts.

Adam (arXiv 1412.6980) divides a mean gradient m by the root of a mean square v, entry by entry.
Where only the largest entries travel, an entry comes once in 1 / density exchanges, many times as
large: v then grows with the square of what comes at once, and steps are too short, by which text
was 11% of bits worse (`benchmarks/parity.py`, text, GTopK at 0.01). So each rank scales its own
gradient before entries are selected:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2          (this rank's)
    signal = max(0, (m^2 - r v) / (1 - r)),  r = (1 - beta1) / (1 + beta1)
    acc = residual + g / (sqrt(signal + (v - signal) / P) + eps)

and the optimizer's step is parameter -= lr * mean of what was sent; AdamW's weight decay as ever.

Differences from Adam:
- v is that of the mean over P ranks, which nobody has: of a rank's own v the noise is P times as
  large, and r is the share of noise that is left in m^2;
- m only tells signal from noise. There is no momentum, because the residual spreads a gradient over
  time anyway, and later momentum would overshoot;
- where only some ranks use a parameter in a step, the others' part of its weight decay, which Adam
  and not AdamW adds to gradients, waits until they use it again.

Cost per exchange: three buffers of the gradient's size (Adam has two), and as many passes as Adam.

Several exchanges in one step count as one gradient, as far as it is known in each of them.

Training begins with Adam's own steps, while everything or much travels (`DensitySchedule.begins`),
and at least one. The gradients of a new model are large and soon others, and v is not known yet:
what a rank owes from then is scaled wrongly and comes late. Without these steps a text with a
constant learning rate is 6.4% of bits worse than with AllReduce, each at its best rate, and 2.2%
with them (`benchmarks/studies/adam_rules.py`, charlm, Shakespeare).

Other rules are worse there at a density of 0.01: Adam on what was sent by 31%, momentum before or
after the exchange by 33 and 40%, and squares of the mean itself, which nobody knows, are no better.

Whoever changes `param.grad` between `backward()` and `step()`, as `torch.nn.utils.clip_grad_norm_`
does, changes the step then and no gradient. Whether the loop does so is looked at in these first
steps; if it does, Adam keeps its scaling. A loop that begins later is warned.
Adam also keeps its scaling where a run goes on that was begun without: what is owed then are plain
gradients, for whose size nothing is remembered.

`optimizer.state_dict()` has what Adam would have: m, and for v the estimate above of that of the
mean. What an optimizer has gathered before it is attached, or what is loaded into it, is gone on
with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.collectives.dense import gather_values
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import GradientTransform, HiddenGradients
from offbeat.gradients.gradient_watch import GradientWatch
from offbeat.gradients.parameter_groups import GroupRanges, coupled_decay, numbers_in_state
from offbeat.gradients.reductions import Reduction, WeightedGradient
from offbeat.torch_private import for_each

_CHANGED: Final = "gradients are changed between backward() and step(), as clip_grad_norm_ does"
_CHANGED_LATER: Final = (
    f"{_CHANGED}, but Adam's scaling is in them already (momentum_correction='auto'), since the"
    " first steps did not do so; so the step is limited and not the gradient. To clip, use the"
    " strategy's clip_norm, or leave the scaling to the optimizer with momentum_correction=None"
)


@dataclass(slots=True)
class _Moments:
    """What Adam remembers of one bucket's elements, and the gradient that is on its way.

    Attributes:
        steps: how many each parameter has had a gradient in.
        undecayed: in how many of them since this rank's last gradient only others had one.
        has_gradient: which parameters have one in the step under way.
    """

    bucket: Bucket
    groups: GroupRanges
    reduction: Reduction
    mean: torch.Tensor
    square: torch.Tensor
    gradient: torch.Tensor
    steps: list[float]
    undecayed: list[float]
    has_gradient: list[bool]


_COUNTS: Final = ("steps", "undecayed")
"""What is counted of each parameter: attributes of `_Moments`."""


class OptimizerScaling(GradientTransform):
    """The scaling of an Adam optimizer, once it is not the optimizer's.

    Args:
        context: lent by the session; its optimizer is a `torch.optim.Adam` or `AdamW`.
    """

    what: ClassVar[str] = "Adam's scaling"

    def __init__(self, context: Context) -> None:
        assert context.optimizer is not None
        super().__init__(context.optimizer)
        self.is_taken = None
        self._optimizer, self._notices = context.optimizer, context.notices
        self._driver, self._stream = context.driver, context.new_stream()
        self._state_is_loaded = False
        self._watch = GradientWatch(self.counts)
        self._moments: dict[int, _Moments] = {}
        self._num_settled = 0
        self._has_gradient = False  # of the coming step
        self._hidden = HiddenGradients()

    @property
    @override
    def needs_warm_up(self) -> bool:  # type: ignore[override]  # nobody sets it
        """Scaled gradients are of one size from the first step on."""
        return self.is_taken is False

    @override
    def init(self, bucket: Bucket, reduction: Reduction) -> None:
        assert reduction.residual is not None, "Adam's scaling is for what is owed"
        mean, square, gradient = (torch.zeros_like(reduction.residual) for _ in range(3))
        groups, number = GroupRanges(bucket, self._optimizer), len(bucket.parameters)
        steps, undecayed = [0.0] * number, [0.0] * number
        self._moments[id(bucket)] = _Moments(
            bucket, groups, reduction, mean, square, gradient, steps, undecayed, [True] * number
        )
        self._watch.buckets.append(bucket)

    # What the exchange calls

    @override
    def leaves_plain_steps(self) -> bool:
        return self.is_taken is True

    @override
    def update(
        self, bucket: Bucket, given: WeightedGradient, continues: NDArray[np.bool_]
    ) -> WeightedGradient:
        """Turn the gradient into the scaled one. There is no `grad_scale` here, because there is no
        scaling where there is a GradScaler. The gradient of an earlier exchange of the same step is
        part of what counts.
        """
        self._state_is_loaded = False
        if self.is_taken is False:
            return given
        moments = self._moments[id(bucket)]
        goes_on = bool(continues.any())
        if self.is_taken:
            decays = [coupled_decay(group) for group in self._optimizer.param_groups]
            moments.groups.add_decay_(given.tally.used, decays, continues=goes_on)
        if goes_on:
            moments.gradient.add_(bucket.flat)
        else:
            moments.gradient.copy_(bucket.flat)
        if self.is_taken:
            self._make_up_decay(moments, given.tally.used, decays)
            bucket.flat.div_(self._denominator(moments))
        return given

    def _make_up_decay(
        self, moments: _Moments, used: NDArray[np.bool_], decays: Sequence[float]
    ) -> None:
        """A parameter that any rank has used has all of its weight decay. A rank adds its own of
        the steps in which only others have used it when it does so again: squares of decay alone
        would say nothing of gradients, so they are not remembered either.
        """
        for position in np.flatnonzero(used & (np.array(moments.undecayed) > 0)).tolist():
            number = moments.groups.groups[position]
            if number is not None:
                decay = decays[number] * moments.undecayed[position]
                parameter = moments.bucket.parameters[position].detach()
                moments.bucket.views[position].add_(parameter, alpha=decay)
            moments.undecayed[position] = 0.0

    @override
    def give_back(self) -> None:
        """Adam begins anew: what was remembered differs from rank to rank."""
        self._hidden.show()
        if self.is_taken:
            self._forget_optimizer_state()
        super().give_back()

    @override
    def settle(self, *, good: bool) -> None:
        self._num_settled += 1
        # Of a step that is skipped, what earlier passes have exchanged is skipped, too.
        self._has_gradient = good
        for moments in self._moments.values() if good and self.is_taken else ():
            for position, _ in moments.groups.undecayed(moments.reduction.tally.used):
                moments.undecayed[position] += 1

    @property
    def _num_steps(self) -> float:
        return max((max(moments.steps) for moments in self._moments.values()), default=0.0)

    def _remember(self) -> None:
        """Of a parameter without a gradient nothing is, as in Adam."""
        for moments in self._moments.values():
            for here, (beta1, beta2, _), _ in self._ranges(moments, moments.has_gradient):
                gradient = moments.gradient[here]
                moments.mean[here].lerp_(gradient, 1 - beta1)
                moments.square[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            pairs = zip(moments.steps, moments.has_gradient, strict=True)
            moments.steps = [number + has_one for number, has_one in pairs]

    # Events

    # The exchange comes before this callback: what it has just done is not the loop's.

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """A pass that accumulates nothing moves gradients away and back, which is no change. What
        was changed before it is remembered, since `look` takes what it finds for unchanged.
        """
        self._watch.compare()

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self._watch.look()

    @override
    def on_backward_failed(self) -> None:
        self._watch.forget()

    @override
    def on_join(self) -> None:
        self._watch.look()

    @override
    def clip_as_loop_does(self, max_norm: float) -> float | None:
        self._watch.look()
        return None

    @override
    def on_before_update(self) -> None:
        self._watch.look_if_new()  # it may have joined its peers' exchange just now
        is_changed = self._watch.compare()
        for moments in self._moments.values():
            moments.has_gradient = [each.grad is not None for each in moments.bucket.parameters]
        if self.is_taken is None and self._has_gradient:
            self._decide(is_changed)  # the step that is under way is Adam's in any case
        elif self.is_taken:
            if is_changed:
                self._notices.warn(_CHANGED_LATER)
            self._update()

    @override
    def on_after_step(self) -> None:
        self._watch.step_ended()
        if self.is_taken:
            self._forget_optimizer_state()  # of the first step, which was Adam's
        if self._has_gradient and self.is_taken is not False:
            self._remember()
        self._has_gradient = False
        self._hidden.show()

    def _forget_optimizer_state(self) -> None:
        for moments in self._moments.values():
            for parameter in moments.bucket.parameters:
                self._optimizer.state.pop(parameter, None)

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        # A rank that is new goes on with what an old one knows, and has left no decay out.
        counts = {name: torch.tensor(self._counted(name)) for name in _COUNTS}
        replicated = super().state_dict()["replicated"] | {"world_size": self._driver.world_size}
        return {
            "additive": {"undecayed": counts["undecayed"]},
            "local": {"steps": counts["steps"], **self._named()},
            "replicated": replicated,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another number of ranks than before the mean of the decay that they have left out is
        preserved, and not its sum: it comes with gradients, of which there is a mean.
        """
        super().load_state_dict(state)
        is_taken = state["replicated"]["is_taken"]
        if is_taken and not self._moments:
            self.refuse(self.what)
        self.is_taken = is_taken if self._moments else False
        if self.is_taken is False:
            self._moments.clear()
            self._watch.buckets.clear()
            return
        self._state_is_loaded = True
        local, share = state["local"], self._driver.world_size / state["replicated"]["world_size"]
        counts = {"steps": local["steps"], "undecayed": state["additive"]["undecayed"] * share}
        for name in _COUNTS:
            found = counts[name].expand(len(self._counted(name))).tolist()
            for moments in self._moments.values():
                setattr(moments, name, [found[index] for index in moments.bucket.indices])
        for name, view in self._named().items():
            view.copy_(local[name])
        if self.is_taken:
            self._taken()
        else:  # all exchanges so far were skipped, or there were none
            self._num_settled = self.counts.exchanges

    def _counted(self, name: str) -> list[float]:
        """Of each parameter, in the model's order; before anything is taken of none."""
        found: dict[int, float] = {}
        for moments in self._moments.values():
            found |= dict(zip(moments.bucket.indices, getattr(moments, name), strict=True))
        return [found[index] for index in sorted(found)] or [0.0]

    def _named(self) -> dict[str, torch.Tensor]:
        named = dict[str, torch.Tensor]()
        for moments in self._moments.values():
            named |= moments.bucket.named("mean", moments.mean)
            named |= moments.bucket.named("square", moments.square)
        return named

    # Scaling

    def _denominator(self, moments: _Moments) -> torch.Tensor:
        """What the gradient on its way is divided by, as if it had been remembered already."""
        result = torch.empty_like(moments.mean)
        share = 1 / self._driver.world_size
        for here, (beta1, beta2, eps), before in self._ranges(moments):
            steps = before + 1
            gradient = moments.gradient[here]
            square = moments.square[here].mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            square.div_(1 - beta2**steps)
            mean = torch.lerp(moments.mean[here], gradient, 1 - beta1).div_(1 - beta1**steps)
            result[here] = with_noise(mean, square, beta1, share).sqrt_().add_(eps)
        return result

    def _update(self) -> None:
        """The optimizer's step, which then finds no gradient."""
        scaled = {id(p) for moments in self._moments.values() for p in moments.bucket.parameters}
        for group in self._optimizer.param_groups:
            parameters = [p for p in group["params"] if id(p) in scaled and p.grad is not None]
            lr = float(group["lr"])
            decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            rate = lr if group["maximize"] else -lr
            if lr * decay:
                for_each("mul_", parameters, 1 - lr * decay)
            for_each("add_", parameters, gradients, alpha=rate)
            for parameter in parameters:
                self._hidden.hide(parameter)

    def _decide(self, is_changed: bool) -> None:
        """Agree whether the loop leaves gradients alone: all ranks scale, or none. Not before
        training has begun.
        """
        is_changed = any(self._driver.run(gather_values(is_changed), self._stream.next()))
        is_wanted = self._density is None or self._density.sends_entries()
        is_new = self.counts.exchanges == self._num_settled
        may_take = is_wanted and is_new and not is_changed
        if may_take and not self._num_steps:
            self._take_gathered()
        if may_take and self._density is not None and self._density.begins():
            return
        self.is_taken = may_take
        if not self.is_taken:
            self._moments.clear()
            self._watch.buckets.clear()
            if not is_wanted:
                return
            reason = _CHANGED if is_new else "the run was begun without it"
            self._notices.inform(
                "momentum_correction='auto': Adam scales what was sent, and its scaling is not"
                f" taken over, since {reason}"
            )
            return
        for moments in self._moments.values():
            # What is owed so far was not scaled. A rank may owe what its peers have computed where
            # its own gradient is next to nothing: it is scaled to at most one for each exchange.
            owed = moments.reduction.residual
            assert owed is not None, "as when it was made"
            weight = moments.reduction.tally.weight or 1  # where nobody has had a sample just now
            least = owed.abs() / (weight * self.counts.exchanges)
            owed.div_(torch.maximum(self._denominator(moments), least))
        self._taken()
        self._notices.inform(
            "momentum_correction='auto': gradients are scaled as Adam does it before entries are"
            " selected, on each rank, and Adam's own scaling and momentum rest until the session"
            " ends; momentum_correction=None leaves all to the optimizer"
        )

    def _ranges(
        self, moments: _Moments, marked: Sequence[bool] | None = None
    ) -> Iterator[tuple[slice, tuple[float, float, float], float]]:
        """Neighbouring elements with the same beta1, beta2 and eps, and number of steps, of the
        `marked` parameters or of all; on a CPU so many that its cache holds what one operation
        leaves for the next.
        """
        options = [(*group["betas"], group["eps"]) for group in self._optimizer.param_groups]
        # What the optimizer does not move is scaled as any other.
        whole = max(1, moments.mean.numel())
        step = _BLOCK if moments.mean.device.type == "cpu" else whole
        if all(marked or ()) and len({*moments.steps}) == 1:
            alike = moments.groups.merged(options, default=options[0])
            parts = [(here, found, moments.steps[0]) for here, found in alike]
        else:
            each = zip(moments.bucket.places, moments.groups.groups, moments.steps, strict=True)
            parts = [
                (here, options[number or 0], steps)
                for place, (here, number, steps) in enumerate(each)
                if marked is None or marked[place]
            ]
        for here, found, steps in parts:
            for begin in range(here.start, here.stop, step):
                yield slice(begin, min(begin + step, here.stop)), found, steps

    # The optimizer's state

    def _taken(self) -> None:
        """From now on Adam remembers nothing by itself."""
        if not self._handles:
            self._handles = [
                self._optimizer.register_state_dict_post_hook(self._show_state),
                self._optimizer.register_load_state_dict_post_hook(lambda _: self._state_loaded()),
            ]
        if self._density is not None:
            self._density.send_few()

    def _show_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        numbers = numbers_in_state(optimizer)
        for moments in self._moments.values() if self.is_taken and self._num_steps else ():
            square = moments.square.clone()
            self._change_noise_(moments, square, 1 / self._driver.world_size)
            views = map(moments.bucket.views_of, (moments.mean, square))
            signs = moments.groups.signs
            for parameter, steps, sign, mean_view, square_view in zip(
                moments.bucket.parameters, moments.steps, signs, *views, strict=True
            ):
                if square_view.any():
                    state["state"][numbers[id(parameter)]] = {
                        "step": torch.tensor(steps),
                        "exp_avg": (sign * mean_view).to(parameter.dtype),
                        "exp_avg_sq": square_view.to(parameter.dtype, copy=True),
                    }

    def _state_loaded(self) -> None:
        """What was loaded into the optimizer is what it has gathered, unless this rank's own was
        loaded with the session. It stays there until a step is over that Adam does not take: the
        session may go back to before that.
        """
        if not self._state_is_loaded:
            for moments in self._moments.values():  # what the state lacks begins anew
                for_each("zero_", [moments.mean, moments.square])
                moments.steps[:] = [0.0] * len(moments.steps)
            self._take_gathered()

    def _take_gathered(self) -> None:
        """Begin with what the optimizer has gathered, which is the same on all ranks."""
        for moments in self._moments.values():
            views = zip(
                moments.bucket.parameters,
                moments.bucket.views_of(moments.mean),
                moments.bucket.views_of(moments.square),
                moments.groups.signs,
                strict=True,
            )
            is_there = False
            for position, (parameter, mean, square, sign) in enumerate(views):
                gathered = self._optimizer.state.get(parameter, {})
                if "exp_avg" in gathered:
                    mean.copy_(gathered["exp_avg"]).mul_(sign)
                    square.copy_(gathered["exp_avg_sq"])
                    moments.steps[position], is_there = float(gathered["step"]), True
            if is_there:
                self._change_noise_(moments, moments.square, self._driver.world_size)

    def _change_noise_(self, moments: _Moments, square: torch.Tensor, factor: float) -> None:
        """Multiply the noise in the mean square of a bucket, in place."""
        for here, (beta1, beta2, _), steps in self._ranges(moments):
            if not steps:
                continue
            grown = 1 - beta1**steps, 1 - beta2**steps
            mean = moments.mean[here] / grown[0]
            square[here] = with_noise(mean, square[here] / grown[1], beta1, factor) * grown[1]


_BLOCK: Final = 1 << 16
"""Elements that are scaled at a time on a CPU."""


def with_noise(
    mean: torch.Tensor, square: torch.Tensor, beta1: float, factor: float
) -> torch.Tensor:
    """`square`, a mean square, with `factor` times the noise in it; both arguments, which Adam has
    corrected for their beginning, are overwritten.
    """
    noise = beta1 and (1 - beta1) / (1 + beta1)
    if not noise:  # without a mean there is no telling
        return square.mul_(factor)
    signal = mean.square_().sub_(square, alpha=noise).div_(1 - noise).clamp_min_(0)
    return square.mul_(factor).add_(signal, alpha=1 - factor)


def reason_against_scaling(
    optimizer: torch.optim.Optimizer,
    parameters: Collection[torch.nn.Parameter],
    *,
    has_scaler: bool,
) -> str | None:
    """Why Adam's scaling cannot be taken over for a model's `parameters`; None: it can."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return (
            f"the optimizer is {type(optimizer).__name__}, and only torch.optim.SGD, Adam and AdamW"
            " are known"
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        return "amsgrad=True keeps the largest square"
    if has_scaler:
        return "a GradScaler changes gradients before the step"
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(parameter) in stepped for parameter in parameters):
        # Another optimizer steps the others, or this one later on: they need plain gradients.
        return "the optimizer does not have all of the model's parameters"
    return None
