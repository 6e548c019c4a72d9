"""WAGMA whose groups exchange coded differences from the last global synchronization: ranks stay
near each other, and a death, a late trainer and a missed synchronization change no mean.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import offbeat
from group_support.training import PARAMETERS, Trainer, Training, trained
from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.interface import Contribution, Piece, ProtocolSettings
from offbeat.averaging.background.merge_rules import DeltaMerge, merge_delta
from offbeat.averaging.background.rounds import DirectRound, GroupRound, ScatteredRound
from offbeat.codec.few_bits import E3M0Values, LevelValues, LinearValues
from offbeat.codec.model_wire import ModelMessage
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.codec.value_codecs import Float8Values, Float64Values, ValueCodec
from offbeat.errors import WireError

NUM_ELEMENTS = 7
NAMED = {
    "exact": None,
    "float8": Float8Values(),
    "linear8": LinearValues(8),
    "e3m0": E3M0Values(),
    "linear4": LinearValues(4),
}
CODECS = pytest.mark.parametrize(
    "values", [E3M0Values(), LinearValues(4), LinearValues(8), Float8Values(), LevelValues(4)]
)


def run(
    num_ranks: int, values: ValueCodec | str, *, period: int = 5, late: int = -1
) -> list[Trainer]:
    return trained(
        Training(
            seed=num_ranks,
            world_size=num_ranks,
            num_steps=24,
            strategy=offbeat.WAGMA(group_size=2, period=period, values=values),
            compute_s=lambda rank, step: 7.3 if (rank, step) == (late, 11) else 1 + rank / 8,
        )
    )


def ends(ranks: list[Trainer]) -> np.ndarray:
    return np.array([rank.model[PARAMETERS] for rank in ranks])


@pytest.mark.parametrize(("num_ranks", "late"), [(1, -1), (2, 0), (5, 0)])
@CODECS
def test_the_mean_is_that_of_all_steps(num_ranks: int, values: ValueCodec, late: int) -> None:
    ranks = run(num_ranks, values, late=late)
    moved = np.mean([np.sum(rank.pushes, axis=0) for rank in ranks], axis=0)
    np.testing.assert_allclose(ends(ranks).mean(axis=0), moved, atol=1e-9)


@cache
def whole_ends() -> np.ndarray:
    return ends(run(5, "bfloat16", period=40))


@cache
def how_far_ranks_are_apart_alone() -> float:
    alone = np.array([np.sum(rank.pushes, axis=0) for rank in run(5, "bfloat16")])
    return float(np.linalg.norm(alone - alone.mean(axis=0)))


@CODECS
def test_groups_bring_ranks_together(values: ValueCodec) -> None:
    """Here only the first and the last average are of all, so that groups alone do it between."""
    apart = {
        name: np.linalg.norm(found - found.mean(axis=0))
        for name, found in (
            ("coded", ends(run(5, values, period=40))),
            ("whole", whole_ends()),
        )
    }
    assert apart["coded"] < apart["whole"] + 0.5 * how_far_ranks_are_apart_alone()


def settings(changes: CodedChanges | None, *, is_global: bool = False) -> ProtocolSettings:
    group = VersionGroup(ranks=(0, 1, 2), catch_up=-1 if is_global else None)
    return ProtocolSettings(
        members=(0, 1, 2),
        generation=0,
        num_elements=NUM_ELEMENTS,
        dtype=np.dtype(np.float64),
        group_of=lambda version: group,
        rounding=Rounding(),
        changes=changes,
    )


def average(
    kind: type[GroupRound], those: ProtocolSettings, models: list[np.ndarray], anchor: np.ndarray
) -> list[list[Piece]]:
    """What each of three members gets, all of which are in time."""
    rounds = [kind(0, (0, 1, 2), rank=rank, settings=those) for rank in range(3)]
    mine = [Contribution(values=x, step=1, fresh=True, anchor=anchor) for x in models]

    def deliver(sent: list[list[tuple[int, bytes]]]) -> None:
        for sender, messages in enumerate(sent):
            for receiver, message in messages:
                rounds[receiver].receive(sender, ModelMessage.from_bytes(message))

    deliver([r.contribute(x, set(), arrived=True) for r, x in zip(rounds, mine, strict=True)])
    if kind is ScatteredRound:
        deliver([round_.proceed_without(set()) for round_ in rounds])
    return [sorted(round_.take_pieces(), key=lambda piece: piece.begin) for round_ in rounds]


@pytest.fixture
def models() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [*(100 + draw.normal(size=(3, NUM_ELEMENTS)))]


def test_members_get_the_same_bits_of_decoded_differences(models: list[np.ndarray]) -> None:
    anchor, changes = np.full(NUM_ELEMENTS, 100.0), CodedChanges(E3M0Values())
    pieces = average(DirectRound, settings(changes), models, anchor)
    codec = changes.values
    decoded = [
        codec.decode(codec.encode(x - anchor).view(np.uint8), x.size).astype(np.float64)
        for x in models
    ]
    for (piece,), mine in zip(pieces, decoded, strict=True):
        assert piece.average[:].tobytes() == pieces[0][0].average[:].tobytes()
        np.testing.assert_allclose(piece.average[:], np.mean(decoded, axis=0), rtol=1e-12)
        assert piece.contributed is not None
        assert piece.contributed[:].tobytes() == mine.tobytes()


@pytest.mark.parametrize("kind", [DirectRound, ScatteredRound])
@CODECS
def test_kept_and_owed_is_what_members_had(
    kind: type[GroupRound], values: ValueCodec, models: list[np.ndarray]
) -> None:
    """Also where they take differences from unlike anchors; 'owed' stays in a member's model."""
    anchor = np.full(NUM_ELEMENTS, 100.0)
    pieces = average(kind, settings(CodedChanges(values)), models, anchor)
    after = [
        np.concatenate([merge_delta(x[p.begin : p.end], p) for p in mine])
        for x, mine in zip(models, pieces, strict=True)
    ]
    np.testing.assert_allclose(np.sum(after, axis=0), np.sum(models, axis=0), rtol=1e-13)
    before, later = (np.array(each) - np.mean(models, axis=0) for each in (models, after))
    assert np.linalg.norm(later) < np.linalg.norm(before)


def spread(values: ValueCodec | None, kind: type[GroupRound], *, meets: bool = True) -> float:
    """How far three models of the bundled digits are from their mean before each global
    synchronization, after nine steps and averages of all three; or without averages.
    """
    from sklearn.datasets import load_digits  # takes a second of each process that collects tests

    images, labels = load_digits(return_X_y=True)
    draw, x, targets = np.random.default_rng(0), images / 16, np.eye(10)[labels]
    size, found = x.shape[1] * 10, []
    those = replace(settings(CodedChanges(values or Float64Values())), num_elements=size)
    models = [np.zeros(size)] * 3
    for _ in range(4):
        anchor = models[0]
        for _ in range(9):
            for rank in range(3):
                batch = draw.integers(len(x), size=16)
                scores = np.exp(x[batch] @ models[rank].reshape(-1, 10))
                shares = scores / scores.sum(axis=1, keepdims=True)
                gradient = x[batch].T @ (shares - targets[batch]) / 16
                models[rank] = models[rank] - gradient.reshape(-1)
            if meets:
                pieces = average(kind, those, models, anchor)
                models = [
                    np.concatenate([merge_delta(mine[p.begin : p.end], p) for p in parts])
                    for mine, parts in zip(models, pieces, strict=True)
                ]
        mean = np.mean(models, axis=0)
        found.append(np.linalg.norm(models - mean))
        models = [mean] * 3
    return float(np.mean(found))


@pytest.mark.parametrize("kind", [DirectRound, ScatteredRound])
def test_groups_keep_models_of_digits_together(kind: type[GroupRound]) -> None:
    alone = spread(None, kind, meets=False)
    far = {name: spread(values, kind) / alone for name, values in NAMED.items()}
    assert far["exact"] < 1e-9
    assert far["linear8"] < 0.06
    assert far["float8"] < 0.5
    assert far["linear4"] < 0.7
    assert far["e3m0"] < 0.8


@pytest.mark.parametrize("kind", [DirectRound, ScatteredRound])
def test_a_global_synchronization_leaves_all_members_one_anchor(
    kind: type[GroupRound], models: list[np.ndarray]
) -> None:
    """Also the owner of a region, whose model makes up for what rounding takes from all."""
    anchors = []
    those = settings(CodedChanges(E3M0Values()), is_global=True)
    for x, pieces in zip(models, average(kind, those, models, models[0]), strict=True):
        rule = DeltaMerge(x, has_anchor=True)
        rule.merge(pieces)
        assert rule.anchor is not None
        anchors.append(rule.anchor)
    assert len({anchor.tobytes() for anchor in anchors}) == 1
    np.testing.assert_allclose(anchors[0], np.mean(models, axis=0), rtol=2**-7)


def test_a_rank_with_another_codec_is_refused(models: list[np.ndarray]) -> None:
    mine, theirs = (
        DirectRound(0, (0, 1, 2), rank=rank, settings=settings(CodedChanges(values)))
        for rank, values in enumerate([E3M0Values(), LinearValues(8)])
    )
    sent = theirs.contribute(
        Contribution(values=models[1], step=1, fresh=True, anchor=models[0]), set(), arrived=True
    )
    with pytest.raises(WireError, match="same options"):
        mine.receive(1, ModelMessage.from_bytes(dict(sent)[0]))
