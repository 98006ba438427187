"""Make a folder of token files that is either complete or not there.

It grows under a temporary name beside its own and is renamed when it is complete. So what is
killed half-way leaves nothing that looks whole, of two that make the same folder one wins and
the other notices, and whoever finds the folder can read it. What a killed process has left is
removed by the next one that makes the same folder.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EEXIST, ENOTEMPTY
from fnmatch import fnmatch
from pathlib import Path

from data.errors import CorpusError, FolderExistsError
from data.meta import FILE_NAME as META

OWN_FILES = ("train*.npy", "val*.npy", "tokenizer.json", META)


@contextmanager
def new_folder(out_dir: str | Path, overwrite: bool) -> Iterator[Path]:
    """Hand out a temporary folder that takes the name `out_dir` when the block ends well.

    With `overwrite`, token files that have that name are replaced at that moment, not before.
    When the block ends in an error, or is interrupted, the temporary folder is removed.

    Raises:
        FolderExistsError: token files of that name are there, or have come meanwhile.
        CorpusError: something else of that name is there; or writing failed, in the block or
            here, for instance on a full disk.
    """
    target = Path(out_dir).resolve()
    temporary = _sibling(target, "preparing")
    try:
        _refuse_to_replace(target, out_dir, overwrite)
        _remove_leftovers(target)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if overwrite and target.exists():
            _exchange(temporary, target)
        else:
            temporary.rename(target)
        _sync(target.parent)
    except OSError as error:
        if error.errno in (EEXIST, ENOTEMPTY):
            raise _exists(out_dir) from None
        raise CorpusError(f"cannot write {out_dir}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_to_replace(target: Path, out_dir: str | Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise CorpusError(f"{out_dir} is a file: choose another --out_dir")
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    for name in names:
        if META not in names or not any(fnmatch(name, pattern) for pattern in OWN_FILES):
            raise CorpusError(
                f"{out_dir} holds {name}, which prepare.py did not write: choose another --out_dir"
            )
    if names and not overwrite:
        raise _exists(out_dir)


def _exchange(temporary: Path, target: Path) -> None:
    """Put the new folder in the old one's place; the old one comes back where that fails."""
    old = _sibling(target, "replaced")
    try:
        target.rename(old)
        temporary.rename(target)
    except BaseException:  # a signal may come between the two
        if not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old)


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of processes that were killed while they made `target`.

    Only of this machine: of another one that shares the disk, nobody here knows who lives.
    """
    pattern = rf"{re.escape(target.name)}\.preparing-(\d+)-{_machine()}-[0-9a-f]{{8}}"
    with suppress(OSError):  # a folder that cannot be listed
        for path in target.parent.iterdir():
            found = re.fullmatch(pattern, path.name)
            if found and not _is_alive(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _sibling(target: Path, purpose: str) -> Path:
    unique = f"{os.getpid()}-{_machine()}-{secrets.token_hex(4)}"
    return target.with_name(f"{target.name}.{purpose}-{unique}")


def _machine() -> str:
    """Where a process id means something: a start of a machine, and a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no Linux: as nowhere else
        place = secrets.token_hex(4)
    return hashlib.sha256(place.encode()).hexdigest()[:8]


def _sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(out_dir: str | Path) -> FolderExistsError:
    return FolderExistsError(
        f"{out_dir} holds token files already: choose another --out_dir or pass --overwrite"
    )
