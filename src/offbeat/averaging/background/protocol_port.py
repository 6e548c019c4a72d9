"""What the thread that runs the protocol may do with its rank's published model."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from typing_extensions import override

from offbeat.averaging.background.interface import Contribution, Piece, ProtocolPort, VersionResult
from offbeat.averaging.background.published_state import PublishedState


class PublishedModelPort(ProtocolPort):
    """Gives contributions and snapshots, and takes averages."""

    def __init__(self, state: PublishedState) -> None:
        self._state = state

    @override
    def contribute(self, version: int) -> Contribution | None:
        state = self._state
        with state.changed:
            state.newest = max(state.newest, version)
            if state.invited is not None and state.invited <= version:
                state.invited = None  # the version proceeds without this rank's arrival
            if not state.is_available or state.quiescing:
                return None
            if (
                state.one_at_a_time
                and state.open
                and state.model.averages_models(version)
                and version != state.arrived_at
            ):
                return None
            # A trainer that waits has ended its step, so its model is fresh at any version.
            fresh = version == state.arrived_at or state.trainer_waits
            mine = state.model.contribute(version, fresh=fresh)
            if mine is not None:
                state.open.add(version)
            state.credit = min(state.credit + (not fresh), state.max_credit)
            wish = state.intervals.tell()
            return replace(mine, interval=wish) if wish and mine is not None else mine

    @override
    def invite(self, version: int) -> None:
        with self._state.changed:
            self._state.invited = max(version, self._state.invited or 0)

    @override
    def hear_interval(self, member: int, interval: int) -> None:
        with self._state.changed:
            self._state.intervals.hear(member, interval)

    @override
    def quorum_arrived(self, version: int) -> None:
        state = self._state
        with state.changed:
            if state.arrival is not None and state.arrival.version == version:
                state.arrival.has_quorum = True
                state.changed.notify_all()

    @override
    def await_step(self, version: int) -> bool:
        with self._state.changed:
            computes = not self._state.trainer_waits
            self._state.awaited = version if computes else None
            return computes

    @override
    def hold(self, late: Set[int]) -> None:
        with self._state.changed:
            self._state.held_by = late
            self._state.given_up &= late
            self._state.changed.notify_all()

    @override
    def close(self, result: VersionResult) -> None:
        state = self._state
        with state.changed:
            state.model.merge(result.version, result.pieces)
            members = result.members
            notes = members.values()
            state.counts.made += bool(result.pieces)
            state.counts.missed += not result.pieces
            state.counts.contributions += len(notes)
            for rank, note in members.items():
                state.steps[rank] = max(note.step, state.steps.get(rank, 0))
            if state.steps:
                # Until there is news, peers go on as this rank does.
                half = sorted(state.steps.values())[len(state.steps) // 2]
                state.steps_behind = max(0, half - state.model.step)
            state.counts.stale += sum(not note.fresh for note in notes)
            state.open.discard(result.version)
            state.intervals.close(result.version)
            if result.version == state.arrived_at:
                state.arrival = None
            state.changed.notify_all()

    @override
    def merge_late(self, version: int, piece: Piece) -> None:
        with self._state.changed:
            self._state.model.merge(version, (piece,))

    @override
    def finalize_version(self, version: int) -> None:
        with self._state.changed:
            self._state.model.finalize_version(version)
            self._state.changed.notify_all()

    @override
    def snapshot(self) -> Contribution | None:
        with self._state.changed:
            return self._state.model.snapshot() if self._state.is_available else None

    @override
    def receive_model(self, sender: int, model: Contribution | None) -> None:
        state = self._state
        with state.changed:
            if state.is_available:  # it was asked for a mean of all models
                state.received[sender] = model
                state.changed.notify_all()
                return
            if model is not None:  # it was asked for by a rank that has none
                state.adopt(model)
                return
        # Outside the lock: the callback asks the next member, and posts to the protocol.
        state.on_missing_model(sender)

    @override
    def mark_dead(self, rank: int) -> None:
        with self._state.changed:
            self._state.dead.add(rank)
            self._state.intervals.forget(rank)
            self._state.changed.notify_all()
        self._state.on_missing_model(rank)

    @override
    def mark_final(self) -> None:
        with self._state.changed:
            self._state.averages_are_over = True
            self._state.changed.notify_all()

    @override
    def end_training(self) -> None:
        with self._state.changed:
            self._state.model.end_training()
