"""What a run that goes on leaves in its folder: as many steps as were asked for, files named after
them, the newest of these, and curves without a double or a gap."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import DistributedError
from tests.resuming import (
    assert_same_bits,
    names_in,
    path_of,
    prepared,
    refusal,
    run_leg,
    run_until_killed,
    saved_at,
    start,
)
from tests.tiny import curve, metrics_of, run_main
from training.checkpoint_file import load_checkpoint, save, verify


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("resume"))


# Steps are counted, and files named after them.


@pytest.mark.parametrize(("iterations", "expected"), [(1, [1]), (5, [5]), (6, [5, 6])])
def test_a_finished_run_that_goes_on_makes_no_step_and_writes_no_checkpoint(
    tmp_path, data_dir, iterations, expected
):
    options = {"iterations": iterations, "checkpoint_interval": 5, "val_interval": 3}
    folder = tmp_path / "run" / "checkpoints"
    states = []
    for resume in ("null", "auto", "auto"):
        (leg,) = start(run_leg, 1, data_dir, tmp_path / "run", resume=resume, **options)
        metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
        files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        states.append((metrics, files))
        assert (tmp_path / "run" / "status").read_text() == "finished\n"
        if resume == "auto":
            assert leg.read == {}
    assert states[1] == states[2] == states[0]
    names = [f"ckpt_{number:08d}.pt" for number in expected]
    assert [name for name in names_in(folder) if name != "best.pt"] == names
    for number in expected:
        saved = saved_at(tmp_path / "run", number)
        assert (saved["iteration"], saved["samples"]) == (number, 8 * number)
        assert {int(entries["step"]) for entries in saved["optimizer"].values()} == {number}


def test_a_run_of_no_steps_is_the_beginning_of_a_longer_one(tmp_path, data_dir):
    straight = start(run_leg, 1, data_dir, tmp_path / "straight", iterations=5)
    for resume in ("null", "auto"):
        (leg,) = start(run_leg, 1, data_dir, tmp_path / "run", iterations=0, resume=resume)
        assert leg.read == {}
        assert names_in(tmp_path / "run" / "checkpoints") == ["ckpt_00000000.pt"]
        saved = saved_at(tmp_path / "run", 0)
        assert (saved["iteration"], saved["samples"], saved["optimizer"]) == (0, 0, {})
    legs = start(run_leg, 1, data_dir, tmp_path / "run", iterations=5, resume="auto")
    assert legs[0].read == straight[0].read
    assert metrics_without_times(tmp_path / "run") == metrics_without_times(tmp_path / "straight")
    assert_same_bits(saved_at(tmp_path / "run", 5), saved_at(tmp_path / "straight", 5))


def metrics_without_times(out_dir: Path) -> list[dict[str, Any]]:
    measured = ["tokens_per_second", "seconds_per_step", "memory_gb", "data_wait_share"]
    measured += ["comm_wait_share", "slowest_rank_share"]
    return [{k: v for k, v in e.items() if k not in measured} for e in metrics_of(out_dir)]


def run_noting_deletions(argv: list[str]) -> list[tuple[list[str], list[str]]]:
    """The job; names of all checkpoints before and after each deletion, whole ones before."""
    from training import run_folder

    noted = []
    delete_old = run_folder.delete_old

    def noting(folder: Path, keep: int) -> None:
        for path in folder.glob("*.pt"):
            verify(path)
        before = names_in(folder)
        delete_old(folder, keep)
        noted.append((before, names_in(folder)))

    with mock.patch.object(run_folder, "delete_old", noting):
        run_main(argv)
    return noted


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("first", [8, 98])
def test_the_newest_checkpoints_and_the_best_stay_where_numbers_get_a_digit_more(
    tmp_path, data_dir, keep, first
):
    start(run_main, 1, data_dir, tmp_path / "run", iterations=1, val_interval=1)
    saved = saved_at(tmp_path / "run", 1)
    saved["best_val_loss"] = 0.0  # best.pt is of step 1 and stays so
    save(saved, tmp_path / "run" / "checkpoints" / "best.pt")
    save(saved | {"iteration": first - 1}, path_of(tmp_path / "run", first - 1))
    path_of(tmp_path / "run", 1).unlink()
    options = {"checkpoint_interval": 1, "keep_checkpoints": keep, "val_interval": 2}
    (noted,) = start(
        run_noting_deletions,
        1,
        data_dir,
        tmp_path / "run",
        iterations=first + 4,
        resume="auto",
        **options,
    )

    def names(last: int, count: int) -> list[str]:
        numbers = range(max(first - 1, last - count + 1), last + 1)
        return ["best.pt", *(f"ckpt_{number:08d}.pt" for number in numbers)]

    assert noted == [(names(n, keep + 1), names(n, keep)) for n in range(first, first + 5)]
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")["iteration"] == 1


def test_to_keep_no_checkpoint_is_refused(tmp_path, data_dir):
    message = refusal(run_main, 1, data_dir, tmp_path / "run", keep_checkpoints=0)
    assert message == "keep_checkpoints is 0, it must be at least 1"


# Curves.


def test_a_killed_run_that_goes_on_has_each_point_of_its_curves_once(tmp_path, data_dir):
    """What was written after the last checkpoint gives way to what the resumed run found."""
    out_dir = tmp_path / "run"
    options = {"iterations": 30, "checkpoint_interval": 10, "val_interval": 10}
    checkpoint = str(path_of(out_dir, 10))
    with pytest.raises(DistributedError) as caught:
        start(run_until_killed, 2, data_dir, out_dir, 17, checkpoint, **options)
    assert {failure.kind for failure in caught.value.failures.values()} == {"killed by signal 9"}
    before = metrics_of(out_dir)
    assert curve(before, "iteration")[-1] == 17
    # Files of one board are read in the order of their names, which begin with a second.
    (events,) = (out_dir / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.0000000001"))
    # Another rate, by which the points of the resumed run are known.
    start(run_main, 2, data_dir, out_dir, resume="auto", **options, lr_max=2e-3)
    after = metrics_of(out_dir)
    points = [(e["iteration"], name) for e in after for name in e if name != "iteration"]
    assert len(points) == len(set(points))
    assert [entry["iteration"] for entry in after if "lr" in entry] == list(range(1, 31))
    validated = [entry["iteration"] for entry in after if "val_loss" in entry]
    assert validated == [0, 10, 20, 30]
    kept = [entry for entry in before if entry["iteration"] <= 10]
    assert after[: len(kept)] == kept
    assert max(curve(before, "lr")[10:]) > 2e-3 >= max(curve(after, "lr")[10:])

    board = EventAccumulator(str(out_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = {name for entry in after for name in entry} - {"iteration"}
    assert set(board.Tags()["scalars"]) == tags
    for tag in tags:
        shown = [(event.step, event.value) for event in board.Scalars(tag)]
        written = [(e["iteration"], pytest.approx(e[tag], rel=1e-6)) for e in after if tag in e]
        assert shown == written, tag
    assert len(list((out_dir / "tensorboard").glob("events*"))) == 2
    for line in (out_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
