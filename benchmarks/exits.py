"""Does a run that ends well leave with status 0 every time?

    python benchmarks/exits.py [--runs 100] [--json FILE]

Scripts that use torch's DDP over gloo were seen to abort at their end, now and then, when the
process group's threads are still there as the interpreter goes: "terminate called without an active
exception". Here torchrun starts 2 processes that train a tiny model with our DDP and
ShardedOptimizer for a few steps and leave as train_ddp.py does, again and again.
"""

import argparse
import collections
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

import torch

from benchmarks.side_by_side import write_figures
from dist.ddp import DDP
from dist.process_group import init_process_group, shut_down
from dist.sharded_optimizer import ShardedOptimizer

STEPS = 5


def main() -> None:
    """Run it again and again, or be one rank."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--runs", type=int, default=100, help="(default 100)")
    flags.add_argument("--ranks", type=int, default=2, help="(default 2)")
    flags.add_argument("--json", help="file for the figures")
    options = flags.parse_args()
    if "RANK" in os.environ:
        train()
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    statuses: collections.Counter[int] = collections.Counter()
    for _ in range(options.runs):
        run = subprocess.run(
            [sys.executable, *torchrun, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        statuses[run.returncode] += 1
        if run.returncode:
            print(run.stderr)
    print(f"{statuses[0]} of {options.runs} runs ended with status 0: {dict(statuses)}")
    write_figures(options.json, {"clean_exits": statuses[0] / options.runs})


def train() -> None:
    """A few steps of a tiny model."""
    world = init_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    ddp = DDP(model.to(world.device))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, ddp=ddp)
    for _ in range(STEPS):
        ddp(torch.randn(4, 8, device=world.device)).square().mean().backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
    shut_down(world)


if __name__ == "__main__":
    main()
