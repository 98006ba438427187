"""The few collectives that training needs, the same for every backend and for a world of one.

The small ones, which wait, are functions here. The large ones move buckets: they are started, go on
beside the computation, and are waited for where the result is needed. How a bucket travels best
differs so much between processes of one host, hosts and GPUs (docs/distributed.md) that
there are three ways, `BucketCollectives` each, and `open_collectives` chooses.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dist import huge_pages
from dist.wait_time import WaitTime

# Large enough to use the link fully, small enough not to double the memory of a model.
BROADCAST_BYTES = 64 * 2**20

HALF_PRECISION = (torch.bfloat16, torch.float16)


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Return when the result is there (on a GPU: when it will be, for what is queued next)."""


class BucketCollectives(Protocol):
    """Collectives over flat buffers, started now and waited for later.

    Every rank must start the same ones, on buffers of the same length, in the same order. A buffer
    is world_size equal shards, one a rank. Sums of 16-bit buffers are taken in float32.

    Attributes:
        bytes_sent: by this rank so far, small messages left out.
        bucket_cap_mb: megabytes that travel best together.
        all_reduce_cap_mb: the same, where they are all-reduced.
        wait_time: for what was waited for, moving and adding up what came included.
    """

    bytes_sent: int
    wait_time: WaitTime
    bucket_cap_mb: float
    all_reduce_cap_mb: float

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer (numel,) for the methods below; only such buffers may be given to them.

        What it holds is undefined.
        """

    def recycle(self, buffer: Tensor) -> None:
        """Take a buffer back that nobody here needs any more, its last collective waited for."""

    def wait_until_writable(self, buffer: Tensor) -> None:
        """Wait until no other rank reads this buffer for a collective that was waited for."""

    def reduce_scatter_mean(self, buffer: Tensor, shard: Tensor) -> Work:
        """Average over the ranks: this rank's shard of it goes to `shard`.

        Args:
            buffer: of `new_buffer`; not to be written before `wait`, and undefined after it.
            shard: (numel / world_size,), of the buffer's dtype or float32.
        """

    def all_reduce_mean(self, buffer: Tensor) -> Work:
        """Average `buffer` over the ranks in place."""

    def all_gather(self, buffer: Tensor) -> Work:
        """Fill all shards of `buffer`, each rank giving the one of its number, in place.

        Other ranks may read this rank's shard until `wait_until_writable`.
        """

    def all_reduce_max(self, flags: Tensor, result: Tensor) -> Work:
        """The largest over the ranks of each element of a small uint8 buffer, into `result`."""


def open_collectives(device: torch.device) -> BucketCollectives:
    """The fastest collectives between these processes; every rank must call it.

    Args:
        device: of the buffers.
    """
    from dist.gloo_collectives import GlooCollectives
    from dist.nccl_collectives import NCCLCollectives
    from dist.shared_memory_collectives import open_shared_memory

    if torch_dist.get_backend() == "nccl":
        return NCCLCollectives()
    shared = open_shared_memory() if device.type == "cpu" else None
    return shared or GlooCollectives()


class BufferPool:
    """Flat buffers that were given back, for the next who needs one of about that length."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._whole: dict[int, Tensor] = {}  # by address, those that are lent

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer (numel,), of undefined content."""
        for place, memory in enumerate(self._free):
            fits = numel <= memory.numel() <= 2 * numel
            if fits and (memory.dtype, memory.device) == (dtype, device):
                del self._free[place]
                break
        else:
            memory = huge_pages.empty(numel, dtype, device)
        self._whole[memory.data_ptr()] = memory
        return memory[:numel]

    def take_back(self, buffer: Tensor) -> None:
        """Take back what was lent."""
        self._free.append(self._whole.pop(buffer.data_ptr()))


def mean_into(targets: Sequence[Tensor], parts: Sequence[Tensor], count: int) -> None:
    """Sum `parts` in the order given, divide by `count`, write the result to every target.

    On the CPU in pieces that stay in the cache, so that memory is read and written once. Every
    target may be one of the parts.

    Args:
        targets: 1-D, of any dtypes.
        parts: 1-D and of the targets' length; 16-bit ones are added up in float32.
        count: divisor.
    """
    first, target = parts[0], targets[0]
    wide = torch.float32 if first.dtype in HALF_PRECISION else first.dtype
    # Adding up in the target itself saves a pass; not if that is a part that is yet to be added.
    is_alike = (target.dtype, target.device) == (wide, first.device)
    is_free = is_alike and all(target.data_ptr() != part.data_ptr() for part in parts[2:])
    # To divide by a power of two is exact but for subnormal numbers, before the sum as after it. By
    # another it would be rounded, and otherwise in the last elements than in a vector unit's.
    is_exact = math.frexp(count)[0] == 0.5
    is_one_pass = is_free and first.dtype == wide and len(targets) == 1 and len(parts) == 2
    length = max(first.numel(), 1)
    if first.device.type == "cpu" and not (is_one_pass and is_exact):
        length = min(length, CHUNK * torch.get_num_threads())
    scratch = None if is_free else torch.empty(length, dtype=wide, device=first.device)
    share, one = 1 / count, torch.ones(1, dtype=wide, device=first.device)
    for start in range(0, first.numel(), length):
        chunk = slice(start, min(start + length, first.numel()))
        pieces = [part[chunk].to(wide) for part in parts]
        total = target[chunk] if scratch is None else scratch[: len(pieces[0])]
        if len(pieces) == 1:
            torch.mul(pieces[0], share, out=total)
        elif is_exact:
            # share * a + share * b * 1: no other operation scales and adds in one pass.
            column, result = pieces[0].unsqueeze(1), total.unsqueeze(1)
            torch.addr(column, pieces[1], one, beta=share, alpha=share, out=result)
            for other in pieces[2:]:
                total.add_(other, alpha=share)
        else:
            torch.add(pieces[0], pieces[1], out=total)
            for other in pieces[2:]:
                total.add_(other)
            total.mul_(share)
        for other in targets if scratch is not None else targets[1:]:
            other[chunk].copy_(total)


# Elements: with a few parts of float32 still inside a core's second-level cache.
CHUNK = 64 * 1024


def is_distributed() -> bool:
    """Whether there are other processes to talk to."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def world_size() -> int:
    """Processes in the group; 1 without one."""
    return torch_dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This process's number in the group; 0 without one."""
    return torch_dist.get_rank() if is_distributed() else 0


def timeout_seconds() -> float:
    """After which the process group's collectives give up on a silent rank."""
    group = torch_dist.group.WORLD
    assert group is not None
    device = "cuda" if torch_dist.get_backend() == "nccl" else "cpu"
    # torch offers no other way to ask.
    options = group._get_backend(torch.device(device)).options
    return options._timeout.total_seconds()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Add `tensor` over all ranks in place, and return it."""
    if is_distributed():
        torch_dist.all_reduce(tensor)
    return tensor


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors by rank 0's, packed into few large messages by dtype and device."""
    if not is_distributed():
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in by_kind.values():
        for group in _groups_of_bytes(same_kind, BROADCAST_BYTES):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            # As bytes: gloo refuses some types that buffers have, such as int16.
            torch_dist.broadcast(flat.view(torch.uint8), src=0)
            offset = 0
            for tensor in group:
                piece = flat[offset : offset + tensor.numel()]
                tensor.detach().copy_(piece.view(tensor.shape))
                offset += tensor.numel()


def gather_objects(value: Any) -> list[Any] | None:
    """Collect one small picklable object from every rank, in rank order, on rank 0."""
    if not is_distributed():
        return [value]
    gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
    torch_dist.gather_object(value, gathered)
    return gathered


def all_gather_objects(value: Any) -> list[Any]:
    """Give every rank one small picklable object of every rank, in rank order."""
    return broadcast_object(gather_objects(value))


def broadcast_object(value: Any, group: torch_dist.ProcessGroup | None = None) -> Any:
    """Give rank 0's small picklable object to every rank, over `group` or the default one."""
    if not is_distributed():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, group=group)
    return box[0]


def _groups_of_bytes(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Cut a list into runs of at most `limit` bytes; a larger tensor stands alone."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups
