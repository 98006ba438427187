"""Checkpoint files: written whole or not at all, verified, and read without pickle's powers.

A file is a plain dict that `torch.load(path, weights_only=True, mmap=True)` reads:

    format_version                               of this layout
    model                                        name -> tensor, no wrapper's prefix in the names
    optimizer                                    name -> state of that parameter, full tensors
    iteration, best_val_loss                     how far the run is
    skipped_steps, skipped_in_a_row              updates left out because a gradient was not finite
    config                                       all options, flat
    tokenizer                                    the text of tokenizer.json
    scaler                                       of float16, which is not offered: None
    rng                                          random generators, a list by rank
"""

import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

FORMAT_VERSION = 1
REQUIRED_KEYS = (
    "model",
    "optimizer",
    "iteration",
    "best_val_loss",
    "config",
    "tokenizer",
    "rng",
)
# How names of files end that are being written.
HALF_WRITTEN = ".tmp"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message says which file, and why."""


def save(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a file that is complete under its name from the first moment on.

    It is written beside its name, flushed to the disk, then renamed.

    Raises:
        OSError: disk full, no permission, ...; nothing is left under either name.
    """
    with _new_file(path) as temporary:
        try:
            with open(temporary, "wb") as file:
                torch.save(dict(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:  # torch's writer hides the operating system's error
            raise OSError(f"cannot write {path}: {_root_cause(error)}") from error


def copy_whole(source: Path, path: Path) -> None:
    """Give a saved file a second name; where the file system has no links, copy it.

    Raises:
        OSError: as `save`.
    """
    with _new_file(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A name to write under; what is there at the end gets the name `path`, or is deleted."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{HALF_WRITTEN}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def verify(path: Path) -> None:
    """Read a checkpoint through and compare every record with its checksum.

    Raises:
        CheckpointError: as `load_checkpoint`, or a record is not what was written.
    """
    load_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        try:
            damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            damaged = str(error)
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} has another checksum than was written")


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint; tensors stay in the file until they are touched.

    Raises:
        CheckpointError: missing, damaged, not a checkpoint, or it wants to run code.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist{_what_is_there(path)}")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is damaged or no checkpoint: it is not a complete archive")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint of train_ddp.py ({_root_cause(error)})"
        ) from error
    if not isinstance(checkpoint, dict) or "format_version" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of train_ddp.py")
    if checkpoint["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {checkpoint['format_version']}, this program reads {FORMAT_VERSION}"
        )
    if missing := [key for key in REQUIRED_KEYS if key not in checkpoint]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return checkpoint


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Name of the checkpoint after so many steps."""
    return folder / f"ckpt_{iteration:08d}.pt"


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoints in a folder with their iterations, in the order of the numbers."""
    found = []
    for path in folder.glob("ckpt_*.pt"):
        if match := re.fullmatch(r"ckpt_(\d+)\.pt", path.name):
            found.append((int(match[1]), path))
    return sorted(found)


def delete_old(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints; best.pt is not one of them."""
    for _, path in numbered_checkpoints(folder)[:-keep]:
        path.unlink(missing_ok=True)


def _root_cause(error: BaseException) -> str:
    text = str(error.__context__ or error) or type(error).__name__
    return text.splitlines()[0][:200]


def _what_is_there(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    others = sorted(other.name for other in path.parent.glob("*.pt"))
    return f"; {path.parent} has {', '.join(others)}" if others else ""
