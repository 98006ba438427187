"""A folder that is complete or not there."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data import new_folder as new_folder_module
from data.errors import CorpusError, FolderExistsError
from data.new_folder import new_folder


def write_folder(out_dir, mark="new", overwrite=False):
    with new_folder(out_dir, overwrite) as folder:
        (folder / "train.npy").write_text(mark)
        (folder / "meta.json").write_text("{}")


def test_the_folder_has_its_name_only_once_it_is_complete(tmp_path):
    out_dir = tmp_path / "deep" / "mine"
    with new_folder(out_dir, overwrite=False) as folder:
        (folder / "train.npy").write_text("x")
        assert not out_dir.exists()
        assert folder.parent == out_dir.parent
    assert (out_dir / "train.npy").read_text() == "x"
    assert os.listdir(out_dir.parent) == ["mine"]


def test_an_existing_folder_is_refused_before_any_work(tmp_path):
    write_folder(tmp_path / "mine", "old")
    with (
        pytest.raises(FolderExistsError, match=r"holds token files already.*--overwrite"),
        new_folder(tmp_path / "mine", overwrite=False),
    ):
        pytest.fail("work began")
    assert os.listdir(tmp_path) == ["mine"]


def test_overwriting_replaces_the_old_folder_only_by_a_complete_one(tmp_path):
    out_dir = tmp_path / "mine"
    write_folder(out_dir, "old")
    (out_dir / "val_1.npy").write_text("a shard of the old one")
    with pytest.raises(RuntimeError), new_folder(out_dir, overwrite=True):
        raise RuntimeError
    assert (out_dir / "train.npy").read_text() == "old"
    write_folder(out_dir, "new", overwrite=True)
    assert (out_dir / "train.npy").read_text() == "new"
    assert sorted(os.listdir(out_dir)) == ["meta.json", "train.npy"]
    assert os.listdir(tmp_path) == ["mine"]


def test_a_signal_between_the_two_renames_leaves_the_old_folder(tmp_path, monkeypatch):
    write_folder(tmp_path / "mine", "old")
    rename = Path.rename

    def cut_short(path, target):
        if target == tmp_path / "mine" and ".preparing-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "mine", "new", overwrite=True)
    assert (tmp_path / "mine" / "train.npy").read_text() == "old"
    assert os.listdir(tmp_path) == ["mine"]


def temporary_of(pid: int, name: str = "mine", machine: str | None = None) -> str:
    here = new_folder_module._machine()
    return f"{name}.preparing-{pid}-{machine or here}-0123abcd"


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    left = temporary_of(ended.pid)
    others = [
        temporary_of(os.getpid()),
        temporary_of(1),
        temporary_of(ended.pid, name="mine2"),
        temporary_of(ended.pid, name="not.mine"),
        temporary_of(ended.pid, machine="89abcdef"),
        f"{left}.txt",
        f"mine.preparing-{ended.pid}-0123abcd",
    ]
    for name in (left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.npy").write_text("half")
    write_folder(tmp_path / "mine")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "mine"])


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_with_other_files_is_never_replaced(tmp_path, overwrite):
    write_folder(tmp_path / "mine")
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CorpusError, match=r"thesis\.txt, which prepare\.py did not write"):
        write_folder(tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "mine").mkdir()
    write_folder(tmp_path / "mine")
    assert (tmp_path / "mine" / "train.npy").exists()


def test_of_two_at_once_the_first_wins_and_the_second_says_so(tmp_path):
    out_dir = tmp_path / "mine"

    def lose() -> None:
        with new_folder(out_dir, overwrite=False) as folder:
            (folder / "train.npy").write_text("second")
            write_folder(out_dir, "first")

    with pytest.raises(FolderExistsError, match="holds token files already"):
        lose()
    assert (out_dir / "train.npy").read_text() == "first"
    assert os.listdir(tmp_path) == ["mine"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def fill() -> None:
        with new_folder(tmp_path / "mine", overwrite=False) as folder:
            (folder / "train.npy").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CorpusError, match=r"cannot write .*mine: No space left on device"):
        fill()
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CorpusError, match="is a file: choose another --out_dir"):
        write_folder(tmp_path / "file")
    with pytest.raises(CorpusError, match=r"cannot write .*Not a directory"):
        write_folder(tmp_path / "file" / "mine")
    assert os.listdir(tmp_path) == ["file"]
