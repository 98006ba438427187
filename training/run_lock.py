"""One run at a time in a run folder, and how a restarted run knows that the folder is its own.

Rank 0 holds a lock on `.lock` for as long as it lives; the kernel takes it back however the process
ends. Inside stand the process that holds it and the torchrun agents of its launch: when torchrun
starts its ranks anew, they find themselves there.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from training.command_line import CommandLineError
from training.console import say

# A rank 0 that was killed just now may still be giving back its memory.
SECONDS_FOR_THE_LAST_ONE = 10.0
# Of file systems that offer no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(folder: Path) -> IO[str]:
    """Take the folder's lock.

    Returns:
        The open file; the lock is held until it is closed or the process ends.

    Raises:
        CommandLineError: another run holds it, or the file cannot be opened.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise CommandLineError(f"cannot use out_dir {folder}: {error}") from error
    deadline = time.monotonic() + SECONDS_FOR_THE_LAST_ONE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = _read(file)
                raise CommandLineError(
                    f"{folder} is in use by another run (process {holder.get('pid', 'unknown')} "
                    f"on {holder.get('host', 'unknown')}): wait for it, or choose another out_dir"
                ) from None
            time.sleep(0.2)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise CommandLineError(f"cannot lock {path}: {error}") from error
            say(f"{folder} is on a file system without locks: let no second run use it")
            return file


def is_same_launch(file: IO[str], agents: Sequence[str]) -> bool:
    """Whether the run that had the lock before was of the same launch as this one.

    Args:
        file: of `lock`.
        agents: `agent()` of every rank of this run.
    """
    before = _read(file).get("agents")
    return isinstance(before, list) and not set(agents).isdisjoint(set(before) - {""})


def sign(file: IO[str], agents: Sequence[str]) -> None:
    """Write into the lock whose it is; on a full disk nothing is written."""
    try:
        file.seek(0)
        file.truncate()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "agents": sorted(set(agents))}
        file.write(json.dumps(holder))
        file.flush()
    except OSError as error:
        say(f"{file.name} cannot be written: {error}")


def agent() -> str:
    """Which torchrun started this process; empty if none did.

    A process id alone would be another's after a while, and is the same in every container.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        return ""
    return f"{socket.gethostname()} {boot} {parent} {started}"


def _read(file: IO[str]) -> dict[str, object]:
    try:
        file.seek(0)
        holder = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
