"""What frameworks put around a model, an optimizer or a loop either works or is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.integrations.framework import FrameworkSession, as_strategy
from offbeat.integrations.state_files import load_state, save_state
from offbeat.run.recipes import refuse_clipping_by_value
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


class Attention(nn.Module):
    """K-FAC watches attention in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[None]
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0])


# Pickles and copies


@pytest.mark.parametrize(
    "strategy",
    [offbeat.AllReduce(), offbeat.LocalSGD(), offbeat.SPDKFAC(), offbeat.WAGMA()],
    ids=lambda strategy: strategy.name,
)
@pytest.mark.parametrize("make", [make_model, Attention])
def test_a_whole_model_is_saved_without_anything_of_offbeat(
    strategy: Strategy, make: Callable[[], nn.Module]
) -> None:
    model = make()
    optimizer = sgd(model)
    file = io.BytesIO()
    with offbeat.attach(model, optimizer, strategy):
        backward(model)
        optimizer.step()
        torch.save(model, file)
        expected = model(torch.ones(2, 3))
    assert b"offbeat" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(torch.ones(2, 3)), expected)
    with loaded.no_sync():
        backward(loaded)


def test_a_copy_made_while_attached_stays_out_of_it() -> None:
    model = make_model()
    optimizer = sgd(model)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        copied = copy.deepcopy(model)
        backward(copied)
        assert session.stats.exchanges == 0
        with copied.no_sync():
            backward(model)
        assert session.stats.exchanges == 1
        with offbeat.attach(copied, sgd(copied), offbeat.AllReduce()) as other:
            with copied.no_sync():
                backward(copied)
            backward(copied)
            assert other.stats.exchanges == 1
            assert other.notices == []


# Accumulation


def accumulate(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """As Accelerate and the Trainer of transformers do, whatever the model is."""
    return nullcontext() if last else getattr(model, "no_sync", nullcontext)()


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulation_as_frameworks_do_it_exchanges_once_a_step(compiled: bool) -> None:
    model: nn.Module = make_model()
    plain = copy.deepcopy(model)
    if compiled:
        model.compile(backend="aot_eager")
        model = torch.compile(model, backend="aot_eager")
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        for step in range(6):
            with accumulate(model, last=step % 3 == 2):
                backward(model)
            backward(plain)
            if step % 3 == 2:
                for each in (optimizer, plain_optimizer):
                    each.step()
                    each.zero_grad()
        assert session.stats.exchanges == 2
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_flag_of_ddp_is_obeyed_where_a_loop_sets_it() -> None:
    model = make_model()
    optimizer = sgd(model)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        for step in range(6):
            model.require_backward_grad_sync = step % 3 == 2
            backward(model)
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
        with session.no_sync():
            assert not model.require_backward_grad_sync
        assert model.require_backward_grad_sync
        assert session.stats.exchanges == 2


def test_the_names_are_gone_after_the_session() -> None:
    model = make_model()
    with offbeat.attach(model, sgd(model), offbeat.AllReduce()):
        assert model.require_backward_grad_sync
    assert not hasattr(model, "no_sync")
    assert not hasattr(model, "require_backward_grad_sync")


def test_a_no_sync_of_the_models_own_is_left_alone_and_said() -> None:
    class Own(nn.Linear):
        def no_sync(self) -> str:
            return "mine"

    model = Own(3, 1)
    with offbeat.attach(model, sgd(model), offbeat.AllReduce()) as session:
        assert model.no_sync() == "mine"
        assert any("'no_sync' of its own" in notice for notice in session.notices)
    assert model.no_sync() == "mine"


# Wrapped models


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Facade(nn.Module):
    """As Fabric's: what the loop calls holds the DDP model."""

    def __init__(self, forward_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_module(x)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("wrap", "said"), [(lambda ddp: ddp, "wrapped in"), (Facade, "_forward_")])
def test_a_ddp_model_is_refused_wherever_it_is(
    wrap: Callable[[nn.Module], nn.Module], said: str
) -> None:
    model = make_model()
    wrapped = wrap(DistributedDataParallel(model))
    with pytest.raises(UnsupportedError, match=f"(?s){said}.*DistributedDataParallel"):
        offbeat.attach(wrapped, sgd(model), offbeat.AllReduce())


@pytest.mark.usefixtures("process_group")
def test_a_loop_that_calls_the_ddp_model_is_refused_before_it_exchanges_twice() -> None:
    model = make_model()
    ddp = DistributedDataParallel(model)
    with offbeat.attach(model, sgd(model), offbeat.AllReduce()) as session:
        with torch.no_grad():
            ddp(torch.ones(2, 3))
        with ddp.no_sync():
            backward(ddp)
        with pytest.raises(UnsupportedError, match="exchanged twice; call the model itself"):
            backward(ddp)
        assert session.stats.exchanges == 1


@pytest.mark.usefixtures("process_group")
def test_a_model_that_another_ddp_model_calls_is_none_of_its_business() -> None:
    class Teacher(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + model(x)

    model = make_model()
    teacher = DistributedDataParallel(Teacher(3, 1))
    with offbeat.attach(model, sgd(model), offbeat.AllReduce()) as session:
        backward(teacher)
        assert session.stats.exchanges == 1


# Wrapped optimizers


@pytest.mark.parametrize("by_closure", [False, True])
def test_a_step_that_calls_that_of_its_base_class_is_one_step(by_closure: bool) -> None:
    """PyTorch runs hooks in both, once there has been an optimizer of the base class, such as the
    outer one.
    """

    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = make_model()
    optimizer = Scaled(model.parameters(), lr=0.1)
    strategy = offbeat.LocalSGD(period=2, outer="diloco")

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 0.0

    with offbeat.attach(model, optimizer, strategy) as session:
        for _ in range(4):
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        assert (session.stats.steps, session.stats.exchanges) == (4, 2)


class Prepared(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class that was never made one."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups

    def step(self, closure: None = None) -> None:
        self.optimizer.step(closure)


def test_the_optimizer_inside_a_frameworks_is_attached() -> None:
    model = make_model()
    prepared = Prepared(Prepared(sgd(model)))
    with offbeat.attach(model, prepared, offbeat.LocalSGD(period=1)) as session:
        backward(model)
        prepared.step()
        assert session.stats.steps == session.stats.exchanges == 1


def test_an_optimizer_that_takes_no_hooks_is_refused_with_the_fix() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="Prepared takes no step hooks.*pass the optimizer that"):
        offbeat.attach(model, Prepared(None), offbeat.AllReduce())


def test_an_optimizer_around_another_that_takes_hooks_itself_is_left_alone() -> None:
    class Lookahead(torch.optim.SGD):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups[0]["params"], lr=0.1)
            self.optimizer = optimizer

    model = make_model()
    outer = Lookahead(sgd(model))
    with offbeat.attach(model, outer, offbeat.AllReduce()) as session:
        backward(model)
        outer.step()
        assert session.stats.steps == 1


def test_what_is_no_module_is_refused() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, got method"):
        offbeat.attach(model.forward, sgd(model), offbeat.AllReduce())


# Loops that clip


def test_clipping_by_value_is_refused_where_entries_are_selected_before() -> None:
    for sends_all in (offbeat.AllReduce(), offbeat.SPDKFAC()):
        refuse_clipping_by_value(sends_all)
    for selects in (offbeat.GTopK(), offbeat.SPDKFAC(exchange="gtopk")):
        with pytest.raises(UnsupportedError, match="gtopk has selected entries by then"):
            refuse_clipping_by_value(selects)


# Files of a session's state beside a framework's checkpoint


def test_files_of_an_earlier_run_of_more_ranks_are_not_read(tmp_path: Path) -> None:
    """Each of these ranks would find one of its own."""

    def owed(session: offbeat.Session) -> dict[str, torch.Tensor]:
        return dict(session.state_dict()["callbacks"]["gradients"]["additive"])

    def saves(driver: ThreadDriver) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = sgd(model)
        strategy = offbeat.TopK(density=0.1, warmup=None)
        with session_on(driver, model, optimizer, strategy) as session:
            for _ in range(driver.world_size):
                backward(model)
                optimizer.step()
            save_state(tmp_path, session.state_dict(), tag="")
            return owed(session)

    def loads(driver: ThreadDriver) -> dict[str, torch.Tensor]:
        model = make_model()
        strategy = offbeat.TopK(density=0.1, warmup=None)
        with session_on(driver, model, sgd(model), strategy) as session:
            assert load_state(tmp_path, session, tag="")
            return owed(session)

    results_of(3, saves)
    saved, loaded = results_of(2, saves), results_of(3, loads)
    assert any(bool(tensor.any()) for tensor in saved[0].values())
    for name in saved[0]:
        total = sum(each[name] for each in loaded)
        torch.testing.assert_close(total, saved[0][name] + saved[1][name])


def test_a_framework_takes_a_name_with_options_and_tells_a_strategy_its_norm() -> None:
    assert as_strategy("gtopk:density=0.01") == offbeat.GTopK(density=0.01)
    assert as_strategy("topk", clip_norm=2.0) == offbeat.TopK(clip_norm=2.0)
    kfac = as_strategy("spdkfac:exchange=topk", clip_norm=2.0)
    assert kfac == offbeat.SPDKFAC(exchange=offbeat.TopK(clip_norm=2.0))
    for told in (offbeat.TopK(clip_norm=1.0), offbeat.SPDKFAC()):
        assert as_strategy(told, clip_norm=2.0) is told
    with pytest.raises(ConfigError, match="did you mean 'density'"):
        as_strategy("gtopk:densty=0.01")


@pytest.mark.usefixtures("process_group")
def test_a_rank_that_runs_out_of_batches_inside_a_join_says_so() -> None:
    model = make_model()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    with FrameworkSession(model, optimizer, offbeat.AllReduce()) as running:
        running.silence(ddp)
        with pytest.raises(UnsupportedError, match="runs out of batches before its peers"):
            ddp.join_hook().main_hook()
    assert "join_hook" not in vars(ddp)
