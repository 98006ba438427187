"""What the tests of resuming share: a corpus, legs of a run that end where a test wants, and what
is compared afterwards."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import prepare
from tests.harness import DistributedError, run_distributed
from tests.tiny import TINY, flags, run_main, write_corpus
from training import interrupt
from training.batches import Batches
from training.checkpoint_file import checkpoint_path, load_checkpoint

Window = tuple[int, ...]


def prepared(folder: Path, **corpus: int) -> Path:
    """Token files of a tiny corpus, in a subfolder."""
    options = prepare.PrepareConfig(
        input=[str(write_corpus(folder / "texts", **corpus))],
        out_dir=str(folder / "data"),
        vocab_size=400,
    )
    prepare.prepare(options, show_progress=False)
    return folder / "data"


def start(
    function: Any, world_size: int, data_dir: Path, out_dir: Path, *args: Any, **options: Any
) -> list[Any]:
    """Run a function of this file, or one like them, as train_ddp.py would be run."""
    argv = flags(**{**TINY, "data_dir": data_dir, "out_dir": out_dir, **options})
    return run_distributed(function, world_size, argv, *args, process_group=False)


@dataclass
class Leg:
    """What one rank did between a start and the end of its process.

    Attributes:
        said: on stdout.
        read: by number of the sample, the step and the window that it was.
        draws: of torch's, numpy's and Python's generators, before each step.
    """

    said: str = ""
    read: dict[int, tuple[int, Window]] = field(default_factory=dict)
    draws: list[tuple[float, float, float]] = field(default_factory=list)


def run_leg(
    argv: list[str], last_step: int | None = None, draws: bool = False, why: str = "SIGTERM"
) -> Leg:
    """The job, which its last rank is asked to leave after a step.

    Args:
        argv: options.
        last_step: number of that step; None: it runs to its end.
        draws: take a number from every random generator before each step.
        why: a signal, or "max_minutes": its clock goes on by an hour.
    """
    import random

    import train_ddp

    leg, step = Leg(), 0
    training_step = train_ddp.training_step

    def on_step(job: Any) -> Any:
        nonlocal step
        step = job.iteration
        if draws:
            leg.draws.append((torch.rand(()).item(), np.random.rand(), random.random()))
        if step == last_step and job.world.rank == job.world.world_size - 1:
            ask_to_leave(why)
        return training_step(job)

    take = Batches.take

    def noted(batches: Batches, first: int) -> torch.Tensor:
        tokens = take(batches, first)
        for sample, window in enumerate(tokens.tolist(), first):
            assert sample not in leg.read
            leg.read[sample] = step, tuple(window)
        return tokens

    said = io.StringIO()
    with (
        mock.patch.object(train_ddp, "training_step", on_step),
        mock.patch.object(Batches, "take", noted),
        contextlib.redirect_stdout(said),
    ):
        run_main(argv)
    leg.said = said.getvalue()
    return leg


def ask_to_leave(why: str) -> None:
    """What `run_leg` does to a rank, in that rank."""
    if why == "max_minutes":
        late = SimpleNamespace(monotonic=partial(add, time.monotonic(), 3600.0))
        mock.patch.object(interrupt, "time", late).start()
    else:
        signal.raise_signal(signal.Signals[why])


def run_until_killed(argv: list[str], last_step: int, checkpoint: str) -> None:
    """The job, killed on every rank after a step, once a checkpoint is on the disk."""
    import train_ddp

    training_step = train_ddp.training_step

    def on_step(job: Any) -> Any:
        if job.iteration > last_step:
            wait_for(Path(checkpoint))
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(job)

    with mock.patch.object(train_ddp, "training_step", on_step):
        run_main(argv)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Until there is such a file."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


def samples_of(legs: Sequence[Leg]) -> dict[int, tuple[int, Window]]:
    """What several ranks or legs have read, of which no two may have read the same sample."""
    merged = {sample: read for leg in legs for sample, read in leg.read.items()}
    assert len(merged) == sum(len(leg.read) for leg in legs)
    return merged


def refusal(
    function: Any, world_size: int, data_dir: Path, out_dir: Path, *args: Any, **options: Any
) -> str:
    """The one line that a run ends with on rank 0; every rank must have met the mistake."""
    with pytest.raises(DistributedError) as caught:
        start(function, world_size, data_dir, out_dir, *args, **options)
    failures = caught.value.failures
    assert set(failures) == set(range(world_size)), failures
    kinds = {failure.kind for failure in failures.values()}
    assert kinds <= {"CheckpointError", "CommandLineError", "RankZeroError"}, str(caught.value)
    assert "\n" not in failures[0].message
    return failures[0].message


def path_of(out_dir: Path, iteration: int) -> Path:
    """Where a run's checkpoint of a step is."""
    return checkpoint_path(out_dir / "checkpoints", iteration)


def saved_at(out_dir: Path, iteration: int) -> dict[str, Any]:
    """A run's checkpoint of a step."""
    return load_checkpoint(path_of(out_dir, iteration))


def names_in(folder: Path) -> list[str]:
    """Of the files and folders in it, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights, optimizer state, positions and random generators are the same."""
    for part in ("model", "optimizer", "iteration", "samples", "best_val_loss", "rng"):
        _assert_same(one[part], other[part], part)


def _assert_same(one: Any, other: Any, place: str) -> None:
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key, value in one.items():
            _assert_same(value, other[key], f"{place} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, value in enumerate(one):
            _assert_same(value, other[number], f"{place} {number}")
    else:
        assert one == other, place
