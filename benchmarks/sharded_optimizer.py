"""Is DDP with our sharded optimizer faster than torch's ways, and does each rank hold its share?

    python benchmarks/sharded_optimizer.py [--json FILE]   # 2 processes on this machine
    torchrun ... benchmarks/sharded_optimizer.py           # processes that torchrun has placed

Each rank trains a language model of 30 M parameters on 4 x 128 tokens; the table compares whole
steps. Torch's DDP, and it with ZeroRedundancyOptimizer, count with their best settings. The shares
of the state are counted at 2, 3 and 4 ranks, the bytes at the collectives.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.data_parallel import (
    LEARNING_RATE,
    NO_COMMUNICATION,
    OURS,
    TORCH_DDP_SETTINGS,
    Step,
    make_model,
    make_step,
    our_sharded,
    parser,
    torch_ddp,
    without_communication,
    wrapped_by_torch,
)
from benchmarks.side_by_side import (
    fastest,
    interleave,
    median,
    read_figures,
    run_ranks,
    show_table,
    write_figures,
)
from dist.collectives import all_gather_objects
from dist.process_group import World, init_process_group, shut_down
from optim.adamw import AdamW

STATE_RANKS = (2, 3, 4)
# As many as there are buckets of 25 MB.
NUM_FLAT_TENSORS, NUM_ELEMENTS = 5, 30_000_000


def main() -> None:
    """Start the ranks of each part, or be one."""
    flags = parser(__doc__)
    flags.add_argument("--part", choices=["steps", "state"], default="steps", help="of a rank")
    options = flags.parse_args()
    if "RANK" not in os.environ:
        measure_all(options)
    elif options.part == "state":
        measure_state(options)
    else:
        measure_steps(options)


def measure_all(options: argparse.Namespace) -> None:
    """All figures of this machine."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "figures.json"))
        own = [argument for argument in sys.argv[1:] if not argument.startswith("--json")]
        own = [argument for argument in own if argument != options.json]
        run_ranks(options.ranks, options.threads, [*own, "--part=steps", f"--json={file}"])
        figures |= read_figures(file)
        shares = []
        for ranks in STATE_RANKS:
            run_ranks(ranks, 1, [*own, "--part=state", f"--json={file}"])
            shares.append(read_figures(file)["state_share"])
        figures["state_share"] = max(shares)
    figures["adamw_ratio"] = adamw_ratio(options)
    print()
    write_figures(options.json, figures)


def measure_steps(options: argparse.Namespace) -> None:
    """Step times, and bytes a step."""
    world = init_process_group()
    ours, ddp, optimizer = our_sharded(options, world)
    variants = {
        **without_communication(options, world),
        **torch_ddp(options, world),
        **torch_zero(options, world),
        **ours,
    }
    times = interleave(variants, options.rounds, world, optimizer.finish_gather)
    sent = bytes_of_a_step(ours[OURS], ddp)
    if world.rank == 0:
        best_ddp, best_zero = fastest(times, "torch DDP,"), fastest(times, "torch DDP + ZeRO")
        gradient = 4 * sum(p.numel() for p in ddp.module.parameters())
        all_reduce = 2 * (world.world_size - 1) / world.world_size * gradient
        step = median(times, OURS)
        print(f"{world.world_size} ranks, {options.dtype}, {options.rounds} rounds, slowest rank")
        show_table(times, [NO_COMMUNICATION, best_ddp, best_zero])
        write_figures(
            options.json,
            {
                "step_ratio_zero": step / median(times, best_zero),
                "step_ratio_unsharded": step / median(times, best_ddp),
                "floor_ratio": step / median(times, NO_COMMUNICATION),
                "bytes_ratio": sent / all_reduce,
            },
        )
    shut_down(world)


def torch_zero(options: argparse.Namespace, world: World) -> dict[str, Step]:
    """torch's DDP with its ZeroRedundancyOptimizer over fused AdamW, at several settings."""
    variants = {}
    for name, settings in TORCH_DDP_SETTINGS.items():
        model = make_model(options, world)
        wrapped = wrapped_by_torch(model, settings)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )
        name = name.replace("torch DDP", "torch DDP + ZeRO")
        variants[name] = make_step(wrapped, optimizer, options, world)
    return variants


def bytes_of_a_step(step: Step, ddp: Any) -> float:
    """Bytes that this rank's collectives send in one step."""
    before = ddp.collectives.bytes_sent
    for _ in range(4):
        step()
    return (ddp.collectives.bytes_sent - before) / 4


def measure_state(options: argparse.Namespace) -> None:
    """The largest rank's state, times the ranks, over the state of the unsharded optimizer."""
    world = init_process_group("gloo", "cpu")
    variants, _, optimizer = our_sharded(options, world)
    variants[OURS]()
    model = make_model(options, world)
    plain = AdamW(model.parameters(), lr=LEARNING_RATE)
    make_step(model, plain, options, world)()
    whole = sum(
        value.nbytes
        for state in plain.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    largest = max(all_gather_objects(optimizer.state_bytes()))
    if world.rank == 0:
        print(f"{world.world_size} ranks: largest {largest} bytes of {whole}")
        write_figures(options.json, {"state_share": largest * world.world_size / whole})
    shut_down(world)


def adamw_ratio(options: argparse.Namespace) -> float:
    """One step of our AdamW over torch's fused one, over flat tensors."""
    torch.set_num_threads(options.threads)
    variants = {}
    for name, make in (
        ("our AdamW", lambda p: AdamW(p, lr=LEARNING_RATE)),
        ("torch AdamW, fused", lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, fused=True)),
    ):
        parameters = [
            torch.nn.Parameter(torch.randn(NUM_ELEMENTS // NUM_FLAT_TENSORS))
            for _ in range(NUM_FLAT_TENSORS)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        variants[name] = make(parameters).step
    alone = World(0, 0, 1, torch.device("cpu"))
    times = interleave(variants, options.rounds, alone)
    print(f"one optimizer step, {NUM_ELEMENTS} elements in {NUM_FLAT_TENSORS} tensors")
    show_table(times, ["torch AdamW, fused"])
    return median(times, "our AdamW") / median(times, "torch AdamW, fused")


if __name__ == "__main__":
    main()
