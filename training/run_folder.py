"""The folder of one run: what lies where, who may start in it, and what is saved when.

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/ckpt_00000500.pt ...  checkpoints/best.pt
    status (run_status.py)  .lock (run_lock.py)  profile/rank0.json.gz (profiler.py)

Only rank 0 looks at the disk or writes to it, but for profiles; what it decides, all ranks do.
"""

import itertools
import os
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
    ("profile", r"rank\d+\.(json\.gz|txt)"),
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
        self.profile = self.path / "profile"
        self.config = self.path / "config.yaml"
        self.best = self.checkpoints / "best.pt"
        self.keep_checkpoints = keep_checkpoints
        self._lock: IO[str] | None = None
        self._agents: Sequence[str] = ()

    def enter(
        self, resume: str | None, agents: Sequence[str], init_from: str | None = None
    ) -> tuple[str | None, bool]:
        """Let no other run use the folder as long as this process lives, and choose a checkpoint.

        Args:
            resume: of the options.
            agents: `run_lock.agent()` of every rank.
            init_from: of the options; not looked at where the folder may hold what wins over it.

        Returns:
            The checkpoint to go on from, or None for a fresh start; and whether the run before was
            of this same launch, whose ranks were started anew: they go on as by "auto".

        Raises:
            CommandLineError: another run uses the folder, or it cannot be created.
            CheckpointError: the given checkpoint, or every one in the folder, cannot be read.
        """
        given = None if resume == "auto" else resume
        if not os.path.exists(self.path) and (needed := given or init_from):
            verify(Path(needed))  # before a folder is made for a misspelt name
        self._lock = run_lock.lock(self.path)
        self._agents = agents
        is_restarted = run_lock.is_same_launch(self._lock, agents)
        # As this launch's own only once it is claimed: until then it may hold another run.
        run_lock.sign(self._lock, agents if is_restarted else ())
        # A launch that was started anew before its first save begins where it began.
        newest = self._newest_checkpoint() if is_restarted or resume == "auto" else None
        if newest is None and given is not None:
            verify(Path(given))
        return newest or given, is_restarted

    def _newest_checkpoint(self) -> str | None:
        """The checkpoint of most steps that verifies, best.pt included.

        Those that do not are set aside, if there is another: else it may be the machine that fails.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be read.
        """
        failures: list[tuple[Path, str]] = []
        newest = None
        for _, path in reversed(self._found()):
            if newest is not None and path != self.best:
                continue
            try:
                verify(path)
                newest = newest or str(path)
            except CheckpointError as error:
                failures.append((path, str(error)))
        if failures and newest is None:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints} can be read ({failures[0][1]}): start anew "
                "with --overwrite, or choose another --out_dir"
            )
        for path, failure in failures:
            aside = _set_aside(path, "damaged")
            say(f"not resumed from: {failure}" + (f"; set aside as {aside.name}" if aside else ""))
        return newest

    def last_good_checkpoint(self) -> str | None:
        """The newest checkpoint whose last step had an update; else the newest; or None.

        One without an update in its last steps has the weights of the last one that had.
        """
        others = []
        for _, path in reversed(self._found()):
            try:
                verify(path)
            except CheckpointError as error:
                say(f"passed over: {error}")
                continue
            if load_checkpoint(path).get("skipped_in_a_row", 0) == 0:
                return str(path)
            others.append(str(path))
        return others[0] if others else None

    def claim(self, resumed_from: str | None, iteration: int, overwrite: bool) -> float | None:
        """Make the folder this run's own.

        Args:
            resumed_from: the checkpoint that the run goes on from; None for a fresh start.
            iteration: steps that are done already.
            overwrite: delete the run that the folder holds.

        Returns:
            The validation loss of its best.pt; None without one.

        Raises:
            CommandLineError: the folder holds another run than the one that goes on and overwrite
                is not given, or it cannot be created.
        """
        goes_on = resumed_from is not None and self._holds(Path(resumed_from))
        self._refuse_another_run(goes_on, overwrite)
        try:
            if not goes_on:
                self._delete_run()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for half_written in self.checkpoints.glob(f".*{HALF_WRITTEN}"):
                half_written.unlink()
        except OSError as error:
            raise CommandLineError(f"cannot use out_dir {self.path}: {error}") from error
        self.write_status(RUNNING)
        if self._lock is not None:
            run_lock.sign(self._lock, self._agents)
        return self.set_aside_later(iteration, resumed_from)

    def look(self, resume: str | None, overwrite: bool) -> None:
        """Refuse what `enter` and `claim` would refuse, and leave the folder as it is.

        Checkpoints of the folder itself are not read through.

        Args:
            resume: of the options.
            overwrite: of the options.

        Raises:
            CommandLineError: the folder holds another run than the one that goes on, or it could
                not be created.
            CheckpointError: the given checkpoint cannot be read.
        """
        try:
            there = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        except OSError as error:  # too long a name
            raise CommandLineError(f"cannot use out_dir {self.path}: {error.strerror}") from error
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            reason = "cannot be written to" if there.is_dir() else "is no folder"
            raise CommandLineError(f"cannot use out_dir {self.path}: {there} {reason}")
        goes_on = resume == "auto" and bool(self._found())
        if resume not in (None, "auto"):
            verify(Path(resume))
            goes_on = self._holds(Path(resume))
        self._refuse_another_run(goes_on, overwrite)

    def _refuse_another_run(self, goes_on: bool, overwrite: bool) -> None:
        if goes_on or overwrite:
            return
        if found := self._found():
            raise CommandLineError(
                f"{self.path} holds a run of {found[-1][0]} steps: go on with --resume auto, "
                "start anew with --overwrite, or choose another --out_dir"
            )
        aside = [*self.checkpoints.glob("*.damaged*"), *self.checkpoints.glob("*.superseded*")]
        if aside:
            raise CommandLineError(
                f"{self.checkpoints} holds checkpoints that were set aside, {aside[0].name}: move "
                "them away, start anew with --overwrite, or choose another --out_dir"
            )

    def set_aside_later(self, iteration: int, resumed_from: str | None) -> float | None:
        """After a resume from an older checkpoint, the later ones belong to another history.

        Returns:
            The validation loss of best.pt; None without one.
        """
        for number, path in self._found():
            if number > iteration and _set_aside(path, "superseded"):
                say(f"set aside {path}: later than {resumed_from}")
        try:
            best: float = load_checkpoint(self.best)["best_val_loss"]
        except CheckpointError:
            return None
        return best

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

    def _found(self) -> list[tuple[int, Path]]:
        """All checkpoints in the folder with their iterations, in this order."""
        found: list[tuple[int, Path]] = []
        if self.best.exists():
            try:
                iteration = load_checkpoint(self.best)["iteration"]
            except CheckpointError:
                iteration = 0  # whatever it is, it is there
            found.append((iteration, self.best))
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
