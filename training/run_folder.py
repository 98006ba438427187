"""The folder of one run: what lies where, who may start in it, and what is saved when.

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/ckpt_00000500.pt ...  checkpoints/best.pt

Only rank 0 looks at the disk or writes to it; what it decides, all ranks do.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint_file import (
    HALF_WRITTEN,
    CheckpointError,
    checkpoint_path,
    copy_whole,
    delete_old,
    load_checkpoint,
    numbered_checkpoints,
    save,
    verify,
)
from training.command_line import CommandLineError
from training.console import say

# What a run leaves behind, by folder.
RUN_FILES = (
    ("checkpoints", "ckpt_*.pt"),
    ("checkpoints", "ckpt_*.pt.superseded"),
    ("checkpoints", "best.pt"),
    ("checkpoints", "best.pt.superseded"),
    ("tensorboard", "events.out.tfevents.*"),
    (".", "metrics.jsonl"),
)


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

        With "auto" it is the one of most steps, best.pt included. One that is damaged is reported
        and the one before it is taken. A path that is given is taken or refused.

        Raises:
            CheckpointError: the given checkpoint, or every one in the folder, cannot be read.
        """
        if resume is None:
            return None
        if resume != "auto":
            verify(Path(resume))
            return resume
        found = self._found()
        for _, path in reversed(found):
            try:
                verify(path)
                return str(path)
            except CheckpointError as error:
                say(f"not resumed from: {error}")
        if found:
            raise CheckpointError(f"no checkpoint in {self.checkpoints} can be read")
        return None

    def claim(self, resumed_from: str | None, iteration: int, overwrite: bool) -> bool:
        """Make the folder this run's own.

        Args:
            resumed_from: the checkpoint that the run goes on from; None for a fresh start.
            iteration: steps that are done already.
            overwrite: delete the run that the folder holds.

        Returns:
            Whether it holds a best.pt.

        Raises:
            CommandLineError: the folder holds another run than the one that goes on and overwrite
                is not given, or it cannot be created.
        """
        found = self._found()
        goes_on = resumed_from is not None and self._holds(Path(resumed_from))
        if found and not goes_on and not overwrite:
            raise CommandLineError(
                f"{self.path} holds a run of {found[-1][0]} steps: go on with --resume auto, "
                "start anew with --overwrite, or choose another --out_dir"
            )
        try:
            if not goes_on:
                self._delete_run()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for half_written in self.checkpoints.glob(f".*{HALF_WRITTEN}"):
                half_written.unlink()
            for number, path in found if goes_on else []:
                # After a resume from an older one, the later ones belong to another history.
                if number > iteration:
                    path.rename(path.with_name(path.name + ".superseded"))
                    say(f"set aside {path}: later than {resumed_from}")
        except OSError as error:
            raise CommandLineError(f"cannot use out_dir {self.path}: {error}") from error
        return self.best.exists()

    def save(self, checkpoint: Mapping[str, Any], is_best: bool, is_due: bool) -> str | None:
        """Write the numbered checkpoint of this iteration, best.pt, or both.

        Returns:
            None, or why it could not be written. The training can go on: the files that were
            there are still there.
        """
        iteration = checkpoint["iteration"]
        numbered = checkpoint_path(self.checkpoints, iteration)
        try:
            if is_due:
                save(checkpoint, numbered)
            if is_best and is_due:
                copy_whole(numbered, self.best)
            elif is_best:
                save(checkpoint, self.best)
            if is_due:
                delete_old(self.checkpoints, self.keep_checkpoints)
        except OSError as error:
            return f"checkpoint of step {iteration} not saved: {error}"
        return None

    def _found(self) -> list[tuple[int, Path]]:
        """All checkpoints in the folder with their iterations, in this order."""
        found: list[tuple[int, Path]] = []
        if self.best.exists():
            try:
                found.append((load_checkpoint(self.best)["iteration"], self.best))
            except CheckpointError as error:
                say(f"passed over: {error}")
        # Stable: of two with one iteration the numbered one comes last.
        return sorted([*found, *numbered_checkpoints(self.checkpoints)], key=lambda pair: pair[0])

    def _holds(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def _delete_run(self) -> None:
        """Delete what a run writes, and nothing else that may lie in the folder."""
        for folder, pattern in RUN_FILES:
            for path in (self.path / folder).glob(pattern):
                path.unlink()
