"""Where the time of training steps goes: to computation, to data, or to waiting for other ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dist.collectives import all_reduce_sum
from dist.process_group import World
from training.job import Job


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of this rank, the mean over some of them."""

    step: float
    data_wait: float
    """For a micro-batch that was not there yet."""
    comm_wait: float
    """For gradients and weights of other ranks, where no computation hid it."""

    @property
    def computing(self) -> float:
        """What is left: computation, and what Python does in between."""
        return self.step - self.data_wait - self.comm_wait


class StepClock:
    """Time spent in training steps, without validation and saving.

    Args:
        job: its batches and its collectives know how long they were waited for.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since = self._now()
        self._steps = 0

    def count_step(self) -> None:
        """Note that one more step is done."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done inside."""
        before = self._now()
        yield
        self._since += self._now() - before

    def lap(self) -> StepTimes:
        """The steps since the last call."""
        now = self._now()
        times = (now - self._since) / max(1, self._steps)
        self._since, self._steps = now, 0
        return StepTimes(*times.tolist())

    def _now(self) -> torch.Tensor:
        """(3,) float64: seconds of the clock, of waiting for data, and for other ranks."""
        collectives = self._job.ddp.collectives
        comm = 0.0 if collectives is None else collectives.wait_time.seconds()
        data = self._job.batches.seconds_waited
        return torch.tensor([time.perf_counter(), data, comm], dtype=torch.float64)


def slowest_rank_share(times: StepTimes, world: World) -> float:
    """The computation of the slowest rank over the mean of all; every rank must call it.

    The time of a step is the same on all, since they wait for each other: what differs is how much
    of it they wait. 1.0 is even; at 1.2 a sixth of the others' time is lost to one.
    """
    by_rank = torch.zeros(world.world_size, dtype=torch.float64, device=world.device)
    by_rank[world.rank] = times.computing
    all_reduce_sum(by_rank)
    return (by_rank.max() / by_rank.mean()).item()
