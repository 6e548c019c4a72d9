"""Models whose gradients are sparse, under every kind of strategy: exchanged ones become dense,
others stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from conformance_support.nets import assert_same
from conformance_support.sparse_nets import MakeOptimizer, SparseNet, batch, train
from offbeat import Session
from offbeat.errors import UnsupportedError
from offbeat.session.checkpoint import load, save
from offbeat.strategies.base import Strategy
from offbeat.torch_private import stored_entries
from offbeat.xmc.row_optimizers import RowAdagrad, RowAdam, RowSGD

pytestmark = pytest.mark.filterwarnings("ignore:no loader of this session")

EXCHANGE_GRADIENTS: dict[str, Strategy] = {
    "allreduce": lent(offbeat.AllReduce(), replica_check_interval=1),
    "allreduce in small buckets": lent(offbeat.AllReduce(), bucket_mib=1e-4),
    "topk": offbeat.TopK(density=1.0),
    "gtopk": offbeat.GTopK(density=1.0, collective="reduce_scatter"),
    "ef21": offbeat.EF21(density=1.0),
    "eagersgd": offbeat.EagerSGD(),
    "post-local sgd at first": offbeat.LocalSGD(period=2, start_step=3),
}
AVERAGE_WEIGHTS: dict[str, Strategy] = {
    "localsgd": offbeat.LocalSGD(period=2, warmup=0, optimizer_state="local"),
    "localsgd with averaged state": offbeat.LocalSGD(period=2, warmup=0),
    "dpsgd": offbeat.DPSGD(),
    "sgp": offbeat.SGP(),
    "wagma": offbeat.WAGMA(),
    "adpsgd": offbeat.ADPSGD(),
    "elasticsgd": offbeat.ElasticSGD(mega_batch=2),
    "adaptive": offbeat.AdaptiveSGD(mega_batch=2),
}
MOVE_WEIGHTS_ALONE: dict[str, Strategy] = {"crossbow": offbeat.Crossbow()}
"""Those that average weights too, and do not leave a world of one as it is."""
ALL = EXCHANGE_GRADIENTS | AVERAGE_WEIGHTS

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: RowSGD(parameters, 0.1),
    "adagrad": lambda parameters: RowAdagrad(parameters, 0.1),
    "torch's sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}
"""Whose steps are the same with a dense gradient as with a sparse one."""

every_strategy = pytest.mark.parametrize("name", ALL)


@pytest.fixture
def attached() -> Iterator[Callable[..., tuple[SparseNet, torch.optim.Optimizer, Session]]]:
    sessions: list[Session] = []

    def make(
        name: str, make_optimizer: MakeOptimizer
    ) -> tuple[SparseNet, torch.optim.Optimizer, Session]:
        net = SparseNet()
        optimizer = make_optimizer(net.parameters())
        sessions.append(offbeat.attach(net, optimizer, (ALL | MOVE_WEIGHTS_ALONE)[name]))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


WAYS = (("sgd", True), ("adagrad", False), ("torch's sgd", True))
IN_ALL_WAYS = ("allreduce", "gtopk", "localsgd with averaged state", "adaptive")
"""Dense and sparse exchanges of gradients, means of states, and merges by differences."""


@pytest.mark.parametrize(
    ("name", "kind", "set_to_none"),
    [
        (name, *way)
        for number, name in enumerate(ALL)
        for way in (WAYS if name in IN_ALL_WAYS else [WAYS[number % 3]])
    ],
)
def test_alone_it_is_the_plain_loop(
    name: str, kind: str, set_to_none: bool, attached: Callable
) -> None:
    net, optimizer, session = attached(name, OPTIMIZERS[kind])
    plain = SparseNet()
    train(net, optimizer, range(6), set_to_none=set_to_none)
    train(plain, OPTIMIZERS[kind](plain.parameters()), range(6))
    assert_same(net, plain, rtol=1e-5, atol=1e-6)
    assert (session.stats.steps, session.stats.skipped_steps) == (6, 0)


@pytest.mark.parametrize("name", ALL | MOVE_WEIGHTS_ALONE)
def test_exchanged_gradients_are_dense_and_others_stay_sparse(
    name: str, attached: Callable
) -> None:
    net, optimizer, _ = attached(name, OPTIMIZERS["sgd"])
    net(*batch(0)).backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in net.sparse_parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert {gradient.is_sparse for gradient in gradients} == {name not in EXCHANGE_GRADIENTS}


@pytest.mark.parametrize("name", AVERAGE_WEIGHTS)
@pytest.mark.parametrize("kind", [RowAdam, torch.optim.SparseAdam])
def test_rows_without_a_gradient_stay_where_they_are(
    name: str, kind: type[torch.optim.Optimizer], attached: Callable
) -> None:
    dense = {"between.weight", "between.bias", "rows.bias"}

    def make(net: SparseNet) -> torch.optim.Optimizer:
        # torch's takes sparse gradients only
        chosen = [p for n, p in net.named_parameters() if kind is RowAdam or n not in dense]
        return kind(chosen, lr=0.1)

    nets = [SparseNet(), SparseNet()]
    optimizers = [make(net) for net in nets]
    with offbeat.attach(nets[0], optimizers[0], ALL[name]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(6))
    assert_same(*nets, rtol=1e-6, atol=1e-7)


@every_strategy
def test_several_passes_and_none_in_a_step(name: str, attached: Callable) -> None:
    net, optimizer, session = attached(name, OPTIMIZERS["adagrad"])
    plain = SparseNet()
    plain_optimizer = OPTIMIZERS["adagrad"](plain.parameters())
    with session.no_sync():
        net(*batch(0)).backward()
    net(*batch(1)).backward()
    net(*batch(2)).backward()
    for step in range(3):
        plain(*batch(step)).backward()
    for model, opt in ((net, optimizer), (plain, plain_optimizer)):
        opt.step()
        opt.zero_grad()
        opt.step()  # a rank without a batch
        train(model, opt, range(3, 5))
    assert_same(net, plain, rtol=1e-5, atol=1e-6)


@every_strategy
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_moves_nothing(
    name: str, wrong: float, attached: Callable
) -> None:
    net, optimizer, session = attached(name, OPTIMIZERS["adagrad"])
    train(net, optimizer, range(1))
    before = copy.deepcopy(list(net.parameters()))
    features, words, labels = batch(1)
    with torch.no_grad():
        features.values[0] = wrong
    net.words.weight.register_hook(lambda gradient: None)
    net(features, words, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    assert session.stats.skipped_steps == 1
    train(net, optimizer, range(2, 4))
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())


@pytest.mark.parametrize("name", AVERAGE_WEIGHTS)
def test_a_sparse_gradient_alone_is_looked_at(name: str, attached: Callable) -> None:
    net, optimizer, session = attached(name, OPTIMIZERS["sgd"])
    before = net.rows.weight.detach().clone()
    net(*batch(0)).backward()
    assert net.rows.weight.grad is not None
    _, values = stored_entries(net.rows.weight.grad)
    values[0, 0] = float("nan")
    optimizer.step()
    assert torch.equal(net.rows.weight.detach(), before)
    assert session.stats.skipped_steps == 1


@pytest.mark.parametrize("name", ALL | MOVE_WEIGHTS_ALONE)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    name: str, attached: Callable, tmp_path: Path
) -> None:
    make: MakeOptimizer = lambda parameters: RowSGD(parameters, 0.1, momentum=0.9)  # noqa: E731
    straight, straight_optimizer, _ = attached(name, make)
    train(straight, straight_optimizer, range(7))
    first, first_optimizer, first_session = attached(name, make)
    train(first, first_optimizer, range(3))
    states = {
        "model": first.state_dict(),
        "optimizer": first_optimizer.state_dict(),
        "session": first_session.state_dict(),
    }
    save(tmp_path, "state", states)
    stored = load(tmp_path, "state").tree
    second, second_optimizer, second_session = attached(name, make)
    second.load_state_dict(stored["model"])
    second_optimizer.load_state_dict(stored["optimizer"])
    second_session.load_state_dict(stored["session"])
    train(second, second_optimizer, range(3, 7))
    assert_same(second, straight)


@every_strategy
def test_the_averaged_model_is_one_without_gradients(name: str, attached: Callable) -> None:
    net, optimizer, session = attached(name, OPTIMIZERS["sgd"])
    train(net, optimizer, range(2))
    net(*batch(2)).backward()
    optimizer.step()
    averaged = session.averaged_model()
    assert_same(averaged, net)
    assert all(parameter.grad is None for parameter in averaged.parameters())


@pytest.mark.parametrize("name", EXCHANGE_GRADIENTS)
def test_an_optimizer_of_sparse_gradients_alone_is_refused(name: str) -> None:
    net = torch.nn.Embedding(3, 2, sparse=True)
    with pytest.raises(
        UnsupportedError, match="exchanged ones are dense; use torch.optim.Adam, or .*LocalSGD"
    ):
        offbeat.attach(net, torch.optim.SparseAdam(net.parameters()), ALL[name])
