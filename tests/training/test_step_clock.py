"""The time of a step falls into computing and waiting, and pauses fall into neither."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import current_world, run_distributed
from training import step_clock
from training.step_clock import StepClock, StepTimes, slowest_rank_share


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time that the clock reads; a test moves it on."""
    now = [100.0]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def waiting_job(comm: list[float] | None) -> Any:
    """A job whose waits a test counts; comm None: in a world of one."""
    collectives = None
    if comm is not None:
        collectives = SimpleNamespace(wait_time=SimpleNamespace(seconds=lambda: comm[0]))
    return SimpleNamespace(
        ddp=SimpleNamespace(collectives=collectives), batches=SimpleNamespace(seconds_waited=7.0)
    )


def test_a_lap_is_the_mean_of_its_steps_without_what_the_pauses_took(now):
    comm = [50.0]
    job = waiting_job(comm)
    clock = StepClock(job)
    for _ in range(4):
        now[0] += 2.0
        job.batches.seconds_waited += 0.25
        comm[0] += 0.5
        clock.count_step()
        with clock.paused():  # a validation, whose reads and reductions wait, too
            now[0] += 100.0
            job.batches.seconds_waited += 10.0
            comm[0] += 20.0
    times = clock.lap()
    assert times == StepTimes(step=2.0, data_wait=0.25, comm_wait=0.5)
    assert times.computing == 1.25
    now[0] += 3.0
    clock.count_step()
    assert clock.lap() == StepTimes(step=3.0, data_wait=0.0, comm_wait=0.0)


def test_a_process_that_is_alone_waits_for_nobody(now):
    clock = StepClock(waiting_job(comm=None))
    now[0] += 1.0
    clock.count_step()
    assert clock.lap() == StepTimes(step=1.0, data_wait=0.0, comm_wait=0.0)


def share_of_unequal_ranks() -> float:
    world = current_world()
    times = StepTimes(step=4.0, data_wait=0.5, comm_wait=[2.5, 0.5][world.rank])
    return slowest_rank_share(times, world)


def test_every_rank_knows_how_much_slower_than_the_mean_the_slowest_is():
    assert run_distributed(share_of_unequal_ranks, 2) == [3.0 / 2.0] * 2
