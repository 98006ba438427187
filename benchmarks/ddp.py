"""Is our DDP faster than torch's C++ reducer?

    python benchmarks/ddp.py [--json FILE]            # 2 processes on this machine
    torchrun ... benchmarks/ddp.py                    # processes that torchrun has placed

Each rank trains a language model of 30 M parameters on 4 x 128 tokens; the table compares whole
steps. Torch's DDP counts with its best setting.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.data_parallel import (
    NO_COMMUNICATION,
    our_ddp,
    parser,
    torch_ddp,
    without_communication,
)
from benchmarks.side_by_side import (
    fastest,
    interleave,
    median,
    run_ranks,
    show_table,
    write_figures,
)
from dist.ddp import DDP
from dist.process_group import World, init_process_group, shut_down

NUM_PARAMETERS, REPEATS = 300, 50


def main() -> None:
    """Start the ranks, or be one."""
    options = parser(__doc__).parse_args()
    if "RANK" not in os.environ:
        run_ranks(options.ranks, options.threads, _arguments(options))
        return
    world = init_process_group()
    variants = {
        **without_communication(options, world),
        **torch_ddp(options, world),
        **our_ddp(options, world),
    }
    times = interleave(variants, options.rounds, world)
    cpu_ms = own_cpu_ms(world)
    if world.rank == 0:
        torch_best = fastest(times, "torch DDP")
        floor = median(times, NO_COMMUNICATION)
        ours, theirs = median(times, "our DDP"), median(times, torch_best)
        print(f"{world.world_size} ranks, {options.dtype}, {options.rounds} rounds, slowest rank")
        show_table(times, [NO_COMMUNICATION, torch_best])
        write_figures(
            options.json,
            {
                "step_ratio_torch_ddp": ours / theirs,
                "excess_ratio_torch_ddp": (ours - floor) / (theirs - floor),
                "own_cpu_ms": cpu_ms,
            },
        )
    shut_down(world)


class ManyParameters(nn.Module):
    """So small that what they cost is the handling."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(NUM_PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        """Every weight takes part."""
        return torch.stack([x * weight for weight in self.weights]).sum()


def own_cpu_ms(world: World) -> float:
    """CPU time of this thread that a backward and the sync take longer with our DDP."""
    plain, wrapped = ManyParameters().to(world.device), ManyParameters().to(world.device)
    ddp = DDP(wrapped)
    x = torch.ones(8, device=world.device)
    differences = []
    for _ in range(REPEATS):
        times = []
        for model, finish in ((plain, lambda: None), (ddp, ddp.finish_gradient_sync)):
            model.zero_grad()
            loss = model(x)
            start = time.thread_time()
            loss.backward()
            finish()
            times.append(time.thread_time() - start)
        differences.append(times[1] - times[0])
    return statistics.median(differences) * 1e3


def _arguments(options: argparse.Namespace) -> list[str]:
    return [
        f"--{name}={value}"
        for name, value in vars(options).items()
        if value is not None and name not in ("ranks", "threads")
    ]


if __name__ == "__main__":
    main()
