"""Buckets between GPUs over NCCL, which has every collective and runs each on its own stream.

Only a sum of 16-bit gradients in float32 is not among them: there the shards are exchanged as they
are and added up here.
"""

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dist.collectives import HALF_PRECISION, BufferPool, mean_into, rank, world_size
from dist.wait_time import WaitTime


class NCCLCollectives:
    """See `dist.collectives.BucketCollectives`."""

    bucket_cap_mb = all_reduce_cap_mb = 25.0

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.wait_time = WaitTime(on_stream=True)
        self._pool = BufferPool()

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the GPU, out of what was given back."""
        return self._pool.lend(numel, dtype, device)

    def recycle(self, buffer: Tensor) -> None:
        """Keep the memory for the next buffer."""
        self._pool.take_back(buffer)

    def wait_until_writable(self, buffer: Tensor) -> None:
        """Nothing to wait for: the streams keep the order."""

    def reduce_scatter_mean(self, buffer: Tensor, shard: Tensor) -> "_Work":
        """NCCL's own; of 16-bit gradients all shards are fetched, and added up here."""
        self._count(buffer, 1)
        if buffer.dtype in HALF_PRECISION:
            received = torch.empty_like(buffer)
            work = torch_dist.all_to_all_single(received, buffer, async_op=True)
            return _Work(self.wait_time, work, [buffer, received], [shard])
        work = torch_dist.reduce_scatter_tensor(
            shard, buffer, op=torch_dist.ReduceOp.AVG, async_op=True
        )
        return _Work(self.wait_time, work, [buffer])

    def all_reduce_mean(self, buffer: Tensor) -> "_Work":
        """NCCL's own; in two halves where the sum is to be taken in float32."""
        if buffer.dtype in HALF_PRECISION:
            shard = buffer.chunk(world_size())[rank()]
            self.reduce_scatter_mean(buffer, shard).wait()
            return self.all_gather(buffer)
        self._count(buffer, 2)
        work = torch_dist.all_reduce(buffer, op=torch_dist.ReduceOp.AVG, async_op=True)
        return _Work(self.wait_time, work, [buffer])

    def all_gather(self, buffer: Tensor) -> "_Work":
        """NCCL's own."""
        self._count(buffer, 1)
        # In place, which NCCL supports.
        shard = buffer.chunk(world_size())[rank()]
        work = torch_dist.all_gather_into_tensor(buffer, shard, async_op=True)
        return _Work(self.wait_time, work, [buffer])

    def all_reduce_max(self, flags: Tensor, result: Tensor) -> "_Work":
        """NCCL's own."""
        result.copy_(flags)
        work = torch_dist.all_reduce(result, op=torch_dist.ReduceOp.MAX, async_op=True)
        return _Work(self.wait_time, work, [result])

    def _count(self, buffer: Tensor, times: int) -> None:
        self.bytes_sent += times * buffer.nbytes * (world_size() - 1) // world_size()


class _Work:
    """A collective on NCCL's stream; waiting lets the current stream wait, not the host."""

    def __init__(
        self,
        wait_time: WaitTime,
        work: torch_dist.Work | None,
        holds: list[Tensor],
        averages_into: list[Tensor] | None = None,
    ) -> None:
        assert work is not None
        self._wait_time = wait_time
        self._work = work
        # Memory must not be given to somebody else while the collective reads it.
        self._holds = holds
        self._averages_into = averages_into

    def wait(self) -> None:
        with self._wait_time.counted():
            self._work.wait()
        if self._averages_into:
            received = self._holds[-1]
            mean_into(self._averages_into, received.chunk(world_size()), world_size())
        self._holds, self._averages_into = [], None
