"""How long does a save hold the training up, and what does it cost in time and memory?

    python benchmarks/checkpoint.py [--folder DIR] [--json FILE]     # 2 processes on this machine

A language model of 30 M parameters with sharded AdamW is saved in turn beside the training,
blocking it, and by torch.save + fsync of the same dict, which rank 0 then has in memory whole. Our
file is read back and verified before it counts. Every save makes a new file and then deletes the
one before. Training steps are timed with a save under way and without one. Memory is rank 0's
growth while it saves, beyond what training takes.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.data_parallel import OURS, Step, our_sharded, parser
from benchmarks.side_by_side import median, run_ranks, write_figures
from dist.ddp import DDP
from dist.process_group import World, init_process_group, shut_down
from dist.sharded_optimizer import ShardedOptimizer
from training import checkpoint
from training.checkpoint_file import checkpoint_path, load_checkpoint, verify
from training.checkpoint_writer import CheckpointWriter
from training.run_folder import RunFolder

STEPS_TIMED = 3
BUCKET_MB = 25


def main() -> None:
    """Start the ranks, or be one."""
    flags = parser(__doc__)
    flags.set_defaults(bucket_cap_mb=BUCKET_MB)
    flags.add_argument("--folder", help="where to write (default: one that is deleted)")
    options = flags.parse_args()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arguments = [a for a in sys.argv[1:] if not a.startswith("--folder")]
            arguments = [a for a in arguments if a != options.folder]
            run_ranks(options.ranks, options.threads, [*arguments, f"--folder={folder}"])
        return
    world = init_process_group()
    steps, ddp, optimizer = our_sharded(options, world)
    measure(options, Saving(world, ddp, optimizer, steps[OURS], options.folder))
    shut_down(world)


class Saving:
    """A model in training, and every way to save it."""

    def __init__(
        self, world: World, ddp: DDP, optimizer: ShardedOptimizer, step: Step, folder: str
    ) -> None:
        self.world, self.ddp, self.optimizer, self.step = world, ddp, optimizer, step
        self.folder = RunFolder(folder, keep_checkpoints=1)
        self.writers = {
            is_async: CheckpointWriter(world, self.folder, is_async) for is_async in (True, False)
        }
        self.iteration = 0
        for _ in range(2):
            step()

    @property
    def path(self) -> Path:
        """Of the last numbered file."""
        return checkpoint_path(self.folder.checkpoints, self.iteration)

    def save(self, is_async: bool) -> None:
        """What the training loop does at a save; without waiting for its end."""
        self.iteration += 1
        collected = checkpoint.collect(
            model=self.ddp.module,
            optimizer=self.optimizer,
            progress={"iteration": self.iteration, "best_val_loss": 0.0},
            config={},
            tokenizer_json="{}",
            data_fingerprint="",
            in_shards=is_async,
        )
        self.writers[is_async].save(collected, is_best=False, is_due=True)

    def finish(self) -> None:
        """Wait for every save under way."""
        for writer in self.writers.values():
            assert writer.finish() is None

    def slowest(self, action: Callable[[], object]) -> float:
        """Seconds that an action takes on the slowest rank; all ranks begin together."""
        self.optimizer.finish_gather()
        torch_dist.barrier()
        start = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        torch_dist.all_reduce(seconds, op=torch_dist.ReduceOp.MAX)
        return seconds.item()

    def train(self) -> None:
        """Some steps."""
        for _ in range(STEPS_TIMED):
            self.step()


def measure(options: argparse.Namespace, run: Saving) -> None:
    """All figures."""
    growth = {
        "blocking": peak_growth(run, is_async=False),
        "beside, copies included": peak_growth(run, is_async=True),
        "beside, copies there before": peak_growth(run, is_async=True),
    }
    whole = load_checkpoint(run.path) if run.world.rank == 0 else {}
    in_memory = in_own_memory(whole)
    names = ("blocking", "beside", "torch", "steps alone", "steps beside a save", "whole save")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        times["steps alone"].append(run.slowest(run.train))
        times["blocking"].append(run.slowest(lambda: run.save(is_async=False)))
        run.finish()
        start = time.perf_counter()
        times["beside"].append(run.slowest(lambda: run.save(is_async=True)))
        times["steps beside a save"].append(run.slowest(run.train))
        run.finish()
        times["whole save"].append(time.perf_counter() - start)
        times["torch"].append(run.slowest(lambda: torch_save(in_memory, options.folder)))
    reading: dict[str, list[float]] = {"verified": [], "as it is": []}
    for _ in range(options.rounds if run.world.rank == 0 else 0):
        for name in reading:
            start = time.perf_counter()
            if name == "verified":
                verify(run.path)
            held = load_checkpoint(run.path)
            run.ddp.module.load_state_dict(held["model"])
            reading[name].append(time.perf_counter() - start)
    torch_dist.barrier()
    if run.world.rank == 0:
        report(options, run, times, growth, reading)


def report(
    options: argparse.Namespace,
    run: Saving,
    times: dict[str, list[float]],
    growth: dict[str, int],
    reading: dict[str, list[float]],
) -> None:
    """Print a table of each kind, and the figures."""
    size = run.path.stat().st_size
    print(f"{run.world.world_size} ranks, {size / 1e6:,.0f} MB a file, {options.rounds} rounds")
    for name, said in (
        ("torch", "torch.save + fsync of the whole dict"),
        ("blocking", "blocking save, verified"),
        ("beside", "save beside the training: held up for"),
    ):
        print(f"{said:42} {median(times, name) * 1e3:8.1f} ms")
    slowed = median(times, "steps beside a save") / median(times, "steps alone")
    print(f"{'a step while a save is under way':42} {slowed:8.2f} x a step alone")
    for name in reading:
        print(f"{'weights read, ' + name:42} {median(reading, name) * 1e3:8.1f} ms")
    model_bytes = sum(p.nbytes for p in run.ddp.module.parameters())
    allowed = model_bytes + BUCKET_MB * 2**20
    for name, value in growth.items():
        print(f"{'rank 0 grows, ' + name:42} {value / 1e6:8.1f} MB")
    print(f"{'the model and one bucket':42} {allowed / 1e6:8.1f} MB")
    write_figures(
        options.json,
        {
            "stall_ratio": median(times, "beside") / median(times, "blocking"),
            "save_ratio": median(times, "blocking") / median(times, "torch"),
            "gather_peak_ratio": max(growth["blocking"], growth["beside, copies there before"])
            / allowed,
            "gather_peak_ratio_with_copies": growth["beside, copies included"] / allowed,
            "resume_seconds_verified": median(reading, "verified"),
            "resume_seconds": median(reading, "as it is"),
        },
    )


def peak_growth(run: Saving, is_async: bool) -> int:
    """Bytes that this process grows by, at most, during a save."""
    run.optimizer.finish_gather()
    torch_dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    before = memory("VmRSS")
    run.save(is_async)
    run.finish()
    return memory("VmHWM") - before


def memory(line: str) -> int:
    """A figure of this process's memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def in_own_memory(value: Any) -> Any:
    """The same dict with tensors of its own, not mapped from a file."""
    if isinstance(value, dict):
        return {key: in_own_memory(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def torch_save(whole: dict[str, Any], folder: str) -> None:
    """The plain way, of rank 0: a new file, and then the one before is deleted, as in ours."""
    if whole:
        new, old = Path(folder, "plain.new.pt"), Path(folder, "plain.pt")
        with open(new, "wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(old)


if __name__ == "__main__":
    main()
