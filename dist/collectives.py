"""The few collectives that training needs, the same for every backend and for a world of one.

gloo has no averaging reduction and moves large tensors best in few messages; NCCL has both. What
differs is hidden here, so that the files above read the same for all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

# Large enough to use the link fully, small enough not to double the memory of a model.
BROADCAST_BYTES = 64 * 2**20


def is_distributed() -> bool:
    """Whether there are other processes to talk to."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def world_size() -> int:
    """Processes in the group; 1 without one."""
    return torch_dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """This process's number in the group; 0 without one."""
    return torch_dist.get_rank() if is_distributed() else 0


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Add `tensor` over all ranks in place, and return it."""
    if is_distributed():
        torch_dist.all_reduce(tensor)
    return tensor


def start_all_reduce_mean(buffer: Tensor) -> torch_dist.Work | None:
    """Begin to average `buffer` over all ranks in place; wait() on the result to finish.

    Every rank must start the same buffers in the same order.
    """
    if not is_distributed():
        return None
    if torch_dist.get_backend() == "nccl":
        return torch_dist.all_reduce(buffer, op=torch_dist.ReduceOp.AVG, async_op=True)
    buffer.div_(world_size())
    return torch_dist.all_reduce(buffer, async_op=True)


def all_gather_shards(flat: Tensor) -> None:
    """Fill a flat tensor of world_size equal shards, each rank giving the one of its number."""
    if is_distributed():
        shards = list(flat.chunk(world_size()))
        if torch_dist.get_backend() == "nccl":
            # In place, which NCCL supports; all_gather would allocate the whole buffer again.
            torch_dist.all_gather_into_tensor(flat, shards[rank()])
        else:
            torch_dist.all_gather(shards, shards[rank()].clone())


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


def broadcast_object(value: Any) -> Any:
    """Give rank 0's small picklable object to every rank."""
    if not is_distributed():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box)
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
