"""What a strategy is: a frozen description of four choices, which builds callbacks.

Every system of the package answers four questions, and nothing else distinguishes it:

- what is exchanged: gradients, weights, or Kronecker factors;
- how it is encoded: densely, or as its largest entries, with what is left out kept for later;
- with whom, and when: all ranks in each step, a group of them, or whoever is there;
- how work is divided: equal batches, batches by speed, or layers to owners.

`build` turns the answers into callbacks, which act on the events of training. The bases below
answer the first question for the strategies that stand on them:

- `GradientStrategy` (gradient.py): gradients, before each step; `SparseGradientStrategy`
  (sparse_gradient.py): their largest entries, with error feedback;
- `AveragingStrategy` (averaging.py): weights, after a step; `MegaBatchStrategy` (adaptive.py):
  weights, after each batch of samples that ranks share out among themselves;
- `KFACStrategy` (kfac.py): gradients and Kronecker factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import check_options, complete_docstring
from offbeat.strategies.registry import NAMES


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A recipe. Subclasses are frozen keyword-only dataclasses, whose fields are the options.

    A subclass describes each option that it adds in its docstring's `Args:` section; descriptions
    of inherited options are added to the docstring when the class is made. Options are checked by
    their annotations, what is between them in `__post_init__`, what depends on the model in `check`
    and what depends on the number of ranks in `check_world`. All of it is before any communication
    and raises `ConfigError` with what was given, what is allowed and how to mend it.
    """

    name: ClassVar[str]
    """What the command line, records and checkpoints call the strategy; its key in the registry,
    where that has it.
    """
    replicas_differ: ClassVar[bool] = False
    """Whether the ranks' models are apart between steps, on purpose; `Session.averaged_model` is
    what they stand for.
    """
    needs_optimizer: ClassVar[bool] = True
    """Whether the strategy has to do with the optimizer, and not with gradients alone."""
    acts_at_steps: ClassVar[bool] = False
    """Whether the strategy does nothing to a model whose optimizer is never stepped."""
    runs_compiled: ClassVar[bool] = False
    """Whether a first step compiles kernels of the CPU for seconds, which ranks of one host need
    not all do.
    """
    shares_samples: ClassVar[bool] = False
    """Whether ranks share samples out among themselves, through `Session.loader`, so that nobody
    knows beforehand which rank computes which batch.
    """
    weighs_samples: ClassVar[bool] = False
    """Whether a step is that of all ranks' samples together, however they are divided among ranks,
    once `Session.weigh` has been told of batches.
    """

    @property
    def trains_islands(self) -> bool:
        """Whether the strategy trains models that `fully_shard` has divided, each rank its shards.
        Then what depends on a rank's own data or on a clock is decided by `Context.island`.
        """
        return False

    @property
    def keeps_anchor(self) -> bool:
        """Whether an average starts from where the last one has left the model, so that a loop that
        goes back to an earlier model has to load the session's state of then, too.
        """
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name := NAMES.get((cls.__module__, cls.__name__)):
            cls.name = name
        complete_docstring(cls)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be."""
        check_options(self)

    @property
    def survives_death(self) -> bool:
        """Whether the other workers go on when one dies."""
        return False

    def samples_between_merges(self, batch_size: int) -> int | None:
        """How many samples ranks share out before they merge their models, where batches begin with
        `batch_size` of them; None unless `shares_samples`.
        """
        return None

    def for_plain_script(self) -> Self:
        """What `offbeat run` trains with in the place of this strategy where the script knows
        nothing of offbeat, so that its learning rate was chosen for plain gradients.
        """
        return self

    @property
    def can_start(self) -> bool:
        """Whether a run can begin with it whose replicas part afterwards, since it owes no
        gradients then.
        """
        return False

    def begins_as(self, *, returns: bool = False) -> Strategy:
        """The strategy whose callbacks are at work first; another one only where the choice is made
        while training goes on. `returns`: on a worker that joins a run under way.
        """
        return self

    def step_kinds(self) -> Callable[[int], Hashable] | None:
        """Says of which kind a step, counted from 0, is, where all steps of a kind do the same, so
        that a simulation takes a few of each; None where steps depend on those before them.
        """
        return None

    @property
    def hooks_layers(self) -> bool:
        """Whether callbacks look at what the model's layers see, and not at parameters alone."""
        return False

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most go with everything
        """Raise `ConfigError` if the strategy cannot work with these. Runs before any
        communication.
        """

    def check_world(self, world_size: int) -> None:  # noqa: B027 - most go with any number
        """Raise `ConfigError` if the strategy cannot work with so many ranks. Runs before any
        communication.
        """

    @abstractmethod
    def build(self, context: Context) -> Sequence[Callback]:
        """The callbacks, in the order in which they get events. Collective: all ranks build
        together.
        """
