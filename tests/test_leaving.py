"""A run that is asked to leave, killed in part or started anew loses nothing that it had saved, and
ends as the run that nobody disturbed."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as torch_dist

from tests.harness import DistributedError, Job, run_torchrun, start_command
from tests.resuming import (
    Leg,
    assert_same_bits,
    names_in,
    path_of,
    prepared,
    run_leg,
    saved_at,
    start,
    wait_for,
)
from tests.tiny import TINY, curve, flags, metrics_of, run_main
from training.run_lock import is_same_launch, lock, sign
from training.run_status import FINISHED, RUNNING, read_status

STEPS = 30
OPTIONS: dict[str, Any] = {"iterations": STEPS, "checkpoint_interval": 5, "dropout": 0.1}
HELD_STEP, SAVED_BEFORE = 17, 15


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("leaving"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data_dir) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    start(run_main, 2, data_dir, out_dir, **OPTIONS)
    return out_dir


def assert_undisturbed(out_dir: Path, straight: Path) -> None:
    assert_same_bits(saved_at(out_dir, STEPS), saved_at(straight, STEPS))
    for name in ("iteration", "loss_train", "lr", "grad_norm", "val_loss"):
        assert curve(metrics_of(out_dir), name) == curve(metrics_of(straight), name), name
    assert read_status(out_dir) == FINISHED


# Ranks alone.


def test_each_reason_that_one_rank_has_makes_all_save_and_leave(tmp_path, data_dir, straight):
    out_dir = tmp_path / "run"
    reasons = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "max_minutes")
    options = {**OPTIONS, "checkpoint_interval": 0, "resume": "auto", "max_minutes": 30}
    for step, reason in zip((4, 9, 10, 17, 28), reasons, strict=True):
        legs = start(run_leg_with_hangup, 2, data_dir, out_dir, step, False, reason, **options)
        assert saved_at(out_dir, step)["iteration"] == step
        assert read_status(out_dir) == f"to be continued: {reason}"
        assert f"to be continued: {reason}, after {step} steps; go on with" in legs[0].said
    start(run_main, 2, data_dir, out_dir, **options)
    assert_undisturbed(out_dir, straight)


def run_leg_with_hangup(argv: list[str], *args: Any) -> Leg:
    """A leg that hears SIGHUP even where the tests themselves were started to ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return run_leg(argv, *args)


def run_leg_read_late(argv: list[str], *args: Any) -> Leg:
    """A leg whose host learns of each step one step later, as it does beside a GPU."""
    with mock.patch.dict("training.step_reports.LAG", {"cpu": 1}):
        return run_leg(argv, *args)


def test_a_host_that_learns_late_of_a_signal_leaves_one_step_later_and_loses_none(
    tmp_path, data_dir, straight
):
    out_dir = tmp_path / "run"
    options = {**OPTIONS, "checkpoint_interval": 0, "log_interval": 10, "resume": "auto"}
    (leg, _) = start(run_leg_read_late, 2, data_dir, out_dir, 17, **options)
    assert "to be continued: SIGTERM, after 18 steps; go on with" in leg.said
    start(run_leg_read_late, 2, data_dir, out_dir, **options)
    assert_same_bits(saved_at(out_dir, STEPS), saved_at(straight, STEPS))


def run_until_interrupted_twice(argv: list[str], step: int, checkpoint: str) -> None:
    """The job, interrupted in a step on every rank, and again before the step can end."""
    import train_ddp

    training_step = train_ddp.training_step

    def on_step(job: Any) -> Any:
        if job.iteration == step:
            wait_for(Path(checkpoint))
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.6)  # sooner, it would count as the same one
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it has not left")
        return training_step(job)

    with mock.patch.object(train_ddp, "training_step", on_step):
        run_main(argv)


def test_a_second_interrupt_leaves_at_once_and_loses_what_was_not_saved(
    tmp_path, data_dir, straight
):
    out_dir = tmp_path / "run"
    checkpoint = str(path_of(out_dir, 10))
    with pytest.raises(DistributedError) as caught:
        start(run_until_interrupted_twice, 2, data_dir, out_dir, 13, checkpoint, **OPTIONS)
    kinds = {failure.kind for failure in caught.value.failures.values()}
    assert kinds == {"exit status 130"}, str(caught.value)
    assert names_in(out_dir / "checkpoints")[-1] == "ckpt_00000010.pt"
    assert read_status(out_dir) == RUNNING
    (leg, _) = start(run_leg, 2, data_dir, out_dir, resume="auto", **OPTIONS)
    assert "after 10 steps" in leg.said
    assert_undisturbed(out_dir, straight)


# Real launches.


@contextmanager
def held(folder: Path, torchrun: list[str], options: dict[str, Any]) -> Iterator[Job]:
    """A launch whose ranks will stand before a step."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "tests.held_run"]
    env = {"HELD_FOLDER": str(folder), "HELD_STEP": str(HELD_STEP)}
    with start_command([*command, *flags(**TINY | options)], env=env) as job:
        yield job


def wait_until_held(job: Job, folder: Path, out_dir: Path) -> None:
    """Until its ranks stand there, and the checkpoint before is on the disk."""
    paths = (folder / "held0", folder / "held1", path_of(out_dir, SAVED_BEFORE))
    deadline = time.monotonic() + 60.0
    while not all(path.exists() for path in paths):
        assert job.processes(), f"{job.stdout}\n{job.stderr}"
        assert time.monotonic() < deadline, f"{job.stdout}\n{job.stderr}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGUSR1", "launcher gone")],
)
def test_a_signal_to_torchrun_alone_loses_no_step(tmp_path, data_dir, straight, name, reason):
    """torchrun passes on what it knows and dies of SIGUSR1: its ranks see that it is gone."""
    out_dir = tmp_path / "run"
    options = {**OPTIONS, "data_dir": data_dir, "out_dir": out_dir}
    torchrun = ["--standalone", "--nproc_per_node=2"]
    with held(tmp_path / "held", torchrun, options) as job:
        wait_until_held(job, tmp_path / "held", out_dir)
        os.kill(job.pid, signal.Signals[name])
        done = job.wait(60)
    assert done.returncode != 0
    assert f"to be continued: {reason}, after {HELD_STEP} steps; go on with" in done.stdout
    assert read_status(out_dir) == f"to be continued: {reason}"
    assert names_in(out_dir / "checkpoints")[-1] == f"ckpt_{HELD_STEP:08d}.pt"
    (leg, _) = start(run_leg, 2, data_dir, out_dir, resume="auto", **OPTIONS)
    assert f"after {HELD_STEP} steps" in leg.said
    assert_undisturbed(out_dir, straight)


def test_ranks_that_torchrun_starts_anew_go_on_by_themselves_and_a_new_launch_does_not(
    tmp_path, data_dir, straight
):
    """--overwrite is for the first start of a launch, at whose second there is a run to lose."""
    out_dir = tmp_path / "run"
    options = {**OPTIONS, "data_dir": data_dir, "out_dir": out_dir, "overwrite": "true"}
    start(run_main, 2, data_dir, out_dir, iterations=20, seed=1)  # which the launch overwrites
    torchrun = ["--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    path_of(out_dir, 20).unlink()
    with held(tmp_path / "held", torchrun, options) as job:
        wait_until_held(job, tmp_path / "held", out_dir)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        done = job.wait(90)
    assert done.returncode == 0, done.stderr
    resumed = [line for line in done.stdout.splitlines() if line.startswith("resumed from")]
    assert resumed == [f"resumed from {path_of(out_dir, 15)} after 15 steps"]
    assert_undisturbed(out_dir, straight)

    again = {**TINY, **options, "iterations": 2}
    done = run_torchrun("train_ddp.py", 2, *flags(**again))
    assert done.returncode == 0, done.stderr
    assert "resumed from" not in done.stdout
    assert names_in(out_dir / "checkpoints") == ["best.pt", "ckpt_00000002.pt"]
    assert curve(metrics_of(out_dir), "iteration")[-1] == 2


def test_only_a_run_with_an_agent_in_common_is_of_the_same_launch(tmp_path):
    """None at all, as without torchrun, is nothing in common."""
    file = lock(tmp_path)
    assert not is_same_launch(file, ["a"])
    for before, now, expected in (
        (["a", "b"], ["b", "b"], True),
        (["a", "b"], ["c", "d"], False),
        (["", ""], ["", ""], False),
        (["a", ""], ["", "c"], False),
    ):
        sign(file, before)
        assert is_same_launch(file, now) == expected, (before, now)
    file.close()


def test_a_launch_that_loses_a_machine_goes_on_alone_and_follows_the_same_curve(tmp_path, data_dir):
    options = {"iterations": STEPS, "checkpoint_interval": 5}
    start(run_main, 1, data_dir, tmp_path / "straight", **options)
    folder, out_dir = tmp_path / "held", tmp_path / "run"
    options |= {"data_dir": data_dir, "out_dir": out_dir}
    # Held here, so that either agent can be lost. An agent that is silent for 3 s counts as gone.
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        *("--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=5", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=test"),
        "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_interval=1",
    ]
    with held(folder, torchrun, options) as one, held(folder, torchrun, options) as other:
        wait_until_held(one, folder, out_dir)
        lost, left = (one, other) if 0 in one.rank_pids() else (other, one)
        lost.kill()
        (folder / "go_on").touch()
        done = left.wait(90)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {path_of(out_dir, 15)} after 15 steps" in done.stdout
    straight, entries = (metrics_of(tmp_path / name) for name in ("straight", "run"))
    assert curve(entries, "iteration") == curve(straight, "iteration")
    assert curve(entries) == pytest.approx(curve(straight), rel=2e-5)
    assert len(saved_at(out_dir, STEPS)["rng"]) == 1
    assert read_status(out_dir) == FINISHED
