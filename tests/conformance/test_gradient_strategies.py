"""What every strategy that exchanges gradients must do, checked in a world of one, where it can be
compared with a plain loop.

A new strategy joins by a row in `STRATEGIES`.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import offbeat
from conformance_support.lent import lent, lent_from
from conformance_support.nets import Net, assert_same, loss_of, train
from kfac_support.plans import FactorsOfEveryone, Unfused
from offbeat import Session
from offbeat.codec.selectors import THRESHOLD
from offbeat.codec.topk_codec import SELECTORS
from offbeat.errors import CheckpointError, ConfigError, NonFiniteError, UnsupportedError
from offbeat.strategies.gradient import GradientStrategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.sparse_gradient import SparseGradientStrategy

AnyStrategy = GradientStrategy | KFACStrategy

_STRATEGIES: dict[str, GradientStrategy] = {
    "allreduce": offbeat.AllReduce(),
    "allreduce in small buckets": lent(offbeat.AllReduce(), bucket_mib=1e-4),
    "dear": offbeat.DeAR(),
    "dear in small buckets": lent(offbeat.DeAR(), bucket_mib=1e-4),
    "allreduce in 8 bits": offbeat.AllReduce(codec="linear8"),
    "allreduce by signs, in small buckets": lent(offbeat.AllReduce(codec="sign"), bucket_mib=1e-4),
    "powersgd": offbeat.PowerSGD(rank=1),
    "powersgd in small buckets": lent(offbeat.PowerSGD(rank=1), bucket_mib=1e-4),
    "demo": offbeat.DeMo(density=0.2, decay=1.0, sign=False),
    "qgenx": offbeat.QGenX(codec="linear4"),
    "topk": offbeat.TopK(density=0.2),
    "topk in small buckets": lent(offbeat.TopK(density=0.2), bucket_mib=1e-4),
    "gtopk by reduce-scatter": offbeat.GTopK(density=0.2, collective="reduce_scatter"),
    "gtopk by all-gather": offbeat.GTopK(density=0.2, collective="all_gather", codec="bfloat16"),
    "gtopk by all-gather, the largest": offbeat.GTopK(density=0.2, collective="global"),
    "gtopk by tree": offbeat.GTopK(density=0.2, collective="tree"),
    "gtopk as published": offbeat.GTopK(density=0.2, collective="paper"),
    "gtopk dense": offbeat.GTopK(density=0.2, collective="dense"),
    "gtopk auto": offbeat.GTopK(density=0.2),
    "gtopk as it comes": offbeat.GTopK(),
    **{
        f"gtopk with selector {name}": offbeat.GTopK(
            density=0.2, collective="reduce_scatter", codec=name
        )
        for name in SELECTORS
    },
    "gtopk with a norm that no gradient has, in small buckets": lent(
        offbeat.GTopK(density=0.2, collective="reduce_scatter", clip_norm=1e9), bucket_mib=1e-4
    ),
    "gtopk with warm-up": offbeat.GTopK(
        density=0.1, collective="reduce_scatter", warmup=((0.25, 1), (0.15, 2))
    ),
    "ef21": offbeat.EF21(density=0.2),
    "ef21 with momentum, in small buckets": lent(
        offbeat.EF21(density=0.2, codec="reuse+float8", clip_norm=1e9), bucket_mib=1e-4
    ),
}


def lossless_form(strategy: GradientStrategy) -> GradientStrategy:
    """The strategy where everything travels, and nothing is rounded."""
    if isinstance(strategy, SparseGradientStrategy):
        return replace(strategy, density=1.0, codec=None, warmup=None)
    if isinstance(strategy, offbeat.EF21):
        return replace(strategy, density=1.0, codec="float32")
    if isinstance(strategy, offbeat.AllReduce) and strategy.codec is not None:
        return replace(strategy, codec="float32")
    if isinstance(strategy, offbeat.DeMo):
        return replace(strategy, density=1.0, sign=False)
    if isinstance(strategy, offbeat.PowerSGD):
        return replace(strategy, rank=1000)  # of which every parameter is so small that it is whole
    return strategy


_CHECKED = lent(offbeat.AllReduce(), replica_check_interval=1)
_KFAC: dict[str, KFACStrategy] = {
    "dkfac": offbeat.DKFAC(exchange=_CHECKED, inverse_interval=1),
    "mpdkfac": offbeat.MPDKFAC(exchange=_CHECKED, inverse_interval=2),
    "spdkfac": offbeat.SPDKFAC(exchange=_CHECKED, factor_interval=2, inverse_interval=4),
    "spdkfac without fusion, in small buckets": Unfused(
        exchange=lent(_CHECKED, bucket_mib=1e-4), inverse_interval=1
    ),
    "spdkfac with gtopk": offbeat.SPDKFAC(
        exchange=lent(
            offbeat.GTopK(density=0.2, collective="reduce_scatter"), replica_check_interval=1
        ),
        kl_clip=None,
    ),
    "spdkfac with powersgd": offbeat.SPDKFAC(
        exchange=lent(offbeat.PowerSGD(rank=1), bucket_mib=1e-4, replica_check_interval=1),
        kl_clip=None,
    ),
    "spdkfac in 4 bits": offbeat.SPDKFAC(exchange=replace(_CHECKED, codec="linear4")),
    "dpkfac": offbeat.DPKFAC(exchange=_CHECKED),
    "dpkfac with everyone's factors": FactorsOfEveryone(exchange=_CHECKED, inverse_interval=2),
}
GRADIENTS_ONLY = {
    name: lent(strategy, replica_check_interval=1) for name, strategy in _STRATEGIES.items()
}
STRATEGIES: dict[str, AnyStrategy] = {**GRADIENTS_ONLY, **_KFAC}
LOSSLESS: dict[str, GradientStrategy] = {}
for _name, _strategy in GRADIENTS_ONLY.items():
    if isinstance(_strategy, offbeat.QGenX):
        continue  # its steps are others than those of plain training
    if (_form := lossless_form(_strategy)) not in LOSSLESS.values():
        LOSSLESS[_name] = _form
"""Each form once: those that differ in a selector or in warm-up alone have one."""

LOSSLESS_KINDS = [
    *{lent_from(strategy): name for name, strategy in reversed(LOSSLESS.items())}.values()
]
"""One of each strategy, for what a session does around exchanges."""


NEVER_STEPPED = pytest.mark.filterwarnings("ignore:the attached optimizer was not stepped")

OF_EACH_KIND = (
    "allreduce",
    "allreduce by signs, in small buckets",
    "dear in small buckets",
    "powersgd in small buckets",
    "demo",
    "qgenx",
    "topk in small buckets",
    "gtopk as it comes",
    "gtopk by tree",
    "gtopk with warm-up",
    "ef21 with momentum, in small buckets",
    "dkfac",
    "mpdkfac",
    "spdkfac with gtopk",
    "dpkfac",
)
"""For what a session does around exchanges, which a selector, a collective or a number does not
change.
"""


@pytest.fixture(params=OF_EACH_KIND)
def kind(request: pytest.FixtureRequest) -> AnyStrategy:
    return STRATEGIES[request.param]


def test_there_is_one_of_each_kind() -> None:
    known = {lent_from(strategy) for strategy in STRATEGIES.values()}
    known -= {Unfused, FactorsOfEveryone}
    assert {lent_from(STRATEGIES[name]) for name in OF_EACH_KIND} == known


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> AnyStrategy:
    return STRATEGIES[request.param]


@pytest.fixture(params=LOSSLESS)
def lossless(request: pytest.FixtureRequest) -> GradientStrategy:
    return LOSSLESS[request.param]


@pytest.fixture(params=LOSSLESS_KINDS)
def lossless_kind(request: pytest.FixtureRequest) -> GradientStrategy:
    return LOSSLESS[request.param]


@pytest.fixture
def attached() -> Iterator[Callable[..., tuple[Net, torch.optim.Optimizer, Session]]]:
    sessions: list[Session] = []

    def make(
        strategy: AnyStrategy, dtype: torch.dtype = torch.float32, **kwargs: object
    ) -> tuple[Net, torch.optim.Optimizer, Session]:
        net = Net(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        sessions.append(offbeat.attach(net, optimizer, strategy, **kwargs))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


def test_density_1_alone_is_the_plain_loop(lossless: GradientStrategy, attached: Callable) -> None:
    net, optimizer, _ = attached(lossless)
    plain = Net()
    for model, steps in ((net, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.05))):
        train(model, steps, range(2), set_to_none=False)
        train(model, steps, range(2, 4), set_to_none=True)
    assert_same(net, plain)


def test_alone_it_does_not_matter_how_many_samples_a_batch_has(
    strategy: GradientStrategy, attached: Callable
) -> None:
    """Powers of two, which scale without rounding."""
    is_sparse = isinstance(strategy, SparseGradientStrategy)
    # A threshold of another weight is sought anew.
    keeps_one = is_sparse and THRESHOLD in strategy.entries().selector.initial_state()
    batch_sizes = [8] * 5 if keeps_one else [8, 8, 1, 8, 2]
    nets = []
    for weights in ([], batch_sizes):
        net, optimizer, session = attached(strategy)
        for step in range(5):
            if weights:
                session.weigh(weights[step])
            train(net, optimizer, range(step, step + 1))
        nets.append(net)
    assert_same(*nets)


def test_it_computes_as_ever_where_all_of_training_is_in_an_autocast_region(
    kind: AnyStrategy, attached: Callable
) -> None:
    nets = []
    for is_inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            net, optimizer, _ = attached(kind)
            for step in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(net, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        nets.append(net)
    assert_same(*nets)


def test_a_step_without_a_batch_is_finite_where_batches_are_weighed(
    kind: AnyStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(kind)
    for step in range(3):
        session.weigh(3)
        train(net, optimizer, range(step, step + 1))
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_gradients_of_zero_move_nothing(strategy: AnyStrategy, attached: Callable) -> None:
    """As those of a loss that is always 0."""
    net, optimizer, session = attached(strategy)
    before = copy.deepcopy(net.state_dict())
    for step in range(4):
        (0 * loss_of(net, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.stats.skipped_steps == 0
    assert all(torch.equal(each, before[name]) for name, each in net.named_parameters())


@NEVER_STEPPED
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in STRATEGIES),
        *((name, torch.float64) for name in OF_EACH_KIND),
    ],
)
def test_gradients_keep_dtype_shape_and_device(
    name: str, attached: Callable, dtype: torch.dtype
) -> None:
    net, _, _ = attached(STRATEGIES[name], dtype)
    loss_of(net, 0, dtype).backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            assert (parameter.grad.dtype, parameter.grad.shape) == (dtype, parameter.shape), name
    assert net.frozen.grad is None
    assert net.branch.weight.grad is None


@NEVER_STEPPED
def test_applied_plus_owed_is_the_sum_of_gradients(
    strategy: AnyStrategy, attached: Callable
) -> None:
    if isinstance(strategy, offbeat.EF21):
        pytest.skip("EF21 owes nothing: what was not sent is forgotten")
    if isinstance(strategy, offbeat.DeMo):
        pytest.skip("DeMo owes cosine coefficients: tests/strategies/test_demo.py")
    if isinstance(strategy, SparseGradientStrategy):
        if strategy.momentum_correction not in (None, "auto"):
            pytest.skip("momentum correction accumulates velocity, not gradients")
        strategy = replace(strategy, momentum_correction=None)
    net, _, session = attached(strategy)
    plain = copy.deepcopy(Net())
    applied = {name: torch.zeros_like(p) for name, p in net.named_parameters() if p.requires_grad}
    expected = copy.deepcopy(applied)
    for step in range(5):
        for model, total in ((net, applied), (plain, expected)):
            loss_of(model, step).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad
            model.zero_grad()
    owed = {name: torch.zeros_like(p) for name, p in applied.items()}
    for part in session.state_dict()["callbacks"].values():
        for key, tensor in part.get("additive", {}).items():
            owed[key.removeprefix("residual/")] += tensor
    for name, total in expected.items():
        torch.testing.assert_close(applied[name] + owed[name], total, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    strategy: AnyStrategy, attached: Callable
) -> None:
    straight, straight_optimizer, straight_session = attached(strategy)
    train(straight, straight_optimizer, range(3))
    model, state = copy.deepcopy(straight.state_dict()), straight_session.state_dict()
    train(straight, straight_optimizer, range(3, 6))
    second, second_optimizer, second_session = attached(strategy)
    second.load_state_dict(model)
    second_session.load_state_dict(state)
    train(second, second_optimizer, range(3, 6))
    assert_same(second, straight)


def test_a_state_dict_is_a_copy(kind: AnyStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(2))
    state = session.state_dict()
    kept = copy.deepcopy(state)
    train(net, optimizer, range(2, 4))
    for part, before in kept["callbacks"].items():
        torch.testing.assert_close(
            state["callbacks"][part].get("additive", {}), before.get("additive", {}), rtol=0, atol=0
        )


def test_resharding_preserves_sums(kind: AnyStrategy, attached: Callable) -> None:
    states = []
    for seed in range(3):
        net, optimizer, session = attached(kind)
        train(net, optimizer, range(seed, seed + 2))
        states.append(session.state_dict())
    for world_size in (1, 2, 3, 5):
        new = [offbeat.reshard(states, world_size, rank) for rank in range(world_size)]
        for part, state in states[0]["callbacks"].items():
            for name in state.get("additive", {}):
                old_sum = sum(s["callbacks"][part]["additive"][name] for s in states)
                new_sum = sum(s["callbacks"][part]["additive"][name] for s in new)
                torch.testing.assert_close(new_sum, old_sum)


def test_closing_takes_everything_out(kind: AnyStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(1))
    session.close()
    session.close()
    plain = Net()
    plain.load_state_dict(net.state_dict())
    train(net, optimizer, range(1, 3))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), range(1, 3))
    assert_same(net, plain)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_no_sync_accumulates_and_the_next_pass_exchanges_everything(
    lossless: GradientStrategy, attached: Callable
) -> None:
    net, _, session = attached(lossless)
    plain = Net()
    with session.no_sync():
        loss_of(net, 0).backward()
        loss_of(net, 1).backward()
    assert session.stats.exchanges == 0
    loss_of(net, 2).backward()
    assert session.stats.exchanges == 1
    for step in range(3):
        loss_of(plain, step).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_second_synchronised_pass_exchanges_only_what_is_new(
    lossless: GradientStrategy, attached: Callable
) -> None:
    net, _, session = attached(lossless)
    plain = Net()
    for step in range(2):
        loss_of(net, step).backward()
        loss_of(plain, step).backward()
    assert session.stats.exchanges == 2
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_unsynchronised_pass_after_a_synchronised_one_adds_to_its_gradient(
    attached: Callable,
) -> None:
    net, _, session = attached(offbeat.AllReduce())
    plain = Net()
    for step, synchronised in enumerate((True, False, True)):
        with contextlib.nullcontext() if synchronised else session.no_sync():
            loss_of(net, step).backward()
        loss_of(plain, step).backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert session.stats.exchanges == 2


@pytest.mark.parametrize("collective", ["tree", "reduce_scatter"])
def test_what_is_sent_once_is_not_sent_again_after_an_unsynchronised_pass(
    attached: Callable, collective: str
) -> None:
    net, _, session = attached(offbeat.GTopK(density=1.0, collective=collective))
    loss_of(net, 0).backward()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    with (
        session.no_sync(),
        pytest.raises(UnsupportedError, match="unsynchronised passes of a step first"),
    ):
        loss_of(net, 1).backward()
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("name", ["dear", "demo", "ef21", "topk"])
def test_a_gradient_that_the_optimizer_does_not_clear_is_named_where_it_would_be_sent_again(
    name: str,
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)

    def accumulate() -> None:
        net(torch.ones(1, 2)).sum().backward()

    with offbeat.attach(net, optimizer, STRATEGIES[name]) as session:
        for clear in (net.zero_grad, optimizer.zero_grad):
            with session.no_sync():
                accumulate()
            accumulate()
            optimizer.step()
            clear()
        reason = r"parameter '0\.(weight|bias)' has the gradient .* model.zero_grad\(\) does not"
        with session.no_sync(), pytest.raises(UnsupportedError, match=reason):
            accumulate()


def test_a_branch_taken_now_and_then(lossless: GradientStrategy, attached: Callable) -> None:
    net, optimizer, _ = attached(lossless)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(4):
        net.use_branch = plain.use_branch = step % 2 == 1
        train(net, optimizer, range(step, step + 1))
        train(plain, plain_optimizer, range(step, step + 1))
    assert_same(net, plain)


def test_a_non_finite_gradient_skips_the_step_and_changes_nothing(
    strategy: AnyStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(strategy)
    reference, reference_optimizer, _ = attached(strategy)
    train(net, optimizer, range(2))
    train(reference, reference_optimizer, range(2))
    (loss_of(net, 99) * float("nan")).backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    optimizer.step()
    optimizer.zero_grad()
    reference.norm.load_state_dict(net.norm.state_dict())
    assert_same(net, reference)
    assert session.stats.skipped_steps == 1
    assert any("non-finite" in notice for notice in session.notices)
    if (
        not isinstance(strategy, SparseGradientStrategy) or strategy.warmup is None
    ):  # a skipped exchange counts for warm-up
        train(net, optimizer, range(2, 4))
        train(reference, reference_optimizer, range(2, 4))
        assert_same(net, reference)


def test_too_many_skipped_steps_in_a_row_raise(
    kind: AnyStrategy, attached: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.gradients.exchange.MAX_SKIPPED_STEPS", 2)
    net, optimizer, _ = attached(kind)
    for _ in range(2):
        (loss_of(net, 0) * float("inf")).backward()
        optimizer.step()
    with pytest.raises(NonFiniteError, match="at most 2"):
        (loss_of(net, 0) * float("inf")).backward()


def test_amp_with_a_scaler(lossless_kind: GradientStrategy, attached: Callable) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if isinstance(lossless_kind, offbeat.DeAR):
        with pytest.raises(UnsupportedError, match="GradScaler"):
            attached(lossless_kind, scaler=scaler)
        return
    net, optimizer, session = attached(lossless_kind, scaler=scaler)
    plain, plain_scaler = Net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(4):
        for model, opt, scale in ((net, optimizer, scaler), (plain, plain_optimizer, plain_scaler)):
            factor = float("inf") if step == 2 else 1.0
            scale.scale(loss_of(model, step) * factor).backward()
            if step == 2:  # what has never had a gradient would get one, and a momentum
                assert model.branch.weight.grad is None
            scale.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(opt)
            scale.update()
            opt.zero_grad()
    assert_same(net, plain, rtol=1e-6, atol=1e-7)
    assert scaler.get_scale() == plain_scaler.get_scale() < 1024.0
    assert session.stats.steps == 3


def test_residuals_are_kept_unscaled(attached: Callable) -> None:
    strategy = offbeat.GTopK(density=0.2, collective="reduce_scatter")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net, _, session = attached(strategy, scaler=scaler)
    other, _, other_session = attached(strategy)
    scaler.scale(loss_of(net, 0)).backward()
    loss_of(other, 0).backward()
    scaled, unscaled = session.state_dict()["callbacks"], other_session.state_dict()["callbacks"]
    torch.testing.assert_close(scaled["gradients"]["additive"], unscaled["gradients"]["additive"])


def test_chained_schedulers_see_nothing_of_it(
    lossless_kind: GradientStrategy, attached: Callable
) -> None:
    net, optimizer, _ = attached(lossless_kind)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
            torch.optim.lr_scheduler.StepLR(opt, 2),
        ]
        for step in range(5):
            train(model, opt, range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
    assert_same(net, plain)


def test_two_models_in_one_process(kind: AnyStrategy, attached: Callable) -> None:
    alone, alone_optimizer, _ = attached(kind)
    train(alone, alone_optimizer, range(4))
    one, one_optimizer, _ = attached(kind)
    two, two_optimizer, _ = attached(kind)
    for step in range(4):
        train(one, one_optimizer, range(step, step + 1))
        train(two, two_optimizer, range(step, step + 1))
    assert_same(one, alone)
    assert_same(two, alone)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "several backward passes"),
        (torch.optim.SparseAdam, "are dense; use torch.optim.Adam"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(
    optimizer: type[torch.optim.Optimizer], reason: str
) -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=reason):
        offbeat.attach(net, optimizer(net.parameters()), offbeat.AllReduce())


def test_a_foreign_optimizer_is_refused() -> None:
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="not the model's"):
        offbeat.attach(net, torch.optim.SGD(other.parameters()), offbeat.AllReduce())


def test_a_parameter_unfrozen_later_is_refused(attached: Callable) -> None:
    net, _, _ = attached(offbeat.AllReduce())
    net.frozen.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="'frozen'"):
        loss_of(net, 0).backward()


def test_a_parameter_added_later_is_refused_by_the_next_step(attached: Callable) -> None:
    net, optimizer, _ = attached(offbeat.AllReduce())
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 7))]})
    with pytest.raises(UnsupportedError, match=r"shape \[2, 7\].* attach again"):
        train(net, optimizer, range(2, 3))


def test_a_model_without_values_is_refused() -> None:
    net = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedError, match="'weight' is on the meta device"):
        offbeat.attach(net, torch.optim.SGD(net.parameters()), offbeat.AllReduce())


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), "0.01", None, True])
def test_a_density_outside_its_range_is_refused(density: Any) -> None:
    with pytest.raises(ConfigError, match=f"got {density!r}") as error:
        offbeat.GTopK(density=density)
    assert "(0, 1]" in str(error.value)


def test_the_class_in_place_of_an_instance_is_refused() -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="did you pass the class"):
        offbeat.attach(net, torch.optim.SGD(net.parameters()), offbeat.GTopK)  # type: ignore[arg-type]


def test_a_parameter_frozen_while_attached_stays_where_it_is_and_what_it_is_owed_waits(
    kind: AnyStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(kind)

    def kept() -> list[torch.Tensor]:
        state = session.state_dict()["callbacks"]["gradients"]
        everything = state["additive"] | state["local"]
        kinds = ("residual", "own", "sum")
        found = [everything.get(f"{kind}/shared.weight") for kind in kinds]
        return [net.shared.weight.detach().clone(), *(each for each in found if each is not None)]

    train(net, optimizer, range(2), set_to_none=False)
    net.shared.weight.requires_grad_(False)
    before = kept()
    train(net, optimizer, range(2, 4), set_to_none=False)
    train(net, optimizer, range(4, 6), set_to_none=True)
    torch.testing.assert_close(kept(), before, rtol=0, atol=0)


def test_a_step_with_a_closure_exchanges_once(
    lossless_kind: GradientStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(lossless_kind)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        for step in range(3):

            def closure(
                model: Net = model, opt: torch.optim.Optimizer = opt, step: int = step
            ) -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            opt.step(closure=closure) if step % 2 else opt.step(closure)
    assert_same(net, plain)
    assert session.stats.exchanges == 3


def test_a_closure_that_does_nothing_after_a_backward_pass_exchanges_nothing_more(
    kind: AnyStrategy, attached: Callable
) -> None:
    """As Lightning steps an optimizer in manual optimization."""
    net, optimizer, session = attached(kind)
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step(lambda: 0.0)
        optimizer.zero_grad()
    assert session.stats.exchanges == 3
    optimizer.step(lambda: 0.0)  # as of a rank without a batch
    assert session.stats.exchanges == 4


def test_backward_that_builds_a_graph(lossless_kind: GradientStrategy, attached: Callable) -> None:
    net, _, _ = attached(lossless_kind)
    plain = Net()
    for model in (net, plain):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch warns of the reference cycle that the caller asked for
            loss_of(model, 0).backward(create_graph=True)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad.detach())


def test_averaged_and_copied_models_stay_out_of_it(
    lossless_kind: GradientStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(lossless_kind)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    train(net, optimizer, range(2))
    averaged.update_parameters(net)
    loss_of(averaged, 0).backward()
    loss_of(copy.deepcopy(net), 0).backward()
    assert session.stats.exchanges == 2


def test_two_models_may_share_a_module_without_parameters_but_no_parameter(
    attached: Callable,
) -> None:
    shared = torch.nn.ReLU()
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), shared) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with offbeat.attach(models[0], optimizers[0], offbeat.AllReduce()):
        offbeat.attach(models[1], optimizers[1], offbeat.AllReduce()).close()
        with pytest.raises(ConfigError, match="attached already"):
            offbeat.attach(models[0], optimizers[0], offbeat.AllReduce())
    offbeat.attach(models[0], optimizers[0], offbeat.AllReduce()).close()


def test_complex_parameters_are_refused_where_they_cannot_be_ranked() -> None:
    net = torch.nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(UnsupportedError, match="real-valued"):
        offbeat.attach(net, optimizer, offbeat.GTopK())
    offbeat.attach(net, optimizer, offbeat.AllReduce()).close()


def test_a_state_that_does_not_fit_changes_nothing(attached: Callable) -> None:
    net, optimizer, session = attached(lent(offbeat.TopK(density=0.2), bucket_mib=1e-4))
    train(net, optimizer, range(2))
    before = session.state_dict()
    wrong = copy.deepcopy(before)
    residuals = wrong["callbacks"]["gradients"]["additive"]
    for tensor in residuals.values():
        tensor.fill_(7)
    residuals["residual/conv.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="conv.weight"):
        session.load_state_dict(wrong)
    after = session.state_dict()["callbacks"]["gradients"]["additive"]
    torch.testing.assert_close(after, before["callbacks"]["gradients"]["additive"])
    with pytest.raises(CheckpointError, match="gradients"):
        session.load_state_dict({key: value for key, value in before.items() if key != "callbacks"})


@pytest.mark.parametrize(("synchronised", "exchanges"), [(True, 2), (False, 1)])
def test_a_pass_that_fails_concerns_the_peers_only_if_they_wait_for_it(
    lossless_kind: GradientStrategy, attached: Callable, synchronised: bool, exchanges: int
) -> None:
    net, _, session = attached(lossless_kind)

    def fail(*_: object) -> None:
        raise MemoryError

    failing = net.conv.weight.register_hook(fail)
    with (
        contextlib.nullcontext() if synchronised else session.no_sync(),
        pytest.raises(MemoryError),
    ):
        loss_of(net, 0).backward()
    failing.remove()
    net.zero_grad()
    loss_of(net, 1).backward()
    assert session.stats.exchanges == exchanges


def test_what_is_frozen_for_another_loss_of_a_step_keeps_the_gradient_of_its_own(
    lossless_kind: GradientStrategy, attached: Callable
) -> None:
    """As a critic is for the loss of its generator, where one step moves both."""
    net, optimizer, _ = attached(lossless_kind)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        for step in range(0, 6, 2):
            loss_of(model, step).backward()
            model.head.requires_grad_(False)
            loss_of(model, step + 1).backward()
            model.head.requires_grad_(True)
            opt.step()
            opt.zero_grad()
    assert_same(net, plain, rtol=1e-4, atol=1e-5)


def test_what_waits_in_no_sync_is_sent_though_its_parameter_is_frozen_by_then(
    lossless_kind: GradientStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(lossless_kind)
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for model, opt, context in (
        (net, optimizer, session.no_sync()),
        (plain, plain_optimizer, contextlib.nullcontext()),
    ):
        with context:
            loss_of(model, 0).backward()
        model.head.requires_grad_(False)
        loss_of(model, 1).backward()
        model.head.requires_grad_(True)
        opt.step()
        opt.zero_grad()
    assert_same(net, plain, rtol=1e-4, atol=1e-5)


def test_a_mean_that_a_pass_in_no_sync_adds_to_is_sent_though_its_parameter_is_frozen_by_then(
    attached: Callable,
) -> None:
    net, optimizer, session = attached(offbeat.AllReduce())
    plain = Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for model, opt, context in (
        (net, optimizer, session.no_sync()),
        (plain, plain_optimizer, contextlib.nullcontext()),
    ):
        loss_of(model, 0).backward()
        model.head.requires_grad_(False)
        with context:
            loss_of(model, 1).backward()
        opt.step()
    assert_same(net, plain, rtol=1e-4, atol=1e-5)
