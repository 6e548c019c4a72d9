"""The frame itself: what a test leaves behind is found, and taken away where that can be done."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from ranks_support import leaks
from ranks_support.leaks import LeakError, no_leaks


def test_a_clean_block_passes() -> None:
    with no_leaks():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_that_goes_on_is_found(monkeypatch: pytest.MonkeyPatch, daemon: bool) -> None:
    monkeypatch.setattr(leaks, "END_WITHIN_S", 0.01)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler", daemon=daemon)
    with ExitStack() as afterwards:
        afterwards.callback(thread.join)
        afterwards.callback(stop.set)
        with pytest.raises(LeakError, match="thread 'straggler'"), no_leaks():
            thread.start()


def test_a_thread_that_was_told_to_stop_may_take_a_moment() -> None:
    with no_leaks():
        threading.Thread(target=threading.Event().wait, args=(0.05,)).start()


def test_a_process_group_is_found_and_destroyed() -> None:
    with pytest.raises(LeakError, match="the default process group"), no_leaks():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("before", "after"), [(None, "new"), ("old", "new"), ("old", None)])
def test_a_changed_environment_variable_is_found_and_restored(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
) -> None:
    def put(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("OFFBEAT_EXAMPLE", raising=False)
        else:
            monkeypatch.setenv("OFFBEAT_EXAMPLE", value)

    put(before)
    with pytest.raises(LeakError, match="OFFBEAT_EXAMPLE"), no_leaks():
        put(after)
    assert os.environ.get("OFFBEAT_EXAMPLE") == before
