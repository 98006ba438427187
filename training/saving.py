"""When a checkpoint is made of a run, and what a save that failed means for the next one."""

from training import checkpoint
from training.job import Job


def save_checkpoint(job: Job, new_best: float | None, is_due: bool) -> None:
    """Save a checkpoint of this step; without --async_checkpoint off it is written meanwhile.

    Args:
        job: the run.
        new_best: the lowest validation loss so far, if it was measured just now.
        is_due: write a numbered checkpoint too, not best.pt alone.
    """
    await_checkpoint(job)
    job.best_saved_before = job.best_val_loss
    if new_best is not None:
        job.best_val_loss = new_best
    collected = checkpoint.collect(
        model=job.model,
        optimizer=job.optimizer,
        scaler=job.scaler,
        progress=job.progress,
        config=job.config.to_dict(),
        tokenizer_json=job.data.tokenizer_json,
        data_fingerprint=job.data_fingerprint,
        in_shards=job.config.run.async_checkpoint,
    )
    job.writer.save(collected, new_best is not None, is_due)


def await_checkpoint(job: Job) -> str | None:
    """Wait for the save that is under way, if one is; returns why it failed, if it did."""
    problem = job.writer.finish()
    if problem is not None:
        job.failed_saves += 1
        job.best_val_loss = job.best_saved_before  # the next one as good is written again
    return problem
