"""Error feedback of one bucket: applied + owed == gradients, staged until committed; what a
reduction in few bits owes; and how long entries waited before they were sent.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from conformance_support.nets import Net, train
from offbeat.codec import cuda, selectors
from offbeat.codec.arithmetic import S, SparseArithmetic
from offbeat.codec.few_bits import SignValues
from offbeat.codec.selectors import THRESHOLD
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import SELECTORS, TopKCodec
from offbeat.collectives.base import Exchanged
from offbeat.gradients.buckets import make_buckets
from offbeat.gradients.coded_reduction import CodedReduction
from offbeat.gradients.reductions import (
    EntryAges,
    ExchangePlan,
    SparseReduction,
    WeightedGradient,
    wait_for,
)
from offbeat.transport.driver import Stream
from offbeat.transport.operations import Collective, Now
from offbeat.transport.single_rank import SingleRank


def half_of_it(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    """Drops half of the entries, which are owed."""
    yield Now()
    kept, dropped = wire.keep_largest(mine, k // 2)
    return Exchanged(kept=kept, owed=dropped, tally=tally)


def all_of_it(
    rank: int, world_size: int, mine: S, tally: Tally, k: int, wire: SparseArithmetic[S]
) -> Collective[Exchanged[S]]:
    yield Now()
    return Exchanged(kept=mine, owed=wire.empty(), tally=tally)


class Owing:
    """The reduction of one bucket, which a rank exchanges with nobody."""

    def __init__(
        self, num_elements: int, dtype: torch.dtype = torch.float32, selection: str = "exact"
    ) -> None:
        parameter = torch.nn.Parameter(torch.zeros(num_elements, dtype=dtype))
        (self.bucket,) = make_buckets({"weight": parameter}, cap_bytes=None)
        self.plan = ExchangePlan(k=1, collective=None)
        self.reduction = SparseReduction(
            self.bucket,
            SingleRank(),
            Stream(1),
            codec=TopKCodec(selector=SELECTORS[selection]),
            plan=lambda: self.plan,
        )

    @property
    def residual(self) -> torch.Tensor:
        return self.reduction.residual

    def state(self) -> dict[str, object]:
        return {**self.reduction.local_state()}

    def stage(
        self,
        gradient: torch.Tensor,
        k: int | None,
        *,
        drops: bool = False,
        exact: torch.Tensor | None = None,
    ) -> Tally:
        """Launch, and wait. `k`: None: everything is sent. `exact`: what a transform has made of a
        gradient in half precision.
        """
        collective = None if k is None else half_of_it if drops else all_of_it
        self.plan = ExchangePlan(k=k or 1, collective=collective)
        self.bucket.flat.copy_(gradient)
        tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, np.bool_))
        mine = self.bucket.flat if exact is None else exact
        self.reduction.launch(WeightedGradient(mine, tally, 1.0, grad_scale=1.0))
        return wait_for([self.reduction])[0]

    def step(self, gradient: torch.Tensor, k: int | None, *, drops: bool = False) -> torch.Tensor:
        """What is applied in a step that is good."""
        assert self.stage(gradient, k, drops=drops).good
        self.bucket.flat = self.reduction.commit()
        return self.bucket.flat.clone()


def integers(num_elements: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every dtype used here."""
    return torch.randint(-9, 10, (num_elements,), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


@pytest.fixture(params=["kernels", "torch"])
def either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(selectors, "exact", cuda.exact)
        monkeypatch.setattr(selectors, "reuse", cuda.reuse)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selection", SELECTORS)
def test_over_steps_nothing_is_lost(dtype: torch.dtype, selection: str) -> None:
    n, k = 6000, 60
    owing = Owing(n, dtype, selection)
    gradients, applied = torch.zeros(n), torch.zeros(n)
    for step in range(8):
        gradient = integers(n, step, dtype)
        gradients += gradient
        mean = owing.step(gradient, k, drops=True)
        assert mean.dtype == dtype
        applied += mean
    assert torch.equal(applied + owing.residual, gradients)


@given(st.lists(st.sampled_from(["commit", "discard", "all"]), max_size=8))
def test_discarded_steps_leave_no_trace(steps: list[str]) -> None:
    n = 50
    tried, sure = Owing(n), Owing(n)
    for step, what in enumerate(steps):
        gradient, k = integers(n, step), None if what == "all" else 5
        if what == "discard":
            tried.stage(gradient, k)
            tried.reduction.discard()
        else:
            assert torch.equal(tried.step(gradient, k), sure.step(gradient, k))
        assert torch.equal(tried.residual, sure.residual)


def test_buffers_are_traded_not_copied() -> None:
    owing = Owing(100)
    residual, flat = owing.residual.data_ptr(), owing.bucket.flat.data_ptr()
    owing.step(integers(100, 0), 3)
    assert owing.bucket.flat.data_ptr() == residual
    assert owing.residual.data_ptr() == flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sending_everything_pays_what_was_owed(dtype: torch.dtype) -> None:
    n = 300
    owing, first, second = Owing(n, dtype), integers(n, 0, dtype) / 3, integers(n, 1, dtype) / 7
    total = first.float() + second.float()
    sent = owing.step(first, 10).float()
    sent += owing.step(second, None)
    torch.testing.assert_close(sent + owing.residual, total, rtol=0, atol=1e-6)
    if dtype == torch.float32:
        assert not owing.residual.any()


def test_half_precision_is_owed_from_what_was_given_in_float32() -> None:
    n, k = 50, 5
    owing, exact = Owing(n, torch.bfloat16), integers(n, 0) / 3
    flat = owing.bucket.flat.data_ptr()
    owing.stage(exact.to(torch.bfloat16), k, exact=exact)
    mean = owing.reduction.commit()
    assert mean.data_ptr() == flat
    assert torch.equal(mean + owing.residual, exact)


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    n = 5000
    owing = Owing(n, dtype, "reuse")
    owing.step(integers(n, 0, dtype), 50)
    residual, state = owing.residual.clone(), owing.state()
    for k in (None, 50):
        gradient = integers(n, 1, dtype)
        gradient[1234] = float("nan")
        assert not owing.stage(gradient, k).good
        owing.reduction.discard()
        assert torch.equal(owing.residual, residual)
        assert owing.state() == state


def test_reuse_resumes_from_its_state() -> None:
    n, k = 6000, 60
    first, resumed = Owing(n, selection="reuse"), Owing(n, selection="reuse")

    def step(owing: Owing, seed: int) -> torch.Tensor:
        return owing.step(torch.randn(n, generator=torch.Generator().manual_seed(seed)), k)

    for seed in range(4):
        step(first, seed)
    resumed.reduction.load(first.reduction.additive_state(), first.reduction.local_state())
    for seed in range(4, 8):
        assert torch.equal(step(resumed, seed), step(first, seed))


def test_sending_everything_keeps_the_threshold() -> None:
    owing = Owing(100, selection="reuse")
    owing.reduction.load(owing.reduction.additive_state(), {f"{THRESHOLD}/weight": 2.5})
    owing.step(integers(100, 0), None)
    assert owing.state()[f"{THRESHOLD}/weight"] == 2.5


@pytest.mark.parametrize("selection", SELECTORS)
def test_an_empty_bucket_is_no_trouble(selection: str) -> None:
    owing = Owing(0, selection=selection)
    for k in (1, None):
        assert owing.step(torch.zeros(0), k).numel() == 0


def test_what_is_owed_to_a_frozen_parameter_does_not_fade() -> None:
    named = {name: torch.nn.Parameter(torch.zeros(8)) for name in ("frozen", "trained")}
    (bucket,) = make_buckets(named, cap_bytes=None)
    reduction = CodedReduction(bucket, SignValues(), SingleRank(), Stream(0), decay=0.5)
    draw = torch.Generator().manual_seed(1)

    def exchange() -> torch.Tensor:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            view.zero_()
            if parameter.requires_grad:
                view.normal_(generator=draw)
        used = np.array([parameter.requires_grad for parameter in bucket.parameters])
        tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=used)
        reduction.launch(WeightedGradient(bucket.flat, tally, 1.0, grad_scale=1.0))
        wait_for([reduction])
        bucket.flat = reduction.commit()
        return reduction.additive_state()["residual/frozen"].clone()

    exchange()
    before = exchange()
    assert before.any()
    named["frozen"].requires_grad_(False)
    assert torch.equal(exchange(), before)


def test_entries_that_take_turns_wait_for_a_round() -> None:
    ages, everything = EntryAges(1000, 100), np.arange(1000)
    for exchange in range(200):
        ages.after_exchange(everything[everything % 20 == exchange % 20])
    # The first round of each counts from the beginning: 10.5 on average.
    assert ages.num_sent == pytest.approx(100 * 10, rel=0.05)
    assert ages.total_age / ages.num_sent == pytest.approx((9 * 20 + 10.5) / 10, rel=0.05)


def test_where_all_is_sent_every_entry_is_of_this_step() -> None:
    ages = EntryAges(500)
    for _ in range(7):
        ages.after_exchange(np.arange(500))
    assert (ages.num_sent, ages.total_age) == (3500, 3500)


def test_dense_exchanges_do_not_count() -> None:
    """What is sent afterwards has waited since the last one."""
    ages, first, second = EntryAges(100), np.arange(50), np.arange(50, 100)
    for indices in (first, None, None, first, second):
        ages.after_exchange(indices)
    assert (ages.num_sent, ages.total_age) == (150, 50 * 1 + 50 * 1 + 50 * 2)


def test_nothing_is_no_trouble() -> None:
    empty, waiting = EntryAges(0), EntryAges(50)
    for ages in (empty, waiting):
        ages.after_exchange(np.empty(0, dtype=np.int64))
    empty.after_exchange(None)
    assert (empty.num_sent, waiting.num_sent) == (0, 0)
    waiting.after_exchange(np.array([0, 49]))
    assert (waiting.num_sent, waiting.total_age) == (2, 4)


def test_a_session_says_how_long_entries_wait() -> None:
    ages = {}
    for name, strategy in {
        "whole": offbeat.AllReduce(),
        "dense": offbeat.GTopK(collective="dense"),
        "sparse": offbeat.GTopK(density=0.1, collective="reduce_scatter"),
        "after dense ones": offbeat.GTopK(
            density=0.1, collective="reduce_scatter", warmup=((1.0, 5),)
        ),
    }.items():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, range(20))
            ages[name] = session.stats.mean_entry_age
    assert (ages.pop("whole"), ages.pop("dense")) == (None, None)
    for name, age in ages.items():
        assert age is not None, name
        assert 2 < age < 20, name
