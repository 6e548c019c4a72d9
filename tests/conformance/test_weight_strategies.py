"""What every strategy that averages weights must do, checked in a world of one, where it can be
compared with a plain loop.

A new strategy joins by a row in `STRATEGIES`; a schedule or a codec of the registry has one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from conformance_support.lent import lent, lent_from
from conformance_support.nets import Net, assert_same, loss_of, train
from offbeat import Session
from offbeat.averaging.streaming import Streaming
from offbeat.codec.few_bits import SignValues
from offbeat.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    OffbeatWarning,
    UnsupportedError,
)
from offbeat.session.checkpoint import load, save
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.registry import SCHEDULES, WEIGHT_CODECS

pytestmark = pytest.mark.filterwarnings("ignore:no loader of this session")

PLAIN: dict[str, AveragingStrategy] = {
    "localsgd": offbeat.LocalSGD(period=2),
    "localsgd as published": offbeat.LocalSGD(period=2, warmup=0, optimizer_state="local"),
    "des-loc": offbeat.LocalSGD(period=2, optimizer_state={"momentum_buffer": 2}),
    "localsgd in pairs": offbeat.LocalSGD(period=2, exchange="pairs"),
    "post-local sgd": offbeat.LocalSGD(period=2, start_step=3),
    "defsgd by itself": offbeat.DEFSGD(ratio=5, ahead=1.0),
    "a2sgd": offbeat.A2SGD(period=2),
    "a2sgd in small buckets": lent(offbeat.A2SGD(period=2), bucket_mib=1e-4),
    "dpsgd": offbeat.DPSGD(),
    "dpsgd over few changes": offbeat.DPSGD(
        codec=offbeat.WeightCodec(density=0.1, entries="reuse+float8")
    ),
    "sgp": offbeat.SGP(),
    "sgp over signs": offbeat.SGP(codec="sign"),
    "wagma": offbeat.WAGMA(),
    "wagma without overlap": offbeat.WAGMA(overlap=False, period=1),
    "wagma by the paper's rule": offbeat.WAGMA(merge="paper"),
    "wagma at intervals": offbeat.WAGMA(period=4, interval=2),
    "wagma in bfloat16": offbeat.WAGMA(values="bfloat16"),
    "wagma in 4 bits": offbeat.WAGMA(period=2, values="e3m0"),
    "wagma in signs": offbeat.WAGMA(period=3, values=SignValues()),
    "wagma without groups": offbeat.WAGMA(period=2, interval=2),
    "adpsgd": offbeat.ADPSGD(),
    "adpsgd in bfloat16": offbeat.ADPSGD(values="bfloat16"),
    "eagersgd": offbeat.EagerSGD(),
    "eagersgd that averages models often": offbeat.EagerSGD(mode="solo", period=2),
    "adaptive": offbeat.AdaptiveSGD(mega_batch=2),
    "elasticsgd": offbeat.ElasticSGD(mega_batch=2),
}
"""Those that leave a world of one as it is."""
PLAIN |= {"dpsgd over signs": offbeat.DPSGD(codec="sign")}
PLAIN |= {f"local sgd, {name}": offbeat.LocalSGD(period=name) for name in SCHEDULES}
STRATEGIES: dict[str, AveragingStrategy] = PLAIN | {
    "slowmo": offbeat.LocalSGD(period=2, outer="slowmo"),
    "diloco": offbeat.LocalSGD(period=2, outer="diloco"),
    "diloco, offloaded": offbeat.LocalSGD(period=2, outer=offbeat.Outer(offload=True)),
    "streaming diloco": offbeat.LocalSGD(
        period=4, outer="diloco", codec="e3m0", exchange="2x1x0.5"
    ),
    "noloco": offbeat.LocalSGD(period=2, outer="diloco", exchange="pairs"),
    "dasgd": offbeat.LocalSGD(period=3, exchange="1x2"),
    "local sgd with an outer adam": offbeat.LocalSGD(
        period=2, outer=functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True)
    ),
    "adaptive as published": offbeat.AdaptiveSGD(mega_batch=2, rule="published"),
    "crossbow": offbeat.Crossbow(),
    "crossbow in every other step": offbeat.Crossbow(period=2, alpha=0.3),
    "crossbow over signs": offbeat.Crossbow(codec="sign"),
    "defsgd": offbeat.DEFSGD(ratio=5),
    "defsgd without looking ahead": offbeat.DEFSGD(ratio=5, ahead=0.0),
    "local sgd after k-fac": offbeat.LocalSGD(period=2, start_step=3, start="spdkfac"),
    "post-local diloco": offbeat.LocalSGD(period=2, start_step=1, outer=offbeat.Outer(lr=0.5)),
    "local sgd among members": offbeat.LocalSGD(period=2, exchange="members"),
    "sparseloco among members": offbeat.LocalSGD(period=2, exchange="members", codec="sparseloco"),
    "diloco with a quorum": offbeat.LocalSGD(period=2, outer="diloco", exchange="75%+1s"),
    "local sgd over few changes": offbeat.LocalSGD(
        period=2, codec=offbeat.WeightCodec(density=0.1, entries="reuse+float8")
    ),
}
STRATEGIES |= {
    f"local sgd over {name}": offbeat.LocalSGD(period=2, codec=name) for name in WEIGHT_CODECS
}
STRATEGIES |= {
    "adaptive over the largest": offbeat.AdaptiveSGD(mega_batch=2, codec="sparseloco"),
}

OF_EACH_KIND = (
    "localsgd",
    "localsgd in pairs",
    "post-local sgd",
    "local sgd after k-fac",
    "local sgd, adaptive",
    "streaming diloco",
    "local sgd among members",
    "sparseloco among members",
    "diloco with a quorum",
    "local sgd over sign",
    "dpsgd",
    "sgp over signs",
    "wagma",
    "wagma in 4 bits",
    "adpsgd",
    "eagersgd",
    "a2sgd",
    "defsgd",
    "crossbow over signs",
    "adaptive",
    "elasticsgd",
)
"""For what a session does around averages, which a number, a codec or a rule of merging does not
change.
"""

OF_OTHER_STATES = (
    "adaptive over the largest",
    "a2sgd in small buckets",
    "dpsgd over few changes",
    "local sgd with an outer adam",
    "slowmo",
)
"""Whose session holds tensors that none of a kind does."""


@pytest.fixture(params=OF_EACH_KIND)
def kind(request: pytest.FixtureRequest) -> AveragingStrategy:
    return STRATEGIES[request.param]


def test_there_is_one_of_each_kind() -> None:
    known = {lent_from(strategy) for strategy in STRATEGIES.values()}
    assert {lent_from(STRATEGIES[name]) for name in OF_EACH_KIND} == known


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> AveragingStrategy:
    return STRATEGIES[request.param]


@pytest.fixture(params=PLAIN)
def plain_strategy(request: pytest.FixtureRequest) -> AveragingStrategy:
    return PLAIN[request.param]


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


@pytest.fixture
def attached() -> Iterator[Callable[..., tuple[Net, torch.optim.Optimizer, Session]]]:
    sessions: list[Session] = []

    def make(
        strategy: AveragingStrategy, dtype: torch.dtype = torch.float32, **kwargs: object
    ) -> tuple[Net, torch.optim.Optimizer, Session]:
        net = Net(dtype)
        optimizer = sgd(net)
        sessions.append(offbeat.attach(net, optimizer, strategy, **kwargs))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


def test_alone_it_is_the_plain_loop(plain_strategy: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(plain_strategy)
    plain = Net()
    for model, steps in ((net, optimizer), (plain, sgd(plain))):
        train(model, steps, range(2), set_to_none=False)
        train(model, steps, range(2, 5), set_to_none=True)
    assert_same(net, plain)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer, rtol=0, atol=0)
    assert session.stats.steps == 5


def test_gradients_of_zero_move_nothing(
    plain_strategy: AveragingStrategy, attached: Callable
) -> None:
    """As those of a loss that is always 0."""
    net, optimizer, session = attached(plain_strategy)
    before = copy.deepcopy(net.state_dict())
    for step in range(4):
        (0 * loss_of(net, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.stats.skipped_steps == 0
    assert all(torch.equal(each, before[name]) for name, each in net.named_parameters())


def test_tensors_stay_where_they_are(kind: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, _ = attached(kind)
    tensors = [*net.parameters(), *net.buffers()]
    places = [tensor.data_ptr() for tensor in tensors]
    train(net, optimizer, range(4))
    assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], tensors, strict=True))
    assert [tensor.data_ptr() for tensor in tensors] == places


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in STRATEGIES),
        *((name, torch.float64) for name in OF_EACH_KIND),
    ],
)
def test_weights_keep_dtype_and_shape(name: str, attached: Callable, dtype: torch.dtype) -> None:
    net, optimizer, _ = attached(STRATEGIES[name], dtype)
    before = {name: (p.dtype, p.shape, p.stride()) for name, p in net.named_parameters()}
    for step in range(3):
        loss_of(net, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {name: (p.dtype, p.shape, p.stride()) for name, p in net.named_parameters()} == before
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    torch.testing.assert_close(
        net.frozen.detach(), torch.ones_like(net.frozen) * Net(dtype).frozen, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    name: str, attached: Callable, tmp_path: Path
) -> None:
    strategy = STRATEGIES[name]
    # In each phase of a period; what differs in a number or a codec is saved where both parities
    # are behind a first average.
    stops = (1, 2, 3, 4) if name in OF_EACH_KIND else (3, 4)
    straight, straight_optimizer, straight_session = attached(strategy)
    models = []
    for step in range(8):
        train(straight, straight_optimizer, range(step, step + 1))
        models.append(copy.deepcopy(straight.state_dict()))
        if step + 1 in stops:
            states = {
                "model": straight.state_dict(),
                "optimizer": straight_optimizer.state_dict(),
                "session": straight_session.state_dict(),
            }
            save(tmp_path, f"{step + 1}", states)
    for stop in stops:
        stored = load(tmp_path, f"{stop}").tree
        second, second_optimizer, second_session = attached(strategy)
        second.load_state_dict(stored["model"])
        second_optimizer.load_state_dict(stored["optimizer"])
        second_session.load_state_dict(stored["session"])
        train(second, second_optimizer, range(stop, stop + 4))
        for key, parameter in second.named_parameters():
            assert torch.equal(parameter, models[stop + 3][key]), key


def test_a_state_dict_is_a_copy(kind: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(2))
    state = session.state_dict()
    kept = copy.deepcopy(state)
    train(net, optimizer, range(2, 6))
    torch.testing.assert_close(values_of(state), values_of(kept), rtol=0, atol=0)


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """All that is no text."""
    return {
        f"{part}/{kind}/{name}": value
        for part, kinds in state["callbacks"].items()
        for kind, entries in kinds.items()
        for name, value in entries.items()
        if not isinstance(value, str)
    }


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *OF_OTHER_STATES])
def test_a_state_is_handed_to_any_number_of_workers(name: str, attached: Callable) -> None:
    strategy = STRATEGIES[name]
    net, optimizer, session = attached(strategy)
    train(net, optimizer, range(4))
    states = [session.state_dict() for _ in range(3)]
    for other in states[1:]:
        for part in other["callbacks"].values():  # what ranks owe adds up
            part["additive"] = {name: 0 * owed for name, owed in part["additive"].items()}
    fresh, fresh_optimizer, fresh_session = attached(strategy)
    fresh.load_state_dict(net.state_dict())
    fresh_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh_session.load_state_dict(offbeat.reshard(states, 1, 0))
    for model, opt in ((net, optimizer), (fresh, fresh_optimizer)):
        train(model, opt, range(4, 7))
    assert_same(fresh, net)


def test_closing_takes_everything_out(kind: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(1))
    session.close()
    session.close()
    plain = Net()
    plain.load_state_dict(net.state_dict())
    plain_optimizer = sgd(plain)
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, range(1, 3))
    train(plain, plain_optimizer, range(1, 3))
    assert_same(net, plain)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_closing_with_an_exchange_under_way(kind: AveragingStrategy, attached: Callable) -> None:
    net, _, session = attached(kind)
    before = copy.deepcopy(net.state_dict())
    loss_of(net, 0).backward()
    with pytest.warns(OffbeatWarning, match="not stepped in 1 backward passes"):
        session.close()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)


def test_several_passes_and_none_in_a_step(
    plain_strategy: AveragingStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(plain_strategy)
    plain = Net()
    plain_optimizer = sgd(plain)
    with session.no_sync():
        loss_of(net, 0).backward()
    loss_of(net, 1).backward()
    for step in range(2):
        loss_of(plain, step).backward()
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        opt.step()
        opt.zero_grad()
        opt.step()  # a rank without a batch
        train(model, opt, range(2, 5))
    assert_same(net, plain, rtol=1e-6, atol=1e-7)
    assert session.stats.steps == 5


def test_a_step_with_a_closure(plain_strategy: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, _ = attached(plain_strategy)
    plain = Net()
    plain_optimizer = sgd(plain)
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        for step in range(4):

            def closure(
                model: Net = model, opt: torch.optim.Optimizer = opt, step: int = step
            ) -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            opt.step(closure=closure) if step % 2 else opt.step(closure)
    assert_same(net, plain)


def test_a_branch_taken_now_and_then(plain_strategy: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, _ = attached(plain_strategy)
    plain = Net()
    plain_optimizer = sgd(plain)
    for step in range(5):
        net.use_branch = plain.use_branch = step % 2 == 1
        train(net, optimizer, range(step, step + 1))
        train(plain, plain_optimizer, range(step, step + 1))
    assert_same(net, plain)


@pytest.mark.parametrize(
    ("name", "has_closure"),
    [*((name, False) for name in STRATEGIES), *((name, True) for name in OF_EACH_KIND)],
)
def test_a_gradient_that_is_not_finite_moves_nothing(
    name: str, attached: Callable, has_closure: bool
) -> None:
    strategy = STRATEGIES[name]
    if isinstance(strategy, offbeat.DEFSGD) and strategy.ahead < 1:
        pytest.skip("a step of nobody still brings a block of what is owed")
    # An average would bring what is owed.
    if isinstance(strategy, offbeat.LocalSGD):
        strategy = replace(strategy, period=100, warmup=0)
    elif isinstance(strategy, offbeat.Crossbow):
        strategy = replace(strategy, period=100)
    net, optimizer, session = attached(strategy)
    train(net, optimizer, range(2))
    before = copy.deepcopy(list(net.parameters()))

    def spoilt() -> float:
        (loss_of(net, 99) * float("nan")).backward()
        return 0.0

    if has_closure:
        optimizer.step(spoilt)
    else:
        spoilt()
        optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    assert session.stats.skipped_steps == 1
    assert any("not finite" in notice or "non-finite" in notice for notice in session.notices)
    train(net, optimizer, range(2, 4))
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def test_too_many_skipped_steps_in_a_row_raise(
    kind: AveragingStrategy, attached: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("exchange", "gradient_guard"):
        monkeypatch.setattr(f"offbeat.gradients.{module}.MAX_SKIPPED_STEPS", 2)
    net, optimizer, _ = attached(kind)

    def spoil(num_steps: int) -> None:
        for _ in range(num_steps):
            (loss_of(net, 0) * float("inf")).backward()
            optimizer.step()

    spoil(2)
    with pytest.raises(NonFiniteError, match="at most 2"):
        spoil(3)  # skips while gradients are exchanged count apart from those afterwards


def test_weights_that_are_not_finite_reach_nobody(
    kind: AveragingStrategy, attached: Callable
) -> None:
    net, optimizer, _ = attached(kind)
    with torch.no_grad():
        net.head.bias[0] = float("inf")

    def go_on() -> None:
        for _ in range(6):
            optimizer.step()

    with pytest.raises(NonFiniteError, match="rank 0 are no longer finite"):
        go_on()


def test_a_gradient_scaler_is_refused(kind: AveragingStrategy) -> None:
    net = Net()
    optimizer = sgd(net)
    with pytest.raises(UnsupportedError, match="bfloat16 autocast"):
        offbeat.attach(net, optimizer, kind, scaler=torch.amp.GradScaler("cpu"))
    offbeat.attach(net, optimizer, kind, scaler=torch.amp.GradScaler("cpu", enabled=False)).close()


def test_a_parameter_frozen_while_attached_stays_where_it_is(
    kind: AveragingStrategy, attached: Callable
) -> None:
    net, optimizer, _ = attached(kind)
    train(net, optimizer, range(4))
    net.shared.weight.requires_grad_(False)
    net.shared.weight.grad = None
    before = net.shared.weight.clone()
    train(net, optimizer, range(4, 8))
    # A fragment that is frozen between its averages comes to what its code says of the steps since
    # the last one; what that has lost waits until it trains again.
    is_between = isinstance(getattr(kind, "chosen_exchange", None), Streaming)
    atol = 1e-4 if is_between and kind.weight_codec is not None else 0
    torch.testing.assert_close(net.shared.weight.detach(), before, rtol=0, atol=atol)


def test_two_models_in_one_process(kind: AveragingStrategy, attached: Callable) -> None:
    alone, alone_optimizer, _ = attached(kind)
    train(alone, alone_optimizer, range(4))
    pairs = [attached(kind)[:2] for _ in range(2)]
    for step in range(4):
        for net, optimizer in pairs:
            train(net, optimizer, range(step, step + 1))
    for net, _ in pairs:
        assert_same(net, alone)


def test_the_averaged_model_is_a_copy_that_stays_out_of_it(
    kind: AveragingStrategy, attached: Callable
) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(3))
    before, stats = copy.deepcopy(net.state_dict()), session.stats
    averaged = session.averaged_model()
    torch.testing.assert_close(averaged.state_dict(), before, rtol=0, atol=0)
    averaged.eval()
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.zero_()
    assert net.training
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    loss_of(averaged, 0).backward()
    # an average that travels beside training may have come meanwhile
    assert replace(session.stats, exchanges=stats.exchanges) == stats


def test_buffers_that_hold_an_infinity_or_are_derived_are_left_alone(
    kind: AveragingStrategy,
) -> None:
    net = torch.nn.Linear(3, 3)
    net.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    net.register_buffer("derived", torch.tensor([float("nan")]), persistent=False)
    net.register_buffer("seen", torch.tensor([True, False]))
    before = copy.deepcopy(dict(net.named_buffers()))
    optimizer = sgd(net)
    with offbeat.attach(net, optimizer, kind) as session:
        for _ in range(4):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        session.averaged_model()
    torch.testing.assert_close(dict(net.named_buffers()), before, rtol=0, atol=0, equal_nan=True)


def test_complex_parameters(strategy: AveragingStrategy) -> None:
    if strategy == STRATEGIES["local sgd after k-fac"]:
        pytest.skip("K-FAC finds no layer that it can precondition")
    net = torch.nn.Linear(2, 2, dtype=torch.complex64)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        if model is net:
            refuses = offbeat.LocalSGD | offbeat.AdaptiveSGD
            has_codec = isinstance(strategy, refuses) and strategy.codec is not None
            if has_codec or isinstance(strategy, offbeat.A2SGD | offbeat.DEFSGD):
                with pytest.raises(UnsupportedError, match="not real-valued"):
                    offbeat.attach(net, optimizer, strategy)
                return
            session = offbeat.attach(net, optimizer, strategy)
        for _ in range(4):
            model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    if strategy in PLAIN.values():
        assert_same(net, plain)


def test_a_state_of_something_else_is_refused(kind: AveragingStrategy, attached: Callable) -> None:
    net, optimizer, session = attached(kind)
    train(net, optimizer, range(4))
    state = session.state_dict()
    others = [state | {"strategy": "gtopk"}, state | {"callbacks": {}}]
    of_another_model = copy.deepcopy(state)
    for part in of_another_model["callbacks"].values():
        for entries in part.values():
            tensors = [key for key in entries if isinstance(entries[key], torch.Tensor)]
            entries.update(dict.fromkeys(tensors, torch.zeros(1)))
            others += [of_another_model] if tensors else []
    for other in others:
        with pytest.raises(CheckpointError):
            session.load_state_dict(other)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (offbeat.LocalSGD, {"period": 2, "exchange": "1x0"}),
        (offbeat.LocalSGD, {"period": 2, "exchange": "members"}),
        (offbeat.AdaptiveSGD, {"mega_batch": 2}),
    ],
    ids=["streaming", "members", "adaptive"],
)
def test_what_is_owed_is_not_lost_where_a_run_resumes_without_the_codec(
    attached: Callable, make: Any, options: dict[str, Any]
) -> None:
    net, optimizer, session = attached(make(codec="sparseloco", **options))
    train(net, optimizer, range(4))
    _, _, other = attached(make(**options))
    with pytest.raises(CheckpointError, match="another model or codec"):
        other.load_state_dict(session.state_dict())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: offbeat.LocalSGD(period=0),
            "period of LocalSGD: got 0; allowed is whole number of",
        ),
        (lambda: offbeat.LocalSGD(start_step=-1), "start_step"),
        (lambda: offbeat.LocalSGD(start_step=2, start="spdkfca"), "did you mean 'spdkfac'"),
        (
            lambda: offbeat.LocalSGD(start_step=2, start=["spdkfac"]),
            "allowed is Strategy . allreduce",
        ),
        (lambda: offbeat.LocalSGD(start_step=2, start=offbeat.WAGMA()), r"got WAGMA\("),
        (lambda: offbeat.LocalSGD(start="spdkfac"), "start_step is 0; set it"),
        (
            lambda: offbeat.LocalSGD(start_step=2, start=offbeat.SPDKFAC(exchange="gtopk")),
            'use exchange="allreduce"',
        ),
        (lambda: offbeat.LocalSGD(outer="dilocco"), "did you mean 'diloco'"),
        (lambda: offbeat.LocalSGD(outer=0.7), r"offbeat.Outer\(lr"),
        (lambda: offbeat.LocalSGD(outer=0.7), "functools.partial"),
        (lambda: offbeat.LocalSGD(optimizer_state="mean"), "optimizer_state"),
        (lambda: offbeat.Outer(lr=0), "lr of Outer"),
        (lambda: offbeat.Outer(momentum=1.0), "momentum of Outer"),
        (lambda: offbeat.Outer(momentum=0.0), "nesterov=False"),
        (lambda: offbeat.SGP(out_degree=0), "out_degree"),
        (lambda: offbeat.SGP(out_degree=4).check_world(4), "send to 3 others"),
    ],
)
def test_options_that_cannot_work_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_out_degree_is_judged_by_the_world_it_meets() -> None:
    offbeat.SGP(out_degree=3).check_world(4)
    offbeat.SGP(out_degree=3).check_world(1)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_optimizer_is_sgd_on_the_change(attached: Callable, nesterov: bool) -> None:
    outer = offbeat.Outer(lr=0.6, momentum=0.8, nesterov=nesterov)
    net, optimizer, _ = attached(offbeat.LocalSGD(period=3, outer=outer))
    inner, slow = Net(), Net()
    inner_optimizer = sgd(inner)
    slow_optimizer = torch.optim.SGD(slow.parameters(), lr=0.6, momentum=0.8, nesterov=nesterov)
    train(net, optimizer, range(9))
    for begin in range(0, 9, 3):
        train(inner, inner_optimizer, range(begin, begin + 3))
        for theirs, anchor in zip(inner.parameters(), slow.parameters(), strict=True):
            anchor.grad = anchor.detach() - theirs.detach() if anchor.requires_grad else None
        slow_optimizer.step()
        inner.load_state_dict(slow.state_dict() | dict(inner.named_buffers()))
    assert_same(net, slow, rtol=1e-5, atol=1e-6)


OFFLOADED = {
    "plain": {"period": 2},
    "adaptive": {"period": "adaptive", "codec": "linear8"},
    "streaming": {"period": 4, "codec": "e3m0", "exchange": "2x1x0.5"},
    "pairs": {"period": 2, "exchange": "pairs"},
    "members": {"period": 2, "exchange": "members", "codec": "sparseloco"},
}


@pytest.mark.parametrize("options", OFFLOADED.values(), ids=OFFLOADED)
@pytest.mark.parametrize("first", [False, True])
def test_an_offloaded_outer_optimizer_takes_the_same_steps_and_has_the_same_state(
    attached: Callable, options: dict[str, Any], first: bool
) -> None:
    plain = offbeat.LocalSGD(outer=offbeat.Outer(), **options)
    halves = [
        offbeat.LocalSGD(outer=offbeat.Outer(offload=where), **options)
        for where in (first, not first)
    ]
    net, optimizer, _ = attached(plain)
    train(net, optimizer, range(12))
    begun, begun_optimizer, begun_session = attached(halves[0])
    train(begun, begun_optimizer, range(5))
    resumed, resumed_optimizer, resumed_session = attached(halves[1])
    resumed.load_state_dict(begun.state_dict())
    resumed_optimizer.load_state_dict(copy.deepcopy(begun_optimizer.state_dict()))
    resumed_session.load_state_dict(begun_session.state_dict())
    train(resumed, resumed_optimizer, range(5, 12))
    train(begun, begun_optimizer, range(5, 12))
    assert_same(resumed, net, rtol=0, atol=0)
    assert_same(begun, net, rtol=0, atol=0)


def test_an_anchor_is_taken_when_training_begins(attached: Callable) -> None:
    """Weights loaded after attaching are where the first period starts."""
    strategy = offbeat.LocalSGD(period=1, outer=offbeat.Outer(lr=1.0, momentum=0.0, nesterov=False))
    net, optimizer, _ = attached(strategy)
    plain = Net()
    for model in (net, plain):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    train(net, optimizer, range(3))
    train(plain, sgd(plain), range(3))
    assert_same(net, plain, rtol=1e-5, atol=1e-6)


def test_half_precision_does_not_swallow_an_outer_step() -> None:
    """Outer steps below half precision's resolution add up in the anchor."""
    net = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    strategy = offbeat.LocalSGD(
        period=1, outer=offbeat.Outer(lr=0.25, momentum=0.0, nesterov=False)
    )
    with offbeat.attach(net, optimizer, strategy):
        for _ in range(4):
            net.weight.grad = torch.full_like(net.weight, 2**-8)
            optimizer.step()
    assert net.weight.item() == 1.0 - 2**-8


def old_outer_step_(
    outer: offbeat.Outer,
    anchors: list[torch.Tensor],
    momenta: list[torch.Tensor],
    means: list[torch.Tensor],
) -> None:
    """The formula of SlowMo and DiLoCo, written out as it was before the step was torch.optim's."""
    for anchor, momentum, mean in zip(anchors, momenta, means, strict=True):
        change = anchor - mean
        momentum.mul_(outer.momentum).add_(change)
        if outer.nesterov:
            change.add_(momentum, alpha=outer.momentum)
        else:
            change = momentum
        anchor.sub_(change, alpha=outer.lr)


@pytest.mark.parametrize(
    "outer",
    [
        offbeat.Outer(),
        offbeat.Outer(lr=1.0, momentum=0.5, nesterov=False),
        offbeat.Outer(lr=0.3, momentum=0.0, nesterov=False),
        functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    ],
)
def test_outer_steps_are_those_of_the_formula(
    attached: Callable, outer: Callable[..., torch.optim.Optimizer]
) -> None:
    net, optimizer, _ = attached(offbeat.LocalSGD(period=2, outer=outer))
    plain = Net()
    plain_optimizer = sgd(plain)
    formula = outer if isinstance(outer, offbeat.Outer) else offbeat.Outer()
    moved = [p for p in plain.parameters() if p.requires_grad]
    anchors = [p.detach().clone() for p in moved]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    train(net, optimizer, range(12))
    for begin in range(0, 12, 2):
        train(plain, plain_optimizer, range(begin, begin + 2))
        old_outer_step_(formula, anchors, momenta, [p.detach() for p in moved])
        for parameter, anchor in zip(moved, anchors, strict=True):
            parameter.detach().copy_(anchor)
    assert_same(net, plain, rtol=1e-6, atol=1e-6)


def test_an_outer_optimizer_may_be_any_of_torch(attached: Callable) -> None:
    make = functools.partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9))
    net, optimizer, _ = attached(offbeat.LocalSGD(period=3, outer=make))
    inner, slow = Net(), Net()
    inner_optimizer, slow_optimizer = sgd(inner), make(slow.parameters())
    train(net, optimizer, range(9))
    for begin in range(0, 9, 3):
        train(inner, inner_optimizer, range(begin, begin + 3))
        for mean, anchor in zip(inner.parameters(), slow.parameters(), strict=True):
            anchor.grad = anchor.detach() - mean.detach() if anchor.requires_grad else None
        slow_optimizer.step()
        inner.load_state_dict(slow.state_dict() | dict(inner.named_buffers()))
    assert_same(net, slow, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda parameters: None, ConfigError, "must return an optimizer of torch.optim"),
        (lambda parameters: torch.optim.SGD(parameters[:1]), ConfigError, "pass them all on"),
        (torch.optim.LBFGS, UnsupportedError, "LBFGS needs closures"),
        (torch.optim.SparseAdam, UnsupportedError, "SparseAdam needs sparse gradients"),
    ],
)
def test_an_outer_optimizer_that_cannot_work_is_refused(
    attached: Callable, make: Callable[..., object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attached(offbeat.LocalSGD(outer=make))


def test_the_state_of_another_outer_optimizer_is_refused(attached: Callable) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    net, optimizer, session = attached(offbeat.LocalSGD(period=1, outer=adam))
    train(net, optimizer, range(2))
    state = copy.deepcopy(session.state_dict())
    _, _, other = attached(offbeat.LocalSGD(period=1, outer="diloco"))
    with pytest.raises(CheckpointError, match="saved with Adam, and this one is SGD"):
        other.load_state_dict(state)
    amsgrad = functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True)
    _, _, other = attached(offbeat.LocalSGD(period=1, outer=amsgrad))
    with pytest.raises(CheckpointError, match="see 'outer/Adam/max_exp_avg_sq"):
        other.load_state_dict(state)
