"""From records to figures: runs made by hand, and what they must come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab_support.made import comparison, strategy, write_run
from offbeat.errors import RecordError
from offbeat.run.records import Evaluation
from offbeat_lab.analysis import (
    AnalysedRun,
    analyse,
    between,
    common_level,
    findings,
    ranking,
    reach,
    verdict,
    winner,
)
from offbeat_lab.breakdown import slow_worker_of
from offbeat_lab.comparison import (
    ComparedStrategy,
    Comparison,
    Difference,
    Measure,
    read_comparison,
    write_comparison,
)
from offbeat_lab.records import Record
from offbeat_lab.report.page import report_of_comparison
from offbeat_lab.report.page_sections import lateness_bars
from offbeat_lab.statistics import compare, estimate

STEPS = 40


def compare_runs(
    directory: Path,
    runs: Mapping[str, Sequence[dict[str, Any]]],
    *,
    alone: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> Comparison:
    """The analysed comparison of these runs, by label and seed; a strategy without runs
    has failed.
    """
    entries = []
    num_seeds = max(len(of) for of in runs.values())
    for label, of in runs.items():
        for seed, made in enumerate(of):
            write_run(directory / f"runs/{label}-seed-{seed}", **made)
        entries.append(strategy(label, failure=None if of else "it broke", num_seeds=num_seeds))
    ceiling = {
        seed: write_run(directory / f"runs/alone-seed-{seed}", **made)
        for seed, made in enumerate(alone)
    }
    return analyse(directory, comparison(entries, num_seeds=num_seeds, **settings), ceiling)


def measured(analysed: Comparison, label: str, measure: str) -> list[float | None]:
    (found,) = (c for c in analysed.strategies if c.label == label)
    return found.measures[measure].values  # type: ignore[index]  # a key that is none fails


def run_with(evaluations: Sequence[Evaluation]) -> AnalysedRun:
    # only its evaluations are read
    return AnalysedRun(summary=None, steps=None, evaluations=evaluations)  # type: ignore[arg-type]


def evaluations(*rows: tuple[int, float, float]) -> list[Evaluation]:
    """From (step, seconds, metric)."""
    return [
        Evaluation(step=step, seconds=seconds, bytes_sent=0, metric=metric, at_s=0.0)
        for step, seconds, metric in rows
    ]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_target_is_reached_between_two_measurements(higher_is_better: bool) -> None:
    sign = 1 if higher_is_better else -1
    run = run_with(
        evaluations(
            (0, 0.0, sign * 0.1),
            (10, 2.0, sign * 0.5),
            (20, 6.0, sign * 0.9),
            (30, 8.0, sign * 0.3),
        )
    )
    assert reach(run, sign * 0.8, higher_is_better) == pytest.approx((5.0, 17.5))
    assert reach(run, sign * 0.5, higher_is_better) == pytest.approx((2.0, 10.0))
    assert reach(run, sign * 0.9, higher_is_better) == pytest.approx((6.0, 20.0))
    assert reach(run, sign * 0.05, higher_is_better) == (0.0, 0.0)
    assert reach(run, sign * 0.91, higher_is_better) is None


def test_without_target_or_run_nothing_is_reached() -> None:
    assert reach(run_with(evaluations((0, 0.0, 0.1))), None, True) is None
    assert reach(None, 0.1, True) is None
    assert reach(run_with([]), 0.1, True) is None


metrics = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)


@given(st.lists(metrics, min_size=1, max_size=4), st.booleans())
def test_the_derived_target_is_reached_by_every_run_and_is_the_best_such(
    runs: list[list[float]], higher: bool
) -> None:
    made = [
        run_with(evaluations(*((10 * i, float(i), metric) for i, metric in enumerate(of))))
        for of in runs
    ]
    level = common_level({"some": made[:1], "others": [*made[1:], None]}, higher)
    assert level is not None
    for run in made:
        reached = reach(run, level, higher)
        assert reached is not None
        assert 0 <= reached[0] <= run.evaluations[-1].seconds
    bests = [(max if higher else min)(of) for of in runs]
    assert level in bests
    assert all(best >= level if higher else best <= level for best in bests)


def test_nothing_measured_gives_no_target() -> None:
    assert common_level({"a": [None], "b": [run_with([])]}, True) is None


def test_measures_of_runs_whose_figures_are_known(tmp_path: Path) -> None:
    rising = [(0, 0.1), (20, 0.5), (40, 0.9)]
    slow, fast, ideal = [0.4] * STEPS, [0.1] * STEPS, [0.05] * STEPS
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [{"step_s": slow, "metrics": rising}, {"step_s": slow, "metrics": rising}],
            "gtopk": [{"step_s": fast, "metrics": rising, "strategy": "gtopk"}] * 2,
        },
        alone=[{"step_s": ideal, "late_s": (None, None)}] * 2,
        target=0.7,
    )
    expected = {
        "time_to_target_s": (12.0, 3.0),
        "steps_to_target": (30.0, 30.0),
        "final_metric": (0.9, 0.9),
        "step_s": (0.4, 0.1),
        "steps_per_s": (2.5, 10.0),
        "samples_per_s": (40.0, 160.0),
        "efficiency": (0.125, 0.5),
        "bytes_per_step": (1_000.0, 1_000.0),
        "messages_per_step": (4.0, 4.0),
        "share_compute": (0.25, 0.25),
        "share_encode": (0.25, 0.25),
        "share_wait": (0.0, 0.0),
        "share_transfer": (0.5, 0.5),
        "peak_memory_bytes": (200.0, 200.0),
    }
    assert expected.keys() == {*get_args(Measure)}
    for measure, (ddp, gtopk) in expected.items():
        assert measured(analysed, "ddp", measure) == pytest.approx([ddp, ddp]), measure
        assert measured(analysed, "gtopk", measure) == pytest.approx([gtopk, gtopk]), measure
    assert [(d.measure, d.a, d.b, d.decided) for d in analysed.differences] == [
        ("time_to_target_s", "ddp", "gtopk", True),
        ("step_s", "ddp", "gtopk", True),
    ]
    assert [d.ratio for d in analysed.differences] == pytest.approx([4.0, 4.0])
    assert analysed.verdict.startswith("gtopk reached accuracy 0.7 in 3 s, 4 times")


def test_bytes_a_step_are_those_of_the_steps_whose_seconds_are_told(tmp_path: Path) -> None:
    begins_dense = [100_000] * 2 + [1_000] * (STEPS - 2)
    averages_rarely = ([0] * 9 + [50_000]) * (STEPS // 10)
    analysed = compare_runs(
        tmp_path,
        {
            "ddp-powersgd": [{"step_s": [0.1] * STEPS, "bytes_sent": begins_dense}],
            "localsgd": [{"step_s": [0.1] * STEPS, "bytes_sent": averages_rarely}],
        },
    )
    assert measured(analysed, "ddp-powersgd", "bytes_per_step") == [1_000.0]
    assert measured(analysed, "localsgd", "bytes_per_step") == [5_000.0]


def test_a_target_that_some_run_never_reaches(tmp_path: Path) -> None:
    steps = [0.1] * STEPS
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [{"step_s": steps, "metrics": [(0, 0.0), (40, 0.8)]}] * 2,
            "gtopk": [{"step_s": steps, "metrics": [(0, 0.0), (40, last)]} for last in (0.3, 0.8)],
        },
        target=0.4,
    )
    assert measured(analysed, "ddp", "time_to_target_s") == pytest.approx([2.0, 2.0])
    assert measured(analysed, "gtopk", "time_to_target_s") == [None, pytest.approx(2.0)]
    assert analysed.verdict == "Only ddp reached accuracy 0.4 in every run, in 2 s."
    assert "gtopk did not reach 0.4 in 1 of its 2 runs." in analysed.findings
    assert [found.measure for found in analysed.differences] == ["step_s"]


def test_the_derived_target_is_noted_as_such(tmp_path: Path) -> None:
    made = [{"step_s": [0.1] * STEPS, "metrics": [(0, 0.0), (40, last)]} for last in (0.8, 0.5)]
    analysed = compare_runs(
        tmp_path, {"ddp": made[:1], "gtopk": made[1:]}, target=None, target_was_given=False
    )
    assert analysed.target == 0.5
    assert measured(analysed, "ddp", "time_to_target_s") == pytest.approx([2.5])
    assert measured(analysed, "gtopk", "time_to_target_s") == pytest.approx([4.0])


def test_a_target_that_holds_before_the_first_step_is_no_race(tmp_path: Path) -> None:
    """A strategy that diverges at once makes the untrained model the best that every
    run reached.
    """
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [{"step_s": [0.4] * STEPS, "metrics": [(0, 0.1), (40, 0.8)]}] * 2,
            "gtopk": [{"step_s": [0.1] * STEPS, "metrics": [(0, 0.1), (40, 0.05)]}] * 2,
        },
        target=None,
        target_was_given=False,
    )
    assert analysed.target == 0.1
    assert [d.measure for d in analysed.differences] == ["step_s"]
    assert analysed.verdict.startswith("gtopk takes the shortest steps")
    assert analysed.verdict.endswith("accuracy 0.1 was reached before the first step.")
    won = winner(analysed)
    assert won is not None
    assert won.label == "gtopk"


def test_a_metric_that_is_not_a_number_is_none_that_was_reached(tmp_path: Path) -> None:
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [{"step_s": [0.1] * STEPS, "metrics": [(0, 3.0), (20, math.nan), (40, 1.0)]}],
            "gtopk": [
                {"step_s": [0.1] * STEPS, "metrics": [(0, 3.0), (20, math.inf), (40, math.nan)]}
            ],
        },
        target=2.0,
        higher_is_better=False,
    )
    assert measured(analysed, "ddp", "time_to_target_s") == pytest.approx([2.0])
    assert measured(analysed, "gtopk", "time_to_target_s") == [None]


def test_a_failed_strategy_has_no_measures_and_the_others_have(tmp_path: Path) -> None:
    made = {"step_s": [0.1] * STEPS, "metrics": [(0, 0.1), (40, 0.9)]}
    analysed = compare_runs(tmp_path, {"ddp": [made] * 2, "gtopk": []}, target=0.5)
    ddp, gtopk = analysed.strategies
    assert (gtopk.failure, gtopk.measures, gtopk.lateness_s) == ("it broke", {}, [])
    assert ddp.measures["step_s"].median == pytest.approx(0.1)
    assert analysed.differences == []
    assert analysed.verdict == "Only ddp finished: 100 ms a step."
    assert "gtopk failed: it broke" in analysed.findings


def test_a_script_that_ended_by_itself_has_done_its_own_steps(tmp_path: Path) -> None:
    short = {"step_s": [0.1] * 20, "metrics": [(0, 0.1), (20, 0.8)]}
    better = {"step_s": [0.1] * 20, "metrics": [(0, 0.1), (20, 0.9)]}
    analysed = compare_runs(tmp_path, {"ddp": [short], "gtopk": [better]})
    assert analysed.steps == 20
    assert any(finding.startswith("After 20 steps gtopk has") for finding in analysed.findings)


def test_all_failed(tmp_path: Path) -> None:
    analysed = analyse(
        tmp_path, comparison([strategy("ddp", failure="a"), strategy("gtopk", failure="b")]), {}
    )
    assert analysed.verdict == "No strategy finished."
    assert analysed.findings == ["ddp failed: a", "gtopk failed: b"]


@pytest.mark.parametrize("unfinished", [{"status": "stopped"}, {"step_s": []}])
def test_a_run_that_did_not_finish_has_no_values(
    tmp_path: Path, unfinished: dict[str, Any]
) -> None:
    made: dict[str, Any] = {"step_s": [0.1] * STEPS, "metrics": [(0, 0.1), (40, 0.9)]}
    analysed = compare_runs(tmp_path, {"ddp": [made, {"step_s": [0.1], **unfinished}]}, target=0.5)
    for measure in {*get_args(Measure)} - {"efficiency"}:
        first, second = measured(analysed, "ddp", measure)
        assert first is not None, measure
        assert second is None, measure


def test_efficiency_is_against_the_runs_without_exchange_that_finished(tmp_path: Path) -> None:
    made = {"step_s": [0.2] * STEPS}
    alone: list[dict[str, Any]] = [
        {"step_s": [0.1] * STEPS},
        {"step_s": [0.1] * STEPS, "status": "stopped"},
    ]
    analysed = compare_runs(tmp_path / "a", {"ddp": [made] * 2}, alone=alone)
    assert measured(analysed, "ddp", "efficiency") == pytest.approx([0.5, 0.5])
    analysed = compare_runs(tmp_path / "b", {"ddp": [made] * 2})
    assert "efficiency" not in analysed.strategies[0].measures


def test_lateness_is_the_mean_of_each_rank_over_all_runs(tmp_path: Path) -> None:
    step_s = [1.0] * STEPS
    analysed = compare_runs(
        tmp_path, {"ddp": [{"step_s": step_s, "late_s": (0.0, late)} for late in (0.1, 0.3)]}
    )
    assert analysed.strategies[0].lateness_s == pytest.approx([0.0, 0.2])
    assert measured(analysed, "ddp", "share_wait") == pytest.approx(
        [0.05, 0.15]
    )  # rank 0 alone waits, and that is a half


@pytest.mark.parametrize("is_always_last", [True, False])
def test_findings_and_page_agree_on_the_slow_worker(tmp_path: Path, is_always_last: bool) -> None:
    """Worker 1 is the latest on average both times, and the last one in most steps once."""
    others = [(0.0, 0.1, 0.0)] * 2 if is_always_last else [(0.0, 0.0, 0.1), (0.1, 0.0, 0.0)]
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [
                {"step_s": [1.0] * STEPS, "late_s": late, "workers": 3}
                for late in [(0.0, 0.5, 0.0), *others]
            ]
        },
    )
    write_comparison(tmp_path, analysed)
    named = [line for line in analysed.findings if "slow one" in line]
    (bars,) = lateness_bars(report_of_comparison(tmp_path))
    assert [bar.mark for bar in bars.bars] == [False, is_always_last, False]
    assert len(named) == is_always_last
    assert bars.sentence.startswith("Worker 1 was" if is_always_last else "Workers take")


@pytest.mark.parametrize("late_s", [(None, None), (0.0, None)])
def test_who_never_waits_has_no_lateness(tmp_path: Path, late_s: tuple[float | None, ...]) -> None:
    analysed = compare_runs(tmp_path / "in", {"ddp": [{"step_s": [1.0] * STEPS, "late_s": late_s}]})
    assert analysed.strategies[0].lateness_s == []
    write_comparison(tmp_path, analysed)
    assert read_comparison(tmp_path) == analysed


def test_notices_are_said_once_and_skipped_steps_are_among_them(tmp_path: Path) -> None:
    made = {"step_s": [0.1] * STEPS, "notices": ["slow disk"], "skipped_steps": 2}
    analysed = compare_runs(tmp_path, {"ddp": [made, made]})
    assert analysed.strategies[0].notices == [
        "slow disk",
        "4 steps were skipped, since some gradient was not finite",
    ]


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/ddp-seed-0", step_s=[0.1] * 3)
    (run / "config.json").write_text("{}")
    with pytest.raises(RecordError):
        Record(run)
    with pytest.raises(RecordError):
        analyse(tmp_path, comparison([strategy("ddp", num_seeds=1)], num_seeds=1), {})


def test_what_was_judged_is_written_and_read_back(tmp_path: Path) -> None:
    made = {"step_s": [0.1] * STEPS, "metrics": [(0, 0.1), (40, 0.9)]}
    analysed = compare_runs(tmp_path, {"ddp": [made] * 3, "gtopk": [made] * 3}, target=0.5)
    write_comparison(tmp_path, analysed)
    assert read_comparison(tmp_path) == analysed


def test_intervals_are_read_back_however_far_runs_differ(tmp_path: Path) -> None:
    """Of two seeds one strategy is much faster with one, the other one with the other; of three
    one has nearly diverged.
    """
    early, late = (
        {"step_s": [0.1] * STEPS, "metrics": [(0, first), (40, last)]}
        for first, last in ((0.499, 0.9), (0.1, 0.51))
    )
    races = compare_runs(tmp_path, {"ddp": [early, late], "gtopk": [late, early]}, target=0.5)
    race = between(races, "time_to_target_s", "ddp", "gtopk")
    assert race is not None
    assert not race.decided
    write_comparison(tmp_path, races)
    assert read_comparison(tmp_path) == races
    wide = comparison([strategy("topk", {"final_metric": [20.0, 25.0, 2.5e30]})])
    write_comparison(tmp_path, wide)
    assert read_comparison(tmp_path) == wide


Values = Mapping[Measure, Sequence[float | None]]


def figures_of(
    label: str,
    time_s: Sequence[float | None],
    step_s: Sequence[float],
    *,
    final_metric: Sequence[float | None] = (None,),
) -> ComparedStrategy:
    values: Values = {"time_to_target_s": time_s, "step_s": step_s, "final_metric": final_metric}
    return strategy(label, values, num_seeds=len(time_s))


def analysed(
    *strategies: ComparedStrategy, target: float | None = 0.9, **settings: bool
) -> Comparison:
    """A comparison with the differences that follow from the measures."""
    differences = [
        Difference(
            measure=measure,
            a=a.label,
            b=b.label,
            **compare(a.measures[measure], b.measures[measure]).model_dump(),
        )
        for place, a in enumerate(strategies)
        for b in strategies[place + 1 :]
        for measure in ("time_to_target_s", "step_s")
        if a.measures and b.measures and a.measures[measure].median and b.measures[measure].median
    ]
    return comparison(strategies, target=target, differences=differences, **settings)


SLOW = figures_of("ddp", [10.0, 10.2, 10.4], [1.0, 1.01, 1.02])
FAST = figures_of("gtopk", [2.0, 2.1, 2.2], [0.2, 0.21, 0.22])
AS_FAST = figures_of("topk", [1.9, 2.15, 2.3], [0.19, 0.215, 0.23])


def test_a_decided_race_names_the_winner_and_by_how_much() -> None:
    assert (
        verdict(analysed(SLOW, FAST))
        == "gtopk reached accuracy 0.9 in 2.10 s, 4.86 times faster than ddp, the next best."
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
    one, other = figures_of("ddp", [10.0], [1.0]), figures_of("gtopk", [2.0], [0.2])
    text = verdict(analysed(one, other))
    assert "faster" not in text
    assert text == (
        "In the only run of each, gtopk was the first to reach accuracy 0.9, in 2 s; no difference"
        " in step time between gtopk and ddp that this comparison can see."
    )


def test_a_target_that_one_run_had_before_its_first_step_tells_nobody_apart() -> None:
    early = figures_of("gtopk", [0.0, 2.0, 2.1], [0.2, 0.21, 0.22])
    assert verdict(analysed(SLOW, early)) == (
        "No difference in the time to accuracy 0.9 between gtopk and ddp that this comparison can"
        " see."
    )


def test_nobody_is_called_equal_who_is_slower_than_one_of_those_named() -> None:
    # The fastest median has a wide spread; of the two others one is faster beyond doubt.
    wide = figures_of("gtopk", [1.0, 2.0, 40.0], [0.1, 0.2, 4.0])
    found = analysed(SLOW, wide, figures_of("wagma", [5.0, 5.1, 5.2], [0.5, 0.51, 0.52]))
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
        figures_of("ddp", never, [1.0, 1.01, 1.02]),
        figures_of("gtopk", [2.0, None, None], [0.2, 0.21, 0.22]),
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
    short = figures_of("gtopk", [None, 2.0, 2.0], [0.2, 0.21, 0.22])
    assert (
        verdict(analysed(SLOW, short)) == "Only ddp reached accuracy 0.9 in every run, in 10.2 s."
    )


def test_one_that_missed_the_target_once_does_not_win_the_race() -> None:
    lucky = figures_of("topk", [None, 0.1, 0.1], [0.1, 0.1, 0.1])
    assert verdict(analysed(SLOW, FAST, lucky)).startswith("gtopk reached accuracy 0.9 in 2.10 s")


def test_one_finisher_and_none() -> None:
    failed = strategy("gtopk", failure="worker 1 was killed")
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
    never = figures_of("topk", [None, None, None], [0.3, 0.3, 0.3])
    made = analysed(SLOW, never, FAST, strategy("ddp-fp16", failure="no"))
    assert [c.label for c in ranking(made, "time_to_target_s")] == ["gtopk", "ddp"]
    assert [c.label for c in ranking(made, "step_s")] == ["gtopk", "topk", "ddp"]
    assert ranking(made, "efficiency") == []


def test_each_strategy_is_held_against_ddp() -> None:
    slower = figures_of("ddp-powersgd", [30.0, 30.5, 31.0], [2.02, 2.03, 2.04])
    same = figures_of("ddp-fp16", [10.0, 10.2, 10.4], [0.99, 1.015, 1.03])
    found = findings(analysed(SLOW, FAST, slower, same))
    assert found[:4] == [
        "gtopk against ddp, the next best in the time to the target: 4.86 times (4.53 to 5.21)"
        " faster.",
        "gtopk takes 210 ms a step, ddp 1.01 s: 4.81 times (4.38 to 5.29) faster.",
        "ddp-fp16 takes 1.01 s a step, ddp 1.01 s: no difference larger than the spread.",
        "ddp-powersgd takes 2.03 s a step, ddp 1.01 s: 2.01 times (1.98 to 2.04) slower.",
    ]
    assert not any(" ddp takes" in line or line.startswith("ddp takes") for line in found)


def test_final_metrics_are_held_against_the_dense_ones_seed_by_seed() -> None:
    base = [0.90, 0.94, 0.92]
    gaps = {
        "gtopk": [-0.02, -0.021, -0.022],
        "topk": [0.02, 0.021, 0.022],
        "allreduce": [0.01, -0.01, 0.02],
    }
    strategies = [figures_of("ddp", [1.0] * 3, [1.0] * 3, final_metric=base)] + [
        figures_of(
            label,
            [1.0] * 3,
            [1.0] * 3,
            final_metric=[one + gap for one, gap in zip(base, of, strict=True)],
        )
        for label, of in gaps.items()
    ]
    for higher, less, more in ((True, "worse", "better"), (False, "better", "worse")):
        found = findings(analysed(*strategies, higher_is_better=higher))
        assert [line for line in found if line.startswith("After")] == [
            f"After 40 steps gtopk has accuracy 0.8980, ddp 0.9200: 0.01852 to 0.02348 {less}.",
            f"After 40 steps topk has accuracy 0.9420, ddp 0.9200: 0.01852 to 0.02348 {more}.",
            "After 40 steps allreduce has accuracy 0.9300, ddp 0.9200:"
            " no difference larger than the spread.",
        ]


UNKNOWN = "whether they differ takes 3 runs of different seeds to say."


def test_one_or_two_runs_do_not_say_that_metrics_differ() -> None:
    two = [
        figures_of(label, [1.0] * 2, [1.0] * 2, final_metric=[metric] * 2)
        for label, metric in (("ddp", 0.9), ("gtopk", 0.8))
    ]
    assert findings(analysed(*two))[-1].endswith(UNKNOWN)


def test_runs_that_repeat_each_other_do_not_say_that_metrics_differ() -> None:
    """As those of a script that sets its own seed."""
    two = [
        figures_of(label, [1.0] * 3, [1.0] * 3, final_metric=[metric] * 3)
        for label, metric in (("ddp", 0.9), ("gtopk", 0.8))
    ]
    assert findings(analysed(*two))[-1].endswith(UNKNOWN)


def test_a_strategy_above_the_ideal_is_explained() -> None:
    above = FAST.model_copy(
        update={"measures": {**FAST.measures, "efficiency": estimate([1.14, 1.15, 1.13])}}
    )
    (said,) = [line for line in findings(analysed(SLOW, above)) if "more than 100%" in line]
    assert f"{FAST.label} at 114%" in said


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
    missed = figures_of("topk", [None, 0.1, 0.1], [0.1, 0.1, 0.1])
    for made in (analysed(SLOW, FAST, missed), analysed(SLOW, missed), analysed(SLOW, FAST)):
        won = winner(made)
        assert won is not None
        assert won.label in verdict(made).split(" reached ")[0]
    assert winner(analysed(strategy("gtopk", failure="worker 1 was killed"))) is None


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
def test_one_worker_is_slow_if_half_of_the_strategies_say_so(
    named: list[int | None], slow: int | None
) -> None:
    assert slow_worker_of(named) == slow


def test_a_run_that_has_diverged_sets_no_target_and_is_said_to_have(tmp_path: Path) -> None:
    broken = [(0, 3.0), (20, 2.9), (40, math.nan)]
    sound = [(0, 3.0), (20, 2.95), (40, 1.0)]
    analysed = compare_runs(
        tmp_path,
        {
            "ddp": [{"step_s": [0.1] * STEPS, "metrics": broken}],
            "gtopk": [{"step_s": [0.4] * STEPS, "metrics": sound}],
        },
        target=None,
        target_was_given=False,
        higher_is_better=False,
    )
    assert analysed.target == 1.0
    assert analysed.verdict.startswith("Only gtopk reached accuracy 1 in every run")
    assert "diverged in 1 of 1 runs" in analysed.strategies[0].notices[0]
    assert analysed.strategies[1].notices == []
