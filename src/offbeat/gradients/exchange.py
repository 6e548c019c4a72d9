"""Gradients, exchanged once for each outermost backward pass.

A gradient's walk: it becomes ready and moves into its bucket; a full bucket is launched, in the
same order on every rank; when backward is over all buckets are waited for; if every rank's step is
good, changes of state are committed and `param.grad` becomes the result, else everything is
discarded and the step is skipped on all ranks together.

How a bucket is reduced (densely, or sparsely with a residual) is a `Reduction`; see
`gradients.reductions`.

Rules that keep ranks in step:
- the set of parameters is fixed; a parameter without gradient contributes zero, and a bitmap says
  who had one;
- each `optimizer.step()` is preceded by at least one exchange: a rank that ran no backward joins
  with nothing;
- a sparse gradient is copied as a dense one, and comes out as such: its rows differ from rank to
  rank;
- buckets are launched in an order that is the same on all ranks (`LaunchOrder`), also where other
  systems launch collectives of their own: a dense collective has no name on the wire, so that the
  first one that a rank launches meets the first one of every other rank, and so on. What is ready
  first may differ from rank to rank, because hooks need not fire alike;
- gradients that came out of an exchange are stashed before a further backward pass in the same
  step, so that only what is new is exchanged, and are added back afterwards. Where all of them are
  always sent, a pass inside `no_sync` adds to them instead, as with DistributedDataParallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.tally import Tally
from offbeat.collectives.dense import dense_broadcast, gather_values
from offbeat.errors import CheckpointError, NonFiniteError, PeerError, UnsupportedError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.clipping import LocalClipping, clip_gradients_
from offbeat.gradients.gradient_guard import MAX_SKIPPED_STEPS
from offbeat.gradients.parameter_groups import rates_of
from offbeat.gradients.reductions import Reduction, WeightedGradient, wait_for
from offbeat.torch_private import version_of

if TYPE_CHECKING:
    from offbeat.gradients.density import DensitySchedule


_HELD_BYTES: Final = 1 << 24
"""Gradients of so many bytes wait until they are copied into their bucket together."""

_FAILS: Final = "raised inside backward"
_ENDS: Final = "takes no more steps"

LaunchKey: TypeAlias = tuple[str, int]
"""What is launched: ("gradients", number of a bucket) or ("factors", number of a message)."""


class LaunchOrder:
    """Goes once through a sequence of keys each time that one is set, and holds back what is handed
    over until everything before it has been launched.

    What is not in the sequence, or was launched already, is launched at once. A new `LaunchOrder`
    has an empty sequence.
    """

    def __init__(self) -> None:
        self._sequence: Sequence[LaunchKey] = ()
        self._places: dict[LaunchKey, int] = {}
        self._next = 0
        self._waiting: dict[LaunchKey, Callable[[], None]] = {}

    def follow(self, sequence: Sequence[LaunchKey]) -> None:
        """Go through `sequence` from now on. Everything of the sequence before that was handed over
        must have been launched.
        """
        assert not self._waiting, f"{list(self._waiting)} still wait in the sequence before"
        self._sequence, self._next = sequence, 0
        self._places = {key: place for place, key in enumerate(sequence)}

    def launch(self, key: LaunchKey, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as everything before `key` has been launched, which may be now."""
        if self._places.get(key, -1) < self._next:
            begin()
            return
        self._waiting[key] = begin
        while (
            self._next < len(self._sequence)
            and (ready := self._waiting.pop(self._sequence[self._next], None)) is not None
        ):
            # The position moves on first: `ready` may itself hand something over.
            self._next += 1
            ready()


def put_off(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What carries out later `work` on a bucket for which the host has to wait for the device.
    Within backward that would keep it from queueing the rest of the pass, so it is done after it,
    on a stream of its own: that waits for what was queued before this call, and not for the rest.
    """
    ready = torch.cuda.current_stream(device).record_event()

    def carry_out() -> None:
        aside = _stream_aside(device)
        aside.wait_event(ready)
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream(device).wait_stream(aside)

    return carry_out


@cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    # One and the same, because PyTorch keeps freed memory for the stream that had it.
    return torch.cuda.Stream(device)


class ExchangeListener:
    """Something that sends messages of its own with each exchange of gradients, such as K-FAC.

    The methods do nothing; a listener overrides those that it needs.
    """

    def on_bucket_sealed(self, number: int, *, is_last: bool, failed: bool) -> None:
        """A bucket holds all that this rank contributes, and is handed to the launch order next.

        Args:
            number: the bucket's, in the order in which buckets are launched.
            is_last: whether it is the last one, which is sealed when everything else of this rank's
                exchange is complete. What the listener wants to send with this exchange it must
                hand to the launch order before it returns: the last bucket may stand behind it.
            failed: whether this rank joins only so that no peer waits for it; what it sends is of
                no worth.
        """

    def on_exchange_settled(self, *, good: bool) -> None:
        """The exchange is over, and all ranks know the same: every one of them applies the step
        (`good`), or every one of them drops it.
        """

    def on_gradients_dropped(self) -> None:
        """The loop has dropped what earlier exchanges of this step have brought."""


class HiddenGradients:
    """Gradients that the optimizer is not to find, because its step has been taken already."""

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def hide(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            self._hidden.append((parameter, parameter.grad))
            parameter.grad = None

    def show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


class GradientTransform(Callback):
    """What is done to a rank's gradient before it is exchanged, in the optimizer's place. As it
    stands here nothing is: all is left to the optimizer.

    Args:
        optimizer: the user's; None: there is none.
        is_followed: whether gradients are changed further between exchange and step, as K-FAC does.

    Attributes:
        counts: of the exchange that it comes before.
        what: that is the optimizer's the transform does.
        is_taken: whether it does so, and the optimizer does not; None until that is known.
        needs_warm_up: whether more entries have to travel while the learning rate rises.
    """

    state_key: ClassVar[str] = "gradient_transform"
    may_begin_anew: ClassVar[bool] = True
    what: ClassVar[str] = "nothing"

    is_taken: bool | None = False
    needs_warm_up: bool = True

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, *, is_followed: bool = False
    ) -> None:
        self.counts = ExchangeCounts()
        self._user_optimizer = optimizer
        self._is_followed = is_followed
        self._handles: list[Any] = []  # of what is hooked into the optimizer
        self._density: DensitySchedule | None = None

    def init(self, bucket: Bucket, reduction: Reduction) -> None:
        """Make the state of a bucket, whose gradients will be changed before `reduction` gets
        them.
        """

    def follow(self, density: DensitySchedule) -> None:
        """Learn what knows how much travels."""
        self._density = density

    def take(self) -> None:
        """Take over what is the optimizer's. Called before each exchange and each step:
        idempotent.
        """

    def update(
        self, bucket: Bucket, given: WeightedGradient, continues: NDArray[np.bool_]
    ) -> WeightedGradient:
        """What is exchanged in the place of `given`. State is staged until `settle`.

        Args:
            bucket: complete, with this rank's gradient times `grad_scale`; overwritten.
            given: whose gradient is the bucket's buffer.
            continues: which of its parameters an earlier exchange has given a gradient that
                belongs to the same optimizer step.
        """
        return given

    def settle(self, *, good: bool) -> None:
        """The exchange is over: every rank applies the step (`good`), or every rank drops it."""

    def leaves_plain_steps(self) -> bool:
        """Whether what is left of the optimizer's step is the learning rate times what it is given,
        so that nothing behind the exchange remembers it.
        """
        optimizer = self._user_optimizer
        return (
            not self._is_followed
            and type(optimizer) is torch.optim.SGD
            and not any(group["momentum"] for group in optimizer.param_groups)
        )

    def rates(self) -> list[float]:
        """By group, what the optimizer's next step multiplies what it is given by."""
        return [] if self._user_optimizer is None else rates_of(self._user_optimizer)

    def give_back(self) -> None:
        """The session ends: the optimizer is the user's again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._density = None  # which holds this

    @override
    def state_dict(self) -> CallbackState:
        return {"replicated": {"is_taken": self.is_taken, "what": self.what}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if saved["is_taken"] and saved["what"] != self.what:
            self.refuse(saved["what"])

    @staticmethod
    def refuse(what: str) -> NoReturn:
        """What is owed in a saved state is in another unit, or its momentum would be lost."""
        raise CheckpointError(
            f"the state was saved while the strategy had taken over {what} from the optimizer,"
            " which here is left to it; resume with the same optimizer, density and"
            " momentum_correction, and without a GradScaler if it was saved without"
        )


@dataclass(slots=True)
class ExchangeCounts:
    """What happened so far."""

    exchanges: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


class GradientExchange(Callback):
    """The callback that exchanges gradients.

    Args:
        context: lent by the session. A GradScaler that decides about skipping must find a
            non-finite gradient on every rank. Without one, a skipped step leaves every `param.grad`
            None, which torch.optim's optimizers pass over.
        pairs: each bucket with its reduction, in the order in which they are launched.
        launch_order: decides when a bucket that is ready is launched, where other collectives are
            under way beside the buckets; None: at once.
        clipping: of each rank's gradient before it is sent, where buckets keep what they do not
            send; None: they keep nothing, and the mean is what is clipped.
        norm_over_ranks: makes the norm of the mean of the norm of what this rank has of it.
            Collective. None: all of it.
        transform: what works before the exchange in the optimizer's place; None: nothing.
    """

    state_key: ClassVar[str] = "gradients"

    def __init__(
        self,
        context: Context,
        pairs: Sequence[tuple[Bucket, Reduction]],
        *,
        launch_order: LaunchOrder | None = None,
        clipping: LocalClipping | None = None,
        norm_over_ranks: Callable[[float], float] | None = None,
        transform: GradientTransform | None = None,
    ) -> None:
        self._island, self._parameters = context.island, context.parameters
        self._driver, self._words = context.driver, context.new_stream()
        self._norm_over_ranks = norm_over_ranks
        self._transform = transform or GradientTransform(None)
        self.counts = self._transform.counts
        self._clipping = clipping
        self._may_keep_entries = any(reduction.ages is not None for _, reduction in pairs)
        self._keeps_rest = self._may_keep_entries or any(
            reduction.residual is not None for _, reduction in pairs
        )
        self._gives_whole = all(reduction.gives_whole for _, reduction in pairs)
        self._launch_order = launch_order or LaunchOrder()
        self._listeners = list[ExchangeListener]()
        self._pairs = list(pairs)
        self._grad_scale, self._has_scaler = context.grad_scale, context.has_scaler
        self._notify = context.notices.notify
        self._num_samples: int | None = None
        self._counts_samples = self._is_idle = False
        self._place = {
            index: (b, position)
            for b, (bucket, _) in enumerate(self._pairs)
            for position, index in enumerate(bucket.indices)
        }
        # What backward has accumulated of each bucket, by position; None: it is in its place.
        self._arrived: list[dict[int, torch.Tensor | None]] = [{} for _ in self._pairs]
        self._held_bytes = [0] * len(self._pairs)  # of that
        self._published = [
            np.zeros(len(bucket.indices), dtype=np.bool_) for bucket, _ in self._pairs
        ]
        self._stashed: list[torch.Tensor | None] = [None] * len(self._pairs)
        self._versions = [0] * len(self._pairs)  # of the buffers after the last step
        self._num_launched = 0
        self._put_off = list[Callable[[], None]]()
        self._num_accumulated = 0
        self._synchronised = True
        self._exchanges_since_step = self._exchanges_since_update = 0
        # The parameters that passes in `no_sync` have accumulated in since the last exchange.
        self._unsent = set[int]()
        # Without an optimizer nobody says when a step has used gradients.
        self._has_told_of_dropped = context.optimizer is None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order in which they are launched."""
        return [bucket for bucket, _ in self._pairs]

    def add_listener(self, listener: ExchangeListener) -> None:
        """Tell `listener` of every exchange from now on."""
        self._listeners.append(listener)

    # Events

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """Stash the results of an earlier exchange, so that this pass accumulates only what is
        new.
        """
        self._num_accumulated = 0
        self._synchronised = synchronised
        for arrived in self._arrived:
            arrived.clear()
        # What a transform has made of gradients is none that the same step's passes could add to.
        is_other = self._transform.is_taken and self._exchanges_since_step
        if synchronised or self._may_keep_entries or not self._gives_whole or is_other:
            stay = [self._stash(b) for b in range(len(self._pairs))]
            if not all(stay):
                self._look_for_dropped()
                if all(stashed is None for stashed in self._stashed):
                    self._exchanges_since_step = 0  # the step has what begins now, and nothing else
        stashed = [b for b, each in enumerate(self._stashed) if each is not None]
        if stashed and not synchronised:
            self._restore()
            names, published = self._pairs[stashed[0]][0].names, self._published[stashed[0]]
            raise UnsupportedError(
                "a backward pass inside no_sync() begins while the parameter"
                f" {names[int(published.argmax())]!r} has the gradient of a synchronised one, which"
                " must not be sent again; run the unsynchronised passes of a step first and"
                " synchronise the last one, and clear all gradients between steps:"
                " optimizer.zero_grad() leaves those that the optimizer does not have,"
                " model.zero_grad() does not"
            )

    @override
    def on_batch_claimed(self, num_samples: int) -> None:
        """The coming exchange's gradient is the mean over so many further samples; weights are
        samples from now on. A batch without a backward pass, as of an evaluation, is in no
        gradient, and one that was exchanged is in none that comes.
        """
        waits = self._counts_samples and self._unsent
        self._num_samples = num_samples + (self._num_samples or 0 if waits else 0)
        self._counts_samples = True

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        self._num_accumulated += 1
        if not synchronised:
            if self._num_accumulated == 1:
                # The pass adds to the mean what is this rank's own. The mean of such sums is that
                # of what is new, added to the mean: they are exchanged as they stand.
                for b, (bucket, _) in enumerate(self._pairs):
                    live = self._live(b) if self._exchanges_since_step else []
                    self._unsent.update(bucket.indices[position] for position in live)
                    self._published[b][:] = False
            self._unsent.add(index)
            return
        b, position = self._place[index]
        bucket, arrived = self._pairs[b][0], self._arrived[b]
        if position in arrived:
            raise UnsupportedError(
                f"the gradient of {bucket.names[position]!r} was accumulated twice in"
                " one backward pass; re-entrant checkpointing does that: use"
                " torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        parameter = bucket.parameters[position]
        # Once the bucket has it, its memory is that of the gradients that come next.
        arrived[position], parameter.grad = parameter.grad, None
        self._held_bytes[b] += parameter.numel() * parameter.element_size()
        is_launched_next = b == self._num_launched and not self._clips_first
        if self._held_bytes[b] > _HELD_BYTES or (self._is_whole(b) and not is_launched_next):
            self._copy_in(b)
        # The last bucket waits for the end of backward, so that its tally can still say that this
        # rank failed.
        # Buckets are launched in one order on every rank, because dense operations match by order.
        # Where the whole gradient is clipped, none may leave before all are there.
        if self._clips_first:
            return
        while self._num_launched < len(self._pairs) - 1 and self._is_whole(self._num_launched):
            self._launch_next()

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        """Exchange, unless nothing was accumulated: then it was no pass for training, or the next
        step joins the peers' exchange.
        """
        if self._num_accumulated == 0:
            self._restore()
        elif synchronised:
            self._exchange()

    @override
    def on_backward_failed(self) -> None:
        """Join the exchange that the peers are in, and contribute only that this rank has failed.

        Inside `no_sync` there is none: what failed there concerns this rank alone.
        """
        if self._synchronised:
            self._exchange(failed=True)

    @override
    def on_before_update(self) -> None:
        """Join the peers' exchange, if this rank has sent nothing for the update, or not all."""
        self._transform.take()
        if not self._exchanges_since_update or self._unsent:
            self.on_join()
        self._exchanges_since_update = 0  # a closure may run again in the same step

    @override
    def on_join(self) -> None:
        """Exchange without a backward pass: what has been accumulated without being sent, or
        nothing, which is what a gradient of an earlier step is, also where the loop has left it.

        Where weights are samples, a rank that had none in this step has no weight.
        """
        self._is_idle = not (self._unsent or self._counts_samples)
        if not self._exchanges_since_step:
            for b, (bucket, _) in enumerate(self._pairs):
                # Where the loop has computed gradients itself, and written them where the last ones
                # were, these are new.
                is_new = self._gives_whole and version_of(bucket.flat) != self._versions[b]
                for position in [] if is_new else self._live(b):
                    bucket.parameters[position].grad = None
                self._published[b][:] = False
        self.on_backward_begins(synchronised=True)
        self._exchange()
        self._is_idle = False

    @override
    def on_last_step(self) -> None:
        for _, reduction in self._pairs:
            reduction.send_all()

    @override
    def on_after_step(self) -> None:
        if self._clipping is not None:
            self._clipping.num_shares = max(1, self._exchanges_since_step)
        self._exchanges_since_step, self._counts_samples = 0, False
        self._versions = [version_of(bucket.flat) for bucket, _ in self._pairs]

    @override
    def on_finish(self) -> None:
        """Where each rank has a part of a step, what follows brings the parts together on all
        ranks. One that still takes steps would wait in its next exchange meanwhile, and the others
        for it: so they join that exchange, and all learn of it.
        """
        if self._gives_whole:
            return
        self.on_backward_begins(synchronised=True)
        self._exchange(failed=True, what=_ENDS)
        self.counts.exchanges -= 1

    # One exchange

    def _exchange(self, *, failed: bool = False, what: str = _FAILS) -> None:
        if self._clips_first and not failed:
            self._clip_gradients()
        while self._num_launched < len(self._pairs):
            self._launch_next(failed=failed)
        while self._put_off:
            self._put_off.pop(0)()
        # All buckets are waited for before any is committed: the step counts only if it is good on
        # every rank in every bucket.
        tallies = wait_for([reduction for _, reduction in self._pairs])
        self._num_launched = 0
        self._exchanges_since_step += 1
        self._exchanges_since_update += 1
        self._unsent.clear()
        self.counts.exchanges += 1
        # Every rank holds the same tallies, of its own shards, and the island's ranks tell each
        # other theirs; so listeners on all ranks are told the same.
        num_failed, num_nonfinite = self._island.largest(
            max((tally.num_failed for tally in tallies), default=0),
            max((int(tally.num_nonfinite) for tally in tallies), default=0),
        )
        is_good = not (num_failed or num_nonfinite)
        self._transform.settle(good=is_good)
        for listener in self._listeners:
            listener.on_exchange_settled(good=is_good)
        if num_failed:
            self._discard()
            if not self._gives_whole:
                self._refuse_unlike(what if failed else "takes further steps")
            elif not failed:
                raise PeerError(
                    f"{num_failed} other rank(s) raised inside"
                    f" backward in exchange {self.counts.exchanges}; their own output says why."
                    " This step was discarded on every rank"
                )
        elif not is_good:
            self._skip(num_nonfinite)
        elif not tallies[0].weight:  # nobody has a sample, so there is no mean
            self._discard()
        else:
            self.counts.skipped_in_a_row = 0
            for b, tally in enumerate(tallies):
                self._publish_grads(b, tally)

    def _refuse_unlike(self, mine: str) -> None:
        """Raise unless all ranks do as this one does, or this one has failed itself."""
        said = self._driver.run(gather_values(mine), self._words.next())
        others = {self._driver.name_of(r): does for r, does in enumerate(said) if does != mine}
        if others and mine != _FAILS:
            told = ", ".join(f"rank {rank} {does}" for rank, does in others.items())
            raise PeerError(
                f"in exchange {self.counts.exchanges} {told}, while this one {mine}. The step was"
                " discarded on every rank; give all of them equally many steps",
                rank=next(iter(others)),
            )

    @property
    def _clips_first(self) -> bool:
        return self._clipping is not None and self._clipping.clip_norm is not None

    def _clip_gradients(self) -> None:
        assert self._clipping is not None
        for b in range(len(self._pairs)):
            self._gather_in(b)
        flats = [bucket.flat for bucket, _ in self._pairs]
        self._clipping.clip_(flats, grad_scale=self._grad_scale(), combine=self._island.hypot)

    def _launch_next(self, *, failed: bool = False) -> None:
        """Launch the next bucket in order, with whatever of its gradients is there."""
        b = self._num_launched
        bucket, reduction = self._pairs[b]
        used = self._gather_in(b)
        self._num_launched += 1
        tally = Tally(weight=self._weight_now(), num_nonfinite=0, num_failed=int(failed), used=used)
        for listener in self._listeners:
            listener.on_bucket_sealed(b, is_last=b == len(self._pairs) - 1, failed=failed)
        # Gradients of parameters that the optimizer does not have may be older than its last step.
        belongs = self._exchanges_since_step and self._stashed[b] is not None
        continues = self._published[b] if belongs else np.zeros_like(used)
        grad_scale = self._grad_scale()
        self._transform.take()
        given = WeightedGradient(bucket.flat, tally, tally.weight / grad_scale, grad_scale)
        begin = partial(reduction.launch, self._transform.update(bucket, given, continues))
        self._launch_order.launch(
            ("gradients", b),
            begin
            if reduction.only_queues or not bucket.flat.is_cuda
            else partial(self._put_off.append, put_off(begin, bucket.flat.device)),
        )

    def _weight_now(self) -> float:
        if self._num_samples is None:
            return 1.0
        return 0.0 if self._is_idle else float(self._num_samples)

    def _is_whole(self, b: int) -> bool:
        return len(self._arrived[b]) == len(self._pairs[b][0].parameters)

    def _copy_in(self, b: int) -> None:
        """Copy what has arrived of a bucket into it, in one call: on a GPU the host would otherwise
        launch a kernel for each parameter.
        """
        arrived, self._held_bytes[b] = self._arrived[b], 0
        gradients = {place: each for place, each in arrived.items() if each is not None}
        self._pairs[b][0].copy_in(gradients)
        arrived.update(dict.fromkeys(arrived))

    def _gather_in(self, b: int) -> NDArray[np.bool_]:
        """Copy this rank's gradient into its bucket, zeros where it has none. Returns of which
        parameters it has one.
        """
        bucket, arrived = self._pairs[b][0], self._arrived[b]
        for position, parameter in enumerate(bucket.parameters):
            is_new = parameter.requires_grad or bucket.indices[position] in self._unsent
            if not is_new:  # it was frozen, and this is left from before
                parameter.grad = None
            elif position not in arrived and parameter.grad is not None:
                arrived[position] = parameter.grad
        self._copy_in(b)
        used = np.zeros(len(bucket.parameters), dtype=np.bool_)
        used[list(arrived)] = True
        for position in np.flatnonzero(~used).tolist():
            bucket.views[position].zero_()
        return used

    def _look_for_dropped(self) -> None:
        """The loop has dropped results: tell listeners if they were of this step. Say it once if
        the residual keeps the rest of it, or listeners have sent what the step will use.
        """
        is_skipped = self.counts.skipped_in_a_row > 0
        if not self._exchanges_since_step or is_skipped:
            return
        for listener in self._listeners:
            listener.on_gradients_dropped()
        if (self._keeps_rest or self._listeners) and not self._has_told_of_dropped:
            self._has_told_of_dropped = True
            remains = (
                "What was not sent of them is owed, and comes with later steps"
                if self._keeps_rest
                else "K-FAC's factors are of their pass"
            )
            self._notify(
                "zero_grad() has dropped gradients that were exchanged and that no step has used."
                f" {remains}. If they are of another model's loss, as of a generator's, call"
                " requires_grad_(False) on this one before that pass, and requires_grad_(True)"
                " after it"
            )

    def _live(self, b: int) -> list[int]:
        """Positions of the gradients that exchanges have brought and that are still there."""
        bucket = self._pairs[b][0]
        return [
            position
            for position in np.flatnonzero(self._published[b]).tolist()
            if (gradient := bucket.parameters[position].grad) is not None
            and bucket.holds(position, gradient)
        ]

    def _stash(self, b: int) -> bool:
        """Returns whether the gradients are still there, if there have been any."""
        bucket, live = self._pairs[b][0], self._live(b)
        had_any = bool(self._published[b].any())
        self._published[b][:] = False
        if not live or _is_zero(
            bucket.flat
        ):  # zeroed in place: new gradients may accumulate where they are
            return not had_any
        stashed = self._stashed[b] = torch.zeros_like(bucket.flat)
        places = bucket.views_of(stashed)
        for position in live:
            places[position].copy_(bucket.views[position])
            bucket.parameters[position].grad = None
        self._published[b][live] = True
        return True

    def _restore(self) -> None:
        """Make what was stashed the gradients again."""
        for b, (bucket, _) in enumerate(self._pairs):
            if (stashed := self._stashed[b]) is not None:
                bucket.flat.copy_(stashed)
                self._show(b, self._published[b])
            self._stashed[b] = None

    def _publish_grads(self, b: int, tally: Tally) -> None:
        """Commit, and let `param.grad` be the result, with what had been stashed added back."""
        bucket, reduction = self._pairs[b]
        bucket.flat = reduction.commit()
        stashed, self._stashed[b] = self._stashed[b], None
        if stashed is not None:
            bucket.flat.add_(stashed)
        self._show(b, tally.used | self._published[b])

    def _show(self, b: int, shown: NDArray[np.bool_]) -> None:
        """Let `param.grad` be what the bucket holds of the parameters that are `shown`."""
        bucket, self._published[b] = self._pairs[b][0], shown
        for position in np.flatnonzero(shown).tolist():
            bucket.parameters[position].grad = bucket.views[position]

    def _discard(self) -> None:
        for b, (bucket, reduction) in enumerate(self._pairs):
            reduction.discard()
            self._stashed[b] = None
            self._published[b][:] = False
            for parameter in bucket.parameters:
                parameter.grad = None

    def _skip(self, num_nonfinite: int) -> None:
        """Skip the step, and with it what earlier passes of the same step have exchanged."""
        self._discard()
        self.counts.skipped += 1
        self.counts.skipped_in_a_row += 1
        self._notify(
            f"exchange {self.counts.exchanges}: skipped on all ranks, since {num_nonfinite} of them"
            " had a non-finite gradient"
        )
        if self.counts.skipped_in_a_row > MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{self.counts.skipped_in_a_row} steps in a row were skipped because of non-finite"
                f" gradients; at most {MAX_SKIPPED_STEPS} are allowed. Lower the learning rate or"
                " look at the data"
            )
        if self._has_scaler:
            for b, (bucket, reduction) in enumerate(self._pairs):
                bucket.flat.fill_(float("nan"))
                self._show(b, reduction.tally.used)

    @override
    def clip_gradients(self, max_norm: float) -> float:
        if self._clipping is not None:
            self._clipping.check(max_norm)
            return self._clipping.norm
        return self._clip_mean(max_norm)

    @override
    def clip_as_loop_does(self, max_norm: float) -> float | None:
        clipping = self._clipping
        if clipping is None or max_norm == math.inf:  # then the norm alone is asked for
            return None if self._gives_whole else self._clip_mean(max_norm)
        is_clipped = clipping.clip_norm is not None
        if not is_clipped:
            self._notify(
                f"the loop clips gradients to the norm {max_norm:g}: from the next step on they are"
                f" clipped before entries are selected, as by clip_norm={max_norm:g}"
            )
        clipping.follow(max_norm)
        return clipping.norm if is_clipped else self._clip_mean(max_norm)

    def _clip_mean(self, max_norm: float) -> float:
        # There is no mean before. A loop may clip after each pass in `no_sync`, too, or ask for the
        # norm of what a step has left.
        is_left = max_norm == math.inf and any(map(self._live, range(len(self._pairs))))
        if not (self._exchanges_since_update or self._unsent or is_left):
            self.on_join()
        # The mean is the same on all ranks, and its norm need not be: how a sum is rounded depends
        # on the number of threads and on the processor.
        agree_on = self._norm_over_ranks or self._norm_of_first
        return clip_gradients_([*self._parameters.values()], max_norm, agree_on=agree_on)

    def _norm_of_first(self, norm: float) -> float:
        said = torch.tensor([self._island.hypot(norm)], dtype=torch.float64)
        return float(self._driver.run(dense_broadcast(said, 0), self._words.next()))

    @override
    def counters(self) -> dict[str, float]:
        encode_s = sum(reduction.encode_s for _, reduction in self._pairs)
        ages = [reduction.ages for _, reduction in self._pairs if reduction.ages is not None]
        return {
            "exchanges": self.counts.exchanges,
            "skipped_steps": self.counts.skipped,
            "encode_s": encode_s,
            "watched_entries_sent": sum(each.num_sent for each in ages),
            "age_of_watched_entries": sum(each.total_age for each in ages),
        }

    @override
    def gauges(self) -> dict[str, float]:
        owed = [each for _, reduction in self._pairs if (each := reduction.residual) is not None]
        if not owed:
            return {}
        norms = torch.stack(
            [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in owed]
        )
        return {"residual_norm": float(torch.linalg.vector_norm(norms))}

    # State

    @override
    def state_dict(self) -> CallbackState:
        counts = {"exchanges": self.counts.exchanges, "skipped": self.counts.skipped}
        state: CallbackState = {"additive": {}, "local": {}, "replicated": counts}
        for _, reduction in self._pairs:
            state["additive"] |= reduction.additive_state()
            state["local"] |= reduction.local_state()
        if self._clipping is not None:
            state["replicated"]["num_shares"] = self._clipping.num_shares
            if self._clipping.clip_norm is not None and not self._clipping.is_given:
                state["replicated"]["clip_norm"] = self._clipping.clip_norm
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for kind, entries in self.state_dict().items():
            saved = state[kind]
            needed = {name: e.shape for name, e in entries.items() if isinstance(e, torch.Tensor)}
            names = saved.keys() if kind == "additive" else needed.keys() & saved.keys()
            found = {name: getattr(saved[name], "shape", None) for name in names}
            if odd := sorted(dict(needed.items() ^ found.items())):
                name = odd[0]
                raise CheckpointError(
                    "the state was saved with another model or strategy: the shape of"
                    f" {name!r} is {found.get(name)} there, and {needed.get(name)} here"
                )
        for _, reduction in self._pairs:
            reduction.load(state["additive"], state["local"])
        saved = state["replicated"]
        if self._clipping is not None:
            self._clipping.num_shares = int(saved.get("num_shares", 1))
            if "clip_norm" in saved:
                # The loop says it only after the first pass, whose gradient is selected by then.
                self._clipping.follow(float(saved["clip_norm"]))
        self.counts.exchanges, self.counts.skipped = int(saved["exchanges"]), int(saved["skipped"])

    @override
    def on_abandon(self, reason: str) -> None:
        self.close()

    @override
    def close(self) -> None:
        """Gradients stay where they are: the user's references keep their buffers alive."""
        self._transform.give_back()


def _is_zero(flat: torch.Tensor) -> bool:
    """Whether every element is 0. Extremes are found several times faster than `any` looks at each
    element.
    """
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.numel() == 0 or not any(bool(extreme) for extreme in flat.aminmax())
