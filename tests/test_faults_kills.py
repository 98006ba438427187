"""kill -9 at any moment: nothing is lost but the steps since the last save, and the run that goes
on is, to the bit, the one that was never killed.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import (
    SECONDS_TO_NOTICE,
    Run,
    Watched,
    assert_same_run,
    prepared_data,
    random_moment,
    slow_records,
    wrap,
)
from training.checkpoint_file import numbered_checkpoints

pytestmark = pytest.mark.slow

KILLS = 30
INTERVAL = 3
CHAIN = {
    "iterations": 120,
    "checkpoint_interval": INTERVAL,
    "val_interval": 5,  # now and then best.pt is written alone
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("kills"))


def test_a_run_killed_at_thirty_random_moments_is_the_run_that_was_never_killed(tmp_path, data_dir):
    run = Run(tmp_path / "killed", data_dir, CHAIN)
    newest, in_saves, ran_to = 0, 0, 0
    for moment in (random_moment(seed, range(7)) for seed in range(KILLS)):
        with run.start(partial(slow_records, 0.001), async_checkpoint=moment.is_async) as ranks:
            if moment.steps:
                run.wait_for(ranks, "step", moment.steps)
            time.sleep(moment.delay)
            ranks.send(signal.SIGKILL, *moment.ranks)
            statuses = ranks.statuses(SECONDS_TO_NOTICE)
        assert 0 not in statuses, "it was at its end: the chain needs more iterations"
        # The first of all; the other may see that and end by itself before it is killed too.
        assert statuses[max(moment.ranks, default=0)] == -signal.SIGKILL, moment
        assert run.events("failed") == [], run.said()
        for start in run.events("from"):
            assert start == newest, moment
        in_save = len(run.events("saving")) > len(run.events("saved"))
        in_saves += in_save
        saved = run.saved() if run.checkpoints.exists() else []
        ran_to = max([newest, *run.events("step")])
        assert not newest or saved, moment
        assert max(saved, default=0) >= max([newest, *run.events("saved")]), moment
        newest = max(saved, default=0)
        # A save that goes on beside the training is over before the next one begins.
        assert ran_to - newest <= INTERVAL * (1 + moment.is_async), moment
        print(f"{moment}: killed after step {ran_to}, {'in a save, ' * in_save}{newest} saved")
    print(f"{in_saves} of {KILLS} kills fell into a save")
    assert in_saves >= KILLS // 5

    run.finish()
    assert run.events("from") == [newest]
    straight = Run(tmp_path / "straight", data_dir, CHAIN)
    straight.finish()
    assert_same_run(run, straight, 120)


# Kills at chosen places of a save.

SHORT = {
    "iterations": 12,
    "checkpoint_interval": 2,
    "keep_checkpoints": 2,
    "val_interval": 4,
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}
KILLED_AT = 8  # two checkpoints are there, a third is written, and best.pt with it


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data_dir) -> Run:
    run = Run(tmp_path_factory.mktemp("straight") / "run", data_dir, SHORT)
    run.finish()
    return run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_save(stage: str, watched: Watched) -> None:
    """Let rank 0 kill itself in the save of step KILLED_AT, before or after something it does."""
    from training import archive, checkpoint_file, run_folder

    owner, name, calls, is_done_first = {
        "before anything is written": (archive.ArchiveWriter, "__init__", 1, False),
        "half way through the tensors": (archive.ArchiveWriter, "write", 30, False),
        "before the directory": (archive.ArchiveWriter, "close", 1, False),
        "before it is flushed to the disk": (checkpoint_file.os, "fsync", 1, False),
        "before it is read back": (checkpoint_file, "verify_archive", 1, False),
        "before it is renamed": (Path, "replace", 1, False),
        "before the folder is flushed": (checkpoint_file.os, "fsync", 2, False),
        "before best.pt is linked": (run_folder, "copy_whole", 1, False),
        "before best.pt is renamed": (Path, "replace", 2, False),
        "before the rotation": (run_folder, "delete_old", 1, False),
        "in the rotation": (Path, "unlink", 1, True),
    }[stage]

    def dying(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls -= watched.is_saving == KILLED_AT
        if calls == 0 and not is_done_first:
            die()
        answer = original(*args, **kwargs)
        if calls == 0:
            die()
        return answer

    wrap(owner, name, dying)


BEFORE_ITS_NAME = [
    "before anything is written",
    "half way through the tensors",
    "before the directory",
    "before it is flushed to the disk",
    "before it is read back",
    "before it is renamed",
]
UNDER_ITS_NAME = [
    "before the folder is flushed",
    "before best.pt is linked",
    "before best.pt is renamed",
    "before the rotation",
    "in the rotation",
]


@pytest.mark.parametrize("stage", BEFORE_ITS_NAME + UNDER_ITS_NAME)
def test_a_kill_in_the_midst_of_a_save_leaves_the_checkpoint_before_or_after(
    tmp_path, data_dir, straight, stage
):
    run = Run(tmp_path / "run", data_dir, SHORT)
    # Every other stage in the other way of writing: the stages are the same in both.
    is_async = (BEFORE_ITS_NAME + UNDER_ITS_NAME).index(stage) % 2 == 0
    statuses = run.to_its_end(partial(die_in_the_save, stage), async_checkpoint=is_async)
    assert statuses[0] == -signal.SIGKILL
    assert statuses[1] > 0
    newest = KILLED_AT - 2 if stage in BEFORE_ITS_NAME else KILLED_AT
    assert run.saved()[-1] == newest
    # Two are kept, and none of them is given up before the third is whole.
    kept = [4, 6, 8] if stage in UNDER_ITS_NAME[:-1] else [newest - 2, newest]
    assert [number for number, _ in numbered_checkpoints(run.checkpoints)] == kept
    assert run.status == "running"
    run.finish()
    assert run.events("from") == [newest]
    assert run.said().count("damaged") == 0
    assert_same_run(run, straight, 12)


def slow_board(watched: Watched) -> None:
    """From the step of that save on, TensorBoard's thread falls behind."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(original: Callable[..., None], *args: Any) -> None:
        if watched.job.iteration >= KILLED_AT:
            time.sleep(0.03)
        original(*args)

    wrap(RecordWriter, "write", write)


def test_measurements_are_in_their_files_before_the_checkpoint_that_goes_on_from_them(
    tmp_path, data_dir, straight
):
    run = Run(tmp_path / "run", data_dir, SHORT)
    statuses = run.to_its_end(slow_board, partial(die_in_the_save, "before the rotation"))
    assert statuses[0] == -signal.SIGKILL
    run.finish()
    assert run.events("from") == [KILLED_AT]
    assert_same_run(run, straight, 12)


def slow_save_of_a_stopped_run(watched: Watched) -> None:
    from training.archive import ArchiveWriter

    def write(original: Callable[..., None], *args: Any) -> None:
        original(*args)
        if watched.job.stop.code:
            watched.note("slow", watched.job.iteration)
            time.sleep(60)

    wrap(ArchiveWriter, "write", write)


def test_a_last_save_that_outlasts_the_launchers_patience_leaves_the_one_before(
    tmp_path, data_dir, straight
):
    """torchrun kills its ranks some seconds after it has told them to end."""
    run = Run(tmp_path / "run", data_dir, SHORT)
    with run.start(slow_save_of_a_stopped_run) as ranks:
        run.wait_for(ranks, "step", 5)
        ranks.send(signal.SIGTERM)
        run.wait_for(ranks, "slow")
        assert ranks.are_running
        ranks.send(signal.SIGKILL)
        assert ranks.statuses(SECONDS_TO_NOTICE)[0] == -signal.SIGKILL
    saved = run.saved()
    assert saved[-1] == run.events("saved")[-1]
    assert run.half_written() != []
    run.finish()
    assert run.events("from") == [saved[-1]]
    assert_same_run(run, straight, 12)
