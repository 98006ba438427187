"""What NCCL is asked for, which tests without a GPU can only listen to."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from dist.nccl_collectives import NCCLCollectives

CPU = torch.device("cpu")


class Work:
    def __init__(self, effect=lambda: None):
        self.effect = effect

    def wait(self):
        self.effect()


class Event:
    """A moment of a stream, which a test lets pass."""

    def __init__(self, enable_timing):
        assert enable_timing
        self.moment = -1
        self.is_past = False

    def record(self):
        self.moment = next(MOMENTS)

    def query(self):
        return self.is_past

    def elapsed_time(self, end):
        assert end.is_past
        return 250.0 * (end.moment - self.moment)  # milliseconds


MOMENTS = itertools.count()


@pytest.fixture
def asked(monkeypatch):
    """A world of four ranks that all hold the same; this is rank 1."""
    calls = []

    def record(name, effect=lambda *tensors: None):
        def collective(*tensors, op=torch_dist.ReduceOp.SUM, async_op=False):
            calls.append((name, op, async_op))
            return Work(lambda: effect(*tensors))

        monkeypatch.setattr(torch_dist, name, collective)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    record("all_reduce")
    record("reduce_scatter_tensor", lambda shard, buffer: shard.copy_(buffer.chunk(4)[1]))
    record("all_gather_into_tensor")
    record("all_to_all_single", lambda got, given: got.copy_(given.chunk(4)[1].repeat(4)))
    monkeypatch.setattr(torch_dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch_dist, "get_rank", lambda: 1)
    return calls


def test_a_mean_is_taken_by_nccl_itself(asked):
    collectives = NCCLCollectives()
    buffer = collectives.new_buffer(8, torch.float32, CPU).copy_(torch.arange(8.0))
    shard = torch.empty(2)
    collectives.all_reduce_mean(buffer).wait()
    collectives.reduce_scatter_mean(buffer, shard).wait()
    collectives.all_gather(buffer).wait()
    assert shard.tolist() == [2, 3]
    assert asked == [
        ("all_reduce", torch_dist.ReduceOp.AVG, True),
        ("reduce_scatter_tensor", torch_dist.ReduceOp.AVG, True),
        ("all_gather_into_tensor", torch_dist.ReduceOp.SUM, True),
    ]


def test_sixteen_bit_gradients_are_fetched_and_added_up_in_float32(asked):
    collectives = NCCLCollectives()
    buffer = collectives.new_buffer(8, torch.bfloat16, CPU).copy_(torch.arange(8.0))
    shard = torch.empty(2)
    collectives.reduce_scatter_mean(buffer, shard).wait()
    assert asked == [("all_to_all_single", torch_dist.ReduceOp.SUM, True)]
    assert shard.tolist() == [2, 3]


def test_memory_that_was_given_back_is_lent_again(asked):
    collectives = NCCLCollectives()
    buffer = collectives.new_buffer(8, torch.float32, CPU)
    address = buffer.data_ptr()
    collectives.recycle(buffer)
    assert collectives.new_buffer(6, torch.float32, CPU).data_ptr() == address
    assert collectives.new_buffer(6, torch.float32, CPU).data_ptr() != address


def test_what_a_stream_waited_counts_when_it_is_over_and_makes_nobody_wait(asked):
    collectives = NCCLCollectives()
    buffer = collectives.new_buffer(8, torch.float32, CPU).zero_()
    wait_time: Any = collectives.wait_time
    for _ in range(3):
        collectives.all_gather(buffer).wait()
    assert wait_time.seconds() == 0
    for _, end in list(wait_time._events)[:2]:
        end.is_past = True
    assert wait_time.seconds() == 2 * 0.25
    assert wait_time.seconds() == 2 * 0.25
