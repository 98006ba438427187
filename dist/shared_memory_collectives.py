"""Buckets between processes of one host: each rank reads what the others wrote.

Every buffer is memory that all ranks have mapped. What travels are messages of 32 bytes:

    reduce-scatter  READY: my buffer is written. Who has heard it of all averages its own shard of
                    all buffers; DONE: I have read, your buffers may be written again.
    all-reduce      the same, but each writes its averaged shard into all buffers; DONE: it is
                    there. With DONE from all, the buffer is complete and nobody else touches it.
    all-gather      READY: my shard is written. Who has heard it of all copies the other shards;
                    DONE: I have read yours.

No process group is needed: what is under way when that is destroyed still arrives. All of it runs
on the calling thread. A thread of its own would take the core from the computation
that it hides behind; instead, each start of a collective also moves those before it along, if the
others are ready, and most are finished before they are waited for.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dist.collectives import all_gather_objects, mean_into, rank, timeout_seconds
from dist.shared_memory import (
    LINK_TIMEOUT_SECONDS,
    SharedMemory,
    answer,
    call,
    host_key,
    listen,
    may_allocate,
)
from dist.wait_time import WaitTime

READY, DONE = 1, 2

T = TypeVar("T")

# Buffers of about one size that were given back and that other ranks still read.
MOST_UNREAD = 3


def open_shared_memory() -> "SharedMemoryCollectives | None":
    """Link all ranks, if all are on one host; every rank must call it, and all get the same."""
    keys = all_gather_objects(host_key() if may_allocate() else None)
    if keys[0] is None or any(key != keys[0] for key in keys):
        return None
    soon = min(timeout_seconds(), LINK_TIMEOUT_SECONDS)
    listener, name = listen()
    with listener:
        names = all_gather_objects(name)
        # Some systems forbid one of these steps; gloo always works. Each is taken when all ranks
        # have taken the one before, so that nobody waits for one who could not.
        called = _on_all_ranks(lambda: call(names, rank(), soon))
        if called is None:
            return None
        answered = _on_all_ranks(lambda: answer(listener, names, rank(), soon))
        if answered is None:
            return None
    memory = _on_all_ranks(lambda: SharedMemory(rank(), called | answered, timeout_seconds()))
    return None if memory is None else SharedMemoryCollectives(memory)


class SharedMemoryCollectives:
    """See `dist.collectives.BucketCollectives`."""

    # Measured: smaller ones cost more in messages than they gain by staying in the cache. Of a
    # step's time beyond the computation 25 MB take a third more.
    bucket_cap_mb = all_reduce_cap_mb = 50.0

    def __init__(self, memory: SharedMemory) -> None:
        self.bytes_sent = 0
        self.wait_time = WaitTime()
        self._memory = memory
        self._numbers = itertools.count()
        # By address, those that are lent: the first byte of their memory, and all of it.
        self._lent: dict[int, tuple[int, Tensor]] = {}
        self._free: list[tuple[int, Tensor]] = []
        # By address: the operation that other ranks may still be reading the buffer for.
        self._read_by_others: dict[int, int] = {}
        self._under_way: deque[_Operation] = deque()

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that all ranks map, out of what was given back and is no longer read."""
        nbytes = numel * dtype.itemsize
        fitting = [free for free in self._free if nbytes <= free[1].numel() <= 2 * nbytes]
        chosen = next((free for free in fitting if self._is_writable(free[1].data_ptr())), None)
        if chosen is None and len(fitting) >= MOST_UNREAD:
            # So far ahead of the others that there is nothing to gain: wait instead of growing.
            chosen = fitting[0]
            self.wait_until_writable(chosen[1])
        if chosen is None:
            chosen = self._memory.allocate(nbytes)
        else:
            self._free = [free for free in self._free if free is not chosen]
        self._lent[chosen[1].data_ptr()] = chosen
        return chosen[1][:nbytes].view(dtype)

    def recycle(self, buffer: Tensor) -> None:
        """Keep the memory for the next buffer; it is not lent before all ranks have read it."""
        self._free.append(self._lent.pop(buffer.data_ptr()))

    def wait_until_writable(self, buffer: Tensor) -> None:
        """Wait for DONE of the last operation on the buffer."""
        operation = self._read_by_others.pop(buffer.data_ptr(), None)
        if operation is not None:
            with self.wait_time.counted():
                self._memory.wait_for_all(DONE, operation)
            del self._memory.messages[DONE, operation]

    def reduce_scatter_mean(self, buffer: Tensor, shard: Tensor) -> "_Operation":
        """Read this rank's shard in all ranks' buffers."""

        def average(buffers: list[Tensor]) -> None:
            mean_into([shard], self._own_shards(buffers), len(buffers))

        self._count(buffer, 1)
        return self._start(buffer, average)

    def all_reduce_mean(self, buffer: Tensor) -> "_Operation":
        """Read this rank's shard in all ranks' buffers, and write the average there."""

        def average(buffers: list[Tensor]) -> None:
            shards, own = self._own_shards(buffers), self._memory.rank
            mean_into([shards[own], *shards[:own], *shards[own + 1 :]], shards, len(buffers))

        self._count(buffer, 2)
        return self._start(buffer, average, writes_to_others=True)

    def all_gather(self, buffer: Tensor) -> "_Operation":
        """Copy every other rank's shard out of its buffer."""

        def copy(buffers: list[Tensor]) -> None:
            length = buffer.numel() // len(buffers)
            for owner, other in enumerate(buffers):
                if owner != self._memory.rank:
                    shard = slice(owner * length, (owner + 1) * length)
                    buffer[shard].copy_(other[shard])

        self._count(buffer, 1)
        return self._start(buffer, copy)

    def all_reduce_max(self, flags: Tensor, result: Tensor) -> "_Operation":
        """Read all flags of all ranks."""

        def largest(buffers: list[Tensor]) -> None:
            torch.amax(torch.stack(buffers), dim=0, out=result)

        return self._start(flags, largest)

    def move_along(self) -> None:
        """Carry on what can be carried on without waiting, in the order of starting."""
        for operation in self._under_way:
            if not operation.try_to_work():
                break  # nor has anybody who is behind with this one started the next
        while self._under_way and self._under_way[0].try_to_end():
            self._under_way.popleft()

    def _start(
        self,
        buffer: Tensor,
        work: Callable[[list[Tensor]], None],
        writes_to_others: bool = False,
    ) -> "_Operation":
        start, _ = self._lent[buffer.data_ptr()]
        number = next(self._numbers)
        self._memory.tell_all(READY, number, start, buffer.nbytes)
        operation = _Operation(self, number, buffer, work, writes_to_others)
        self._under_way.append(operation)
        self.move_along()
        return operation

    def _buffers(self, number: int, buffer: Tensor) -> list[Tensor]:
        """Every rank's buffer of an operation that all are ready for, in rank order."""
        ready, own = self._memory.messages.pop((READY, number)), self._memory.rank
        buffers = []
        for other in range(self._memory.world_size):
            if other == own:
                buffers.append(buffer)
                continue
            start, nbytes = ready[other]
            if nbytes != buffer.nbytes:
                raise RuntimeError(
                    f"ranks are at different collectives: rank {own} has a buffer of "
                    f"{buffer.nbytes} bytes, rank {other} one of {nbytes}"
                )
            buffers.append(self._memory.part_of(other, start, nbytes).view(buffer.dtype))
        return buffers

    def _own_shards(self, buffers: list[Tensor]) -> list[Tensor]:
        return [buffer.chunk(len(buffers))[self._memory.rank] for buffer in buffers]

    def _is_writable(self, address: int) -> bool:
        operation = self._read_by_others.get(address)
        if operation is None:
            return True
        if not self._memory.heard_from_all(DONE, operation):
            return False
        del self._memory.messages[DONE, operation], self._read_by_others[address]
        return True

    def _count(self, buffer: Tensor, times: int) -> None:
        ranks = self._memory.world_size
        self.bytes_sent += times * buffer.nbytes * (ranks - 1) // ranks


def _on_all_ranks(attempt: Callable[[], T]) -> T | None:
    """The result of an attempt, if every rank's has succeeded."""
    result = None
    with contextlib.suppress(OSError):
        result = attempt()
    return result if all(all_gather_objects(result is not None)) else None


class _Operation:
    """One collective under way; a `Work`."""

    def __init__(
        self,
        collectives: SharedMemoryCollectives,
        number: int,
        buffer: Tensor,
        work: Callable[[list[Tensor]], None],
        writes_to_others: bool,
    ) -> None:
        self._collectives = collectives
        self._number = number
        self._buffer = buffer
        self._work = work
        self._writes_to_others = writes_to_others
        self._is_worked = False
        self._is_over = False

    def wait(self) -> None:
        """Finish this one and, since they come first, those started before it."""
        with self._collectives.wait_time.counted():
            self._collectives.move_along()
            while not self._is_over:
                self._collectives._under_way[0].wait_for_others()
                self._collectives.move_along()

    def try_to_work(self) -> bool:
        """Do this rank's part if all are ready; whether it is done."""
        memory = self._collectives._memory
        if not self._is_worked and memory.heard_from_all(READY, self._number):
            self._work(self._collectives._buffers(self._number, self._buffer))
            memory.tell_all(DONE, self._number)
            self._is_worked = True
        return self._is_worked

    def try_to_end(self) -> bool:
        """Whether the result is there."""
        memory = self._collectives._memory
        if self._is_worked and not self._writes_to_others:
            self._collectives._read_by_others[self._buffer.data_ptr()] = self._number
            self._is_over = True
        elif self._is_worked and memory.heard_from_all(DONE, self._number):
            del memory.messages[DONE, self._number]
            self._is_over = True
        return self._is_over

    def wait_for_others(self) -> None:
        """Wait for whatever `try_to_work` or `try_to_end` came too early for."""
        kind = DONE if self._is_worked else READY
        self._collectives._memory.wait_for_all(kind, self._number)
