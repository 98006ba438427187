"""A rank in trouble ends the job on all ranks within the time-out, and no process stays."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from dist.ddp import DDP
from dist.process_group import init_process_group, shut_down
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist.helpers import TinyLanguageModel, language_model_loss, tokens
from tests.harness import DistributedError, run_distributed, run_torchrun
from training.command_line import run

TIMEOUT_SECONDS = 2.0
TROUBLE_RANK, TROUBLE_STEP, STEPS = 1, 2, 5


def get_into(trouble):
    if trouble == "raise":
        raise ValueError("the cat sat on the keyboard")
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "sleep":
        time.sleep(600)


def train(trouble, where, folder):
    """A few steps; one rank gets into trouble before, within or after a step's backward."""
    world = init_process_group("gloo", "cpu", TIMEOUT_SECONDS)
    ddp = DDP(TinyLanguageModel(), 0.001)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW)
    for step in range(STEPS):
        in_trouble = (world.rank, step) == (TROUBLE_RANK, TROUBLE_STEP)

        def now(place, in_trouble=in_trouble):
            if in_trouble and place == where:
                Path(folder, "trouble").write_text(str(time.monotonic()))
                get_into(trouble)

        now("before backward")
        loss = language_model_loss(ddp, tokens(step, rows=2))
        loss.register_hook(lambda _, now=now: now("in backward"))
        loss.backward()
        ddp.finish_gradient_sync()
        now("before the optimizer")
        optimizer.step()
        optimizer.zero_grad()
    now("at the end")
    shut_down(world)


@pytest.mark.parametrize(
    ("trouble", "where"),
    [
        ("raise", "before backward"),
        ("raise", "in backward"),
        ("raise", "before the optimizer"),
        ("kill", "in backward"),
        ("kill", "before the optimizer"),
        ("sleep", "in backward"),
        ("sleep", "before the optimizer"),
    ],
)
def test_a_rank_in_trouble_ends_the_others_within_the_timeout(
    trouble, where, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.harness.SECONDS_AFTER_A_FAILURE", 3.0)
    start = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        run_distributed(train, 3, trouble, where, str(tmp_path), process_group=False)
    trouble_began = float((tmp_path / "trouble").read_text()) - start
    failures = caught.value.failures
    kinds = {"raise": "ValueError", "kill": "killed by signal 9", "sleep": "hang"}
    assert failures[TROUBLE_RANK].kind == kinds[trouble]
    for rank in (0, 2):
        assert failures[rank].kind not in kinds.values()
        assert failures[rank].seconds <= trouble_began + TIMEOUT_SECONDS + 5


@pytest.mark.parametrize("trouble", ["raise", "sleep"])
def test_torchrun_ends_with_the_error_and_leaves_no_process(trouble, tmp_path):
    result = run_torchrun(__file__, 2, trouble, "in backward", tmp_path, timeout=50)
    assert result.returncode != 0
    if trouble == "raise":
        assert "rank 1 of 2 failed:\nTraceback" in result.stderr
        assert "ValueError: the cat sat on the keyboard" in result.stderr
    else:
        assert "rank 0 of 2 failed:\nTraceback" in result.stderr
        assert "Timed out" in result.stderr


if __name__ == "__main__":
    run(lambda: train(*sys.argv[1:]))
