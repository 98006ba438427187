"""The folder of one run: what lies where, who may start in it, and what is saved when.

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/ckpt_00000500.pt ...  checkpoints/best.pt
    status (run_status.py)  .lock (run_lock.py)

Only rank 0 looks at the disk or writes to it; what it decides, all ranks do.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from training import run_lock
from training.archive import Record
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
from training.run_status import RUNNING, write_status

# What a run leaves behind, by folder; a user's ckpt_good.pt beside it is not of them.
RUN_FILES = (
    ("checkpoints", r"(ckpt_\d+|best)\.pt(\.(superseded|damaged)(\.\d+)?)?"),
    ("tensorboard", r"events\.out\.tfevents\..*"),
    (".", r"metrics\.jsonl|status"),
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
        self._lock: IO[str] | None = None
        self._agents: Sequence[str] = ()

    def enter(self, resume: str | None, agents: Sequence[str]) -> tuple[str | None, bool]:
        """Let no other run use the folder as long as this process lives, and choose a checkpoint.

        Args:
            resume: of the options.
            agents: `run_lock.agent()` of every rank.

        Returns:
            The checkpoint to go on from, or None for a fresh start; and whether the run before was
            of this same launch, whose ranks were started anew: they go on as by "auto".

        Raises:
            CommandLineError: another run uses the folder, or it cannot be created.
            CheckpointError: the given checkpoint, or every one in the folder, cannot be read.
        """
        if resume is not None and resume != "auto":
            verify(Path(resume))  # before a folder is made for a misspelt name
        self._lock = run_lock.lock(self.path)
        self._agents = agents
        is_restarted = run_lock.is_same_launch(self._lock, agents)
        # As this launch's own only once it is claimed: until then it may hold another run.
        run_lock.sign(self._lock, agents if is_restarted else ())
        if is_restarted or resume == "auto":
            given = None if resume == "auto" else resume  # if it was lost before its first save
            return self._newest_checkpoint() or given, is_restarted
        return resume, False

    def _newest_checkpoint(self) -> str | None:
        """The checkpoint of most steps, best.pt included; damaged ones are set aside on the way."""
        if self.best.exists():
            self._is_whole(self.best)
        found = self._found()
        for _, path in reversed(found):
            if self._is_whole(path):
                return str(path)
        if found:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} can be read: start anew with --overwrite, "
                "or choose another --out_dir"
            )
        return None

    def last_good_checkpoint(self) -> str | None:
        """The newest checkpoint whose last step had an update, or None."""
        for _, path in reversed(self._found()):
            if self._is_whole(path) and load_checkpoint(path).get("skipped_in_a_row", 0) == 0:
                return str(path)
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
            write_status(self.path, RUNNING)
            if self._lock is not None:
                run_lock.sign(self._lock, self._agents)
        except OSError as error:
            raise CommandLineError(f"cannot use out_dir {self.path}: {error}") from error
        return self.set_aside_later(iteration, resumed_from)

    def set_aside_later(self, iteration: int, resumed_from: str | None) -> bool:
        """After a resume from an older checkpoint, the later ones belong to another history.

        Returns:
            Whether there is a best.pt.
        """
        for number, path in self._found():
            if number > iteration and _set_aside(path, "superseded"):
                say(f"set aside {path}: later than {resumed_from}")
        return self.best.exists()

    def save(
        self,
        checkpoint: Mapping[str, Any],
        pieces: Iterable[tuple[Record, Tensor]],
        is_best: bool,
        is_due: bool,
    ) -> str | None:
        """Write the numbered checkpoint of this iteration, best.pt, or both.

        Returns:
            None, or why it could not be written. The training can go on: the files that were
            there are still there.
        """
        iteration = checkpoint["iteration"]
        numbered = checkpoint_path(self.checkpoints, iteration)
        try:
            # The folder may have vanished meanwhile: the rest of the run can still be kept.
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save(checkpoint, numbered if is_due else self.best, pieces)
            if is_best and is_due:
                copy_whole(numbered, self.best)
            if is_due:
                delete_old(self.checkpoints, self.keep_checkpoints)
        except OSError as error:
            return f"checkpoint of step {iteration} not saved in {self.checkpoints}: {error}"
        return None

    def write_status(self, status: str) -> None:
        """Say to launchers how the run stands; a full disk keeps the last word."""
        try:
            write_status(self.path, status)
        except OSError as error:
            say(f"{self.path}: the status {status!r} is not written: {error}")

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint verifies; if not, it is set aside and named."""
        try:
            verify(path)
        except CheckpointError as error:
            aside = _set_aside(path, "damaged")
            say(f"not resumed from: {error}" + (f"; set aside as {aside.name}" if aside else ""))
            return False
        return True

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
            for path in (self.path / folder).glob("*"):
                if re.fullmatch(pattern, path.name):
                    path.unlink()


def _set_aside(path: Path, why: str) -> Path | None:
    """Rename a checkpoint that nothing shall find any more, and that is not ours to delete.

    Returns:
        The new name; None where the folder may not be written to.
    """
    for number in itertools.count():
        aside = path.with_name(f"{path.name}.{why}{f'.{number}' if number else ''}")
        if not aside.exists():
            try:
                return path.rename(aside)
            except OSError:
                return None
    raise AssertionError("unreachable")
