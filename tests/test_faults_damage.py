"""A checkpoint that is cut off or has a wrong bit is found out, named and set aside, not deleted,
and the run goes on from the one before.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import Run, assert_same_run, prepared_data
from training.run_folder import RunFolder

pytestmark = pytest.mark.slow

TRIALS = 20
OPTIONS = {
    "iterations": 12,
    "checkpoint_interval": 4,
    "val_interval": 4,
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("damage")
    run = Run(folder / "straight", prepared_data(folder), OPTIONS)
    run.finish()
    assert run.saved() == [4, 8, 12, 12]
    return run


def copy_of(straight: Run, out_dir: Path, best: int) -> Run:
    """The finished run in another folder, best.pt a hard link of a checkpoint, as a save makes it.

    Args:
        straight: the run.
        out_dir: the folder; is emptied first.
        best: iteration of the checkpoint.
    """
    shutil.rmtree(out_dir, ignore_errors=True)
    shutil.copytree(straight.out_dir, out_dir)
    run = Run(out_dir, straight.data_dir, OPTIONS)
    (run.checkpoints / "best.pt").unlink()
    os.link(run.numbered(best), run.checkpoints / "best.pt")
    return run


def cut_off(path: Path, draw: random.Random) -> int:
    length = draw.randrange(path.stat().st_size)
    os.truncate(path, length)
    return length


def flip_a_bit(path: Path, draw: random.Random) -> int:
    place = draw.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return place


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
def test_damage_anywhere_in_the_newest_checkpoint_is_found_and_the_one_before_is_used(
    tmp_path, straight, capsys, damage: Callable[[Path, random.Random], int]
):
    for seed in range(TRIALS):
        # The best model so far may be the newest, of the same bytes, or the one before.
        best = [12, 8][seed % 2]
        run = copy_of(straight, tmp_path / "run", best)
        newest = run.numbered(12)
        place = damage(newest, random.Random(seed))
        left = newest.read_bytes()
        trial = f"{damage.__name__} {place}, seed {seed}"

        chosen = enter(run)
        said = [line for line in capsys.readouterr().out.splitlines() if "not resumed" in line]
        damaged = {newest} | ({run.checkpoints / "best.pt"} if best == 12 else set())
        assert chosen == str(run.numbered(8)), trial
        assert len(said) == len(damaged), trial
        for path in damaged:
            aside = path.with_name(f"{path.name}.damaged")
            assert not path.exists(), trial
            assert aside.read_bytes() == left, trial
            assert any(f"{path} is damaged" in line and aside.name in line for line in said), trial
        assert run.saved() == [4, 8] + [8] * (best == 8), trial
        assert enter(run) == chosen, trial
        assert "not resumed" not in capsys.readouterr().out, trial


def enter(run: Run) -> str | None:
    """What rank 0 does at a start with --resume auto; the lock is given back."""
    folder = RunFolder(str(run.out_dir), keep_checkpoints=3)
    path, _ = folder.enter("auto", [""])
    return path


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
def test_a_run_whose_newest_checkpoint_is_damaged_is_trained_again_from_the_one_before(
    tmp_path, straight, damage
):
    run = copy_of(straight, tmp_path / "run", 12)
    damage(run.numbered(12), random.Random(0))
    run.finish()
    assert run.events("from") == [8]
    assert len(run.lines("not resumed from")) == 2  # best.pt is the same file
    assert_same_run(run, straight, 12)


def test_a_folder_in_which_every_checkpoint_is_damaged_is_not_started_anew(tmp_path, straight):
    run = copy_of(straight, tmp_path / "run", 12)
    for iteration in (4, 8, 12):
        flip_a_bit(run.numbered(iteration), random.Random(iteration))
    measured = (run.out_dir / "metrics.jsonl").read_bytes()
    assert run.to_its_end() == [2, 2]
    (line,) = run.said(0).splitlines()[-1:]
    assert "no checkpoint in" in line
    assert (run.out_dir / "metrics.jsonl").read_bytes() == measured
    # It may be the machine that fails: all are where they were, and the next start says the same.
    assert len(list(run.checkpoints.glob("*.pt"))) == 4
    assert run.to_its_end() == [2, 2]
    assert len(list(run.checkpoints.glob("*.pt"))) == 4
