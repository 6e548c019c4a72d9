"""What is said in words follows from the figures: each kind of sentence, from comparisons made by
hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab_support.made import comparison, contestant
from offbeat_lab.breakdown import slow_worker_of
from offbeat_lab.comparison import ComparedStrategy, Comparison, Difference, Measure
from offbeat_lab.findings import between, findings, ranking, verdict, winner
from offbeat_lab.statistics import compare

Values = Mapping[Measure, Sequence[float | None]]


def measured(
    label: str,
    time_s: Sequence[float | None],
    step_s: Sequence[float],
    *,
    final_metric: Sequence[float | None] = (None,),
) -> ComparedStrategy:
    values: Values = {"time_to_target_s": time_s, "step_s": step_s, "final_metric": final_metric}
    return contestant(label, values, num_seeds=len(time_s))


def analysed(
    *contestants: ComparedStrategy, target: float | None = 0.9, **settings: bool
) -> Comparison:
    """A comparison with the differences that follow from the measures."""
    differences = [
        Difference(
            measure=measure,
            a=a.label,
            b=b.label,
            **compare(a.measures[measure], b.measures[measure]).model_dump(),
        )
        for place, a in enumerate(contestants)
        for b in contestants[place + 1 :]
        for measure in ("time_to_target_s", "step_s")
        if a.measures and b.measures and a.measures[measure].median and b.measures[measure].median
    ]
    return comparison(contestants, target=target, differences=differences, **settings)


SLOW = measured("ddp", [10.0, 10.2, 10.4], [1.0, 1.01, 1.02])
FAST = measured("gtopk", [2.0, 2.1, 2.2], [0.2, 0.21, 0.22])
AS_FAST = measured("topk", [1.9, 2.15, 2.3], [0.19, 0.215, 0.23])


def test_a_decided_race_names_the_winner_and_by_how_much() -> None:
    assert (
        verdict(analysed(SLOW, FAST))
        == "gtopk reached accuracy 0.9 in 2.1 s, 4.86 times faster than ddp, the next best."
    )


def test_a_race_within_the_spread_has_no_winner() -> None:
    assert (
        verdict(analysed(FAST, AS_FAST))
        == "No difference in the time to accuracy 0.9 between gtopk and topk that this comparison"
        " can see."
    )
    assert (
        verdict(analysed(SLOW, FAST, AS_FAST))
        == "No difference in the time to accuracy 0.9 between gtopk and topk that this comparison"
        " can see; ddp took 10.2 s."
    )


def test_with_one_seed_only_the_steps_can_be_told_apart() -> None:
    one, other = measured("ddp", [10.0], [1.0]), measured("gtopk", [2.0], [0.2])
    text = verdict(analysed(one, other))
    assert "faster" not in text
    assert text == (
        "In the only run of each, gtopk was the first to reach accuracy 0.9, in 2 s; no difference"
        " in step time between gtopk and ddp that this comparison can see."
    )


def test_nobody_is_called_equal_who_is_slower_than_one_of_those_named() -> None:
    # The fastest median has a wide spread; of the two others one is faster beyond doubt.
    wide = measured("gtopk", [1.0, 2.0, 40.0], [0.1, 0.2, 4.0])
    found = analysed(SLOW, wide, measured("wagma", [5.0, 5.1, 5.2], [0.5, 0.51, 0.52]))
    assert verdict(found) == (
        "No difference in the time to accuracy 0.9 between gtopk and wagma that this comparison"
        " can see; ddp took 10.2 s."
    )
    assert verdict(found.model_copy(update={"target": None})) == (
        "No difference in step time between gtopk and wagma that this comparison can see."
    )


def test_without_target_the_steps_decide() -> None:
    assert (
        verdict(analysed(SLOW, FAST, target=None))
        == "gtopk takes the shortest steps, 210 ms: 4.81 times faster than ddp, the next"
        " best."
    )
    assert (
        verdict(analysed(FAST, AS_FAST, target=None))
        == "No difference in step time between gtopk and topk that this comparison can see."
    )


def test_a_target_that_nobody_reached_is_said_to_be_so() -> None:
    never = [None, None, None]
    slow, fast = (
        measured("ddp", never, [1.0, 1.01, 1.02]),
        measured("gtopk", [2.0, None, None], [0.2, 0.21, 0.22]),
    )
    assert (
        verdict(analysed(slow, fast))
        == "gtopk takes the shortest steps, 210 ms: 4.81 times faster than ddp, the next"
        " best; none of them reached accuracy 0.9 in every run."
    )
    assert findings(analysed(slow, fast))[-2:] == [
        "ddp did not reach 0.9 in 3 of its 3 runs.",
        "gtopk did not reach 0.9 in 2 of its 3 runs.",
    ]


def test_who_alone_reached_the_target_is_best_however_short_the_others_steps() -> None:
    short = measured("gtopk", [None, 2.0, 2.0], [0.2, 0.21, 0.22])
    assert (
        verdict(analysed(SLOW, short)) == "Only ddp reached accuracy 0.9 in every run, in 10.2 s."
    )


def test_one_that_missed_the_target_once_does_not_win_the_race() -> None:
    lucky = measured("topk", [None, 0.1, 0.1], [0.1, 0.1, 0.1])
    assert verdict(analysed(SLOW, FAST, lucky)).startswith("gtopk reached accuracy 0.9 in 2.1 s")


def test_one_finisher_and_none() -> None:
    failed = contestant("gtopk", failure="worker 1 was killed")
    assert verdict(analysed(SLOW, failed)) == "Only ddp finished: 1.01 s a step."
    assert verdict(analysed(SLOW)) == "ddp finished: 1.01 s a step."
    assert verdict(analysed(failed)) == "No strategy finished."
    assert findings(analysed(SLOW, failed))[0] == "gtopk failed: worker 1 was killed"


@given(
    ratio=st.floats(0.01, 100),
    widths=st.tuples(st.floats(0, 1), st.floats(0, 1)) | st.none(),
    decided=st.booleans(),
)
def test_a_difference_read_the_other_way_is_its_inverse(
    ratio: float, widths: tuple[float, float] | None, decided: bool
) -> None:
    low, high = (
        (None, None) if widths is None else (ratio / (1 + widths[0]), ratio * (1 + widths[1]))
    )
    stored = Difference(
        measure="step_s", a="x", b="y", ratio=ratio, low=low, high=high, decided=decided
    )
    made = comparison([], differences=[stored])
    there, back = between(made, "step_s", "x", "y"), between(made, "step_s", "y", "x")
    assert there == stored
    assert back is not None
    assert (back.a, back.b, back.decided) == ("y", "x", decided)
    assert back.ratio == pytest.approx(1 / ratio)
    if low is None or high is None:
        assert (back.low, back.high) == (None, None)
    else:
        assert (back.low, back.high) == pytest.approx((1 / high, 1 / low))
    assert between(made, "time_to_target_s", "x", "y") is None
    assert between(made, "step_s", "x", "z") is None


def test_the_ranking_leaves_out_who_has_no_value() -> None:
    never = measured("topk", [None, None, None], [0.3, 0.3, 0.3])
    made = analysed(SLOW, never, FAST, contestant("ddp-fp16", failure="no"))
    assert [c.label for c in ranking(made, "time_to_target_s")] == ["gtopk", "ddp"]
    assert [c.label for c in ranking(made, "step_s")] == ["gtopk", "topk", "ddp"]
    assert ranking(made, "efficiency") == []


def test_each_strategy_is_held_against_ddp() -> None:
    slower = measured("ddp-powersgd", [30.0, 30.5, 31.0], [2.02, 2.03, 2.04])
    same = measured("ddp-fp16", [10.0, 10.2, 10.4], [0.99, 1.015, 1.03])
    found = findings(analysed(SLOW, FAST, slower, same))
    assert found[:4] == [
        "gtopk against ddp, the next best in the time to the target: 4.86 times (4.53 to 5.21)"
        " faster.",
        "gtopk takes 210 ms a step, ddp 1.01 s: 4.81 times (4.38 to 5.29) faster.",
        "ddp-fp16 takes 1.01 s a step, ddp 1.01 s: no difference larger than the spread.",
        "ddp-powersgd takes 2.03 s a step, ddp 1.01 s: 2.01 times (1.98 to 2.04) slower.",
    ]
    assert not any(" ddp takes" in line or line.startswith("ddp takes") for line in found)


@pytest.mark.parametrize(
    ("higher", "worse", "better"), [(True, 0.891, 0.909), (False, 0.909, 0.891)]
)
def test_final_metrics_are_held_against_the_dense_ones(
    higher: bool, worse: float, better: float
) -> None:
    contestants = [
        measured(label, [1.0], [1.0], final_metric=[metric])
        for label, metric in (("ddp", 0.9), ("gtopk", worse), ("topk", better), ("allreduce", 0.9))
    ]
    found = findings(analysed(*contestants, higher_is_better=higher))
    assert [line for line in found if line.startswith("After")] == [
        f"After 40 steps gtopk has accuracy {worse:.4f}, 1.00% worse than ddp's.",
        f"After 40 steps topk has accuracy {better:.4f}, 1.00% better than ddp's.",
        "After 40 steps allreduce has accuracy 0.9000, the same as ddp's.",
    ]


@pytest.mark.parametrize("slow", [1, None])
def test_the_slow_worker_is_named_if_one_stands_out(slow: int | None) -> None:
    late = FAST.model_copy(update={"lateness_s": [0.0, 0.2, 0.01], "slow_worker": slow})
    named = [line for line in findings(analysed(SLOW, late)) if line.startswith("Worker")]
    assert named == (
        []
        if slow is None
        else [
            "Worker 1 is the slow one: under gtopk it comes to the exchange 200 ms after the first"
            " worker on average."
        ]
    )


def test_the_winner_is_who_the_verdict_speaks_of() -> None:
    missed = measured("topk", [None, 0.1, 0.1], [0.1, 0.1, 0.1])
    for made in (analysed(SLOW, FAST, missed), analysed(SLOW, missed), analysed(SLOW, FAST)):
        won = winner(made)
        assert won is not None
        assert won.label in verdict(made).split(" reached ")[0]
    assert winner(analysed(contestant("gtopk", failure="worker 1 was killed"))) is None


@pytest.mark.parametrize(
    ("named", "slow"),
    [
        ([], None),
        ([None], None),
        ([3], 3),
        ([3, None, 3], 3),
        ([3, None, None], None),
        ([3, 1, 3, None], 3),
        ([2, 1], 1),
    ],
)
def test_one_worker_is_slow_if_half_of_the_contestants_say_so(
    named: list[int | None], slow: int | None
) -> None:
    assert slow_worker_of(named) == slow
