"""A trace of a few steps for `--profile`: what ran when, on the CPU and on the GPU.

The first steps allocate memory and choose kernels, and are like no later one; a trace of many fills
a disk and no viewer opens it. So three steps are traced after four that are not. Each rank writes
its own, since with several the question is often which one the others wait for.
"""

import torch
from torch.profiler import ProfilerActivity, profile

from training.console import say
from training.job import Job

# Counted from this start.
FIRST_STEP, LAST_STEP = 5, 7
ROWS_OF_TABLE = 30


class StepProfiler:
    """Traces steps of this start into the run folder, if the options ask for it.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_wanted = job.config.run.profile
        self._steps = 0
        self._profile: profile | None = None

    def begin_step(self) -> None:
        """Begin the trace if this is the first step that it shows."""
        self._steps += 1
        if self._is_wanted and self._steps == FIRST_STEP:
            activities = [ProfilerActivity.CPU]
            if self._job.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def end_step(self) -> None:
        """Write the trace if this was the last step that it shows."""
        if self._profile is not None and self._steps >= LAST_STEP:
            if self._job.world.device.type == "cuda":
                torch.cuda.synchronize()
            self._profile.stop()
            self._write(self._profile)
            self._profile, self._is_wanted = None, False

    def close(self) -> None:
        """Say so if the steps were too few for a trace."""
        if self._profile is not None:
            self._profile.stop()
        if self._is_wanted:
            self._job.say(
                f"--profile traces steps {FIRST_STEP} to {LAST_STEP} of a start, this one had "
                f"{self._steps}: nothing is written"
            )

    def _write(self, traced: profile) -> None:
        folder = self._job.folder.profile
        trace = folder / f"rank{self._job.world.rank}.json.gz"
        by = f"self_{'cpu' if self._job.world.device.type == 'cpu' else 'device'}_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(trace))
            table = traced.key_averages().table(sort_by=by, row_limit=ROWS_OF_TABLE)
            trace.with_name(f"rank{self._job.world.rank}.txt").write_text(table + "\n")
        except OSError as error:
            rank = self._job.world.rank  # each writes its own, and one alone may have failed
            say(f"rank {rank}: the profile is not written: {error}; the training goes on")
            return
        self._job.say(
            f"profile of {LAST_STEP - FIRST_STEP + 1} steps: open {trace} in "
            "https://ui.perfetto.dev or chrome://tracing; the top operations are in "
            f"{trace.with_name(f'rank{self._job.world.rank}.txt')}"
        )
