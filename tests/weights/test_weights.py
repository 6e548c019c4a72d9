"""Models as vectors, their statistics, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from offbeat.errors import NonFiniteError
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Driver, Finished, Stream, Ticket
from offbeat.transport.operations import AllGather, AllReduceTensor, Operation
from offbeat.weights.model_weights import (
    BufferNames,
    FinalModel,
    ModelWeights,
    Pack,
    Staging,
    average_,
    choose_buffers,
    mean_of_final_models,
)
from offbeat.weights.optimizer_state import OptimizerStates, notice_of_local_states
from offbeat.weights.statistics import merge_statistics, merge_sums_

# Tensors come out of a vector as they went in, and averages are weighted by who has what.


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


class Rehearsed(Driver):
    """One rank of several that run one after the other: notes what it would send or, given the
    outcomes, returns them.
    """

    def __init__(self, rank: int, world_size: int, outcomes: list[object] | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.noted: list[object] = []
        self._outcomes = None if outcomes is None else iter(outcomes)

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case AllReduceTensor(tensor):
                self.noted.append(tensor.clone())
                return Finished(
                    tensor if self._outcomes is None else tensor.copy_(next(self._outcomes))
                )
            case AllGather(payload):
                self.noted.append(payload)
                return Finished([payload] if self._outcomes is None else next(self._outcomes))
        raise AssertionError(operation)

    def close(self) -> None:
        pass


def make_tensors(seed: int) -> list[torch.Tensor]:
    """Of every type, with a scalar, an empty one and one that is laid out unusually."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3), (), (0, 4), (2, 3, 2, 2)]
    tensors = [
        torch.randn(shape, generator=generator).to(dtype) for dtype in DTYPES for shape in shapes
    ]
    return [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]


def test_vectors_are_written_back_to_the_bit() -> None:
    tensors, others = make_tensors(0), make_tensors(1)
    layouts = [tensor.stride() for tensor in others]
    pack = Pack(tensors)
    vectors = pack.vectors(tensors)
    assert {vector.dtype for vector in vectors} == {torch.float32, torch.float64}
    pack.write_(vectors, others)
    torch.testing.assert_close(others, tensors, rtol=0, atol=0)
    assert [tensor.stride() for tensor in others] == layouts


def test_adding_what_is_missing_leads_to_the_other_one() -> None:
    tensors, others = make_tensors(0), make_tensors(1)
    pack = Pack(tensors)
    changes = [b - a for a, b in zip(pack.vectors(tensors), pack.vectors(others), strict=True)]
    pack.add_(changes, tensors)
    for mine, theirs in zip(tensors, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_what_is_laid_out_is_read_and_written_piece_by_piece(step: int) -> None:
    tensors = make_tensors(0)
    staging = Staging(tensors)
    whole = staging.read(tensors)
    mine = staging.laid_out(tensors)
    new = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    into = staging.laid_out(new)
    for begin in range(0, whole.size, step):
        span = slice(begin, min(begin + step, whole.size))
        np.testing.assert_array_equal(mine[span], whole[span])
        into[span] = whole[span]
    torch.testing.assert_close(new, tensors, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Remembers the most elements that an operation returned."""

    num_elements = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_elements = max(self.num_elements, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_is_made_of_a_model_that_is_laid_out(dtype: torch.dtype) -> None:
    tensors = [torch.ones(64, 64, dtype=dtype) for _ in range(4)]
    with Largest() as largest:
        assert Staging(tensors).laid_out(tensors)[100:110].tolist() == [1.0] * 10
    assert largest.num_elements <= 64 * 64


def test_a_long_mean_is_made_of_many_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.weights.model_weights.FRAGMENT_BYTES", 32)
    driver, tensors = Rehearsed(0, 2), [torch.randn(7, 3), torch.randn(5), torch.tensor(2.0)]
    before = [tensor.clone() for tensor in tensors]
    average_(tensors, tensors, driver=driver, stream=Stream(0), weight=1.0)
    assert len(driver.noted) == 5  # three times two rows; a row and the vector; the number
    assert max(message.numel() for message in driver.noted) <= 8 + 3  # type: ignore[attr-defined]
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(0, 2**31 - 1))
def test_the_mean_is_weighted_and_counts_only_those_who_have_something(
    weights: list[float], seed: int
) -> None:
    world_size = len(weights)
    draw = np.random.default_rng(seed)
    has = draw.random((world_size, len(make_tensors(0)))) < 0.7
    ranks = [
        [
            tensor if there else torch.zeros_like(tensor)
            for tensor, there in zip(make_tensors(rank), has[rank], strict=True)
        ]
        for rank in range(world_size)
    ]
    expected = []
    for position, like in enumerate(make_tensors(0)):
        owners = [rank for rank in range(world_size) if has[rank, position]]
        wide = torch.complex128 if like.is_complex() else torch.float64
        total = sum(
            (weights[r] * ranks[r][position].to(wide) for r in owners),
            torch.zeros(like.shape, dtype=wide),
        )
        expected.append(total / sum(weights[r] for r in owners) if owners else None)

    def run(rank: int, outcomes: list[object] | None = None) -> list[object]:
        driver = Rehearsed(rank, world_size, outcomes)
        average_(
            [tensor.clone() for tensor in ranks[rank]] if outcomes is None else ranks[rank],
            make_tensors(0),
            driver=driver,
            stream=Stream(0),
            weight=weights[rank],
            absent=set(np.flatnonzero(~has[rank])),
        )
        return driver.noted

    noted = [run(rank) for rank in range(world_size)]
    sums = [torch.stack(messages).sum(dim=0) for messages in zip(*noted, strict=True)]
    for rank in range(world_size):
        run(rank, sums)
        for mine, mean, like in zip(ranks[rank], expected, make_tensors(0), strict=True):
            # A rank without one is given the mean; where no rank has one, nothing happens.
            if mean is None:
                assert not mine.any()
            else:
                tolerance = 1e-2 if like.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(
                    mine, mean.to(like.dtype), rtol=tolerance, atol=tolerance
                )


def counted(*buffers: torch.Tensor) -> ModelWeights:
    by_name = {str(number): buffer for number, buffer in enumerate(buffers)}
    return ModelWeights(
        parameters={}, buffers=lambda: by_name, chosen=BufferNames(counters=tuple(by_name))
    )


def average_counters(ranks: list[ModelWeights]) -> None:
    noted = [weights.own_counters().tobytes() for weights in ranks]
    for rank, weights in enumerate(ranks):
        weights.average_(Rehearsed(rank, len(ranks), [noted]), Stream(0), weight=1.0)


def test_counters_become_the_largest() -> None:
    ranks = [
        counted(torch.tensor(3), torch.tensor([[1], [9]], dtype=torch.int32)),
        counted(torch.tensor(5), torch.tensor([[2], [7]], dtype=torch.int32)),
    ]
    average_counters(ranks)
    for weights in ranks:
        assert [buffer.tolist() for buffer in weights.buffers().values()] == [5, [[2], [9]]]
        assert [b.dtype for b in weights.buffers().values()] == [torch.int64, torch.int32]


def test_counters_are_never_more_than_any_rank_has_counted() -> None:
    """Two ranks take turns in making more steps than the other."""
    buffers = [torch.tensor(0), torch.tensor(0)]
    ranks = [counted(buffer) for buffer in buffers]
    steps = [0, 0]
    for merge in range(6):
        for rank in range(2):
            for _ in range(3 if (rank + merge) % 2 else 1):
                buffers[rank] += 1
                steps[rank] += 1
        if merge == 3:  # a resumption, with the saved buffers
            states = [weights.counter_state() for weights in ranks]
            ranks = [counted(buffer) for buffer in buffers]
            for weights, state in zip(ranks, states, strict=True):
                weights.load_counter_state(state)
        average_counters(ranks)
        assert [buffer.item() for buffer in buffers] == [max(steps)] * 2


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_sent(value: float) -> None:
    driver = Rehearsed(1, 2)
    tensor = torch.tensor([1.0, value])
    with pytest.raises(NonFiniteError, match="rank 1"):
        average_([tensor], [tensor], driver=driver, stream=Stream(0), weight=1.0)
    assert driver.noted == []


def test_only_buffers_that_training_changes_are_chosen() -> None:
    buffers = {
        "mean": torch.zeros(2),
        "half": torch.zeros(2, dtype=torch.float16),
        "mask": torch.tensor([0.0, float("-inf")]),
        "seen": torch.tensor(3),
        "flag": torch.tensor(True),
        "rotation": torch.zeros(1, dtype=torch.complex64),
    }
    assert choose_buffers(buffers) == (("mean", "half"), ("seen",))


def final(values: list[float], *, weight: float = 1.0, counter: int = 0) -> FinalModel:
    return FinalModel(
        tensors=[torch.tensor(values)],
        counters=np.array([counter]),
        weight=weight,
    )


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_mean_follows_weights_and_is_the_same_on_every_rank(world_size: int) -> None:
    models = [
        final([rank, -rank, 1.0], weight=rank + 1.0, counter=rank) for rank in range(world_size)
    ]
    means = VirtualCluster(world_size, seed=1).run(
        [mean_of_final_models(rank, world_size, model) for rank, model in enumerate(models)]
    )
    weights = np.arange(1, world_size + 1)
    expected = np.average([model.tensors[0] for model in models], axis=0, weights=weights)
    for mean in means:
        np.testing.assert_allclose(mean.tensors[0], expected, rtol=1e-6)
        assert torch.equal(mean.tensors[0], means[0].tensors[0])
        assert mean.counters.tolist() == [world_size - 1]


def test_equal_models_stay_what_they_are_to_the_bit() -> None:
    # A seventh of the sum of seven of these is another number.
    models = [final([0.1, 1 / 3, 1e-30]) for _ in range(7)]
    means = VirtualCluster(7, seed=1).run(
        [mean_of_final_models(rank, 7, model) for rank, model in enumerate(models)]
    )
    assert all(mean is model for mean, model in zip(means, models, strict=True))


def test_every_rank_refuses_the_mean_with_a_model_that_is_not_finite() -> None:
    models = [final([1.0]), final([float("nan")]), final([2.0])]
    refused = 0

    def refusing(rank: int) -> Generator[Any, Any, None]:
        nonlocal refused
        try:
            yield from mean_of_final_models(rank, 3, models[rank])
        except NonFiniteError as error:
            refused += "rank 1 at the end" in str(error)

    VirtualCluster(3, seed=1).run([refusing(rank) for rank in range(3)])
    assert refused == 3


# The optimizer's state where ranks' optimizers hold different parameters.


def test_a_parameter_that_the_optimizer_does_not_step_is_given_no_state() -> None:
    mine, only_peers = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    tensors = [*mine.parameters(), *only_peers.parameters()]
    everywhere = torch.optim.Adam(tensors)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    everywhere.step()
    peer = OptimizerStates(everywhere, tensors)
    present = peer.presence()
    merged = {name: peer.tensors(name) for name in present}
    optimizer = torch.optim.Adam(mine.parameters())
    OptimizerStates(optimizer, tensors).take(merged, present)
    assert set(optimizer.state) == set(mine.parameters())
    assert set(optimizer.state_dict()["state"]) == {0, 1}


class Quantised(torch.optim.SGD):
    """Keeps codes beside its momentum, and how many steps it has taken."""

    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                codes = torch.zeros(3, dtype=torch.uint8)
                self.state[parameter] |= {"codes": codes, "num_steps": 1}


def stepped(optimizer: torch.optim.Optimizer, net: torch.nn.Module) -> torch.optim.Optimizer:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_states_that_stay_local_are_named() -> None:
    net = torch.nn.Linear(3, 2)
    parameters = dict(net.named_parameters())
    quantised = stepped(Quantised(net.parameters(), momentum=0.9), net)
    remark = notice_of_local_states(quantised, parameters)
    assert remark is not None
    assert remark.startswith("of Quantised's state 'codes', 'num_steps' stay each rank's own")
    for whole in (
        torch.optim.SGD(net.parameters(), momentum=0.9),
        torch.optim.SGD(net.parameters()),
        torch.optim.Adafactor(net.parameters()),
        torch.optim.Muon([net.weight]),
    ):
        assert notice_of_local_states(stepped(whole, net), parameters) is None


def test_a_rank_that_had_no_state_is_given_adafactors_of_its_shapes() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 5), torch.nn.Linear(4, 1))
    tensors = list(net.parameters())
    everywhere = stepped(torch.optim.Adafactor(tensors), net)
    peer, nobody = OptimizerStates(everywhere, tensors), torch.optim.Adafactor(tensors)
    present = peer.presence()
    newcomer = OptimizerStates(nobody, tensors)
    for name in present:
        assert [state.shape for state in newcomer.zeros(name)] == [
            state.shape for state in peer.tensors(name)
        ]
    newcomer.take({name: peer.tensors(name) for name in present}, present)
    torch.testing.assert_close(nobody.state_dict()["state"], everywhere.state_dict()["state"])


# Statistics take plain means, so that they never leave the range of what ranks have held.


statistic = st.floats(0, 1e6, width=32)


@given(statistic, statistic, statistic)
def test_a_merged_statistic_lies_between_what_the_two_sides_hold(
    mine: float, theirs: float, before: float
) -> None:
    arrays = [np.array([value], np.float32) for value in (mine, theirs, before)]
    merged = merge_statistics(*arrays)
    assert merged.dtype == np.float32
    assert arrays[0].min(initial=theirs) <= merged[0] <= arrays[0].max(initial=theirs)
    tensors = [torch.tensor([value]) for value in (mine, theirs, before)]
    assert merge_statistics(*tensors).tolist() == merged.tolist()


@given(statistic, statistic)
def test_where_one_side_changed_nothing_the_other_ones_value_holds(old: float, new: float) -> None:
    before, changed = np.array([old]), np.array([new])
    assert merge_statistics(before, changed, before) == changed
    assert merge_statistics(changed, before, before) == changed


def test_the_statistics_of_a_vector_are_found_behind_the_parameters_of_each_type() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.BatchNorm1d(3))
    weights = ModelWeights(
        parameters=dict(net.named_parameters()),
        buffers=lambda: dict(net.named_buffers()),
        chosen=BufferNames(("1.running_mean", "1.running_var"), ("1.num_batches_tracked",)),
    )
    staging = Staging(weights.tensors())
    net[1].running_mean.fill_(7)
    net[1].running_var.fill_(8)
    vector = staging.read(weights.tensors())
    (span,) = staging.spans(weights.positions_of_statistics())
    assert vector[span].tolist() == [7] * 3 + [8] * 3


@given(
    st.lists(st.tuples(*[st.sampled_from([-0.0, 0.0, 0.1, 1.0, 1e-3, 7.0])] * 3), max_size=5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_a_sum_keeps_what_both_sides_have_added(
    cases: list[tuple[float, float, float]], dtype: torch.dtype, is_strided: bool
) -> None:
    """One by one, in any memory layout; to the bit where only one side has changed it."""
    mine, before = (
        torch.tensor([case[place] for case in cases], dtype=dtype).reshape(-1) for place in (0, 2)
    )
    wide = torch.promote_types(dtype, torch.float32)
    theirs = torch.tensor([case[1] for case in cases], dtype=wide).reshape(-1)
    merged = torch.stack([mine, mine], dim=1)[:, 0] if is_strided else mine.clone()
    merge_sums_(merged, theirs, before)
    for now, one, two, past in zip(merged, mine, theirs, before, strict=True):
        if one == past:
            expected = two
        elif two == past:
            expected = one
        else:
            expected = two + (one.to(wide) - past.to(wide))
        assert now == expected.to(dtype)
        assert now.signbit() == expected.signbit()
