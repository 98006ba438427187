"""What three ranks save, any number of ranks takes, with our DDP, without, and unsharded.

All gradients here are small whole numbers and the same on every rank, so that their averages are
exact: whoever goes on from a saved state must reach the very bits of a run that never stopped.
"""

import ctypes
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from dist.collectives import broadcast_object, rank, world_size
from dist.ddp import DDP
from dist.sharded_optimizer import ShardedOptimizer
from dist.sharded_state import TensorKind
from tests.dist.helpers import assert_close
from tests.harness import run_distributed
from training.allocator import M_MMAP_THRESHOLD

SHAPES = [(7, 5), (5,), (), (3, 4), (), (), (0, 4), (1,), (11,), (2, 3, 2), ()]
CAP_MB = 40 * 4 / 2**20
SAVED_AFTER, STEPS = 3, 6
# By step, whose weights have no gradient. The last has none before the state is saved.
UNUSED: dict[int, set[int]] = {0: {0, 4, 10}, 1: {3, 10}, 2: {10}, 4: {5}}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


class Products(nn.Module):
    """Its gradients are the whole numbers that it is given."""

    def __init__(self, shapes=tuple(SHAPES), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(dtype) for shape in shapes
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for index, weight in enumerate(self.weights):
            factors = torch.randint(-9, 9, weight.shape, generator=generator)
            if index not in UNUSED.get(step, ()):
                loss = loss + (weight * factors).sum().float()
        return loss


def open_training(kind, name, module):
    """DDP and optimizer; the optimizer is paired with it, sharded alone, or unsharded."""
    optimizer_cls, settings = OPTIMIZERS[name]
    ddp = DDP(module, CAP_MB)
    parameters = list(module.parameters())
    groups = [{"params": parameters[:4]}, {"params": parameters[4:], "weight_decay": 0.1}]
    if kind == "unsharded":
        return ddp, optimizer_cls(groups, **settings)
    paired = ddp if kind == "paired" else None
    return ddp, ShardedOptimizer(groups, optimizer_cls, ddp=paired, **settings)


def state_of(optimizer, module):
    if isinstance(optimizer, ShardedOptimizer):
        return broadcast_object(optimizer.gather_state(module.named_parameters()))
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in module.named_parameters()
        if optimizer.state.get(parameter) and parameter.numel() > 0
    }


def load_into(optimizer, module, state):
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_state(module.named_parameters(), state)
        return
    for name, parameter in module.named_parameters():
        if name in state:
            optimizer.state[parameter] = {key: value.clone() for key, value in state[name].items()}


def train(kind, name, steps, saved, shapes=tuple(SHAPES), dtype=torch.float32):
    module = Products(shapes, dtype)
    if saved is not None:
        module.load_state_dict(saved[0])
    ddp, optimizer = open_training(kind, name, module)
    if saved is not None:
        load_into(optimizer, module, saved[1])
        assert_same_state(state_of(optimizer, module), saved[1])
    for step in steps:
        loss = ddp(step)
        if loss.requires_grad:
            loss.backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(optimizer, module)
    weights = {key: value.clone() for key, value in ddp.state_dict().items()}
    return weights, state


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, entries in theirs.items():
        assert ours[name].keys() == entries.keys()
        for key, value in entries.items():
            assert ours[name][key].shape == value.shape, (name, key)
        assert_close(ours[name].values(), entries.values(), 0)


def train_every_optimizer(kind, steps, saved=None):
    return {
        name: train(kind, name, steps, None if saved is None else saved[name])
        for name in OPTIMIZERS
    }


def go_on_in_every_way(saved, straight):
    for kind in ("paired", "alone", "unsharded"):
        found = train_every_optimizer(kind, range(SAVED_AFTER, STEPS), saved)
        for name, (weights, state) in found.items():
            assert_close(weights.values(), straight[name][0].values(), 0)
            assert_same_state(state, straight[name][1])


@pytest.fixture(scope="module")
def straight():
    """One process and torch's own optimizers, from the first step to the last."""
    return run_distributed(train_every_optimizer, 1, "unsharded", range(STEPS))[0]


@pytest.mark.parametrize("saved_by", ["paired", "alone"])
def test_what_three_ranks_saved_goes_on_bit_for_bit_anywhere(straight, saved_by):
    saved = run_distributed(train_every_optimizer, 3, saved_by, range(SAVED_AFTER))[0]
    for size in (1, 2, 3, 4) if saved_by == "paired" else (2,):
        run_distributed(go_on_in_every_way, size, saved, straight)


def half_precision(saved, straight):
    """The masters go along; without them the weights are what training goes on from."""
    if saved is None:
        saved = train("paired", "adamw", range(SAVED_AFTER), None, dtype=torch.bfloat16)
        return saved, train("paired", "adamw", range(STEPS), None, dtype=torch.bfloat16)
    for kind in ("paired", "alone"):
        weights, state = train(
            kind, "adamw", range(SAVED_AFTER, STEPS), saved, dtype=torch.bfloat16
        )
        assert_close(weights.values(), straight[0].values(), 0)
        assert_same_state(state, straight[1])
    module = Products(dtype=torch.bfloat16)
    module.load_state_dict(saved[0])
    _, optimizer = open_training("paired", "adamw", module)
    without = {
        name: {key: value for key, value in entries.items() if key != "master"}
        for name, entries in saved[1].items()
    }
    load_into(optimizer, module, without)
    state = state_of(optimizer, module)
    for name, parameter in module.named_parameters():
        if parameter.numel() > 0:
            assert torch.equal(state[name]["master"], parameter.detach().float())
            is_rounded = torch.equal(state[name]["master"], saved[1][name]["master"])
            assert is_rounded == (name == "weights.10")  # which has not been updated yet


def test_masters_of_16_bit_weights_go_along():
    (saved, straight), *_ = run_distributed(half_precision, 3, None, None)
    for size in (1, 2, 4):
        run_distributed(half_precision, size, saved, straight)


def scalars_alone():
    shapes = ((), (), ())
    straight = train("unsharded", "nadam", range(3, 6), None, shapes)
    saved = train("paired", "nadam", range(3, 5), None, shapes)
    weights, state = train("paired", "nadam", range(5, 6), saved, shapes)
    assert_close(weights.values(), straight[0].values(), 0)
    assert_same_state(state, straight[1])


def test_a_counter_of_a_weight_without_dimensions_stays_one():
    run_distributed(scalars_alone, 2)


def messages_of_gathering():
    """Elements of every message that gathering the state moves, and of the largest shard."""
    module = Products(((50, 3), (40,), (300, 2), (7, 7), (), (90,)))
    ddp = DDP(module, 200 * 4 / 2**20)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, ddp=ddp)
    for step in (3, 5):
        ddp(step).backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
    received: list[int] = []
    irecv = torch_dist.irecv

    def record(data: Tensor, **kwargs: Any) -> Any:
        received.append(data.numel() // 4)  # bytes of float32
        return irecv(data, **kwargs)

    with mock.patch.object(torch_dist, "irecv", record):
        state = optimizer.gather_state(module.named_parameters())
    shards = [shard.bucket.padded_numel // world_size() for shard in optimizer._layout.shards]
    total = sum(p.numel() for p in module.parameters())
    if rank() == 0:
        assert sum(entries["exp_avg"].numel() for entries in state.values()) == total
    else:
        assert state == {}
    pieces = (piece for shard in optimizer._layout.shards for piece in shard.pieces)
    own = sum(piece.last - piece.first for piece in pieces)
    return received, shards, total, own


def test_no_message_of_a_state_is_larger_than_one_shard_of_a_bucket():
    (received, shards, total, own), *others = run_distributed(messages_of_gathering, 3)
    assert len(shards) >= 3
    # Two entries of two other ranks' shards.
    assert len(received) <= 2 * 2 * len(shards)
    assert max(received) <= max(shards) < total // 3
    assert sum(received) == 2 * (total - own)
    assert [messages for messages, *_ in others] == [[], []]


def peak_memory_of_gathering():
    """Bytes that this process grew by, at most, while the state was gathered; state's bytes."""
    # What is freed goes back at once: gaps between tensors in the heap come and go by chance.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(8)))
    ddp = DDP(module, 5.0)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, ddp=ddp)
    module(torch.ones(1, 1000)).sum().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.finish_gather()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here
    before = memory_of_this_process("VmRSS")
    state = optimizer.gather_state(module.named_parameters())
    return memory_of_this_process("VmHWM") - before, sum(
        value.nbytes
        for entries in state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    )


def memory_of_this_process(line):
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
def test_gathering_takes_the_memory_of_the_state_on_rank_zero_and_none_on_the_others():
    (grown, state), *others = run_distributed(peak_memory_of_gathering, 4)
    bucket = 5 * 2**20
    assert state >= 64_000_000
    assert grown <= state + 2 * bucket
    for grown, state in others:
        assert state == 0
        assert grown <= bucket


def gather_without_a_name():
    module = nn.Linear(3, 2)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    for call in (optimizer.gather_state, lambda named: optimizer.load_state(named, {})):
        with pytest.raises(ValueError, match=r"shape \(2,\) of this optimizer has no name"):
            call(list(module.named_parameters())[:1])


def test_a_parameter_without_a_name_is_an_error_on_every_rank():
    run_distributed(gather_without_a_name, 3)


def streamed_while_training_goes_on(param_dtype):
    """Gather copies in a thread, over a group of their own, beside three more steps."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 7), nn.Linear(7, 1)).to(param_dtype)
    module[1].bias.requires_grad_(False)
    ddp = DDP(module, 200 * 4 / 2**20)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, ddp=ddp)
    group = torch_dist.new_group(backend="gloo") if world_size() > 1 else None

    def step(number):
        torch.manual_seed(number * 10 + rank())
        ddp(torch.randn(4, 50, dtype=param_dtype)).sum().backward()
        ddp.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    step(2)
    named = dict(module.named_parameters())
    gather = optimizer.begin_gather_state(named.items(), with_weights=True)
    copies = [tensor.clone() for tensor in gather.tensors]
    optimizer.finish_gather()
    whole = optimizer.gather_state(named.items())
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    came: list[tuple[str, str, Tensor]] = []

    def move():
        came.extend((n, k, tensor.clone()) for n, k, tensor in gather.pieces(copies, group))

    thread = threading.Thread(target=move)
    thread.start()
    for number in range(3, 6):
        step(number)
    thread.join()
    if rank() != 0:
        assert (came, gather.described) == ([], {})
        return
    moved = {(name, key): tensor for name, key, tensor in came}
    assert len(moved) == len(came)
    for name, entries in gather.described.items():
        assert torch.equal(moved.pop((name, "weight")), weights[name]), name
        for key, value in whole.get(name, {}).items():
            found = moved.pop((name, key)) if isinstance(entries[key], TensorKind) else entries[key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(found, value), (name, key)
            if isinstance(entries[key], TensorKind):
                assert (entries[key].dtype, entries[key].shape) == (value.dtype, value.shape)
    assert not moved
    assert gather.described.keys() == named.keys()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_state_moves_to_rank_zero_while_training_goes_on(size, param_dtype):
    run_distributed(streamed_while_training_goes_on, size, param_dtype)


def peak_memory_of_streaming():
    """Bytes that this process grew by, at most, while everything was moved past it."""
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(16)))
    ddp = DDP(module, 5.0)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, ddp=ddp)
    module(torch.ones(1, 1000)).sum().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.finish_gather()
    gather = optimizer.begin_gather_state(module.named_parameters(), with_weights=True)
    for _ in gather.pieces(gather.tensors):  # gloo's own buffers come with the first use
        pass
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_of_this_process("VmRSS")
    for _ in gather.pieces(gather.tensors):
        pass
    return memory_of_this_process("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
def test_streaming_the_state_takes_the_memory_of_little_more_than_a_bucket():
    for grown in run_distributed(peak_memory_of_streaming, 4):
        assert grown <= 2 * 5 * 2**20
