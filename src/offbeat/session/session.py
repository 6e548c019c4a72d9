"""`attach`: a strategy goes into a training loop, and comes out again.

The session owns no algorithm. It checks that all ranks mean the same, puts hooks into the model and
the optimizer, hands events to the strategy's parts, and keeps their state.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from offbeat.errors import CheckpointError, ConfigError, OffbeatError, PeerError, UnsupportedError
from offbeat.megabatch.loader import DispatchLoader, MapStyle, Recording
from offbeat.membership.agreement import Generation, Member
from offbeat.membership.generations import GenerationHost, Generations
from offbeat.parts.part import Part, PartState
from offbeat.parts.profile import StepProfile
from offbeat.parts.workspace import Workspace, stream_counter
from offbeat.session.agreement import adopt_rank_0, agree, describe
from offbeat.session.hooks import BackwardHooks
from offbeat.session.loaders import LoaderFactory
from offbeat.session.lockstep_loader import LockstepLoader
from offbeat.strategies.base import Strategy
from offbeat.transport.connect import (
    RETURN_VARIABLE,
    Connection,
    connect,
    is_returning,
    join_process_group,
    reconnect,
)
from offbeat.transport.driver import Driver
from offbeat.transport.network import store_of
from offbeat.transport.single_rank import SingleRank
from offbeat.transport.wrappers import Arrival, Counting, Traffic
from offbeat.weights.model_weights import ModelWeights, choose_buffers

MAX_NOTICES = 100

STATE_KEYS_OF_0_1 = {
    "CentreAverage": "central_model",
    "CheapestCollective": "collective_choice",
    "DispatchLoader": "loader",
    "FactorExchange": "kfac",
    "GradientExchange": "gradients",
    "GradientGuard": "gradient_guard",
    "GradientPhase": "start_phase",
    "GroupAverage": "group_average",
    "LockstepLoader": "lockstep_loader",
    "MegaBatches": "mega_batches",
    "NeighbourAverage": "neighbour_average",
    "PartialExchange": "partial_gradients",
    "PeriodicAverage": "periodic_average",
    "PushSum": "push_sum",
    "ReplicaCheck": "replica_check",
}
"""Version 0.1 kept the state of a part under the name of its class; this is its `state_key` now."""

_attached: WeakSet[torch.nn.Module] = WeakSet()
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
    """

    steps: int
    exchanges: int
    skipped_steps: int
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    wait_s: float
    encode_s: float


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Session:
    """Let `strategy` decide what ranks tell each other in training. Collective: every rank calls
    it.

    One that exchanges gradients decides what `param.grad` holds when `backward()` returns; one that
    exchanges weights, what the parameters hold when `optimizer.step()` returns.

    Rank 0's parameters and buffers are copied to all ranks. If torch.distributed is not initialised
    but the environment is that of torchrun or srun, it is initialised; with neither, the session
    trains alone, on the same code path.

    Args:
        model: a plain module: not wrapped in DistributedDataParallel, not sharded.
        optimizer: one of torch.optim's, over parameters of `model`.
        strategy: such as `offbeat.GTopK(density=0.001)`; the same on every rank.
        group: the ranks that take part; all by default. It is never used for communication.
        scaler: the GradScaler in use with AMP, so that residuals are kept unscaled and all ranks
            skip the same steps.

    Raises:
        ConfigError, UnsupportedError: this cannot work, with the reason. Every rank raises; none is
            left waiting.
        MismatchError: the ranks disagree, with the first difference.
    """
    return attach_through(
        lambda driver: driver, model, optimizer, strategy, group=group, scaler=scaler
    )


def attach_through(
    wrap: Callable[[Driver], Driver],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Session:
    """`attach` with a wrapper of `offbeat.transport.wrappers` around the transport: to delay, to
    fail, to record.
    """
    returns = is_returning()
    if not returns:
        join_process_group()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    refusal: OffbeatError | None = None
    try:
        _check(model, optimizer, strategy, world_size=world_size, returns=returns)
    except OffbeatError as error:
        refusal = error
    if refusal is not None and (world_size == 1 or returns):
        raise refusal
    cuda = any(parameter.is_cuda for parameter in model.parameters())
    connection = reconnect() if returns else connect(group, cuda=cuda)
    try:
        return Session(
            model,
            optimizer,
            strategy,
            connection=connection,
            wrap=wrap,
            scaler=scaler,
            refusal=refusal,
            returns=returns,
        )
    except BaseException:
        connection.driver.close()
        raise


def _check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    world_size: int,
    returns: bool,
) -> None:
    """Refuse what cannot work, before anything is sent."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy must be one such as offbeat.GTopK(density=0.001), got {strategy!r}; did you"
            " pass the class?"
        )
    if returns and not strategy.survives_death:
        raise ConfigError(
            f"{RETURN_VARIABLE} is set, but a run with {strategy.name} ends with the first worker"
            " that does, so none can join it; start all workers again, or use a strategy that goes"
            " on, such as offbeat.WAGMA()"
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "the model is wrapped in DistributedDataParallel, which exchanges gradients itself;"
            " pass model.module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer must be one of torch.optim's or made like them, got"
            f" {type(optimizer).__name__}"
        )
    parameters = dict(model.named_parameters())
    sharded = [
        name for name, parameter in parameters.items() if type(parameter.data).__name__ == "DTensor"
    ]
    if sharded or type(model).__name__ == "FullyShardedDataParallel":
        raise UnsupportedError(
            f"the model is sharded (FSDP2 or DTensor{f', see {sharded[0]!r}' if sharded else ''});"
            " offbeat needs every rank to hold whole parameters: pass the model before"
            " fully_shard()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS runs several backward passes inside step(), each rank as many as it likes; use"
            " another optimizer"
        )
    lazy = next(
        (
            name
            for name, p in parameters.items()
            if isinstance(p, torch.nn.parameter.UninitializedParameter)
        ),
        None,
    )
    if lazy is not None:
        raise UnsupportedError(
            f"parameter {lazy!r} has no shape yet; run the model once on a sample batch before"
            " attaching"
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "the model has no parameter that requires a gradient, so there is nothing to train"
        )
    known = {id(parameter) for parameter in parameters.values()}
    foreign = sum(
        id(parameter) not in known
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if foreign:
        raise ConfigError(
            f"{foreign} of the optimizer's parameters are not the model's; build the optimizer from"
            " model.parameters(), after moving the model to its device"
        )
    taken = {id(parameter) for attached in _attached for parameter in attached.parameters()}
    if any(id(parameter) in taken for parameter in parameters.values()):
        raise ConfigError(
            "the model, or a part of it, is attached already; close that session first"
        )
    strategy.check(model, optimizer)
    if (
        not returns
    ):  # such a worker does not know yet how many there are; the others have passed this check
        strategy.check_world(world_size)


class Session:
    """A strategy at work in a training loop. Made by `attach`; a context manager that closes
    itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        *,
        connection: Connection,
        wrap: Callable[[Driver], Driver] = lambda driver: driver,
        scaler: torch.amp.GradScaler | None = None,
        refusal: OffbeatError | None = None,
        returns: bool = False,
    ) -> None:
        driver = wrap(connection.driver)
        self.strategy = strategy
        self.rank = driver.rank
        self.world_size = driver.world_size
        self.notices: list[str] = []
        """Remarks that a user should see: fallbacks, skipped steps, choices made."""
        new_stream = stream_counter()
        control = new_stream()
        has_scaler = scaler is not None and scaler.is_enabled()
        description = describe(model, optimizer, strategy, has_scaler=has_scaler)
        if not returns:
            agree(driver, control, refusal or description)
            adopt_rank_0(driver, control, model)
        self._network = connection.network
        self._wrap = wrap
        self._returns = returns
        self._description = json.dumps(
            {**description, "frozen parameters": {"sha256": _digest_of_frozen(model)}}
        )
        self._counting = Counting(driver)
        self._in_background: Counting | None = None
        self._counted_in_background = Traffic()
        self._driver: Driver = self._counting
        self._parameters = {
            _plain(name): p for name, p in model.named_parameters() if p.requires_grad
        }
        self._frozen = [
            (_plain(name), p) for name, p in model.named_parameters() if not p.requires_grad
        ]
        self._synchronised = True
        self._steps = 0
        self._closed = False
        self._chosen_buffers = choose_buffers(_persistent_buffers(model))
        workspace = Workspace(
            parameters=self._parameters,
            buffers=lambda: _persistent_buffers(model),
            optimizer=optimizer,
            model=model,
            driver=self._driver,
            grad_scale=(lambda: 1.0) if scaler is None else scaler.get_scale,
            has_scaler=has_scaler,
            new_stream=new_stream,
            notify=self._notify,
            enter=self._enter,
            own_store=lambda: store_of(self._network),
            count=self._count_in_background,
            record_wait=self._counting.record_wait,
        )
        self._control = control
        self._parts: Sequence[Part] = strategy.build(workspace)
        try:
            self._put_in(model, optimizer)
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def _put_in(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Connect the parts with the training loop."""
        # what setting up took, such as measuring the links, is not training
        self._counting.restart()
        if self._in_background is not None:
            self._in_background.restart()
        self._mean_source = next((part for part in self._parts if part.averages_models), None)
        self._hooks = BackwardHooks(model, list(self._parameters.values()), self)
        self._step_handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._model = model
        _attached.add(model)

    # The user's side

    @property
    def stats(self) -> Stats:
        """Totals so far."""
        traffic = self._traffic()
        exchanges = skipped_steps = encode_s = 0.0
        for part in self._parts:
            counters = part.counters()
            exchanges += counters.get("exchanges", 0.0)
            skipped_steps += counters.get("skipped_steps", 0.0)
            encode_s += counters.get("encode_s", 0.0)
        return Stats(
            steps=self._steps,
            exchanges=int(exchanges),
            skipped_steps=int(skipped_steps),
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            messages_sent=traffic.messages_sent,
            wait_s=traffic.wait_s,
            encode_s=encode_s,
        )

    def take_arrivals(self) -> list[Arrival]:
        """When this rank came to each collective since the last call, and how long it
        waited there.
        """
        return self._counting.take_arrivals()

    def take_ready_at_s(self) -> float | None:
        """When this rank first stood still for the others since the last call, on the monotonic
        clock; None if it never did.

        All ranks leave a collective at about the same time; who keeps whom waiting shows only in
        when they come to it.
        """
        return self._counting.take_ready_at_s()

    @property
    def parts(self) -> Sequence[Part]:
        """What the strategy has built, in the order in which parts get events: for a look into
        one of them.
        """
        return self._parts

    def take_profile(self) -> StepProfile | None:
        """What the strategy did within the step that has just ended, if it is one that was looked
        at closely.
        """
        profiles = [part.take_profile() for part in self._parts]
        return next((profile for profile in profiles if profile is not None), None)

    def join(self) -> None:
        """Take part in the other ranks' exchange without a backward pass, contributing nothing new.

        For a rank that has no batch in this step. `optimizer.step()` does it by itself;
        `GradScaler.step()` cannot, since it
        looks for gradients first: there, call this in the place of `backward()`.
        """
        with torch.no_grad():
            for part in self._parts:
                part.on_join()

    def weigh(self, num_samples: int) -> None:
        """Say that this rank's gradient of the coming step is the mean over so many samples.

        Gradients are then averaged over samples, in the place of ranks: the mean of the means of 1
        and of 9 samples is not the
        mean of 10. Call it before `backward()`, for each batch, on all ranks; loaders of `loader`
        do it by themselves. Those that average weights pay no heed. In float16 give a number near
        1, such as samples over the usual batch.
        """
        for part in self._parts:
            part.on_batch_claimed(num_samples)

    def loader(
        self,
        dataset: MapStyle,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        record: bool = False,
        replay: Recording | None = None,
    ) -> DispatchLoader | LockstepLoader:
        """Batches of `dataset`, each sample once an epoch over all ranks, in an order drawn from
        `seed`. Collective.

        With `AdaptiveSGD` whoever is free claims the next batch, and the strategy says how large;
        with `ElasticSGD` each rank has an equal share. With the others, ranks take equally many
        steps, with batches of as many samples as each asks for, and gradients are averaged over
        samples.

        Its position is part of `state_dict()`: make the loader before `load_state_dict`.

        Args:
            dataset: of map style; the same on all ranks.
            seed: of the order, >= 0.
            batch_size: of this rank, >= 1; needed where the strategy has none, and refused where it
                has.
            max_batch_size: what fits into this rank's memory, in samples; where the strategy
                chooses sizes.
            collate: makes a batch of a list of samples; torch's `default_collate` if None.
            record: keep in `loader.recording` who claimed what; where samples are claimed.
            replay: such a recording, to be repeated bit for bit.

        Raises:
            ConfigError: this cannot work, with the reason. Every rank raises.
            MismatchError: the ranks disagree on the data.
        """
        factory = LoaderFactory(
            parts=self._parts,
            driver=self._counting.inner,
            control=self._control,
            network=self._network,
            weigh=self.weigh,
            notify=self._notify,
            returns=self._returns,
        )
        made = factory.loader(
            dataset,
            seed=seed,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            collate=collate,
            record=record,
            replay=replay,
        )
        self._parts = [*self._parts, made]
        return made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally; the next one outside exchanges everything
        accumulated.
        """
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def averaged_model(self) -> torch.nn.Module:
        """A copy of the model that holds the mean over all ranks, to evaluate and to save.
        Collective: every rank calls it.

        With `AdaptiveSGD` and `ElasticSGD` those that have died or left are not in, and just after
        a merge nothing moves.

        Unless `averages_alone`: then a rank calls it when it likes, and those that have died or
        left are not in. The models
        that the others send count in their `stats`, with what they send to average.

        Trainable parameters and floating-point buffers are weighted means, integer buffers maxima,
        and everything else this rank's own. Where all ranks hold the same parameters anyway, only
        buffers travel. What a collective call moves is no training and is not in `stats`. Call it
        between steps; the copy is in the mode, training or evaluation, that the model is in.

        Raises:
            NonFiniteError: this rank's weights hold an infinity or a NaN.
        """
        self._check_open("averaged_model")
        copied = copy.deepcopy(self._model)
        parameters = {_plain(name): parameter for name, parameter in copied.named_parameters()}
        weights = ModelWeights(
            parameters=(
                {name: parameters[name] for name in self._parameters}
                if self.strategy.replicas_differ
                else {}
            ),
            buffers=lambda: _persistent_buffers(copied),
            chosen=self._chosen_buffers,
        )
        if self._mean_source is not None:
            with torch.no_grad():
                self._mean_source.average_into(weights)
            return copied
        with torch.no_grad():
            weights.average_(self._counting.inner, self._control, weight=self.averaging_weight)
        return copied

    @property
    def averages_alone(self) -> bool:
        """Whether `averaged_model` is no collective: the other ranks answer beside training."""
        return self._mean_source is not None and self._mean_source.averages_alone

    @property
    def start_step(self) -> int:
        """The step at which this rank came in: 0, or that of the rank whose model it took when it
        joined a run under way.
        """
        return 0 if self._mean_source is None else self._mean_source.start_step

    @property
    def averaging_weight(self) -> float:
        """This rank's weight in the mean of all ranks' models."""
        weights = (part.averaging_weight() for part in self._parts)
        return next((weight for weight in weights if weight is not None), 1.0)

    def finish(self) -> None:
        """Say that this rank takes no more steps. Returns when every living rank has said so.

        For strategies whose ranks do not keep step: `averaged_model` is the mean of finished models
        afterwards, and nobody
        waits any more for this rank to train. `close` does it too. With the other strategies there
        is nothing to do.
        """
        self._check_open("finish")
        with torch.no_grad():
            for part in self._parts:
                part.on_finish()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: residuals, momenta, counters. Tensors are copies, keyed by parameter
        name.
        """
        parts = {part.state_key: _copied(part.state_dict()) for part in self._parts}
        return {
            "strategy": self.strategy.name,
            "world_size": self.world_size,
            "rank": self.rank,
            "parts": parts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises `CheckpointError` if the state is of another strategy,
        model, rank or world size.
        """
        for key, here in (
            ("strategy", self.strategy.name),
            ("world_size", self.world_size),
            ("rank", self.rank),
        ):
            if state.get(key) != here:
                fix = (
                    "; offbeat.reshard shares old ranks' states out anew"
                    if key == "world_size"
                    else ""
                )
                raise CheckpointError(
                    f"the state was saved with {key} {state.get(key)!r}, here it is {here!r}{fix}"
                )
        parts = {
            STATE_KEYS_OF_0_1.get(key, key): saved for key, saved in state.get("parts", {}).items()
        }
        for part in self._parts:
            if part.state_key not in parts:
                raise CheckpointError(
                    f"the state lacks {part.state_key!r}; it was saved with other options of the"
                    " strategy"
                )
        for part in self._parts:
            part.load_state_dict(parts[part.state_key])

    def close(self) -> None:
        """Take every hook out and give back sockets and groups. Idempotent."""
        if self._closed:
            return
        try:
            self._hooks.report_failed_pass()
        finally:
            self._close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ConfigError(
                f"{method}() was called on a session that is closed; call it inside the with block"
            )

    def _close(self) -> None:
        self._closed = True
        _attached.discard(self._model)
        self._hooks.remove()
        for handle in self._step_handles:
            handle.remove()
        with ExitStack() as stack:
            stack.callback(self._driver.close)
            for part in reversed(self._parts):
                stack.callback(part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The peers must hear of it before the sockets go; what goes wrong on the way out must not
        # hide the error.
        blame = error.rank if isinstance(error, PeerError) else None
        self._abandon(f"{type(error).__name__}: {error}", blame=blame)
        with suppress(OffbeatError):
            self._close()

    def _abandon(self, reason: str, *, blame: int | None = None) -> None:
        """Tell the other ranks that this one fails, so that nobody waits for it."""
        with suppress(OffbeatError):
            self._driver.abort(reason, blame=blame)
        for part in self._parts:
            with suppress(OffbeatError):
                part.on_abandon(reason)

    # Events, from the hooks

    # Under backward(create_graph=True) autograd records; what is done with finished gradients is
    # not to be recorded.

    @torch.no_grad()
    def forward_begins(self, *, trains: bool) -> None:
        for part in self._parts:
            part.on_forward_begins(trains=trains)

    @torch.no_grad()
    def backward_begins(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"parameter {name!r} was frozen when the session was attached and requires a"
                    " gradient now; close the session and attach again after unfreezing"
                )
        for part in self._parts:
            part.on_backward_begins(synchronised=self._synchronised)

    @torch.no_grad()
    def gradient_ready(self, index: int) -> None:
        for part in self._parts:
            part.on_gradient_ready(index, synchronised=self._synchronised)

    @torch.no_grad()
    def backward_done(self) -> None:
        for part in self._parts:
            part.on_backward_done(synchronised=self._synchronised)

    @torch.no_grad()
    def backward_failed(self) -> None:
        for part in self._parts:
            part.on_backward_failed()

    @torch.no_grad()
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._hooks.report_failed_pass()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):  # it will run backward, and that exchanges
            for part in self._parts:
                part.on_closure()
            return args[:1], {**kwargs, "closure": self._then_update(closure)}
        for part in self._parts:
            part.on_before_step()
        self._before_update()
        return None

    def _then_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            loss = closure()
            self._before_update()
            return loss

        return called

    @torch.no_grad()
    def _before_update(self) -> None:
        for part in self._parts:
            part.on_before_update()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        for part in self._parts:
            part.on_after_step()
        self._driver.mark_step(self._steps)

    def _enter(self, host: GenerationHost) -> Generations | None:
        """Make `host` a member of the run's generations, from the first one on or from now on.
        Collective.
        """
        if self._network is None:
            alone = Generation(
                number=0, members=(Member(rank=0, ticket=0),), newcomers=frozenset(), tickets=0
            )
            host.begin(alone, 0, SingleRank())
            return None
        generations = Generations(self._network, host)
        try:
            if self._returns:
                generations.join(self._description)
            else:
                generations.start(self._description)
        except BaseException:
            generations.close()
            raise
        return generations

    def _count_in_background(self, driver: Driver) -> Driver:
        """`driver`, its traffic counted with the session's. Of those before it only the counts are
        kept.
        """
        self._counted_in_background = self._background_traffic()
        self._in_background = Counting(self._wrap(driver), in_background=True)
        return self._in_background

    def _background_traffic(self) -> Traffic:
        before, now = self._counted_in_background, self._in_background
        return before if now is None else before.plus(now.traffic)

    def _traffic(self) -> Traffic:
        return self._counting.traffic.plus(self._background_traffic())

    def _notify(self, remark: str) -> None:
        if len(self.notices) < MAX_NOTICES:
            self.notices.append(remark)


def reshard(states: Sequence[Mapping[str, Any]], world_size: int, rank: int) -> dict[str, Any]:
    """The state of `rank` in a world of `world_size`, made of the states of all ranks of an older
    world.

    What is additive (residuals, momenta) is shared out so that its sum over ranks stays the same:
    rank r takes the old ranks r, r + world_size, ...; a rank beyond the old ones starts with zeros.
    With the same world size nothing changes.

    Args:
        states: `Session.state_dict()` of every old rank, by rank.
        world_size: of the new world, >= 1.
        rank: in the new world.
    """
    if not states:
        raise CheckpointError("there is no state to share out")
    parts = {
        name: _reshard_part([state["parts"][name] for state in states], world_size, rank)
        for name in states[0]["parts"]
    }
    return {
        "strategy": states[0]["strategy"],
        "world_size": world_size,
        "rank": rank,
        "parts": parts,
    }


def _reshard_part(states: Sequence[PartState], world_size: int, rank: int) -> PartState:
    mine = states[rank::world_size]
    additive = {
        name: (
            torch.stack([state["additive"][name] for state in mine]).sum(dim=0)
            if mine
            else torch.zeros_like(tensor)
        )
        for name, tensor in states[0].get("additive", {}).items()
    }
    local = states[rank % len(states)].get("local", {})
    return {"additive": additive, "local": local, "replicated": states[0].get("replicated", {})}


def _copied(state: PartState) -> PartState:
    return {
        kind: {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }
        for kind, entries in {"additive": {}, **state}.items()
    }


def _digest_of_frozen(model: torch.nn.Module) -> str:
    """Of what is not averaged and yet has to be the same on all ranks."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(_plain(name).encode())
            digest.update(
                parameter.detach()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    return digest.hexdigest()


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state; the others are derived from something else."""
    saved = model.state_dict(keep_vars=True).keys()
    return {_plain(name): buffer for name, buffer in model.named_buffers() if name in saved}


def _plain(name: str) -> str:
    """A parameter's name without what torch.compile's wrapper puts in front."""
    return name.replace("_orig_mod.", "")
