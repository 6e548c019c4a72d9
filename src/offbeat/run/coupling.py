"""From what a script makes, DistributedDataParallel and optimizers, to sessions.

    optimizer, scaler made  remembered, weakly
    DDP prepares a forward  attach: DDP's module, and the optimizer that has most of its parameters
      pass with gradients
    later passes            `require_backward_grad_sync` is handed on, as it stands
    group destroyed, end    sessions are closed

All ranks come to the first forward pass together, as DDP's own first broadcast made them, so it is
the place for what is collective. Where there is no optimizer yet, or never will be, gradients are
exchanged as DDP does. An optimizer that is made later and stepped in the place of the attached one,
as by a script that freezes layers at first, has a session attached anew; so has a model that is
wrapped anew.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.callbacks.context import LOGGER
from offbeat.errors import CheckpointError, ConfigError, UnsupportedError
from offbeat.run.children import ChildFunction
from offbeat.run.evaluation import EvaluationWeights
from offbeat.run.patches import ScriptListener
from offbeat.run.recipes import ScriptRecipe, ShardedModule, refuse_clipping_by_value
from offbeat.run.recording import ScriptRecorder
from offbeat.run.step_recorder import ExchangeSession
from offbeat.session.session import Adopted, Session
from offbeat.session.state import reshard
from offbeat.strategies.base import Strategy
from offbeat.torch_private import is_in_flat_parameter, only_makes_state
from offbeat.transport.connect import is_returning

NOT_DISTRIBUTED = """\
{script} trains on one rank only, with neither DistributedDataParallel nor offbeat.attach; add
    torch.distributed.init_process_group()
    model = torch.nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(dataset, sampler=torch.utils.data.DistributedSampler(dataset), ...)
    torch.distributed.destroy_process_group()  # at the end"""

WITHOUT_DDP = """\
{script} makes a process group, but trains with neither DistributedDataParallel nor\
 offbeat.attach, so {strategy} exchanges nothing; wrap the model:\
 torch.nn.parallel.DistributedDataParallel(model)"""

WITHOUT_WRAPPER = """\
{script} steps the parameters of a DistributedDataParallel model that no forward pass for training\
 went through, so nothing is exchanged; call the wrapper, model(x) with gradients and in training\
 mode, and not model.module(x)"""

WITHOUT_OPTIMIZER = """\
no optimizer of torch.optim's has parameters of the DistributedDataParallel model yet, so gradients\
 are exchanged as DistributedDataParallel does it; {strategy} begins when one has stepped them"""

BY_TURNS = """\
{script} steps several optimizers of one model by turns: at each turn {strategy} connects the ranks\
 anew and begins without what it has kept, such as what is owed; put their parameters into groups\
 of one optimizer, or wrap what each of them steps in a DistributedDataParallel of its own"""

NO_OPTIMIZER = """\
{script} made a DistributedDataParallel model and stepped it by no optimizer of torch.optim's, so\
 {strategy} has done nothing"""

NO_TRAINING = """\
{script} came to its end and no training was seen, so {strategy} has done nothing: no optimizer of\
 torch.optim has taken a step in the process that runs it"""


class _Coupled:
    """A DDP model and its session.

    Args:
        ddp: the model.
        session: at work on what it wraps.
        optimizer: the attached one; None: there was none.

    Attributes:
        ddp: may have gone: a script that wraps its model anew keeps the first wrapper no longer.
        module: what it wraps.
        session, optimizer: as given.
        parameters: the ids of its parameters.
        wholes: the ids of the modules that have all of them: itself, and what torch.compile wraps.
        evaluation: the mean, where ranks' models differ.
        stepped: optimizers that have stepped the module's parameters since its last forward pass.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | ShardedModule,
        session: ExchangeSession,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.ddp = weakref.ref(ddp)
        self.module: torch.nn.Module = ddp.module
        self.parameters = frozenset(map(id, self.module.parameters()))
        held = {id(each): len([*each.parameters()]) for each in self.module.modules()}
        self.wholes = {each for each, num in held.items() if num == len(self.parameters)}
        self.session, self.optimizer = session, optimizer
        self.evaluation: EvaluationWeights | None = None
        self.stepped: list[torch.optim.Optimizer] = []

    def has_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        return not self.parameters.isdisjoint(map(id, parameters))


class _Wrapped(NamedTuple):
    """A DDP model as the script made it.

    Attributes:
        adopted: what all ranks have taken of rank 0's model.
        trained: the parameters that DDP would exchange, whether or not they are frozen later on.
        sends_buffers: whether rank 0's buffers are sent before each forward pass.
    """

    adopted: Adopted = "nothing"
    trained: Sequence[torch.nn.Parameter] = ()
    sends_buffers: bool = False


class _ScalerInUse(torch.amp.GradScaler):
    """Stands for the scaler that a script's backward pass is scaled by, whichever that is.

    Args:
        find: gives it; None: no enabled one has scaled its loss.
    """

    _scale_of = staticmethod(torch.amp.GradScaler.get_scale)

    def __init__(self, find: Callable[[], torch.amp.GradScaler | None]) -> None:
        self._find = find

    @override
    def is_enabled(self) -> bool:
        return True

    @override
    def get_scale(self) -> float:
        scaler = self._find()
        return 1.0 if scaler is None else self._scale_of(scaler)


class ScriptSessions(ScriptListener):
    """The sessions of one script.

    Args:
        recipe: what is attached.
        recorder: hears of models that are trained.

    Attributes:
        num_ddp_models: DDP models that the script has made.
        num_attached: sessions that were attached, by this or by the script itself.
        has_made_anything: whether the script has made a DDP model or an optimizer.
        num_processes: processes that the script has started, but for those that load data.
        trains_without_session: whether its first step was of a model that no session has.
        trains_without_ddp: whether that step was in a process group.
    """

    def __init__(self, recipe: ScriptRecipe, recorder: ScriptRecorder) -> None:
        self.num_ddp_models = 0
        self.num_attached = 0
        self.num_processes = 0
        self.trains_without_session = self.trains_without_ddp = False
        self._recipe = recipe
        self._recorder = recorder
        # Those that live, in the order in which the script has made them: what wraps an optimizer
        # is made before the one inside. The older ones were made before the last coupling. Which of
        # them still live depends on the garbage collector, so it may differ between ranks.
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        self._older: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.has_made_anything = False
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._last_scaler: Callable[[], torch.amp.GradScaler | None] = lambda: None
        self._carried = CarriedStates()
        self._wrapped: WeakKeyDictionary[DistributedDataParallel, _Wrapped] = WeakKeyDictionary()
        # In whose place another one that shares parameters with it was attached.
        self._displaced: weakref.WeakSet[torch.nn.Module | ShardedModule] = weakref.WeakSet()
        self._coupled: list[_Coupled] = []
        self._sharded: dict[int, ShardedModule] = {}  # by module, the root's, once it is known
        self._attached_models: set[int] = set()
        self._steppers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._left: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_told_of_override = self._has_told_of_turns = False

    # What the script does

    @override
    def ddp_begins(self, module: torch.nn.Module) -> None:
        for coupled in self._coupled:
            session = coupled.session
            if not (isinstance(session, Session) and coupled.has_any_of(module.parameters())):
                continue
            if not session.acting.replicas_differ:
                session.finish()  # what each rank has a part of is whole, as at the end
            elif coupled.evaluation is not None:
                # DDP is about to write rank 0's model into all ranks. The session stays open, since
                # a new wrapper may only evaluate, and the first one train on.
                coupled.evaluation.take_mean(ends=False)

    @override
    def ddp_made(self, ddp: DistributedDataParallel, copied: bool) -> None:
        self.num_ddp_models += 1
        self.has_made_anything = True
        trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        adopted: Adopted = "model" if ddp.broadcast_buffers else "parameters"
        sends = ddp.broadcast_buffers
        self._wrapped[ddp] = _Wrapped(adopted if copied else "nothing", trained, sends)
        if self._recipe.replicas_differ:
            # Rank 0's buffers would replace all ranks' in each forward pass, and tie them together.
            ddp.broadcast_buffers = False

    @override
    def hook_ignored(self, ddp: DistributedDataParallel) -> None:
        LOGGER.warning(
            "the script's communication hook is ignored: %s exchanges in its place",
            self._recipe.name,
        )

    @override
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers[optimizer], self.has_made_anything = None, True
        with suppress(AttributeError):  # a wrapper that is only half an optimizer takes no hooks
            self._carried.watch(optimizer)

    @override
    def scaler_made(self, scaler: torch.amp.GradScaler) -> None:
        self._scalers.add(scaler)
        if type(scaler).scale is not torch.amp.GradScaler.scale:
            self.scaler_used(scaler)  # by a method of its own, which is not heard of

    @override
    def scaler_used(self, scaler: torch.amp.GradScaler) -> None:
        """Of several, as of a GAN's two models, the one that scaled last is that of the backward
        pass which comes next. One that a script makes and does not use scales nothing.
        """
        self._last_scaler = weakref.ref(scaler)

    @override
    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.scaler_steps(optimizer)

    @override
    def mode_changed(self, module: torch.nn.Module) -> None:
        if not module.training and id(module) in self._attached_models:
            self._recorder.evaluates()
        for coupled in self._coupled:
            if coupled.evaluation is not None and id(module) in coupled.wholes:
                coupled.evaluation.mode_changed(training=module.training)

    @override
    def backward_begins(self, loss: torch.Tensor) -> None:
        scale: float | torch.Tensor = 1.0
        if (scaler := self._scaler_in_use()) is not None:  # `get_scale` would wait for the device
            scale = scaler.scale(torch.ones((), device=loss.device))
        self._recorder.loss_seen(loss, scale)

    @override
    def backward_ended(self) -> None:
        self._recipe.backward_ended()
        self._recorder.backward_ended()

    @override
    def clips(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor | None:
        if norm_type != 2 or not 0 < max_norm < math.inf:
            return None
        given = _with_gradient(parameters)
        for coupled in self._coupled:
            # The norm of a part of the model, or of several models, is no `clip_norm`.
            if given == _with_gradient(coupled.module.parameters()) and isinstance(
                coupled.session, Session
            ):
                return coupled.session.clip_as_loop_does(max_norm)
        return None

    @override
    def clips_by_value(self, parameters: Sequence[torch.Tensor]) -> None:
        for coupled in self._coupled:
            session = coupled.session
            if isinstance(session, Session) and coupled.has_any_of(parameters):
                session.clips_by_value = True
                refuse_clipping_by_value(session.acting)

    @override
    def exchange_prepared(self, reducer: object) -> None:
        for coupled in self._coupled:
            ddp = coupled.ddp()
            if ddp is not None and ddp.reducer is reducer and isinstance(coupled.session, Session):
                ddp.module.require_backward_grad_sync = True

    @override
    def group_ends(self) -> None:
        self.close(None, averages=True)

    def process_made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a process that the script makes is to call in the place of `function`."""
        helpers = "torch.utils.data", "torch.distributed.checkpoint"
        if str(getattr(function, "__module__", "")).startswith(helpers):
            return function  # it loads data, or saves what it is sent in a group of its own
        self.num_processes += 1
        return ChildFunction(function)

    # What the script attaches itself

    def replacement(self, asked: Strategy | str) -> Strategy:
        """The strategy of `offbeat run`, in the place of the script's own; said once."""
        strategy = self._recipe.strategy_for_attach()
        if strategy != asked and not self._has_told_of_override:
            self._has_told_of_override = True
            LOGGER.warning(
                "the script attaches %r; offbeat run trains with %r in its place", asked, strategy
            )
        return strategy

    def attached_by_script(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.num_attached += 1
        self._attached_models.add(id(model))
        self._recorder.attached(session, model, optimizer)

    def close(self, error: BaseException | None, *, averages: bool = False) -> None:
        """End all sessions; after `error`, if that ended the script. Idempotent. `averages`: as of
        `_end`.
        """
        self._recorder.training_ends()
        for coupled in list(self._coupled):
            self._end(coupled, error, averages=averages)

    def complaint(self, script: str) -> ConfigError | None:
        """Why the strategy has not been at work at all, if it has not."""
        if self.num_attached:
            return None
        if self.num_ddp_models:
            why = NO_OPTIMIZER
        elif self.trains_without_ddp:
            why = WITHOUT_DDP
        else:
            why = NOT_DISTRIBUTED if self.trains_without_session else NO_TRAINING
        return ConfigError(why.format(script=script, strategy=self._recipe.name))

    def _scaler_in_use(self) -> torch.amp.GradScaler | None:
        scaler = self._last_scaler()
        return scaler if scaler is not None and scaler.is_enabled() else None

    # Forward passes

    @override
    def sharded_forward_begins(self, module: torch.nn.Module, args: Sequence[Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if id(module) not in self._sharded:
            # The outermost module is called first.
            if not self._recipe.takes_shards:
                raise UnsupportedError(
                    f"the script divides its model by fully_shard, and {self._recipe.name} is for"
                    " DistributedDataParallel; use a strategy of offbeat's, such as localsgd"
                )
            root = ShardedModule(module)
            self._sharded |= dict.fromkeys(map(id, module.modules()), root)
        if self._sharded[id(module)].module is module:
            self.forward_begins(self._sharded[id(module)], args)

    @override
    def forward_begins(
        self, ddp: DistributedDataParallel | ShardedModule, args: Sequence[Any]
    ) -> None:
        if not torch.is_grad_enabled() or isinstance(ddp.module, DistributedDataParallel):
            return  # of several wrappers around each other the innermost one has the model
        self._recorder.samples_seen(ddp.module, args)
        coupled = self._couple(ddp)
        if coupled is None:
            return
        coupled.stepped.clear()
        if coupled.evaluation is not None:
            coupled.evaluation.training_goes_on()
        if isinstance(coupled.session, Session):
            ddp.module.require_backward_grad_sync = ddp.require_backward_grad_sync
            if self._recipe.replicas_differ and isinstance(ddp, DistributedDataParallel):
                # Those of Auto are alike at first, and it may go over to a strategy whose are not.
                differ = coupled.session.acting.replicas_differ
                made = self._wrapped.get(ddp, _Wrapped())
                ddp.broadcast_buffers = made.sends_buffers and not differ

    def _couple(self, ddp: DistributedDataParallel | ShardedModule) -> _Coupled | None:
        """The session of a model that is about to train, which is attached if there is none."""
        coupled = next((each for each in self._coupled if each.ddp() is ddp), None)
        stepped: Sequence[torch.optim.Optimizer] = ()
        if coupled is not None and coupled.stepped and coupled.optimizer not in coupled.stepped:
            stepped = coupled.stepped
            if not (self._has_told_of_turns or self._left.isdisjoint(stepped)):
                self._has_told_of_turns = True
                told = BY_TURNS.format(script=sys.argv[0], strategy=self._recipe.name)
                LOGGER.warning("%s", told)
            if coupled.optimizer is not None:
                self._left.add(coupled.optimizer)
            self._end(coupled, None, averages=True)
            coupled = None
        if coupled is None:
            if not any(parameter.requires_grad for parameter in ddp.module.parameters()):
                return None  # a teacher's, or a critic's while its generator is trained
            wrapped = _Wrapped("model")
            if isinstance(ddp, DistributedDataParallel):
                wrapped = self._wrapped.get(ddp, _Wrapped())
            with _unfrozen(wrapped.trained):
                # Those that were made since the last coupling come first.
                candidates = stepped or sorted(self._optimizers, key=self._older.__contains__)
                optimizer = _optimizer_of(ddp.module, candidates)
                coupled = self._attach(ddp, optimizer, wrapped.adopted)
        return coupled

    def _attach(
        self,
        ddp: DistributedDataParallel | ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        adopted: Adopted,
    ) -> _Coupled | None:
        model = ddp.module
        if optimizer is None and not model.training:
            return None  # an evaluation, perhaps on one rank alone
        sharing = [each for each in self._coupled if each.has_any_of(model.parameters())]
        if ddp in self._displaced:
            gc.collect()  # a wrapper refers to itself, and ranks would find that at other times
            if any(other.ddp() is not None for other in sharing):
                raise UnsupportedError(
                    "two DistributedDataParallel models that share parameters train by turns, and"
                    " only the one that came last would be exchanged; wrap one module that holds"
                    " both, and train by that wrapper alone"
                )
        for other in sharing:
            if (displaced := other.ddp()) is not None:
                self._displaced.add(displaced)
            if other.optimizer is optimizer is not None and isinstance(other.session, Session):
                self._carried.hand_on(optimizer, other.session)
            self._end(other, None, averages=True)
        # Before its first backward pass nobody knows whether a script uses the scaler that it has.
        may_scale = any(scaler.is_enabled() for scaler in self._scalers)
        scaler = _ScalerInUse(self._scaler_in_use) if may_scale else None
        session = self._recipe.attach(ddp, optimizer, scaler, adopted)
        if session is None:
            return None
        coupled = _Coupled(ddp, session, optimizer)
        self._coupled.append(coupled)
        if isinstance(session, Session):
            self._end_those_gone(session)
        self._older.update(self._optimizers)
        if optimizer is None:
            self.num_attached += not self._recipe.needs_optimizer
            if self._recipe.needs_optimizer:
                LOGGER.warning("%s", WITHOUT_OPTIMIZER.format(strategy=self._recipe.name))
            return coupled
        if isinstance(session, Session):
            # torch.distributed.checkpoint saves no further entries.
            if not isinstance(ddp, ShardedModule):
                self._carried.attached(session, optimizer)
            if session.strategy.replicas_differ:
                coupled.evaluation = EvaluationWeights(session, model, optimizer)
        self._attached_models |= coupled.wholes
        self.num_attached += 1
        self._recorder.attached(session, model, optimizer)
        return coupled

    def _end_those_gone(self, newest: Session) -> None:
        """End sessions whose wrappers all ranks have let go of, as in a script that tries many
        models: each would keep its model. The mean of one whose ranks differ may be asked for yet.
        Collective.
        """
        of_all_ranks = [
            each
            for each in self._coupled
            if isinstance(each.session, Session)
            and each.session.world_size == newest.world_size == dist.get_world_size()
        ]
        if len(of_all_ranks) < 2 or is_returning():
            return
        gc.collect()  # a wrapper refers to itself, and ranks would find that at other times
        gone = [each.ddp() is None and each.evaluation is None for each in of_all_ranks]
        said = zip(*newest.gather(gone), strict=True)
        for coupled, on_ranks in zip(of_all_ranks, said, strict=True):
            if all(on_ranks):
                self._end(coupled, None)

    def _end(
        self, coupled: _Coupled, error: BaseException | None, *, averages: bool = False
    ) -> None:
        """End a session. `averages`: the script goes on, on all ranks, so where their models differ
        the mean takes their place.
        """
        self._coupled.remove(coupled)
        if coupled.optimizer is not None:
            self._carried.detached(coupled.optimizer)
        session, cause = coupled.session, error or sys.exception()
        if coupled.evaluation is not None:
            if averages and cause is None:
                coupled.evaluation.take_mean()
            coupled.evaluation.close()
        if cause is not None and not is_good_end(cause):
            session.__exit__(type(cause), cause, cause.__traceback__)
            return
        # Not `finish`: no rank is to wait for one that has come back and begun anew.
        session.__exit__(None, None, None)

    # Steps

    @override
    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        if only_makes_state():
            return
        is_coupled = False
        for coupled in self._coupled:
            if coupled.has_any_of(_parameters_of(optimizer)):
                is_coupled = True
                if optimizer not in coupled.stepped:
                    coupled.stepped.append(optimizer)
        if has_closure:  # its forward pass comes within the step, when hooks are too late for it
            mine = {id(parameter) for parameter in _parameters_of(optimizer)}
            for ddp in list(self._wrapped):
                if not mine.isdisjoint(map(id, ddp.module.parameters())):
                    is_coupled = self._couple(ddp) is not None or is_coupled
        if is_coupled or optimizer in self._steppers:
            return
        stepped = {id(p) for p in _parameters_of(optimizer) if p.grad is not None}
        if not stepped:
            return  # a step that only makes the optimizer's state
        self._steppers.add(optimizer)
        if not (self.trains_without_session or self.num_attached or self.num_ddp_models):
            self.trains_without_session = True
            _refuse_what_nobody_exchanges(optimizer)
            self.trains_without_ddp = True
            optimizer.register_step_post_hook(lambda *_: self._recorder.stepped_without_session())
            LOGGER.warning("%s", WITHOUT_DDP.format(script=sys.argv[0], strategy=self._recipe.name))
        elif not self._recipe.ddp_exchanges and any(
            id(p) in stepped for ddp in self._wrapped for p in ddp.module.parameters()
        ):
            raise ConfigError(WITHOUT_WRAPPER.format(script=sys.argv[0]))


@contextmanager
def _unfrozen(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, `parameters` require gradients. As DDP, a session goes on with those that are frozen
    after it was made, and not with those that were frozen before.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _with_gradient(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters if parameter.grad is not None}


def _optimizer_of(
    module: torch.nn.Module, candidates: Sequence[torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """The one that has most of the model's trainable parameters; of several the first of the
    candidates.
    """
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}

    def shared(optimizer: torch.optim.Optimizer) -> int:
        return sum(id(parameter) in trained for parameter in _parameters_of(optimizer))

    best = max(candidates, key=shared, default=None)
    return best if best is not None and shared(best) else None


def _refuse_what_nobody_exchanges(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the model that `optimizer` steps is sharded, or trained on this rank alone."""
    parameters = list(_parameters_of(optimizer))
    sharded_by = ""
    if any(map(is_in_flat_parameter, parameters)):
        sharded_by = "FullyShardedDataParallel (FSDP)"
    elif any(type(tensor).__name__ == "DTensor" for p in parameters for tensor in (p, p.data)):
        sharded_by = (
            "fully_shard (FSDP2), or has other parameters that are DTensors, and no forward"
        )
        sharded_by += " pass with gradients went through the model itself"
    if sharded_by:
        raise UnsupportedError(
            f"the script shards its model by {sharded_by}; wrap the model in"
            " DistributedDataParallel in its place, or call fully_shard(model, mesh=...) with the"
            " mesh of one node, and then model(...)"
        )
    if not dist.is_initialized():
        raise ConfigError(NOT_DISTRIBUTED.format(script=sys.argv[0]))


def is_good_end(error: BaseException) -> bool:
    """Whether `error` is how a script ends that has done what it was to do: `sys.exit()`."""
    return isinstance(error, SystemExit) and not error.code


STATE_KEY: Final = "offbeat"
"""The key of the entry in the optimizer's state."""


class CarriedStates:
    """The states of the sessions of one script, by optimizer, in the checkpoints that the script
    writes by itself.

    Scripts save `model.state_dict()` and `optimizer.state_dict()`. What a strategy owes, such as
    the residual of gTop-k, has to come along, or it is lost when the script resumes:

        optimizer.state_dict()        has one entry more, "offbeat": this rank's state
        optimizer.load_state_dict()   keeps that entry for the session that is attached later

    Where a script wraps its model anew the next session of the same optimizer is handed the state,
    too.

    Nothing is exchanged for that, since scripts often save on one rank alone. Then all ranks find
    that rank's state: what is the same on all of them is complete, and what each rank owes, or has
    alone of the optimizer's state, is there for that one rank only. The others begin without, and
    that is said.
    """

    def __init__(self) -> None:
        self._loaded: WeakKeyDictionary[torch.optim.Optimizer, Mapping[str, Any]] = (
            WeakKeyDictionary()
        )
        self._sessions: WeakKeyDictionary[torch.optim.Optimizer, Session] = WeakKeyDictionary()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Carry state in what `optimizer` saves, and take it out of what it loads."""
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._load)

    def attached(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """Give `session` what the script has loaded. Collective."""
        self._sessions[optimizer] = session
        if is_returning():  # it takes its peers' model, and has no part in what they do together
            return
        carried = self._loaded.pop(optimizer, None)
        said = session.gather(None if carried is None else _owner(carried))
        if not any(said):
            return
        name = session.strategy.name
        if carried is None or {each and each["strategy"] for each in said} != {name}:
            LOGGER.warning(
                "%s begins without the state that a checkpoint holds: not every rank has loaded"
                " one of this strategy",
                name,
            )
            return
        found = {each["rank"] for each in said}
        if session.rank == 0 and _has_own(carried) and found != {*range(carried["world_size"])}:
            LOGGER.warning(
                "the checkpoint holds what rank %s owed or had alone, and what the others of %s"
                " did is lost; let every rank save its optimizer.state_dict() in a file of its own",
                ", ".join(map(str, sorted(found))),
                name,
            )
        try:
            session.load_state_dict(share_of(carried, session.rank, session.world_size))
        except CheckpointError as error:
            LOGGER.warning("%s begins without the state of the checkpoint: %s", name, error)

    def hand_on(self, optimizer: torch.optim.Optimizer, session: Session) -> None:
        """`session` is about to end, and the next one of `optimizer` goes on with its state."""
        self._loaded[optimizer] = session.state_dict()

    def detached(self, optimizer: torch.optim.Optimizer) -> None:
        """The session has ended."""
        self._sessions.pop(optimizer, None)

    def _saved(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if (session := self._sessions.get(optimizer)) is not None:
            state[STATE_KEY] = session.state_dict()

    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if STATE_KEY not in state:
            return state
        if optimizer in self._sessions:
            LOGGER.warning(
                "the script loads an optimizer's state in the middle of training; the state of the"
                " strategy stays as it is"
            )
        else:
            self._loaded[optimizer] = state[STATE_KEY]
        return {key: value for key, value in state.items() if key != STATE_KEY}


def share_of(carried: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """What `rank` takes up of the state that it has found: all of its own; of another rank's all
    but what that one owed.

    Args:
        carried: of `Session.state_dict`.
        rank: of this process.
        world_size: of this run.
    """
    owed = reshard([carried], 2, 0 if carried["rank"] == rank else 1)
    return {**owed, "rank": rank, "world_size": world_size}


def _owner(carried: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": int(carried["rank"]), "strategy": str(carried["strategy"])}


def _has_own(carried: Mapping[str, Any]) -> bool:
    kinds = "additive", "owned"
    return any(state.get(kind) for state in carried["callbacks"].values() for kind in kinds)
