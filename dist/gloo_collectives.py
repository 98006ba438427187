"""Buckets between hosts over gloo.

Gloo's own reduce-scatter and all-gather take two to four times as long as the same made of sends
and receives (docs/distributed.md), so that is how they are made here: every rank sends each other
rank the shard that is the other's, all at once, straight out of the bucket, and adds up what it
receives. The bytes are the least possible, and gloo's own threads move them while this one
computes. Its all-reduce is good, and used where the sum needs no float32 of its own.

Gloo reads and writes the CPU's memory alone: buffers on a GPU go through a copy.
"""

import itertools
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dist.collectives import HALF_PRECISION, BufferPool, mean_into, rank, world_size
from dist.wait_time import WaitTime

# Apart from the tags of other sends and receives in this process group. Second halves of
# all-reduces begin when something is waited for, on every rank at another place among the rest.
TAG = 2**20
TAG_OF_SECOND_HALVES = TAG + 1


class GlooCollectives:
    """See `dist.collectives.BucketCollectives`."""

    # Measured: at 1 Gbit/s a step is 4 to 7 % shorter than with 25, and with 2 or 4 no shorter.
    # With gloo's own all-reduce it is 1 to 4 % shorter with 16 than with 8, and 3 % than with 25.
    bucket_cap_mb = 8.0
    all_reduce_cap_mb = 16.0

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.wait_time = WaitTime()
        self._pool = BufferPool()
        self._numbers = itertools.count()
        # Of all-reduces in two halves: their numbers, and what begins the second.
        self._second_halves: deque[tuple[int, Callable[[], None]]] = deque()

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Ordinary memory, out of what was given back."""
        return self._pool.lend(numel, dtype, device)

    def recycle(self, buffer: Tensor) -> None:
        """Keep the memory for the next buffer."""
        self._pool.take_back(buffer)

    def wait_until_writable(self, buffer: Tensor) -> None:
        """Nothing to wait for: what was waited for has been sent."""

    def reduce_scatter_mean(self, buffer: Tensor, shard: Tensor) -> "_Work":
        """Send every other rank its shard, and add up those received."""
        host = buffer.cpu()
        received, works = self._exchange(lambda other: host.chunk(world_size())[other])

        def average() -> None:
            received[rank()] = host.chunk(world_size())[rank()]
            mean_into([shard], received, world_size())
            self._recycle_received(received)

        return self._work(works, average)

    def all_reduce_mean(self, buffer: Tensor) -> "_Work":
        """Gloo's own; in two halves where the sum is to be taken in float32."""
        if buffer.dtype in HALF_PRECISION:
            return self._all_reduce_in_float32(buffer)
        self._count(buffer, 2)
        host = buffer.cpu().div_(world_size()) if buffer.is_cuda else buffer.div_(world_size())
        work = torch_dist.all_reduce(host, async_op=True)
        assert work is not None
        return self._work([work], lambda: _copy_back(buffer, host))

    def all_gather(self, buffer: Tensor) -> "_Work":
        """Send every other rank this one's shard, and receive the others' in place."""
        host, works = self._begin_to_gather(buffer, TAG)
        return self._work(works, lambda: _copy_back(buffer, host))

    def all_reduce_max(self, flags: Tensor, result: Tensor) -> "_Work":
        """Gloo's own."""
        host = flags.cpu()
        host = host.clone() if host is flags else host
        work = torch_dist.all_reduce(host, op=torch_dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        return self._work([work], lambda: _copy_back(result, host))

    def _all_reduce_in_float32(self, buffer: Tensor) -> "_Work":
        shard = buffer.chunk(world_size())[rank()]
        scatter = self.reduce_scatter_mean(buffer, shard)
        works: list[torch_dist.Work] = []
        host = buffer

        def begin_second_half() -> None:
            nonlocal host
            scatter.wait()
            host, begun = self._begin_to_gather(buffer, TAG_OF_SECOND_HALVES)
            works.extend(begun)

        self._second_halves.append((next(self._numbers), begin_second_half))
        return self._work(works, lambda: _copy_back(buffer, host))

    def _work(self, works: list[torch_dist.Work], then: Callable[[], None]) -> "_Work":
        number = next(self._numbers)

        # Without this, two ranks that wait for two all-reduces in different orders would each wait
        # for a second half that the other has not begun.
        def begin_earlier_second_halves() -> None:
            while self._second_halves and self._second_halves[0][0] < number:
                _, begin = self._second_halves.popleft()
                begin()

        return _Work(self.wait_time, begin_earlier_second_halves, works, then)

    def _begin_to_gather(self, buffer: Tensor, tag: int) -> tuple[Tensor, list[torch_dist.Work]]:
        """Begin to fill the shards of a buffer, or of its copy on the host; returns which."""
        self._count(buffer, 1)
        host = buffer.cpu()
        shards = host.chunk(world_size())
        works = []
        for other in _others():
            works.append(torch_dist.irecv(shards[other], other, tag=tag))
            works.append(torch_dist.isend(shards[rank()], other, tag=tag))
        return host, [work for work in works if work is not None]

    def _exchange(
        self, shard_for: Callable[[int], Tensor]
    ) -> tuple[list[Tensor], list[torch_dist.Work]]:
        """Begin to send every other rank its shard, and to receive one's own from all."""
        own = shard_for(rank())
        received = [own] * world_size()
        works = []
        for other in _others():
            received[other] = self.new_buffer(own.numel(), own.dtype, own.device)
            works.append(torch_dist.irecv(received[other], other, tag=TAG))
            works.append(torch_dist.isend(shard_for(other), other, tag=TAG))
            self.bytes_sent += own.nbytes
        return received, [work for work in works if work is not None]

    def _recycle_received(self, received: list[Tensor]) -> None:
        for other in _others():
            self.recycle(received[other])

    def _count(self, buffer: Tensor, times: int) -> None:
        self.bytes_sent += times * buffer.nbytes * (world_size() - 1) // world_size()


class _Work:
    """Sends and receives under way, what goes before them, and what follows when they are over."""

    def __init__(
        self,
        wait_time: WaitTime,
        first: Callable[[], None],
        works: list[torch_dist.Work],
        then: Callable[[], None],
    ) -> None:
        self._wait_time = wait_time
        self._first = first
        self._works = works
        self._then = then

    def wait(self) -> None:
        with self._wait_time.counted():
            self._first()
            for work in self._works:
                work.wait()
            self._then()
        self._works, self._first, self._then = [], _nothing, _nothing


def _nothing() -> None:
    pass


def _others() -> list[int]:
    """The other ranks, each rank beginning with its neighbour, so that not all send to one."""
    return [(rank() + step) % world_size() for step in range(1, world_size())]


def _copy_back(buffer: Tensor, host: Tensor) -> None:
    if host is not buffer:
        buffer.copy_(host)
