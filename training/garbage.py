"""Python's garbage collector kept out of the steps.

It starts by itself when so many objects were made, in the middle of a step, on every rank in
another one, and looks at all that torch has made since its import: the other ranks then wait for
one. So what the start made is set apart for good, and what came since is looked at where the
training pauses anyway, on all ranks in the same step. Steps themselves make no cycles of objects
that would hold tensors until then.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from training.job import Job

# Steps between two collections where a run neither validates nor saves as often.
COLLECTION_INTERVAL = 1000


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Set apart all objects that there are, and collect only when `gc.collect` is called."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def set_start_apart(job: Job) -> None:
    """Set apart what the start made; what a resume has left is collected before."""
    if job.iteration > 0 or job.config.run.init_from is not None:
        gc.collect()  # which takes a tenth of a second that a fresh start need not spend
    gc.freeze()


def collect_when_due(job: Job) -> None:
    """Collect after steps that are followed by a validation or a checkpoint, or every so many."""
    options = job.config.run
    intervals = (options.val_interval, options.checkpoint_interval, COLLECTION_INTERVAL)
    if any(job.is_due(interval) for interval in intervals):
        gc.collect()
