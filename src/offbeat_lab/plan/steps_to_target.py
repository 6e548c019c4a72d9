"""How many steps strategies took to a target, from the record of a comparison: what turns a
predicted step into a time to accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.strategies.by_name import strategy_values
from offbeat_lab.comparison import ComparedStrategy, Comparison, read_comparison
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.plan.profile import ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsToTarget:
    """Steps that were measured.

    Attributes:
        record: name of the comparison.
        workers: that trained.
        target: in words, such as "accuracy 0.95".
        steps: by strategy as it was asked for; the others are not in the record, or some of their
            runs did not reach the target.
        missed: strategies as they were asked for, of which runs did not reach the target.
    """

    record: str
    workers: int
    target: str
    steps: Mapping[str, float]
    missed: Sequence[str]

    def describe(self) -> str:
        """Where the steps come from, in two or three sentences."""
        said = (
            f"Target: {self.target}, after the steps that each strategy took in {self.record} with"
            f" {self.workers} worker{'s' * (self.workers > 1)}. With other numbers of workers or"
            " other batches it would take other numbers of steps."
        )
        if self.missed:
            said += f" Not all runs reached it: {', '.join(self.missed)}."
        return said


def steps_to_target(
    directory: Path, strategies: Sequence[str], profile: ModelProfile
) -> StepsToTarget:
    """What the comparison in `directory` knows of `strategies`.

    Args:
        directory: of the comparison.
        strategies: with their options.
        profile: of what is planned for.

    Raises:
        RecordError: there is no comparison, or it is damaged.
        ConfigError: it has no target, is of another model, or has none of the strategies.
    """
    comparison = read_comparison(directory)
    require_model(comparison, directory, profile)
    if comparison.target is None:
        raise ConfigError(
            f"{directory} knows of no metric that its strategies reached; compare again on"
            " something that is evaluated"
        )
    compared = dict(_keyed(comparison.strategies))
    found = {spec: compared.get(_key(*parse_spec(spec))) for spec in strategies}
    if not any(found.values()):
        labels = ", ".join(one.label for one in comparison.strategies)
        raise ConfigError(
            f"{directory} compared {labels}, and none of these is planned for with the same"
            " options; name them with --strategies"
        )
    counted = {spec: _steps(one) for spec, one in found.items() if one is not None}
    return StepsToTarget(
        record=directory.resolve().name,
        workers=comparison.workers,
        target=f"{comparison.metric_name} {comparison.target:.4g}",
        steps={spec: steps for spec, steps in counted.items() if steps is not None},
        missed=tuple(spec for spec, steps in counted.items() if steps is None),
    )


def require_model(comparison: Comparison, directory: Path, profile: ModelProfile) -> None:
    """Raise `ConfigError` unless `comparison`, recorded in `directory`, trained the model of
    `profile`, as far as that can be seen.
    """
    if comparison.num_parameters not in (0, profile.num_elements):
        raise ConfigError(
            f"profile {profile.name!r} has {profile.num_elements} parameters, and {directory}"
            f" trained a model of {comparison.num_parameters}; give the profile of that model"
        )


def _keyed(
    strategies: Sequence[ComparedStrategy],
) -> Iterator[tuple[tuple[str, str], ComparedStrategy]]:
    for one in strategies:
        try:
            yield _key(one.strategy, one.options), one
        except ConfigError:
            continue  # of another version: what it did nothing does now


def _key(name: str, options: Mapping[str, object]) -> tuple[str, str]:
    """The same for strategies that do the same, however they were asked for."""
    return name, repr(sorted(strategy_values(build_strategy(name, options)).items()))


def _steps(compared: ComparedStrategy) -> float | None:
    """None where not every run reached the target."""
    measured = compared.measures.get("steps_to_target")
    if compared.failure is not None or measured is None or None in measured.values:
        return None
    return measured.median
