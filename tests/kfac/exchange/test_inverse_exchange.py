"""The phase of inversions: what is inverted when messages arrive, while waiting, and at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offbeat.kfac.blocks import FactorShape
from offbeat.kfac.exchange.inverses import InversePhase
from offbeat.kfac.exchange.spans import Spans
from offbeat.kfac.inverses import Inverter, Job
from offbeat.kfac.planning.inverse_order import InverseBatch
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank

SHAPE = FactorShape(groups=1, dim=2)


class Noting(Inverter):
    """Notes whose turn it was."""

    def __init__(self) -> None:
        super().__init__(lambda warning: None, "inverse")
        self.noted: list[str] = []

    def invert(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        self.noted.append("".join(job.name for job in jobs))
        return super().invert(jobs)


def job(slot: int) -> Job:
    packed = torch.tensor([[1.0, 0.0, 1.0]]) * (slot + 1)
    return Job(
        name=str(slot),
        packed=packed,
        shape=SHAPE,
        damping=torch.zeros(()),
        valid=torch.tensor(True),
    )


@pytest.fixture
def inverter() -> Noting:
    return Noting()


@pytest.fixture
def phase(inverter: Noting) -> InversePhase:
    """Slots 0 and 1 have an owner, 2 to 4 have not; 1 and 4 need both of two messages."""
    batches = [((0,), 0, 1), ((1,), 0, 2), ((2,), None, 1), ((3,), None, 1), ((4,), None, 2)]
    order = [
        InverseBatch(slots=slots, owner=owner, num_messages=needed)
        for slots, owner, needed in batches
    ]
    likes = [torch.empty(0)] * 5
    return InversePhase(
        order,
        [SHAPE] * 5,
        likes,
        travels=True,
        driver=SingleRank(),
        stream=Stream(1),
        inverter=inverter,
        spans=Spans(),
    )


def test_owners_invert_as_messages_arrive_and_others_while_they_wait(
    phase: InversePhase, inverter: Noting
) -> None:
    answers = iter([False, True])
    phase.start(job)
    phase.fill(lambda: False)
    assert inverter.noted == [], "no message has arrived"
    phase.advance(1)
    assert inverter.noted == ["0"]
    phase.fill(lambda: next(answers))
    assert inverter.noted == ["0", "2"]
    phase.advance(2)
    assert inverter.noted == ["0", "2", "1"]
    phase.finish()
    assert inverter.noted == ["0", "2", "1", "3", "4"]
    for slot, inverse in enumerate(phase.packed):
        assert inverse is not None
        torch.testing.assert_close(inverse, torch.tensor([[1.0, 0.0, 1.0]]) / (slot + 1))


def test_without_messages_all_is_inverted_at_the_end_and_every_time_anew(
    phase: InversePhase, inverter: Noting
) -> None:
    for _ in range(2):
        inverter.noted.clear()
        phase.start(job)
        phase.finish()
        assert inverter.noted == ["0", "1", "2", "3", "4"]
