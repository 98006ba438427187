"""Variants of one thing, timed side by side: A B C A B C ..., medians, ratios, one table.

A machine's speed drifts by more than most differences that are worth measuring. So all variants
run in the same processes, one after the other in every round, and what is compared are medians of
the same rounds. A time is the slowest rank's.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as torch_dist

from dist.process_group import World

# The first steps fault memory in and, in torch DDP's case, build its buckets.
WARM_UP_ROUNDS = 1
TIMED_STEPS = 2

Times = Mapping[str, list[float]]


def run_ranks(ranks: int, threads: int, arguments: Sequence[str]) -> None:
    """Run the calling script on `ranks` processes of this machine.

    Raises:
        SystemExit: it failed; with its status.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    status = subprocess.run(
        [sys.executable, *torchrun, sys.argv[0], *arguments], env=environment
    ).returncode
    if status:
        raise SystemExit(status)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    world: World,
    settle: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run every variant some steps a round.

    What a step leaves under way belongs to the next step. So one step goes before those that are
    timed, and what the last one leaves is waited for before the next variant's turn.

    Args:
        variants: name -> one step.
        rounds: that are counted.
        world: barrier and maximum over its ranks.
        settle: waits for whatever any variant has left under way.

    Returns:
        name -> seconds a step of the slowest rank, by round; the same on every rank.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, step in variants.items():
            if world.world_size > 1:
                torch_dist.barrier()
            step()
            _synchronize(world)
            start = time.perf_counter()
            for _ in range(TIMED_STEPS):
                step()
            _synchronize(world)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64) / TIMED_STEPS
            settle()
            if world.world_size > 1:
                seconds = seconds.to(world.device)
                torch_dist.all_reduce(seconds, op=torch_dist.ReduceOp.MAX)
            if number >= WARM_UP_ROUNDS:
                times[name].append(seconds.item())
    return times


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def median(times: Times, name: str) -> float:
    """Median of one variant's times."""
    return statistics.median(times[name])


def fastest(times: Times, prefix: str) -> str:
    """The variant of the lowest median among those whose names begin so: somebody's best."""
    return min((name for name in times if name.startswith(prefix)), key=lambda n: median(times, n))


def show_table(times: Times, references: Sequence[str]) -> None:
    """Print medians in ms and a column of ratios for each reference."""
    width = max(len(name) for name in times)
    print(f"{'':{width}}        ms" + "".join(f"   / {name}" for name in references))
    for name in times:
        row = f"{name:{width}}  {median(times, name) * 1e3:8.1f}"
        for reference in references:
            ratio = median(times, name) / median(times, reference)
            row += f"{ratio:{len(reference) + 5}.3f}"
        print(row)


def write_figures(path: str | None, figures: Mapping[str, float]) -> None:
    """Print the figures and, with a path, write them as {"figures": {name: number}}."""
    for name, value in figures.items():
        print(f"{name} = {value:.4g}")
    if path is not None:
        Path(path).write_text(json.dumps({"figures": dict(figures)}, indent=1) + "\n")


def read_figures(path: str | Path) -> dict[str, float]:
    """What `write_figures` wrote."""
    return json.loads(Path(path).read_text())["figures"]
