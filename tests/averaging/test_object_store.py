"""Averages through files: the models are those of LocalSGD on ranks that are connected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import offbeat
from offbeat.averaging.object_store import ObjectStore
from offbeat.codec.tensor_bytes import to_bytes
from offbeat.errors import ConfigError, MismatchError, NonFiniteError, PeerTimeoutError, WireError
from offbeat.transport.single_rank import SingleRank
from thread_support.nets import make_model, parameters_of, step_of, trained
from thread_support.world import session_on

NUM_WORKERS, PERIOD, NUM_STEPS = 3, 2, 7
NESTEROV = offbeat.Outer(lr=0.7, momentum=0.8)
T = TypeVar("T")


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def strategy_of(path: object, rank: int, **options: Any) -> offbeat.LocalSGD:
    store = ObjectStore(str(path), rank=rank, world_size=NUM_WORKERS, **options)
    return offbeat.LocalSGD(period=PERIOD, outer=NESTEROV, exchange=store)


def on_all(job: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        return list(pool.map(job, range(NUM_WORKERS)))


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "directory" else f"memory:/{tmp_path}"


def test_models_are_those_of_connected_ranks(place: str) -> None:
    def job(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        if rank:
            model[0].weight.detach().zero_()  # all begin with those of worker 0
        optimizer = sgd(model)
        with session_on(SingleRank(), model, optimizer, strategy_of(place, rank)):
            for step in range(NUM_STEPS):
                step_of(model, optimizer, rank, step)
            before = parameters_of(model, optimizer)
        return before, parameters_of(model, optimizer)

    found = on_all(job)
    connected = offbeat.LocalSGD(period=PERIOD, outer=NESTEROV)
    expected = trained(NUM_WORKERS, connected, NUM_STEPS, optimizer_of=sgd, held=parameters_of)
    torch.testing.assert_close([before for before, _ in found], expected, rtol=1e-9, atol=1e-9)
    mean = [torch.stack(each).mean(0) for each in zip(*expected, strict=True)]
    for _, after in found:
        torch.testing.assert_close(after, mean, rtol=1e-9, atol=1e-9)
        assert all(map(torch.equal, after, found[0][1]))


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    def job(rank: int) -> torch.Tensor:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        with session_on(SingleRank(), model, sgd(model), strategy_of(tmp_path, rank)):
            model.weight.detach().fill_(1.0078125 if rank else 1.0)  # neighbours
        return model.weight.detach()

    assert [float(weight) for weight in on_all(job)] == [1.0078125] * NUM_WORKERS


def test_complex_weights_of_any_width_are_averaged(tmp_path: Path) -> None:
    def job(rank: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128))
        model = torch.nn.ParameterDict({"weight": weight})
        with session_on(SingleRank(), model, sgd(model), strategy_of(tmp_path, rank)):
            weight.detach().fill_(complex(rank, 1))
        return weight.detach()

    assert [weight.tolist() for weight in on_all(job)] == [[1 + 1j] * 2] * NUM_WORKERS


def test_no_average_is_left_but_the_last(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model = make_model()
        optimizer = sgd(model)
        with session_on(SingleRank(), model, optimizer, strategy_of(tmp_path, rank)):
            for step in range(NUM_STEPS):
                step_of(model, optimizer, rank, step)

    on_all(job)
    ends = {f"mean-00000001-{rank}.safetensors" for rank in range(NUM_WORKERS)}
    assert {path.name for path in tmp_path.iterdir()} == ends | {"start-0.safetensors"}


@pytest.mark.parametrize("stop", [4, 5])
def test_a_resumed_run_goes_on_in_another_place(tmp_path: Path, stop: int) -> None:
    def job(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def run(path: str, steps: range, saved: Any = None) -> tuple[list[torch.Tensor], Any]:
            model = make_model()
            optimizer, kept = sgd(model), None
            session = session_on(SingleRank(), model, optimizer, strategy_of(tmp_path / path, rank))
            with session:
                if saved is not None:
                    model.load_state_dict(saved[0])
                    session.load_state_dict(saved[1])
                for step in steps:
                    if step == stop:
                        kept = copy.deepcopy((model.state_dict(), session.state_dict()))
                    step_of(model, optimizer, rank, step)
            return parameters_of(model, optimizer), kept

        whole, saved = run("whole", range(NUM_STEPS))
        return whole, run("resumed", range(stop, NUM_STEPS), saved)[0]

    for whole, resumed in on_all(job):
        assert all(map(torch.equal, whole, resumed))


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    model = make_model()
    optimizer = sgd(model)
    strategy = strategy_of(tmp_path, 0, patience_s=0.05)

    def train() -> None:
        with session_on(SingleRank(), model, optimizer, strategy):
            for step in range(PERIOD):
                step_of(model, optimizer, 0, step)

    with pytest.raises(PeerTimeoutError, match="00000000-1.safetensors was not there"):
        train()


def test_all_learn_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model = make_model()
        optimizer = sgd(model)
        strategy = strategy_of(tmp_path, rank, patience_s=20)
        with session_on(SingleRank(), model, optimizer, strategy):
            step_of(model, optimizer, rank, 0)
            if rank == 1:
                model[0].weight.detach().fill_(torch.inf)
            step_of(model, optimizer, rank, 1)

    def refused(rank: int) -> None:
        with pytest.raises(NonFiniteError, match="rank 1 are no longer finite"):
            job(rank)

    on_all(refused)


def test_a_place_that_was_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "start-0.safetensors").write_bytes(b"")
    model = make_model()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="holds files of another run"):
        session_on(SingleRank(), model, optimizer, strategy_of(tmp_path, 0))


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"12345678", WireError, "start-0.safetensors is damaged"),
        (to_bytes({"0": torch.zeros(3)}), MismatchError, "of another model"),
    ],
)
def test_a_file_that_fits_nothing_is_refused(
    tmp_path: Path, content: bytes, error: type[Exception], says: str
) -> None:
    (tmp_path / "start-0.safetensors").write_bytes(content)
    model = make_model()
    optimizer = sgd(model)
    with pytest.raises(error, match=says):
        session_on(SingleRank(), model, optimizer, strategy_of(tmp_path, 1))


def test_workers_that_part_are_told(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        model = make_model()
        optimizer = sgd(model)
        with session_on(SingleRank(), model, optimizer, strategy_of(tmp_path, rank)) as session:
            step_of(model, optimizer, rank, 0)
            if rank == 2:  # as one that was resumed from another checkpoint
                state = session.state_dict()
                state["callbacks"]["object_store"]["replicated"]["anchor/0.bias"] += 1
                session.load_state_dict(state)
            step_of(model, optimizer, rank, 1)

    def job(rank: int) -> str:
        with pytest.raises(MismatchError, match="from other weights") as raised:
            train(rank)
        return str(raised.value)

    assert all("worker 2" in told for told in on_all(job))


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank of an ObjectStore"):
        ObjectStore(str(tmp_path), rank=3, world_size=3)
    with pytest.raises(ConfigError, match="patience_s"):
        ObjectStore(str(tmp_path), rank=0, world_size=3, patience_s=0)
    store = ObjectStore(str(tmp_path), rank=0, world_size=3)
    with pytest.raises(ConfigError, match="codec"):
        offbeat.LocalSGD(exchange=store, codec="sign")
    with pytest.raises(ConfigError, match="start_step"):
        offbeat.LocalSGD(exchange=store, start_step=3)
    with pytest.raises(ConfigError, match="without torchrun"):
        offbeat.LocalSGD(exchange=store).check_world(2)


def test_all_begin_with_what_is_not_trained_of_worker_0_too(place: str) -> None:
    """The largest entries of two permutations are none."""

    def job(rank: int) -> list[torch.Tensor]:
        model = make_model()
        model[0].requires_grad_(False)
        model[0].weight.detach().fill_(rank + 1)
        model.register_buffer("order", torch.arange(4).roll(rank))
        model.register_buffer("kept", torch.arange(4) == rank)
        optimizer = sgd(model)
        with session_on(SingleRank(), model, optimizer, strategy_of(place, rank)):
            for step in range(NUM_STEPS):
                step_of(model, optimizer, rank, step)
        return [model[0].weight.detach(), *(each for _, each in model.named_buffers())]

    first, *others = on_all(job)
    assert float(first[0][0, 0]) == 1.0
    assert [each.tolist() for each in first[1:]] == [[0, 1, 2, 3], [True, False, False, False]]
    for other in others:
        assert all(map(torch.equal, first, other))
