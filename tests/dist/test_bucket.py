"""The layout that DDP and the sharded optimizer stand on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dist.bucket import Bucket, make_buckets, unique


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)


def test_parameters_lie_end_to_end_in_the_given_order():
    bucket = Bucket([parameter(2, 3), parameter(), parameter(0, 4), parameter(5)])
    assert bucket.offsets == [0, 6, 7, 7]
    assert bucket.numel == bucket.padded_numel == 12


@pytest.mark.parametrize(
    ("world_size", "unit", "padded"), [(1, 1, 7), (4, 1, 8), (7, 1, 7), (3, 7, 21), (2, 5, 10)]
)
def test_a_buffer_is_padded_so_that_every_rank_gets_as_many_whole_units(world_size, unit, padded):
    bucket = Bucket([parameter(7)], world_size, unit)
    assert bucket.padded_numel == padded
    shards = [bucket.shard(rank, world_size) for rank in range(world_size)]
    assert {end - start for start, end in shards} == {padded // world_size}
    assert shards[0][0] == 0
    assert shards[-1][1] == padded


def test_views_have_the_parameters_shapes_and_share_the_buffers_memory():
    bucket = Bucket([parameter(2, 3), parameter(), parameter(4)], world_size=4)
    buffer = torch.arange(float(bucket.padded_numel))
    views = bucket.views(buffer)
    assert [view.shape for view in views] == [p.shape for p in bucket.parameters]
    assert views[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    views[1].fill_(-1)
    assert buffer[6] == -1


def test_a_bucket_holds_one_kind_only():
    with pytest.raises(ValueError, match="one dtype on one device"):
        Bucket([parameter(1), parameter(1, dtype=torch.float64)])


def test_buckets_hold_parameters_in_reverse_order_of_registration():
    parameters = [parameter(size) for size in range(1, 8)]
    buckets = make_buckets(parameters, capacity_bytes=40)
    dealt = [p for bucket in buckets for p in bucket.parameters]
    assert [id(p) for p in dealt] == [id(p) for p in reversed(parameters)]


def test_a_bucket_is_closed_before_it_exceeds_its_capacity():
    sizes = [3, 3, 4, 20, 1, 9, 1]
    buckets = make_buckets([parameter(size) for size in sizes], capacity_bytes=40)
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [
        [1, 9],  # 40 bytes: exactly full
        [1],
        [20],  # larger than a bucket: alone
        [4, 3, 3],
    ]


def test_each_kind_has_buckets_of_its_own():
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    buckets = make_buckets([parameter(2, dtype=kind) for kind in kinds], capacity_bytes=1e9)
    found = {bucket.dtype: len(bucket.parameters) for bucket in buckets}
    assert found == {torch.bfloat16: 2, torch.float64: 1, torch.float32: 2}


def test_the_first_bucket_may_be_smaller():
    buckets = make_buckets([parameter(2) for _ in range(6)], 24, first_capacity_bytes=8)
    assert [len(bucket.parameters) for bucket in buckets] == [1, 3, 2]


def test_whole_matrices_of_one_shape_are_shared_out_evenly():
    wide, tall = [parameter(2, 5) for _ in range(7)], [parameter(5, 2) for _ in range(2)]
    layers = [wide[0], tall[0], *wide[1:], tall[1]]
    buckets = make_buckets(layers, 100, world_size=3, whole_matrices=True)
    shapes = [{p.shape for p in bucket.parameters} for bucket in buckets]
    assert all(len(shape) == 1 for shape in shapes)
    # 100 bytes hold two matrices of 40, but a cut comes after three: one for each rank.
    assert [len(bucket.parameters) for bucket in buckets] == [3, 3, 2, 1]
    for bucket in buckets:
        for rank in range(3):
            for index, first, last in bucket.pieces(rank, 3):
                assert (first, last) == (0, bucket.parameters[index].numel())


def test_a_tied_parameter_counts_once():
    tied, other = parameter(3), parameter(2)
    assert [id(p) for p in unique([tied, other, tied])] == [id(tied), id(other)]
    (bucket,) = make_buckets([tied, other, tied], 1e9)
    assert bucket.numel == 5


@given(shapes, st.integers(1, 9), st.integers(1, 4))
def test_pieces_of_all_ranks_tile_every_parameter_exactly(shapes, world_size, unit):
    bucket = Bucket([parameter(*shape) for shape in shapes], world_size, unit)
    length = bucket.padded_numel // world_size
    covered: list[list[int]] = [[] for _ in shapes]
    for rank in range(world_size):
        held = 0
        for index, first, last in bucket.pieces(rank, world_size):
            assert first < last
            covered[index].extend(range(first, last))
            held += last - first
        assert held <= length
    for elements, p in zip(covered, bucket.parameters, strict=True):
        assert elements == list(range(p.numel()))


@given(shapes, st.integers(1, 9))
def test_a_piece_is_where_its_ranks_shard_says(shapes, world_size):
    bucket = Bucket([parameter(*shape) for shape in shapes], world_size)
    buffer = torch.arange(bucket.padded_numel, dtype=torch.float64)
    views = bucket.views(buffer)
    for rank in range(world_size):
        start, end = bucket.shard(rank, world_size)
        elements = [
            element
            for index, first, last in bucket.pieces(rank, world_size)
            for element in views[index].reshape(-1)[first:last].tolist()
        ]
        assert elements == list(range(start, min(end, bucket.numel)))


@given(shapes, st.integers(1, 9), st.integers(1, 200))
def test_every_parameter_is_in_one_bucket(shapes, world_size, capacity):
    parameters = [parameter(*shape) for shape in shapes]
    buckets = make_buckets(parameters, capacity, world_size)
    dealt = [id(p) for bucket in buckets for p in bucket.parameters]
    assert sorted(dealt) == sorted(id(p) for p in parameters)
    for bucket in buckets:
        assert bucket.padded_numel % world_size == 0
        assert len(bucket.parameters) == 1 or sum(p.nbytes for p in bucket.parameters) <= capacity
