"""`offbeat run` with real workers: what it promises at deaths, failures and signals, and what it
records.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from offbeat.run import supervisor
from offbeat.run.children import CHILD_VARIABLE, ChildFunction
from offbeat.run.plan import script_command, script_config
from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat.run.supervise import ScriptOutcome, run_script
from offbeat.transport.interface import PORTS_VARIABLE
from offbeat_lab.cli.comparing import comparison_display
from offbeat_lab.cluster import Cluster
from offbeat_lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat_lab.emulated_workers import forking
from offbeat_lab.records import Record
from offbeat_lab.report.page import write_report
from rank_jobs.script import (
    clips_by_name,
    name_of_ddps_reducer,
    step_around_the_wrapper,
    step_by_hand,
)
from ranks_support.launch import RanksError, RunRanks
from transport_support.ports import free_ports

pytestmark = pytest.mark.ranks

IMPORTS = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
"""
"""With the same ones all scripts are forked from one process."""

MODEL = """
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def step():
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""
HEAD = IMPORTS + MODEL

UNTIL_RANK_1_IS_BACK = """
came_back = "OFFBEAT_RETURN" in os.environ
back = sys.argv[1]
number = 0
while number < 60 or not os.path.exists(back):
    step()
    number += 1
    if came_back and number == 5:
        open(back, "w").close()
    if rank == 1 and number == dies_at and not came_back:
        os.kill(os.getpid(), signal.SIGKILL)
"""


FAKE_MLFLOW = """
import json, pathlib

def active_run():
    return True

def log_metrics(values, step):
    with (pathlib.Path(__file__).parent / "told").open("a") as file:
        print(json.dumps([step, values]), file=file)
"""


class RunScript:
    """Runs what is written to a file, with workers that are forked to start sooner."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.changes: list[MembershipChange] = []

    def __call__(
        self,
        body: str,
        *arguments: str,
        strategy: str,
        workers: int = 2,
        restarts: int = 0,
        log_to: Sequence[str] = (),
        before: str = "",
        steps: int | None = None,
        hear: Callable[[WorkerProgress], None] = lambda progress: None,
    ) -> ScriptOutcome:
        script = self.directory / "train.py"
        script.write_text(IMPORTS + before + MODEL + body)
        command = script_command([str(script), *arguments])

        def listen(report: WorkerProgress | MembershipChange) -> None:
            if isinstance(report, MembershipChange):
                self.changes.append(report)
            else:
                hear(report)

        return run_script(
            script_config(command, strategy, workers=workers, steps=steps, log_to=log_to),
            out=self.directory / "record",
            restarts=restarts,
            start=forking(),
            on_progress=listen,
            say=self.said.append,
        )


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    return RunScript(tmp_path)


def test_survivors_go_on_and_a_dead_worker_comes_back(
    run: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it on as few ports as are said to be enough, and told to a logger."""
    (run.directory / "mlflow.py").write_text(FAKE_MLFLOW)
    monkeypatch.syspath_prepend(run.directory)
    ports = free_ports(2 * (3 * 4 + 1))  # some to spare: others may take them meanwhile
    monkeypatch.setenv(PORTS_VARIABLE, f"{ports[0]}-{ports[-1]}")
    outcome = run(
        f"""
from offbeat.transport.sockets import listening_at
dies_at = 20
{UNTIL_RANK_1_IS_BACK}
with open(f"{{sys.argv[1]}}-{{rank}}", "w") as file:
    print(*(port for _, port in listening_at("127.0.0.1")), file=file)
model.eval()
offbeat.log(loss=0.0, accuracy=0.25 + rank)
dist.destroy_process_group()
""",
        str(run.directory / "back"),
        strategy="wagma",
        workers=3,
        restarts=1,
        log_to=["mlflow"],
    )
    assert (outcome.status, outcome.problem) == (0, None)
    assert outcome.summary is not None
    (loss,) = outcome.summary.losses
    assert (loss.rank, loss.cause) == (1, "killed by SIGKILL")
    assert loss.returned_step is not None
    assert [change.departed for change in run.changes][:2] == [True, False]
    for rank in range(3):
        listening = {*map(int, (run.directory / f"back-{rank}").read_text().split())}
        assert 1 <= len(listening & {*ports}) <= 4, (rank, listening)
    told = [json.loads(line) for line in (run.directory / "told").read_text().splitlines()]
    assert [step for step, _ in told[:3]] == [10, 20, 30]
    assert {"offbeat/loss", "offbeat/step_s"} <= told[0][1].keys()
    # Ten steps can be over before the first average is.
    assert any("offbeat/stale_share" in values for _, values in told)
    last, values = told[-1]
    assert values == {"loss": 0.0, "accuracy": 0.25}
    # A worker that nobody waits for may have done more steps than the one that tells the logger.
    assert 60 <= last <= outcome.summary.steps
    # What rank 0 has logged is the metric, and its record is a page.
    assert (outcome.summary.metric_name, outcome.summary.metric) == ("accuracy", 0.25)
    assert outcome.summary.higher_is_better
    events = list(Record(outcome.directory).events(0))
    assert [event.step for event in events] == list(range(1, last + 1))
    assert {event.batch_size for event in events} == {16}
    assert all(event.loss is not None and event.loss >= 0 for event in events)
    assert "Accuracy 0.25" in write_report(outcome.directory).read_text()


@pytest.mark.parametrize("dies_at", [8, 20], ids=["just after the change", "later"])
def test_auto_is_started_anew_or_goes_on_as_what_is_at_work_does(
    run: RunScript, dies_at: int
) -> None:
    """All workers are started again when one dies early, with AllReduce at work. Then WAGMA takes
    over, goes on without the one that dies, and takes it back.
    """
    outcome = run(
        f"""
dies_at = {dies_at} if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 3
{UNTIL_RANK_1_IS_BACK}
model.eval()
dist.destroy_process_group()
""",
        str(run.directory / "back"),
        before="""
from offbeat.simulation.measured import Predicted
from offbeat.strategies import auto, choice

choice.FIRST_LOOK, choice.LEAST_SEEN, choice.LEAST_MARGIN = 6, 1, float("-inf")
choice.Candidate.on_processors_s = lambda self, step_s, *_, **__: step_s
auto.predict = lambda strategy, *_, **__: Predicted(
    1e-12 if strategy.name == "wagma" else 1e3, 1.0
)
""",
        strategy="auto",
        workers=3,
        restarts=2,
    )
    assert (outcome.status, outcome.problem) == (0, None)
    assert ["all workers are started again" in said for said in run.said] == [False, True]
    assert outcome.summary is not None
    (loss,) = outcome.summary.losses
    assert (loss.rank, loss.cause) == (1, "killed by SIGKILL")
    assert loss.returned_step is not None
    assert [one.after for one in outcome.summary.decisions] == ["wagma"]


@pytest.mark.parametrize(
    ("strategy", "asks"),
    [("wagma", False), ("localsgd:period=2:exchange=members", True)],
)
def test_survivors_do_not_wait_for_a_worker_that_has_come_back_to_run_the_script_again(
    run: RunScript, strategy: str, asks: bool
) -> None:
    """It would never come to an end. What it was told of the run's steps is true, and a script
    that does not ask for them is warned.
    """
    outcome = run(
        f"""
asks = {asks}
came_back = "OFFBEAT_RETURN" in os.environ
told = [offbeat.step()] if asks else []
back = sys.argv[1]
number = 0
while came_back or number < 30 or not os.path.exists(back):
    step()
    number += 1
    if asks:
        told.append(offbeat.step())
    if came_back and number == 5:
        open(back + ".told", "w").write(repr(told))
        os.rename(back + ".told", back)
    if rank == 0 and number == 20 and not came_back:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
""",
        str(run.directory / "back"),
        strategy=strategy,
        workers=3,
        restarts=1,
    )
    assert (outcome.status, outcome.problem) == (0, None)
    assert outcome.summary is not None
    (loss,) = outcome.summary.losses
    assert loss.returned_step is not None
    text = "; ".join(outcome.summary.notices)
    assert re.search(r"worker 0, which had come back, was ended.* they had waited \d", text)
    assert ("it has not asked offbeat.step()" in text) == (not asks)
    told = json.loads((run.directory / "back").read_text())
    if asks:
        assert told[0] <= loss.returned_step
        assert told[1:] == [loss.returned_step + number for number in range(1, 6)]


HELPER = """
import multiprocessing
helper = multiprocessing.get_context("fork").Process(target=print)
helper.start()
helper.join()
"""


@pytest.mark.parametrize("helper", ["", HELPER], ids=["alone", "beside a process of its own"])
def test_a_script_without_ddp_is_stopped_after_its_steps_and_told(
    run: RunScript, helper: str
) -> None:
    outcome = run(
        "",
        str(run.directory),
        before=helper
        + """
dist.init_process_group("gloo")
plain = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
try:
    for number in range(40):
        plain(torch.ones(2, 8)).sum().backward()
        optimizer.step()
finally:
    open(f"{sys.argv[1]}/{number}-{dist.get_rank()}", "w").close()
    dist.barrier()  # the first to end ends the run, and with it the other one
""",
        strategy="gtopk",
        steps=3,
    )
    assert outcome.status == 1
    assert outcome.problem is not None
    assert "gtopk exchanges nothing; wrap the model" in outcome.problem
    assert sorted(path.name for path in run.directory.glob("*-*")) == ["2-0", "2-1"]


def test_all_workers_start_anew_where_none_can_go_on_and_the_script_resumes(run: RunScript) -> None:
    """The script parses arguments, leaves its directory, and raises on one rank the first time."""
    outcome = run(
        """
if __name__ == "__main__":
    os.chdir(sys.argv[1])
    begin = torch.load("last.pt")["step"] if os.path.exists("last.pt") else 0
    for number in range(begin, 12):
        step()
        if rank == 0 and number == 5:
            torch.save({"step": number + 1}, "last.pt")
        if rank == 1 and number == 8 and begin == 0:
            raise ValueError("no such luck")
    dist.destroy_process_group()
    sys.exit()
""",
        str(run.directory),
        strategy="gtopk:density=0.5:collective=reduce_scatter",
        restarts=1,
    )
    assert outcome.status == 0, outcome.problem
    begun, *_, said = run.said
    assert begun == "offbeat: 2 workers train with gtopk"
    assert "worker 1" in said
    assert "ValueError: no such luck" in said
    printed = (outcome.directory / "logs" / "rank-1.log").read_text()
    assert "no such luck" in printed
    assert "runpy" not in printed
    assert outcome.summary is not None
    assert outcome.summary.steps == 6
    assert outcome.summary.metric_name == "training loss"
    assert outcome.summary.replicas_identical
    assert outcome.summary.bytes_sent_per_step > 0


def test_a_scaler_on_two_ranks_and_a_process_that_the_script_forks(run: RunScript) -> None:
    """An infinity on one rank skips the step on both, and halves the scale on both."""
    outcome = run(
        """
torch.manual_seed(rank)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number in range(8):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = (out.float() - x.sum(dim=1, keepdim=True)).square().mean()
    if number == 3 and rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if number == 5 and (child := os.fork()) == 0:
        sys.exit(7)
    if number == 5:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert scaler.get_scale() == 512.0, scaler.get_scale()
""",
        strategy="gtopk:density=0.5:collective=tree",
    )
    assert outcome.status == 0, outcome.problem
    assert outcome.summary is not None
    assert outcome.summary.replicas_identical


def test_a_worker_that_leaves_early_is_named_in_one_sentence(run: RunScript) -> None:
    outcome = run(
        """
for number in range(6):
    if rank == 1 and number == 3:
        sys.exit()
    step()
""",
        strategy="gtopk:density=0.5:collective=tree",
    )
    assert outcome.status != 0
    assert outcome.problem is not None
    assert "rank 1" in outcome.problem or "worker 1" in outcome.problem, outcome.problem
    assert "train.py, line " in outcome.problem
    assert outcome.problem.count("\n") == 0


class Clock:
    """Stands in for the module `time`: whoever looks at it finds that some seconds have passed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 5.0
        return self.now_s


def test_nobody_waits_for_ever_for_a_worker_that_left_before_its_first_step(
    run: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "time", Clock())
    leave = """
if os.environ["RANK"] == "1":
    sys.exit()
"""
    outcome = run("while True: step()", strategy="localsgd:period=2", before=leave)
    assert outcome.status != 0
    assert outcome.problem is not None
    assert "worker 1 came to its end before its first step" in outcome.problem


def test_a_signal_reaches_the_script_which_saves_and_its_exit_status_is_kept(
    run: RunScript,
) -> None:
    has_sent = []

    def interrupt(progress: WorkerProgress) -> None:
        if not has_sent:
            has_sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(
        """
try:
    while True:
        step()
except KeyboardInterrupt:
    open(f"{sys.argv[1]}/saved-{rank}", "w").close()
    raise
""",
        str(run.directory),
        strategy="localsgd:period=2",
        hear=interrupt,
    )
    assert len(list(run.directory.glob("saved-*"))) == 2
    assert (outcome.status, outcome.problem) == (130, "interrupted")


def call_as_child(rank: int, world_size: int, *, pickled: str, config: str) -> str:
    os.environ[CHILD_VARIABLE] = config
    function = pickle.loads(bytes.fromhex(pickled))
    return str(function())


def as_child_of(directory: Path, function: Callable[[], object], strategy: str) -> dict[str, str]:
    """What `call_as_child` does where a script under `offbeat run` starts `function`."""
    script = directory / "train.py"
    script.touch()
    config = script_config(script_command([str(script)]), strategy, workers=1)
    pickled = pickle.dumps(ChildFunction(function)).hex()
    return {"pickled": pickled, "config": config.to_json()}


def test_the_strategy_reaches_ranks_that_the_script_starts_itself(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """As in the fresh interpreters of `torch.multiprocessing.spawn`, which unpickle what to do."""
    names = run_ranks(call_as_child, 1, **as_child_of(tmp_path, name_of_ddps_reducer, "allreduce"))
    assert names == ["ListeningReducer"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (step_around_the_wrapper, "call the wrapper, model(x)"),
        (step_by_hand, "stepped it by no optimizer of torch.optim's, so gtopk has done nothing"),
    ],
)
def test_ranks_that_the_script_starts_itself_fail_where_the_strategy_does_nothing(
    run_ranks: RunRanks, tmp_path: Path, function: Callable[[], None], said: str
) -> None:
    with pytest.raises(RanksError, match=re.escape(said)):
        run_ranks(call_as_child, 1, **as_child_of(tmp_path, function, "gtopk"))


def test_a_rank_that_updates_by_hand_is_served_where_gradients_are_all_that_is_exchanged(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(call_as_child, 1, **as_child_of(tmp_path, step_by_hand, "allreduce"))


def test_strategies_are_compared_on_a_script_by_turns(tmp_path: Path) -> None:
    """DDP is DDP itself there; the script is stopped, and its `finally` clause carried out."""
    script = tmp_path / "train.py"
    script.write_text(
        HEAD
        + """
try:
    while True:
        loss = step()
        if rank == 0:
            offbeat.log(error=loss)
finally:
    open(f"{sys.argv[1]}/{type(model.reducer).__name__}-{rank}", "w").close()
    dist.destroy_process_group()
"""
    )
    request = CompareRequest(
        task="train",
        strategies=["ddp", "localsgd:period=2:warmup=0"],
        cluster=Cluster(workers=2),
        emulation="none",
        seeds=[0],
        steps=8,
        script=script_command([str(script), str(tmp_path)]),
    )
    planned = plan_comparison(request, out=tmp_path / "out")
    with comparison_display(quiet=True) as listener:
        directory, comparison = run_comparison(planned, listener, command="offbeat compare")
    assert [strategy.failure for strategy in comparison.strategies] == [None, None]
    assert (comparison.metric_name, comparison.higher_is_better) == ("error", False)
    assert comparison.num_parameters == 9
    for strategy in comparison.strategies:
        record = Record(directory / strategy.runs[0])
        for rank in range(2):
            assert [event.step for event in record.events(rank)] == list(range(1, 9))
        assert [evaluation.step for evaluation in record.evaluations()] == list(range(1, 8))
    ddp, localsgd = (strategy.measures["bytes_per_step"] for strategy in comparison.strategies)
    assert ddp.median == 4 * 9
    assert localsgd.median is not None
    assert 0 < localsgd.median < ddp.median
    assert (
        len(list(tmp_path.glob("ListeningReducer-*"))) == len(list(tmp_path.glob("Reducer-*"))) == 2
    )


def test_what_a_script_has_imported_by_name_is_changed_in_ranks_that_it_starts_itself(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """A fresh interpreter imports the script first."""
    said = run_ranks(call_as_child, 1, **as_child_of(tmp_path, clips_by_name, "gtopk"))
    assert said == ["True"]


def test_a_run_ends_with_its_workers_and_not_with_what_they_have_started(run: RunScript) -> None:
    """As environments of reinforcement learning, which wait for work that never comes."""
    outcome = run(
        """
if rank == 1:
    helper = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    helper.start()
    with open(f"{sys.argv[1]}/helper", "w") as file:
        file.write(str(helper.pid))
    os.kill(os.getpid(), signal.SIGKILL)
step()
""",
        str(run.directory),
        strategy="gtopk:density=0.5:collective=tree",
        before="import multiprocessing\n",
    )
    os.kill(int((run.directory / "helper").read_text()), signal.SIGKILL)
    assert outcome.problem is not None
    assert "killed by SIGKILL" in outcome.problem


FORKS_A_RANK = """
import multiprocessing

def be_a_rank():
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except offbeat.OffbeatError as error:
        with open(f"{sys.argv[1]}/said", "w") as file:
            file.write(str(error))

forked = multiprocessing.get_context("fork").Process(target=be_a_rank)
forked.start()
forked.join()
"""


def test_ranks_that_a_script_forks_are_refused_at_once(run: RunScript) -> None:
    outcome = run(
        "step()", str(run.directory), strategy="allreduce", workers=1, before=FORKS_A_RANK
    )
    assert outcome.status == 0
    assert "set_start_method('spawn')" in (run.directory / "said").read_text()


def test_ctrl_c_reaches_what_the_script_has_started_as_from_a_terminal(run: RunScript) -> None:
    has_sent = []

    def interrupt(progress: WorkerProgress) -> None:
        if not has_sent:
            has_sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    run(
        """
def other():
    try:
        open(f"{sys.argv[1]}/ready", "w").close()
        signal.pause()
    except KeyboardInterrupt:
        open(f"{sys.argv[1]}/saved", "w").close()


started = multiprocessing.get_context("fork").Process(target=other)
started.start()
while not os.path.exists(f"{sys.argv[1]}/ready"):
    pass
try:
    while True:
        step()
finally:
    started.join()
""",
        str(run.directory),
        strategy="allreduce",
        workers=1,
        before="import multiprocessing\n",
        hear=interrupt,
    )
    assert (run.directory / "saved").exists()


def test_a_compared_script_that_outlasts_its_emulated_step_is_said_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + "\nwhile True:\n    step()\n")
    request = CompareRequest(
        task="train",
        strategies=["ddp", "allreduce"],
        cluster=Cluster(workers=2, step_s=1e-6),
        emulation="none",
        seeds=[0],
        steps=8,
        script=script_command([str(script)]),
    )
    planned = plan_comparison(request, out=tmp_path / "out")
    with comparison_display(quiet=True) as listener:
        _, comparison = run_comparison(planned, listener, command="offbeat compare")
    for strategy in comparison.strategies:
        assert any("longer than the emulated step" in said for said in strategy.notices)
