"""Loggers hear what the loop logs and how the session is doing; a broken one disturbs nobody."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import offbeat
from offbeat import Session
from offbeat.errors import ConfigError
from offbeat.session import loggers as loggers_module
from offbeat.session.loggers import (
    LiveMetrics,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    named_loggers,
)
from offbeat.strategies.base import Strategy


class Remembering:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        assert not self.is_closed
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class Broken:
    """Raises whatever it is asked."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        raise OSError("no space left")


def train(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(1, 21):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 7:
            session.log(loss=0.5)
            offbeat.log(accuracy=0.25)


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(16, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_logger_hears_what_is_logged_and_how_the_session_is_doing() -> None:
    model, optimizer = made()
    logger = Remembering()
    strategy = offbeat.TopK(density=0.1, warmup=None)
    with offbeat.attach(model, optimizer, strategy, loggers=[logger]) as session:
        train(session, model, optimizer)
        residual_norm = session.gauges()["residual_norm"]
    assert logger.is_closed
    assert logger.told[:2] == [(7, {"loss": 0.5}), (7, {"accuracy": 0.25})]
    (at, values), (last, later) = logger.told[2:]
    assert (at, last) == (10, 20)
    assert later["offbeat/residual_norm"] == residual_norm > 0
    assert values["offbeat/entry_age"] >= 1
    assert values["offbeat/step_s"] > 0
    assert set(values) >= {"offbeat/wait_s", "offbeat/bytes_sent", "offbeat/encode_s"}
    assert all(map(math.isfinite, later.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_residual_norm_is_that_of_all_that_is_owed(dtype: torch.dtype) -> None:
    model, optimizer = made()
    model.to(dtype)
    strategy = offbeat.TopK(density=0.1, warmup=None)
    with offbeat.attach(model, optimizer, strategy) as session:
        model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()
        (additive,) = [part.state_dict()["additive"] for part in session.callbacks if part.gauges()]
        owed = [t for name, t in additive.items() if "residual" in name]
        expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in owed]))
        assert session.gauges()["residual_norm"] == pytest.approx(float(expected), rel=1e-5)


def test_a_logger_that_raises_is_dropped_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = made()
    logger = Remembering()
    with (
        caplog.at_level(logging.WARNING, "offbeat"),
        offbeat.attach(
            model, optimizer, offbeat.AllReduce(), loggers=[Broken(), logger]
        ) as session,
    ):
        train(session, model, optimizer)
    assert len(logger.told) == 4
    said = [record.message for record in caplog.records if "Broken" in record.message]
    assert said == ["Broken is told no more metrics: no space left"]


@pytest.mark.parametrize("make", [lambda: TensorBoardLogger("x"), WandbLogger, MLflowLogger])
@pytest.mark.parametrize("found", [None, ModuleSpec("only_a_directory", None)])
def test_what_is_not_installed_is_refused_with_a_hint(
    make: object, found: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers_module, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match="is not installed; pip install"):
        make()  # type: ignore[operator]


def test_a_logger_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleSpec("any", None, origin="any/__init__.py")
    monkeypatch.setattr(loggers_module, "find_spec", lambda name: installed)
    found = named_loggers(["mlflow", "tensorboard"], Path("record"))
    assert [type(logger) for logger in found] == [MLflowLogger, TensorBoardLogger]
    with pytest.raises(ConfigError, match="'tensorbord'; allowed are .*did you mean 'tensorboard'"):
        named_loggers(["tensorbord"], Path("record"))


@pytest.mark.parametrize("given", [{"loggers": "tensorboard"}, {"recorder": "runs/mine"}])
def test_a_name_in_the_place_of_an_object_is_refused(given: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"{next(iter(given))} must be .* got '.*'"):
        offbeat.attach(model, optimizer, offbeat.AllReduce(), **given)


def test_steps_are_those_of_the_run_and_losses_are_means() -> None:
    model, optimizer = made()
    logger = Remembering()
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        live = LiveMetrics(session, [logger], steps_before=100)
        session.observers.append(live)
        for loss in (1.0, 2.0, 3.0):
            live.loss_seen(loss)
        train(session, model, optimizer)
    told = [(step, values.get("offbeat/loss")) for step, values in logger.told]
    assert told == [(107, None), (107, None), (110, 2.0), (120, None)]


def test_loggers_outlast_a_session_that_another_may_follow() -> None:
    logger = Remembering()
    for before in (0, 20):
        model, optimizer = made()
        with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
            live = LiveMetrics(session, [logger], steps_before=before)
            for step in range(1, 21):
                live.step_ended(step)
        assert not logger.is_closed
    live.closed(None)
    assert logger.is_closed
    assert [step for step, _ in logger.told] == sorted(step for step, _ in logger.told)


@pytest.mark.parametrize("has_run", [True, False])
def test_a_run_that_the_script_began_is_used_and_left_open(
    has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb and mlflow as far as they are used: their own packages are not needed."""
    heard: list[object] = []
    run = SimpleNamespace(log=heard.append, finish=lambda: heard.append("finished"))
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    vars(wandb).update(run=run if has_run else None, init=lambda **settings: run)
    vars(mlflow).update(
        active_run=lambda: run if has_run else None,
        log_metrics=lambda values, step: heard.append((values, step)),
        end_run=lambda: heard.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(
        loggers_module, "find_spec", lambda name: ModuleSpec(name, None, origin="any/__init__.py")
    )
    for logger in (WandbLogger(project="mine"), MLflowLogger()):
        logger.log({"loss": 1.0}, 3)
        logger.close()
    ends = ([], []) if has_run else (["finished"], ["ended"])
    assert heard == [{"loss": 1.0, "offbeat/step": 3}, *ends[0], ({"loss": 1.0}, 3), *ends[1]]


def test_a_logger_serves_one_session_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[object]] = []

    class Run(list[object]):
        def log(self, values: object) -> None:
            assert "finished" not in self
            self.append(values)

        def finish(self) -> None:
            self.append("finished")

    def init() -> Run:
        runs.append(run := Run())
        return run

    wandb = ModuleType("wandb")
    vars(wandb).update(run=None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(
        loggers_module, "find_spec", lambda name: ModuleSpec(name, None, origin="any/__init__.py")
    )
    logger = WandbLogger()
    for loss in (1.0, 2.0):
        logger.log({"loss": loss}, 3)
        logger.close()
    logger.close()
    assert runs == [[{"loss": loss, "offbeat/step": 3}, "finished"] for loss in (1.0, 2.0)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install offbeat[tensorboard] to test it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "tb")
    logger.log({"loss": 0.5, "offbeat/wait_s": 0.25}, 10)
    logger.log({"loss": 0.25}, 20)
    logger.close()
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [(10, 0.5), (20, 0.25)]
    assert [one.value for one in read.Scalars("offbeat/wait_s")] == [0.25]


@pytest.mark.parametrize(
    "strategy", [offbeat.TopK(density=0.1), offbeat.LocalSGD(period=1)], ids=["topk", "localsgd"]
)
def test_totals_of_a_resumed_session_are_its_own(strategy: Strategy) -> None:
    model, optimizer = made()
    with offbeat.attach(model, optimizer, strategy) as session:
        train(session, model, optimizer)
        saved = session.state_dict()
    with offbeat.attach(model, optimizer, strategy) as session:
        session.load_state_dict(saved)
        assert session.stats.exchanges == 0
        train(session, model, optimizer)
        assert session.stats.exchanges == session.stats.steps == 20
