"""`Auto` on real processes and real sockets: what takes over there, and what deaths do then."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

import offbeat
from offbeat.errors import OffbeatError, PeerError
from offbeat.gradients.exchange import GradientExchange
from offbeat.simulation.measured import MeasuredRun, Predicted
from offbeat.strategies import auto, choice
from offbeat.strategies.base import Strategy
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from rank_jobs.islands import loss_of as island_loss
from rank_jobs.islands import make_mesh, make_model, shard, whole
from rank_jobs.regression import data, fingerprint, make_net, train
from ranks_support.launch import RunRanks
from ranks_support.process import (
    ExpectNewcomer,
    ask_for,
    expect_newcomer,
    launcher_environment,
    pause,
)

__all__ = ["expect_newcomer"]

pytestmark = pytest.mark.ranks

LOOK = 6
SECRET = "the secret of this run alone"


@contextmanager
def choosing(to: str, *, back: bool = False) -> Iterator[None]:
    """`to` is predicted to be far faster than all others. `back`: AllReduce is too, next to it.

    What is at work costs what it was seen to, so all others cost more than any step here takes,
    however busy the host is.
    """
    predicted_s = {to: 1e-12} | ({"allreduce": 1e-9} if back else {})

    def predicted(strategy: Strategy, run: MeasuredRun, *, period: int = 1) -> Predicted:
        return Predicted(predicted_s.get(strategy.name, 1e3), 1.0)

    with (
        patch.object(auto, "predict", predicted),
        patch.object(choice, "FIRST_LOOK", LOOK),
        patch.object(choice, "LEAST_SEEN", 1),
        # However little of a step is waiting.
        patch.object(choice, "LEAST_MARGIN", float("-inf")),
        patch.object(choice.Candidate, "on_processors_s", lambda self, step_s, *_, **__: step_s),
        patch.object(choice, "EVERY", 20 if to == "wagma" else choice.EVERY),
        patch.object(choice, "BETWEEN_CHANGES", 10),
    ):
        yield


def changes(
    rank: int,
    world_size: int,
    *,
    to: str,
    back: bool = False,
    make: str = "SGD",
    dies_at: int = LOOK + 40,
) -> dict[str, Any]:
    """After a few steps `to` is predicted to be far faster, and takes over. The last rank may be
    killed later.
    """

    model = make_net()
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.01)
    found: dict[str, Any] = {"blamed": None}
    gc.disable()  # what refers to itself would stay, as it may for long
    with choosing(to, back=back):
        try:
            with offbeat.attach(model, optimizer, "auto") as session:
                train(model, optimizer, rank, range(LOOK - 1))
                before = [
                    weakref.ref(one) for one in gc.get_objects() if type(one) is GradientExchange
                ]
                train(model, optimizer, rank, range(LOOK - 1, LOOK + 1))
                found["at_work"] = session.acting.name
                found["freed"] = [one() is None for one in before]
                train(model, optimizer, rank, range(LOOK + 1, dies_at))
                if dies_at < LOOK + 40 and rank == world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                train(model, optimizer, rank, range(dies_at, LOOK + 40))
                found["notices"] = list(session.notices)
        except PeerError as error:
            found["blamed"] = error.rank
    return found | {"fingerprint": fingerprint(model)}


@pytest.mark.parametrize(
    ("to", "make"),
    [("gtopk", "AdamW"), ("powersgd", "SGD"), ("localsgd", "SGD"), ("wagma", "AdamW")],
)
def test_the_strategy_takes_over_and_all_ranks_end_alike(
    run_ranks: RunRanks, to: str, make: str
) -> None:
    results = run_ranks(changes, 3, to=to, make=make)
    assert [result["at_work"] for result in results] == [to] * 3
    assert [result["freed"] for result in results] == [[True]] * 3
    assert any(f"goes over to {to}" in notice for notice in results[0]["notices"])
    assert len({result["fingerprint"] for result in results}) == 1


def test_a_death_is_named_by_what_took_over(run_ranks: RunRanks) -> None:
    results = run_ranks(changes, 3, to="gtopk", dies_at=LOOK + 25, may_die=[2])
    assert [result["blamed"] for result in results[:2]] == [2, 2]


@pytest.mark.parametrize("dies_at", [LOOK + 25, 39])
def test_the_others_go_on_where_what_took_over_survives(run_ranks: RunRanks, dies_at: int) -> None:
    """Long before they would look again, or just before, when they may wait for it already."""
    results = run_ranks(changes, 3, to="wagma", dies_at=dies_at, may_die=[2])
    assert [result["blamed"] for result in results[:2]] == [None, None]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    # After 20 steps they look again, and stay; after 40 they cannot.
    for result in results[:2]:
        assert sum("stays with wagma" in notice for notice in result["notices"]) == 1
        assert sum("wagma stays, since a worker" in notice for notice in result["notices"]) == 1


def test_the_others_stay_where_one_dies_after_a_look_and_before_the_change(
    run_ranks: RunRanks,
) -> None:
    results = run_ranks(changes, 3, to="wagma", back=True, dies_at=20, may_die=[2])
    for result in results[:2]:
        assert result["blamed"] is None
        assert any("goes over to allreduce" in notice for notice in result["notices"])
        assert any("wagma stays, since a worker" in notice for notice in result["notices"])
    assert results[0]["fingerprint"] == results[1]["fingerprint"]


def goes_back(rank: int, world_size: int) -> dict[str, Any]:
    """WAGMA takes over, is left for AllReduce, and takes over once more. One rank is late."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    at_work: list[str] = []
    models: list[str] = []
    with choosing("wagma", back=True), offbeat.attach(model, optimizer, "auto") as session:
        for step in range(LOOK + 40):
            if rank == 1:
                torch.randn(200, 200).matmul(torch.randn(200, 2000))
            train(model, optimizer, rank, range(step, step + 1))
            at_work.append(session.acting.name)
            if step in (21, 22):
                models.append(fingerprint(model))
    return {"at_work": at_work, "models": [*models, fingerprint(model)]}


def test_wagma_is_left_again_where_it_takes_longer_than_predicted(run_ranks: RunRanks) -> None:
    results = run_ranks(goes_back, 3)
    expected = ["allreduce"] * LOOK + ["wagma"] * 14 + ["allreduce"] * 20 + ["wagma"] * 6
    for result in results:
        assert result["at_work"] == expected
        assert result["models"] == results[0]["models"]  # AllReduce's, and at the end


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of a line."""

    def __len__(self) -> int:
        return 5 * 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data(0, number)
        return x[0], y[0]


def scaled_and_fed(rank: int, world_size: int, *, to: str) -> dict[str, Any]:
    """The session's loader feeds ranks unequal batches, and a GradScaler scales their loss. The
    step in which the change is due overflows on one rank.
    """
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    at_work: list[str] = []
    seen: list[int] = []
    with (
        choosing(to),
        offbeat.attach(model, optimizer, "auto", scaler=scaler) as session,
    ):
        for x, y in session.loader(Numbers(), batch_size=2 + rank, seed=3):
            loss = torch.nn.functional.mse_loss(model(x), y)
            if len(at_work) == LOOK and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            at_work.append(session.acting.name)
            seen.append(len(x))
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {
        "at_work": at_work,
        "samples": sum(seen),
        "finite": finite,
        "fingerprint": fingerprint(model),
        "scale": scaler.get_scale(),
    }


def test_five_ranks_change_behind_a_scaler_and_the_sessions_loader(run_ranks: RunRanks) -> None:
    results = run_ranks(scaled_and_fed, 5, to="gtopk")
    assert len({result["fingerprint"] for result in results}) == 1
    assert all(result["finite"] for result in results)
    assert sum(result["samples"] for result in results) == len(Numbers())
    for result in results:
        # Behind the look come the step that was not taken, and one more in which all is sent.
        assert result["at_work"][: LOOK + 2] == ["allreduce"] * (LOOK + 2)
        later = result["at_work"][LOOK + 2 :]
        assert later == ["gtopk"] * len(later) != []
        assert result["scale"] == 2.0**9


ON_ISLANDS = ("gtopk", "localsgd")


def on_islands(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Two replicas, each divided among two ranks."""
    mesh = make_mesh(world_size)
    return [with_islands(mesh, rank, to) for to in ON_ISLANDS]


def with_islands(mesh: DeviceMesh, rank: int, to: str) -> dict[str, Any]:
    model = make_model()
    shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    with (
        choosing(to),
        offbeat.attach(model, optimizer, "auto", mesh=mesh["replicate"]) as session,
    ):
        for step in range(LOOK + 12):
            island_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        at_work = session.acting.name
    return {"at_work": at_work, "model": whole(model).tolist()}


def test_islands_choose_together(run_ranks: RunRanks) -> None:
    for results, to in zip(zip(*run_ranks(on_islands, 4), strict=True), ON_ISLANDS, strict=True):
        assert [result["at_work"] for result in results] == [to] * 4
        for result in results:
            assert result["model"] == results[0]["model"]


def island_dies(rank: int, world_size: int) -> dict[str, Any]:
    model, mesh = make_model(), make_mesh(world_size)
    shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    found: dict[str, Any] = {"blamed": None}
    gc.disable()  # what refers to itself would stay, as it may for long
    try:
        with (
            choosing("gtopk"),
            offbeat.attach(model, optimizer, "auto", mesh=mesh["replicate"]) as session,
        ):
            for step in range(LOOK + 12):
                found["at_work"] = session.acting.name
                if step == LOOK + 6 and rank >= world_size // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                island_loss(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    except PeerError as error:
        found["blamed"] = error.rank
    return found


def test_the_death_of_an_island_is_named_after_a_change(run_ranks: RunRanks) -> None:
    results = run_ranks(island_dies, 4, may_die=[2, 3])
    for result in results[:2]:
        assert result["at_work"] == "gtopk"
        assert result["blamed"] in (1, 2, 3)


END = LOOK + 80


def come_back(rank: int, world_size: int) -> dict[str, Any]:
    """What the newcomer does, which knows neither what is at work nor how far the run is."""
    model = make_net(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with offbeat.attach(model, optimizer, "auto") as session:
        found = {"at_work": session.acting.name, "start": session.start_step}
        train(model, optimizer, 2, range(session.start_step, END))
    return found | {"fingerprint": fingerprint(model)}


def returns(rank: int, world_size: int, *, back: bool, wanted: str) -> dict[str, Any]:
    """Rank 2 is killed while WAGMA is at work, and rank 0 has it started anew."""
    os.environ[SECRET_VARIABLE] = SECRET
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with choosing("wagma", back=back), offbeat.attach(model, optimizer, "auto") as session:
        train(model, optimizer, rank, range(2 * LOOK + 33))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for sign, done in (("without worker 2", LOOK + 45), ("with worker 2 come in", END)):
            while not any(sign in notice for notice in session.notices):
                pause()
            if rank == 0 and done < END:
                returning = {RETURN_VARIABLE: "1", SECRET_VARIABLE: SECRET}
                ask_for(wanted, launcher_environment(2, world_size) | returning)
            train(model, optimizer, rank, range(session.steps_done, done))
    return {"notices": list(session.notices), "fingerprint": fingerprint(model)}


@pytest.mark.parametrize("back", [False, True], ids=["at work once", "at work again"])
def test_a_worker_that_died_comes_back_to_what_goes_on_without_it(
    run_ranks: RunRanks, expect_newcomer: ExpectNewcomer, back: bool
) -> None:
    expected = expect_newcomer(come_back)
    wanted = str(expected.wanted)
    first, second, _ = run_ranks(returns, 3, back=back, wanted=wanted, may_die=[2])
    newcomer = expected.value()
    assert newcomer["at_work"] == "wagma"
    # The others wait for it there; whoever hears first that it has come goes on.
    assert LOOK + 45 <= newcomer["start"] <= END
    assert newcomer["fingerprint"] == first["fingerprint"] == second["fingerprint"]


def resumes_apart(rank: int, world_size: int) -> dict[str, Any]:
    """WAGMA is at work when the state is saved, at another step on each rank; rank 1 had come back,
    and knows of no decision.
    """
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with choosing("wagma"):
        with offbeat.attach(model, optimizer, "auto") as session:
            train(model, optimizer, rank, range(LOOK + 5 + rank))
            state = session.state_dict()
        if rank == 1:
            state["callbacks"]["auto"]["replicated"] |= {"decisions": "[]", "changed_at": -500}
        with offbeat.attach(model, optimizer, "auto") as session:
            session.load_state_dict(state)
            train(model, optimizer, rank, range(LOOK + 20))
            decisions = [(one.step, one.after) for one in session.decisions]
            return {"at_work": session.acting.name, "decisions": decisions}


def test_ranks_that_were_saved_at_different_steps_look_again_together(run_ranks: RunRanks) -> None:
    for result in run_ranks(resumes_apart, 3):
        assert result["at_work"] == "wagma"
        assert result["decisions"] == [[LOOK, "wagma"], [20, "wagma"]]


def returns_to_nobody(rank: int, world_size: int, *, auto: str) -> str:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    returning = {RETURN_VARIABLE: "1", SECRET_VARIABLE: SECRET}
    with patch.dict(os.environ, returning), pytest.raises(OffbeatError) as refused:
        offbeat.attach(model, optimizer, auto)
    return str(refused.value)


def test_a_worker_does_not_come_back_where_nothing_goes_on_without_it(run_ranks: RunRanks) -> None:
    for refusal in run_ranks(returns_to_nobody, 2, auto="auto:exclude=wagma"):
        assert "a run with auto ends with the first worker that does" in refusal


def real_choice(rank: int, world_size: int) -> dict[str, Any]:
    """Nothing is imitated: the ranks measure their links and themselves, and choose."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        patch.object(choice, "LEAST_MARGIN", 0.0),
        offbeat.attach(model, optimizer, offbeat.Auto()) as session,
    ):
        train(model, optimizer, rank, range(choice.FIRST_LOOK + 3))
        return {"at_work": session.acting.name, "notices": list(session.notices)}


def test_it_measures_chooses_and_says_why(run_ranks: RunRanks) -> None:
    results = run_ranks(real_choice, 3)
    assert len({result["at_work"] for result in results}) == 1
    said = [notice for notice in results[0]["notices"] if notice.startswith("auto")]
    assert len(said) == 3
    assert "links carry" in said[0]
    assert all(name in said[1] for name in ("allreduce", "gtopk", "powersgd", "localsgd"))
