"""How a run begins: afresh, from another run's weights, or where a checkpoint left off.

Rank 0 alone looks at the disk and decides; what it decides, all ranks do.
"""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data.tokens import EpochWindows
from dist.collectives import all_gather_objects
from training import checkpoint, resume
from training.bad_steps import DivergedError
from training.checkpoint_file import CheckpointError, archive_end, load_checkpoint, verify
from training.config import ScheduleConfig, write_config
from training.config_checks import with_length
from training.job import PROGRESS, Job
from training.run_lock import agent


def resume_or_start(job: Job, schedule: ScheduleConfig) -> None:
    """Go on from the checkpoint that the configuration asks for, or claim a fresh folder.

    Ranks that torchrun started anew, after one of them was lost, go on by themselves.

    Args:
        job: the run, fresh.
        schedule: as the user gave it.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
        CommandLineError: a folder that cannot be used.
    """
    config, folder, world = job.config.run, job.folder, job.world
    agents = all_gather_objects(agent())
    is_measured_anew = False
    enter = partial(folder.enter, config.resume, agents, config.init_from)
    path, is_restarted = world.on_rank_zero(enter)
    if path is not None:
        saved = load_alike(path)
        resume.check(
            saved,
            job.config.to_dict(),
            tokenizer_json=job.data.tokenizer_json,
            data_fingerprint=job.data_fingerprint,
            allowed=config.allow_changed,
        )
        restore(job, saved, schedule)
        job.say(f"resumed from {path} after {job.iteration} steps")
        now = job.config.to_dict()
        for change in resume.changes(
            saved,
            now,
            tokenizer_json=job.data.tokenizer_json,
            data_fingerprint=job.data_fingerprint,
        ):
            job.say(f"  changed since: {change}")
        for line in resume.schedule_changes(saved["config"], now, job.iteration):
            job.say(f"  {line}")
        is_measured_anew = resume.is_measured_anew(saved, now, job.data_fingerprint)
    elif config.init_from is not None:
        start_from_weights(job, config.init_from)
    overwrite = config.overwrite and not is_restarted
    # With nothing left to do, later checkpoints are no other history.
    last = sys.maxsize if path is not None and job.is_last else job.iteration
    best = world.on_rank_zero(partial(folder.claim, path, last, overwrite))
    # What was best may lie in another folder, have come later, or been measured otherwise.
    job.best_val_loss = math.inf if best is None or is_measured_anew else best
    if not (path is not None and job.is_last):
        # As it was asked for: filled in, a longer run made of this file would keep this one's ends.
        asked_for = replace(job.config, schedule=schedule)
        world.on_rank_zero(partial(write_config, asked_for, folder.config))


def load_alike(path: str) -> dict[str, Any]:
    """Load a checkpoint on every rank; every rank must call it.

    Raises:
        CheckpointError: it cannot be read, or is not the same file on all ranks.
    """
    saved = load_checkpoint(path)
    ends = all_gather_objects(archive_end(Path(path)))
    if len(set(ends)) > 1:
        raise CheckpointError(
            f"{path} is not the same file on all ranks: it must lie on a file system that all "
            "machines share"
        )
    return saved


def start_from_weights(job: Job, path: str) -> None:
    """Begin a new run with the weights of a checkpoint, and with nothing else of it."""
    job.world.on_rank_zero(partial(verify, Path(path)))
    saved = load_alike(path)
    resume.check_init(
        saved,
        job.config.to_dict(),
        tokenizer_json=job.data.tokenizer_json,
        allowed=job.config.run.allow_changed,
    )
    checkpoint.load_weights(saved, job.model)
    job.say(f"weights taken from {path}, of step {saved['iteration']}; all else begins anew")


def restore(
    job: Job, saved: dict[str, Any], schedule: ScheduleConfig, samples: int | None = None
) -> None:
    """Take over everything that a checkpoint holds.

    Args:
        job: the run.
        saved: the checkpoint.
        schedule: as the user gave it: how many steps an epoch still has may depend on the position.
        samples: position in the data, if it is not the checkpoint's.
    """
    checkpoint.restore(
        saved,
        model=job.model,
        optimizer=job.optimizer,
        scaler=job.scaler,
        world=job.world,
        seed=job.config.run.seed,
    )
    for name in PROGRESS:
        if name in saved:
            setattr(job, name, saved[name])
    job.samples = samples or resume.samples_done(saved, job.config.model.max_seq_len)
    if isinstance(job.windows, EpochWindows):
        asked_for = replace(job.config, schedule=schedule)
        job.config = with_length(asked_for, job.windows.num_windows, job.iteration, job.samples)


def go_back(job: Job, schedule: ScheduleConfig) -> None:
    """Return to the last good checkpoint after too many steps in a row were left out.

    The text that the run has seen since is passed over (as in PaLM, Chowdhery et al. 2022,
    arXiv:2204.02311, section 5.1): seen again, it would lead to the same place.

    Args:
        job: the run.
        schedule: as the user gave it.

    Raises:
        DivergedError: that is not wanted, was tried before, or there is no such checkpoint.
    """
    options = job.config.optimizer
    diverged = f"{job.skipped_in_a_row} steps in a row had no update, the last one step"
    diverged += f" {job.iteration}"
    advice = "resume from a checkpoint with a lower lr_max"
    if options.on_divergence == "stop":
        raise DivergedError(f"{diverged}: {advice}")
    if job.rollbacks > 0:
        raise DivergedError(f"{diverged}, again after going back to a checkpoint: {advice}")
    path = job.world.on_rank_zero(job.folder.last_good_checkpoint)
    if path is None:
        raise DivergedError(f"{diverged}, and there is no good checkpoint to go back to: {advice}")
    saved = load_alike(path)
    samples, skipped = job.samples, job.skipped_steps
    restore(job, saved, schedule, samples)
    job.skipped_steps, job.skipped_in_a_row = skipped, 0
    job.rollbacks += 1
    best = job.world.on_rank_zero(partial(job.folder.set_aside_later, job.iteration, path))
    job.best_val_loss = math.inf if best is None else best
    job.say(f"{diverged}: going back to {path}, and past the text seen since")
