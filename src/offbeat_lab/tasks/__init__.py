"""The tasks of the lab, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from offbeat.errors import ConfigError, nearest
from offbeat_lab.tasks.base import Batch, Task, TaskOptions, num_samples_of
from offbeat_lab.tasks.images import Digits, Images, Mnist
from offbeat_lab.tasks.sequences import Sequences
from offbeat_lab.tasks.text import Charlm, Text
from offbeat_lab.tasks.xmc import Xmc

__all__ = ["TASKS", "Batch", "Task", "TaskOptions", "build_task", "num_samples_of", "task_type"]

TASKS: Final[Mapping[str, type[Task]]] = {
    task.name: task for task in (Digits, Images, Mnist, Text, Charlm, Sequences, Xmc)
}


def task_type(name: str) -> type[Task]:
    """The task called `name`. Raises `ConfigError` with the nearest name that exists."""
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}; allowed are {', '.join(TASKS)}{nearest(name, TASKS)}")
    return TASKS[name]


def build_task(name: str, options: Mapping[str, object]) -> Task:
    """The task called `name`, its options checked.

    Args:
        name: a key of `TASKS`.
        options: values by option name; strings are converted.

    Raises:
        ConfigError: no such task or option, a value that is not allowed, or data that is not there.
    """
    kind = task_type(name)
    try:
        return kind(kind.options_type.model_validate(options))
    except ValidationError as error:
        raise ConfigError(_explain(kind, error)) from None


def _explain(kind: type[Task], error: ValidationError) -> str:
    first = error.errors()[0]
    option = ".".join(map(str, first["loc"]))
    allowed = kind.options_type.model_fields
    if first["type"] == "extra_forbidden":
        return (
            f"task {kind.name!r} has no option {option!r}; allowed are"
            f" {', '.join(allowed)}{nearest(option, allowed)}"
        )
    if first["type"] == "missing":
        return f"task {kind.name!r} needs --set {option}=...: {allowed[option].description}"
    if not option:  # one that concerns several options, and says so itself
        return f"options of task {kind.name!r}: {first['ctx']['error']}"
    return f"option {option} of task {kind.name!r}: got {first['input']!r}; {first['msg'].lower()}"
