"""Measures what averages cost a rank while it trains, and says which interval it would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from offbeat.averaging.background.interval_choice import wished_interval
from offbeat.averaging.background.processor_time import ProcessorTime
from offbeat.averaging.background.trainer_port import TrainerPort

_ENOUGH_STEPS: Final = 10


class IntervalWatch:
    """The measuring half of `interval="auto"`; `interval_choice` says what follows from it.

    Args:
        trainer: is told the wish, and knows the interval that is in use.
        read: reads the processor time of this process.
        intervals: the possible ones, ascending.
        period: steps from one global synchronization to the next.
        budget: the largest share of a step that averages may cost, > 0.
        inform: tells the user what was chosen.
    """

    def __init__(
        self,
        trainer: TrainerPort,
        read: Callable[[], ProcessorTime | None],
        *,
        intervals: tuple[int, ...],
        period: int,
        budget: float,
        inform: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._read = read
        self._intervals = intervals
        self._every = max(period, _ENOUGH_STEPS)
        self._budget = budget
        self._inform = inform
        self._interval = trainer.interval
        self._earlier: ProcessorTime | None = None
        self._num_steps = 0
        self._cost: float | None = None
        self._is_known = True

    def end_step(self) -> None:
        """The trainer has ended a step."""
        interval = self._trainer.interval
        if interval != self._interval:
            self._interval, self._earlier = interval, None
            self._inform(self._news())
        if not self._is_known:
            return
        self._num_steps += 1
        if self._earlier is None:
            self._begin(self._read())
        elif self._num_steps >= self._every:
            now, earlier = self._read(), self._earlier
            if now is not None:
                self._cost = now.cost_since(earlier)
                wish = wished_interval(
                    interval, self._cost, budget=self._budget, intervals=self._intervals
                )
                self._trainer.wish(wish)
            self._begin(now)

    def _begin(self, now: ProcessorTime | None) -> None:
        """Measure anew from `now` on."""
        self._earlier, self._num_steps = now, 0
        if now is None and self._cost is None:
            self._is_known = False
            self._inform(
                'interval="auto" needs to know how long a thread waits for a processor, which this'
                " system does not tell: this worker leaves the choice to the others"
            )

    def _news(self) -> str:
        chosen = "step" if self._interval == 1 else f"{self._interval} steps"
        cost = "" if self._cost is None else f"; averages took {self._cost:.1%} of a step from it"
        return (
            f'interval="auto": this worker averages in a group after every {chosen} from now'
            f" on{cost}, {self._budget:.1%} are allowed"
        )
