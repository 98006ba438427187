"""Between two hosts with a slow line: is our step as fast as torch's, and near the line's bound?

    python benchmarks/network.py --netlab PATH/netlab.sh [--json FILE]     # as root

Makes two hosts on this machine whose line is limited (netlab.sh), trains on one process of each,
and compares whole steps. No step can be shorter than its computation, or than its bytes take on
the line; how much longer it is, is the excess.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks.data_parallel import (
    NO_COMMUNICATION,
    OURS,
    our_ddp,
    our_sharded,
    parser,
    torch_ddp,
    without_communication,
)
from benchmarks.side_by_side import (
    fastest,
    interleave,
    median,
    read_figures,
    show_table,
    write_figures,
)
from dist.process_group import init_process_group, shut_down

PORT = 29500


def main() -> None:
    """Make the hosts and measure at each rate, or be one rank."""
    flags = parser(__doc__)
    flags.add_argument("--netlab", help="the script that makes hosts")
    flags.add_argument("--mbit", type=int, nargs="+", default=[1000, 200], help="per second")
    options = flags.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    if options.netlab is None:
        flags.error("--netlab is missing: the script that makes hosts")
    figures: dict[str, float] = {}
    netlab(options.netlab, "up", 2)
    try:
        for mbit in options.mbit:
            netlab(options.netlab, "limit", mbit, 0)
            figures |= on_two_hosts(options, mbit)
    finally:
        netlab(options.netlab, "down")
    write_figures(options.json, figures)


def netlab(script: str, *arguments: object) -> None:
    """Run one of the script's commands; raises when it fails."""
    subprocess.run([script, *map(str, arguments)], check=True)


def on_two_hosts(options: argparse.Namespace, mbit: int) -> dict[str, float]:
    """Run this script on both hosts; the figures that rank 0 wrote."""
    given = vars(options)
    arguments = [
        f"--{name}={value}"
        for name, value in given.items()
        if value is not None and name not in ("netlab", "mbit", "json", "ranks", "threads")
    ]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": str(given["threads"]),
        "PYTHONPATH": root,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc_per_node=1", f"--rdzv_endpoint=n1:{PORT}", "--rdzv_backend=c10d"]
        command += [__file__, *arguments, f"--mbit={mbit}", f"--json={file}"]
        hosts = [
            subprocess.Popen([given["netlab"], "exec", str(host), *own, *command], env=environment)
            for host, own in ((1, on_cores(0)), (2, on_cores(1)))
        ]
        if any(host.wait() for host in hosts):
            raise SystemExit("a host failed")
        return read_figures(file)


def on_cores(number: int) -> list[str]:
    """The command before a command that keeps it on the first or second half of the cores.

    Two hosts have no core in common. A single core they have to share.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    own = (cores[:half], cores[half:])[number] if half else cores
    return ["taskset", "-c", ",".join(map(str, own))]


def measure(options: argparse.Namespace) -> None:
    """One rank's part at one rate."""
    given = vars(options)
    (mbit,) = given["mbit"]
    world = init_process_group("gloo", "cpu")
    sharded, ddp, optimizer = our_sharded(options, world)
    variants = {
        **without_communication(options, world),
        **torch_ddp(options, world),
        **our_ddp(options, world),
        **sharded,
    }
    times = interleave(variants, given["rounds"], world, optimizer.finish_gather)
    assert ddp.collectives is not None
    before = ddp.collectives.bytes_sent
    for _ in range(3):
        sharded[OURS]()
    sent = (ddp.collectives.bytes_sent - before) / 3
    if world.rank == 0:
        best = fastest(times, "torch DDP")
        bound = max(median(times, NO_COMMUNICATION), sent * 8 / (mbit * 1e6))
        print(f"{mbit} Mbit/s: {sent / 1e6:.1f} MB a step, so at least {bound * 1e3:.0f} ms")
        show_table(times, [NO_COMMUNICATION, best])
        write_figures(
            given["json"],
            {
                f"network_ratio_{mbit}": median(times, OURS) / median(times, best),
                f"network_ratio_ddp_{mbit}": median(times, "our DDP") / median(times, best),
                f"network_excess_{mbit}": median(times, OURS) / bound - 1,
            },
        )
    shut_down(world)


if __name__ == "__main__":
    main()
