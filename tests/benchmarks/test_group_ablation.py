"""Training on a virtual clock, in one process."""

from __future__ import annotations

import pytest

from group_ablation import Ablation, Outcome, run, strategy_of
from offbeat.errors import ConfigError

STEPS = 10
CASE = Ablation(name="digits", task="digits", settings=("momentum=0",), steps=STEPS, step_s=0.06)


@pytest.fixture(scope="module")
def waiting() -> Outcome:
    return run(CASE, "allreduce", 0)


def test_a_run_can_be_repeated_to_the_bit_and_loses_little_time_to_late_workers(
    waiting: Outcome,
) -> None:
    """A worker is 30 ms late in a quarter of its steps, and some worker is in each."""
    first, second = (run(CASE, "wagma:period=4", 0) for _ in range(2))
    assert first == second
    assert waiting.seconds == pytest.approx(STEPS * 0.09)
    assert first.seconds == pytest.approx(STEPS * 0.0675, rel=0.15)


def test_plain_sgd_with_averaged_weights_is_plain_sgd_with_averaged_gradients(
    waiting: Outcome,
) -> None:
    weights = run(CASE, "localsgd:period=1:warmup=0:optimizer_state=local", 0)
    assert weights.metrics == pytest.approx(waiting.metrics, abs=0.01)
    assert weights.seconds == waiting.seconds


@pytest.mark.parametrize(
    ("spec", "left_out"),
    [
        ("wagma:values=bfloat16", "values=bfloat16"),
        ("localsgd:warmup=0", "optimizer_state=averaged"),
        ("adpsgd", "adpsgd"),
    ],
)
def test_what_a_run_would_leave_out_is_refused(spec: str, left_out: str) -> None:
    with pytest.raises(ConfigError, match=f": {left_out};"):
        strategy_of(spec)
