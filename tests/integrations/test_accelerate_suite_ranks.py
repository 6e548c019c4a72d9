"""Accelerate's own test scripts, on two ranks, by `offbeat run --strategy allreduce`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "idioms" / "accelerate_suite.py"

OFFBEAT_RUN = [
    str(Path(sys.executable).with_name("offbeat")),
    *("run", "--strategy", "allreduce", "--workers", "2", "--out"),
]

LEFT_OUT = {
    "test_sync": [],
    "test_script": [],
    "test_distributed_data_loop": [
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
        "test_stateful_dataloader",
        "test_stateful_dataloader_save_state",
    ],
}
"""By script: the tests of `join`, which Accelerate has for GPUs only, so that on a CPU they never
end, and those that need torchdata.
"""

TRAINS_NOTHING = {"test_distributed_data_loop"}
"""Where `offbeat run` says at the end that no training was seen."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_script_of_accelerates_passes(tmp_path: Path, name: str) -> None:
    (passed := tmp_path / "passed").mkdir()
    ended = subprocess.run(
        [*OFFBEAT_RUN, str(tmp_path / "record"), str(SCRIPT), name, str(passed), *LEFT_OUT[name]],
        check=False,
        timeout=500,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    printed = ended.stdout + ended.stderr
    assert sorted(path.name for path in passed.iterdir()) == ["0", "1"], printed
    if name in TRAINS_NOTHING:
        assert "no training was seen" in printed
    else:
        assert ended.returncode == 0, printed
