"""What a strategy is: a frozen description of four choices, which builds parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from offbeat.parts.part import Part
from offbeat.parts.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A recipe. Subclasses are frozen keyword-only dataclasses that check their options in
    `__post_init__`.
    """

    name: ClassVar[str]
    survives_death: ClassVar[bool] = False
    """Whether the other workers go on when one dies."""
    replicas_differ: ClassVar[bool] = False
    """Whether the ranks' models are apart between steps, on purpose; `Session.averaged_model` is
    what they stand for.
    """
    shares_samples: ClassVar[bool] = False
    """Whether ranks share samples out among themselves, through `Session.loader`, so that nobody
    knows beforehand which rank computes which batch.
    """

    @property
    def samples_between_merges(self) -> int | None:
        """How many samples ranks share out before they merge their models; None unless
        `shares_samples`.
        """
        return None

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most go with everything
        """Raise `ConfigError` if the strategy cannot work with these. Runs before any
        communication.
        """

    def check_world(self, world_size: int) -> None:  # noqa: B027 - most go with any number
        """Raise `ConfigError` if the strategy cannot work with so many ranks. Runs before any
        communication.
        """

    @abstractmethod
    def build(self, workspace: Workspace) -> Sequence[Part]:
        """The parts, in the order in which they get events. Collective: all ranks build
        together.
        """
