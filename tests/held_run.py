"""train_ddp.py, whose ranks wait before a step until they are asked to leave, or for a file: so a
test does to a real launch what it likes at a moment that it knows.

    HELD_FOLDER=... HELD_STEP=17 torchrun --nproc_per_node=2 -m tests.held_run [options]

Each rank writes `held0`, `held1`, ... once it waits. It waits once: started anew, it goes on.
"""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import train_ddp
from training.command_line import run

FOLDER = Path(os.environ["HELD_FOLDER"])
STEP = int(os.environ["HELD_STEP"])
# With fewer ranks than these they wait at any step for more to come.
RANKS = 2


def main() -> None:
    training_step = train_ddp.training_step

    def on_step(job: Any) -> Any:
        mark = FOLDER / f"held{job.world.rank}"
        if job.world.world_size < RANKS:
            wait(job)
        elif job.iteration == STEP and not mark.exists():
            mark.touch()
            wait(job)
        return training_step(job)

    with mock.patch.object(train_ddp, "training_step", on_step):
        train_ddp.main()


def wait(job: Any) -> None:
    while job.stop.reason is None and not (FOLDER / "go_on").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    run(main)
