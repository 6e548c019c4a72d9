"""Averages among the members of a run, on a virtual cluster: their mean, and what deaths, newcomers
and late members make of it. With real processes, see `tests/ranks/test_members_ranks.py`.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch.distributed import HashStore, Store

import offbeat
from fuzz_support import altered_text, succeeds_or_refuses
from offbeat.averaging.members import Average, AverageOfMembers, Coming, MeanOfMembers
from offbeat.averaging.outer import OuterOptimizer
from offbeat.averaging.periodic import GrowingPeriod
from offbeat.callbacks.context import Context, Notices
from offbeat.codec.tensor_bytes import to_bytes
from offbeat.errors import ConfigError, NonFiniteError, OffbeatError, PeerError, WireError
from offbeat.membership.agreement import Generation
from offbeat.membership.agreement import Member as Listed
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.membership.generations import GenerationHost
from offbeat.membership.quorum import Quorum
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.transport.driver import Counting, Driver, Stream
from offbeat.transport.operations import Collective, Sleep
from offbeat.weights.model_weights import ModelWeights, choose_buffers

PLAIN = offbeat.Outer(lr=1.0, momentum=0.0, nesterov=False)
NESTEROV = offbeat.Outer(lr=0.7, momentum=0.8)
PERIOD = 2


class Worker:
    """A model of one vector, a statistic and a counter; a step adds a number to all of it."""

    def __init__(
        self,
        rank: int,
        store: Store,
        *,
        outer: offbeat.Outer = PLAIN,
        quorum: Quorum = Quorum(),
        codec: offbeat.WeightCodec | None = None,
        begins_with: float = 0.0,
        world_size: int = 3,
    ) -> None:
        self.rank, self.store = rank, store
        self.x = torch.nn.Parameter(torch.full((5,), begins_with, dtype=torch.float64))
        buffers = {"mean": torch.full((2,), begins_with), "count": torch.tensor([0])}
        self.buffers = buffers
        self.weights = ModelWeights(
            parameters={"x": self.x}, buffers=lambda: buffers, chosen=choose_buffers(buffers)
        )
        self.along = torch.ones(5)  # what a step goes along
        self.notices = Notices(rank=rank)
        context = Context(
            parameters={"x": self.x},
            driver=cast(Driver, SimpleNamespace(rank=rank, world_size=world_size)),
            new_stream=lambda: Stream(0),
            notices=self.notices,
            optimizer=torch.optim.SGD([self.x], lr=0.5),
        )
        # So little patience: the virtual cluster has no generation to wait for.
        self.group = AtomicGroup(
            store, count=self._count, notify=self.notices.notify, patience_s=1e-3
        )
        self.rule = OuterOptimizer({"x": self.x}, make=outer)
        self.exchange = MeanOfMembers(
            self.weights,
            self.rule,
            group=self.group,
            quorum=quorum,
            codec=codec,
            context=context,
        )
        self._context = context
        self._part: AverageOfMembers | None = None

    def _count(self, driver: Driver) -> Driver:
        self.counting = Counting(driver)
        return self.counting

    @property
    def part(self) -> AverageOfMembers:
        assert self._part is not None, "it has entered"
        return self._part

    @property
    def has_entered(self) -> bool:
        return self._part is not None

    def enter(self, generation: Generation, place: int, driver: Driver) -> None:
        """Be a member of `generation`; if it is the first, as a session begins."""
        if self._part is not None:
            self.group.begin(generation, place, driver)
            return

        def enter(host: GenerationHost) -> None:
            host.begin(generation, place, driver)

        context = replace(self._context, enter=enter)
        self._part = AverageOfMembers(self.exchange, GrowingPeriod(PERIOD), context=context)

    @property
    def numbers(self) -> tuple[int, int]:
        """Of averages and of steps."""
        counts = self.part.state_dict()["replicated"]
        return counts["num_averages"], counts["num_steps"]

    @torch.no_grad()
    def step(self, by: float, *, samples: int = 0) -> None:
        if samples:
            self.part.on_batch_claimed(1000)  # which is not trained on
            self.part.on_batch_claimed(samples)
        self.part.on_backward_begins(synchronised=True)
        self.part.on_before_step()
        self.x.add_(by * self.along)
        self.buffers["mean"].add_(by)
        self.buffers["count"].add_(1)
        self.part.on_after_step()

    @property
    def owed(self) -> torch.Tensor:
        """Of changes, as the codec keeps it."""
        (residual,) = self.part.state_dict()["additive"].values()
        return residual.clone()  # type: ignore[no-any-return]

    @property
    def value(self) -> float:
        return float(self.x.detach()[0])

    @property
    def state(self) -> tuple[list[float], list[float], int, list[float]]:
        return (
            self.x.tolist(),
            self.buffers["mean"].tolist(),
            int(self.buffers["count"]),
            self.rule.anchor["x"].tolist(),
        )


Job = Callable[[Worker, VirtualThread], object]


def crew(size: int, **options: object) -> list[Worker]:
    store = HashStore()
    return [Worker(rank, store, **options) for rank in range(size)]  # type: ignore[arg-type]


def together(
    workers: Sequence[Worker],
    jobs: Sequence[Job],
    *,
    number: int = 0,
    new: Sequence[int] = (),
    seed: int = 0,
    kill: tuple[int, float] | None = None,
) -> list[object]:
    """What the workers' jobs return or raise, as the members of generation `number`."""
    cluster = VirtualCluster(
        len(workers),
        seed=seed,
        link=VirtualLink(latency_s=0.01, jitter_s=0.05),
        watch_all=False,
        death_notice_s=0.02,
    )
    generation = Generation(
        number=number,
        members=tuple(Listed(worker.rank, 0) for worker in workers),
        newcomers=frozenset(new),
        tickets=0,
    )
    results: list[object] = [None] * len(workers)

    def job_of(place: int, driver: VirtualThread) -> Callable[[], None]:
        def job() -> None:
            workers[place].enter(generation, place, driver)
            results[place] = jobs[place](workers[place], driver)

        return job

    threads = [VirtualThread(driver) for driver in cluster.drivers]
    if kill is not None:
        cluster.at(kill[1], lambda: cluster.kill(kill[0]))
    outcomes = cluster.outcomes(
        [threads[place].carry(job_of(place, threads[place])) for place in range(len(workers))]
    )
    return [
        outcome if isinstance(outcome, OffbeatError) else result
        for outcome, result in zip(outcomes, results, strict=True)
    ]


def steps(*by: float, samples: int = 0, after_s: float = 0.0) -> Job:
    def job(worker: Worker, driver: VirtualThread) -> str:
        driver.run(asleep(after_s), 1 << 40)
        for each in by:
            worker.step(each, samples=samples)
        return "done"

    return job


def asleep(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


def no_errors(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


def test_the_mean_is_of_samples_and_all_hold_it() -> None:
    workers = crew(3)
    no_errors(
        together(workers, [steps(1, 1, samples=1), steps(2, 2, samples=3), steps(3, 3, samples=4)])
    )
    mean = (1 * 2 + 3 * 4 + 4 * 6) / 8
    for worker in workers:
        assert worker.state == workers[0].state
        assert worker.state == ([mean] * 5, [mean] * 2, 2, [mean] * 5)


def test_where_one_is_not_told_of_samples_steps_count() -> None:
    workers = crew(2)
    no_errors(together(workers, [steps(1, 1, samples=9), steps(3, 3)]))
    assert workers[0].value == 4.0


def test_an_outer_optimizer_steps_from_the_anchor() -> None:
    workers = crew(2, outer=NESTEROV)
    no_errors(together(workers, [steps(1, 1, 1, 1), steps(3, 3, 3, 3)]))
    anchor = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = NESTEROV([torch.nn.Parameter(anchor)])
    (parameter,) = optimizer.param_groups[0]["params"]
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, -4.0)
        optimizer.step()
    torch.testing.assert_close(workers[0].x.detach(), parameter.detach(), rtol=1e-14, atol=0)
    assert workers[0].state == workers[1].state


def test_a_parameter_that_is_frozen_within_a_period_comes_to_the_mean() -> None:
    def freezes_after(by: float) -> Job:
        def job(worker: Worker, _: VirtualThread) -> None:
            worker.step(by)
            worker.x.requires_grad_(False)
            worker.along.zero_()
            worker.step(0)

        return job

    workers = crew(2, outer=NESTEROV)
    no_errors(together(workers, [freezes_after(1), freezes_after(3)]))
    assert [worker.value for worker in workers] == [2.0, 2.0]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_death_at_any_moment_leaves_all_that_live_with_the_same(first: int) -> None:
    """Either all have the average with the dead, or all make it without."""
    committed = set()
    for seed in range(first, first + 20):
        workers = crew(3, outer=NESTEROV)
        jobs = [steps(1, 1), steps(2, 2), steps(6, 6)]
        at_s = 0.01 + 0.5 * (seed % 20) / 20
        results = together(workers, jobs, seed=seed, kill=(2, at_s))
        living = workers[:2]
        done = [not isinstance(result, PeerError) for result in results[:2]]
        assert done[0] == done[1], (seed, results)
        committed.add(done[0])
        if not done[0]:
            assert [worker.value for worker in living] == [2.0, 4.0]  # untouched
            no_errors(together(living, [steps(0), steps(0)], number=1))
        mean = 6.0 if done[0] else 3.0
        assert living[0].state == living[1].state
        assert living[0].value == pytest.approx((1 + 0.8) * 0.7 * mean)
        no_errors(together(living, [steps(1, 1), steps(1, 1)], number=2))
        assert living[0].state == living[1].state
    assert committed == {True, False}


def joins(worker: Worker, _: VirtualThread) -> None:
    """By entering."""


@pytest.mark.parametrize("peers_want", ["average", "copy"])
def test_one_that_joins_has_the_model_the_outer_state_and_the_schedule(peers_want: str) -> None:
    workers = crew(3, outer=NESTEROV)
    no_errors(together(workers[:2], [steps(1, 1), steps(3, 3)]))
    newcomer = Worker(2, workers[0].store, outer=NESTEROV, begins_with=99.0)
    trio = [*workers[:2], newcomer]
    if peers_want == "average":
        no_errors(together(trio, [steps(1, 1), steps(3, 3), joins], number=1, new=[2]))
        assert newcomer.state == workers[0].state == workers[1].state
    else:
        copy = Worker(0, HashStore())
        looks: Job = lambda worker, _: worker.part.average_into(copy.weights)  # noqa: E731
        for worker in workers[:2]:
            worker.step(1)
        no_errors(together(trio, [looks, looks, joins], number=1, new=[2]))
        assert newcomer.state[0] == workers[0].state[3]
    assert newcomer.part.start_step == workers[0].numbers[1]
    assert not newcomer.group.is_new
    left = PERIOD - newcomer.numbers[1] % PERIOD
    no_errors(together(trio, [steps(*[by] * left) for by in (1.0, 2.0, 3.0)], number=2))
    assert newcomer.state == workers[0].state == workers[1].state
    assert newcomer.part.state_dict()["replicated"].keys() == (
        workers[0].part.state_dict()["replicated"].keys()
    )


def test_one_that_joins_as_all_end_is_told_so() -> None:
    workers = crew(3)
    no_errors(together(workers[:2], [steps(1, 1)] * 2))
    ends: Job = lambda worker, _: worker.part.on_finish()  # noqa: E731
    first, second, late = together(workers, [ends, ends, joins], number=1, new=[2])
    assert (first, second) == (None, None)
    assert isinstance(late, ConfigError)
    assert "the run ended while this worker was on its way in" in str(late)


def test_one_that_was_left_out_loses_its_own_and_goes_on_with_its_peers() -> None:
    workers = crew(3)
    no_errors(together(workers, [steps(1, 1)] * 3))
    workers[2].group.expelled()
    workers[2].x.detach().add_(50)
    no_errors(together(workers[:2], [steps(1, 1), steps(1, 1)], number=1))
    no_errors(together(workers, [steps(1, 1), steps(1, 1), steps(7, 7)], number=2, new=[2]))
    assert [worker.state for worker in workers] == [workers[0].state] * 3
    assert workers[0].value == 6.0


QUORUM = Quorum(0.6, grace_s=0.5)


def test_a_late_member_is_left_out_and_its_change_counts_in_the_next() -> None:
    """The mass: what all members have learned is in the anchor, each by its weight."""
    workers = crew(3, quorum=QUORUM)

    def punctual(worker: Worker, driver: VirtualThread) -> None:
        by = 2.0 * worker.rank + 1
        for after_s, each in ((0.0, 0.0), (0.0, by), (40.0, by)):
            steps(each, each, after_s=after_s)(worker, driver)

    def late(worker: Worker, driver: VirtualThread) -> None:
        steps(0, 0)(worker, driver)
        steps(5, 5, after_s=20.0)(worker, driver)

    no_errors(together(workers, [punctual, punctual, late]))
    # At first the mean of 2 and 6; then that of 2, 6 and 10, all three by two steps.
    assert workers[0].value == pytest.approx(4.0 + 6.0)
    assert [worker.state for worker in workers] == [workers[0].state] * 3
    assert workers[2].numbers == workers[0].numbers


def test_a_member_that_is_always_late_leaves_nothing_behind() -> None:
    """Neither messages that nobody reads, nor entries of the store."""
    workers = crew(3, quorum=QUORUM)

    def punctual(worker: Worker, driver: VirtualThread) -> None:
        steps(0, 0)(worker, driver)
        for _ in range(30):
            steps(1, 1, after_s=5.0)(worker, driver)

    def late(worker: Worker, driver: VirtualThread) -> None:
        steps(0, 0)(worker, driver)
        for _ in range(4):
            steps(1, 1, after_s=31.0)(worker, driver)

    no_errors(together(workers, [punctual, punctual, late]))
    traffic = [worker.counting.traffic for worker in workers]
    sent = sum(each.messages_sent for each in traffic)
    assert sent - sum(each.messages_received for each in traffic) < 20
    assert cast(HashStore, workers[0].store).num_keys() < 10


def test_one_within_the_grace_period_is_waited_for() -> None:
    workers = crew(3, quorum=QUORUM)

    def job(worker: Worker, driver: VirtualThread) -> None:
        steps(0, 0)(worker, driver)
        by = 2.0 * worker.rank + 1
        steps(by, by, after_s=0.15 * worker.rank)(worker, driver)

    no_errors(together(workers, [job] * 3))
    assert [worker.state for worker in workers] == [workers[0].state] * 3
    assert workers[0].value == pytest.approx(6.0)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_quorums_under_deaths(first: int) -> None:
    """Members come at random times, and one of four dies at one: those who have made equally many
    averages hold the same, and in the end all do.
    """
    for seed in range(first, first + 20):
        draws = torch.Generator().manual_seed(seed)
        late_s = (3 * torch.rand(12, generator=draws)).tolist()
        workers = crew(4, quorum=Quorum(0.6, grace_s=0.2), outer=NESTEROV)

        def three(worker: Worker, driver: VirtualThread, late_s: list[float] = late_s) -> str:
            for at in range(3):
                by = worker.rank + 1.0
                steps(by, by, after_s=late_s[3 * worker.rank + at])(worker, driver)
            return "done"

        together(workers, [three] * 4, seed=seed, kill=(3, 6 * (seed % 20) / 20))
        living = workers[:3]
        for worker in living:
            for other in living:
                if worker.numbers[0] == other.numbers[0]:
                    assert worker.state[3] == other.state[3], seed
        ends: Job = lambda worker, _: worker.part.on_finish()  # noqa: E731
        no_errors(together(living, [ends] * 3, number=1, seed=seed))
        assert [worker.state[0] for worker in living] == [living[0].state[0]] * 3


@pytest.mark.parametrize(("first", "codec"), [(0, None), (10, offbeat.WeightCodec(density=0.4))])
def test_members_die_join_and_return_and_are_late(
    first: int, codec: offbeat.WeightCodec | None
) -> None:
    """Six generations. Whoever knows of equally many averages holds the same anchor, and a
    generation in which nobody dies ends with one model.
    """
    for seed in range(first, first + 5):
        draws = random.Random(seed)
        options: dict[str, Any] = {
            "quorum": draws.choice([Quorum(), Quorum(0.6, grace_s=0.3)]),
            "outer": draws.choice([PLAIN, NESTEROV]),
            "codec": codec,
        }
        living = crew(4, **options)
        store = living[0].store

        def lives(worker: Worker, driver: VirtualThread, draws: random.Random = draws) -> str:
            for _ in range(draws.randint(1, 3)):
                by = draws.random()
                steps(by, by, samples=draws.randint(1, 9), after_s=draws.random())(worker, driver)
            worker.part.on_finish()
            return "done"

        for number in range(6):
            kill = (draws.randrange(len(living)), draws.uniform(0.1, 4)) if number % 3 < 2 else None
            new = [place for place, worker in enumerate(living) if worker.group.is_new]
            if number and not any(worker.rank == 10 + number for worker in living):
                living.append(Worker(10 + number, store, begins_with=draws.random(), **options))
                new.append(len(living) - 1)
            results = together(
                living, [lives] * len(living), number=number, new=new, seed=seed, kill=kill
            )
            if kill is None:
                no_errors(results)
                assert [worker.state for worker in living] == [living[0].state] * len(living)
            else:
                assert all(each == "done" or type(each) is PeerError for each in results)
                del living[kill[0]]
                living = [worker for worker in living if worker.has_entered]
            held = defaultdict(set)
            for worker in living:
                if not worker.group.is_new:
                    held[worker.numbers[0]].add(tuple(worker.state[3]))
            assert all(len(anchors) == 1 for anchors in held.values()), (seed, number)
            if number == 3:
                draws.choice(living[:-1]).group.expelled()


def test_who_ends_early_waits_for_the_others_and_all_end_with_the_same() -> None:
    workers = crew(3)

    def ends(*by: float) -> Job:
        def job(worker: Worker, driver: VirtualThread) -> None:
            steps(*by)(worker, driver)
            worker.part.on_finish()

        return job

    no_errors(together(workers, [ends(1), ends(1, 1, 1), ends(1, 1, 1, 1, 1)]))
    assert [worker.state for worker in workers[1:]] == [workers[1].state] * 2
    assert workers[0].x.tolist() == workers[1].x.tolist()


CODECS = {
    "sparse": offbeat.WeightCodec(density=0.4),
    "few bits": offbeat.WeightCodec(density=1.0, entries="linear4"),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("first", [0, 10])
def test_what_a_codec_drops_is_owed_whoever_dies(codec: str, first: int) -> None:
    """Over those who are in an average, as many changes leave as are applied or owed then."""
    committed = set()

    def drifts(worker: Worker, driver: VirtualThread) -> None:
        worker.along = torch.arange(5.0)
        steps(*[worker.rank + 1.0] * PERIOD)(worker, driver)

    for seed in range(first, first + 10):
        workers = crew(3, codec=CODECS[codec])
        no_errors(together(workers, [drifts] * 3, seed=seed))
        first_anchor, owed = workers[0].rule.anchor["x"].detach().clone(), [w.owed for w in workers]
        changes = [PERIOD * (rank + 1) * torch.arange(5.0).double() for rank in range(3)]
        torch.testing.assert_close(3 * first_anchor + sum(owed), sum(changes))
        results = together(
            workers, [drifts] * 3, number=1, seed=seed, kill=(2, 0.01 + 0.06 * (seed % 10))
        )
        done = [not isinstance(result, PeerError) for result in results[:2]]
        assert done[0] == done[1]
        committed.add(done[0])
        living = workers[:2]
        if not done[0]:
            torch.testing.assert_close([w.owed for w in living], owed[:2], rtol=0, atol=0)
            no_errors(together(living, [steps(0), steps(0)], number=2))
            applied = 2 * (living[0].rule.anchor["x"].detach() - first_anchor)
            left = sum(change + own for change, own in zip(changes[:2], owed[:2], strict=True))
            torch.testing.assert_close(applied + sum(w.owed for w in living), left)
        assert living[0].state == living[1].state
    assert committed == {True, False}


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_owed_counts_as_it_was_weighed_whatever_comes_later(codec: str) -> None:
    def drifts(samples: int) -> Job:
        def job(worker: Worker, driver: VirtualThread) -> None:
            worker.along = torch.arange(5.0)
            steps(*[worker.rank + 1.0] * PERIOD, samples=samples)(worker, driver)

        return job

    workers = crew(2, codec=CODECS[codec])
    anchor, owed = torch.zeros(5).double(), torch.zeros(5).double()
    for number, samples in enumerate([(1, 3), (9, 1), (1, 1)]):
        no_errors(together(workers, [drifts(each) for each in samples], number=number))
        weights = [2 * each / sum(samples) for each in samples]
        changes = sum(
            weight * PERIOD * (rank + 1) * torch.arange(5.0).double()
            for rank, weight in enumerate(weights)
        )
        now, left = workers[0].rule.anchor["x"].detach(), sum(w.owed for w in workers)
        torch.testing.assert_close(2 * (now - anchor) + left, changes + owed)
        anchor, owed = now.clone(), left


def test_members_that_have_ended_do_not_clip_the_changes_of_one_that_trains() -> None:
    workers = crew(3, codec=offbeat.WeightCodec(density=0.99, clip_to_median=True))
    seen: list[float] = []

    def goes_on(worker: Worker, driver: VirtualThread) -> None:
        steps(1, 1, 1, 1)(worker, driver)
        seen.append(float(worker.rule.anchor["x"].detach()[0]))
        worker.part.on_finish()

    def ends(worker: Worker, _: VirtualThread) -> None:
        worker.part.on_finish()

    no_errors(together(workers, [goes_on, ends, ends]))
    assert seen == [4.0]


def test_a_resumed_run_still_owes() -> None:
    workers = crew(2, codec=CODECS["sparse"], world_size=2)
    no_errors(together(workers, [steps(1, 1), steps(3, 3)]))
    resumed = crew(2, codec=CODECS["sparse"], world_size=2)
    no_errors(together(resumed, [joins, joins]))
    for old, new in zip(workers, resumed, strict=True):
        new.part.load_state_dict(old.part.state_dict())
        assert old.owed.any()
        assert new.owed.equal(old.owed)


def test_with_another_number_of_workers_the_mean_of_what_is_owed_stays() -> None:
    workers = crew(3, codec=CODECS["sparse"])
    no_errors(together(workers, [steps(1, 1), steps(3, 3), steps(2, 2)]))
    alone = Worker(0, HashStore(), codec=CODECS["sparse"], world_size=1)
    no_errors(together([alone], [joins]))
    states = [{"strategy": "localsgd", "callbacks": {"x": w.part.state_dict()}} for w in workers]
    alone.part.load_state_dict(offbeat.reshard(states, 1, 0)["callbacks"]["x"])
    assert alone.owed.any()
    torch.testing.assert_close(alone.owed, torch.stack([each.owed for each in workers]).mean(0))


def test_survivors_that_resume_owe_what_they_owed_after_the_death() -> None:
    """They were two in the last average, however many had begun the run."""
    trio = crew(3, codec=CODECS["sparse"])
    no_errors(together(trio, [steps(1, 1), steps(3, 3), steps(2, 2)]))
    workers = trio[:2]
    no_errors(together(workers, [steps(1, 1), steps(3, 3)], number=1))
    resumed = crew(2, codec=CODECS["sparse"], world_size=2)
    no_errors(together(resumed, [joins, joins]))
    states = [{"strategy": "localsgd", "callbacks": {"x": w.part.state_dict()}} for w in workers]
    for rank, (old, new) in enumerate(zip(workers, resumed, strict=True)):
        new.part.load_state_dict(offbeat.reshard(states, 2, rank)["callbacks"]["x"])
        assert old.owed.any()
        assert new.owed.equal(old.owed)


def test_one_that_joins_owes_nothing_and_hears_all() -> None:
    workers = crew(2, codec=CODECS["sparse"])
    no_errors(together(workers, [steps(1, 1), steps(3, 3)]))
    newcomer = Worker(2, workers[0].store, codec=CODECS["sparse"], begins_with=99.0)
    trio = [*workers, newcomer]
    no_errors(together(trio, [steps(1, 1), steps(3, 3), joins], number=1, new=[2]))
    assert newcomer.state == workers[0].state == workers[1].state
    assert not newcomer.owed.any()


def test_a_mean_for_a_copy_leaves_the_models_as_they_are() -> None:
    workers = crew(2)
    copies = [Worker(rank, HashStore()) for rank in range(2)]

    def looks(worker: Worker, driver: VirtualThread) -> None:
        steps(2.0 * worker.rank + 1)(worker, driver)
        worker.part.average_into(copies[worker.rank].weights)

    no_errors(together(workers, [looks, looks]))
    assert [worker.value for worker in workers] == [1.0, 3.0]
    assert [copy.value for copy in copies] == [2.0, 2.0]
    assert [copy.buffers["mean"].tolist() for copy in copies] == [[2.0, 2.0]] * 2


def test_one_that_asks_for_a_copy_alone_waits_for_no_more_than_an_average() -> None:
    workers = crew(3)
    copy = Worker(0, HashStore())

    def looks(worker: Worker, driver: VirtualThread) -> None:
        steps(1.0)(worker, driver)
        worker.part.average_into(copy.weights)

    no_errors(together(workers, [looks, steps(2, 2), steps(3, 3)]))
    mean = (1 * 1 + 2 * 4 + 2 * 6) / 5
    assert [worker.value for worker in workers] == [mean] * 3
    assert (copy.value, copy.buffers["mean"].tolist()) == (mean, [pytest.approx(mean)] * 2)
    assert int(copy.buffers["count"]) == 2


def test_a_rank_whose_weights_are_not_finite_spoils_nobody() -> None:
    workers = crew(3)
    results = together(workers, [steps(1, 1), steps(3, 3), steps(float("nan"), 1)])
    assert isinstance(results[2], NonFiniteError)
    assert all(isinstance(result, PeerError) for result in results[:2])
    assert [worker.value for worker in workers[:2]] == [2.0, 6.0]


def test_a_resumed_run_goes_on_as_it_would_have() -> None:
    """Saved between two averages."""
    runs = []
    for resumes in (False, True):
        workers = crew(2, outer=NESTEROV)
        no_errors(together(workers, [steps(1, 1, 1, samples=1), steps(3, 3, 3, samples=3)]))
        if resumes:
            saved = [(worker.part.state_dict(), worker.x, worker.buffers) for worker in workers]
            workers = crew(2, outer=NESTEROV)
            no_errors(together(workers, [joins, joins]))
            for worker, (state, x, buffers) in zip(workers, saved, strict=True):
                worker.x.detach().copy_(x)
                for name, buffer in buffers.items():
                    worker.buffers[name].copy_(buffer)
                worker.part.load_state_dict(state)
        no_errors(together(workers, [steps(1, samples=1), steps(3, samples=3)], number=1))
        runs.append([worker.state for worker in workers])
    assert runs[0] == runs[1]


SAID = Coming(purpose="average", is_new=False, num_averages=3, samples=8, steps=2)


def test_what_a_member_says_is_read_back() -> None:
    assert Coming.from_bytes(json.dumps(SAID).encode()) == SAID


@given(altered_text(list(SAID)))
def test_a_damaged_word_is_read_or_refused(data: bytes) -> None:
    succeeds_or_refuses(lambda: Coming.from_bytes(data))


def test_a_peer_that_stands_elsewhere_is_refused() -> None:
    worker, other = crew(2)
    no_errors(together([worker, other], [joins, joins]))
    average = cast(Average, SimpleNamespace(was_new=True))
    good = other.exchange.standing()
    for standing in (b"", good[:40], to_bytes({"numbers": torch.tensor([1, 2])})):
        with pytest.raises(WireError, match="where the run stands"):
            worker.part.catch_up(average, standing)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exchange": "50%+2s"}, "so that any two quorums share a member"),
        ({"exchange": "100%+2s"}, "waits for all members; leave it out"),
        ({"exchange": "members", "period": "adaptive"}, "period='adaptive' would do nothing"),
        ({"exchange": "members", "start_step": 3}, "start_step=3 lets all ranks reduce gradients"),
        (
            {"exchange": "members", "optimizer_state": "averaged"},
            "optimizer_state='averaged' would do nothing",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offbeat.LocalSGD(**options)  # type: ignore[arg-type]


def test_only_averages_of_members_survive_deaths() -> None:
    assert offbeat.LocalSGD(exchange="members").survives_death
    assert offbeat.LocalSGD(exchange="75%+2s").chosen_exchange == Quorum(0.75, grace_s=2.0)
    assert not offbeat.LocalSGD().survives_death
    assert not offbeat.LocalSGD(exchange="4x2", period=12).survives_death
