"""What is counted, once, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged
from torch.utils.checkpoint import checkpoint

from kfac_maths_support.reference import capture_all, take_all, take_square
from offbeat import Curvature
from offbeat.kfac.blocks import Side
from offbeat.kfac.capture import Capture, Increment
from offbeat.kfac.survey import survey


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def increments(model: nn.Module, run: Callable[[], Any], **kwargs: Any) -> list[Increment]:
    blocks, capture = capture_all(model, **kwargs)
    run()
    found = take_all(capture, blocks)
    capture.remove()
    return found


def assert_same(some: list[Increment], others: list[Increment]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.weight == other.weight > 0
        torch.testing.assert_close(one.packed, other.packed, rtol=1e-4, atol=1e-6)


class Residual(nn.Module):
    """Layers in a body that may be checkpointed."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self.head(x + self.body(x))  # type: ignore[no-any-return]
        return self.head(x + checkpoint(self.body, x, use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_layers_are_counted_once(use_reentrant: bool, every: int) -> None:
    plain, options = Residual(None), Curvature(sample_stride=every)
    x = torch.randn(5, 4, requires_grad=True)
    expected = increments(
        plain, lambda: plain(x).square().sum(1).mean().backward(), options=options, step=1
    )
    plain.use_reentrant = use_reentrant
    assert_same(
        increments(
            plain, lambda: plain(x).square().sum(1).mean().backward(), options=options, step=1
        ),
        expected,
    )


def test_what_a_checkpoint_frees_is_not_kept_by_hooks() -> None:
    model, alive = Residual(False), []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = x.tanh()
            alive.append(torch.utils.weak.TensorWeakRef(between))
            return self.layer(between)  # type: ignore[no-any-return]

    model.body = nn.Sequential(Inner(), nn.Tanh())
    _, capture = capture_all(model)
    output = model(torch.randn(3, 4))
    assert alive[0]() is None
    output.sum().backward()
    capture.remove()


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_are_unscaled(scale: float) -> None:
    model, x = small_net(), torch.randn(3, 2, 4, 4)
    expected = increments(model, lambda: model(x).square().sum(1).mean().backward())
    scaled = increments(
        model, lambda: (model(x).square().sum(1).mean() * scale).backward(), grad_scale=scale
    )
    assert_same(scaled, expected)


def test_factors_are_summed_in_float32_under_autocast() -> None:
    """Inputs of 1 + 2^-7 have squares that bfloat16 cannot tell from 1 + 2^-6."""
    model, x = nn.Linear(3, 2), torch.full((4, 3), 1 + 2**-7)

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).float().sum(1).mean().backward()

    a, g = increments(model, run)
    assert a.packed.dtype == g.packed.dtype == torch.float32
    assert torch.equal(a.packed[0, :3], torch.full((3,), (1 + 2**-7) ** 2))


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.BatchNorm1d(3).eval()])
def test_a_half_precision_model_has_float32_factors(layer: nn.Module) -> None:
    model, x = layer.bfloat16(), torch.randn(4, 3).bfloat16()
    a, g = increments(model, lambda: model(x).float().square().sum(1).mean().backward())
    assert a.packed.dtype == g.packed.dtype == torch.float32


def test_activations_may_be_changed_in_place() -> None:
    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(inplace),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.ReLU(inplace),
            nn.Linear(5, 2),
        )

    x = torch.randn(3, 2, 4, 4)
    found = [
        increments(model, lambda model=model: model(x).square().sum(1).mean().backward())
        for model in (net(True), net(False))
    ]
    assert_same(*found)


class Twice(nn.Module):
    """One layer, applied twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(x).tanh())  # type: ignore[no-any-return]


def test_a_shared_layer_sees_more_positions_of_the_same_examples() -> None:
    model, x = Twice(), torch.randn(5, 3)
    blocks, capture = capture_all(model)
    model(x).square().sum(1).mean().backward()
    a, g = take_square(capture, blocks)
    capture.remove()

    first = model.shared(x)
    second_input = first.tanh()
    second = model.shared(second_input)
    gradients = torch.autograd.grad(second.square().sum(), [first, second])
    rows = torch.cat([torch.cat([rows, torch.ones(5, 1)], dim=1) for rows in (x, second_input)])
    torch.testing.assert_close(a[0], rows.mT @ rows / 10)
    torch.testing.assert_close(g[0], sum(each.mT @ each for each in gradients) / 5)


def test_an_unused_layer_weighs_nothing() -> None:
    model = Twice()
    found = increments(model, lambda: model(torch.randn(5, 3)).sum().backward())
    assert [increment.weight for increment in found] == [10, 5, 0, 0]
    assert all(not increment.packed.any() for increment in found[2:])
    assert [increment.packed.shape for increment in found[2:]] == [(1, 10), (1, 6)]


def test_passes_are_told_apart_even_if_their_backward_passes_come_later() -> None:
    model, x = Twice(), torch.randn(6, 3)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().sum(1).mean() / 3  # type: ignore[no-any-return]

    def at_once() -> None:
        (loss(x) * 3).backward()

    def round_robin() -> None:
        for rows in x.split(2):
            loss(rows).backward()

    def afterwards() -> None:
        for each in [loss(rows) for rows in x.split(2)]:
            each.backward()

    expected = increments(model, at_once)[:2]
    for run in (round_robin, afterwards):
        assert_same(increments(model, run)[:2], expected)


def test_they_are_where_the_root_is_never_called() -> None:
    model, x = small_net(), torch.randn(6, 2, 4, 4)

    def train(*batches: torch.Tensor) -> None:
        for batch in batches:
            output = batch
            for layer in model:
                output = layer(output)
            (output.square().sum(1).mean() / len(batches)).backward()

    def train_after_an_error(*batches: torch.Tensor) -> None:
        with pytest.raises(TypeError):
            model()
        train(*batches)

    expected = increments(model, lambda: train(x))
    for run in (train, train_after_an_error):
        assert_same(increments(model, lambda run=run: run(*x.split(2))), expected)


@pytest.mark.parametrize("evaluates_first", [True, False])
def test_an_evaluation_with_gradients_on_adds_no_terms_of_the_loss(evaluates_first: bool) -> None:
    model, x, many = Twice(), torch.randn(6, 3), torch.randn(60, 3)

    def train() -> None:
        model(x).square().sum(1).mean().backward()

    def evaluate_too() -> None:
        for run in (train, lambda: model(many))[:: -1 if evaluates_first else 1]:
            run()

    assert_same(increments(model, evaluate_too)[1:2], increments(model, train)[1:2])


def test_what_is_differentiated_and_trains_nothing_adds_no_gradients() -> None:
    model, x = Twice(), torch.randn(6, 3, requires_grad=True)

    def train(*, looks: bool) -> None:
        output = model(x)
        if looks:
            torch.autograd.grad(output.sum(), [x, *model.shared.parameters()], retain_graph=True)
        output.square().sum(1).mean().backward()

    def look_elsewhere() -> None:
        torch.autograd.grad(model(torch.randn(60, 3)).sum(), list(model.shared.parameters()))
        train(looks=False)

    expected = increments(model, lambda: train(looks=False))[:2]
    assert_same(increments(model, lambda: train(looks=True))[:2], expected)
    assert_same(increments(model, look_elsewhere)[1:2], expected[1:])


def test_nothing_is_seen_without_gradients_or_between_steps() -> None:
    model, x = small_net(), torch.randn(3, 2, 4, 4)
    blocks, capture = capture_all(model)
    with torch.no_grad():
        model(x)
    assert [increment.weight for increment in take_all(capture, blocks)] == [0, 0, 0, 0]
    capture.stop()
    model(x).sum().backward()
    capture.start(1)
    assert [increment.weight for increment in take_all(capture, blocks)] == [0, 0, 0, 0]
    model(x).sum().backward()
    assert all(increment.weight > 0 for increment in take_all(capture, blocks))
    assert [increment.weight for increment in take_all(capture, blocks)] == [0, 0, 0, 0]
    capture.remove()


def test_a_pass_through_a_model_that_is_frozen_for_another_ones_sake_is_not_seen() -> None:
    model, x = small_net(), torch.randn(3, 2, 4, 4)

    def train(*, generates: bool) -> None:
        if generates:
            model.requires_grad_(False)
            model((2 * x).requires_grad_()).sum().backward()
            model.requires_grad_(True)
        model(x).square().sum(1).mean().backward()

    expected = increments(model, lambda: train(generates=False))
    assert_same(increments(model, lambda: train(generates=True)), expected)


def test_steps_are_apart() -> None:
    model, x = small_net(), torch.randn(3, 2, 4, 4)
    blocks, capture = capture_all(model)
    found = []
    for step in range(2):
        capture.start(step)
        model(x).square().sum(1).mean().backward()
        found.append(take_all(capture, blocks))
        capture.stop()
    capture.remove()
    assert_same(*found)


def test_inputs_are_told_of_in_the_forward_pass_and_gradients_in_reverse() -> None:
    model, told = small_net(), []

    def added(index: int, side: Side) -> None:
        told.append((index, side))

    options = Curvature()
    capture = Capture(model, survey(model, options).blocks, options, warn=pytest.fail, added=added)
    capture.start(0)
    output = model(torch.randn(3, 2, 4, 4))
    assert told == [(0, "input"), (1, "input")]
    output.sum().backward()
    assert told[2:] == [(1, "output"), (0, "output")]
    capture.remove()


def test_inputs_may_be_named() -> None:
    class Naming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)  # type: ignore[no-any-return]

    model = Naming()
    found = increments(model, lambda: model(torch.randn(4, 3)).sum().backward())
    assert [increment.weight for increment in found] == [4, 4]


def test_a_layer_that_changes_its_shape_is_retired_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    options, warnings = Curvature(), list[str]()
    blocks = survey(model, options).blocks
    capture = Capture(model, blocks, options, warn=warnings.append)
    for width in (4, 6, 6, 4):
        model[0].weight = nn.Parameter(torch.randn(3, width))
        capture.start(0)
        model(torch.randn(5, width)).sum().backward()
        found = take_all(capture, list(blocks))
    capture.remove()
    assert len(warnings) == 1
    assert "'0'" in warnings[0]
    assert "(3, 6)" in warnings[0]
    assert capture.retired == {"0"}
    assert [increment.weight for increment in found] == [0, 0, 5, 5]
    assert found[0].packed.shape == (1, 15)


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_a_layer_of_inputs_that_are_not_dense_is_retired_with_a_warning(kind: str) -> None:
    rows, model, options, warnings = torch.randn(4, 3), nn.Linear(3, 2), Curvature(), list[str]()
    ends = torch.tensor([0, 1, 4])
    x = rows.to_sparse() if kind == "sparse" else nested_tensor_from_jagged(rows, ends)
    capture = Capture(model, survey(model, options).blocks, options, warn=warnings.append)
    capture.start(0)
    output = model(x)
    (output.values() if output.is_nested else output).sum().backward()
    capture.remove()
    assert len(warnings) == 1
    assert "sparse or nested" in warnings[0]
    torch.testing.assert_close(model.weight.grad, rows.sum(0).expand(2, 3))


@pytest.mark.parametrize("shape", [(2, 2), (3, 1, 4, 4), (3, 2, 8, 8)])
def test_a_batch_of_a_wrong_shape_raises_as_without_hooks_and_layers_are_watched_on(
    shape: tuple[int, ...],
) -> None:
    model, x = small_net(), torch.randn(3, 2, 4, 4)
    with pytest.raises(RuntimeError) as expected:
        model(torch.randn(shape))
    blocks, capture = capture_all(model)
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(shape))
    assert str(raised.value) == str(expected.value)
    model(x).sum().backward()
    assert all(increment.weight > 0 for increment in take_all(capture, blocks))
    capture.remove()


def test_copies_of_the_model_are_not_seen_and_hooks_come_out() -> None:
    model = nn.Sequential(small_net(), nn.Linear(3, 3))
    blocks, capture = capture_all(model)
    copied = copy.deepcopy(model)
    copied(torch.randn(3, 2, 4, 4)).sum().backward()
    assert all(increment.weight == 0 for increment in take_all(capture, blocks))
    capture.remove()
    capture.remove()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_hooks_of_an_old_graph_stay_silent() -> None:
    model = nn.Linear(3, 2)
    blocks, capture = capture_all(model)
    output = model(torch.randn(4, 3))
    capture.remove()
    output.sum().backward()
    assert all(increment.weight == 0 for increment in take_all(capture, blocks))


def test_a_gradient_that_is_not_finite_stays_in_its_step() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    blocks, capture = capture_all(model)
    (model(x).sum() * float("nan")).backward()
    a, g = take_all(capture, blocks)
    assert a.packed.isfinite().all()
    assert not g.packed.isfinite().all()
    model(x).sum().backward()
    assert all(increment.packed.isfinite().all() for increment in take_all(capture, blocks))
    capture.remove()


def test_the_mode_of_a_model_does_not_decide_what_is_seen() -> None:
    """Models are fine-tuned in the mode for evaluation, too."""
    model, x = small_net(), torch.randn(3, 2, 4, 4)

    def train() -> None:
        model(x).square().sum(1).mean().backward()

    expected = increments(model, train)
    model.eval()
    assert_same(increments(model, train), expected)
