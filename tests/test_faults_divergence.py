"""Bad steps are left out by all ranks alike; a run that diverges goes back once and past the text;
and a stop in between changes nothing.
"""

import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import (
    SECONDS_TO_NOTICE,
    Fault,
    Run,
    Watched,
    assert_same_run,
    prepared_data,
    wrap,
)
from tests.tiny import curve, metrics_of
from training.checkpoint_file import load_checkpoint

pytestmark = pytest.mark.slow

BATCH_SIZE = 8
OPTIONS = {
    "batch_size": BATCH_SIZE,
    "iterations": 24,
    "cos_cycle_iters": 24,
    "checkpoint_interval": 4,
    "val_interval": 8,
    "val_windows": 8,
    "max_skipped_steps": 4,
    "dropout": 0.1,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("divergence"))


def poison(first: int, last: int, factor: float, ranks: tuple[int, ...], watched: Watched) -> None:
    """Multiply the training loss of some ranks over the samples first <= number < last."""
    from dist.ddp import DDP

    # Validation goes past DDP, and is not hit.
    def forward(original: Callable[..., Any], *args: Any) -> Any:
        loss = original(*args)
        is_hit = first <= watched.job.samples < last and watched.rank in ranks
        return loss * factor if is_hit else loss

    wrap(DDP, "forward", forward)


def poisoned_steps(
    first: int, count: int, factor: float = math.nan, ranks: tuple[int, ...] = (0, 1)
) -> Fault:
    """Poison the samples of these steps of a run that nothing has set back."""
    samples = BATCH_SIZE * (first - 1), BATCH_SIZE * (first - 1 + count)
    return partial(poison, *samples, factor, ranks)


def skips(run: Run) -> list[int]:
    """Steps without an update in the last start, which must be the same on all ranks."""
    assert run.events("skip", rank=0) == run.events("skip", rank=1)
    return run.events("skip")


def test_a_loss_that_is_nan_on_one_rank_is_skipped_by_all(tmp_path, data_dir):
    both = Run(tmp_path / "both", data_dir, OPTIONS)
    both.finish(poisoned_steps(14, 2))
    for rank in (0, 1):
        one = Run(tmp_path / f"{rank}", data_dir, OPTIONS)
        one.finish(poisoned_steps(14, 2, ranks=(rank,)))
        assert skips(one) == skips(both) == [14, 15]
        assert_same_run(one, both, 24)
    counts = curve(metrics_of(one.out_dir), "skipped_steps")
    assert counts == [0] * 13 + [1] + [2] * 10
    assert len(one.lines("no update")) == 2


def test_a_spike_is_measured_against_the_norms_from_before_the_stop(tmp_path, data_dir):
    spike = poisoned_steps(18, 1, factor=1000.0)
    options = OPTIONS | {"spike_factor": 20.0}
    straight = Run(tmp_path / "straight", data_dir, options)
    straight.finish(spike)
    assert skips(straight) == [18]
    assert curve(metrics_of(straight.out_dir), "skipped_steps") == [0] * 17 + [1] * 7
    resumed = Run(tmp_path / "resumed", data_dir, options)
    resumed.finish(spike, iterations=16)  # too few steps follow to learn what is normal
    resumed.finish(spike)
    assert skips(resumed) == [18]
    assert_same_run(resumed, straight, 24)


def read_late(watched: Watched) -> None:
    """Let the host learn of each step one step later, as it does beside a GPU."""
    from training import step_reports

    step_reports.LAG["cpu"] = 1


def test_a_host_that_learns_late_what_came_out_of_a_step_does_the_same(tmp_path, data_dir):
    """A NaN, a spike and a divergence, of which it learns when the next step is already done."""
    options = OPTIONS | {"spike_factor": 20.0, "log_interval": 5}
    # The fifth is for the step that is done in vain, and then for the first one after going back.
    faults = poisoned_steps(13, 1, factor=1000.0), poisoned_steps(2, 1), poisoned_steps(15, 5)
    runs = [Run(tmp_path / name, data_dir, options) for name in ("at_once", "late")]
    runs[0].finish(*faults)
    runs[1].finish(*faults, read_late)
    said = [
        [
            line.replace(str(run.out_dir), "")
            for line in run.said(0).splitlines()
            if "no update" in line or "validation loss" in line
        ]
        for run in runs
    ]
    assert said[0] == said[1]
    assert sum("going back" in line for line in said[0]) == 1
    assert skips(runs[0]) == [2, 13, 15, 16, 17, 18, 13]
    # It has learnt at once where it had to wait anyway: for a line, a validation, a save.
    assert skips(runs[1]) == [3, 14, 15, 16, 18, 19, 14]
    assert_same_run(runs[1], runs[0], 24)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory, data_dir) -> Run:
    """A run that skips four steps from step 11 on, and goes back to step 8."""
    run = Run(tmp_path_factory.mktemp("rolled_back") / "run", data_dir, OPTIONS)
    run.finish(poisoned_steps(11, 4))
    return run


def test_a_run_that_diverges_goes_back_to_the_last_good_checkpoint_and_past_the_text(
    rolled_back, data_dir, tmp_path
):
    run = rolled_back
    assert skips(run) == [11, 12, 13, 14]
    (line,) = run.lines("going back")
    assert str(run.numbered(8)) in line  # that of step 12 was written after a step left out
    assert run.steps() == list(range(1, 25))
    counts = curve(metrics_of(run.out_dir), "skipped_steps")
    assert counts == [0] * 8 + [4] * 16
    saved = load_checkpoint(run.numbered(24))
    assert (saved["skipped_steps"], saved["rollbacks"]) == (4, 1)
    assert saved["samples"] == BATCH_SIZE * (14 + 16)
    assert [path.name for path in run.checkpoints.glob("*superseded*")] == [
        "ckpt_00000012.pt.superseded"
    ]
    # The steps behind the checkpoint see other text than those of a run that did not diverge.
    straight = Run(tmp_path / "straight", data_dir, OPTIONS)
    straight.finish(iterations=9)
    before, after = curve(metrics_of(straight.out_dir)), curve(metrics_of(run.out_dir))
    assert before[:8] == after[:8]
    assert before[8] != after[8]


@pytest.mark.parametrize(("what", "count"), [("step", 13 + 1), ("saved", 3 + 1)])
def test_a_run_killed_after_it_went_back_ends_as_the_one_that_was_not_killed(
    tmp_path, data_dir, rolled_back, what, count
):
    """That it went back is saved at once; a kill in this save makes it go back once more."""
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    with run.start(poisoned_steps(11, 4)) as ranks:
        run.wait_for(ranks, what, count)
        ranks.send(signal.SIGKILL)
        assert 0 not in ranks.statuses(SECONDS_TO_NOTICE)
    run.finish(poisoned_steps(11, 4))
    assert skips(run) in ([11, 12, 13, 14], [])
    assert_same_run(run, rolled_back, 24)


def test_a_run_that_diverges_again_ends_with_one_line(tmp_path, data_dir):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    assert run.to_its_end(poisoned_steps(11, 1000)) == [2, 2]
    assert skips(run) == [11, 12, 13, 14, 9, 10, 11, 12]
    (line,) = run.lines("train_ddp.py: 4 steps")
    assert "again after going back to a checkpoint" in line
    assert "lower lr_max" in line
    assert len(run.lines("train_ddp.py:")) == 2  # and rank 1's
    assert run.saved() == [4, 8, 8]
    assert run.status == "running"  # nothing that a launcher should queue again


def test_a_run_that_shall_stop_when_it_diverges_does_not_go_back(tmp_path, data_dir):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    assert run.to_its_end(poisoned_steps(11, 4), on_divergence="stop") == [2, 2]
    assert skips(run) == [11, 12, 13, 14]
    assert run.lines("going back") == []
    (line,) = run.lines("train_ddp.py: 4 steps")
    assert "again" not in line
    assert run.steps() == list(range(1, 14))


def test_a_run_that_diverges_before_it_has_a_checkpoint_ends_with_one_line(tmp_path, data_dir):
    run = Run(tmp_path / "run", data_dir, OPTIONS | {"val_interval": 0})
    assert run.to_its_end(poisoned_steps(1, 4)) == [2, 2]
    assert "no good checkpoint to go back to" in run.lines("train_ddp.py: 4 steps")[0]
