"""Told to end at any moment, a run loses no step: it leaves the checkpoint of its last one."""

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults import (
    SECONDS_TO_NOTICE,
    Run,
    assert_same_run,
    prepared_data,
    random_moment,
    slow_records,
)

pytestmark = pytest.mark.slow

NAMES = ["SIGTERM", "SIGUSR1", "SIGINT"]
CHAIN = {
    "iterations": 60,
    "checkpoint_interval": 4,
    "val_interval": 5,
    "val_windows": 8,
    "dropout": 0.1,
    "resume": "auto",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return prepared_data(tmp_path_factory.mktemp("signals"))


def test_a_run_told_to_end_at_ten_random_moments_loses_no_step(tmp_path, data_dir):
    run = Run(tmp_path / "stopped", data_dir, CHAIN)
    done = in_saves = 0
    for moment in (random_moment(seed, range(1, 6)) for seed in range(10)):
        name = NAMES[moment.seed % len(NAMES)]
        with run.start(partial(slow_records, 0.001), async_checkpoint=moment.is_async) as ranks:
            run.wait_for(ranks, "step", moment.steps)
            time.sleep(moment.delay)
            in_saves += len(run.events("saving")) > len(run.events("saved"))
            ranks.send(signal.Signals[name], *moment.ranks)
            before = run.events("step")[-1]
            statuses = ranks.statuses(SECONDS_TO_NOTICE)
        assert statuses == [0, 0], (moment, run.said())
        assert run.events("from") == [done], moment
        left = run.events("step")[-1]
        print(f"{moment}: {name} came after step {before}, left after step {left}")
        # The step that was under way, and one more where it was already past its agreement.
        assert left <= before + 2, moment
        assert run.saved()[-1] == left, moment
        assert run.half_written() == []
        assert run.status == f"to be continued: {name}"
        assert run.steps() == list(range(1, left + 1)), moment
        done = left
    print(f"{in_saves} of 10 signals fell into a save")
    assert in_saves >= 1

    run.finish()
    assert run.events("from") == [done]
    straight = Run(tmp_path / "straight", data_dir, CHAIN)
    straight.finish()
    assert run.steps() == list(range(1, 61))
    assert_same_run(run, straight, 60)
