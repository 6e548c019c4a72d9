"""What `offbeat run` is to do, checked before anything starts, and what is misspelt before torch is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from offbeat.errors import ConfigError, nearest
from offbeat.run.config import RunConfig, ScriptCommand, script_run
from offbeat.strategies.by_name import build_strategy, parse_spec, strategy_type, strategy_values
from offbeat.strategies.registry import ALONE, REGISTRY

DEFAULT_WORKERS = 4


def script_command(
    words: Sequence[str], *, as_module: bool = False, metric: str | None = None
) -> ScriptCommand:
    """The script that `words` begin with, and its arguments.

    Args:
        words: those of the command line.
        as_module: whether the first of them names a module, as for `python -m`.
        metric: the logged value that counts; None: chosen by its name.

    Raises:
        ConfigError: there is no such script.
    """
    if not words:
        raise ConfigError(
            "no script to run; name one after the options, such as: offbeat run --strategy"
            " gtopk:density=0.01 train.py --epochs 3"
        )
    path, *arguments = words
    if as_module:
        top = path.partition(".")[0]
        # The worker looks in the working directory first, where this process need not look.
        if find_spec(top) is None and not (Path(top).exists() or Path(f"{top}.py").exists()):
            raise ConfigError(f"there is no module {path!r} to run; is it installed?")
    elif not Path(path).is_file():
        beside = [entry.name for entry in Path(path).parent.glob("*.py")]
        what = "is a directory, not a file" if Path(path).is_dir() else "does not exist"
        raise ConfigError(f"the script {path} {what}{nearest(Path(path).name, beside)}")
    return ScriptCommand(path=path, arguments=arguments, as_module=as_module, metric=metric)


def script_config(
    script: ScriptCommand,
    strategy: str,
    *,
    workers: int,
    steps: int | None = None,
    log_to: Sequence[str] = (),
) -> RunConfig:
    """The run of `script` with `strategy`, such as "gtopk:density=0.01".

    Args:
        script: what runs.
        strategy: with its options.
        workers: number of ranks, >= 1.
        steps: after which the script is stopped; None: it stops by itself.
        log_to: who hears metrics while training runs; see `RunConfig`.

    Raises:
        ConfigError: no such strategy, option or logger, or a number that cannot be.
    """
    from offbeat.run.recipes import SCRIPT_STRATEGIES  # which imports torch

    spec = parse_spec(strategy, SCRIPT_STRATEGIES)
    built = build_strategy(*spec, SCRIPT_STRATEGIES)
    built.check_world(workers)
    options = strategy_values(built)
    return script_run(script, built.name, options, workers=workers, steps=steps, log_to=log_to)


def check_strategy_name(text: str, path: str) -> None:
    """Raises `ConfigError` if `text` does not begin with the name of one strategy for the script at
    `path`. Imports no strategy.
    """
    if "," in text.partition(":")[0]:
        raise ConfigError(
            f"--strategy takes one strategy, got {text!r}; to try several: offbeat compare"
            f" --strategies {text} -- {path}"
        )
    if text.partition(":")[0].startswith("ddp"):
        raise ConfigError(
            f"{text} is PyTorch's own exchange, which the script has under torchrun; allreduce does"
            f" the same here, and offbeat compare --strategies {text},allreduce -- {path} shows"
            " both"
        )
    strategy_type(text.partition(":")[0].strip(), dict.fromkeys((ALONE, *REGISTRY), object))
