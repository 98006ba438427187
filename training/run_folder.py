"""The folder of one run: what lies where, who may start in it, and what is saved when.

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/ckpt_00000500.pt ...  checkpoints/best.pt

Only rank 0 looks at the disk or writes to it; what it decides, all ranks do.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    delete_old,
    load_checkpoint,
    numbered_checkpoints,
    save,
)
from training.command_line import CommandLineError


class RunFolder:
    """Paths and rules of `out_dir`.

    Args:
        path: the folder; need not exist yet.
        keep_checkpoints: newest checkpoints to keep.
    """

    def __init__(self, path: str, keep_checkpoints: int) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.config = self.path / "config.yaml"
        self.best = self.checkpoints / "best.pt"
        self.keep_checkpoints = keep_checkpoints

    def choose_checkpoint(self, resume: str | None) -> str | None:
        """The checkpoint to go on from, or None for a fresh start.

        With "auto" a newest checkpoint that cannot be read is reported, and the one before it
        is taken. A path that is given is taken or refused.

        Raises:
            CheckpointError: the given checkpoint, or every one in the folder, cannot be read.
        """
        if resume is None:
            return None
        if resume != "auto":
            load_checkpoint(resume)
            return resume
        found = numbered_checkpoints(self.checkpoints)
        for _, path in reversed(found):
            try:
                load_checkpoint(path)
                return str(path)
            except CheckpointError as error:
                print(f"not resumed from: {error}", flush=True)
        if found:
            raise CheckpointError(f"no checkpoint in {self.checkpoints} can be read")
        return None

    def claim(self, resume_iteration: int | None, overwrite: bool) -> None:
        """Make the folder this run's own.

        Args:
            resume_iteration: steps that are done already; None for a fresh start.
            overwrite: delete the run that the folder holds.

        Raises:
            CommandLineError: the folder holds a run and neither resume nor overwrite is given, or
                it cannot be created.
        """
        found = numbered_checkpoints(self.checkpoints)
        if resume_iteration is None and found and not overwrite:
            raise CommandLineError(
                f"{self.path} holds a run of {found[-1][0]} iterations: go on with --resume auto, "
                "start anew with --overwrite true, or choose another --out_dir"
            )
        try:
            if resume_iteration is None:
                self._delete_run()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._set_aside_after(resume_iteration)
        except OSError as error:
            raise CommandLineError(f"cannot use out_dir {self.path}: {error}") from error

    def save(self, checkpoint: Mapping[str, Any], is_best: bool, is_due: bool) -> str | None:
        """Write best.pt, the numbered checkpoint of this iteration, or both.

        Returns:
            None, or why it could not be written. The training can go on: the files that were
            there are still there.
        """
        iteration = checkpoint["iteration"]
        try:
            if is_best:
                save(checkpoint, self.best)
            if is_due:
                save(checkpoint, checkpoint_path(self.checkpoints, iteration))
                delete_old(self.checkpoints, self.keep_checkpoints)
        except OSError as error:
            return f"checkpoint of step {iteration} not saved: {error}"
        return None

    def _delete_run(self) -> None:
        for folder in (self.checkpoints, self.tensorboard):
            if folder.exists():
                shutil.rmtree(folder)
        self.metrics.unlink(missing_ok=True)

    def _set_aside_after(self, iteration: int | None) -> None:
        """After a resume from an older checkpoint the later ones belong to another history."""
        if iteration is None:
            return
        for number, path in numbered_checkpoints(self.checkpoints):
            if number > iteration:
                path.rename(path.with_name(path.name + ".superseded"))
                print(f"set aside {path}: later than the checkpoint resumed from", flush=True)
