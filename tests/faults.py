"""What the tests of faults share: runs of train_ddp.py that a test watches, harms and compares.

Ranks run the real script to its real exit status, but from the harness's server, which starts them
in a fraction of torchrun's time. Each start is told where to write what it does, as it does it: a
test can wait for a moment, and knows afterwards what had been done and what was under way.
"""

import contextlib
import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import ROOT, Ranks, start_distributed
from tests.tiny import TINY, flags, metrics_of, write_corpus
from training.checkpoint_file import HALF_WRITTEN, load_checkpoint, numbered_checkpoints, verify
from training.run_status import read_status

# No run here needs a minute; what takes longer hangs.
PATIENCE = 60.0
# Mostly a rank that is gone is noticed at once; now and then gloo needs its time-out for that.
TIMEOUT_SECONDS = 15
SECONDS_TO_NOTICE = 40.0
# Where two runs may differ and still be the same: how they were started, and how fast they were.
OF_THE_START = {"out_dir", "resume", "async_checkpoint", "overwrite"}
OF_THE_MACHINE = {"tokens_per_second", "seconds_per_step", "memory_gb", "mfu"}
OF_THE_MACHINE |= {"data_wait_share", "comm_wait_share", "slowest_rank_share"}


class Event(NamedTuple):
    """Something that a rank did: `from`, `step`, `skip`, `saving`, `saved`, of an iteration."""

    rank: int
    what: str
    iteration: int


@dataclass
class Watched:
    """What a rank's faults are told.

    Attributes:
        rank: which it is.
        notes: open file for what it does.
        job: of the script, once there is one.
        is_saving: iteration of the checkpoint that rank 0 is writing.
    """

    rank: int
    notes: int
    job: Any = None
    is_saving: int | None = None

    def note(self, what: str, iteration: int) -> None:
        """One write to a file opened for appending: other ranks' lines stand before or behind."""
        os.write(self.notes, f"{self.rank} {what} {iteration}\n".encode())


Fault = Callable[[Watched], None]


@dataclass
class Run:
    """A run folder, the options of the run in it, and what its last start did.

    Two runs may use one folder; then each needs a name of its own, under which it notes what it
    does beside the folder.
    """

    out_dir: Path
    data_dir: Path
    options: dict[str, Any]
    world_size: int = 2
    name: str = "notes"

    @property
    def checkpoints(self) -> Path:
        return self.out_dir / "checkpoints"

    @contextlib.contextmanager
    def start(self, *faults: Fault, **options: Any) -> Iterator[Ranks]:
        """Start the ranks; at the end of the block they are gone."""
        self.notes.unlink(missing_ok=True)
        self.notes.touch()
        for log in self._logs():
            log.unlink(missing_ok=True)
        task = (self.argv(**options), str(self.notes), faults)
        try:
            with start_distributed(train_as_rank, self.world_size, *task) as ranks:
                yield ranks
        finally:
            # TensorBoard reads files in the order of their names, which begin with the second of
            # their birth: torchrun cannot start two runs within one, these tests can.
            board = self.out_dir / "tensorboard"
            for path in sorted(board.glob("events.out.tfevents.*.*.*")):
                number = len(list(board.glob("events.out.tfevents.0*")))  # now is 1..., in seconds
                path.rename(board / f"events.out.tfevents.{number:010d}")

    def argv(self, **options: Any) -> list[str]:
        """The script's arguments, where these options win over the run's own."""
        places = {"data_dir": self.data_dir, "out_dir": self.out_dir}
        common = {**TINY, **places, "timeout_seconds": TIMEOUT_SECONDS}
        return flags(**{**common, **self.options, **options})

    def to_its_end(self, *faults: Fault, **options: Any) -> list[int]:
        """Start the ranks and wait; their exit statuses."""
        with self.start(*faults, **options) as ranks:
            return ranks.statuses(PATIENCE)

    def finish(self, *faults: Fault, **options: Any) -> None:
        """Start the ranks, which must reach the end."""
        assert self.to_its_end(*faults, **options) == [0] * self.world_size, self.said()

    @property
    def notes(self) -> Path:
        return self.out_dir.with_name(f"{self.out_dir.name}.{self.name}")

    def _logs(self) -> list[Path]:
        return [Path(f"{self.notes}.{rank}") for rank in range(self.world_size)]

    def said(self, rank: int | None = None) -> str:
        """What the ranks of the last start, or one of them, have printed."""
        logs = self._logs() if rank is None else [self._logs()[rank]]
        return "".join(log.read_text() for log in logs if log.exists())

    def lines(self, part: str) -> list[str]:
        """The printed lines that have this in them."""
        return [line for line in self.said().splitlines() if part in line]

    def events(self, what: str, rank: int = 0) -> list[int]:
        """Iterations of what a rank did in the last start, in order."""
        lines = self.notes.read_text().splitlines()
        events = [Event(int(r), w, int(i)) for r, w, i in (line.split() for line in lines)]
        return [event.iteration for event in events if (event.rank, event.what) == (rank, what)]

    def wait_for(self, ranks: Ranks, what: str, count: int = 1) -> None:
        """Wait until rank 0 has done something so many times."""
        deadline = time.monotonic() + PATIENCE
        while len(self.events(what)) < count:
            assert ranks.are_running, f"a rank has ended\n{self.said()}"
            assert time.monotonic() < deadline, f"no {what}\n{self.said()}"
            time.sleep(0.002)

    def saved(self) -> list[int]:
        """Iterations of all checkpoints, best.pt included; each must be whole."""
        numbered = numbered_checkpoints(self.checkpoints)
        iterations = []
        for path in [path for _, path in numbered] + list(self.checkpoints.glob("best.pt")):
            verify(path)
            iterations.append(load_checkpoint(path)["iteration"])
        assert iterations[: len(numbered)] == [number for number, _ in numbered]
        return sorted(iterations)

    def numbered(self, iteration: int) -> Path:
        return self.checkpoints / f"ckpt_{iteration:08d}.pt"

    def half_written(self) -> list[str]:
        """Names of files that a save has left unfinished."""
        return sorted(path.name for path in self.checkpoints.glob(f".*{HALF_WRITTEN}"))

    @property
    def status(self) -> str | None:
        return read_status(self.out_dir)

    def steps(self) -> list[int]:
        """Iterations that metrics.jsonl has a training loss of."""
        return [entry["iteration"] for entry in metrics_of(self.out_dir) if "loss_train" in entry]


def prepared_data(folder: Path) -> Path:
    """Token files of a tiny corpus."""
    import prepare

    options = prepare.PrepareConfig(
        input=[str(write_corpus(folder / "texts"))], out_dir=str(folder / "data"), vocab_size=400
    )
    prepare.prepare(options, show_progress=False)
    return folder / "data"


def train_as_rank(argv: list[str], notes: str, faults: Sequence[Fault]) -> None:
    """What each rank runs: the script as torchrun starts it, watched, with faults built in."""
    from training import command_line

    rank = int(os.environ["RANK"])
    output = os.open(f"{notes}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watched = Watched(rank, os.open(notes, os.O_WRONLY | os.O_APPEND))
    _watch(watched)
    for fault in faults:
        fault(watched)
    # torchrun ends the ranks that wait for rank 0 to speak first; here nobody does.
    command_line.SECONDS_FOR_RANK_ZERO_TO_SPEAK = 0.0
    sys.argv = ["train_ddp.py", *argv]
    runpy.run_path(str(ROOT / "train_ddp.py"), run_name="__main__")


def _watch(watched: Watched) -> None:
    """Note what happens. The script imports these names when it runs: they can be exchanged."""
    from training import bad_steps, metrics, start
    from training.run_folder import RunFolder

    def resume_or_start(original: Callable[..., None], job: Any, *args: Any) -> None:
        watched.job = job
        original(job, *args)
        watched.note("from", job.iteration)

    def show_progress(original: Callable[..., None], job: Any, *args: Any) -> None:
        original(job, *args)
        watched.note("step", job.iteration)

    def complaint(original: Callable[..., str | None], *args: Any) -> str | None:
        answer = original(*args)
        if answer is not None:
            watched.note("skip", watched.job.iteration)
        return answer

    def save(original: Callable[..., Any], folder: Any, checkpoint: Any, *args: Any) -> str | None:
        watched.is_saving = checkpoint["iteration"]
        watched.note("saving", watched.is_saving)
        problem = original(folder, checkpoint, *args)
        watched.is_saving = None
        watched.note("saved" if problem is None else "failed", checkpoint["iteration"])
        return problem

    wrap(start, "resume_or_start", resume_or_start)
    wrap(metrics, "show_progress", show_progress)
    wrap(bad_steps, "complaint", complaint)
    wrap(RunFolder, "save", save)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(original, ...)` stand where a function or method stood."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


@dataclass(frozen=True)
class Moment:
    """When and whom a signal hits.

    Attributes:
        seed: which draws all of it.
        steps: the signal comes after so many steps of this start; 0: while it starts.
        delay: and so many seconds.
        ranks: who gets it; empty: all.
        is_async: how checkpoints are written.
    """

    seed: int
    steps: int
    delay: float
    ranks: tuple[int, ...]
    is_async: bool


def random_moment(seed: int, steps: range) -> Moment:
    """Draw; every other time all of two ranks, two times in three the asynchronous way."""
    draw = random.Random(seed)
    drawn = draw.choice(steps)
    # Before ranks have met, torchrun alone can tell one that another is gone.
    ranks = draw.choice([(), (), (0,), (1,)]) if drawn > 0 else ()
    delay = draw.uniform(0, 0.1 if drawn > 0 else 0.8)
    return Moment(seed, drawn, delay, ranks, is_async=draw.random() < 2 / 3)


def slow_records(seconds: float, watched: Watched) -> None:
    """Let each tensor of a checkpoint take its time, as it does with large ones."""
    from training.archive import ArchiveWriter

    def write(original: Callable[..., None], *args: Any) -> None:
        original(*args)
        time.sleep(seconds)

    wrap(ArchiveWriter, "write", write)


def assert_same_run(one: Run, other: Run, iteration: int) -> None:
    """Two finished runs left the same, to the bit: checkpoint, files, metrics and TensorBoard."""
    ours, theirs = (load_checkpoint(run.numbered(iteration)) for run in (one, other))
    assert_same(ours, theirs)
    assert one.saved() == other.saved()
    assert one.half_written() == []
    assert one.status == other.status
    assert measured(one) == measured(other)
    boards = board(one), board(other)
    assert boards[0] == boards[1]
    for tag, values in boards[0].items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)), tag


def assert_same(one: Any, other: Any, place: str = "checkpoint") -> None:
    """Two values of a checkpoint are equal to the bit, but for how the run was started."""
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one.keys() - OF_THE_START:
            assert_same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{place}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    else:
        assert one == other, place


def measured(run: Run) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine."""
    return [
        {name: value for name, value in entry.items() if name not in OF_THE_MACHINE}
        for entry in metrics_of(run.out_dir)
    ]


def board(run: Run) -> dict[str, list[tuple[int, str]]]:
    """TensorBoard's view of all event files together: step and value by tag.

    As text, in which one NaN is equal to another.
    """
    events = EventAccumulator(str(run.out_dir / "tensorboard")).Reload()
    return {
        tag: [(event.step, str(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag not in OF_THE_MACHINE
    }
