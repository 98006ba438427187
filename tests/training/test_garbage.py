"""The garbage collector runs where the training pauses, and steps leave it nothing large."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import run_distributed
from tests.tiny import TINY, flags, run_main, write_corpus
from training.garbage import COLLECTION_INTERVAL, collect_when_due, collected_by_hand


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def left_behind() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


def job_at(iteration: int, val_interval: int, checkpoint_interval: int) -> Any:
    options = SimpleNamespace(val_interval=val_interval, checkpoint_interval=checkpoint_interval)
    return SimpleNamespace(
        config=SimpleNamespace(run=options),
        is_due=lambda interval: interval > 0 and iteration % interval == 0,
    )


@pytest.mark.parametrize(
    ("iteration", "val_interval", "checkpoint_interval", "is_collected"),
    [
        (20, 10, 0, True),
        (20, 0, 20, True),
        (20, 0, 0, False),
        (20, 50, 100, False),
        (2 * COLLECTION_INTERVAL, 0, 0, True),
    ],
)
def test_garbage_is_collected_in_steps_that_validate_or_save_or_once_in_a_while(
    iteration, val_interval, checkpoint_interval, is_collected
):
    with collected_by_hand():
        assert not gc.isenabled()
        garbage = left_behind()
        collect_when_due(job_at(iteration, val_interval, checkpoint_interval))
        assert (garbage() is None) == is_collected
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def main_counting_garbage(argv: list[str]) -> tuple[bool, int, list[str]]:
    """Whether Python collected by itself, how much steps left behind, and which tensors of it."""
    import train_ddp

    training_step = train_ddp.training_step

    def noting(job: Any) -> Any:
        if job.iteration == 5:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        result = training_step(job)
        if job.iteration == 15:
            enabled.append(gc.isenabled())
            gc.collect()
            gc.set_debug(0)
        return result

    enabled: list[bool] = []
    with mock.patch.object(train_ddp, "training_step", noting):
        run_main(argv)
    tensors = [str(thing.shape) for thing in gc.garbage if isinstance(thing, torch.Tensor)]
    return enabled[0], len(gc.garbage), tensors


def test_ten_steps_leave_no_tensor_and_little_else_to_the_collector(tmp_path):
    import prepare

    texts = write_corpus(tmp_path / "texts", documents=20)
    data = tmp_path / "data"
    options = prepare.PrepareConfig(input=[str(texts)], out_dir=str(data), vocab_size=300)
    prepare.prepare(options, show_progress=False)
    run = {**TINY, "data_dir": data, "out_dir": tmp_path / "run", "val_interval": 0}
    run |= {"gradient_accumulation_steps": 2, "dropout": 0.1, "optimizer": "muon"}
    run |= {"checkpoint_interval": 0, "activation_checkpointing": "true"}
    argv = flags(**run)
    for enabled, left, tensors in run_distributed(
        main_counting_garbage, 2, argv, process_group=False
    ):
        assert not enabled
        assert tensors == []
        assert left < 1000
