"""The collectives do the same for every number of ranks, none included."""

from unittest import mock

import pytest
import torch

from dist import collectives
from tests.dist.helpers import WORLD_SIZES
from tests.harness import run_distributed

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def all_collectives():
    rank, size = collectives.rank(), collectives.world_size()
    total = collectives.all_reduce_sum(torch.tensor([1.0, rank]))
    gathered = collectives.gather_objects({"rank": rank})
    everywhere = collectives.all_gather_objects(("rank", rank))
    told = collectives.broadcast_object(["from", rank])
    return (rank, size, collectives.is_distributed()), total, gathered, everywhere, told


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_collective_at_every_world_size(size):
    results = run_distributed(all_collectives, size)
    for rank, (place, total, gathered, everywhere, told) in enumerate(results):
        assert place == (rank, size, size > 1)
        assert total.tolist() == [size, sum(range(size))]
        assert gathered == ([{"rank": r} for r in range(size)] if rank == 0 else None)
        assert everywhere == [("rank", r) for r in range(size)]
        assert told == ["from", 0]


def broadcast_many():
    rank = collectives.rank()
    tensors = [torch.arange(6).add(rank).to(dtype).view(2, 3) for dtype in DTYPES]
    tensors.append(torch.full((), float(rank)))
    tensors.append(torch.full((4, 3), float(rank)).t())  # not contiguous
    tensors.append(torch.empty(0, 3))
    tensors.append(torch.nn.Parameter(torch.full((2,), float(rank))))
    storages = [tensor.data_ptr() for tensor in tensors]
    collectives.broadcast_tensors(tensors)
    assert storages == [tensor.data_ptr() for tensor in tensors]
    return [tensor.detach() for tensor in tensors]


@pytest.mark.parametrize("limit", [1, 40, 2**26], ids=["each alone", "some together", "all"])
def test_broadcast_overwrites_every_kind_of_tensor_by_rank_zeros(limit):
    (expected,) = run_distributed(broadcast_many, 1)
    for received in run_distributed(broadcast_with_limit, 3, limit):
        for ours, theirs in zip(received, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def broadcast_with_limit(limit):
    collectives.BROADCAST_BYTES = limit
    return broadcast_many()


def count_broadcasts(limit):
    collectives.BROADCAST_BYTES = limit
    sizes = []
    broadcast = torch.distributed.broadcast

    def counting(tensor, src):
        sizes.append(tensor.nbytes)
        return broadcast(tensor, src=src)

    with mock.patch.object(torch.distributed, "broadcast", counting):
        collectives.broadcast_tensors([torch.zeros(10) for _ in range(9)] + [torch.zeros(50)])
    return sizes


def test_broadcast_packs_small_tensors_and_lets_a_large_one_stand_alone():
    assert run_distributed(count_broadcasts, 2, 120) == [[120, 120, 120, 200]] * 2
