"""From DDP models and optimizers to sessions, in a world of one: the same code as on many ranks."""

from __future__ import annotations

import copy
import gc
import io
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import Session
from offbeat.errors import ConfigError, OffbeatError, UnsupportedError
from offbeat.run.config import ScriptCommand, script_run
from offbeat.run.coordination import Coordinator
from offbeat.run.coupling import (
    STATE_KEY,
    CarriedStates,
    ScriptSessions,
    share_of,
)
from offbeat.run.recipes import StrategyRecipe
from offbeat.run.recording import OpenRecord, ScriptRecorder
from offbeat.run.records import RunDirectory, begin_attempt, create
from offbeat.run.step_recorder import ExchangeSession
from offbeat.run.worker import patched_for
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver
from offbeat_lab.records import Record
from thread_support.world import results_of, session_on


class Sessions(ScriptRecorder):
    """The sessions that were attached, with their models."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda report: None, stop_after=None)
        self.sessions: list[Session] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.losses: list[float] = []
        self.num_samples: list[int] = []

    def samples_seen(self, model: nn.Module, args: Sequence[Any]) -> None:
        self.num_samples.append(len(args[0]))

    def attached(
        self, session: ExchangeSession, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        assert isinstance(session, Session)
        self.sessions.append(session)
        self.optimizers.append(optimizer)

    def loss_seen(self, loss: torch.Tensor, scale: float | torch.Tensor) -> None:
        self.losses.append(float(loss.detach() / scale))


class Script:
    """What a script does under `offbeat run`."""

    def __init__(self, strategy: Strategy, stack: ExitStack) -> None:
        self.heard = Sessions()
        recipe = StrategyRecipe(strategy)
        self.sessions = ScriptSessions(recipe, self.heard)
        stack.enter_context(patched_for(recipe, self.sessions))
        stack.callback(self.sessions.close, None)

    @property
    def session(self) -> Session:
        return self.heard.sessions[-1]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def stack(group: None) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


X = torch.ones(4, 3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_session_is_attached_at_the_first_forward_pass_with_gradients(
    stack: ExitStack, optimizer_first: bool
) -> None:
    script = Script(offbeat.GTopK(density=1.0), stack)
    model = nn.Linear(3, 1)
    torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=1.0)  # of something else
    if optimizer_first:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model)
    else:
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with torch.no_grad():
        ddp(X)
    assert script.heard.sessions == []
    for _ in range(3):
        step(ddp, optimizer)
    assert script.heard.optimizers == [optimizer]
    assert script.session.stats.steps == script.session.stats.exchanges == 3


def test_samples_are_seen_that_are_given_by_name_too(stack: ExitStack) -> None:
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X)
    ddp(input=X)
    assert script.heard.num_samples == [4, 4]


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """The block is a script whose record is at `path`."""
    config = script_run(ScriptCommand(path="gan.py"), "allreduce", {}, workers=1)
    create(path, config)
    begin_attempt(path, config, start_step=0)
    opened = OpenRecord(record=RunDirectory(path), coordinator=Coordinator(dist.HashStore(), 0, 1))
    recorder = ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)
    recipe = StrategyRecipe(offbeat.AllReduce())
    sessions = ScriptSessions(recipe, recorder)
    with patched_for(recipe, sessions):
        yield
        sessions.close(None)
        recorder.end()


def test_of_several_models_the_samples_of_the_recorded_one_count(
    group: None, tmp_path: Path
) -> None:
    with recorded(tmp_path / "record"):
        generator, critic = (DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
        for _ in range(3):
            step(generator, optimizers[0])
            step(critic, optimizers[1])
    assert [event.batch_size for event in Record(tmp_path / "record").events(0)] == [4, 4, 4]


def test_what_belongs_to_a_step_that_a_scaler_leaves_out_is_in_none_of_the_record(
    group: None, tmp_path: Path
) -> None:
    with recorded(tmp_path / "record"):
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            loss = ddp(X).sum()
            scaler.scale(loss).backward()
            if number == 0:
                ddp.module.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    events = [*Record(tmp_path / "record").events(0)]
    assert [event.loss for event in events] == pytest.approx([loss.item()] * 2)
    assert [event.batch_size for event in events] == [4, 4]


def test_a_step_is_not_said_to_be_skipped_after_one_that_a_scaler_has_left_out(
    group: None, tmp_path: Path
) -> None:
    with recorded(tmp_path / "record"):
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (torch.inf, 1.0):
            scaler.scale(factor * ddp(X).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    record = Record(tmp_path / "record")
    summary = record.summary()
    assert summary is not None
    assert summary.skipped_steps == 1
    assert [(event.step, event.skipped) for event in record.events(0)] == [(1, False)]


@pytest.mark.parametrize(
    "module",
    ["torch.utils.data.loading", "torch.distributed.checkpoint._async_process_executor"],
)
def test_a_process_of_pytorchs_own_runs_its_own_function_and_does_not_count(
    stack: ExitStack, module: str
) -> None:
    script = Script(offbeat.AllReduce(), stack)

    def helps() -> None: ...

    helps.__module__ = module
    assert script.sessions.process_made(helps) is helps
    assert script.sessions.num_processes == 0
    assert script.sessions.process_made(step) is not step
    assert script.sessions.num_processes == 1


def test_models_that_a_script_has_let_go_of_are_not_kept(stack: ExitStack) -> None:
    """As of a script that tries many, or trains one for each fold."""
    script = Script(offbeat.GTopK(density=1.0), stack)
    models, sessions = [], []
    for _ in range(4):
        model = nn.Linear(3, 1)
        models.append(weakref.ref(model))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        step(ddp, optimizer)
        sessions.append(weakref.ref(script.session))
        script.heard.sessions.clear()
        script.heard.optimizers.clear()
        del model, ddp, optimizer
    gc.collect()
    assert [model() is None for model in models] == [True, True, True, False]
    assert [session() is None for session in sessions] == [True, True, True, False]


def num_dead_references() -> int:
    gc.collect()
    return sum(type(each) is weakref.ref and each() is None for each in gc.get_objects())


def test_of_optimizers_that_a_script_makes_in_each_step_nothing_is_kept(stack: ExitStack) -> None:
    """As for an attack on each batch, or for the inner steps of a meta-learner."""
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, optimizer)
    before = num_dead_references()
    for _ in range(100):
        torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1.0)
        step(ddp, optimizer)
    assert num_dead_references() - before < 50
    assert script.heard.optimizers == [optimizer]


def test_gradients_are_exchanged_once_where_they_are_accumulated(stack: ExitStack) -> None:
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        with ddp.no_sync():
            ddp(X).sum().backward()
        step(ddp, optimizer)
        for last in (False, True):
            ddp.require_backward_grad_sync = last
            ddp(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (script.session.stats.steps, script.session.stats.exchanges) == (4, 4)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_scaler_is_found_and_the_loss_is_seen_as_the_script_has_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: type[torch.amp.GradScaler]
) -> None:
    script = Script(offbeat.AllReduce(), stack)
    scaler = kind("cpu", init_scale=128.0)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss = ddp(X).sum()
    with monkeypatch.context() as patching:
        # It waits for a GPU, which would first have to end the forward pass.
        patching.delattr(torch.amp.GradScaler, "get_scale")
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert script.heard.losses == [pytest.approx(loss.item())]
    assert script.session.stats.steps == 1


def test_a_loss_of_a_class_of_its_own_is_seen_once(stack: ExitStack) -> None:
    """As of MONAI or fastai, whose tensors carry more than their content."""

    class Named(torch.Tensor): ...

    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss = ddp(X.as_subclass(Named)).sum()
    assert isinstance(loss, Named)
    loss.backward()
    optimizer.step()
    assert script.heard.losses == [pytest.approx(loss.item())]
    assert script.session.stats.exchanges == 1


def test_each_of_two_scalers_is_that_of_the_losses_that_it_scales(stack: ExitStack) -> None:
    """As in a GAN: what is owed of either model is in the unit of its own losses."""
    script = Script(
        offbeat.GTopK(density=0.2, collective="all_gather", warmup=None, momentum_correction=None),
        stack,
    )
    nets = [DistributedDataParallel(nn.Linear(3, 5, bias=False)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    # One of them doubles its scale after each step.
    scalers = [torch.amp.GradScaler("cpu", 4.0, growth_interval=each) for each in (1, 1000)]
    before = [net.module.weight.detach().clone() for net in nets]
    gradient, losses = torch.arange(15.0).view(5, 3) + 1, []
    for _ in range(4):
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = (net.module.weight * gradient).sum() + 0 * net(X).sum()
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert script.heard.losses == pytest.approx(losses)
    for net, was, session in zip(nets, before, script.heard.sessions, strict=True):
        owed = session.state_dict()["callbacks"]["gradients"]["additive"]["residual/weight"]
        torch.testing.assert_close(was - net.module.weight.detach() + owed.view(5, 3), 4 * gradient)


def test_an_optimizer_that_is_stepped_in_the_place_of_the_first_one_is_attached_anew(
    stack: ExitStack,
) -> None:
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    first = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, first)
    second = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    step(ddp, second)
    step(ddp, second)
    assert script.heard.optimizers == [first, second]
    assert script.session.stats.steps == 1


def test_optimizers_that_are_stepped_by_turns_are_warned_of_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    Script(offbeat.GTopK(density=1.0), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    first, second = (torch.optim.SGD([p], lr=0.1) for p in ddp.parameters())
    step(ddp, first)
    step(ddp, second)
    step(ddp, second)
    assert "by turns" not in caplog.text
    for optimizer in (first, second, first, second):
        step(ddp, optimizer)
    assert caplog.text.count("by turns") == 1


def test_until_there_is_an_optimizer_gradients_are_exchanged_and_that_is_said(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(offbeat.GTopK(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    ddp(X).sum().backward()
    assert "gtopk begins when one has stepped them" in caplog.text
    late = torch.optim.SGD(ddp.parameters(), lr=0.1)
    late.step()
    late.zero_grad()
    assert script.heard.sessions == []
    step(ddp, late)
    assert script.heard.optimizers == [late]
    assert script.session.strategy == offbeat.GTopK()


def test_late_optimizers_of_several_models_are_all_found(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(), stack)
    models = [DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2)]
    for model in models:
        model(X).sum().backward()
    late = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer in late:
        optimizer.step()
        optimizer.zero_grad()
    for model in models:
        model(X).sum().backward()
    assert script.heard.optimizers == late


@pytest.mark.parametrize(
    ("strategy", "complains"), [(offbeat.GTopK(), True), (offbeat.AllReduce(), False)]
)
def test_without_any_optimizer_only_what_needs_none_has_done_something(
    stack: ExitStack, strategy: Strategy, complains: bool
) -> None:
    script = Script(strategy, stack)
    DistributedDataParallel(nn.Linear(3, 1))(X).sum().backward()
    script.sessions.close(None)
    complaint = script.sessions.complaint("mine.py")
    assert ("gtopk has done nothing" in str(complaint)) == complains


def test_a_step_without_a_forward_pass_of_the_wrapper_is_refused_at_once(stack: ExitStack) -> None:
    Script(offbeat.GTopK(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    optimizer.step()  # without gradients, as it is done to make the optimizer's state
    ddp.module(X).sum().backward()
    with pytest.raises(ConfigError, match=re.escape("call the wrapper, model(x)")):
        optimizer.step()


@pytest.mark.parametrize(
    "strategy", [offbeat.AllReduce(), offbeat.GTopK(density=0.5), offbeat.LocalSGD(period=2)]
)
def test_what_ddp_was_told_to_ignore_has_no_part_in_a_strategy(
    stack: ExitStack, strategy: Strategy
) -> None:
    script = Script(strategy, stack)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    ignored = {"0.bias", "1.running_mean", "2.weight"}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        step(ddp, optimizer)
    assert not ignored & script.session.averaged_tensors().keys()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    assert ignored < before.keys() == model.state_dict().keys()
    for name in ignored:
        assert torch.equal(model.state_dict()[name], before[name])


def test_kfac_refuses_a_layer_that_is_in_part_a_ranks_own(stack: ExitStack) -> None:
    Script(offbeat.SPDKFAC(), stack)
    model = nn.Linear(3, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, {"bias"})
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="told to ignore parameters"):
        step(ddp, optimizer)


def test_of_wrappers_around_each_other_the_innermost_one_is_served(stack: ExitStack) -> None:
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(DistributedDataParallel(nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        step(ddp, optimizer)
    assert script.heard.optimizers == [optimizer]
    assert script.session.stats.exchanges == 3


def test_replicate_is_served_where_gradients_are_exchanged(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=1.0), stack)
    model = replicate(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    assert script.session.stats.steps == script.session.stats.exchanges == 3


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(offbeat.LocalSGD(), "has to see the model"), (offbeat.SPDKFAC(), "layer")],
)
def test_replicate_is_refused_where_the_model_itself_is_needed(
    stack: ExitStack, strategy: Strategy, reason: str
) -> None:
    Script(strategy, stack)
    model = replicate(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OffbeatError, match=reason):
        step(model, optimizer)


@pytest.mark.parametrize("keeps_first", [False, True])
def test_a_model_that_is_wrapped_anew_gets_a_new_session(
    stack: ExitStack, keeps_first: bool
) -> None:
    script = Script(offbeat.GTopK(density=1.0), stack)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    wrappers = [DistributedDataParallel(model)]
    step(wrappers[0], torch.optim.SGD(model[1].parameters(), lr=0.1))
    first = script.session
    model[0].requires_grad_(True)
    if not keeps_first:
        wrappers.clear()
    wrappers.append(DistributedDataParallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(wrappers[-1], optimizer)
    assert (script.session is first, script.session.stats.steps) == (False, 1)
    with pytest.raises(ConfigError, match="closed"):
        first.log(loss=1.0)


def test_models_that_share_parameters_and_train_by_turns_are_refused(stack: ExitStack) -> None:
    """As two heads on one trunk: one of them would be exchanged by nobody."""
    Script(offbeat.AllReduce(), stack)
    trunk = nn.Linear(3, 2)
    nets = [DistributedDataParallel(nn.Sequential(trunk, nn.Linear(2, 1))) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    (nets[0](X) + nets[1](X)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(UnsupportedError, match="share parameters"):
        nets[0](X)


def test_a_model_trains_on_when_one_that_shared_its_parameters_is_gone(stack: ExitStack) -> None:
    """As after a probe that was trained for a while."""
    script = Script(offbeat.AllReduce(), stack)
    trunk = nn.Linear(3, 2)
    optimizers: list[torch.optim.Optimizer] = []

    def train(ddp: nn.Module) -> None:
        optimizers.append(torch.optim.SGD(ddp.parameters(), lr=0.1))
        step(ddp, optimizers[-1])

    first = DistributedDataParallel(nn.Sequential(trunk, nn.Linear(2, 1)))
    train(first)
    train(DistributedDataParallel(nn.Sequential(trunk, nn.Linear(2, 1))))
    train(first)
    assert script.heard.optimizers == optimizers


def test_a_model_that_is_wrapped_anew_is_stepped_by_the_newer_optimizer(stack: ExitStack) -> None:
    """Whether the older one still lives may differ between ranks."""
    script = Script(offbeat.AllReduce(), stack)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizers = []
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers.append(torch.optim.SGD(trained, lr=0.1))
        step(DistributedDataParallel(model), optimizers[-1])
    assert script.heard.optimizers == optimizers


def trained(
    strategy: Strategy, *, wraps_anew: bool = False, by_closure: bool = False
) -> list[torch.Tensor]:
    """A model after eight steps of a script."""
    torch.manual_seed(0)
    with ExitStack() as stack:
        Script(strategy, stack)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model)
        for number in range(8):
            if wraps_anew and number == 4:
                ddp = DistributedDataParallel(model)

            def closure(ddp: nn.Module = ddp, x: torch.Tensor = torch.rand(4, 3)) -> float:
                optimizer.zero_grad()
                loss = ddp(x).square().sum()
                loss.backward()
                return loss.item()

            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.GTopK(density=0.2, collective="tree"),
        offbeat.EF21(density=0.2),
        offbeat.LocalSGD(period=3, outer="diloco"),
        offbeat.SPDKFAC(),
        offbeat.DeAR(),
    ],
    ids=lambda each: each.name,
)
def test_a_strategy_keeps_its_state_where_a_model_is_wrapped_anew(
    group: None, strategy: Strategy
) -> None:
    """As what it owes, or what it has taken over of the optimizer's state."""
    once, anew = trained(strategy), trained(strategy, wraps_anew=True)
    torch.testing.assert_close(anew, once)


def test_the_first_step_by_a_closure_is_like_any_other(group: None) -> None:
    strategy = offbeat.SPDKFAC()
    torch.testing.assert_close(trained(strategy, by_closure=True), trained(strategy))


@pytest.mark.parametrize("strategy", [offbeat.GTopK(density=1.0), offbeat.AllReduce()])
def test_clipping_by_value_is_refused_where_entries_are_selected_before(
    stack: ExitStack, strategy: Strategy
) -> None:
    Script(strategy, stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    other = nn.Linear(3, 1)
    (ddp(X) + other(X)).sum().backward()
    nn.utils.clip_grad_value_(other.parameters(), 0.5)
    if strategy == offbeat.AllReduce():
        nn.utils.clip_grad_value_(ddp.parameters(), clip_value=0.5)
        optimizer.step()
        assert [p.grad.max().item() for p in ddp.parameters() if p.grad is not None] == [0.5, 0.5]
    else:
        with pytest.raises(UnsupportedError, match="clips gradients by value"):
            nn.utils.clip_grad_value_(ddp.parameters(), 0.5)


def test_two_models_have_a_session_each(stack: ExitStack) -> None:
    script = Script(offbeat.AllReduce(), stack)
    models = [DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    assert script.heard.optimizers == optimizers


def test_the_strategy_of_a_script_that_attaches_itself_is_replaced_and_said_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(offbeat.LocalSGD(period=3), stack)
    for _ in range(2):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, offbeat.GTopK()) as session:
            step(model, optimizer)
        assert session.strategy == offbeat.LocalSGD(period=3)
    assert len(script.heard.sessions) == 2
    assert caplog.text.count("in its place") == 1


def test_outside_of_it_attach_does_what_it_is_told() -> None:
    model = nn.Linear(3, 1)
    with offbeat.attach(model, torch.optim.SGD(model.parameters()), offbeat.GTopK()) as session:
        assert session.strategy == offbeat.GTopK()


def test_sessions_end_before_the_group(stack: ExitStack) -> None:
    script = Script(offbeat.AllReduce(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="closed"):
        script.session.averaged_model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_end_of_another_group_ends_no_session(stack: ExitStack) -> None:
    """As of one that a script makes for its metrics: what is owed would be lost."""
    script = Script(offbeat.GTopK(density=0.5, collective="tree"), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        step(ddp, optimizer)
        dist.destroy_process_group(dist.new_group([0]))
    assert script.session.stats.steps == 2


def test_what_torch_compile_has_wrapped_is_evaluated_as_the_mean_too(stack: ExitStack) -> None:
    """Here that of the last average, which is two steps old."""
    script = Script(offbeat.LocalSGD(period=4, warmup=0), stack)
    model = nn.Linear(3, 1)
    ddp = DistributedDataParallel(torch.compile(model, backend="eager"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(6):
        step(ddp, optimizer)
    own = model.weight.detach().clone()
    model.eval()
    mean = model.weight.detach().clone()
    assert not torch.equal(mean, own)
    ddp.train()
    assert torch.equal(model.weight, own)
    assert torch.equal(model.state_dict()["weight"], mean)
    assert script.session.stats.steps == 6


def test_a_script_on_one_rank_alone_is_told_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lonely.py"])
    with ExitStack() as stack:
        Script(offbeat.AllReduce(), stack)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="lonely.py trains on one rank only") as raised:
            step(model, optimizer)
    assert str(raised.value).count("\n") == 4


def test_a_script_that_exchanges_by_itself_is_told_at_its_first_step(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["by_hand.py"])
    script = Script(offbeat.GTopK(), stack)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    assert [record.getMessage() for record in caplog.records] == [
        "by_hand.py makes a process group, but trains with neither DistributedDataParallel nor"
        " offbeat.attach, so gtopk exchanges nothing; wrap the model:"
        " torch.nn.parallel.DistributedDataParallel(model)"
    ]
    assert script.sessions.trains_without_ddp


def test_residuals_travel_in_the_optimizers_state(group: None) -> None:
    """A script that saves model and optimizer, and resumes, goes on as if it had not stopped."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, generator=draw) for _ in range(8)]

    def train(batches: list[torch.Tensor], saved: bytes | None) -> tuple[list[float], bytes]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        with ExitStack() as stack:
            Script(offbeat.GTopK(density=0.1, collective="tree"), stack)
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
            if saved is not None:
                checkpoint = torch.load(io.BytesIO(saved))
                model.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
            for x in batches:
                ddp(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, file := io.BytesIO())
        return nn.utils.parameters_to_vector(model.parameters()).tolist(), file.getvalue()

    at_once, _ = train(batches, None)
    _, saved = train(batches[:5], None)
    resumed, _ = train(batches[5:], saved)
    assert resumed == at_once
    checkpoint = torch.load(io.BytesIO(saved))
    del checkpoint["optimizer"][STATE_KEY]
    torch.save(checkpoint, without := io.BytesIO())
    assert train(batches[5:], without.getvalue())[0] != at_once


def test_a_rank_takes_up_what_it_owed_itself_and_of_others_what_all_share() -> None:
    part = {"additive": {"owed": torch.ones(2)}, "replicated": {"age": 3}, "local": {}}
    state = {"strategy": "gtopk", "world_size": 2, "rank": 1, "callbacks": {"gradients": part}}
    mine, theirs = share_of(state, 1, 2), share_of(state, 0, 2)
    assert mine["callbacks"]["gradients"]["additive"]["owed"].tolist() == [1.0, 1.0]
    assert theirs["callbacks"]["gradients"]["additive"]["owed"].tolist() == [0.0, 0.0]
    assert theirs["callbacks"]["gradients"]["replicated"] == {"age": 3}
    assert (theirs["rank"], theirs["world_size"]) == (0, 2)


@pytest.mark.parametrize(
    ("strategy", "is_lost"),
    [
        (offbeat.DeAR(), True),
        (offbeat.GTopK(density=0.5, collective="tree"), True),
        (offbeat.AllReduce(), False),
    ],
)
def test_what_the_others_had_is_said_to_be_lost_where_one_rank_alone_has_saved(
    strategy: Strategy, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(driver: Driver, saved: dict[str, Any] | None) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        carried = CarriedStates()
        carried.watch(optimizer)
        if saved is not None:
            optimizer.load_state_dict(saved)
        with session_on(driver, model, optimizer, strategy) as session:
            carried.attached(session, optimizer)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            return optimizer.state_dict()

    first, _ = results_of(2, lambda driver: train(driver, None))
    with caplog.at_level(logging.WARNING, "offbeat"):
        results_of(2, lambda driver: train(driver, copy.deepcopy(first)))
    assert any("is lost" in record.getMessage() for record in caplog.records) is is_lost


def shard_by_fsdp(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


def shard_by_fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize(
    ("shard", "by"),
    [
        (partial(shard_by_fsdp, use_orig_params=False), r"FullyShardedDataParallel \(FSDP\)"),
        (partial(shard_by_fsdp, use_orig_params=True), r"FullyShardedDataParallel \(FSDP\)"),
        (shard_by_fsdp2, r"fully_shard \(FSDP2\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # FSDP's, of a world of one
def test_a_sharded_model_is_refused_in_one_sentence(
    stack: ExitStack, shard: Callable[[nn.Module], nn.Module], by: str
) -> None:
    Script(offbeat.AllReduce(), stack)
    model = shard(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    with pytest.raises(UnsupportedError, match=f"shards its model by {by}") as raised:
        optimizer.step()
    assert "\n" not in str(raised.value)


def test_samples_cannot_be_shared_out_by_a_ddp_script(stack: ExitStack) -> None:
    Script(offbeat.AdaptiveSGD(mega_batch=4), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"session\.loader"):
        step(ddp, optimizer)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # that import's
@pytest.mark.parametrize("strategy", [offbeat.LocalSGD(), offbeat.WAGMA()], ids=lambda s: s.name)
def test_weights_that_an_optimizer_sends_by_itself_cannot_be_averaged(
    stack: ExitStack, strategy: Strategy
) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    Script(strategy, stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(UnsupportedError, match="use the optimizer that it wraps"):
        step(ddp, optimizer)


def test_an_optimizer_of_two_models_is_refused(stack: ExitStack) -> None:
    Script(offbeat.AllReduce(), stack)
    models = [DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2)]
    kept = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    with pytest.raises(OffbeatError, match=r"are not the model's.* an optimizer of its own"):
        models[0](X)
    assert kept


@pytest.mark.parametrize(
    ("asked", "trains_with"),
    [
        (offbeat.SPDKFAC(), offbeat.SPDKFAC(grafting="floor")),
        (offbeat.DPKFAC(grafting="none"), offbeat.DPKFAC(grafting="none")),
        (
            offbeat.LocalSGD(start_step=2, start="spdkfac"),
            offbeat.LocalSGD(start_step=2, start=offbeat.SPDKFAC(grafting="floor")),
        ),
        (offbeat.LocalSGD(start_step=2), offbeat.LocalSGD(start_step=2)),
    ],
)
def test_a_script_that_knows_nothing_of_kfac_keeps_its_learning_rate(
    stack: ExitStack, asked: Strategy, trains_with: Strategy
) -> None:
    """What a script attaches itself it gets as the command line says."""
    script = Script(asked, stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    assert script.session.strategy == trains_with
    own = nn.Linear(3, 1)
    with offbeat.attach(own, torch.optim.SGD(own.parameters(), lr=0.1), asked) as session:
        assert session.strategy == asked


def clipped_steps(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, *, sizes: list[float], max_norm: float
) -> list[float]:
    """The norms that a script is told which clips in each step; gradients are of these sizes."""
    norms = []
    for size in sizes:
        (size * ddp(X)).sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def norm_of_gradient(size: float) -> float:
    """Of `nn.Linear(3, 8)` in `clipped_steps`."""
    model = nn.Linear(3, 8)
    (size * model(X)).sum().backward()
    return float(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )


def test_a_scripts_clipping_clips_before_entries_are_selected(stack: ExitStack) -> None:
    """An outlier after the first step leaves no more behind than what it is clipped to."""
    script = Script(offbeat.GTopK(density=0.1, warmup=None), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    norms = clipped_steps(ddp, optimizer, sizes=[1e-3, 1e3, 1e-3], max_norm=1.0)
    assert norms[1:] == [pytest.approx(norm_of_gradient(size)) for size in (1e3, 1e-3)]
    assert script.session.gauges()["residual_norm"] < 1.1
    assert (
        sum("clipped before entries are selected" in each for each in script.session.notices) == 1
    )


def test_a_scaler_that_a_script_makes_and_does_not_use_scales_nothing(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=0.1, warmup=None), stack)
    unused = torch.amp.GradScaler("cpu")
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    norms = clipped_steps(ddp, optimizer, sizes=[1e-3, 1e3, 1e-3], max_norm=1.0)
    assert norms[1:] == [pytest.approx(norm_of_gradient(size)) for size in (1e3, 1e-3)]
    assert script.session.gauges()["residual_norm"] < 1.1
    loss = ddp(X).sum()
    loss.backward()
    assert script.heard.losses[-1] == pytest.approx(loss.item())
    assert unused.is_enabled()


def test_a_scripts_clipping_does_not_keep_adams_scaling_from_being_taken(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=0.1, collective="tree", warmup=None), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    clipped_steps(ddp, torch.optim.AdamW(ddp.parameters()), sizes=[9.0] * 3, max_norm=1.0)
    assert any("Adam's own scaling and momentum rest" in each for each in script.session.notices)


def test_the_strategys_own_clip_norm_stands(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=0.1, clip_norm=0.5), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    clipped_steps(ddp, optimizer, sizes=[1e3], max_norm=100.0)
    assert script.session.gauges()["residual_norm"] < 0.51


@pytest.mark.parametrize("strategy", [offbeat.AllReduce(), offbeat.LocalSGD(), offbeat.EF21()])
def test_where_nothing_is_owed_the_script_clips_by_itself(
    stack: ExitStack, strategy: Strategy
) -> None:
    Script(strategy, stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        (1e3 * ddp(X)).sum().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1.0, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"norm_type": 1.0}, {"max_norm": float("inf")}])
def test_other_norms_and_no_limit_are_the_scripts_own_affair(
    stack: ExitStack, options: dict[str, float]
) -> None:
    script = Script(offbeat.GTopK(density=0.1), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).sum().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), **{"max_norm": 1.0, **options})
    torch.nn.utils.clip_grad_norm_(list(ddp.parameters())[:1], 1.0)
    optimizer.step()
    assert not any("clipped before" in each for each in script.session.notices)


@pytest.mark.parametrize(
    "strategy",
    [offbeat.AllReduce(), offbeat.GTopK(density=0.5), offbeat.LocalSGD(), offbeat.SPDKFAC()],
    ids=lambda each: each.name,
)
def test_what_is_frozen_when_training_begins_and_was_not_when_ddp_wrapped_it_trains_later(
    stack: ExitStack, strategy: Strategy
) -> None:
    """As a backbone in the first epochs. DDP exchanges what required gradients when it was made."""
    script = Script(strategy, stack)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    step(ddp, optimizer)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    step(ddp, optimizer)
    assert not torch.equal(model[0].weight, before)
    assert script.heard.optimizers == [optimizer]
    assert "0.weight" in script.session.averaged_tensors()


def test_a_model_that_is_frozen_for_now_is_attached_when_it_trains(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """As a critic, while its generator takes the first step."""
    script = Script(offbeat.LocalSGD(), stack)
    critic = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic.requires_grad_(False)
    critic(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert script.heard.sessions == []
    critic.requires_grad_(True)
    step(critic, optimizer)
    assert script.heard.optimizers == [optimizer]
    assert not caplog.records


def test_state_that_is_made_for_a_checkpoint_is_no_step_of_training(stack: ExitStack) -> None:
    script = Script(offbeat.TopK(density=0.1, warmup=None), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    get_optimizer_state_dict(ddp, optimizer)
    for _ in range(2):
        step(ddp, optimizer)
    owed = script.session.gauges()["residual_norm"]
    get_optimizer_state_dict(ddp, optimizer)
    assert script.session.gauges()["residual_norm"] == owed > 0
    assert script.session.stats.steps == script.session.stats.exchanges == 2


@pytest.mark.parametrize(
    ("strategy", "sends"), [(offbeat.Auto(), True), (offbeat.LocalSGD(period=2), False)]
)
def test_ddp_sends_its_buffers_while_replicas_are_alike(
    stack: ExitStack, strategy: Strategy, sends: bool
) -> None:
    Script(strategy, stack)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        step(ddp, optimizer)
    assert ddp.broadcast_buffers == sends


def test_a_script_that_clips_in_two_halves_is_followed_too(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=0.1, warmup=None), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for size in (1e-3, 1e3, 1e-3):
        (size * ddp(X)).sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
        torch.nn.utils.clip_grads_with_norm_(ddp.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
    assert script.session.gauges()["residual_norm"] < 1.1


def test_a_session_hears_of_a_script_that_clips_by_value(stack: ExitStack) -> None:
    """`Auto` may go over to a strategy that is refused there."""
    script = Script(offbeat.Auto(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).sum().backward()
    nn.utils.clip_grad_value_(ddp.parameters(), 0.5)
    optimizer.step()
    assert script.session.clips_by_value


def test_a_norm_that_is_measured_by_clipping_to_infinity_is_no_change(stack: ExitStack) -> None:
    script = Script(offbeat.GTopK(density=0.1, collective="tree", warmup=None), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.AdamW(ddp.parameters())
    norms = clipped_steps(ddp, optimizer, sizes=[9.0] * 3, max_norm=float("inf"))
    assert all(norm > 0 for norm in norms)
    assert any("Adam's own scaling and momentum rest" in each for each in script.session.notices)


def test_with_dear_a_norm_may_be_measured_by_clipping_to_infinity(stack: ExitStack) -> None:
    script = Script(offbeat.DeAR(), stack)
    ddp = DistributedDataParallel(nn.Linear(3, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    clipped_steps(ddp, optimizer, sizes=[1.0] * 2, max_norm=float("inf"))
    assert script.session.stats.steps == 2
