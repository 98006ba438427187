"""A layer that makes its weight's gradient may write it straight into the bucket, and nothing else
changes: not with several uses, accumulation, errors in between or shards."""

import contextlib
import copy
import gc
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dist.collectives import rank, world_size
from dist.ddp import DDP
from dist.reducer import Reducer
from dist.sharded_optimizer import ShardedOptimizer
from tests.dist.helpers import WORLD_SIZES, ensure_group, fingerprint, gradients
from tests.harness import run_distributed


class _Scale(torch.autograd.Function):
    """x * weight, whose gradient is written where the weight says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        place = ctx.weight.grad_memory(ctx.weight)
        found = (grad * x).sum(0)
        if place is not None:
            LENT.append(ctx.weight)
            found = place.copy_(found)
        return grad * ctx.weight, found


# Weights whose places were lent since this was cleared.
LENT: list[Any] = []


class Scales(nn.Module):
    """Weights that are multiplied in, in a given order; only some of them write in place."""

    def __init__(self, width: int = 5, count: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(width, generator=generator) for _ in range(count)
        )

    def forward(self, x: Tensor, order: tuple[int, ...], is_placed: bool) -> Tensor:
        for index in order:
            weight = self.weights[index]
            is_own = is_placed and index != 2 and world_size() > 1
            x = torch.tanh(_Scale.apply(x, weight) if is_own else x * weight)
        return x


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank())
    return torch.randn(3, 5, generator=generator)


def train(is_placed: bool, is_sharded: bool, bucket_cap_mb: float) -> tuple[str, int]:
    """Fingerprint of all weights and gradients on the way, and how many places were lent."""
    LENT.clear()
    ddp = DDP(Scales(), bucket_cap_mb)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if is_sharded:
        optimizer = ShardedOptimizer(
            ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1, momentum=0.9
        )
    found = []
    for step, order in enumerate([(0, 1, 2, 3), (3, 0, 0, 1, 3), (2,), (1, 2), (0, 1, 2, 3)]):
        with ddp.no_sync():
            ddp(batch(step), order, is_placed).sum().backward()
        ddp(batch(step + 100), order[::-1], is_placed).sum().backward()
        ddp.finish_gradient_sync()
        if not is_sharded:
            found += gradients(ddp)
        optimizer.step()
        # In one step of several they are not cleared, and add up.
        if step != 2:
            optimizer.zero_grad()
    found += list(ddp.state_dict().values())
    return fingerprint(found), len(LENT)


def train_both_ways(is_sharded, bucket_cap_mb):
    placed, lent = train(True, is_sharded, bucket_cap_mb)
    plain, none = train(False, is_sharded, bucket_cap_mb)
    assert placed == plain
    assert none == 0
    if world_size() > 1:
        assert lent > 6
    return placed


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_training_is_the_same_to_the_bit(size, bucket_cap_mb, is_sharded):
    results = run_distributed(train_both_ways, size, is_sharded, bucket_cap_mb)
    assert len(set(results)) == 1


def places_of_one_backward():
    ddp: Any = DDP(Scales())
    (reducer,) = ddp._reducers
    with ddp.no_sync():
        ddp(batch(0), (0, 1, 2, 3, 0), True).sum().backward()
    buffer: Any = reducer._buffer
    views = [view.data_ptr() for view in reducer._views]
    assert all(buffer.data_ptr() <= p.grad.data_ptr() for p in ddp.parameters())
    assert sorted(p.grad.data_ptr() for p in ddp.parameters()) == sorted(views)
    # Once for the weight of two uses, whose sum is a third tensor; never for number 2.
    assert [ddp.place_of(weight) for weight in LENT] == [0, 3, 1]
    assert all(weight.grad_memory(weight) is None for weight in ddp.parameters())
    ddp(batch(1), (0, 1, 2, 3), True).sum().backward()
    assert all(weight.grad is None for weight in ddp.parameters())  # they are on their way
    assert all(weight.grad_memory(weight) is None for weight in ddp.parameters())
    ddp.finish_gradient_sync()


def test_a_place_is_lent_once_and_not_after_the_bucket_was_sent():
    run_distributed(places_of_one_backward, 2)


def gradients_that_come():
    """Where the gradients lie that autograd hands over, before DDP moves what it must."""
    ddp: Any = DDP(Scales())
    lie_there, take = [], Reducer.take

    def watch(self: Any, index: int, is_complete: bool) -> bool:
        place = self.bucket.parameters[index].grad.data_ptr()
        lie_there.append(place == self._views[index].data_ptr() if self._views else False)
        return take(self, index, is_complete)

    with mock.patch.object(Reducer, "take", watch):
        for step in range(2):
            ddp(batch(step), (0, 1, 2, 3), True).sum().backward()
            ddp.finish_gradient_sync()
            ddp.zero_grad()
    return lie_there


def test_what_a_layer_wrote_into_the_bucket_is_there_and_not_moved():
    # In the order of backward, 3 2 1 0; the layer of number 2 writes nowhere itself.
    assert run_distributed(gradients_that_come, 2) == [[True, False, True, True] * 2] * 2


def second_backward(is_placed):
    """A backward too many is refused, and leaves the sum of the first one as it is."""
    ddp = DDP(Scales(), 1e-6)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    for is_too_many in (False, True):
        loss = ddp(batch(is_too_many), (0, 1, 2, 3), is_placed).sum()
        with pytest.raises(RuntimeError) if is_too_many else contextlib.nullcontext():
            loss.backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    return fingerprint(ddp.state_dict().values())


def test_a_second_backward_does_not_write_into_what_was_sent():
    placed, plain = (run_distributed(second_backward, 2, is_placed) for is_placed in (True, False))
    assert placed == plain
    assert len(set(placed)) == 1


def break_off_and_go_on(is_sharded):
    """A backward that raises in the middle leaves nothing behind that a later one would trip on."""

    def fail(grad: Tensor) -> None:
        raise ValueError("in the middle")

    ddp = DDP(Scales())
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if is_sharded:
        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    middle = ddp(batch(0), (0, 1), True)
    middle.register_hook(fail)
    end = ddp(middle, (3, 2, 1), True)
    with pytest.raises(ValueError, match="in the middle"):
        end.sum().backward()
    ddp.zero_grad()
    LENT.clear()
    ddp(batch(1), (0, 1, 2, 3), True).sum().backward()
    assert len(LENT) == 3
    ddp.finish_gradient_sync()
    optimizer.step()
    return fingerprint(ddp.state_dict().values())


@pytest.mark.parametrize("is_sharded", [False, True])
def test_after_an_exception_places_are_lent_again(is_sharded):
    results = run_distributed(break_off_and_go_on, 2, is_sharded)
    assert len(set(results)) == 1


def copies_and_ends():
    ensure_group()
    ddp = DDP(Scales())
    module: Any = ddp.module
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        # A copy is none of the wrapper's.
        assert not any(getattr(p, "grad_memory", None) for p in twin.parameters())
    file = io.BytesIO()
    torch.save(dict(module.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert not any(getattr(p, "grad_memory", None) for p in loaded.values())
    shallow = copy.copy(module.weights[0])
    assert shallow.grad_memory(shallow) is None
    assert module.weights[0].grad_memory(module.weights[0]) is not None
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None
    assert [p.grad_memory(p) for p in module.parameters()] == [None] * 4
    again = DDP(module)
    again(batch(0), (0, 1), True).sum().backward()
    again.finish_gradient_sync()
    assert module.weights[0].grad is not None


def test_copies_have_no_places_and_the_wrapper_is_not_kept_alive():
    run_distributed(copies_and_ends, 2)
