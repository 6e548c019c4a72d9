"""AdaptiveSGD's first steps, on a virtual cluster: with gradients averaged they are those of one
worker with all samples, and batch sizes follow speeds. And ElasticSGD against its paper's steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.megabatch.callback import MegaBatchCallback, MegaBatchPlan
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.fetching import ReadAhead
from offbeat.megabatch.loader import DispatchLoader, order_of
from offbeat.membership.agreement import Generation
from offbeat.simulation.virtual import VirtualCluster
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.strategies.adaptive import AdaptiveSGD, MegaBatchStrategy
from offbeat.strategies.elasticsgd import ElasticSGD
from offbeat.transport.operations import Collective, Sleep

SPEEDS = (4.0, 2.0, 1.0, 1.0)
BASE, SAMPLES, SEED, ROWS = 8, 320, 5, 4000
FEATURES = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))


def model_and_optimizer(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model.append(torch.nn.Linear(1, 1))
    model[3].weight.requires_grad_(requires_grad=False)
    if kind == "SparseAdam":
        model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 2, sparse=True))
    options: Mapping[str, Any] = {"SGD": {"momentum": 0.9}}.get(kind, {})
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)


def loss_of(model: torch.nn.Module, samples: Sequence[int]) -> torch.Tensor:
    if isinstance(model[0], torch.nn.Embedding):  # type: ignore[index]  # it is a Sequential
        found = model(torch.tensor(samples) * 7 % ROWS)
    else:
        found = model(FEATURES[samples])
    loss: torch.Tensor = (found - TARGETS[samples]).square().mean()
    return loss


def sleeping(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


class Worker:
    """One rank, which takes `num_steps` steps.

    Attributes:
        batches: the samples of each, by number.
        sizes: of all ranks' batches, before each step.
        num_bytes: that it has sent.
    """

    def __init__(
        self,
        driver: VirtualThread,
        store: HashStore,
        strategy: MegaBatchStrategy,
        *,
        kind: str = "SGD",
        skips: Callable[[int, int], bool] = lambda rank, step: False,
    ) -> None:
        self.model, self.optimizer = model_and_optimizer(kind)
        self.batches: list[list[int]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.saved: Any = None
        self.num_bytes = 0.0
        self._driver, self._store, self._strategy, self._skips = driver, store, strategy, skips

    def train(self, num_steps: int, resumed: Any = None, save_after: int = -1) -> None:
        driver = self._driver
        context = Context(
            parameters={n: p for n, p in self.model.named_parameters() if p.requires_grad},
            driver=driver,
            new_stream=stream_counter(),
            notices=Notices(driver.rank),
            optimizer=self.optimizer,
            enter=lambda host: host.begin(
                Generation.of_founders(driver.world_size), driver.rank, driver
            ),
            own_store=lambda: self._store,
        )
        callbacks = list(self._strategy.build(context))
        policy = next(each for each in callbacks if isinstance(each, MegaBatchCallback))
        policy.feed(BASE, dict.fromkeys(range(driver.world_size)))
        loader = DispatchLoader(
            ReadAhead(
                DataLoader(cast(Any, range(SAMPLES)), collate_fn=list),
                num_processes=0,
                batches_each=1,
                seed=SEED,
                rank=driver.rank,
            ),
            log=ClaimLog(self._store),
            policy=policy,
            seed=SEED,
            rank=driver.rank,
            notify=lambda _: None,
            clock=lambda: driver.now_s(0),
        )
        callbacks.append(loader)
        if resumed is not None:
            model, optimizer, states = resumed
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            for callback, state in zip(callbacks, states, strict=True):
                callback.load_state_dict(state)
        for number, batch in enumerate(loader):
            if number == num_steps:
                break
            self.batches.append(batch)
            self.sizes.append(policy.batch_sizes)
            driver.run(sleeping(len(batch) / SPEEDS[driver.rank]), 0)
            if self._skips(driver.rank, number):
                continue
            with torch.enable_grad():
                loss_of(self.model, batch).backward()  # type: ignore[no-untyped-call]
            for callback in callbacks:
                callback.on_before_step()
            for callback in callbacks:
                callback.on_before_update()
            self.optimizer.step()
            for callback in callbacks:
                callback.on_after_step()
            self.optimizer.zero_grad()
            if number == save_after:
                states = [each.state_dict() for each in callbacks]
                found = self.model.state_dict(), self.optimizer.state_dict(), states
                self.saved = copy.deepcopy(found)


def trained(
    num_steps: int,
    strategy: MegaBatchStrategy,
    *,
    resumed: Sequence[Any] | None = None,
    save_after: int = -1,
    **how: Any,
) -> list[Worker]:
    cluster, store = VirtualCluster(len(SPEEDS), seed=3), HashStore()
    threads = [VirtualThread(driver) for driver in cluster.drivers]
    workers = [Worker(thread, store, strategy, **how) for thread in threads]
    with torch.no_grad():
        cluster.run(
            [
                thread.carry(
                    partial(
                        worker.train,
                        num_steps,
                        None if resumed is None else resumed[thread.rank],
                        save_after,
                    )
                )
                for thread, worker in zip(threads, workers, strict=True)
            ]
        )
    for worker, num_bytes in zip(workers, cluster.bytes_sent, strict=True):
        worker.num_bytes = num_bytes
    return workers


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_they_are_those_of_one_worker_with_all_samples(kind: str) -> None:
    workers = trained(9, AdaptiveSGD(mega_batch=40), kind=kind)
    alone, optimizer = model_and_optimizer(kind)
    order = order_of(SAMPLES, seed=SEED, epoch=0).tolist()
    for step in range(9):
        together = [sample for worker in workers for sample in worker.batches[step]]
        assert together == order[32 * step : 32 * (step + 1)]
        optimizer.zero_grad()
        loss_of(alone, together).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for worker in workers:
        for mine, first, one in zip(
            worker.model.parameters(),
            workers[0].model.parameters(),
            alone.parameters(),
            strict=True,
        ):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, one)


def test_rows_of_a_sparse_gradient_are_averaged_and_stay_sparse() -> None:
    """SparseAdam takes no other. Which samples a rank has says which rows."""
    strategy = AdaptiveSGD(mega_batch=40, optimizer_state="local")
    workers = trained(5, strategy, kind="SparseAdam")
    alone, optimizer = model_and_optimizer("SparseAdam")
    for step in range(5):
        optimizer.zero_grad()
        together = [sample for worker in workers for sample in worker.batches[step]]
        loss_of(alone, together).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for worker in workers:
        for mine, one in zip(worker.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, one)
    whole = 5 * 2 * ROWS * 4  # steps, columns, rows, bytes
    assert max(worker.num_bytes for worker in workers) < 0.5 * whole


def test_batch_sizes_follow_speeds_after_the_second() -> None:
    """The first one says nothing, since much is loaded and compiled in it."""
    (worker, *_) = trained(4, AdaptiveSGD(mega_batch=40))
    assert worker.sizes == [(8, 8, 8, 8), (8, 8, 8, 8), (16, 8, 4, 4), (16, 8, 4, 4)]


def test_one_that_takes_no_step_gives_no_gradient_and_is_waited_for() -> None:
    """Its batch counts as computed."""
    workers = trained(
        3, AdaptiveSGD(mega_batch=40), skips=lambda rank, step: (rank, step) == (1, 2)
    )
    alone, optimizer = model_and_optimizer("SGD")
    for step in range(3):
        who = [worker for rank, worker in enumerate(workers) if (rank, step) != (1, 2)]
        optimizer.zero_grad()
        samples = [sample for worker in who for sample in worker.batches[step]]
        loss_of(alone, samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for mine, one in zip(workers[0].model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, one)
    seen = [sample for worker in workers for batch in worker.batches for sample in batch]
    assert sorted(seen) == sorted(order_of(SAMPLES, seed=SEED, epoch=0)[:96].tolist())


def test_a_run_that_was_saved_goes_on_as_if_it_had_not_been() -> None:
    strategy = AdaptiveSGD(mega_batch=40)
    whole = trained(7, strategy, save_after=3)
    rest = trained(3, strategy, resumed=[worker.saved for worker in whole])
    for mine, theirs in zip(rest, whole, strict=True):
        assert mine.batches == theirs.batches[4:]
        for one, other in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_elastic_sgd_takes_the_mean_of_all_models_after_each_mega_batch(kind: str) -> None:
    """A pass has three of them, whose last batches are smaller."""
    workers = trained(13, ElasticSGD(mega_batch=12), kind=kind)
    alone = [model_and_optimizer(kind) for _ in workers]
    for step in range(12):
        for (model, optimizer), worker in zip(alone, workers, strict=True):
            assert (len(worker.batches[step]) == BASE) == (step % 4 < 3)
            optimizer.zero_grad()
            loss_of(model, worker.batches[step]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step % 4 == 3:
            for parameters in zip(*(model.parameters() for model, _ in alone), strict=True):
                mean = torch.stack([each.detach() for each in parameters]).mean(0)
                for parameter in parameters:
                    parameter.detach().copy_(mean)
    for (model, _), worker in zip(alone, workers, strict=True):
        torch.testing.assert_close([*worker.model.parameters()], [*model.parameters()])
    seen = [sample for worker in workers for batch in worker.batches for sample in batch]
    assert sorted(seen) == list(range(SAMPLES))


def test_the_published_rule_and_no_warmup_merge_models() -> None:
    def averages(strategy: AdaptiveSGD) -> list[bool]:
        plan: MegaBatchPlan = strategy.plan()
        return [plan.averages_gradients(32 * step, 4, BASE) for step in (0, 39, 40)]

    assert averages(AdaptiveSGD()) == [True, True, False]
    assert averages(AdaptiveSGD(rule="published")) == [False] * 3
    assert averages(AdaptiveSGD(warmup=0)) == [False] * 3
