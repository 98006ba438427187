"""Checkpoints: one self-contained file each, written whole or not at all, read without pickle's
powers.

A checkpoint holds everything that the next step depends on: weights, optimizer state by parameter
name, the iteration (from which learning rate and data follow), and every rank's random generators.
It knows nothing of how many ranks wrote it. See DESIGN section 3 for the keys.
"""

import contextlib
import os
import random
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.tokenizer import fingerprint
from dist.collectives import gather_objects, rank
from dist.process_group import World, set_random_seed
from dist.sharded_optimizer import NamedState, ShardedOptimizer

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
# Options that fix which windows a step trains on.
DATA_ORDER = ("seed", "batch_size", "max_seq_len")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message says which file, and why."""


def collect(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer_json: str,
) -> dict[str, Any]:
    """Put a checkpoint together on rank 0; every rank must call it.

    Args:
        model: unwrapped.
        optimizer: over its parameters, sharded or not.
        progress: iteration, best_val_loss, skipped_steps and skipped_in_a_row.
        config: all options, flat.
        tokenizer_json: of the data.

    Returns:
        On rank 0 a dict that owns its memory (tensors on the CPU); on the others an empty one.
    """
    optimizer_state = _optimizer_state(optimizer, model)
    rng = gather_objects(_rng_state())
    if rank() != 0:
        return {}
    return {
        "format_version": FORMAT_VERSION,
        "model": _copied(model.state_dict()),
        "optimizer": optimizer_state,
        **progress,
        "config": dict(config),
        "tokenizer": tokenizer_json,
        "scaler": None,  # of float16, which is not offered yet
        "rng": rng,
    }


def restore(
    checkpoint: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    seed: int,
) -> None:
    """Take weights, optimizer state and random generators from a checkpoint, on every rank.

    At the world size that wrote it, each rank's generators go on where they were. At another
    there is no such place, and they start from a seed that this iteration alone has.

    Raises:
        CheckpointError: the checkpoint is another model's; names the first difference.
    """
    load_weights(checkpoint, model)
    named = list(model.named_parameters())
    state = checkpoint["optimizer"]
    if unknown := sorted(state.keys() - dict(named).keys()):
        raise CheckpointError(f"the checkpoint has optimizer state for {unknown[0]}, not here")
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_state(named, state)
    else:
        for name, parameter in named:
            if name in state:
                optimizer.state[parameter] = {
                    key: _placed(key, value, parameter) for key, value in state[name].items()
                }
    if len(checkpoint["rng"]) == world.world_size:
        _set_rng_state(checkpoint["rng"][world.rank])
    else:
        set_random_seed(seed + 1_000_003 * checkpoint["iteration"], world.rank)


def check_tokenizer(checkpoint: Mapping[str, Any], tokenizer_json: str) -> None:
    """Refuse to train on with ids that mean other text.

    Raises:
        CheckpointError: the data folder's tokenizer is not the checkpoint's.
    """
    if fingerprint(checkpoint["tokenizer"]) != fingerprint(tokenizer_json):
        raise CheckpointError(
            "the data folder was prepared with another tokenizer than the checkpoint's: "
            "give the data_dir that it was trained on"
        )


def check_data_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse options by which the steps already done would not be the first ones of this run.

    Raises:
        CheckpointError: names each such option with both values.
    """
    different = [name for name in DATA_ORDER if before[name] != now[name]]
    if (before["epochs"] is None) != (now["epochs"] is None):
        different.append("epochs")
    if different:
        said = ", ".join(f"{name} {before[name]} -> {now[name]}" for name in different)
        raise CheckpointError(
            f"{said}: this would change which text each step trains on, and some would be seen "
            "twice and some never; resume with the checkpoint's own values"
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Options that differ from those of the checkpoint, as `name: old -> new`."""
    return [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in now.items()
        if name not in ("resume", "overwrite") and before.get(name) != value
    ]


def load_weights(checkpoint: Mapping[str, Any], model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises:
        CheckpointError: names the first parameter that differs.
    """
    held, wanted = checkpoint["model"], model.state_dict()
    for name in [*wanted, *held]:
        ours, theirs = (
            tuple(tensors[name].shape) if name in tensors else "nothing"
            for tensors in (wanted, held)
        )
        if ours != theirs:
            raise CheckpointError(
                f"the checkpoint is another model's: {name} is {theirs} there and {ours} here"
            )
    model.load_state_dict(held)


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


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy to CPU memory of its own, tied tensors once: they stay tied in the file."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    copied = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        copied[name] = copies[place]
    return copied


def _optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> NamedState:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.gather_state(model.named_parameters())
    if rank() != 0:
        return {}
    return {
        name: {
            key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """A state entry beside its parameter; counters stay on the CPU, as torch.optim keeps them."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)


def _rng_state() -> dict[str, Any]:
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss_next],
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


def _root_cause(error: BaseException) -> str:
    text = str(error.__context__ or error) or type(error).__name__
    return text.splitlines()[0][:200]


def _what_is_there(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}"
    others = sorted(other.name for other in path.parent.glob("*.pt"))
    return f"; {path.parent} has {', '.join(others)}" if others else ""
