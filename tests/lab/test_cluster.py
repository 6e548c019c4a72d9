"""A cluster reads back as it was written, says in one sentence why it cannot be, and tells every
rank the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from offbeat.errors import ConfigError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink, VirtualRacks
from offbeat.transport.operations import Collective, Recv, Send
from offbeat_lab.cluster import (
    PRESETS,
    Cluster,
    ClusterFault,
    LinkSpec,
    SpeedChange,
    Straggling,
    from_flags,
    load,
    parse_cluster,
    preset,
)
from offbeat_lab.cluster.quantities import duration_text, parse_duration, parse_rate, rate_text
from offbeat_lab.cluster.toml_writer import toml_key
from offbeat_lab.emulation import emulate

durations = st.floats(0, 86_400)
lengths = st.floats(0, 86_400, exclude_min=True)
speeds = st.floats(1e-3, 1)
links = st.builds(
    LinkSpec, rate_bit_per_s=st.none() | st.floats(1, 1e13), latency_s=st.floats(0, 10)
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    workers = draw(st.integers(1, 9))
    ranks = st.integers(0, workers - 1)
    who = st.integers(1, workers) | st.lists(ranks, min_size=1).map(tuple)
    probabilities = st.floats(0, 1, exclude_min=True)
    late = st.builds(
        Straggling,
        workers=who,
        delay_s=lengths,
        kind=st.sampled_from(["random", "permanent"]),
        probability=probabilities,
    )
    broken = draw(
        st.lists(
            st.tuples(durations, durations, ranks, st.sampled_from(["stop", "cut"])), max_size=2
        )
    )
    faults = [
        ClusterFault(at_s=at_s, worker=worker, action=action)
        for one_s, other_s, worker, undone in broken[:1]
        for at_s, action in zip(
            sorted((one_s, other_s)),
            (undone, {"stop": "continue", "cut": "mend"}[undone]),
            strict=True,
        )
    ]
    return Cluster(
        name=draw(
            st.text(
                st.characters(exclude_categories=["C", "Z"]) | st.just(" "), min_size=1, max_size=20
            )
        ),
        workers=workers,
        speeds=tuple(draw(st.lists(speeds, min_size=1, max_size=workers))),
        link=draw(links),
        links=draw(st.dictionaries(ranks, links, max_size=2)),
        straggling=tuple(draw(st.lists(late, max_size=2))),
        changes=tuple(
            draw(
                st.lists(
                    st.builds(SpeedChange, at_s=durations, worker=ranks, speed=speeds), max_size=2
                )
            )
        ),
        faults=tuple(faults),
        step_s=draw(st.none() | lengths),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(cluster=clusters())
def test_a_cluster_survives_toml_and_json(cluster: Cluster) -> None:
    assert parse_cluster(cluster.to_toml(), "written") == cluster
    assert Cluster.model_validate(cluster.model_dump(mode="json")) == cluster
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@given(cluster=clusters(), steps=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_all_ranks_agree_on_who_is_late_in_whatever_order_they_ask(
    cluster: Cluster, steps: list[int]
) -> None:
    backwards = {step: cluster.delayed_ranks(step) for step in reversed(steps)}
    for step in steps:
        asked = {rank: cluster.delay_s(rank, step) for rank in range(cluster.workers)}
        assert {rank: delay_s for rank, delay_s in asked.items() if delay_s} == backwards[step]


@given(text=st.text() | st.from_regex(r"[0-9.e+-]{1,9} ?[kmgtunsb/i]{0,8}"))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_rate, parse_duration):
        with suppress(ConfigError):
            assert parse(text, "it") >= 0 or text.strip().startswith("-")


@given(value=st.floats(1e-9, 1e15))
def test_quantities_are_written_to_the_last_digit(value: float) -> None:
    assert parse_duration(duration_text(value), "it") == value
    assert parse_rate(rate_text(value), "it") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1gbit", 1e9),
        ("100 Mbit/s", 1e8),
        ("1.5 GBIT/S", 1.5e9),
        ("10kbit", 1e4),
        ("7bit", 7.0),
        ("2tbit", 2e12),
        ("1e3mbit", 1e9),
    ],
)
def test_rates(text: str, value: float) -> None:
    assert parse_rate(text, "it") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("320ms", 0.32), ("1.5s", 1.5), ("200us", 2e-4), ("200 µs", 2e-4), (" 0.2 ms ", 2e-4)],
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text, "it") == value


def test_random_stragglers_change_and_permanent_ones_stay() -> None:
    kinds = {
        kind: Cluster(workers=8, straggling=(Straggling(workers=2, delay_s=0.32, kind=kind),))
        for kind in ("random", "permanent")
    }
    late = {
        kind: [tuple(cluster.delayed_ranks(step)) for step in range(400)]
        for kind, cluster in kinds.items()
    }
    assert {len(ranks) for steps in late.values() for ranks in steps} == {2}
    assert len(set(late["permanent"])) == 1
    hits = Counter(rank for ranks in late["random"] for rank in ranks)
    assert set(hits) == set(range(8))
    assert max(hits.values()) < 2 * min(hits.values())


def test_another_seed_draws_others() -> None:
    draws = {
        tuple(
            tuple(
                Cluster(
                    workers=8, seed=seed, straggling=(Straggling(workers=2, delay_s=1.0),)
                ).delayed_ranks(s)
            )
            for s in range(9)
        )
        for seed in range(5)
    }
    assert len(draws) == 5


def test_delays_of_several_entries_add_up() -> None:
    cluster = from_flags(workers=3, delay="3x100ms,rank1x1s")
    assert cluster.delayed_ranks(7) == pytest.approx({0: 0.1, 1: 1.1, 2: 0.1})


def test_a_step_is_hit_as_often_as_asked() -> None:
    cluster = from_flags(workers=4, delay="rank0+2x50ms:25%")
    hits = [cluster.delayed_ranks(step) for step in range(1000)]
    assert {tuple(hit) for hit in hits} == {(), (0, 2)}
    assert 180 < sum(map(bool, hits)) < 320


def test_speeds_are_repeated_and_change_with_time() -> None:
    changes = (
        SpeedChange(at_s=20.0, worker=1, speed=1.0),
        SpeedChange(at_s=10.0, worker=1, speed=0.25),
    )
    cluster = Cluster(workers=5, speeds=(1, 0.5), changes=changes)
    assert cluster.speeds == (1.0, 0.5, 1.0, 0.5, 1.0)
    assert [cluster.speed_at(1, at_s) for at_s in (0, 9.9, 10, 19.9, 20, 99)] == [
        0.5,
        0.5,
        0.25,
        0.25,
        1,
        1,
    ]
    assert cluster.speed_at(3, 99) == 0.5


@given(cluster=clusters(), times=st.integers(2, 4))
def test_more_workers_repeat_the_pattern(cluster: Cluster, times: int) -> None:
    more = cluster.changed(workers=times * cluster.workers)
    assert more.speeds[: cluster.workers] == cluster.speeds
    assert more.speed_pattern == cluster.speed_pattern
    assert more.changed(workers=cluster.workers) == cluster


def test_fewer_workers_do_not_silently_lose_the_slow_one() -> None:
    assert preset("ethernet-1g").changed(workers=2).speeds == (1.0, 1.0)
    with pytest.raises(ConfigError, match="4 numbers for 2 workers"):
        preset("mixed-gpus").changed(workers=2)


def test_a_worker_may_have_a_link_of_its_own() -> None:
    cluster = parse_cluster('link = "1gbit/1ms"\nlinks.3 = "100 Mbit/s"', "lab.toml")
    assert (cluster.link_of(0).bytes_per_s, cluster.link_of(0).latency_s) == (125e6, 1e-3)
    assert (cluster.link_of(3).bytes_per_s, cluster.link_of(3).latency_s) == (12.5e6, 0.0)
    assert math.isinf(LinkSpec().bytes_per_s)
    slow = VirtualLink(bytes_per_s=12.5e6)
    fast = VirtualLink(latency_s=1e-3, bytes_per_s=125e6)
    assert cluster.virtual_links() == [fast, fast, fast, slow]


def test_a_window_limits_what_a_connection_carries_in_a_round_trip() -> None:
    text = 'link = {rate = "1gbit", latency = "10ms", window = 125000}'
    cluster = parse_cluster(text, "lab.toml")
    assert cluster.virtual_links()[0].bytes_per_s == 125_000 / 0.02
    assert parse_cluster(cluster.to_toml(), "again") == cluster


def test_a_window_limits_connections_between_racks_too() -> None:
    racks = 'racks = {size = 2, rate = "1gbit", latency = "10ms"}'
    text = f'link = {{rate = "1gbit", window = 125000}}\n{racks}'
    cluster = parse_cluster(text, "lab.toml")
    assert cluster.virtual_links()[0].bytes_per_s == 125_000 / 0.02
    assert cluster.changed(workers=2).virtual_links()[0].bytes_per_s == 125e6


def test_workers_are_in_racks_in_turn_and_nothing_emulates_that() -> None:
    racks = 'racks = {size = 2, rate = "1gbit", latency = "20ms"}'
    cluster = parse_cluster(f'workers = 5\nlink = "10gbit/1ms"\n{racks}', "lab.toml")
    apart = VirtualRacks(rack_of=(0, 0, 1, 1, 2), bytes_per_s=125e6, latency_s=0.02)
    assert cluster.virtual_racks() == apart
    assert cluster.most_latency_s == 0.021
    assert cluster.changed(workers=2).most_latency_s == 0.001
    assert parse_cluster(cluster.to_toml(), "again") == cluster
    with pytest.raises(ConfigError, match="has racks"):
        emulate(cluster)


def test_spread_delays_have_their_median() -> None:
    late = Straggling(workers=4, delay_s=0.1, spread=0.5)
    cluster = Cluster(workers=4, straggling=(late,))
    delays = [delay for step in range(500) for delay in cluster.delayed_ranks(step).values()]
    assert len(set(delays)) == 2000
    assert np.median(delays) == pytest.approx(0.1, rel=0.05)
    assert np.log(delays).std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("link", "expected_s"), [("8mbit/3ms", 0.003 + 5000 / 1e6), ("none", 0.0)])
def test_a_message_between_virtual_ranks_takes_latency_and_rate(
    link: str, expected_s: float
) -> None:
    def swap(rank: int) -> Collective[None]:
        yield Send(1 - rank, bytes(5000))
        yield Recv(1 - rank)

    virtual = VirtualCluster(2, link=from_flags(workers=2, link=link).virtual_links())
    virtual.run([swap(0), swap(1)])
    assert virtual.now_s == pytest.approx(expected_s)


def test_presets_are_the_packaged_files_and_each_emulates_something() -> None:
    files = resources.files("offbeat_lab").joinpath("presets").iterdir()
    assert {Path(file.name).stem for file in files if file.name.endswith(".toml")} == set(PRESETS)
    for name in PRESETS:
        assert preset(name).name == name
        assert preset(name) != Cluster(name=name, workers=preset(name).workers)


def test_the_papers_stragglers_are_one_line() -> None:
    assert preset("stragglers").straggling == (Straggling(workers=2, delay_s=0.32),)
    assert (
        parse_cluster('workers = 8\nstraggling = "2x320ms"', "it").straggling
        == preset("stragglers").straggling
    )
    table = '[[straggling]]\nworkers = 2\ndelay = "320ms"'
    assert parse_cluster(table, "it").straggling == preset("stragglers").straggling


def test_a_cluster_describes_itself_in_a_line() -> None:
    cluster = from_flags(
        workers=8, link="1gbit", speeds="1,1,1,0.5", delay="2x320ms", step_time="200ms"
    )
    assert (
        cluster.describe()
        == "8 workers, 1 Gbit/s, speeds 1 1 1 0.5, steps padded to 200 ms, 2 random workers 320 ms"
        " late each step"
    )
    assert Cluster(workers=1).describe() == "1 worker"
    assert preset("flaky").describe().endswith("kill worker 2 at 30 s, return worker 2 at 35 s")


def test_no_flags_are_a_plain_cluster_of_four() -> None:
    assert from_flags() == Cluster(workers=4)


def test_flags_override_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "office.toml"
    file.write_text(
        'speeds = [1, 0.5]\nlink = "1gbit/2ms"\nstraggling = "1x1s"\nstep = "1s"\nseed = 5\n'
    )
    assert from_flags(cluster=str(file)) == load(file)
    assert load(file).name == "office"
    cluster = from_flags(
        cluster=str(file), workers=6, link="10mbit", delay="none", step_time="20ms"
    )
    assert cluster.speeds == (1, 0.5, 1, 0.5, 1, 0.5)
    assert cluster.link == LinkSpec(rate_bit_per_s=1e7, latency_s=2e-3)
    assert (cluster.straggling, cluster.step_s, cluster.seed) == ((), 0.02, 5)
    assert from_flags(cluster=str(file), latency="5us").link == LinkSpec(
        rate_bit_per_s=1e9, latency_s=5e-6
    )
    assert from_flags(cluster=str(file), link="none").link == LinkSpec()
    assert from_flags(cluster=str(file), link="none", latency="1ms").link == LinkSpec(
        latency_s=1e-3
    )
    assert from_flags(cluster=str(file), link="2gbit/1ms").link == LinkSpec(
        rate_bit_per_s=2e9, latency_s=1e-3
    )
    assert from_flags(cluster=str(file), speeds="0.5").speeds == (0.5,) * 4
    assert from_flags(cluster=str(file), step_time="none").step_s is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a =", r"lab.toml is no TOML: .*line 1|end of document"),
        ('lnk = "1gbit"', "lab.toml: lnk is no key; allowed are .*; did you mean 'link'"),
        ('[links.1]\nrat = "1gbit"', "lab.toml: links.1.rat is no key; .*'rate'"),
        ("link = 100", 'link is 100, which has no unit; .* is "100mbit" meant'),
        ('link = "1gb"', "link is '1gb'; .*count in bits"),
        ('link = "0gbit"', "link is '0gbit': .* allowed is 1 bit/s to 10 Tbit/s"),
        ('link.rate = "11tbit"', "link.rate is .*allowed is 1 bit/s to 10 Tbit/s"),
        ('link.rate = "-1gbit"', "link.rate is -1000000000.0; allowed is 1 bit/s"),
        ('link.latency = "11s"', "link.latency is 11.0; allowed is 0 to 10 s"),
        ('link.latency = "fast"', "link.latency is 'fast'; allowed is a number with s, ms or us"),
        ("step = 5", 'step is 5, which has no unit; .* is "5s" meant'),
        ('step = "0s"', "step is 0.0; allowed is more than 0"),
        ("workers = 0", "workers is 0; allowed is 1 to"),
        ('workers = "4"', "workers is '4'; allowed is 1 to"),
        ("workers = true", "workers is True; allowed is 1 to"),
        ("speeds = [1, 0]", r"speeds\[1\] is 0; allowed is numbers from 0.001 to 1"),
        ("speeds = [2]", r"speeds\[0\] is 2; .*where 1 is the fastest"),
        ("speeds = [nan]", r"speeds\[0\] is nan"),
        ('speeds = ["fast"]', r"speeds\[0\] is 'fast'"),
        ("speeds = 1", "speeds is 1; allowed is numbers"),
        ("workers = 2\nspeeds = [1, 1, 1]", "speeds has 3 numbers for 2 workers"),
        ('links.4 = "1gbit"', "links.4 names worker 4; allowed is 0 to 3"),
        ('links.x = "1gbit"', "links.x is 'x'; allowed is a table from numbers"),
        ("links = 3", "links is 3; allowed is a table"),
        ('straggling = "5x1s"', r"straggling\[0\].workers is 5; allowed is 1 to 4"),
        ('straggling = "2 late"', r"straggling\[0\] is '2 late'; .*2x320ms"),
        ('straggling = "2x1s:sometimes"', "after a colon allowed are"),
        ('straggling = "2x1s:200%"', "probability is 2.0; allowed is more than 0, up to 1"),
        ("[[straggling]]\nworkers = 1", r"straggling\[0\].delay is missing"),
        (
            '[[straggling]]\nworkers = [0, 9]\ndelay = "1s"',
            r"straggling\[0\].workers names worker 9",
        ),
        (
            '[[straggling]]\nworkers = []\ndelay = "1s"',
            r"straggling\[0\].workers is \[\]; allowed is a count",
        ),
        ('changes = [{at = "1s", worker = 9, speed = 1}]', "changes names worker 9"),
        (
            'faults = [{at = "-1s", worker = 1, action = "kill"}]',
            r"faults\[0\].at is -1.0; allowed is 0 to 1 day",
        ),
        (
            'faults = [{at = "1s", worker = 4, action = "kill"}]',
            "faults names worker 4; allowed is 0 to 3",
        ),
        (
            'faults = [{at = "1s", worker = 1, action = "burn"}]',
            r"faults\[0\].action is 'burn'; allowed is kill, return, stop",
        ),
        (
            'faults = [{at = "1s", worker = 1, action = "mend"}]',
            "'mend' of worker 1 at 1 s, but no 'cut' comes before it",
        ),
        ('faults = [{at = "1s", worker = 1, action = "continue"}]', "no 'stop' comes before it"),
        (
            (
                'faults = [{at = "2s", worker = 1, action = "cut"}, {at = "1s", worker = 1, action'
                ' = "mend"}]'
            ),
            "'mend' of worker 1 at 1 s, but no 'cut'",
        ),
        (
            (
                'faults = [{at = "1s", worker = 1, action = "kill"}, {at = "2s", worker = 1, action'
                ' = "cut"}]'
            ),
            "'cut' of worker 1 at 2 s, which was killed before",
        ),
        (
            (
                'faults = [{at = "1s", worker = 1, action = "cut"}, {at = "2s", worker = 1, action'
                ' = "cut"}]'
            ),
            "'cut' of worker 1 at 2 s, to which that has been done",
        ),
        (
            'faults = [{at = "1s", worker = 1, action = "return"}]',
            "'return' of worker 1 at 1 s, but no 'kill' comes before it; add one",
        ),
        (
            (
                'faults = [{at = "1s", worker = 1, action = "kill"}, {at = "2s", worker = 1, action'
                ' = "kill"}]'
            ),
            "'kill' of worker 1 at 2 s, which was killed before; add a 'return' between them",
        ),
        (
            "faults = ["
            + ", ".join(
                f'{{at = "{at}s", worker = 1, action = "{action}"}}'
                for at, action in enumerate(("stop", "kill", "return", "continue"))
            )
            + "]",
            "'continue' of worker 1 at 3 s, but no 'stop' comes before it",
        ),
        ("faults = 3", "faults is 3; allowed is a list of tables"),
        ('name = "a\\nb"', "name is 'a.*nb'; allowed is up to 80 printable"),
        ("seed = -1", "seed is -1; allowed is 0 to"),
    ],
)
def test_a_file_that_cannot_be_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_cluster(text, "lab.toml")
    assert str(raised.value).startswith("lab.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"cluster": "flakey"},
            "--cluster flakey: no such preset and no such file; .*did you mean 'flaky'",
        ),
        ({"cluster": "absent.toml"}, "cannot read cluster absent.toml: No such file"),
        ({"cluster": "ethernet-1g", "workers": 0}, "--workers 0: workers is 0"),
        ({"cluster": "flaky", "workers": 2}, "cluster 'flaky': faults names worker 3"),
        (
            {"cluster": "mixed-gpus", "workers": 3},
            "cluster 'mixed-gpus': speeds has 4 numbers for 3 workers",
        ),
        ({"link": "fast"}, "--link is 'fast'; allowed is a number with bit"),
        ({"link": "1gbit/1ms", "latency": "2ms"}, "both give a latency"),
        ({"latency": "20"}, '--latency is .20., which has no unit; .*is "20s" meant'),
        ({"latency": "20s"}, "--latency 20s: latency_s is 20.0; allowed is 0 to 10 s"),
        ({"speeds": "1;2"}, "--speeds is '1;2'; allowed is numbers with commas"),
        ({"speeds": "1,2"}, r"--speeds 1,2: speeds\[1\] is 2.0"),
        ({"delay": "rank7x1s"}, "--delay rank7x1s: .*names worker 7"),
        ({"delay": "2x0s"}, "--delay is '2x0s': delay_s is 0.0; allowed is more than 0"),
        ({"step_time": "2d"}, "--step-time is '2d'; allowed is a number with s"),
    ],
)
def test_flags_that_cannot_be_say_which_and_why(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_flags(**flags)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml is no text in UTF-8"):
        load(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no preset 'straglers'; .*did you mean 'stragglers'"):
        preset("straglers")


def test_python_gets_the_same_sentences_under_its_own_names() -> None:
    with pytest.raises(ConfigError, match="link.rate_bit_per_s is 0; allowed is 1 bit/s"):
        Cluster(link={"rate_bit_per_s": 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stepp is no field; .*did you mean 'step_s'"):
        Cluster(stepp=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="^'' is no field; allowed are "):
        Cluster(**{"": 1})  # type: ignore[arg-type]


def test_a_damaged_record_is_a_validation_error_with_the_sentence_in_it() -> None:
    class Holder(BaseModel):
        cluster: Cluster

    with pytest.raises(ValueError, match="faults names worker 9"):
        Holder.model_validate(
            {"cluster": {"faults": [{"at_s": 1.0, "worker": 9, "action": "kill"}]}}
        )


PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()


@pytest.mark.parametrize(
    "block", re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
def test_what_the_page_shows_can_be_read(block: str) -> None:
    cluster = parse_cluster(block, "docs/cluster.md")
    assert cluster != Cluster(name=cluster.name, workers=cluster.workers)


@pytest.mark.parametrize("text", re.findall(r"^\| `([^`]*\dx[^`]*)` \|", PAGE, re.MULTILINE))
def test_the_delays_that_the_page_shows_can_be_read(text: str) -> None:
    assert from_flags(delay=text).straggling


def test_every_key_and_preset_stands_on_the_page() -> None:
    keys = [
        toml_key(name)
        for kind in (Cluster, Straggling, ClusterFault, LinkSpec)
        for name in kind.model_fields
    ]
    assert [key for key in (*keys, *PRESETS) if f"`{key}`" not in PAGE] == []
    for name, summary in PRESETS.items():
        assert f"| `{name}` | {summary} |" in PAGE


def test_a_worker_may_be_killed_as_often_as_it_returns() -> None:
    actions = ("cut", "kill", "return", "mend", "kill", "return")
    faults = tuple(
        ClusterFault(at_s=float(at), worker=1, action=action) for at, action in enumerate(actions)
    )
    cluster = Cluster(faults=faults)
    assert cluster.faults == faults
    assert parse_cluster(cluster.to_toml(), "it") == cluster
