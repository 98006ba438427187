"""What became of the last steps: counted, told, and whether the run should leave or has diverged.

The host learns it late (step_reports.py), and then does what it would have done at once: a run that
has diverged is set back to the step in which it did, whatever came after it.
"""

from training import bad_steps
from training.interrupt import reason_of
from training.job import Job
from training.step_reports import Report


def take_in(job: Job, is_awaited: bool) -> tuple[Report | None, str | None]:
    """Read and count what the steps have told.

    Args:
        job: the run.
        is_awaited: read all of it, up to the step that was just done.

    Returns:
        The last report that was read, and why the run should leave, if it should; then nothing is
        unread. Alike on all ranks.
    """
    last, leaves = None, None
    while report := job.reports.next(is_awaited or leaves is not None):
        last = report
        leaves = leaves or reason_of(
            max(code * bool(vote) for code, vote in enumerate(report.votes, 1))
        )
        wrong = bad_steps.complaint(report)
        if wrong is None:
            job.skipped_in_a_row = 0
            continue
        job.skipped_steps += 1
        job.skipped_in_a_row += not bad_steps.is_search_for_a_scale(report)
        job.say(f"step {report.iteration}: {wrong}, no update")
        if job.has_diverged:
            job.iteration, job.samples = report.iteration, report.samples
            job.reports.forget()
    return last, leaves
