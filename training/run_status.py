"""The marker in a run folder that says how the run stands, for whoever started it.

    python -m training.run_status [options of train_ddp.py]           # what does the marker say?
    python -m training.run_status forget [options of train_ddp.py]    # delete it, print its path

`runs/NAME/status` holds one line: `running`, `finished`, or `to be continued: REASON`. A run that
crashes or is killed leaves `running`. A launcher that is about to start a run forgets the marker
first: what it finds afterwards then was written by this very run, whatever the clocks say.

The options are those of the run, because a configuration file may be what names its folder. Exit
status of the first form: 0, or 1 where there is no marker, and nothing is printed.
"""

import contextlib
import os
import sys
from pathlib import Path

from training.command_line import run
from training.config import load_config

RUNNING = "running"
FINISHED = "finished"
TO_BE_CONTINUED = "to be continued"


def to_be_continued(reason: str) -> str:
    """Status of a run that has saved and left before its last step."""
    return f"{TO_BE_CONTINUED}: {reason}"


def status_path(out_dir: str | Path) -> Path:
    """Where the marker of a run folder is."""
    return Path(out_dir) / "status"


def write_status(out_dir: str | Path, status: str) -> None:
    """Replace the marker as a whole: a reader finds the old line or the new one.

    Args:
        out_dir: the run folder; must exist.
        status: RUNNING, FINISHED, or what `to_be_continued` makes.

    Raises:
        OSError: it cannot be written; the old marker is still there.
    """
    path = status_path(out_dir)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{status}\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_status(out_dir: str | Path) -> str | None:
    """The marker's line, or None where there is none that can be read."""
    try:
        return status_path(out_dir).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def main() -> None:
    """Print the status of the run folder that the options mean, or forget it."""
    arguments = sys.argv[1:]
    forgets = arguments[:1] == ["forget"]
    out_dir = load_config(__doc__ or "", arguments[forgets:]).run.out_dir
    if forgets:
        path = status_path(out_dir)
        path.unlink(missing_ok=True)
        print(path)
        return
    status = read_status(out_dir)
    if status is None:
        sys.exit(1)
    print(status)


if __name__ == "__main__":
    run(main)
