"""Adam's scaling, taken over from the user's optimizer for as long as a session lasts.

Adam (arXiv 1412.6980) divides a mean gradient m by the root of a mean square v, entry by entry.
Where only the largest entries travel, an entry comes once in 1 / density exchanges, many times as
large: v then grows with the square of what comes at once, and steps are too short. So each rank
scales its own gradient before entries are selected:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2          (this rank's)
    signal = max(0, (m^2 - r v) / (1 - r)),  r = (1 - beta1) / (1 + beta1)
    acc = residual + g / (sqrt(signal + (v - signal) / P) + eps)

and the optimizer's step is parameter -= lr * mean of what was sent; AdamW's weight decay as ever.

Differences from Adam:
- v is that of the mean over P ranks, which nobody has: of a rank's own v the noise is P times as
  large, and r is the share of noise that is left in m^2;
- m only tells signal from noise. There is no momentum, because the residual spreads a gradient over
  time anyway, and later momentum would overshoot.

Cost per exchange: three buffers of the gradient's size (Adam has two), and as many passes as Adam.

What Adam is given must be a gradient, so nobody may change `param.grad` between `backward()` and
`step()`, as `torch.nn.utils.clip_grad_norm_` does. Whether the loop does so is looked at in its
first step, which is Adam's own; if it does, Adam keeps its scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.residual import ErrorFeedback
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import ExchangeListener
from offbeat.gradients.residual_watch import ResidualWatch
from offbeat.parts.part import Part
from offbeat.torch_private import version_of
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, Collective

_CHANGED: Final = (
    "gradients are changed between backward() and step(), as clip_grad_norm_ does; to clip, use the"
    " strategy's clip_norm"
)


@dataclass(slots=True)
class _Moments:
    """What Adam remembers of one bucket's elements, and the gradient that is on its way."""

    bucket: Bucket
    feedback: ErrorFeedback
    watch: ResidualWatch
    mean: torch.Tensor
    square: torch.Tensor
    gradient: torch.Tensor
    published_version: int = -1


class _Settled(ExchangeListener):
    def __init__(self, settled: Callable[[bool], None]) -> None:
        self._settled = settled

    @override
    def on_exchange_settled(self, *, good: bool) -> None:
        self._settled(good)


class OptimizerScaling(Part):
    """The scaling of an Adam optimizer, once it is not the optimizer's.

    Args:
        optimizer: a `torch.optim.Adam` or `AdamW`.
        driver: carries the ranks' agreement out.
        stream: for it.
        inform: is told whether the scaling was taken over.

    Attributes:
        is_wanted: whether entries travel at all; where everything does, Adam serves better. The
            same on all ranks.
        when_taken: is called when the scaling is taken.
        listener: has to listen to the exchange of gradients.
        is_taken: whether it is; None until that is known.
    """

    state_key: ClassVar[str] = "optimizer_scaling"
    may_begin_anew: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        driver: Driver,
        stream: Stream,
        inform: Callable[[str], None],
    ) -> None:
        self.is_taken: bool | None = None
        self.listener = _Settled(self._remember)
        self._optimizer = optimizer
        self._driver = driver
        self._stream = stream
        self._inform = inform
        self.is_wanted: Callable[[], bool] = lambda: True
        self.when_taken: Callable[[], None] = lambda: None
        self._moments: dict[int, _Moments] = {}
        self._num_exchanges = 0.0
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def apply_to(self, bucket: Bucket, feedback: ErrorFeedback, watch: ResidualWatch) -> None:
        """Scale what `bucket` contributes to `feedback`, at which `watch` looks."""
        mean, square, gradient = (torch.zeros_like(feedback.residual) for _ in range(3))
        self._moments[id(bucket)] = _Moments(bucket, feedback, watch, mean, square, gradient)

    # What the exchange calls

    def take(self) -> None:
        """Whether anything is taken shows in the first step."""

    def prepare_(
        self, bucket: Bucket, used: NDArray[np.bool_], *, grad_scale: float, continues: bool
    ) -> None:
        """Turn the gradient that `bucket` holds into the scaled one.

        Args:
            bucket: one that `apply_to` was called with.
            used: which of its parameters have a gradient.
            grad_scale: 1, since there is no scaling where there is a GradScaler.
            continues: whether an earlier exchange belongs to the same optimizer step; weight decay
                has been added there.
        """
        if self.is_taken is False:
            return
        moments = self._moments[id(bucket)]
        if not continues:
            self._add_decay_(bucket, used)
        moments.gradient.copy_(bucket.flat)
        if self.is_taken:
            bucket.flat.copy_(moments.gradient / self._denominator(moments))

    def published(self, bucket: Bucket) -> None:
        """`bucket` holds the mean of what was sent, which is `param.grad` from now on."""
        self._moments[id(bucket)].published_version = version_of(bucket.flat)

    def give_back(self) -> None:
        """Adam begins anew: what was remembered differs from rank to rank."""
        self.on_after_step()
        self.is_taken = False

    def _remember(self, good: bool) -> None:
        if not good or self.is_taken is False:
            return
        self._num_exchanges += 1
        for moments in self._moments.values():
            begin = 0
            for end, group in self._ranges(moments.bucket):
                here, (beta1, beta2) = slice(begin, end), group["betas"]
                gradient = moments.gradient[here]
                moments.mean[here].lerp_(gradient, 1 - beta1)
                moments.square[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                begin = end

    # Events

    @override
    def on_before_update(self) -> None:
        if self.is_taken is None and self._num_exchanges:
            self._decide()  # the step that is under way is Adam's in any case
        elif self.is_taken:
            if self._changed():
                raise UnsupportedError(
                    f"{_CHANGED}. GTopK and TopK have taken over Adam's scaling, because the first"
                    " step did not do so; pass momentum_correction=None to leave it to the"
                    " optimizer"
                )
            self._update()

    @override
    def on_after_step(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        # Summed where ranks become one, these are divided by the number of ranks in them again.
        additive = {"num_ranks": torch.ones(1), "exchanges": torch.tensor([self._num_exchanges])}
        for kind, name, view in self._named():
            additive[f"{kind}/{name}"] = view
        return {"additive": additive, "replicated": {"is_taken": self.is_taken}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        additive = state["additive"]
        num_ranks = max(1.0, float(additive["num_ranks"]))
        self._num_exchanges = float(additive["exchanges"]) / num_ranks
        for kind, name, view in self._named():
            view.copy_(additive[f"{kind}/{name}"]).div_(num_ranks)
        self.is_taken = state["replicated"]["is_taken"]
        if self.is_taken:
            self.when_taken()

    def _named(self) -> Sequence[tuple[str, str, torch.Tensor]]:
        return [
            (kind, name, view)
            for moments in self._moments.values()
            for kind, flat in (("mean", moments.mean), ("square", moments.square))
            for name, view in zip(moments.bucket.names, moments.bucket.views_of(flat), strict=True)
        ]

    # Scaling

    def _denominator(self, moments: _Moments) -> torch.Tensor:
        """What the gradient on its way is divided by, as if it had been remembered already."""
        result = torch.empty_like(moments.mean)
        steps, share, begin = self._num_exchanges + 1, 1 / self._driver.world_size, 0
        for end, group in self._ranges(moments.bucket):
            here, (beta1, beta2) = slice(begin, end), group["betas"]
            gradient = moments.gradient[here]
            square = moments.square[here].mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            square.div_(1 - beta2**steps)
            mean = torch.lerp(moments.mean[here], gradient, 1 - beta1).div_(1 - beta1**steps)
            if noise := beta1 and (1 - beta1) / (1 + beta1):
                signal = mean.square_().sub_(square, alpha=noise).div_(1 - noise).clamp_min_(0)
                square.mul_(share).add_(signal, alpha=1 - share)
            else:  # without a mean there is no telling
                square.mul_(share)
            result[here] = square.sqrt_().add_(group["eps"])
            begin = end
        return result

    def _add_decay_(self, bucket: Bucket, used: NDArray[np.bool_]) -> None:
        """Weight decay that Adam, unlike AdamW, adds to the gradient."""
        groups = self._groups()
        for position in np.flatnonzero(used).tolist():
            parameter = bucket.parameters[position]
            group = groups.get(id(parameter))
            if self.is_taken and group and group["weight_decay"] and not self._decouples(group):
                decay = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
                bucket.views[position].add_(parameter.detach(), alpha=decay)

    def _update(self) -> None:
        """The optimizer's step, which then finds no gradient."""
        groups = self._groups()
        for moments in self._moments.values():
            for parameter in moments.bucket.parameters:
                group, scaled = groups.get(id(parameter)), parameter.grad
                if group is None or scaled is None:
                    continue
                lr = float(group["lr"])
                if self._decouples(group):
                    parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(scaled, alpha=lr if group["maximize"] else -lr)
                self._hidden.append((parameter, scaled))
                parameter.grad = None

    def _decide(self) -> None:
        """Look whether the loop leaves gradients alone, and agree: all ranks scale, or none."""
        is_changed = self._driver.run(_any_of(self._changed()), self._stream.next())
        is_wanted = self.is_wanted()
        self.is_taken = is_wanted and not is_changed
        if not is_wanted:
            return
        if is_changed:
            self._inform(
                "momentum_correction='auto': Adam scales what was sent, and its scaling is not"
                f" taken over, since {_CHANGED}"
            )
            return
        for moments in self._moments.values():
            # What is owed from the first step was not scaled.
            moments.feedback.residual.div_(self._denominator(moments))
            moments.watch.begin_anew()
            for parameter in moments.bucket.parameters:
                self._optimizer.state.pop(parameter, None)
        self.when_taken()
        self._inform(
            "momentum_correction='auto': gradients are scaled as Adam does it before entries are"
            " selected, on each rank, and Adam's own scaling and momentum rest until the session"
            " ends; momentum_correction=None leaves all to the optimizer"
        )

    def _changed(self) -> bool:
        """Whether a gradient is another one than was published."""
        return any(
            parameter.grad is not None
            and not (
                moments.bucket.holds(position, parameter.grad)
                and version_of(moments.bucket.flat) == moments.published_version
            )
            for moments in self._moments.values()
            for position, parameter in enumerate(moments.bucket.parameters)
        )

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The group that a parameter, by its id, is in."""
        return {
            id(parameter): group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }

    def _decouples(self, group: Mapping[str, Any]) -> bool:
        return bool(group["decoupled_weight_decay"])

    def _ranges(self, bucket: Bucket) -> list[tuple[int, dict[str, Any]]]:
        """Ends of neighbouring elements whose parameters are in one group, and that group."""
        groups, ranges = self._groups(), list[tuple[int, dict[str, Any]]]()
        for parameter, end in zip(bucket.parameters, bucket.offsets[1:], strict=True):
            group = groups.get(id(parameter), self._optimizer.param_groups[0])
            if ranges and ranges[-1][1] is group:
                ranges.pop()
            ranges.append((end, group))
        return ranges


def _any_of(mine: bool) -> Collective[bool]:
    """Whether any rank says yes."""
    answers = yield AllGather(bytes([mine]))
    return any(bytes(answer) != b"\0" for answer in answers)


def reason_against(optimizer: torch.optim.Optimizer, *, has_scaler: bool) -> str | None:
    """Why Adam's scaling cannot be taken over; None: it can."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return (
            f"the optimizer is {type(optimizer).__name__}, and only those of torch.optim.SGD, Adam"
            " and AdamW can be"
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        return "amsgrad=True keeps the largest square"
    if has_scaler:
        return "a GradScaler changes gradients before the step"
    return None
