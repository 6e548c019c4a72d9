"""K-FAC in a world of one, against a slow reference, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from kfac_support import reference
from kfac_support.inverse import has_inverse
from kfac_support.plans import Unfused
from offbeat import Session
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.errors import CheckpointError, ConfigError, UnsupportedError
from offbeat.kfac.callback import KFACCallback
from offbeat.kfac.costs import gather_plan_inputs
from offbeat.kfac.curvature import Grafting
from offbeat.kfac.inverses import InversionTask, Inverter
from offbeat.kfac.placement import InverseCosts
from offbeat.kfac.plans import FactorCosts, PlanInputs
from offbeat.strategies.kfac import KFACStrategy
from offbeat_lab.plan.profile import PolynomialInversion

KINDS = [offbeat.DKFAC, offbeat.MPDKFAC, offbeat.SPDKFAC, offbeat.DPKFAC]
HYPER: list[dict[str, Any]] = [
    {"damping": 0.01, "decay": 0.9, "kl_clip": None, "factor_interval": 1, "inverse_interval": 1},
    {"damping": 0.01, "decay": 0.5, "kl_clip": 1e-3, "factor_interval": 2, "inverse_interval": 3},
    {"damping": 0.1, "decay": 0.0, "kl_clip": 1e-2, "factor_interval": 1, "inverse_interval": 2},
    {"damping": 0.05, "decay": 0.5, "kl_clip": 1e-2, "factor_interval": 4, "inverse_interval": 6},
    {"damping": 0.05, "decay": 0.5, "kl_clip": 1e-2, "factor_interval": 3, "inverse_interval": 8},
]
HYPER += [hyper | {"pi": False} for hyper in HYPER]
GRAFTED = HYPER[1] | {"damping": 0.1}
"""So that some layers' preconditioned gradients are shorter than plain ones, and others longer."""

Attach = Callable[..., tuple[nn.Sequential, torch.optim.Optimizer, Session]]


@pytest.fixture
def attached() -> Iterator[Attach]:
    sessions: list[Session] = []

    def make(
        strategy: KFACStrategy, **kwargs: Any
    ) -> tuple[nn.Sequential, torch.optim.Optimizer, Session]:
        net = reference.make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        sessions.append(offbeat.attach(net, optimizer, strategy, **kwargs))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


def part_of(session: Session) -> KFACCallback:
    return next(part for part in session.callbacks if isinstance(part, KFACCallback))


def batches(steps: range) -> list[reference.Batch]:
    return [reference.batch_of(0, step, num_examples=3) for step in steps]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for batch in batches(steps):
        reference.loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(left: nn.Module, right: nn.Module) -> None:
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "hyper"), [(KINDS[n % len(KINDS)], hyper) for n, hyper in enumerate(HYPER)]
)
def test_steps_are_those_of_the_slow_reference(
    attached: Attach, kind: type[KFACStrategy], hyper: dict[str, Any]
) -> None:
    net, optimizer, _ = attached(kind(**reference.options(**hyper)))
    train(net, optimizer, range(6))
    slow = reference.make_net()
    reference.train(slow, batches(range(6)), lr=0.05, momentum=0.9, **hyper)
    assert_close(net, slow)


@pytest.mark.parametrize("kind", [offbeat.SPDKFAC, offbeat.DPKFAC])
@pytest.mark.parametrize("grafting", ["floor", "layer"])
def test_grafted_steps_are_those_of_the_slow_reference(
    attached: Attach, kind: type[KFACStrategy], grafting: Grafting
) -> None:
    net, optimizer, _ = attached(kind(**reference.options(**GRAFTED, grafting=grafting)))
    train(net, optimizer, range(6))
    slow = reference.make_net()
    shares = reference.train(
        slow, batches(range(6)), lr=0.05, momentum=0.9, grafting=grafting, **GRAFTED
    )
    assert min(map(min, shares)) < 0.8 < 1.25 < max(map(max, shares))
    assert_close(net, slow)


@pytest.mark.parametrize("kind", [offbeat.SPDKFAC, offbeat.DPKFAC])
def test_a_loss_in_another_unit_makes_grafted_steps_longer_alike(kind: type[KFACStrategy]) -> None:
    """Factors of gradients, and the damping of the product, scale by the unit's square."""
    gradients = []
    for unit in (1.0, 16.0):
        strategy = kind(grafting="layer", damping=0.01 * unit**2, inverse_interval=1)
        net = reference.make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with offbeat.attach(net, optimizer, strategy):
            for batch in batches(range(3)):
                optimizer.zero_grad()
                (unit * reference.loss_of(net, batch)).backward()
                optimizer.step()
        gradients.append([p.grad / unit for p in net.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


class BothPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).float(), nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.float()).tanh().double())  # type: ignore[no-any-return]


def test_owners_take_the_steps_of_all_in_both_precisions_and_with_a_bias_that_is_frozen() -> None:
    x, nets = torch.randn(8, 3), []
    for kind in (offbeat.SPDKFAC, offbeat.DPKFAC):
        torch.manual_seed(0)
        net = BothPrecisions()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with offbeat.attach(net, optimizer, kind()):
            for step in range(4):
                for bias in (net.first.bias, net.last.bias):
                    bias.requires_grad_(step < 2)
                net(x).square().sum(1).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        nets.append(net)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_samples_are_enough_if_each_is_there_twice(
    attached: Attach, kind: type[KFACStrategy]
) -> None:
    hyper = {"factor_interval": 2, "inverse_interval": 2, "decay": 0.5}
    nets = []
    for stride in (1, 2):
        net, optimizer, _ = attached(kind(**reference.options(sample_stride=stride, **hyper)))
        for x, y in batches(range(6)):
            reference.loss_of(
                net, (x.repeat_interleave(2, 0), y.repeat_interleave(2, 0))
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    assert_close(*nets)


@pytest.mark.parametrize(
    ("kind", "hyper"), [(kind, HYPER[2 + number % 3]) for number, kind in enumerate(KINDS)]
)
def test_in_bfloat16_steps_are_nearly_those_of_the_slow_reference(
    attached: Attach, kind: type[KFACStrategy], hyper: dict[str, Any]
) -> None:
    net, optimizer, _ = attached(kind(**reference.options(inverse_dtype="bfloat16", **hyper)))
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    train(net, optimizer, range(3))
    slow = reference.make_net()
    reference.train(slow, batches(range(3)), lr=0.05, momentum=0.9, **hyper)
    mine, theirs = (
        torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (net, slow)
    )
    assert 0 < (mine - theirs).norm() < 0.02 * (theirs - before).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_what_is_kept_is_no_larger_and_comes_back(
    attached: Attach, kind: type[KFACStrategy]
) -> None:
    """Where inverses were kept in another form, all are made anew."""
    rounded = offbeat.Curvature(inverse_dtype="bfloat16")
    strategy = kind(inverse_interval=6, curvature=rounded)
    net, optimizer, session = attached(strategy)
    train(net, optimizer, range(3))
    kept = [
        inverse
        for inverse in part_of(session).preconditioner.inverses.packed
        if inverse is not None
    ]
    assert {inverse.dtype for inverse in kept} == {torch.bfloat16}
    dims = [slot.shape.dim for slot in part_of(session).slots]
    assert sum(inverse.nbytes for inverse in kept) == sum(2 * dim**2 for dim in dims)
    again, other, resumed = attached(strategy)
    again.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(session.state_dict())
    for model, stepping in ((net, optimizer), (again, other)):
        train(model, stepping, range(3, 7))
    for left, right in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    exact, exact_optimizer, plain = attached(
        replace(strategy, curvature=offbeat.Curvature(inverse_dtype="float32"))
    )
    plain.load_state_dict(session.state_dict())
    train(exact, exact_optimizer, range(1))
    assert all(
        bool(has_inverse(kept))
        for kept in part_of(plain).preconditioner.inverses.packed
        if kept is not None
    )


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_samples_take_turns_in_steps_with_factors(attached: Attach, interval: int) -> None:
    net, optimizer, session = attached(
        offbeat.SPDKFAC(factor_interval=interval, inverse_interval=20)
    )
    capture, phases = part_of(session).scheduler.capture, []
    for step in range(12):
        phases.append(capture.phase)
        train(net, optimizer, range(step, step + 1))
    assert [phase for phase in phases if phase is not None] == list(
        range(len(phases) - phases.count(None))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_is_a_step_like_any_other(attached: Attach, kind: type[KFACStrategy]) -> None:
    net, optimizer, session = attached(kind(inverse_interval=1))
    plain, plain_optimizer, _ = attached(kind(inverse_interval=1))
    train(plain, plain_optimizer, range(3))
    for batch in batches(range(3)):

        def closure(batch: reference.Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = reference.loss_of(net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_close(net, plain)
    assert session.stats.steps == session.stats.exchanges == 3


def test_gradients_scaled_by_amp_give_the_same_steps(attached: Attach) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net, optimizer, session = attached(offbeat.SPDKFAC(inverse_interval=1), scaler=scaler)
    plain, plain_optimizer, _ = attached(offbeat.SPDKFAC(inverse_interval=1))
    for step, batch in enumerate(batches(range(5))):
        for model, opt, scale in ((net, optimizer, scaler), (plain, plain_optimizer, None)):
            if scale is None:
                if step != 2:
                    reference.loss_of(model, batch).backward()
                    opt.step()
            else:
                scale.scale(
                    reference.loss_of(model, batch) * (float("inf") if step == 2 else 1.0)
                ).backward()
                scale.step(opt)
                scale.update()
            opt.zero_grad()
    assert_close(net, plain)
    assert session.stats.skipped_steps == 1


def launches_of(part: KFACCallback) -> list[str]:
    """Grows by the name of each factor whose message is launched."""
    launched: list[str] = []
    for slots, message in zip(part.plan.groups, part.scheduler.messages, strict=True):

        def launch(*args: Any, slots: Any = slots, launch: Any = message.launch) -> Any:
            launched.append(f"{'AG'[slots[0] % 2]}{slots[0] // 2}")
            return launch(*args)

        message.launch = launch  # type: ignore[method-assign]
    return launched


def test_factors_leave_during_the_passes_once_it_is_known_what_is_to_come(attached: Attach) -> None:
    net, optimizer, session = attached(Unfused())
    launched = launches_of(part_of(session))
    batch = reference.batch_of(0, 0)
    reference.loss_of(net, batch)
    assert launched == []
    reference.loss_of(net, batch).backward()
    optimizer.step()
    launched.clear()
    net.eval()
    net(batch[0])
    with torch.no_grad():
        net.train()(batch[0])
    assert launched == [], "these passes are not for training"
    net.zero_grad()
    for _ in range(2):
        loss = reference.loss_of(net, batch)
    assert launched == ["A0", "A1", "A2"]
    loss.backward()
    assert launched == ["A0", "A1", "A2", "G2", "G1", "G0"]


def test_they_do_in_the_backward_pass_where_the_root_is_not_called(attached: Attach) -> None:
    net, optimizer, session = attached(Unfused())
    launched = launches_of(part_of(session))
    train(net, optimizer, range(1))
    launched.clear()
    seen: list[str] = []
    x, y = reference.batch_of(0, 0)
    first = net[0](x)
    first.register_hook(lambda _: seen.extend(launched))
    output = first
    for layer in net[1:]:
        output = layer(output)
    assert launched == [], "an evaluation may begin so"
    (output - y).square().sum(dim=1).mean().backward()
    assert seen == ["A0", "A1", "A2", "G2", "G1"]


def test_factors_of_a_batch_that_is_accumulated_wait_for_the_others(attached: Attach) -> None:
    net, optimizer, session = attached(Unfused())
    launched = launches_of(part_of(session))
    train(net, optimizer, range(1))
    once = [*launched]
    assert once
    launched.clear()
    with session.no_sync():
        reference.loss_of(net, reference.batch_of(0, 1)).backward()
    assert launched == [], "this step has more batches than the first one"
    reference.loss_of(net, reference.batch_of(0, 2)).backward()
    optimizer.step()
    assert sorted(launched) == sorted(once)


def test_layers_that_are_unfrozen_have_their_factors_in_that_step(attached: Attach) -> None:
    net, optimizer, session = attached(Unfused())
    net[:4].requires_grad_(False)
    train(net, optimizer, range(2))
    factors = part_of(session).averages.factors
    outputs = [factors[slot] for slot in (1, 3)]
    assert not any(each.mass for each in outputs)
    net.requires_grad_(True)
    train(net, optimizer, range(2, 3))
    assert all(each.mass > 0 for each in outputs)


@pytest.mark.parametrize("pi", [False, True])
def test_inversions_begin_as_their_messages_arrive(
    attached: Attach, monkeypatch: pytest.MonkeyPatch, pi: bool
) -> None:
    net, optimizer, session = attached(offbeat.MPDKFAC(curvature=offbeat.Curvature(pi=pi)))
    part, events = part_of(session), list[str]()
    for number, message in enumerate(part.scheduler.messages):

        def wait(number: int = number, wait: Callable[[], None] = message.wait) -> None:
            events.append(f"message {number}")
            wait()

        message.wait = wait  # type: ignore[method-assign]

    invert = Inverter.invert

    def noted(self: Inverter, tasks: Sequence[InversionTask], **more: Any) -> list[torch.Tensor]:
        events.extend(task.name[0] for task in tasks)
        return invert(self, tasks, **more)

    monkeypatch.setattr(Inverter, "invert", noted)
    train(net, optimizer, range(1))
    if pi:
        assert events[:2] == ["message 0", "message 1"], (
            "a factor's damping depends on both factors of its block"
        )
        assert sorted(events[2:]) == [*"AAAGGG"]
    else:
        assert events == ["message 0", *"AAA", "message 1", *"GGG"]


def test_groups_are_planned_of_measured_times(
    attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = FactorCosts(
        all_reduce=LinkCost(alpha_s=0.0, beta_s_per_byte=1e-12),
        inverse=InverseCosts(
            inversion=PolynomialInversion(constant_s=1e-6, square_s=0.0, cube_s=0.0),
            broadcast=Channel(link=LinkCost(alpha_s=1e-3, beta_s_per_byte=0.0), gap_s=0.0),
        ),
    )

    def with_costs(*args: Any, **kwargs: Any) -> PlanInputs:
        return replace(gather_plan_inputs(*args, **kwargs), costs=costs)

    monkeypatch.setattr("offbeat.strategies.kfac.gather_plan_inputs", with_costs)
    hyper: dict[str, Any] = {"damping": 0.01, "decay": 0.9, "kl_clip": None}
    net, optimizer, session = attached(
        offbeat.SPDKFAC(**reference.options(inverse_interval=1, **hyper))
    )
    assert part_of(session).plan.groups == ((0, 2, 4), (5, 3, 1))
    train(net, optimizer, range(6))
    *earlier, last = part_of(session).plan.groups
    assert earlier
    assert last == (1,), "what was ready long before has left when the last factor is ready"
    slow = reference.make_net()
    reference.train(slow, batches(range(6)), lr=0.05, momentum=0.9, **hyper)
    assert_close(net, slow)


def test_a_factor_without_inverse_means_plain_gradients_for_its_layer(attached: Attach) -> None:
    net, optimizer, session = attached(
        offbeat.DKFAC(kl_clip=None, curvature=offbeat.Curvature(decay=0.5))
    )
    part = part_of(session)
    batch = reference.batch_of(0, 0)
    part.averages.factors[2].mass.fill_(1.0)
    part.averages.factors[2].weighted_sum.fill_(-1e6)
    reference.loss_of(net, batch).backward()
    plain = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    optimizer.step()
    same = [
        torch.equal(p.grad, before)
        for p, before in zip(net.parameters(), plain, strict=True)
        if p.grad is not None
    ]
    assert same == [False, False, True, False, False]
    assert any("A of '3'" in notice and "plain gradients" in notice for notice in session.notices)


def test_layers_that_are_not_covered_are_named_once(attached: Attach) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.PReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.SPDKFAC()) as session:
        for _ in range(2):
            net(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        assert sum("1 (PReLU is not supported)" in notice for notice in session.notices) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"damping": -1e-3}, "damping .* greater than 0"),
        ({"damping": float("nan")}, "damping .* greater than 0"),
        ({"factor_interval": 0}, "factor_interval .* of at least 1"),
        ({"inverse_interval": 0}, "inverse_interval .* of at least 1"),
        ({"kl_clip": 0.0}, "kl_clip .* greater than 0"),
        ({"exchange": "gtopp"}, "did you mean 'gtopk'"),
        ({"exchange": offbeat.LocalSGD()}, "allowed is GradientStrategy"),
        ({"curvature": {"max_dim": 100}}, "allowed is Curvature"),
        ({"grafting": "global"}, "allowed is auto . none"),
    ],
)
def test_options_outside_their_range_are_refused(
    kind: type[KFACStrategy], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**options)


class Own(torch.optim.Optimizer):
    """Need not be told its learning rate."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.05 * parameter.grad)


@pytest.mark.parametrize("options", [{}, {"lr": None}])
def test_an_optimizer_that_does_not_say_its_rate_takes_steps_without_a_limit(
    options: dict[str, Any],
) -> None:
    nets = []
    for kl_clip, given in ((1e-9, options), (None, {"lr": 0.05})):
        net = reference.make_net()
        optimizer = Own(net.parameters(), given)
        with offbeat.attach(net, optimizer, offbeat.SPDKFAC(kl_clip=kl_clip)) as session:
            train(net, optimizer, range(3))
            said = ["does not say its learning rate" in notice for notice in session.notices]
        assert any(said) == (given is options)
        nets.append(net)
    assert_close(*nets)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_any_layer_for_it_is_refused(kind: type[KFACStrategy]) -> None:
    net = nn.LSTM(3, 3)
    with pytest.raises(ConfigError, match="finds no layer that it can precondition"):
        offbeat.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), kind())


def test_fused_optimizers_under_a_scaler_are_refused() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    with pytest.raises(UnsupportedError, match="fused=False"):
        offbeat.attach(net, optimizer, offbeat.SPDKFAC(), scaler=torch.amp.GradScaler("cpu"))


def test_a_state_of_another_model_is_refused_and_changes_nothing(attached: Attach) -> None:
    net, optimizer, session = attached(offbeat.SPDKFAC())
    train(net, optimizer, range(2))
    before = session.state_dict()["callbacks"]["kfac"]["replicated"]
    wrong = session.state_dict()
    wrong["callbacks"]["kfac"]["replicated"]["3/input/sum"] = torch.ones(1, 3)
    with pytest.raises(CheckpointError, match="'3/input'"):
        session.load_state_dict(wrong)
    after = session.state_dict()["callbacks"]["kfac"]["replicated"]
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert (
            torch.equal(after[key], value)
            if isinstance(value, torch.Tensor)
            else after[key] == value
        )


@pytest.mark.parametrize("rows", [(6, 3), (3, 6), (3, 2), (100, 10)])
def test_factors_in_other_pieces_are_refused_and_change_nothing(
    attached: Attach, rows: tuple[int, int]
) -> None:
    old, new = (
        attached(offbeat.SPDKFAC(curvature=offbeat.Curvature(max_dim=most))) for most in rows
    )
    train(old[0], old[1], range(2))
    with pytest.raises(CheckpointError, match="with the same max_dim"):
        new[2].load_state_dict(old[2].state_dict())
    fresh = attached(offbeat.SPDKFAC(curvature=offbeat.Curvature(max_dim=rows[1])))
    for mine, untouched in zip(
        part_of(new[2]).averages.factors.values(),
        part_of(fresh[2]).averages.factors.values(),
        strict=True,
    ):
        assert torch.equal(mine.weighted_sum, untouched.weighted_sum)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_half_of_the_squares_and_of_their_diagonals(
    attached: Attach, kind: type[KFACStrategy]
) -> None:
    net, optimizer, session = attached(kind())
    train(net, optimizer, range(2))
    part = part_of(session)
    dims = [slot.shape.dim for slot in part.slots]
    triangles = sum(dim**2 + dim for dim in dims) // 2
    assert state_elements(session) == 2 * triangles + len(dims), (
        "a running average with its mass, and an inverse"
    )
    in_memory = [factor.weighted_sum for factor in part.averages.factors.values()] + [
        kept for kept in part.preconditioner.inverses.packed if kept is not None
    ]
    nbytes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in in_memory}
    assert sum(nbytes.values()) == 8 * 2 * triangles


def state_elements(session: Session) -> int:
    state = session.state_dict()["callbacks"]["kfac"]
    return sum(
        value.numel()
        for kept in state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    )


def test_factors_take_time_in_steps_with_factors_alone(attached: Attach) -> None:
    net, optimizer, session = attached(offbeat.SPDKFAC(factor_interval=2))
    spent_s = [part_of(session).counters()["factor_s"]]
    for step in range(5):
        train(net, optimizer, range(step, step + 1))
        spent_s.append(part_of(session).counters()["factor_s"])
    assert spent_s[0] == 0 < spent_s[1] < spent_s[2] < spent_s[3] == spent_s[4] < spent_s[5]


@pytest.mark.parametrize("exchange", [offbeat.OneBitAdam(), offbeat.QGenX()])
def test_an_exchange_that_takes_steps_of_its_own_is_refused(exchange: Any) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(UnsupportedError, match="K-FAC"):
        offbeat.attach(net, optimizer, offbeat.SPDKFAC(exchange=exchange))
