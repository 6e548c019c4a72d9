"""Backward passes are noticed exactly once each, whatever PyTorch does on the way."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Notices
from offbeat.errors import UnsupportedError
from offbeat.session.events import EventDispatcher
from offbeat.transport.single_rank import SingleRank


class Diary(Callback):
    """Writes down what it hears of backward passes."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        self.heard.append("begins")

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        self.heard.append(f"ready {index}")

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self.heard.append("done")

    @override
    def on_backward_failed(self) -> None:
        self.heard.append("failed")


def dispatching(
    model: torch.nn.Module,
    diary: Callback,
    parameters: Mapping[str, torch.nn.Parameter] | None = None,
) -> EventDispatcher:
    return EventDispatcher(
        model,
        None,
        [diary],
        parameters=dict(model.named_parameters()) if parameters is None else parameters,
        device_type="cpu",
        driver=SingleRank(),
        notices=Notices(rank=0),
    )


class Net(torch.nn.Module):
    """Two layers; `checkpointed` says how the first is run, `skip_second` leaves the
    other one out.
    """

    def __init__(self, *, checkpointed: str | None = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 1, bias=False)
        self.checkpointed = checkpointed
        self.skip_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed is None:
            hidden = self.first(x)
        else:
            hidden = checkpoint(self.first, x, use_reentrant=self.checkpointed == "reentrant")
        return hidden if self.skip_second else self.second(hidden)


def hooked(net: Net) -> tuple[Diary, EventDispatcher]:
    diary = Diary()
    return diary, dispatching(net, diary)


def inputs() -> torch.Tensor:
    return torch.ones(2, 3, requires_grad=True)


ONE_PASS = ["begins", "ready 1", "ready 0", "done"]


@pytest.mark.parametrize("checkpointed", [None, "plain", "reentrant"])
def test_one_backward_is_one_pass(checkpointed: str | None) -> None:
    net = Net(checkpointed=checkpointed)
    diary, _ = hooked(net)
    net(inputs()).sum().backward()
    assert diary.heard == ONE_PASS


def test_several_forwards_under_one_loss_are_one_pass() -> None:
    net = Net()
    diary, _ = hooked(net)
    (net(inputs()) + net(2 * inputs())).sum().backward()
    assert diary.heard == ONE_PASS


def test_retained_graphs_are_passes_of_their_own() -> None:
    net = Net()
    diary, _ = hooked(net)
    loss = net(inputs()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert diary.heard == ONE_PASS * 2


def test_a_loss_past_the_roots_outputs_is_noticed_from_a_parameter() -> None:
    net = Net()
    diary, _ = hooked(net)
    net.first(inputs()).sum().backward()
    assert diary.heard == ["begins", "ready 0", "done"]


def test_autograd_grad_accumulates_nothing() -> None:
    net = Net()
    diary, _ = hooked(net)
    x = inputs()
    torch.autograd.grad(net(x).sum(), x)
    assert not any("ready" in event for event in diary.heard)


def test_a_sparse_gradient_is_heard_of_like_a_dense_one() -> None:
    net = torch.nn.Sequential(
        torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1, bias=False)
    )
    diary = Diary()
    dispatching(net, diary)
    for _ in range(2):
        net(torch.tensor([1, 4])).sum().backward()
    assert diary.heard == ["begins", "ready 1", "ready 0", "done"] * 2
    gradient = net[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    assert gradient.is_sparse


def test_a_parameter_without_gradient_is_not_heard_of() -> None:
    net = Net()
    net.skip_second = True
    diary, _ = hooked(net)
    net(inputs()).sum().backward()
    assert diary.heard == ["begins", "ready 0", "done"]


def test_several_models_in_a_pass_end_it_in_the_order_in_which_they_were_attached() -> None:
    # Each waits for its peers there, which may have reached them in another order.
    ended: list[str] = []

    class Ending(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        @override
        def on_backward_done(self, *, synchronised: bool) -> None:
            ended.append(self.name)

    generator, critic = Net(), Net()
    dispatching(generator, Ending("generator"))
    dispatching(critic, Ending("critic"))
    (generator(inputs()) + critic(inputs())).sum().backward()
    (critic(inputs()) + generator(inputs())).sum().backward()
    assert ended == ["generator", "critic"] * 2


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_an_exception_in_backward_is_reported_at_the_next_forward_and_later_passes_work() -> None:
    net = Net()
    diary, _ = hooked(net)
    with pytest.raises(RuntimeError, match="out of memory"):
        net.second(Explode.apply(net.first(inputs()))).sum().backward()
    assert diary.heard == ["begins", "ready 1"]
    net(inputs()).sum().backward()
    assert diary.heard == ["begins", "ready 1", "failed", *ONE_PASS]


def test_what_a_listener_raises_comes_out_of_backward() -> None:
    class Refusing(Diary):
        @override
        def on_backward_done(self, *, synchronised: bool) -> None:
            raise ValueError("refused")

    net = Net()
    dispatching(net, Refusing())
    with pytest.raises(ValueError, match="refused"):
        net(inputs()).sum().backward()


def test_a_root_inside_a_reentrant_checkpoint_is_refused() -> None:
    net = Net()
    hooked(net)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        checkpoint(net, inputs(), use_reentrant=True).sum().backward()


def test_a_root_inside_a_plain_checkpoint_is_one_pass() -> None:
    net = Net()
    diary, _ = hooked(net)
    checkpoint(net, inputs(), use_reentrant=False).sum().backward()
    assert diary.heard == ONE_PASS


@pytest.mark.parametrize("compile_first", [True, False])
def test_a_compiled_model_is_heard_like_a_plain_one(compile_first: bool) -> None:
    net = Net()
    if compile_first:
        model = torch.compile(net, backend="aot_eager")
        diary = Diary()
        dispatching(model, diary, dict(net.named_parameters()))
    else:
        diary, _ = hooked(net)
        model = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        model(inputs()).sum().backward()
    assert [event for event in diary.heard if event in ("begins", "done")] == ["begins", "done"] * 2
    assert sorted(set(diary.heard)) == sorted(set(ONE_PASS))


def test_after_removal_nothing_is_left() -> None:
    net = Net()
    diary, hooks = hooked(net)
    loss = net(inputs()).sum()
    hooks.remove()
    loss.backward()
    net(inputs()).sum().backward()
    assert diary.heard == []
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
