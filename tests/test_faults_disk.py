"""A full disk, played by a limit on the size of files, stops a save and not the training, and never
costs the last good file.
"""

import resource
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import Run, Watched, assert_same, assert_same_run, prepared_data, wrap
from tests.tiny import curve, metrics_of
from training.checkpoint_file import load_checkpoint

pytestmark = pytest.mark.slow

OPTIONS = {
    "iterations": 16,
    "checkpoint_interval": 4,
    "val_interval": 4,
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}
BOTH_WAYS = pytest.mark.parametrize("is_async", [True, False])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data_dir) -> Run:
    run = Run(tmp_path_factory.mktemp("disk_straight") / "run", data_dir, OPTIONS)
    run.finish()
    return run


def full_disk(rank: int, iterations: Container[int], watched: Watched) -> None:
    """On one rank, no file grows over 100 KB while the checkpoints of these steps are written."""
    from training import checkpoint

    def collect(original: Callable[..., Any], **parts: Any) -> Any:
        # The save before this one is over by now, also where it was written meanwhile.
        is_full = watched.rank == rank and parts["progress"]["iteration"] in iterations
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if is_full else hard, hard))
        return original(**parts)

    wrap(checkpoint, "collect", collect)


@BOTH_WAYS
def test_training_goes_on_past_a_save_that_failed_and_the_next_one_is_made(
    tmp_path, data_dir, straight, is_async
):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.finish(partial(full_disk, 0, [8]), async_checkpoint=is_async)
    (line,) = run.lines("not saved")
    assert "step 8 not saved" in line
    assert "File too large" in line
    assert str(run.checkpoints) in line
    assert run.events("failed") == [8]
    assert run.saved() == [4, 12, 16, 16]
    assert run.half_written() == []
    failed = curve(metrics_of(run.out_dir), "failed_saves")
    assert failed == [0] * 12 + [1] * 4  # known for sure when the next one is due
    assert_same(load_checkpoint(run.numbered(16)), load_checkpoint(straight.numbered(16)))


@BOTH_WAYS
def test_a_last_save_that_fails_ends_all_ranks_with_path_and_cause_and_the_one_before_intact(
    tmp_path, data_dir, straight, is_async
):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    statuses = run.to_its_end(partial(full_disk, 0, [16]), async_checkpoint=is_async)
    assert statuses == [2, 2]
    for rank in (0, 1):
        (line,) = [line for line in run.said(rank).splitlines() if line.startswith("train_ddp.py:")]
        assert "step 16 not saved" in line
        assert str(run.checkpoints) in line
        assert "File too large" in line
    assert run.saved() == [4, 8, 12, 12]
    assert run.half_written() == []
    assert run.status == "to be continued: the last save failed"
    assert curve(metrics_of(run.out_dir)) == curve(metrics_of(straight.out_dir))

    run.finish(async_checkpoint=is_async)
    assert run.events("from") == [12]
    assert_same_run(run, straight, 16)


def test_a_full_disk_of_a_rank_that_writes_nothing_is_not_noticed(tmp_path, data_dir, straight):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.finish(partial(full_disk, 1, range(100)))
    assert run.lines("not saved") == []
    assert_same_run(run, straight, 16)


@pytest.mark.parametrize("where", [".", "run", "run/deeper"])
def test_a_folder_that_cannot_be_made_is_refused_in_one_line_and_nothing_is_left(
    tmp_path, data_dir, where
):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    out_dir = in_the_way / where
    assert run.to_its_end(out_dir=out_dir) == [2, 2]
    (line,) = run.said(0).splitlines()
    assert line.startswith(f"train_ddp.py: cannot use out_dir {out_dir}: ")
    assert in_the_way.read_text() == "not a folder"
    assert not run.out_dir.exists()


def test_a_file_where_checkpoints_belong_is_refused_in_one_line(tmp_path, data_dir):
    run = Run(tmp_path / "run", data_dir, OPTIONS)
    run.out_dir.mkdir()
    run.checkpoints.write_text("not a folder")
    assert run.to_its_end() == [2, 2]
    (line,) = run.said(0).splitlines()
    assert line.startswith(f"train_ddp.py: cannot use out_dir {run.out_dir}: ")
    assert str(run.checkpoints) in line
    assert run.checkpoints.read_text() == "not a folder"
