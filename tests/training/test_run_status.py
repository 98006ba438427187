"""The marker of a run folder, and the command that reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import run_status
from training.command_line import CommandLineError
from training.run_status import (
    FINISHED,
    RUNNING,
    read_status,
    status_path,
    to_be_continued,
    write_status,
)


def main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run_status.py", *arguments])
    run_status.main()


def test_what_is_written_is_read_and_stands_in_one_line(tmp_path):
    for status in (RUNNING, to_be_continued("SIGUSR1"), FINISHED):
        write_status(tmp_path, status)
        assert read_status(tmp_path) == status
        assert (tmp_path / "status").read_text() == f"{status}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


def test_reason_stands_behind_the_colon():
    assert to_be_continued("max_minutes") == "to be continued: max_minutes"


def test_no_marker_reads_as_none(tmp_path):
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "no such folder") is None
    (tmp_path / "status").write_bytes(b"\xff\xfe")
    assert read_status(tmp_path) is None
    (tmp_path / "status").write_bytes(b"")
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("fails", ["write_text", "replace"])
def test_marker_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch, fails):
    write_status(tmp_path, RUNNING)

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, fails, full)
    with pytest.raises(OSError, match="No space"):
        write_status(tmp_path, FINISHED)
    monkeypatch.undo()
    assert read_status(tmp_path) == RUNNING
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


def test_command_prints_the_status_of_the_folder_that_flags_over_file_mean(
    tmp_path, monkeypatch, capsys
):
    config = tmp_path / "config.yaml"
    config.write_text(f"out_dir: {tmp_path / 'a'}\niterations: 5\n")
    for name, status in (("a", RUNNING), ("b", FINISHED)):
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, status)
    main(monkeypatch, "--config", str(config), "--resume", "auto")
    assert capsys.readouterr().out == "running\n"
    main(monkeypatch, "--config", str(config), "--out_dir", str(tmp_path / "b"))
    assert capsys.readouterr().out == "finished\n"


def test_command_forgets_the_marker_and_says_where_it_was(tmp_path, monkeypatch, capsys):
    write_status(tmp_path, to_be_continued("SIGUSR1"))
    for _ in range(2):  # also where there is none
        main(monkeypatch, "forget", "--out_dir", str(tmp_path))
        assert capsys.readouterr().out == f"{status_path(tmp_path)}\n"
        assert read_status(tmp_path) is None


def test_command_refuses_what_the_training_would_refuse(tmp_path, monkeypatch):
    write_status(tmp_path, RUNNING)
    with pytest.raises(CommandLineError, match="did you mean out_dir"):
        main(monkeypatch, "forget", "--outdir", str(tmp_path))
    assert read_status(tmp_path) == RUNNING


def test_command_prints_nothing_and_exits_with_1_where_nothing_is(tmp_path):
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "training.run_status"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
