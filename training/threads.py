"""How many threads a process computes with on the CPU.

Without a word from the user torchrun sets OMP_NUM_THREADS to 1 for each of several processes, and
plain Python takes all cores for each: the one leaves cores idle, the other crowds them. Here the
processes that share a set of cores share it out; a number that the user has set stands.
"""

import os
import socket
from pathlib import Path

import torch

from dist.collectives import all_gather_objects

# What a user may have set; OMP_NUM_THREADS counts for all that torch computes.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CPUS = Path("/sys/devices/system/cpu")


def share_cores() -> None:
    """Let torch use this process's share of the cores; every rank must call it."""
    cpus = usable_cpus()
    # Ranks that are bound to cores of their own, by Slurm or numactl, do not share those.
    mine = (socket.gethostname(), cpus)
    neighbours = all_gather_objects(mine).count(mine)
    if not is_set_by_user():
        torch.set_num_threads(max(1, number_of_cores(cpus) // neighbours))


def usable_cpus() -> list[int]:
    """The processors that the kernel lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def number_of_cores(cpus: list[int], system: Path = CPUS, groups: Path | None = None) -> int:
    """Cores behind these processors, at most as many as a container's limit is worth.

    Two threads of one core add nothing to matrix products: torch does not count them either.

    Args:
        cpus: numbers of processors.
        system: the kernel's folder of processors.
        groups: the control group's folder, if not this process's own.
    """
    cores = set()
    for cpu in cpus:
        siblings = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text())
        except OSError:  # not Linux, or hidden
            cores.add(f"{cpu}")
    limit = _limit_of(groups or Path("/sys/fs/cgroup"))
    return max(1, min(len(cores), limit or len(cores)))


def is_set_by_user() -> bool:
    """Whether a variable says how many threads, and torchrun's own default is not what it says."""
    found = [name for name in VARIABLES if os.environ.get(name)]
    if found != ["OMP_NUM_THREADS"] or os.environ["OMP_NUM_THREADS"] != "1":
        return bool(found)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    # torchrun sets its default after its own start: what it was started with, it does not show.
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in started_with)


def _limit_of(groups: Path) -> int | None:
    """Whole processors that the control group's quota is worth; None: no quota, or none known."""
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdecimal() or not int(period):  # max, or -1
        return None
    return max(1, int(quota) // int(period))
