"""Scripts with frameworks, unmodified, as `offbeat run` runs them: on two real ranks, with several
strategies each.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from integrations_support.ranks import as_launched
from ranks_support.coupled import of_two_ranks, run_coupled
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

IDIOMS = Path(__file__).parent / "idioms"
STRATEGIES = [
    *("ddp", "allreduce", "gtopk:density=0.1:collective=tree", "localsgd:period=4"),
    *("wagma", "spdkfac"),
]


def run_with_each(
    rank: int,
    world_size: int,
    *,
    script: str,
    arguments: list[str],
    strategies: list[str],
    stores: list[dict[str, str]],
) -> list[dict[str, int]]:
    """Run the script with one strategy after the other; exchanges and passes of each."""
    found = []
    for number, (spec, store) in enumerate(zip(strategies, stores, strict=True)):
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        as_launched(rank, world_size)
        os.environ |= store | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        filled = [word.format(number=number) for word in arguments]
        with warnings.catch_warnings(action="ignore"):
            coupled = run_coupled(spec, script, filled)
        found.append({"sessions": coupled.num_attached, "passes": coupled.num_losses})
    return found


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("accelerate_loop.py", []),
        ("lightning_ddp.py", []),
        (
            "hf_trainer.py",
            [
                *("--use_cpu", "--num_train_epochs=4", "--gradient_accumulation_steps=2"),
                "--per_device_train_batch_size=4",
                *("--learning_rate=0.2", "--optim=sgd", "--report_to=none", "--disable_tqdm=True"),
                *("--lr_scheduler_type=constant", "--eval_strategy=epoch", "--save_strategy=no"),
            ],
        ),
    ],
)
def test_a_script_reaches_the_loss_that_it_reaches_with_ddp(
    run_ranks: RunRanks, tmp_path: Path, script: str, arguments: list[str]
) -> None:
    for number in range(len(STRATEGIES)):
        (tmp_path / str(number)).mkdir()
    results = of_two_ranks(
        run_ranks,
        run_with_each,
        STRATEGIES,
        timeout_s=270,
        script=str(IDIOMS / script),
        arguments=[*arguments, f"--output_dir={tmp_path}/{{number}}"],
    )
    assert [each["sessions"] for ranks in results for each in ranks] == [1] * 12
    assert len({each["passes"] for ranks in results for each in ranks}) == 1
    losses = {
        spec: json.loads((tmp_path / str(number) / "eval_results.json").read_text())["eval_loss"]
        for number, spec in enumerate(STRATEGIES)
    }
    assert losses["allreduce"] == pytest.approx(losses["ddp"], abs=1e-4)
    for spec, loss in losses.items():
        assert loss < 0.9, (spec, losses)
