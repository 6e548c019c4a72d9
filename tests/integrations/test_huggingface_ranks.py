"""The Trainer of transformers, and loops with Accelerate, on two real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import offbeat
from integrations_support.ranks import as_launched, only_ours_are_errors
from integrations_support.regression import Line, Regression
from offbeat.integrations.accelerate import attach
from offbeat.integrations.transformers import OffbeatCallback
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


class Counting(TrainerCallback):
    """Asks the session before training ends."""

    def __init__(self, callback: OffbeatCallback) -> None:
        self.callback = callback
        self.seen: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        session = self.callback.offbeat_session
        self.seen = {"steps": state.global_step, "exchanges": session.stats.exchanges}


def vector(module: torch.nn.Module) -> list[float]:
    return torch.nn.utils.parameters_to_vector(module.parameters()).tolist()


def in_trainer(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()

    def fit(strategy: Any, out: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
        arguments = TrainingArguments(
            output_dir=f"{directory}/{out}",
            use_cpu=True,
            ddp_backend="gloo",
            optim="sgd",
            learning_rate=0.1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no", "max_steps": 6, **options},
        )
        callbacks: list[TrainerCallback] = []
        if strategy is not None:
            callback = OffbeatCallback(strategy)
            callbacks = [callback, Counting(callback)]
        model = Regression()
        trainer = Trainer(
            model, arguments, train_dataset=Line(), eval_dataset=Line(), callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume or None)
        seen = callbacks[1].seen if callbacks else {}
        return {"model": vector(model), "evaluated": trainer.evaluate()["eval_loss"], **seen}

    gtopk = offbeat.GTopK(density=0.05, collective="tree")
    return {
        "ddp": fit(None, "ddp"),
        "allreduce": fit("allreduce", "allreduce"),
        "dear": fit("dear", "dear"),
        "ddp without a limit": fit(None, "ddp-unlimited", max_grad_norm=0.0),
        "dear without a limit": fit("dear", "dear-unlimited", max_grad_norm=0.0),
        "gtopk": fit(gtopk, "once", save_strategy="steps", save_steps=3),
        "half": fit(gtopk, "halves", max_steps=3, save_strategy="steps", save_steps=3),
        "resumed": fit(gtopk, "halves", resume=True),
        "localsgd": fit(offbeat.LocalSGD(period=4), "local", eval_strategy="steps", eval_steps=3),
    }


def test_trainer_of_transformers(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(in_trainer, 2, timeout_s=270, directory=str(tmp_path))
    for name in ("allreduce", "dear"):
        assert first[name]["model"] == pytest.approx(first["ddp"]["model"], abs=1e-6)
    for name in ("allreduce", "gtopk"):
        assert first[name]["exchanges"] == first[name]["steps"] == 6
    assert first["resumed"]["model"] == first["gtopk"]["model"] != first["half"]["model"]
    assert first["localsgd"]["model"] == second["localsgd"]["model"]
    unlimited = [first[f"{name} without a limit"]["model"] for name in ("ddp", "dear")]
    assert unlimited[1] == pytest.approx(unlimited[0], abs=1e-6)
    saved = tmp_path / "once" / "checkpoint-3" / "training_args.bin"
    assert torch.load(saved, weights_only=False).max_grad_norm == 1.0


class FailingOnce(TrainerCallback):
    """Ends the first training by an error."""

    def __init__(self, callback: OffbeatCallback) -> None:
        self.callback = callback
        self.clip_norms: list[float | None] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        session = self.callback.offbeat_session
        self.clip_norms.append(session.strategy.clip_norm)
        if len(self.clip_norms) == 1:
            raise ZeroDivisionError


def failing_once(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        ddp_backend="gloo",
        optim="sgd",
        max_grad_norm=0.5,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callback = OffbeatCallback(offbeat.GTopK(density=0.05, collective="tree"))
    failing = FailingOnce(callback)
    trainer = Trainer(Regression(), arguments, train_dataset=Line(), callbacks=[callback, failing])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.train()
    return {"clip_norms": failing.clip_norms, "max_grad_norm": arguments.max_grad_norm}


def test_a_training_after_one_that_failed_clips_as_that_did(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for found in run_ranks(failing_once, 2, timeout_s=270, directory=str(tmp_path)):
        assert found == {"clip_norms": [0.5, 0.5, 0.5], "max_grad_norm": 0.5}


def with_accelerate(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()

    def train(strategy: Any, first: int, last: int, *, load: bool = False) -> dict[str, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        loader = DataLoader(Line(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        running = None if strategy is None else attach(accelerator, model, optimizer, strategy)
        if load:
            accelerator.load_state(f"{directory}/state")
        for batch in list(loader)[2 * first : 2 * last]:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        found: dict[str, Any] = {}
        if running is not None:
            accelerator.save_state(f"{directory}/state")
            found["exchanges"] = running.session.stats.exchanges
            running.close()
        found["model"] = vector(accelerator.unwrap_model(model))
        accelerator.free_memory()
        return found

    gtopk = offbeat.GTopK(density=0.05, collective="tree")
    return {
        "ddp": train(None, 0, 6),
        "allreduce": train("allreduce", 0, 6),
        "at once": train(gtopk, 0, 6),
        "half": train(gtopk, 0, 3),
        "resumed": train(gtopk, 3, 6, load=True),
    }


def test_accelerate(run_ranks: RunRanks, tmp_path: Path) -> None:
    found, _ = run_ranks(with_accelerate, 2, timeout_s=270, directory=str(tmp_path))
    assert found["allreduce"]["model"] == pytest.approx(found["ddp"]["model"], abs=1e-6)
    assert found["allreduce"]["exchanges"] == 6
    assert found["resumed"]["model"] == found["at once"]["model"] != found["half"]["model"]


def two_sessions(rank: int, world_size: int, *, directory: str) -> list[bool]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()
    accelerator, running = Accelerator(cpu=True), []
    for width in (1, 2):
        model = torch.nn.Linear(8, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        strategy = offbeat.TopK(density=0.1, warmup=None)
        running.append(attach(accelerator, model, optimizer, strategy))
        accelerator.backward(model(torch.ones(2, 8) + rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    def owed() -> list[dict[str, torch.Tensor]]:
        states = [each.session.state_dict()["callbacks"] for each in running]
        return [dict(each["gradients"]["additive"]) for each in states]

    before = owed()
    accelerator.save_state(f"{directory}/two")
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{directory}/two")
    found = [
        all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(before, owed(), strict=True)
    ]
    for each in running:
        each.close()
    return found


def test_each_of_two_sessions_has_its_own_state(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(two_sessions, 2, timeout_s=270, directory=str(tmp_path)):
        assert found == [True, True]


def compiled_by_accelerate(rank: int, world_size: int) -> dict[str, list[float]]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()
    accelerator, plain = Accelerator(cpu=True, dynamo_backend="eager"), Regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02)
    loader = DataLoader(Line(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    strategy = offbeat.LocalSGD(period=100, warmup=0)
    with attach(accelerator, model, optimizer, strategy):
        for batch in list(loader)[:2]:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        own = vector(plain)
    return {"own": own, "mean": vector(plain)}


def test_ddp_exchanges_nothing_in_a_model_that_accelerate_compiles(run_ranks: RunRanks) -> None:
    first, second = run_ranks(compiled_by_accelerate, 2, timeout_s=270)
    assert first["own"] != second["own"]
    assert first["mean"] == second["mean"]


class Searching(TrainerCallback):
    """What the Trainer's state says in a trial."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        state.is_hyper_param_search = True


def in_a_search(rank: int, world_size: int, *, directory: str) -> None:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        ddp_backend="gloo",
        optim="sgd",
        max_steps=2,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    callbacks = [OffbeatCallback("allreduce"), Searching()]
    Trainer(Regression(), arguments, train_dataset=Line(), callbacks=callbacks).train()


def test_a_trial_of_a_search_leaves_no_state_outside_of_its_directory(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(in_a_search, 2, timeout_s=270, directory=str(tmp_path))
    assert (tmp_path / "checkpoint-1").exists()
    assert not list(tmp_path.rglob("offbeat"))
