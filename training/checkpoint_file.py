"""Checkpoint files: written whole or not at all, verified, and read without pickle's powers.

A file is a plain dict that `torch.load(path, weights_only=True, mmap=True)` reads:

    format_version                               of this layout
    model                                        name -> tensor, no wrapper's prefix in the names
    optimizer                                    name -> state of that parameter, full tensors
    iteration, samples                           steps done, and where they are in the data
    best_val_loss                                the lowest so far
    skipped_steps, skipped_in_a_row              updates left out, and how many were the last ones
    recent_grad_norms                            norms that the next ones are compared with
    rollbacks                                    how often the run went back to a checkpoint
    config                                       all options, flat
    tokenizer                                    the text of tokenizer.json
    data_fingerprint                             of the token files that the position is in
    scaler                                       the loss's scale and its growth; None without one
    rng                                          random generators, a list by rank
"""

import contextlib
import os
import re
import shutil
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from training.archive import ArchiveWriter, Record
from training.archive_check import ArchiveError, verify_archive
from training.write_behind import WriteBehind

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


def save(
    checkpoint: Mapping[str, Any], path: Path, pieces: Iterable[tuple[Record, Tensor]] = ()
) -> None:
    """Write a file that is complete and read back under its name from the first moment on.

    It is written beside its name, flushed to the disk, verified, then renamed. It is verified while
    it is being flushed: either way what is read comes from the same pages of memory.

    Args:
        checkpoint: see the top of this file; tensors that come later are `Record`s.
        path: of the file.
        pieces: the tensors that the records stand for, one at a time.

    Raises:
        OSError: disk full, no permission, other bytes read than written, ...; nothing is left
            under the temporary name, and what was under the other is still there.
    """
    with _new_file(path) as temporary, open(temporary, "wb") as file:
        with WriteBehind(file) as behind:
            archive = ArchiveWriter(behind, dict(checkpoint))
            for record, tensor in pieces:
                archive.write(record, tensor)
            archive.close()
        with _flushed_meanwhile(file):
            try:
                verify_archive(temporary)
                _read(temporary)
            except (ArchiveError, CheckpointError) as error:
                raise OSError(f"{path} reads back other than written: {error}") from error


@contextlib.contextmanager
def _flushed_meanwhile(file: BinaryIO) -> Iterator[None]:
    """Bring what was written to the disk, which needs no processor, beside what is done inside.

    Raises:
        OSError: it cannot be brought there.
    """
    failures: list[OSError] = []

    def flush() -> None:
        try:
            os.fsync(file.fileno())
        except OSError as failure:
            failures.append(failure)

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


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
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())


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
    """Read a checkpoint through and compare all that it holds with its checksums.

    Raises:
        CheckpointError: as `load_checkpoint`, or a byte is not what was written, or weights and
            optimizer state do not fit each other.
    """
    checkpoint = load_checkpoint(path)
    try:
        verify_archive(path)
    except ArchiveError as error:  # it names the file
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    weights = checkpoint["model"]
    for name, entries in checkpoint["optimizer"].items():
        for key, value in entries.items():
            # An entry has the weight's shape, or, one a row or a matrix, the beginning of it.
            fits = name in weights and (
                not isinstance(value, Tensor) or value.shape == weights[name].shape[: value.dim()]
            )
            if not fits:
                raise CheckpointError(f"{path} is damaged: no weight fits {key} of {name}")


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint; tensors stay in the file until they are touched.

    Raises:
        CheckpointError: missing, damaged, not a checkpoint, or it wants to run code.
    """
    path = Path(path)
    try:
        # Opened, not asked for: where a network file system remembers for a while that there was
        # no such file, a rank would otherwise refuse what rank 0 has found.
        open(path, "rb").close()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} does not exist{_what_is_there(path)}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder{_what_to_name_instead(path)}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    checkpoint = _read(path)
    if not isinstance(checkpoint, dict) or "format_version" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of train_ddp.py")
    if checkpoint["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {checkpoint['format_version']}, this program reads {FORMAT_VERSION}"
        )
    if missing := [key for key in REQUIRED_KEYS if key not in checkpoint]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return checkpoint


def archive_end(path: Path) -> str:
    """Length and last bytes of a file, where its checksums stand: other checkpoints have others."""
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 512))
        return f"{length} {file.read().hex()}"


def _read(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is damaged or no checkpoint: it is not a complete archive")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint of train_ddp.py ({_root_cause(error)})"
        ) from error


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


def _what_to_name_instead(folder: Path) -> str:
    """The checkpoint that was probably meant by the folder of a run, or of its checkpoints."""
    places = (folder, folder / "checkpoints")
    best = [place / "best.pt" for place in places if (place / "best.pt").is_file()]
    newest = [path for place in places for _, path in reversed(numbered_checkpoints(place))]
    found = [*best, *newest, *sorted(folder.glob("*.pt"))]
    return f": name a checkpoint in it, such as {found[0]}" if found else ", not a checkpoint"
