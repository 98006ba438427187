"""What NCCL is asked for, which tests without a GPU can only listen to."""

import pytest
import torch
import torch.distributed as torch_dist

from dist import collectives


@pytest.mark.parametrize(
    ("backend", "op", "handed_over"),
    [("nccl", torch_dist.ReduceOp.AVG, 6.0), ("gloo", torch_dist.ReduceOp.SUM, 1.5)],
)
def test_a_mean_is_divided_once_by_the_backend_where_it_can_and_by_us_elsewhere(
    monkeypatch, backend, op, handed_over
):
    asked = []

    def all_reduce(tensor, op=torch_dist.ReduceOp.SUM, group=None, async_op=False):
        asked.append((tensor.tolist(), op, async_op))
        return "work"

    monkeypatch.setattr(torch_dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch_dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch_dist, "all_reduce", all_reduce)
    assert collectives.start_all_reduce_mean(torch.tensor([6.0])) == "work"
    assert asked == [([handed_over], op, True)]
