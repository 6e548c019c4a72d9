"""The frame that every test runs in: a plugin of pytest."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Iterator

gc.disable()  # while torch and the tests are imported, which leaves no garbage

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from ranks_support.launch import run_ranks, templates  # noqa: E402
from ranks_support.leaks import no_leaks  # noqa: E402
from ranks_support.measurements import as_much_as_users_send, measure_little  # noqa: E402
from ranks_support.threads import in_thread  # noqa: E402

__all__ = ["as_much_as_users_send", "in_thread", "run_ranks", "templates"]

# scikit-learn sets these when it is imported. A worker is forked anew where variables have changed.
os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")

# Tests run side by side, and the order of sums must not depend on the number of cores.
torch.set_num_threads(1)

measure_little()

atexit.register(gc.unfreeze)  # else what extensions hold would be taken for a leak


def pytest_collection_finish() -> None:
    """What was imported is looked at no more when garbage is collected; and pytest, which reads the
    logs of each phase of a test, hears of torch's dozens of loggers by the root alone.
    """
    gc.freeze()
    gc.enable()
    for logger in logging.Logger.manager.loggerDict.values():
        # `torch.__trace` has records of all that is compiled.
        is_of_torch = isinstance(logger, logging.Logger) and logger.name.startswith("torch")
        if is_of_torch and not logger.name.startswith("torch.__"):
            logger.propagate = True


settings.register_profile(
    "ci",
    max_examples=30,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # a stopwatch, which a busy machine makes run on
)
settings.register_profile("thorough", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("OFFBEAT_HYPOTHESIS", "ci"))


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    with no_leaks():
        yield
