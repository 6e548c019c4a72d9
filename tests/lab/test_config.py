"""What a run is asked for, and how that is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import offbeat
from offbeat.errors import ConfigError
from offbeat.run.config import RunConfig
from offbeat.strategies import REGISTRY
from offbeat.strategies.by_name import strategy_values
from offbeat_lab.cluster import Cluster, ClusterFault, LinkSpec, SpeedChange, Straggling
from offbeat_lab.config import Request, cluster_of, recipe_of, resolve, resolve_resume, task_of
from offbeat_lab.options import build_strategy, parse_spec, route, strategy_options, task_options
from offbeat_lab.tasks import TASKS

# A request becomes a complete configuration, or one sentence that says why not.


def asked(**changes: object) -> Request:
    return Request(**({"task": "digits", "strategy": "gtopk"} | changes))


def test_a_resolved_run_has_a_value_for_everything_and_survives_json() -> None:
    config = resolve(asked(settings=["density=0.01", "size=small"], steps=7))
    assert (config.task_options["size"], config.strategy_options["density"], config.workers) == (
        "small",
        0.01,
        4,
    )
    assert (config.steps, config.epochs) == (7, None)
    assert RunConfig.from_json(config.to_json()) == config
    assert recipe_of(config).density == 0.01


def test_without_a_length_the_task_decides() -> None:
    assert resolve(asked()).epochs == 30


@pytest.mark.parametrize("strategy", ["adaptive", "localsgd"])
def test_a_warmup_of_merges_needs_no_length_of_an_epoch(strategy: str) -> None:
    options = resolve(asked(strategy=strategy, settings=["warmup=3"])).strategy_options
    assert options["warmup"] == 3
    assert "steps_per_epoch" not in options


def test_a_sparse_strategy_clips_as_the_task_does() -> None:
    settings = ["max_grad_norm=0.5"]
    assert resolve(asked(settings=settings)).strategy_options["clip_norm"] == 0.5
    assert (
        "clip_norm" not in resolve(asked(strategy="localsgd", settings=settings)).strategy_options
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": None}, "--task is missing"),
        ({"strategy": None}, "--strategy is missing"),
        ({"workers": 0}, "--workers is 0; allowed is 1 or more"),
        ({"steps": -1}, "--steps is -1"),
        ({"checkpoint_every": 0}, "--checkpoint-every is 0"),
        ({"steps": 3, "epochs": 3}, "give one of them"),
        ({"workers": 64}, "64 workers"),
        ({"settings": ["density=2"]}, "density"),
        ({"settings": ["momentum_correction=0.9"]}, "momentum_correction"),
        ({"strategy": "adaptive", "settings": ["skew=0.3"]}, "skew= would change nothing"),
        ({"settings": ["batch_shares=1/1/0"]}, "'1/1/0'; allowed are numbers above 0 for each"),
        ({"settings": ["batch_shares=1,1,1,1"]}, "such as 1/1/0.5/0.5"),
        ({"settings": ["batch_shares=1/1/2"]}, "batch_shares has 3 numbers for 4 workers"),
        ({"settings": ["batch_shares=1/1/2/2"] * 2}, "batch_shares is given twice"),
        (
            {"settings": ["batch_shares=1/1/2/2", "skew=0.3"]},
            "skew= deals all workers equally many samples",
        ),
        (
            {"strategy": "adaptive", "settings": ["batch_shares=1/1/2/2"]},
            "'adaptive' lets workers share samples out.*choose one that averages gradients",
        ),
        (
            {"strategy": "wagma", "settings": ["batch_shares=1/1/2/2"]},
            "'wagma' averages over workers, not over samples",
        ),
        ({"strategy": "ddp", "settings": ["batch_shares=1/1/2/2"]}, "averages over workers"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(asked(**changes))


STORED = {"steps": 20, "settings": ["density=0.01"], "seed": 5}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(steps=30), {"steps": 30}),
        (Request(epochs=30), {"epochs": 30, "steps": None}),
        (Request(workers=2), {"workers": 2}),
        (Request(emulation="delaying"), {"emulation": "delaying"}),
        (asked(seed=5, settings=["density=1e-2", "size=tiny"]), {}),
    ],
)
def test_a_resume_may_change_workers_and_length(
    request_: Request, expected: dict[str, Any]
) -> None:
    stored = resolve(asked(**STORED))
    assert resolve_resume(stored, request_, steps_done=10, epochs_done=0) == replace(
        stored, **expected
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(task="charlm"), "--task charlm contradicts the record, which has digits"),
        (Request(strategy="topk"), "--strategy topk contradicts"),
        (Request(seed=0), "--seed 0 contradicts the record, which has 5"),
        (
            Request(settings=["density=0.1"]),
            "--set density=0.1 contradicts the record, which has 0.01",
        ),
        (Request(settings=["size=large"]), "--set size=large contradicts"),
        (
            Request(settings=["batch_shares=1/1/2/2"]),
            "--set batch_shares contradicts the record, which has equal batches",
        ),
        (Request(steps=10), "has done 10 steps and is to do 10; raise --steps"),
        (Request(epochs=1), "has done 1 epochs and is to do 1; raise --epochs"),
    ],
)
def test_a_resume_that_contradicts_the_record_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_resume(resolve(asked(**STORED)), request_, steps_done=10, epochs_done=1)


EVENTFUL = Cluster(
    workers=4,
    links={3: LinkSpec(latency_s=0.1)},
    straggling=(
        Straggling(workers=(1, 3), delay_s=0.1),
        Straggling(workers=(2,), delay_s=0.2),
        Straggling(workers=3, delay_s=0.3),
    ),
    changes=(
        SpeedChange(at_s=1.0, worker=1, speed=0.5),
        SpeedChange(at_s=2.0, worker=2, speed=0.5),
    ),
    faults=(
        ClusterFault(at_s=1.0, worker=0, action="stop"),
        ClusterFault(at_s=2.0, worker=0, action="continue"),
        ClusterFault(at_s=3.0, worker=3, action="kill"),
    ),
)


def test_resumed_with_other_workers_the_cluster_has_as_many() -> None:
    stored = resolve(asked(steps=10, cluster=Cluster(workers=4, link=LinkSpec(rate_bit_per_s=1e9))))
    more = resolve_resume(stored, Request(workers=6, steps=20), steps_done=10, epochs_done=0)
    before, after = cluster_of(stored), cluster_of(more)
    assert before is not None
    assert after is not None
    assert (more.workers, after.workers, after.link) == (6, 6, before.link)
    fewer = resolve_resume(
        resolve(asked(steps=10, cluster=EVENTFUL)),
        Request(workers=2, steps=20),
        steps_done=10,
        epochs_done=0,
    )
    assert cluster_of(fewer) == Cluster(
        workers=2,
        straggling=(Straggling(workers=(1,), delay_s=0.1), Straggling(workers=2, delay_s=0.3)),
        changes=(SpeedChange(at_s=1.0, worker=1, speed=0.5),),
        faults=(
            ClusterFault(at_s=1.0, worker=0, action="stop"),
            ClusterFault(at_s=2.0, worker=0, action="continue"),
        ),
    )
    uneven = resolve(asked(steps=10, cluster=Cluster(workers=4, speeds=(1.0, 1.0, 1.0, 0.5))))
    with pytest.raises(ConfigError, match="speeds"):
        resolve_resume(uneven, Request(workers=2, steps=20), steps_done=10, epochs_done=0)


# `--set` reaches the right part, typed, or is refused with the nearest name.


def test_settings_are_divided_between_task_and_strategy() -> None:
    assert route("digits", "gtopk", ["size=small", "density=0.5", "lr=1"]) == (
        {"size": "small", "lr": "1"},
        {"density": "0.5"},
    )


def test_no_option_belongs_to_a_task_and_to_a_strategy() -> None:
    of_tasks = {option.name for task in TASKS for option in task_options(task)}
    of_strategies = {option.name for name in REGISTRY for option in strategy_options(name)}
    assert of_tasks & of_strategies == set()


def test_the_task_says_how_large_batches_are() -> None:
    assert route("digits", "adaptive", ["batch_size=8"]) == ({"batch_size": "8"}, {})
    with pytest.raises(ConfigError, match="no option of strategy 'adaptive'"):
        parse_spec("adaptive:batch_size=8")
    config = resolve(Request(task="digits", strategy="adaptive", settings=["batch_size=8"]))
    assert task_of(config).options.batch_size == 8
    assert "batch_size" not in config.strategy_options


def test_a_mega_batch_has_room_for_steps() -> None:
    with pytest.raises(ConfigError, match="mega_batch is 7, but 4 workers need 8 batches or more"):
        resolve(Request(task="digits", strategy="elasticsgd", settings=["mega_batch=7"]))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_is_explained_and_its_default_can_be_given_as_text(name: str) -> None:
    options = strategy_options(name)
    assert all(option.help for option in options), [
        option.name for option in options if not option.help
    ]
    given = {option.name: option.default for option in options if option.default != "required"}
    assert build_strategy(name, given) == build_strategy(name, {})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_option_is_explained(name: str) -> None:
    assert all(option.help and option.allowed for option in task_options(name))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_strategy_is_rebuilt_from_its_values(name: str) -> None:
    strategy = build_strategy(name, {})
    assert build_strategy(name, strategy_values(strategy)) == strategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["desity=0.1"],
            (
                "neither task 'digits' nor strategy 'gtopk' has an option 'desity'.*did you mean"
                " 'density'"
            ),
        ),
        (["density"], "takes key=value, got 'density'"),
        (["=3"], "takes key=value"),
        (["density=1", "density=1"], "density is given twice"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        route("digits", "gtopk", settings)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtopc", {}, "no strategy 'gtopc'.*did you mean 'gtopk'"),
        (
            "gtopk",
            {"density": "lots"},
            "option density of GTopK: got 'lots'; allowed is number",
        ),
        ("gtopk", {"collective": "ring"}, "option collective .*got 'ring'; allowed is auto"),
        ("gtopk", {"densty": "1"}, "no option 'densty'.*'density'"),
        ("gtopk", {"density": "0"}, "density"),
        ("gtopk", {"density": "nan"}, "density"),
    ],
)
def test_strategies_that_cannot_be_built_are_refused(
    name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategy(name, options)


def test_options_of_kfacs_curvature_are_written_like_its_own() -> None:
    name, options = parse_spec("spdkfac:damping=0.1:max_dim=256:plain=head,LayerNorm")
    assert build_strategy(name, options) == offbeat.SPDKFAC(
        damping=0.1, curvature=offbeat.Curvature(max_dim=256, plain=("head", "LayerNorm"))
    )
    with pytest.raises(ConfigError, match="option max_dim of Curvature: got 'many'"):
        build_strategy(name, {"max_dim": "many"})
    with pytest.raises(ConfigError, match="got '0'; allowed is whole number of at least 1"):
        build_strategy(name, {"max_dim": "0"})


@pytest.mark.parametrize("name", ["none", "floor"])
def test_none_is_a_name_where_an_option_has_it(name: Any) -> None:
    assert build_strategy("spdkfac", {"grafting": name}) == offbeat.SPDKFAC(grafting=name)
    assert build_strategy("spdkfac", {"kl_clip": "none"}) == offbeat.SPDKFAC(kl_clip=None)
