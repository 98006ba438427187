"""What would train something else is refused before any harm, and what torch allows is right."""

import contextlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from dist.collectives import rank
from dist.ddp import DDP
from dist.grad_scaler import GradScaler
from dist.process_group import init_process_group
from dist.sharded_optimizer import ShardedOptimizer
from dist.shared_memory_collectives import SharedMemoryCollectives, _Operation
from optim.adamw import AdamW
from tests.dist.helpers import Branches, assert_close, fingerprint
from tests.harness import run_distributed

ONE_LAYER_MB = 30 * 4 / 2**20
SGD = torch.optim.SGD


def batch_of(step, part=None):
    generator = torch.Generator().manual_seed(10 * step + (rank() if part is None else part))
    return torch.randn(3, 5, generator=generator)


def pair(module, optimizer_cls: Any = SGD, **settings):
    ddp = DDP(module, ONE_LAYER_MB)
    settings = settings or {"lr": 0.1, "momentum": 0.9}
    return ddp, ShardedOptimizer(module.parameters(), optimizer_cls, ddp=ddp, **settings)


def train_step(ddp, optimizer, step=0, order=range(3)):
    ddp(batch_of(step), order).square().mean().backward()
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.zero_grad()


# Refused.


def a_constructor_that_refuses_leaves_the_ddp_as_it_was():
    module, alone = Branches(3), Branches(3)
    ddp, plain_ddp = DDP(module), DDP(alone)
    foreign = nn.Linear(2, 2).parameters()
    weights = list(module.layers[:2].parameters())
    rest = list(module.layers[2].parameters())
    refused: list[tuple[Any, float]] = [
        (module.parameters(), -1.0),
        ([{"params": weights}, {"params": foreign}], 0.1),
        ([{"params": weights}, {"params": rest, "lr": -1.0}], 0.1),
    ]
    for groups, lr in refused:
        with pytest.raises(ValueError, match=r"lr -1|none of the wrapped"):
            ShardedOptimizer(groups, AdamW, ddp=ddp, lr=lr)
    plain = SGD(alone.parameters(), lr=0.1)
    train_step(plain_ddp, plain, 0)
    train_step(ddp, SGD(module.parameters(), lr=0.1), 0)
    assert_close(module.parameters(), alone.parameters(), 0)
    optimizer = ShardedOptimizer(module.parameters(), SGD, ddp=ddp, lr=0.1)
    train_step(plain_ddp, plain, 1)
    train_step(ddp, optimizer, 1)
    optimizer.finish_gather()
    assert_close(module.parameters(), alone.parameters(), 0)


def gradients_that_were_never_averaged():
    ddp, optimizer = pair(Branches(3))
    before = fingerprint(ddp.parameters())
    with ddp.no_sync():
        ddp(batch_of(0), range(3)).square().mean().backward()
    for act in (lambda: optimizer.clip_grad_norm(1.0), optimizer.step):
        with pytest.raises(RuntimeError, match="never averaged"):
            act()
    assert fingerprint(ddp.parameters()) == before
    ddp.finish_gradient_sync()
    optimizer.step()
    optimizer.finish_gather()
    assert fingerprint(ddp.parameters()) != before


def gradients_are_unscaled_once():
    ddp, optimizer = pair(Branches(3))
    scaler = GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        scaler.scale(ddp(batch_of(step), range(3)).square().mean()).backward()
        ddp.finish_gradient_sync()
        scaler.unscale_and_clip_(optimizer, 1.0)
        with pytest.raises(RuntimeError, match="unscaled already"):
            scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def layers_whose_gradients_fit_into_no_bucket():
    for layer, what in (
        (nn.Embedding(5, 3, sparse=True), "0 has sparse gradients"),
        (nn.LazyLinear(3), r"parameter 0\.weight has no shape yet"),
    ):
        with pytest.raises(ValueError, match=what):
            DDP(nn.Sequential(layer))


def other_parameters_in_the_place_of_those_that_are_averaged():
    ddp = DDP(Branches(3))
    state = {name: value.clone() for name, value in ddp.state_dict().items()}
    for load in (
        lambda: ddp.load_state_dict(state, assign=True),
        lambda: ddp.load_state_dict(state, True, True),
    ):
        with pytest.raises(ValueError, match="assign=True"):
            load()
    ddp.load_state_dict(state)


@pytest.mark.parametrize(
    "use",
    [
        a_constructor_that_refuses_leaves_the_ddp_as_it_was,
        gradients_that_were_never_averaged,
        gradients_are_unscaled_once,
        layers_whose_gradients_fit_into_no_bucket,
        other_parameters_in_the_place_of_those_that_are_averaged,
    ],
)
def test_it_is_refused_before_any_harm(use):
    run_distributed(use, 2)


# Allowed.


@contextlib.contextmanager
def slow_gathers():
    """The last rank is late to read what the others have written."""
    try_to_work = _Operation.try_to_work

    def late(operation):
        if not operation._is_worked and rank() == 1:
            operation._collectives._memory.wait_for_all(1, operation._number)
            time.sleep(0.1)
        return try_to_work(operation)

    with mock.patch.object(_Operation, "try_to_work", late):
        yield


def weights_may_be_changed_after_a_step_that_waits(waits_for_ddp):
    module, alone = Branches(3), Branches(3)
    ddp, plain_ddp = DDP(module), DDP(alone)
    settings: dict[str, Any] = {"ddp": ddp, "gather_under_forward": False} if waits_for_ddp else {}
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1, **settings)
    plain = SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        train_step(plain_ddp, plain, step)
        ddp(batch_of(step), range(3)).square().mean().backward()
        ddp.finish_gradient_sync()
        with slow_gathers():
            optimizer.step()
        optimizer.zero_grad()
        for weight in (*module.parameters(), *alone.parameters()):
            weight.data.mul_(0.5)
        torch_dist.barrier()
        assert_close(module.parameters(), alone.parameters(), 0)


def weights_arrive_after_the_process_group_is_gone():
    init_process_group("gloo", "cpu")
    ddp, optimizer = pair(Branches(3))
    assert isinstance(ddp.collectives, SharedMemoryCollectives)
    with mock.patch.object(SharedMemoryCollectives, "move_along"):  # nobody reads yet
        ddp(batch_of(0), range(3)).square().mean().backward()
    ddp.finish_gradient_sync()
    with mock.patch.object(SharedMemoryCollectives, "move_along"):
        optimizer.step()
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    return fingerprint(ddp.state_dict().values())


def frozen_weights_are_left_alone():
    module = Branches(3)
    module.layers[1].requires_grad_(False)
    ddp, optimizer = pair(module)
    train_step(ddp, optimizer)
    sent, frozen = ddp.collectives.bytes_sent, module.layers[1].weight
    versions = frozen._version, module.layers[0].weight._version
    train_step(ddp, optimizer)
    assert (frozen._version, module.layers[0].weight._version > versions[1]) == (versions[0], True)
    # A teacher, say, that each rank follows by itself.
    optimizer.finish_gather()
    with torch.no_grad():
        frozen.mul_(0.5)
    train_step(ddp, optimizer)
    optimizer.finish_gather()
    trained = 2 * 30 * 4
    assert (ddp.collectives.bytes_sent - sent) // 2 == trained
    return fingerprint(module.parameters())


def complex_gradients_are_whole_on_a_narrow_wire():
    weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    module = nn.ParameterList([weight])
    ddp = DDP(module, wire_dtype=torch.bfloat16)
    (weight * (1.0 + 2.0j)).real.sum().backward()
    ddp.finish_gradient_sync()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0 - 2.0j] * 4


def a_zeroed_gradient_is_one():
    """Momentum of a weight that a step does not use goes on if its gradient is zero, not None."""
    module, alone = Branches(3), Branches(3)
    ddp, optimizer = pair(module)
    plain_ddp, plain = DDP(alone), SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step, order in enumerate([range(3), range(2), range(2), range(3)]):
        for wrapped, each in ((ddp, optimizer), (plain_ddp, plain)):
            wrapped(batch_of(step), order).square().mean().backward()
            wrapped.finish_gradient_sync()
            each.step()
            each.zero_grad(set_to_none=False)
    optimizer.finish_gather()
    assert_close(module.parameters(), alone.parameters(), 1e-6)


def a_schedule_of_momentum_finds_what_it_schedules():
    _, optimizer = pair(Branches(3), torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    assert optimizer.param_groups[0]["betas"][0] == 0.95
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["betas"][0] < 0.9


def a_module_that_contains_it_is_saved_and_loaded_without_prefix():
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    both = nn.ModuleDict({"a": DDP(inner), "b": nn.Linear(2, 2)})
    state = {name: torch.full_like(value, 3) for name, value in both.state_dict().items()}
    assert "a.0.weight" in state
    both.load_state_dict(state)
    assert all((value == 3).all() for value in both.state_dict().values())
    with pytest.raises(RuntimeError, match="Missing key"):
        both.load_state_dict({name: value for name, value in state.items() if name != "a.0.bias"})


def a_wrapper_that_is_given_up_leaves_no_hooks():
    module = Branches(3)
    for _ in range(3):
        DDP(module)
    hooks: Any = [weight._post_accumulate_grad_hooks for weight in module.parameters()]
    assert not any(hooks)


@pytest.mark.parametrize(
    "use",
    [
        frozen_weights_are_left_alone,
        complex_gradients_are_whole_on_a_narrow_wire,
        a_zeroed_gradient_is_one,
        a_schedule_of_momentum_finds_what_it_schedules,
        a_module_that_contains_it_is_saved_and_loaded_without_prefix,
        a_wrapper_that_is_given_up_leaves_no_hooks,
    ],
)
def test_what_torch_allows_is_right(use):
    results = run_distributed(use, 2)
    assert len(set(results)) == 1


@pytest.mark.parametrize("waits_for_ddp", [True, False])
def test_weights_may_be_changed_after_a_step_that_waits(waits_for_ddp):
    run_distributed(weights_may_be_changed_after_a_step_that_waits, 2, waits_for_ddp)


def test_weights_arrive_after_the_process_group_is_gone():
    one, other = run_distributed(
        weights_arrive_after_the_process_group_is_gone, 2, process_group=False
    )
    assert one == other
