"""The choice of `Auto`, without ranks: a function of what was measured and predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import LocalSGD
from offbeat.strategies.auto import built
from offbeat.strategies.choice import (
    BESIDE_S,
    BETWEEN_CHANGES,
    CANDIDATES,
    EARLY_LOOK,
    EVERY,
    FIRST_LOOK,
    HORIZON,
    Choice,
    SeenSteps,
    Standing,
    StepsToEqual,
    choose,
    in_vain,
    outlook,
)

STEPS = {name: one.sgd for name, one in CANDIDATES.items()}


def seen_of(at_work: str, step_s: float, computed_s: float = 0.1) -> SeenSteps:
    return SeenSteps(at_work=at_work, step_s=step_s, computed_s=np.full((20, 3), computed_s))


def test_the_least_time_to_equal_quality_counts_and_not_the_least_step() -> None:
    predicted_s = {"allreduce": 1.0, "gtopk": 0.45, "powersgd": 0.3}
    seen = seen_of("allreduce", 1.0)
    assert choose(seen, predicted_s, STEPS).name == "gtopk"
    same = dict.fromkeys(STEPS, StepsToEqual(1.0, 0.0))
    assert choose(seen, predicted_s, same).name == "powersgd"


def test_what_is_at_work_stays_unless_another_is_faster_by_more_than_the_uncertainty() -> None:
    unsure = STEPS | {"gtopk": StepsToEqual(1.0, 0.5)}
    predicted_s = {"allreduce": 1.0, "gtopk": 0.65}
    assert choose(seen_of("allreduce", 1.0), predicted_s, unsure).name == "allreduce"
    sure = STEPS | {"gtopk": StepsToEqual(1.0, 0.1)}
    choice = choose(seen_of("allreduce", 1.0), predicted_s, sure)
    assert choice.name == "gtopk"
    assert choice.step_s == pytest.approx(0.65)


def test_what_is_not_computing_takes_as_much_longer_as_it_was_seen_to() -> None:
    """AllReduce computes for a tenth of a second, and waits twice as long as predicted."""
    choice = choose(seen_of("allreduce", 0.5), {"allreduce": 0.3, "gtopk": 0.15}, STEPS)
    assert choice.name == "gtopk"
    assert choice.step_s == pytest.approx(0.2)


def test_steps_that_hardly_wait_are_left_as_they_are() -> None:
    choice = choose(seen_of("allreduce", 0.105), {}, STEPS)
    assert (choice.name, choice.step_s) == ("allreduce", 0.105)
    assert "100 ms less that are computing" in choice.why
    # Another strategy that hardly waits may still take more steps than AllReduce would.
    assert not seen_of("powersgd", 0.105).hardly_waits()


def test_nothing_is_chosen_where_what_is_at_work_cannot_be_predicted() -> None:
    choice = choose(seen_of("localsgd", 1.0), {"gtopk": 0.01}, STEPS)
    assert choice.name == "localsgd"
    assert "cannot be predicted" in choice.why


def test_a_pause_is_no_step_and_the_steps_of_a_slow_rank_are_none() -> None:
    computed_s = np.ones((4, 2))
    computed_s[2, 1] = 60.0
    seen = SeenSteps.of("allreduce", 2 * computed_s, computed_s)
    assert (seen.step_s, len(seen.computed_s)) == (2.0, 3)
    one_sided = np.array([[1.0, 1.0, 9.0]] * 4)
    one_sided[3] /= 2  # the last batch of an epoch
    assert len(SeenSteps.of("allreduce", one_sided, one_sided).computed_s) == 4


def test_the_coming_steps_count_and_later_ones_are_expected() -> None:
    predicted_s, seen = {"allreduce": 1.0, "localsgd": 0.2}, seen_of("allreduce", 1.0)
    choice = choose(seen, predicted_s, STEPS, {"localsgd": 0.5})
    assert choice.name == "localsgd"
    assert choice.step_s == pytest.approx(0.2)
    assert "localsgd 500 ms" in choice.why
    assert choose(seen, predicted_s, STEPS, {"localsgd": 0.9}).name == "allreduce"


def test_local_sgd_begins_with_as_many_averages_as_are_counted() -> None:
    """Of those to come some are like those with an average in each, the others as later ones."""
    for spec, candidate in CANDIDATES.items():
        strategy, averages, since = built(spec), 0, 0
        if not isinstance(strategy, LocalSGD):
            continue
        for step in range(1, HORIZON + 1):
            since += 1
            if since >= strategy.schedule.period(step, {}):
                averages, since = averages + 1, 0
        share, period = candidate.beginning, candidate.period
        assert averages == pytest.approx(HORIZON * (share + (1 - share) / period), rel=0.01)


def test_looks_are_at_fixed_steps() -> None:
    due = [n for n in range(2 * EVERY + 1) if Standing(num_steps=n).is_due()]
    assert due == [EARLY_LOOK, FIRST_LOOK, EVERY, 2 * EVERY]
    assert [Standing(num_steps=n).is_early for n in due] == [True, False, False, False]
    assert Standing(num_steps=FIRST_LOOK - 1).is_due(ahead=1)


def test_no_look_is_due_soon_after_a_change() -> None:
    changed_at = FIRST_LOOK + 1
    due = [
        n
        for n in range(4 * EVERY + 1)
        if Standing(num_steps=n, changed_at=changed_at).is_due() and n > changed_at
    ]
    assert due == [3 * EVERY, 4 * EVERY]
    assert BETWEEN_CHANGES == 2 * EVERY


def test_a_step_as_expected_is_no_news() -> None:
    standing = Standing(num_steps=BETWEEN_CHANGES, changed_at=0, expected_s=1.0)
    assert not standing.is_news(1.2)
    assert standing.is_news(1.3)
    assert standing.is_news(0.7)
    assert Standing().is_news(1.0)  # nothing was expected yet


def test_what_averages_beside_training_needs_processors_beside_it() -> None:
    """Four ranks of two cores, in steps of .1 s: idle for the most part, or busy all the time."""
    wagma, gtopk = CANDIDATES["wagma"], CANDIDATES["gtopk"]
    for processors_s, expected_s in ((0.01, 0.1), (0.05, 0.05 / 0.5 + BESIDE_S * 1e6 / 0.5)):
        step_s = wagma.on_processors_s(0.1, 1_000_000, processors_s=processors_s, cores=0.5)
        assert step_s == pytest.approx(expected_s)
    assert gtopk.on_processors_s(0.1, 1_000_000, processors_s=0.1, cores=0.5) == 0.1


def test_what_does_not_fit_is_no_candidate() -> None:
    gtopk = CANDIDATES["gtopk"]
    assert gtopk.fits(1000, 2, free_bytes=10_001)
    assert not gtopk.fits(1000, 2, free_bytes=10_000)
    # LocalSGD holds the means of all that the optimizer keeps until they are complete.
    local = CANDIDATES["localsgd"]
    assert local.fits(1000, 0, free_bytes=10_000)
    assert not local.fits(1000, 2, free_bytes=10_000)


def test_models_that_are_averaged_rarely_take_more_steps() -> None:
    for steps in (CANDIDATES["wagma"].sgd, CANDIDATES["wagma"].adam):
        means = [steps.with_averages(in_a_step).mean for in_a_step in (0.1, 0.5, 1.0, 2.0)]
        assert means[0] > means[1] > means[2] == means[3] == steps.mean
    gtopk = CANDIDATES["gtopk"].sgd
    assert gtopk.with_averages(0.0) == gtopk


def test_a_step_that_mostly_waits_is_known_after_a_few() -> None:
    assert seen_of("allreduce", 0.41).mostly_waits()
    assert not seen_of("allreduce", 0.39).mostly_waits()


def test_steady_slowness_is_told_from_being_late_by_chance() -> None:
    """Batches of other sizes would help where a rank is always slow."""
    steady, chance = np.full((12, 4), 0.1), np.full((12, 4), 0.1)
    steady[:, 2] = 0.2
    for step in range(12):
        chance[step, step % 4] = 0.2
    choice = Choice("allreduce", 0.25, "")
    for computed_s, speeds in ((steady, 3.5), (chance, None)):
        seen = SeenSteps(at_work="allreduce", step_s=0.25, computed_s=computed_s)
        at_best_s = seen.at_summed_speed_s()
        assert at_best_s == (None if speeds is None else pytest.approx(4 / speeds / 10))
        assert seen.speeds_are_unlike() == (speeds is not None)
        assert ("session.loader" in outlook(choice, seen)) == (speeds is not None)
        assert "session.loader" not in outlook(choice, seen, shares_out=True)
    # What was chosen is as fast already.
    seen = SeenSteps(at_work="allreduce", step_s=0.25, computed_s=steady)
    assert "session.loader" not in outlook(Choice("wagma", 0.13, ""), seen)


@given(st.data())
def test_batches_by_speed_have_as_many_samples_together_and_take_as_long(
    data: st.DataObject,
) -> None:
    world_size = data.draw(st.integers(2, 6))
    lists = st.lists(st.integers(1, 64), min_size=world_size, max_size=world_size)
    now, slow_by = data.draw(lists), np.array(data.draw(lists))
    room = np.array(data.draw(lists)) - 1
    seen = SeenSteps(at_work="allreduce", step_s=1.0, computed_s=np.array(now)[None] * slow_by)
    largest = np.array(now) + room
    sizes = np.array(seen.by_speed(now, largest.tolist()))
    assert sizes.sum() == sum(now)
    assert ((sizes >= 1) & (sizes <= largest)).all()
    # Who could have more takes as long as any other, but for a sample that cannot be divided, and
    # the one that each has to have.
    could = sizes < largest
    if could.any():
        assert ((sizes - 1) * slow_by)[sizes > 1].max(initial=0) <= (
            (sizes + world_size) * slow_by
        )[could].min()


def test_a_choice_by_speed_is_worth_as_much_as_without() -> None:
    seen = seen_of("allreduce", 1.0)
    predicted_s = {
        "allreduce": 1.0,
        "gtopk": 0.9,
        "allreduce by speed": 0.6,
        "gtopk by speed": 0.58,
    }
    found = choose(seen, predicted_s, STEPS)
    assert found.name == "allreduce by speed"
    assert found.step_s == pytest.approx(0.6)
    assert "allreduce by speed 600 ms, " in found.why
    assert "gtopk by speed 580 ms x 1.1, " in found.why


def test_it_says_what_would_change_its_mind() -> None:
    choice = Choice("wagma", 0.5, "")
    seen = seen_of("wagma", 0.5), seen_of("allreduce", 0.5)
    stays, changes = (outlook(choice, each) for each in seen)
    assert "looks again if a step takes 25% more or less than 500 ms" in stays
    assert stays.endswith("which it sees every 250 steps")
    assert changes == f"{stays}, 500 steps from now at the earliest"
    assert "will not look again" in outlook(choice, seen[1], looks_again=False)


def test_it_says_that_it_cannot_change_its_mind() -> None:
    said = in_vain(Standing(at_work="wagma", num_steps=750))
    assert said.startswith("auto, step 750: wagma stays, since a worker has died")
