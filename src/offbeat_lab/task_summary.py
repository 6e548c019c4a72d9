"""The summary of a task's run, written at its end: the replicas are compared, and the leader
measures the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from offbeat.run.records import Summary
from offbeat.run.run_summary import HANGS_S, Measured, gather_ends, write_end
from offbeat_lab.measuring import measure_rest
from offbeat_lab.task_recorder import TaskRecorder, TaskRun

_TOLERATED: Final = 1.05
"""Where samples are claimed a run ends at a merge: so many times as many steps as it was to do need
no remark.
"""


def summarize_run(run: TaskRun, recorder: TaskRecorder) -> Summary | None:
    """Compare the replicas, measure the model on the leader, and write the summary. Returns it
    there.
    """
    step, session, task = run.schedule.position.step, run.attached.session, run.task
    apart = session.averages_alone
    final = None if apart else run.attached.averaged_model()
    num_steps = max(1, step - recorder.first_step)
    notices = [*_length_notices(run), *_step_time_notices(run, num_steps)]
    ends = gather_ends(recorder, notices, patience_s=HANGS_S if apart else None)
    if ends is None:
        return None
    measure_rest(run, recorder)
    if final is None:
        final = run.attached.averaged_model()
    stopped = step < run.schedule.target
    metric, others = None, {}
    if not stopped:
        final.eval()
        others = task.metrics(final)
        run.attached.log(others)
        metric = others.pop(task.metric_name)
        measured_at = recorder.evaluation(metric, others, without=run.attached.averaged_without)
        if apart:  # What is measured was there when the last rank had finished.
            measured_at = replace(measured_at, seconds=max(end["seconds"] for end in ends))
        recorder.write_evaluation(measured_at)
    measured = Measured(
        metric=metric,
        name=task.metric_name,
        higher_is_better=task.higher_is_better,
        others=others,
    )
    return write_end(recorder, ends, measured, final, finished=not stopped)


def _length_notices(run: TaskRun) -> list[str]:
    step, asked = run.schedule.position.step, run.record.config.steps
    if asked is None or step <= asked * _TOLERATED:
        return []
    return [
        f"{asked} steps were asked for, and the first merge after them came at step {step}; a"
        " smaller mega_batch comes nearer"
    ]


def _step_time_notices(run: TaskRun, num_steps: int) -> list[str]:
    if run.step_time.num_late * 20 < num_steps:
        return []
    what = (
        f"worker {run.coordinator.rank} computed for longer than the emulated step in"
        f" {run.step_time.num_late} of {num_steps} steps"
    )
    return [f"{what}; give a longer --step-time, or fewer workers"]
