"""The phase of inversions: what is inverted when messages arrive, while waiting, and at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.factors import FactorShape
from offbeat.kfac.inverses import InversionTask, Inverter
from offbeat.kfac.plans import InverseBatch
from offbeat.kfac.preconditioner import InverseExchange
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank

SHAPE = FactorShape(groups=1, dim=2)


class Noting(Inverter):
    """Notes whose turn it was."""

    def __init__(self) -> None:
        super().__init__(lambda warning: None, "inverse")
        self.noted: list[str] = []

    def invert(
        self, tasks: Sequence[InversionTask], *, rooms: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        self.noted.append("".join(task.name for task in tasks))
        return super().invert(tasks, rooms=rooms)


def task(slot: int) -> InversionTask:
    packed = torch.tensor([[1.0, 0.0, 1.0]]) * (slot + 1)
    return InversionTask(
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
def phase(inverter: Noting) -> InverseExchange:
    """Slots 0 and 1 have an owner, 2 to 4 have not; 1 and 4 need both of two messages."""
    batches = [((0,), 0, 1), ((1,), 0, 2), ((2,), None, 1), ((3,), None, 1), ((4,), None, 2)]
    order = [
        InverseBatch(slots=slots, owner=owner, num_messages=needed)
        for slots, owner, needed in batches
    ]
    slots = [
        FactorSlot(
            index=index,
            side="output" if index % 2 else "input",
            block_name=str(index // 2),
            shape=SHAPE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for index in range(6)
    ]
    return InverseExchange(
        order,
        slots,
        [torch.float32] * 6,
        travels=True,
        driver=SingleRank(),
        stream=Stream(1),
        inverter=inverter,
    )


def test_owners_invert_as_messages_arrive_and_others_while_they_wait(
    phase: InverseExchange, inverter: Noting
) -> None:
    answers = iter([False, True])
    phase.start(task)
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
    for slot, inverse in enumerate(phase.packed[:5]):
        assert inverse is not None
        torch.testing.assert_close(inverse, torch.tensor([[1.0, 0.0, 1.0]]) / (slot + 1))


def test_without_messages_all_is_inverted_at_the_end_and_every_time_anew(
    phase: InverseExchange, inverter: Noting
) -> None:
    for _ in range(2):
        inverter.noted.clear()
        phase.start(task)
        phase.finish()
        assert inverter.noted == ["0", "1", "2", "3", "4"]
