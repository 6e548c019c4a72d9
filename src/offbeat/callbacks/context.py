"""`Context`: what a session lends to a strategy's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch.distributed import HashStore, Store

from offbeat.membership.generations import GenerationHost, Generations
from offbeat.transport.driver import Driver, Stream


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a strategy's parts work with.

    Attributes:
        parameters: the model's trainable parameters by name, in the model's order; the same on all
            ranks.
        driver: carries collectives out.
        grad_scale: by what factor gradients are scaled at the moment (AMP); 1.0 without a scaler.
        has_scaler: whether a GradScaler decides which steps are skipped.
        buffers: the model's persistent buffers by name, at the moment of the call: modules may
            replace them.
        optimizer: the user's, for its state; None where nobody needs it.
        model: the root module, for parts that look into layers; None where nobody needs it.
        new_stream: a fresh stream of channels; parts take theirs while they are built, in the same
            order on all ranks.
        notify: tells the user what went another way than it was asked for: in
            `Session.notices`, the record and the report, and as a log record of level WARNING.
        inform: the same for choices and counts, where all goes as it should: level INFO.
        warn: the same for what changes the meaning of the run: also a Python warning, the same
            words once a session.
        enter: makes a part's host a member of the run's generations, for strategies that survive
            death. Collective.
        own_store: a connection to the run's store for the caller alone; in a world of one, a store
            that nobody shares.
        count: wraps a driver that a thread of its own uses, so that its traffic is counted with the
            session's.
        record_wait: counts a wait of the training thread, from when to when on the monotonic clock.
        mega_batches_merged: tells the user's `Session.on_merge` that so many further mega-batches
            are in this rank's model.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    driver: Driver
    grad_scale: Callable[[], float]
    has_scaler: bool
    new_stream: Callable[[], Stream]
    notify: Callable[[str], None]
    inform: Callable[[str], None] = lambda remark: None
    warn: Callable[[str], None] = lambda remark: None
    buffers: Callable[[], Mapping[str, torch.Tensor]] = dict
    optimizer: torch.optim.Optimizer | None = None
    model: torch.nn.Module | None = None
    enter: Callable[[GenerationHost], Generations | None] = lambda host: None
    own_store: Callable[[], Store] = HashStore
    count: Callable[[Driver], Driver] = lambda driver: driver
    record_wait: Callable[[float, float], None] = lambda begin_s, end_s: None
    mega_batches_merged: Callable[[int], None] = lambda count: None


def stream_counter() -> Callable[[], Stream]:
    """A source of streams, numbered from 0."""
    numbers = count()
    return lambda: Stream(next(numbers))
