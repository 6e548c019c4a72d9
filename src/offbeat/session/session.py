"""`Session`: a strategy at work in a training loop.

The session owns no algorithm. It makes sure that all ranks mean the same, lets the strategy build
its callbacks, and answers the user. Hooks and events are in `events.py`, state in `state.py`,
checks of arguments in `attach.py`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, Literal, NoReturn, Self, TypeAlias
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from offbeat.callbacks.callback import Callback, Decision
from offbeat.callbacks.context import UNSCALED, Context, Notices, stream_counter
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.callbacks.plain_arithmetic import plain_arithmetic
from offbeat.codec.option_value import require_positive
from offbeat.codec.tally import all_finite
from offbeat.collectives.dense import gather_values
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, PeerError, UnsupportedError
from offbeat.gradients.clipping import clip_gradients_
from offbeat.gradients.replica_check import checksum
from offbeat.megabatch.fetching import MapStyle
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import GenerationHost, Generations, newest_run, of_run
from offbeat.session.agreement import adopt_rank_0, adopt_state_of_rank_0, agree, describe
from offbeat.session.checkpoint import naming_misfit
from offbeat.session.events import EventDispatcher
from offbeat.session.loaders import LockstepLoader, make_loader
from offbeat.session.metrics import SessionObserver, as_numbers, session_closed, session_opened
from offbeat.session.sharded import Replica, reshard_modules
from offbeat.session.state import (
    digest_of_frozen,
    load_state_of,
    persistent_buffers,
    plain_name,
    state_of,
)
from offbeat.strategies.base import Strategy
from offbeat.torch_private import tensors_in
from offbeat.transport.connect import Connection
from offbeat.transport.driver import Arrival, Driver, SessionTraffic
from offbeat.transport.grid import Grid
from offbeat.transport.network import store_of
from offbeat.transport.single_rank import SingleRank
from offbeat.weights.model_weights import (
    ModelWeights,
    average_at_the_end,
    choose_buffers,
    non_finite_weights,
)
from offbeat.weights.shard import whole_of, wrap

Finish: TypeAlias = Literal["average", "keep"]
"""What a rank's model is when its session has ended well: the mean of all models, or its own."""

Adopted: TypeAlias = Literal["model", "parameters", "nothing"]
"""What ranks take of rank 0's model when a session begins: parameters and buffers, parameters only,
or nothing.
"""

_CAUSE_S: Final = 3.0
"""How long after an error of PyTorch's a rank of an island may take to be found dead."""

ATTACHED_MODELS: WeakSet[torch.nn.Module] = WeakSet()
"""Models with a session, which exchanges their gradients; a second one would do so twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Totals of this rank since it was attached.

    Attributes:
        steps: optimizer steps taken.
        exchanges: exchanges of gradients or weights.
        skipped_steps: steps that did nothing because of a gradient that was not finite: on all
            ranks where gradients are exchanged, on this one alone where weights are.
        bytes_sent, bytes_received, messages_sent: as the transport counted them.
        wait_s: seconds spent waiting for other ranks.
        encode_s: seconds spent on selection, residuals and putting results in place.
        mean_entry_age: exchanges from one time that an entry of the gradient was sent to the next,
            a mean over those that this rank has sent, from a sample. Exchanges of everything do not
            count; None where there were no others.
    """

    steps: int
    exchanges: int
    skipped_steps: int
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    wait_s: float
    encode_s: float
    mean_entry_age: float | None = None


class Session:
    """A strategy at work in a training loop. Made by `attach`; a context manager that closes
    itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        strategy: Strategy,
        *,
        connection: Connection,
        wrap: Callable[[Driver], Driver] = lambda driver: driver,
        scaler: torch.amp.GradScaler | None = None,
        refusal: OffbeatError | None = None,
        returns: bool = False,
        finish: Finish = "average",
        bucket_mib: float | None = None,
        replica_check_interval: int = 100,
        ignored: Collection[str] = (),
        adopted: Adopted = "model",
        replica: Replica | None = None,
    ) -> None:
        driver = wrap(connection.driver)
        self.strategy = strategy
        self.acting: Strategy = strategy
        """The strategy whose callbacks are at work: `strategy`, or with `Auto` what it has chosen.
        """
        new_stream = stream_counter()
        control = new_stream()
        if refusal is not None:
            # What is refused cannot be described in all cases, and the peers need the refusal only.
            agree(driver, control, refusal)
        if replica is None:
            ranks = range(driver.world_size)
            replica = Replica(model, Grid(rank=driver.rank, column=ranks, island=[driver.rank]))
        self._replica = replica
        self.rank, self.world_size = replica.grid.rank, replica.grid.world_size
        self._notices = Notices(self.rank)
        self.notices = self._notices.kept
        """Remarks that a user should see: fallbacks, skipped steps, choices made. Each is also a
        log record of the logger `offbeat`, and an `offbeat.errors.OffbeatWarning` where it changes
        the meaning of the run.
        """
        self.averaged_without: frozenset[int] = frozenset()
        """The ranks whose models the latest `averaged_model` lacks, because they did not answer in
        time, or have just died. Always empty where that is a collective.
        """
        has_scaler = scaler is not None and scaler.is_enabled()
        description = describe(
            model,
            optimizer,
            strategy,
            session={
                "scaler": has_scaler,
                "finish": finish,
                "bucket_mib": bucket_mib,
                "replica_check_interval": replica_check_interval,
            },
            ignored=ignored,
        )
        self._buffers = persistent_buffers(model, ignored)
        shared = {name: p for name, p in replica.parameters.items() if name not in ignored}
        buffers = [b for name, b in model.named_buffers() if name not in ignored]
        if not returns:
            replica.agree(driver, control, description)
            if adopted != "nothing":
                adopt_rank_0(driver, control, shared.values())
            if adopted == "model":
                adopt_rank_0(driver, control, buffers)
        self._network = connection.network
        self._returns = returns
        self._description, self._ignored = description, ignored
        self._traffic = SessionTraffic(driver, wrap=wrap)
        self._driver: Driver = self._traffic.counting
        self._model = model
        self._parameters = {plain_name(name): p for name, p in shared.items() if p.requires_grad}
        self._device_type = next((p.device.type for p in self._parameters.values()), "cpu")
        self._closed = False
        self._finished_at: int | None = None  # after how many steps
        self._num_rests = 0
        self._keeps_own_model = finish == "keep"
        self._handled_before = sys.exception()
        self._on_merge: list[Callable[[], object]] = []
        self.observers: list[SessionObserver] = []
        """Who is told of steps and of what is logged; to be appended to."""
        self.clips_by_value = False
        """Whether the loop clips gradients by value. `offbeat run` and the integrations set it
        where they see that, and `Auto` then leaves out strategies that have selected entries by
        then.
        """
        self._chosen_buffers = choose_buffers(self._buffers_of(model))
        self._control = control
        self._island = replica.island
        self._context = Context(
            parameters=self._parameters,
            buffers=lambda: self._buffers_of(model),
            chosen_buffers=self._chosen_buffers,
            shared=[*shared.values(), *buffers],
            optimizer=replica.optimizer(optimizer),
            model=model,
            driver=self._driver,
            island=self._island,
            grad_scale=UNSCALED if scaler is None else scaler.get_scale,
            has_scaler=has_scaler,
            clips_by_value=lambda: self.clips_by_value,
            new_stream=new_stream,
            notices=self._notices,
            enter=self._enter,
            own_store=lambda: store_of(self._network),
            count=self._traffic.count_in_background,
            record_wait=self._traffic.counting.record_wait,
            on_merge=self._on_merge,
            waited_s=self._traffic.counting.waited_s,
            resting=self.resting,
            switch=self._switch,
            training_loader=self._training_loader,
            returns=returns,
            bucket_mib=bucket_mib,
            replica_check_interval=replica_check_interval,
        )
        self._is_last_step, self._skipped_before, self._num_entered = False, 0, count()
        self._max_norm: float | None = None
        self._counted_before: defaultdict[str, float] = defaultdict(float)
        self.acting = strategy.begins_as(returns=returns)
        self._callbacks = self._built_by(strategy, self._context)
        self._built = list(self._callbacks)
        try:
            self._traffic.restart()
            self._last_stream = new_stream()
            self._events = EventDispatcher(
                model,
                optimizer,
                self._callbacks,
                parameters=self._parameters,
                frozen={plain_name(name): p for name, p in shared.items() if not p.requires_grad},
                has_scaler=has_scaler,
                device_type=self._device_type,
                driver=self._driver,
                observers=self.observers,
                notices=self._notices,
                acting=self.acting,
            )
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        if self._network is not None and self._network.cipher == "none":
            self._notices.notify(
                "messages between ranks are neither encrypted nor authenticated, as"
                " OFFBEAT_CIPHER=none asks; anybody who reads this network can read and forge them"
            )
        self._unhooks = [replica.hook()] if replica.is_sharded else []
        if returns:
            self._unhooks += self._keep_from_loads()
        self._load_watch: _LoadWatch | None = None
        if strategy.keeps_anchor or self.acting is not strategy:  # which may go over to one
            self._load_watch = _LoadWatch(
                model,
                self._parameters,
                self._notices,
                keeps_anchor=lambda: self.acting.keeps_anchor,
            )
            self.observers.append(self._load_watch)
        ATTACHED_MODELS.add(model)
        session_opened(self)

    def _built_by(self, strategy: Strategy, context: Context) -> list[Callback]:
        """What `strategy` builds, and measures meanwhile: `attach` may run in an autocast region,
        as it does at the first forward pass of a script.
        """
        with plain_arithmetic(self._device_type):
            return list(strategy.build(context))

    # The user's side

    @property
    def stats(self) -> Stats:
        """Totals so far."""
        traffic = self._traffic.total()
        counted = self._counted(self._callbacks)
        watched, age = counted["watched_entries_sent"], counted["age_of_watched_entries"]
        return Stats(
            steps=self._events.num_steps,
            exchanges=int(counted["exchanges"]),
            skipped_steps=int(counted["skipped_steps"]),
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            messages_sent=traffic.messages_sent,
            wait_s=traffic.wait_s,
            encode_s=counted["encode_s"],
            mean_entry_age=age / watched if watched else None,
        )

    def _counted(self, callbacks: Sequence[Callback]) -> defaultdict[str, float]:
        """What `callbacks` have counted, and those whose place others have taken."""
        counted = self._counted_before.copy()
        for callback in callbacks:
            for name, value in callback.counters().items():
                counted[name] += value
        return counted

    def gauges(self) -> dict[str, float]:
        """What the strategy can measure of itself now, at the price of a pass over the model:
        "residual_norm", the norm of what this rank has not sent yet, "stale_share", the share of
        stale contributions in its averages so far, and "kl_scale", by what `kl_clip` of K-FAC
        multiplied the last step, in (0, 1]. Empty where there is none. Not collective.
        """
        return {k: v for callback in self._callbacks for k, v in callback.gauges().items()}

    @property
    def decisions(self) -> Sequence[Decision]:
        """Which strategy `Auto` has put to work when, and why, in order; before a resume too."""
        return [one for callback in self._callbacks for one in callback.decisions()]

    def take_arrivals(self) -> list[Arrival]:
        """When this rank came to each collective since the last call, and how long it
        waited there.
        """
        return self._traffic.counting.take_arrivals()

    def take_ready_at_s(self) -> float | None:
        """When this rank first waited for its peers since the last call, on the monotonic clock;
        None if it never did.

        All ranks leave a collective at about the same time; who keeps whom waiting shows only in
        when they come to it.
        """
        return self._traffic.counting.take_ready_at_s()

    @property
    def callbacks(self) -> Sequence[Callback]:
        """What the strategy has built, in the order in which callbacks get events: for a look into
        one of them.
        """
        return self._callbacks

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients to the norm `max_norm`. Call it between `backward()` and
        `optimizer.step()`, after `scaler.unscale_(optimizer)` if there is a GradScaler, in the
        place of `torch.nn.utils.clip_grad_norm_`.

        Where gradients are exchanged densely, the mean is clipped, by one norm on all ranks, so
        that replicas stay identical to the bit: collective, every rank calls it. Where weights are
        averaged, this rank's own gradient is clipped. A sparse strategy has selected entries
        already, and clips before that if it was given `clip_norm`: here nothing is left to be done.

        Args:
            max_norm: the largest norm, > 0; for a sparse strategy its `clip_norm`.

        Returns:
            The norm before clipping: of the mean; of this rank's own gradient with a sparse
            strategy or where weights are averaged.

        Raises:
            ConfigError: `max_norm` is not greater than 0, or a sparse strategy has no `clip_norm`
                or another one.
        """
        self._check_open("clip_grad_norm_")
        require_positive("max_norm", max_norm)
        self._max_norm = max_norm
        with plain_arithmetic(self._device_type):
            for callback in self._callbacks:
                if (norm := callback.clip_gradients(max_norm)) is not None:
                    return torch.tensor(norm)
            parameters, combine = self._parameters.values(), self._island.hypot
            return torch.tensor(clip_gradients_(parameters, max_norm, agree_on=combine))

    def clip_as_loop_does(self, max_norm: float) -> torch.Tensor | None:
        """What `offbeat run` and integrations put in the place of a loop's clipping to `max_norm`,
        which knows no `clip_norm`: a sparse strategy clips by itself from the next step on.

        Returns:
            As `clip_grad_norm_`; None: nothing was done, and the loop may clip as ever.
        """
        self._max_norm = max_norm
        with plain_arithmetic(self._device_type):
            norms = [callback.clip_as_loop_does(max_norm) for callback in self._callbacks]
        return next((torch.tensor(norm) for norm in norms if norm is not None), None)

    def log(self, **values: float | torch.Tensor) -> None:
        """Tell the record of this run, and all other observers of the session, what the loop has
        measured: `session.log(loss=loss, accuracy=0.93)`. Not collective; without a record it does
        nothing.

        Args:
            values: numbers, or tensors of one element, by name.

        Raises:
            ConfigError: a value is no number, or the session is closed.
        """
        self._check_open("log")
        numbers = as_numbers(values)
        for observer in self.observers:
            observer.logged(numbers)

    def join(self) -> None:
        """Take part in the peers' exchange without a backward pass, contributing nothing new.

        For a rank that has no batch in this step. `optimizer.step()` does it by itself;
        `GradScaler.step()` cannot, since it looks for gradients first: there, call this in the
        place of `backward()`.
        """
        with plain_arithmetic(self._device_type):
            self._events.tell(Callback.on_join)

    def weigh(self, num_samples: int) -> None:
        """Say that this rank's gradient of the coming step is the mean over so many samples.

        Gradients are then averaged over samples, in the place of ranks: the mean of the means of 1
        and of 9 samples is not the mean of 10. Call it before `backward()`, for each batch, on all
        ranks; loaders of `loader` do it by themselves. Strategies that average weights ignore it,
        but for LocalSGD among members, where each rank counts by its samples. In float16 give a
        number near 1, such as samples over the usual batch.
        """
        self._refuse_shards(
            "weigh()", "FSDP averages over the ranks of an island, who take equally many samples"
        )
        self._events.tell(Callback.on_batch_claimed, num_samples)

    def loader(
        self,
        dataset: MapStyle | DataLoader[Any],
        *,
        seed: int = 0,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        claims_ahead: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> DispatchLoader | LockstepLoader:
        """Batches of `dataset`, each sample once an epoch over all ranks. Collective.

        With `AdaptiveSGD` a rank that is free claims the next batch, and the strategy says how
        large; with `ElasticSGD` each rank has an equal share. With the others, ranks take equally
        many steps, with batches of as many samples as each asks for, and gradients are averaged
        over samples, so the loss is to be a mean over a batch's. `Auto` divides a step's samples by
        speed where a rank is steadily slower, and all have asked for as many. Evaluate under
        `torch.no_grad()`, iteration included: batches that are taken there count for no gradient.

        A `DataLoader` is taken as it is, not prepared for several ranks: its dataset, batch size,
        `collate_fn`, worker processes with all that belongs to them, and pinned memory. With
        `shuffle=True` the order is drawn anew for each epoch from `seed`, so that all ranks draw
        the same; else it is the dataset's. Where samples are claimed, worker processes read
        `claims_ahead` batches while the rank computes, whatever `prefetch_factor` is.

        Its position is part of `state_dict()`: make the loader before `load_state_dict`.

        Args:
            dataset: of map style, the same on all ranks, and in an order drawn from `seed`; or a
                DataLoader of such a dataset.
            seed: of the order, >= 0. Loaders of as many samples have the same order by one seed.
            batch_size: of this rank, >= 1; needed unless a DataLoader says it. Where the strategy
                chooses sizes it is the one to begin with, which the learning rate is for, and the
                same on all ranks.
            max_batch_size: what fits into this rank's memory, in samples; where the strategy
                chooses sizes.
            claims_ahead: how many claims a rank holds beside the one that it computes with, each
                read by a worker process of the DataLoader; 1 if None. More of them hide slower
                reading, and let a slow rank hold up its peers for longer at a merge.
            collate: makes a batch of a list of samples; torch's `default_collate` if None. A
                DataLoader has its own.

        Raises:
            ConfigError: this cannot work, with the reason. Every rank raises. Of DataLoaders those
                with a `batch_sampler`, an `IterableDataset` or a sampler of their own are refused.
            MismatchError: the ranks disagree on the data.
        """
        self._refuse_shards("loader()", "use a DataLoader with a DistributedSampler over all ranks")
        made = make_loader(
            dataset,
            callbacks=self._callbacks,
            driver=self._traffic.counting.inner,
            control=self._control,
            network=self._network,
            weigh=self.weigh,
            notify=self._notices.notify,
            returns=self._returns,
            seed=seed,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            claims_ahead=claims_ahead,
            collate=collate,
        )
        self._callbacks.append(made)  # from now on it gets events, and its position is state
        return made

    def on_merge(self, callback: Callable[[], object]) -> None:
        """Call `callback` on each rank whenever a mega-batch has been merged, with `AdaptiveSGD`
        and `ElasticSGD`. Register it before the first batch.

        It is the place to step a learning-rate scheduler, `session.on_merge(scheduler.step)`: all
        ranks merge equally often, while each takes its own number of batches. A run of E epochs has
        `E * loader.num_mega_batches` merges. A rank that was away, or has joined the run, makes up
        for those that it has missed.

        Raises:
            ConfigError: the strategy has no mega-batches.
        """
        if not self.strategy.shares_samples:
            raise ConfigError(
                f"the strategy is {self.strategy.name}, which has no mega-batches to merge, as"
                " offbeat.AdaptiveSGD() has; step a scheduler after optimizer.step()"
            )
        self._on_merge.append(callback)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate locally; the next one outside exchanges everything
        accumulated. While attached the model has it too, as `model.no_sync`, where frameworks look
        for it.
        """
        return self._events.sync()

    def averaged_model(self) -> torch.nn.Module:
        """A copy of the model that holds the mean over all ranks, to evaluate and to save.
        Collective: every rank calls it.

        With `AdaptiveSGD` and `ElasticSGD` those that have died or left are not in, and just after
        a merge nothing moves.

        Unless `averages_alone`: then a rank calls it when it likes, and those that have died or
        left are not in. It waits until more than half of the ranks have answered; which living ones
        did not is a notice, and in `averaged_without`. A rank has no model to send before its first
        step begins. The models that its peers send count in their `stats`, with what they send to
        average.

        Trainable parameters and floating-point buffers are weighted means, integer buffers maxima,
        and everything else this rank's own. Where all ranks hold the same parameters anyway, only
        buffers travel. What a collective call moves is no training and is not in `stats`. Call it
        between steps; the copy is in the mode, training or evaluation, that the model is in.

        Raises:
            NonFiniteError: this rank's weights hold an infinity or a NaN.
            PeerError: half of the ranks or more have no model or do not answer.
        """
        self._check_open("averaged_model")
        self._refuse_shards(
            "averaged_model()",
            "FSDP refuses to copy a model; use averaged_state_dict() or averaged_weights()",
        )
        self._events.parameters_needed()
        # Names may have changed since `attach`, as by pruning or a parametrization.
        places = {id(p): place for place, p in enumerate(self._model.parameters())}
        copied = _copy_of(self._model)
        copies = list(copied.parameters())
        parameters = {name: copies[places[id(p)]] for name, p in self._parameters.items()}
        self._average(parameters, lambda: self._buffers_of(copied))
        return copied

    @torch.no_grad()
    def averaged_tensors(self) -> dict[str, torch.Tensor]:
        """The trainable parameters and persistent buffers of `averaged_model`, by name: copies,
        without a copy of the model. Collective, and raises, as that.
        """
        self._check_open("averaged_tensors")
        self._events.parameters_needed()
        parameters = {name: p.detach().clone() for name, p in self._parameters.items()}
        buffers = {name: b.clone() for name, b in self._buffers_of(self._model).items()}
        self._average(parameters, lambda: buffers)
        wrapped = {name: wrap(self._parameters[name], mean) for name, mean in parameters.items()}
        return wrapped | buffers

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `averaged_tensors` has means of, by name: the model's own, and no copies."""
        reshard_modules(self._model)
        wholes = {name: whole_of(parameter) for name, parameter in self._parameters.items()}
        return {**wholes, **self._buffers_of(self._model)}

    def averaged_state_dict(self) -> dict[str, Any]:
        """`state_dict()` of `averaged_model`, without a copy of the model; with DTensors where the
        model is sharded. What is not averaged is the model's own. Collective, and raises, as that.
        """
        means = self.averaged_tensors()
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        return {
            name: means.get(
                names.get(id(value), plain_name(name)),
                value.detach() if isinstance(value, torch.Tensor) else value,
            )
            for name, value in self._model.state_dict(keep_vars=True).items()
        }

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the model holds what `averaged_model` does, to evaluate and to save; afterwards
        what it held before. Collective, and raises, as that. Train nothing inside.
        """
        means = self.averaged_tensors()
        self._swap(means)
        try:
            yield
        finally:
            self._swap(means)

    @torch.no_grad()
    def _swap(self, others: Mapping[str, torch.Tensor]) -> None:
        """Let the model have the values of `others`, by name, and `others` those of the model."""
        for name, tensor in self.tensors().items():
            kept = tensor.detach().clone()
            tensor.copy_(others[name])
            others[name].copy_(kept)
        reshard_modules(self._model)

    @torch.no_grad()
    def _average(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Replace copies of the model's tensors by their means over all ranks."""
        weights = ModelWeights(
            parameters=(
                {name: parameters[name] for name in self._parameters}
                if self.acting.replicas_differ
                else {}
            ),
            buffers=buffers,
            chosen=self._chosen_buffers,
        )
        if self._mean_source is not None:
            self.averaged_without = self._mean_source.average_into(weights)
        else:
            weights.average_(
                self._traffic.counting.inner, self._control, weight=self.averaging_weight
            )

    @property
    def averages_alone(self) -> bool:
        """Whether `averaged_model` is no collective: the peers answer beside training."""
        return self._mean_source is not None and self._mean_source.averages_alone

    @property
    def _mean_source(self) -> Callback | None:
        return next((callback for callback in self._callbacks if callback.averages_models), None)

    @torch.no_grad()
    def _switch(self, strategy: Strategy, stays: Callback, num_steps: int) -> bool:
        """As of `Context`."""
        skipped = int(self._counted(self._callbacks)["skipped_steps"])
        if not self._is_last_step:
            self._is_last_step, self._skipped_before = True, skipped
            self._events.tell(Callback.on_last_step)
            return False
        if not self.acting.replicas_differ and skipped != self._skipped_before:
            # All ranks have dropped the step that was to send what they owe: they owe it still.
            self._skipped_before = skipped
            return False
        if not (self.replicas_agree or self.averages_alone):
            return False
        if self.acting.replicas_differ:
            self._become_one()
        self._act_by(strategy, stays, num_steps=num_steps)
        return True

    def _training_loader(self) -> LockstepLoader | None:
        """The loader that training takes its batches from; None where there is none, or several."""
        loaders = [each for each in self._callbacks if isinstance(each, LockstepLoader)]
        training = [each for each in loaders if each.trains]
        return training[0] if len(training) == 1 else None

    def _become_one(self) -> None:
        """Give all ranks the same model, and the same state of the optimizer. Collective."""
        if self.averages_alone:
            self._take_mean()
        optimizer = self._context.optimizer
        if self._driver.world_size > 1 and optimizer is not None:
            driver = self._traffic.counting.inner
            adopt_state_of_rank_0(driver, self._control, optimizer, self._parameters)

    def _act_by(self, strategy: Strategy, stays: Callback, *, num_steps: int = 0) -> None:
        """Let callbacks of `strategy` take the place of those at work, but for `stays`, after
        `num_steps` of the run. Collective.
        """
        self._is_last_step, self._finished_at = False, None
        leaving = [callback for callback in self._built if callback is not stays]
        others = [callback for callback in self._callbacks if callback not in leaving]
        self._counted_before = self._counted(leaving)
        # What they keep on a device goes before as much is taken anew.
        self._callbacks[:], self._built = others, []
        while leaving:
            leaving.pop().close()
        self.acting = strategy
        self._built = self._built_by(strategy, replace(self._context, num_steps=num_steps))
        self._callbacks[:] = [*self._built, *others]
        self._events.listen(strategy)
        if self._max_norm is not None:
            for callback in self._built:
                callback.clip_as_loop_does(self._max_norm)

    @property
    def start_step(self) -> int:
        """The step at which this rank came in: 0, or that of the rank whose model it took when it
        joined a run under way.
        """
        return 0 if self._mean_source is None else self._mean_source.start_step

    @property
    def steps_done(self) -> int:
        """How many steps the run has done: this rank's, and those before `start_step`."""
        return self.start_step + self._events.num_steps

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks hold the same parameters just now, between two steps. False where that
        is not known.
        """
        return not self.acting.replicas_differ or any(
            callback.replicas_agree() for callback in self._callbacks
        )

    @property
    def averaging_weight(self) -> float:
        """This rank's weight in the mean of all ranks' models."""
        weights = (callback.averaging_weight() for callback in self._callbacks)
        return next((weight for weight in weights if weight is not None), 1.0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, of JSON's kinds, by rank. Collective: for loops in which all ranks
        have to decide alike. It is no training and is not in `stats`.

        Raises:
            PeerError: a rank has failed.
        """
        self._check_open("gather")
        island = self._island.gather((self.rank, value))
        said = self._traffic.counting.inner.run(gather_values(island), self._control.next())
        by_rank = {rank: theirs for island in said for rank, theirs in island}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def finish(self) -> None:
        """Say that this rank takes no more steps. Returns when every living rank has said so.

        For strategies whose ranks do not keep step: `averaged_model` is the mean of finished models
        afterwards, the model has what was averaged on its behalf after its last step, and no rank
        waits any more for this one to train. With `DeAR` parameters and the state of the optimizer
        are whole on every rank, until all of them take another step. `close` does it too. With the
        others there is nothing to do.
        """
        self._check_open("finish")
        before, self._finished_at = self._finished_at, self._events.num_steps
        # Peers wait no more for a rank that has finished, but where ranks keep step all of them may
        # have gone on since.
        if before is not None and (self.acting.replicas_differ or before == self._finished_at):
            return
        with torch.no_grad():
            self._events.tell(Callback.on_finish)

    @property
    def steps_behind(self) -> int:
        """How many steps this rank has made less than at least half of the ranks have, where ranks
        do not keep step; else 0.

        Let the learning rate of a rank that is late for good follow the step that its peers are
        at, `LambdaLR(optimizer, lambda step: rate(step + session.steps_behind))`. At a rate that
        the others have left behind, its steps, with data that are its own, would outweigh theirs.
        """
        return max((callback.steps_behind() for callback in self._callbacks), default=0)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, this rank takes no step: it evaluates, saves, or waits for its peers elsewhere.

        With strategies whose ranks do not keep step, no peer then waits for the end of its step,
        as WAGMA's ranks do, and with AdaptiveSGD the time does not make the rank look slow. With
        the others it does nothing.
        """
        self._num_rests += 1
        if self._num_rests == 1:
            self._events.tell(Callback.on_rest)
        try:
            yield
        finally:
            self._num_rests -= 1
            if not self._num_rests:  # the outermost block is left
                self._events.tell(Callback.on_resume)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: residuals, momenta, counters. Tensors are copies, keyed by parameter
        name. Of a sharded model those that have a parameter's shape are DTensors, so that
        `torch.distributed.checkpoint` saves them with the model.
        """
        if self._replica.is_sharded:
            return self.state_to_save()
        return {
            "strategy": self.strategy.name,
            "world_size": self.world_size,
            "rank": self.rank,
            "callbacks": state_of(self._callbacks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises `CheckpointError` if the state is of another strategy,
        model, rank or world size. A worker that has come back, and has not taken a step yet, stays
        where its peers are, whatever its checkpoint says, and takes of it only what they do not
        tell, such as the place of a loader in step.
        """
        is_older, name = self._stays_with_peers, self.strategy.name
        if is_older:
            self._notify_left_out("state of the session")
        if self._replica.is_sharded or "num_islands" in state:
            callbacks = self._replica.layout.callbacks(state, name)
        else:
            mine = {"strategy": name, "world_size": self.world_size, "rank": self.rank}
            for key, here in () if is_older else mine.items():
                with naming_misfit("the session's state"):
                    saved = state.get(key)
                    fits = type(saved) is type(here) and saved == here
                if not fits:
                    reshard = "; offbeat.reshard shares old ranks' states out anew"
                    fix = reshard if key == "world_size" else ""
                    raise CheckpointError(
                        f"the state was saved with {key} {saved!r}, here it is {here!r}{fix}"
                    )
            callbacks = state.get("callbacks", {})
        if not is_older:
            self._load_callbacks(callbacks)
            return
        for callback in self._callbacks:
            if callback.state_key in callbacks:
                with naming_misfit(f"the state of {callback.state_key!r}"):
                    callback.load_older_state(callbacks[callback.state_key])

    @property
    def _stays_with_peers(self) -> bool:
        """Whether what a script loads is older than what this rank has taken of its peers."""
        return self._returns and not self._events.num_steps

    def _notify_left_out(self, what: str) -> None:
        self._notices.notify(
            f"this worker has come back and goes on where its peers are; the older {what}, which"
            " its script has loaded, is left out"
        )

    def _keep_from_loads(self) -> list[Callable[[], None]]:
        """Keep the model of the peers where a script that is run anew loads its checkpoint after
        `attach`: they would be drawn back to it. Returns what ends that.
        """
        model, kept = self._model, dict[str, torch.Tensor]()

        def before(*_: Any) -> None:
            if self._stays_with_peers:
                tensors = self.tensors().items()
                kept.update({name: each.detach().clone() for name, each in tensors})

        def after(*_: Any) -> None:
            if kept:
                self._swap(kept)
                kept.clear()
                self._notify_left_out("model")

        return [
            model.register_load_state_dict_pre_hook(ModuleHook(model, before)).remove,
            model.register_load_state_dict_post_hook(ModuleHook(model, after)).remove,
        ]

    def _load_callbacks(self, saved: Mapping[str, Any]) -> None:
        with naming_misfit("the session's state"):
            by_key = dict(saved)
        for callback in list(self._callbacks):
            if callback.state_key in by_key:
                with naming_misfit(f"the state of {callback.state_key!r}"):
                    acted = callback.strategy_of(by_key[callback.state_key])
                if acted is not None and acted != self.acting:
                    self._act_by(acted, callback)
        counted = self._counted(self._callbacks)
        load_state_of(self._callbacks, by_key)
        if self._load_watch is not None:
            self._load_watch.has_state = True
        # What was counted before the state was saved is none of this session's.
        for name, value in self._counted(self._callbacks).items():
            self._counted_before[name] += counted[name] - value
        if unused := sorted(by_key.keys() - {callback.state_key for callback in self._callbacks}):
            self._notices.warn(
                f"nothing here takes up {', '.join(map(repr, unused))} of the session's state: make"
                " loaders before load_state_dict, and resume with the same options of the strategy"
            )

    def state_to_save(self) -> dict[str, Any]:
        """`state_dict()` for `torch.distributed.checkpoint.save`, which saves what has one name
        once: here no two ranks use the same name for what differs.
        """
        return self._replica.layout.of(self.strategy.name, state_of(self._callbacks))

    def state_to_load(self, metadata: Any, key: str = "session") -> dict[str, Any]:
        """What `torch.distributed.checkpoint.load` fills with what `state_to_save` gave, of however
        many ranks, islands and shards; then comes `load_state_dict`.

        Args:
            metadata: of the checkpoint, `FileSystemReader(path).read_metadata()`.
            key: under which it was saved.

        Raises:
            CheckpointError: the checkpoint has no such state.
        """
        return self._replica.layout.to_load(metadata, key)

    def close(self, *, average: bool = True) -> None:
        """End the session: take every hook out, and give back sockets and groups. Idempotent.

        With strategies that average weights every rank's model becomes the mean of all, as
        `averaged_model` has it. That makes it collective. The optimizer's state stays each rank's
        own.

        While an exception is handled that was raised since `attach`, as in a `finally` clause,
        nothing is averaged: the peers are told that this rank has failed. The end of a `with` block
        does the same.

        Args:
            average: False leaves each rank its own model, as `attach(..., finish="keep")` does; the
                same on every rank.

        Raises:
            PeerError: a rank has failed or trains on, and the strategy does not go on without one;
                this rank's model is its own.
            NonFiniteError: the same of a model with an infinity or a NaN.
        """
        if self._closed:
            return
        error = sys.exception()
        if isinstance(error, SystemExit) and not error.code:
            self._end(average=False)  # as at the end of a `with` block
        elif error is not None and error is not self._handled_before:
            if self.acting.replicas_differ and self.world_size > 1:
                self._notices.notify(
                    f"the session was closed while {type(error).__name__} is handled, so this rank"
                    " has failed, and its model is its own; where that is no failure, close the"
                    " session outside of the except clause"
                )
            self._fail_by(error)
        else:
            self._end(average=average)

    def _end(self, *, average: bool) -> None:
        try:
            self._events.report_failed_pass()
            self._events.session_ends()
            if not self.acting.replicas_differ:
                self.finish()  # where each rank has a part of the step, all get the whole of it
            else:
                if average and not self._keeps_own_model:
                    self._take_mean()
                elif self.averages_alone and self._network is not None:
                    self.finish()  # what peers have averaged on this rank's behalf is its own, too
                if not average and not self._keeps_own_model and self.world_size > 1:
                    self._notices.notify(
                        "the session ends without an average, so this rank's model is its own;"
                        " close the session, or use a with block, before the model is saved"
                    )
        except BaseException as error:
            self._fail_by(error)
            raise
        self._close()
        self._notices.issue_warnings()

    def _take_mean(self) -> None:
        """Make this rank's model the mean of all. Collective."""
        source = self._mean_source
        if self._network is None and not (source is not None and source.averages_unconnected):
            return  # nobody was ever connected with this rank
        weights = ModelWeights(
            parameters=self._parameters,
            buffers=lambda: self._buffers_of(self._model),
            chosen=self._chosen_buffers,
        )
        self.finish()
        if self._replica.is_sharded:
            # No column may average while another one of this island cannot.
            good = all_finite([tensor.detach() for tensor in weights.tensors()])
            if any(self._island.largest(not good)):
                raise non_finite_weights(self.rank)
        if source is not None:
            with torch.no_grad():
                source.average_into(weights)
        elif self._driver.world_size > 1:
            with torch.no_grad():
                average_at_the_end(
                    weights,
                    driver=self._traffic.counting.inner,
                    stream=self._last_stream,
                    weight=self.averaging_weight,
                )

    def _buffers_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The buffers of the attached model, or of a copy, that have to do with other ranks."""
        buffers = model.named_buffers()
        return {plain_name(name): buffer for name, buffer in buffers if name in self._buffers}

    def _fail_by(self, error: BaseException) -> None:
        """Close after `error`: the peers must hear of it before the sockets go, and what goes wrong
        on the way out must not hide it. Where a rank of this island has died, that is the error,
        and not what FSDP says of its collectives, which come first.
        """
        # An island of one rank has lost none.
        cause = self._island.loss(_CAUSE_S) if isinstance(error, RuntimeError) else None
        ended_by = cause or error
        blame = ended_by.rank if isinstance(ended_by, PeerError) else None
        self._abandon(f"{type(ended_by).__name__}: {ended_by}", blame=blame)
        with suppress(OffbeatError):
            self._close(ended_by)
        if cause is not None:
            raise cause from error

    def _refuse_shards(self, method: str, instead: str) -> None:
        if self._replica.is_sharded:
            raise UnsupportedError(f"{method} is not for a sharded model: {instead}")

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ConfigError(
                f"{method}() was called on a session that is closed; call it inside the with block"
            )

    def _close(self, error: BaseException | None = None) -> None:
        self._closed = True
        session_closed(self)
        ATTACHED_MODELS.discard(self._model)
        self._events.remove()
        for unhook in self._unhooks:
            unhook()
        with ExitStack() as stack:
            for observer in self.observers:
                stack.callback(observer.closed, error)
            stack.callback(self._driver.close)
            stack.callback(self._island.driver.close)
            for callback in reversed(self._callbacks):
                stack.callback(callback.close)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a Session cannot be pickled or copied, since it holds sockets and hooks of this"
            " process; save session.state_dict(), and keep the session out of what is handed to"
            " other processes or copied, such as a dataset, a collate_fn or a module's attribute"
        )

    def __enter__(self) -> Self:
        if self._closed:
            raise ConfigError(
                "this session is closed, so nothing would be exchanged inside the block; attach"
                " again, or leave the block once, after the last step"
            )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._closed:
            return
        if error is None:
            self._end(average=True)
        elif isinstance(error, SystemExit) and not error.code:
            self._end(average=False)  # the script has ended well, on this rank at least
        else:
            self._fail_by(error)

    def _abandon(self, reason: str, *, blame: int | None = None) -> None:
        """Tell the peers that this rank fails, so that none of them waits for it."""
        for driver in (self._driver, self._island.driver):
            with suppress(OffbeatError):
                driver.abort(reason, blame=blame)
        for callback in self._callbacks:
            with suppress(OffbeatError):
                callback.on_abandon(reason)

    def _enter(self, host: GenerationHost) -> Generations | None:
        """Make `host` a member of the run's generations, from the first one on or from now on.
        Collective.
        """
        if self._network is None:
            host.begin(Generation.of_founders(1), 0, SingleRank())
            return None
        number = newest_run(self._network) if self._returns else next(self._num_entered)
        generations = Generations(of_run(self._network, number), host)
        # It takes long for a large model, which most strategies need not pay.
        reshard_modules(self._model)
        digest = digest_of_frozen(self._model, self._ignored)
        description = json.dumps({**self._description, "frozen parameters": {"sha256": digest}})
        try:
            if self._returns:
                generations.join(description)
            else:
                generations.start(description)
        except BaseException:
            generations.close()
            raise
        return generations


class _LoadWatch(SessionObserver):
    """Warns of another model that a loop has loaded between two steps without the session's state.
    One that is put back after an evaluation is none.

    Args:
        model: attached.
        parameters: its own, by name.
        notices: of the session.
        keeps_anchor: whether the strategy at work goes on from where the last average was.

    Attributes:
        has_state: whether the session's state was loaded since the last step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        notices: Notices,
        *,
        keeps_anchor: Callable[[], bool],
    ) -> None:
        self._parameters, self._warn = parameters, notices.warn
        self._keeps_anchor = keeps_anchor
        self._num_steps, self.has_state = 0, False
        self._seen = list[int]()  # checksums before and after each load since the last step
        look = ModuleHook(model, self._look)
        self._handles = [
            model.register_load_state_dict_pre_hook(look),
            model.register_load_state_dict_post_hook(look),
        ]

    def _look(self, *_: Any) -> None:
        if self._num_steps and self._keeps_anchor():
            self._seen.append(checksum([*self._parameters.values()]))

    @override
    def step_ended(self, num_steps: int) -> None:
        if self._seen and self._seen[0] != self._seen[-1] and not self.has_state:
            self._warn(
                "a model was loaded between two steps, and the strategy goes on from where the last"
                " average has left the model; load the session's state of then, too, or close the"
                " session, load the model and attach it anew"
            )
        self._num_steps, self.has_state = num_steps, False
        self._seen.clear()

    @override
    def closed(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()


def _copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy, also of a model that keeps what it has computed, such as its last activations or
    a weight made of other parameters. PyTorch refuses to copy what has a graph: the copy has it
    without.
    """
    kept = {
        id(tensor): tensor.detach().clone()
        for module in model.modules()
        for tensor in tensors_in({**vars(module), "_modules": None})
        if tensor.grad_fn is not None
    }
    return copy.deepcopy(model, kept)
