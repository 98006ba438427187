"""A run folder has one run at a time, and a restarted launch knows its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT
from training import run_lock
from training.checkpoint_file import FORMAT_VERSION, CheckpointError, checkpoint_path, save
from training.command_line import CommandLineError
from training.run_folder import RunFolder

HOLD = """
import sys, time
from pathlib import Path
from training import run_lock
file = run_lock.lock(Path(sys.argv[1]))
run_lock.sign(file, ["an agent"])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of `tmp_path / "run"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(run_lock, "SECONDS_FOR_THE_LAST_ONE", 1.0)


def test_a_folder_in_use_names_who_uses_it(tmp_path, holder):
    with pytest.raises(CommandLineError, match=f"in use by another run .process {holder.pid} on"):
        run_lock.lock(tmp_path / "run")


def test_a_killed_holder_holds_nothing(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    begun = time.monotonic()
    file = run_lock.lock(tmp_path / "run")  # at once, or as soon as the kernel has cleared it away
    assert time.monotonic() - begun < 1.0
    assert run_lock.is_same_launch(file, ["another", "an agent"])
    assert not run_lock.is_same_launch(file, ["another", ""])


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    run_lock.lock(tmp_path / "run")
    assert "without locks" in capsys.readouterr().out


def test_a_lock_file_of_rubbish_is_nobodys(tmp_path):
    for rubbish in ("", "{", "[]", '{"agents": 3}', '{"agents": ["x"]}'):
        (tmp_path / ".lock").write_text(rubbish)
        with run_lock.lock(tmp_path) as file:
            assert not run_lock.is_same_launch(file, ["y", ""])


def test_an_agent_is_the_parent_that_torchrun_is(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert run_lock.agent() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert str(os.getppid()) in run_lock.agent().split()
    assert run_lock.agent() == run_lock.agent()


def checkpointless(path: Path) -> RunFolder:
    return RunFolder(str(path), keep_checkpoints=3)


def test_a_launch_that_was_refused_the_folder_is_not_taken_for_its_owner(tmp_path):
    """torchrun starts ranks anew after a mistake, too: they must not go on in another's run."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ckpt_00000005.pt").write_bytes(b"another run's")
    for _ in range(2):
        folder = checkpointless(tmp_path)
        assert folder.enter(None, ["me"]) == (None, False)
        with pytest.raises(CommandLineError, match="holds a run of 5 steps"):
            folder.claim(None, 0, overwrite=False)
        assert folder._lock is not None
        folder._lock.close()


def test_a_launch_that_was_started_anew_goes_on_though_it_was_told_to_overwrite(tmp_path):
    first = checkpointless(tmp_path)
    first.enter(None, ["me"])
    first.claim(None, 0, overwrite=True)
    assert json.loads((tmp_path / ".lock").read_text())["agents"] == ["me"]
    assert first._lock is not None
    first._lock.close()
    again = checkpointless(tmp_path)
    assert again.enter(None, ["me", "a new node"]) == (None, True)
    # What it was told to go on from counts as long as it has no checkpoint of its own.
    assert again._lock is not None
    again._lock.close()


def written(folder: RunFolder, iteration: int, **entries: object) -> Path:
    """A checkpoint of nothing, with these entries."""
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder.checkpoints, iteration)
    content = {"format_version": FORMAT_VERSION, "model": {}, "optimizer": {}, "config": {}}
    content |= {"best_val_loss": 0.5, "tokenizer": "{}", "rng": [], "iteration": iteration}
    save(content | entries, path)
    return path


def test_a_launch_that_was_started_anew_needs_no_more_what_it_began_with(tmp_path):
    """The file that --resume named may have been rotated away since."""
    folder = checkpointless(tmp_path / "run")
    begun_with = written(folder, 5)
    assert folder.enter(str(begun_with), ["me"]) == (str(begun_with), False)
    folder.claim(str(begun_with), 5, overwrite=False)
    begun_with.unlink()
    later = written(folder, 9)
    assert folder._lock is not None
    folder._lock.close()
    again = checkpointless(tmp_path / "run")
    assert again.enter(str(begun_with), ["me"]) == (str(later), True)


@pytest.mark.parametrize("options", [{"resume": "typo.pt"}, {"init_from": "typo.pt"}])
def test_no_folder_is_made_for_a_checkpoint_that_is_not_there(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    for resume in (None, "auto"):
        with pytest.raises(CheckpointError, match=r"typo\.pt does not exist"):
            checkpointless(tmp_path / "run").enter(**{"resume": resume, "agents": [], **options})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_name_is_too_long_is_refused_by_its_name(tmp_path):
    begun_with = written(checkpointless(tmp_path), 5)
    with pytest.raises(CommandLineError, match=r"cannot use out_dir .*xxx"):
        checkpointless(tmp_path / ("x" * 300)).enter(str(begun_with), [])


def test_what_was_set_aside_is_deleted_by_overwrite_alone(tmp_path):
    folder = checkpointless(tmp_path / "run")
    aside = written(folder, 5).rename(folder.checkpoints / "ckpt_00000005.pt.damaged")
    assert folder.enter("auto", ["me"]) == (None, False)
    with pytest.raises(CommandLineError, match="set aside, ckpt_00000005"):
        folder.claim(None, 0, overwrite=False)
    assert aside.exists()
    folder.claim(None, 0, overwrite=True)
    assert not aside.exists()


def test_of_checkpoints_without_an_update_the_newest_is_good_where_there_is_no_other(tmp_path):
    folder = checkpointless(tmp_path)
    written(folder, 5, skipped_in_a_row=1)
    newest = written(folder, 6, skipped_in_a_row=2)
    assert folder.last_good_checkpoint() == str(newest)
    good = written(folder, 4, skipped_in_a_row=0)
    assert folder.last_good_checkpoint() == str(good)


def test_the_best_loss_is_that_of_the_file(tmp_path):
    folder = checkpointless(tmp_path)
    newest = written(folder, 6)
    assert folder.set_aside_later(6, None) is None
    written(folder, 4, best_val_loss=0.75).rename(folder.best)
    assert folder.set_aside_later(6, None) == 0.75
    assert newest.exists()
