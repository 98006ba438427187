"""Rank 0 alone decides what lies on the disk, an error of its own ends every rank, and no two runs
use one folder at a time.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import (
    PATIENCE,
    SECONDS_TO_NOTICE,
    Run,
    Watched,
    assert_same_run,
    prepared_data,
    wrap,
)
from tests.harness import run_torchrun

pytestmark = pytest.mark.slow

OPTIONS = {
    "iterations": 12,
    "cos_cycle_iters": 12,
    "checkpoint_interval": 4,
    "val_interval": 4,
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data_dir) -> Run:
    run = Run(tmp_path_factory.mktemp("ranks_straight") / "run", data_dir, OPTIONS)
    run.finish()
    return run


# What ranks see of the disk.


def blind(out_dir: Path, watched: Watched) -> None:
    """On rank 1 nothing in the run folder exists: a network file system shows it later."""
    if watched.rank != 1:
        return

    def look(original: Callable[..., bool], path: Any, *args: Any, **kwargs: Any) -> bool:
        if Path(os.fspath(path)).is_relative_to(out_dir):
            return False
        return original(path, *args, **kwargs)

    for owner, names in ((Path, ("exists", "is_file", "is_dir")), (os.path, ("exists", "isfile"))):
        for name in names:
            wrap(owner, name, look)


def test_a_rank_that_does_not_see_the_files_yet_does_as_rank_zero_says(
    tmp_path, data_dir, straight
):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.finish(partial(blind, run.out_dir), iterations=8)
    run.finish(partial(blind, run.out_dir))
    assert run.events("from") == run.events("from", rank=1) == [8]
    assert_same_run(run, straight, 12)


def slow_last_save(iteration: int, seconds: float, watched: Watched) -> None:
    from training.archive import ArchiveWriter

    def close(original: Callable[..., None], archive: Any) -> None:
        if watched.is_saving == iteration:
            time.sleep(seconds)
        original(archive)

    wrap(ArchiveWriter, "close", close)


def test_a_run_that_starts_while_the_last_save_is_under_way_goes_on_from_it(
    tmp_path, data_dir, straight
):
    """As a job that is queued again starts when the one before was told to end."""
    first = Run(tmp_path / "run", data_dir, OPTIONS, name="first")
    second = Run(tmp_path / "run", data_dir, OPTIONS, name="second")
    with first.start(partial(slow_last_save, 8, 1.5), iterations=8) as ranks:
        first.wait_for(ranks, "saving", 2)
        second.finish()
        assert ranks.statuses(0.0) == [0, 0]
    assert second.events("from") == second.events("from", rank=1) == [8]
    assert_same_run(second, straight, 12)


def stale_handle(*_: Any) -> None:
    raise OSError(116, "Stale file handle")


def fail_to_choose(watched: Watched) -> None:
    from training import run_folder

    if watched.rank == 0:
        run_folder.verify = stale_handle  # type: ignore[assignment]


def fail_to_load(watched: Watched) -> None:
    from training import start

    if watched.rank == 0:
        start.load_checkpoint = stale_handle  # type: ignore[assignment]


def fail_to_log(watched: Watched) -> None:
    from training import metrics

    if watched.rank == 0:
        metrics.show_progress = stale_handle  # type: ignore[assignment]


@pytest.mark.parametrize("fault", [fail_to_choose, fail_to_log])
def test_an_error_of_rank_zero_alone_ends_every_rank(tmp_path, data_dir, straight, fault):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.finish(iterations=8)
    with run.start(fault) as ranks:
        statuses = ranks.statuses(SECONDS_TO_NOTICE)
    assert all(status > 0 for status in statuses), statuses
    assert "rank 0 of 2 failed" in run.said(0)
    assert "Stale file handle" in run.said(0)
    run.finish()
    assert run.events("from") == [8]
    assert_same_run(run, straight, 12)


SCRIPT = """
import sys
from tests.faults import train_as_rank
from tests.test_faults_ranks import fail_to_load

notes, *argv = sys.argv[1:]
train_as_rank(argv, notes, [fail_to_load])
"""


def test_an_error_of_rank_zero_where_others_wait_for_its_word_ends_with_the_launcher(
    tmp_path, data_dir
):
    """They wait at the launcher's store, without a time-out: rank 0 may have long work to do."""
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.finish(iterations=4)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_torchrun(script, 2, run.notes, *run.argv())
    assert done.returncode != 0
    assert "rank 0 of 2 failed" in run.said(0)
    assert "Stale file handle" in run.said(0)


def fall_silent_in_a_save(watched: Watched) -> None:
    """As a machine without power, whose connections nobody closes."""
    from training.checkpoint import Collected

    def pieces(original: Callable[..., Any], *args: Any) -> Any:
        if watched.rank == 1 and watched.job.iteration == 12:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args)

    wrap(Collected, "pieces", pieces)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_rank_that_falls_silent_in_a_save_ends_the_others_within_the_time_out(
    tmp_path, data_dir, straight, is_async
):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    options = {"timeout_seconds": 4, "async_checkpoint": is_async}
    with run.start(fall_silent_in_a_save, **options) as ranks:
        run.wait_for(ranks, "saving", 3)
        deadline = time.monotonic() + SECONDS_TO_NOTICE
        while ranks.are_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not ranks.are_running
        ranks.send(signal.SIGKILL)
        assert ranks.statuses(SECONDS_TO_NOTICE) == [1, -signal.SIGKILL]
    run.finish()
    assert run.events("from") == [8]
    assert_same_run(run, straight, 12)


# Two runs and one folder.


def impatient(watched: Watched) -> None:
    """Do not wait for the last run to give its memory back."""
    from training import run_lock

    run_lock.SECONDS_FOR_THE_LAST_ONE = 0.0


def held_at_step(step: int, until: Path, watched: Watched) -> None:
    """Go on from this step once a file is there."""
    from training import metrics

    def show_progress(original: Callable[..., None], *args: Any) -> None:
        original(*args)
        while watched.job.iteration == step and not until.exists():
            time.sleep(0.01)

    wrap(metrics, "show_progress", show_progress)


def test_a_second_run_in_the_folder_is_refused_and_the_first_is_not_disturbed(
    tmp_path, data_dir, straight
):
    first = Run(tmp_path / "run", data_dir, OPTIONS, name="first")
    second = Run(tmp_path / "run", data_dir, OPTIONS, name="second")
    may_go_on = tmp_path / "may_go_on"
    with first.start(partial(held_at_step, 6, may_go_on)) as ranks:
        first.wait_for(ranks, "step", 5)
        for options in ({}, {"resume": "null"}, {"resume": "null", "overwrite": True}):
            assert second.to_its_end(impatient, **options) == [2, 2]
            (line,) = second.said(0).splitlines()
            holder = f"process {ranks.pids[0]} on {socket.gethostname()}"
            assert f"{first.out_dir} is in use by another run ({holder})" in line
        may_go_on.touch()
        assert ranks.statuses(PATIENCE) == [0, 0]
    assert_same_run(first, straight, 12)


def test_a_killed_run_leaves_its_folder_free_at_once(tmp_path, data_dir, straight):
    first = Run(tmp_path / "run", data_dir, OPTIONS, name="first")
    second = Run(tmp_path / "run", data_dir, OPTIONS, name="second")
    with first.start() as ranks:
        first.wait_for(ranks, "saved")
        ranks.send(signal.SIGKILL)
        ranks.statuses(SECONDS_TO_NOTICE)
        second.finish(impatient)
    assert second.events("from")[0] >= 4
    assert_same_run(second, straight, 12)
