"""Who this process is, how it meets the others, and how it leaves.

torchrun (or anything else) sets RANK, LOCAL_RANK and WORLD_SIZE; without them the process is a
world of its own and needs no process group. Leaving is as careful as meeting: after a good end the
ranks wait for each other and destroy the group, after a failure nobody waits for anybody.
"""

import itertools
import json
import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as torch_dist

# How long rank 0 sleeps between two looks at who has come.
SECONDS_BETWEEN_LOOKS = 0.005
# One wait at the store; how many follow each other has no limit.
STORE_WAIT = timedelta(seconds=60)

Backend = Literal["auto", "nccl", "gloo"]
Device = Literal["auto", "cpu", "cuda"]


class ProcessGroupError(ValueError):
    """A process group that cannot be: the message says which setting or device is in the way."""


class RankZeroError(RuntimeError):
    """Rank 0 failed in work that this rank waited for; the message is rank 0's own."""


@dataclass(frozen=True)
class World:
    """The processes of this job, seen from one of them.

    Attributes:
        rank: of this process, 0 <= rank < world_size.
        local_rank: the same within this machine.
        world_size: processes in the job.
        device: where this process computes.
        backend: "nccl" or "gloo"; None when the process is alone.
        store: the key-value store at which the processes met; None when alone.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str | None = None
    store: torch_dist.Store | None = None
    _meetings: "itertools.count[int]" = field(default_factory=itertools.count, repr=False)

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 while the others wait, and give its result to all.

        For preparing data, choosing a checkpoint, writing one: work whose outcome must be one
        decision, and that may take longer than any time-out of the process group. So the others
        wait at the store, not in a collective.

        Args:
            work: returns something that JSON can carry.

        Returns:
            The result as JSON gives it back, on rank 0 too: a tuple is a list on every rank.

        Raises:
            RankZeroError: on the other ranks, when work raised on rank 0; there, its own exception.
        """
        key = f"on_rank_zero/{next(self._meetings)}"
        if self.rank == 0:
            try:
                message = json.dumps({"result": work()})
            except Exception as error:
                if self.store is not None:
                    self.store.set(key, json.dumps({"error": f"{error}"}))
                raise
            if self.store is not None:
                self.store.set(key, message)
        else:
            assert self.store is not None
            message = _wait_for(self.store, key)
        answer = json.loads(message)
        if "error" in answer:
            raise RankZeroError(answer["error"])
        return answer["result"]


def check_backend(backend: Backend, device_type: str) -> None:
    """Refuse a backend that cannot move this device's tensors.

    Args:
        backend: as it was asked for.
        device_type: cpu or cuda.

    Raises:
        ProcessGroupError: nccl without GPUs.
    """
    if backend == "nccl" and device_type != "cuda":
        raise ProcessGroupError("backend nccl needs GPUs: use backend gloo, or leave it out")


def init_process_group(
    backend: Backend = "auto", device: Device = "auto", timeout_seconds: float = 600.0
) -> World:
    """Meet the other processes.

    Args:
        backend: auto is nccl on GPUs and gloo on CPUs.
        device: auto is the GPU of LOCAL_RANK where there are GPUs, else the CPU.
        timeout_seconds: after which a collective gives up on a silent rank.

    Raises:
        ProcessGroupError: half-set environment, fewer GPUs than local ranks, nccl without GPUs,
            an address that is in use or unknown, a time-out that is no positive number.
    """
    rank, local_rank, world_size, local_world_size = _environment()
    where = _device(device, local_rank, local_world_size)
    if not (timeout_seconds > 0 and math.isfinite(timeout_seconds)):
        raise ProcessGroupError(
            f"timeout_seconds is {timeout_seconds}, it must be a positive number of seconds"
        )
    check_backend(backend, where.type)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world_size == 1:
        return World(0, 0, 1, where)
    chosen = ("nccl" if where.type == "cuda" else "gloo") if backend == "auto" else backend
    timeout = timedelta(seconds=timeout_seconds)
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    if not re.fullmatch(r".+:\d+", address):
        raise ProcessGroupError(
            f"MASTER_ADDR:MASTER_PORT is {address}: set both, alike on every rank, to an address "
            "of rank 0's machine and a free port of it; torchrun sets them"
        )
    try:
        store, _, _ = next(torch_dist.rendezvous("env://", rank, world_size, timeout=timeout))
    except (torch_dist.DistNetworkError, torch_dist.DistStoreError) as error:
        raise ProcessGroupError(
            f"the processes cannot meet at {address} ({_first_line(error)}): "
            "is the port in use, or a rank missing? Choose another MASTER_PORT"
        ) from error
    store = torch_dist.PrefixStore(_fresh_token(store, rank, world_size, timeout), store)
    torch_dist.init_process_group(
        chosen,
        store=torch_dist.PrefixStore("process_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=where if chosen == "nccl" else None,
    )
    return World(rank, local_rank, world_size, where, chosen, store)


def shut_down(world: World) -> None:
    """Leave after a good end: wait until every rank has come this far, then destroy the group.

    Not for the way out of a failure, where a rank that waits for others may wait for ever.
    """
    if world.store is None:
        return
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def set_random_seed(seed: int, rank: int = 0) -> None:
    """Seed torch, CUDA, numpy and random with seed + rank, and make cuDNN deterministic.

    What every rank must draw alike (batches, validation windows) has generators of its own; these
    global ones serve dropout, and the initial weights, which DDP then takes from rank 0.
    """
    torch.manual_seed(seed + rank)  # CUDA's generators included
    np.random.seed((seed + rank) % 2**32)
    random.seed(seed + rank)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _environment() -> tuple[int, int, int, int]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, or those of a world of one."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 0, 1, 1
    values = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            raise ProcessGroupError(
                f"environment variable {name} is {text!r}: set RANK, LOCAL_RANK and WORLD_SIZE "
                "all three, or none; torchrun sets them"
            )
        values.append(int(text))
    rank, local_rank, world_size = values
    if rank >= world_size:
        raise ProcessGroupError(f"RANK is {rank}, but WORLD_SIZE is {world_size}")
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    fewest = local_rank + 1
    return (
        rank,
        local_rank,
        world_size,
        int(local_world_size) if local_world_size.isdecimal() else fewest,
    )


def _device(device: Device, local_rank: int, local_world_size: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        if device == "cuda":
            raise ProcessGroupError("device is cuda, but torch sees no GPU here: use device cpu")
        return torch.device("cpu")
    if local_world_size > gpus:
        raise ProcessGroupError(
            f"{local_world_size} processes on this machine, but {gpus} GPUs: "
            f"start {gpus} processes, or use device cpu"
        )
    return torch.device("cuda", local_rank)


def _fresh_token(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that these processes share, and none that met at this store before them.

    torchrun keeps its store when it starts its ranks anew: without such a name in front of every
    key they would read addresses, and decisions of rank 0, of the ranks that are gone. No variable
    tells the old from the new in every case. So each rank says hello with a number of its own, rank
    0 answers each number that it sees with its token, until all ranks have confirmed that.

    Raises:
        ProcessGroupError: a rank is missing.
    """
    if rank != 0:
        hello = uuid.uuid4().hex
        store.set(f"hello/{rank}", hello)
        try:
            store.wait([f"welcome/{hello}"], timeout)
            token = store.get(f"welcome/{hello}").decode()
            store.set(f"confirmed/{token}/{rank}", "")
            store.wait([f"complete/{token}"], timeout)
        except torch_dist.DistStoreError as error:
            raise ProcessGroupError(
                f"of {world_size} ranks some did not come within {timeout.total_seconds():g} s"
            ) from error
        return token
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size))
    answered: set[str] = set()
    while missing := [r for r in missing if not store.check([f"confirmed/{token}/{r}"])]:
        if time.monotonic() > deadline:
            raise ProcessGroupError(
                f"of {world_size} ranks {', '.join(map(str, missing))} did not come within "
                f"{timeout.total_seconds():g} s"
            )
        for other in missing:
            if store.check([f"hello/{other}"]):
                hello = store.get(f"hello/{other}").decode()
                if hello not in answered:
                    store.set(f"welcome/{hello}", token)
                    answered.add(hello)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    store.set(f"complete/{token}", "")
    return token


def _wait_for(store: torch_dist.Store, key: str) -> str:
    """Wait at the store for as long as it takes; raises when the store itself is gone."""
    while True:
        try:
            store.wait([key], STORE_WAIT)
            return store.get(key).decode()
        except torch_dist.DistStoreError:
            continue  # a time-out: rank 0 is still at work


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
