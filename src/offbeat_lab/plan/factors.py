"""What K-FAC costs on a device: computing factors, preconditioning and inverting, timed in steps of
SPD-KFAC in a world of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from offbeat.kfac.blocks import Block, slots_of
from offbeat.kfac.costs import equivalent_dim, time_inversions
from offbeat.kfac.survey import survey
from offbeat.session.session import Session
from offbeat.strategies.kfac import SPDKFAC
from offbeat_lab.plan.profile import Layer, ModelProfile, Source

# Every step has factors; inversions, which become rare, are counted apart.
STRATEGY: Final = SPDKFAC(factor_interval=1)

_STEPS: Final = 5


class FactorTimer:
    """Watches steps of a session with `STRATEGY`.

    Args:
        model: that it trains.

    Raises:
        ConfigError: K-FAC covers nothing of it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._blocks: Sequence[Block] = survey(model, STRATEGY.curvature).blocks
        trained = (each for each in model.parameters() if each.requires_grad and each.numel())
        self._tensors = {id(each): number for number, each in enumerate(trained)}
        self._positions: dict[str, int] = {}
        self._factors_s: list[float] = []
        self._precondition_s: list[float] = []
        self._before_s: Mapping[str, float] = {}
        for block in self._blocks:
            block.module.register_forward_hook(partial(self._note_positions, block))

    @property
    def is_done(self) -> bool:
        return len(self._factors_s) >= _STEPS

    def step_ended(self, session: Session) -> None:
        """Take down what a step took; the first one is not typical."""
        kfac = next(each for each in session.callbacks if each.state_key == "kfac")
        spent_s = kfac.counters()
        if self._before_s:
            self._factors_s.append(spent_s["factor_s"] - self._before_s["factor_s"])
            before_s = self._before_s["precondition_s"]
            self._precondition_s.append(spent_s["precondition_s"] - before_s)
        self._before_s = spent_s

    def complete(self, profile: ModelProfile, source: str) -> ModelProfile:
        """`profile` with what was found; as it is where nothing was."""
        if not self._factors_s:
            return profile
        fields = dict.fromkeys(("factors_s", "precondition_s", "inversion"), source)
        return replace(
            profile,
            layers=tuple(map(self._layer, self._blocks)),
            factors_s=min(self._factors_s),
            precondition_s=min(self._precondition_s),
            inversion=time_inversions(slots_of(self._blocks), STRATEGY.settings()),
            sources=(*profile.sources, *Source.of(**fields)),
        )

    def _layer(self, block: Block) -> Layer:
        """As it is, since a strategy cuts it; of several matrices one that takes as long."""
        groups, rows, columns = block.matrix_shape
        if groups > 1 or block.inputs.is_diagonal:
            rows, columns = equivalent_dim(block.outputs), equivalent_dim(block.inputs)
        return Layer(
            a_dim=columns,
            g_dim=rows,
            num_positions=self._positions.get(block.name, 1),
            tensor=self._tensors[id(block.weight)],
        )

    def _note_positions(self, block: Block, _: torch.nn.Module, inputs: Any, output: Any) -> None:
        """How many outputs each of a layer's output channels has for a sample."""
        if isinstance(output, torch.Tensor) and inputs and isinstance(inputs[0], torch.Tensor):
            channels = block.matrix_shape[0] * block.matrix_shape[1]
            samples = max(1, len(inputs[0]))
            self._positions[block.name] = max(1, output.numel() // (channels * samples))
