"""The record of a script's training: the same files as those of `offbeat train`.

    forward pass with gradients     a step begins
    backward                        the loss is seen
    optimizer.step()                the step is written down; here workers stop
    offbeat.log, session.log        the metric, and whatever else the script measures

The metric is the value that was asked for by name, else the first one that is logged and is not the
loss. A script that logs none has its training loss as its metric, as the mean over some steps.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from offbeat.callbacks.context import LOGGER
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import OffbeatError, RecordError
from offbeat.run.config import RunConfig, ScriptCommand, script_run
from offbeat.run.coordination import Coordinator, group_store
from offbeat.run.progress import Joined, Reporter
from offbeat.run.records import Evaluation, RunDirectory, as_measured, begin_attempt, create
from offbeat.run.run_summary import HANGS_S, Measured, gather_ends, leave_out, write_end
from offbeat.run.step_recorder import (
    AttachedModel,
    ExchangeSession,
    Position,
    RankRun,
    StepRecorder,
)
from offbeat.session.metrics import SessionObserver
from offbeat.session.session import Session
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import strategy_values
from offbeat.torch_private import is_compiled_module, tensors_in
from offbeat.transport.connect import is_returning

TRAINING_LOSS: Final = "training loss"
LOSS_EVERY: Final = 10
"""Steps over which the training loss is averaged where it is the metric."""

MOST_LOSSES: Final = 2_000
"""How many of these means are kept at most: where there are more, every second one stays."""

REPORT_EVERY_S: Final = 0.5
"""From one report to the supervisor to the next."""

_NO_METRICS: Final = frozenset(
    {"loss", "train_loss", "training_loss", "lr", "learning_rate", "step", "epoch", "iter", "time"}
)
_HIGHER_IS_BETTER: Final = (
    "acc", "top1", "top5", "f1", "auc", "auroc", "auprc", "precision", "recall", "bleu", "rouge",
    "map", "iou", "miou", "dice", "kappa", "mcc", "psnr", "ssim", "reward", "return", "score", "r2",
    "ndcg", "mrr", "hit", "corr",
)  # fmt: skip
_LOWER_IS_BETTER: Final = ("loss", "err", "error", "errors", "mape", "fid")
"""Words that decide, whatever else a name says: top1_error, dice_loss, fid_score."""


def higher_is_better(name: str) -> bool:
    """Whether a metric of this name is the better the higher it is: accuracies, scores and rewards
    are; whatever else, such as losses, errors and perplexities, is not.
    """
    words = re.split(r"[\W_]+", name.lower())
    if any(word in _LOWER_IS_BETTER for word in words):
        return False
    return any(word.startswith(_HIGHER_IS_BETTER) for word in words)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRecord:
    """A record that is written, and the ranks that write it."""

    record: RunDirectory
    coordinator: Coordinator


class ScriptRecorder(SessionObserver):
    """Records one rank of a script.

    Args:
        open_record: is called when the first session is attached, on all ranks; None: there is to
            be no record on this one.
        report: hears how far this rank is.
        stop_after: steps after which the script is stopped; None: it stops by itself.
        patience_s: how long the end waits for ranks that are late; None: for ever.

    Attributes:
        position: where the script is.
    """

    def __init__(
        self,
        open_record: Callable[[], OpenRecord | None],
        report: Reporter,
        *,
        stop_after: int | None,
        patience_s: float | None = None,
    ) -> None:
        self._open_record = open_record
        self._report = report
        self._patience_s = patience_s
        self._limit = stop_after
        self.position = Position()
        self._recorder: StepRecorder | None = None
        """From the first session on until the script has ended, where there is a record."""
        self._metric_name: str | None = None
        self._metric: Evaluation | None = None
        self._loss_of_step: torch.Tensor | float | None = None
        self._losses: list[float] = []
        self._training_losses: list[Evaluation] = []
        self._last_training_loss: Evaluation | None = None
        self._keep_every = LOSS_EVERY  # steps from one kept mean to the next
        self._losses_seen = False
        self._num_samples = 0
        self._is_attached = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._step_has_begun = self._has_evaluated = self._was_asked = False

    @property
    def target(self) -> int:
        """Steps done when the run will be finished, as far as that is known."""
        return self.position.step + 1 if self._limit is None else self._limit

    # What the script does

    def attached(
        self, session: ExchangeSession, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """`session` is at work. Of several models at once, the first one's steps are recorded."""
        attached = AttachedModel(model=model, session=session)
        if self._recorder is None:
            if (opened := self._open_record()) is None:
                return  # nobody asked for a record
            self._begin(opened, attached)
        else:
            run = self._recorder.run
            if run.attached.model is not model:
                notice = "the script trains several models; the record is that of the first"
                if notice not in run.notices:  # a script may attach them by turns
                    run.notices.append(notice)
                return
            run.attached = attached
            self._recorder.begin_anew()
        session.observers.append(self)
        self._is_attached, self._optimizer = True, optimizer

    def _begin(self, opened: OpenRecord, attached: AttachedModel) -> None:
        """Record from now on: the first session is at work."""
        record, coordinator = opened.record, opened.coordinator
        if record.config.script is not None:
            self._metric_name = record.config.script.metric
        self.position.step = step = attached.session.start_step
        run = RankRun(
            record=record,
            coordinator=coordinator,
            attached=attached,
            schedule=self,
        )
        if coordinator.restart:
            coordinator.rejoin_at(step + 1)
            self._report(Joined(rank=coordinator.rank, step=step, counts_anew=not self._was_asked))
        self._recorder = self._recorder_of(run)
        self._training_begins(self._recorder)
        self._recorder.restart_clock()

    def samples_seen(self, model: torch.nn.Module, args: Sequence[Any]) -> None:
        """A forward pass of `model` for training begins."""
        if self._recorder is None or self._recorder.run.attached.model is model:
            tensors = tensors_in(args)
            self._num_samples += len(tensors[0]) if tensors and tensors[0].dim() else 0
        self._begin_step()

    def loss_seen(self, loss: torch.Tensor, scale: float | torch.Tensor) -> None:
        """`backward` is called on `loss`, which is `scale` times the script's."""
        self._begin_step()
        if self._is_attached and loss.numel() == 1:
            # Read when the step is over: a GPU would first have to end the forward pass here.
            seen = loss.detach().float() / scale
            so_far = self._loss_of_step
            self._loss_of_step = seen if so_far is None else so_far + seen

    def backward_ended(self) -> None:
        """What `loss_seen` announced is over."""

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """A scaler has taken a step of `optimizer`, or left it out."""
        if optimizer is self._optimizer:
            # One that was taken is over by now.
            if self._is_attached and self._step_has_begun and self._recorder is not None:
                self._recorder.step_left_out()
            self._step_is_over()

    def evaluates(self) -> None:
        """The script puts a model out of training mode: what follows belongs to no step."""
        self._has_evaluated = True

    def stepped_without_session(self) -> None:
        """The script, which has a process group and no DDP model, has taken a step."""
        self.position.step += 1
        self._stop_at_limit()

    def training_ends(self) -> None:
        """The script takes no more steps. Its sessions are about to end."""
        # Only a supervisor asks. The store of others may have gone with the rank that served it.
        if self._recorder is not None and self._recorder.run.coordinator.supervised:
            self._recorder.run.coordinator.take_no_more_steps()

    @override
    def asked_for_step(self) -> int:
        self._was_asked = True
        if (
            self._recorder is None
            and is_returning()
            and (opened := self._open_record()) is not None
        ):
            return opened.coordinator.step
        return self.position.step

    @override
    def step_ended(self, num_steps: int) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        self.position.step += 1
        step = self.position.step
        loss = None if self._loss_of_step is None else float(self._loss_of_step)
        self._losses_seen = self._losses_seen or loss is not None
        self._record_step(loss, recorder)
        if loss is not None:
            self._losses.append(loss)
        self._step_is_over()
        if step % LOSS_EVERY == 0 and self._losses:
            mean = sum(self._losses) / len(self._losses)
            if self._metric_name is None:
                self._keep_training_loss(recorder.evaluation(mean, {}))
            self._losses = []
        self._stop_at_limit()
        recorder.restart_clock()

    @override
    def closed(self, error: BaseException | None) -> None:
        self._is_attached = False  # what the script trains now is in no record

    @override
    def logged(self, values: Mapping[str, float]) -> None:
        if "loss" in values and math.isfinite(as_measured(values["loss"])):
            self._loss_logged(values["loss"])
        if self._recorder is not None:
            self._recorder.logged(values)
        if self._metric_name is None:
            self._metric_name = next((name for name in values if name not in _NO_METRICS), None)
        name, recorder = self._metric_name, self._recorder
        if name is None or name not in values or recorder is None or not recorder.leads:
            return
        others = {other: value for other, value in values.items() if other != name}
        self._metric = recorder.evaluation(values[name], others)
        recorder.write_evaluation(self._metric)

    def end(self) -> None:
        """The script has ended well. Writes the summary, on the rank that leads; what the disk does
        not take is warned of, since the script still has its model to save.
        """
        recorder = self._recorder
        if recorder is None:
            return
        self.training_ends()
        self._recorder = None
        try:
            with closing(recorder):
                notices = []
                if self._metric is None and self._metric_name is not None and recorder.leads:
                    notices = [
                        f"the script has logged no {self._metric_name!r}, so the run has no metric;"
                        " it is to call offbeat.log with a value of that name"
                    ]
                # Of ranks that came back none took part in step 0: they have begun the script anew.
                ends = gather_ends(recorder, notices, patience_s=self._patience_s, step=0)
                if ends is not None:
                    model = recorder.run.attached.model
                    try:
                        write_end(recorder, ends, self._measured(recorder), model, finished=True)
                    except (OffbeatError, RuntimeError):
                        # The others wait for a summary until this rank is dead, and it is about to
                        # end well.
                        recorder.run.coordinator.publish("summary", "not written")
                        raise
        # The second kind is of the group's store: a rank takes longer than the group's timeout, as
        # to evaluate by itself, or has gone. This one has said what the summary needs of it.
        except (OffbeatError, RuntimeError) as error:
            LOGGER.warning("the record is not complete: %s", error)

    def abandon(self) -> None:
        """The script has failed: there is no summary."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with suppress(OffbeatError):  # as of a full disk, which may be why the script failed
                recorder.close()

    def _stop_at_limit(self) -> None:
        if self._limit is not None and self.position.step >= self._limit:
            raise SystemExit(0)  # the script's own `finally` clauses are carried out

    def _step_is_over(self) -> None:
        """What is seen from now on belongs to the next step."""
        self._loss_of_step, self._num_samples, self._step_has_begun = None, 0, False

    def _begin_step(self) -> None:
        """The first thing that is seen of a step."""
        recorder = self._recorder
        if self._step_has_begun or recorder is None:
            return
        self._step_has_begun = True
        if self._has_evaluated:
            recorder.restart_clock()
            self._has_evaluated = False
        self._step_begins(recorder)

    # What a run that shares its machine with others does besides

    def _recorder_of(self, run: RankRun) -> StepRecorder:
        return StepRecorder(run, self._report, amendable=True, report_every_s=REPORT_EVERY_S)

    def _training_begins(self, recorder: StepRecorder) -> None:
        """Before the first step."""

    def _step_begins(self, recorder: StepRecorder) -> None:
        """Before the first thing that is seen of a step."""

    def _record_step(self, loss: float | None, recorder: StepRecorder) -> None:
        """A step has ended, and is written down."""
        recorder.step_done(loss=loss, batch_size=self._num_samples)

    def _loss_logged(self, loss: float) -> None:
        """The script says its loss, before the optimizer's step or after it."""
        if self._step_has_begun:
            self._loss_of_step = loss
        elif self._recorder is not None and self.position.step:
            self._recorder.amend_loss(loss)
            if not self._losses_seen:
                self._losses.append(loss)

    def _keep_training_loss(self, mean: Evaluation) -> None:
        """Keep `mean` until it is known whether the script logs a metric, and any rank may be the
        one that leads by then.
        """
        self._last_training_loss = mean
        if mean.step % self._keep_every:
            return
        self._training_losses.append(mean)
        if len(self._training_losses) > MOST_LOSSES:
            self._keep_every *= 2
            self._training_losses = [
                kept for kept in self._training_losses if kept.step % self._keep_every == 0
            ]

    def _measured(self, recorder: StepRecorder) -> Measured:
        if self._metric_name is not None:
            metric = None if self._metric is None else self._metric.metric
            others = {} if self._metric is None else self._metric.others
            return Measured(
                metric=metric,
                name=self._metric_name,
                higher_is_better=higher_is_better(self._metric_name),
                others=others,
            )
        kept, last = self._training_losses, self._last_training_loss
        if last is not None and last not in kept[-1:]:
            kept = [*kept, last]
        for evaluation in kept:
            if math.isfinite(evaluation.metric):
                recorder.write_evaluation(evaluation)
        metric = recorder.last_loss if last is None else last.metric
        return Measured(metric=metric, name=TRAINING_LOSS, higher_is_better=False)


def begun_by_first(coordinator: Coordinator, begin: Callable[[], Path]) -> Path:
    """The directory that `begin`, which rank 0 calls, begins a record in. Collective.

    Raises:
        RecordError: it could not, on every rank.
    """
    problem, directory = "", Path()
    if coordinator.rank == 0:
        try:
            directory = begin().resolve()
        except (OffbeatError, OSError) as error:  # told to all ranks, or they would wait for ever
            problem = str(error)
    told = coordinator.all_gather("begun", json.dumps([problem, str(directory)]))[0]
    problem, begun = json.loads(told)
    if problem:
        raise RecordError(problem)
    return Path(begun)


def shared_record(
    coordinator: Coordinator, config: RunConfig, out: Path | None
) -> OpenRecord | None:
    """The record of a run whose ranks meet through torch.distributed. Collective.

    Args:
        coordinator: of the ranks that are recorded.
        config: of the run; the number of workers is that of these ranks.
        out: its directory; None: the next free one below runs/.

    Returns:
        None on a host that does not see the directory: its ranks are not recorded.

    Raises:
        RecordError: rank 0 cannot write there; on every rank.
    """
    # torchrun repeats the command, by which `out` is in use, and each node counts its own restarts.
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_first else "0"
    attempt = sum(map(int, coordinator.all_gather("attempt", count)))
    if out is not None and attempt:
        out = Path(f"{out}-{attempt}")

    def begin() -> Path:
        written = replace(config, workers=coordinator.world_size)
        directory = create(out, written)
        begin_attempt(directory, written, start_step=0)
        return directory

    directory = begun_by_first(coordinator, begin)
    if not (directory / "config.json").exists():
        LOGGER.warning(
            "rank %d does not see %s, so it is not recorded; give an --out on a file system that"
            " all hosts share",
            coordinator.rank,
            directory,
        )
        leave_out(coordinator)
        return None
    return OpenRecord(record=RunDirectory(directory), coordinator=coordinator)


class Recorder:
    """Writes a session's steps down as `offbeat train` does, for `offbeat report` and `offbeat
    trace`; what `Session.log` is told is in it.

    Args:
        directory: of the record; it must not exist yet, or be empty. The same on every rank; on
            several hosts a file system that all of them share.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def begin(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the steps of `session`, which was just attached, until it is closed. Collective.

        Args:
            session: whose steps they are.
            model, optimizer: that it was attached to.

        Raises:
            RecordError: the directory is in use; on every rank.
        """
        if is_returning():
            LOGGER.warning("this worker came back to a run whose record has begun without it")
            return
        # The session may be one of several in the process group, and not the first one.
        key = session.gather(secrets.token_hex(8))[0]
        coordinator = Coordinator(group_store(key), session.rank, session.world_size)
        config = _config_of(session.strategy)
        recorder = _ClosingRecorder(
            lambda: shared_record(coordinator, config, self.directory),
            lambda report: None,
            stop_after=None,
            patience_s=HANGS_S,
        )
        recorder.attached(session, model, optimizer)


class _ClosingRecorder(ScriptRecorder):
    """Ends its record with the session, and takes its hooks out of the model."""

    _hooks: Sequence[RemovableHandle] = ()
    _first_called: torch.nn.Module | None = None

    @override
    def _training_begins(self, recorder: StepRecorder) -> None:
        """Count the samples that the model is called with, or, where a loop as Lightning's calls
        parts of it in its place, those of the part that it calls first in a step.
        """
        model = recorder.run.attached.model

        def begins(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if torch.is_grad_enabled():
                if self._first_called is None:
                    self._first_called = module
                if module is self._first_called:
                    self.samples_seen(model, [*args, *kwargs.values()])

        # A hook inside of what is compiled would divide its graph.
        parts = [] if is_compiled_module(model) else model.children()
        self._hooks = [
            module.register_forward_pre_hook(ModuleHook(module, begins), with_kwargs=True)
            for module in (model, *parts)
        ]

    @override
    def step_ended(self, num_steps: int) -> None:
        super().step_ended(num_steps)
        self._first_called = None

    @override
    def closed(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is None:
            self.end()
        else:
            self.abandon()


def _config_of(strategy: Strategy) -> RunConfig:
    words = sys.argv or [""]
    script = ScriptCommand(path=words[0] or "session", arguments=words[1:])
    # Objects of Python stand in a record as what they print.
    options = json.loads(json.dumps(strategy_values(strategy), default=repr))
    return script_run(script, strategy.name, options, workers=1)
