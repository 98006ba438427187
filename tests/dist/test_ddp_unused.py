"""Parameters that some or all ranks do not use, or that are frozen, hold nothing up."""

import pytest
import torch

from dist.collectives import rank, world_size
from dist.ddp import DDP
from tests.dist.helpers import WORLD_SIZES, Branches, assert_close, fingerprint, gradients
from tests.harness import run_distributed

CAPS_MB = [1e-6, 30 * 4 / 2**20, 25.0]


def batch_of(step, of_rank):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + of_rank))


def step_of_one_process(alone, step, orders):
    """Gradients of the mean over ranks, each with its own batch and order of layers."""
    for of_rank, order in enumerate(orders):
        if order:
            (alone(batch_of(step, of_rank), order).square().mean() / len(orders)).backward()


def different_use(orders, cap):
    ddp, alone = DDP(Branches(), cap), Branches()
    if orders[rank()]:
        ddp(batch_of(0, rank()), orders[rank()]).square().mean().backward()
    ddp.finish_gradient_sync()
    step_of_one_process(alone, 0, orders)
    assert_close(gradients(ddp), gradients(alone), 1e-6)
    return fingerprint(gradients(ddp)), [p.grad is None for p in ddp.parameters()][::2]


@pytest.mark.parametrize("cap", CAPS_MB)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_parameter_that_some_ranks_use_gets_the_average_over_all(size, cap):
    orders = [[0, 1, 2, 3, 5], [0, 1, 2], [3], [5]][:size]
    results = run_distributed(different_use, size, orders, cap)
    assert len({digest for digest, _ in results}) == 1
    for _, is_none in results:
        assert is_none == [False, False, False, False, True, False]


def test_a_parameter_that_no_rank_uses_keeps_none():
    for _, is_none in run_distributed(different_use, 2, [[0, 1], [1, 0]], 25.0):
        assert is_none == [False, False, True, True, True, True]


def test_a_rank_without_a_batch_counts_as_zeros():
    run_distributed(different_use, 3, [[0, 1, 2, 3, 4, 5], [], [2, 3]], CAPS_MB[1])


def nobody_uses_anything():
    ddp = DDP(Branches())
    ddp.finish_gradient_sync()
    return [p.grad for p in ddp.parameters()]


def test_a_sync_without_any_backward_leaves_no_gradient():
    assert run_distributed(nobody_uses_anything, 2) == [[None] * 12] * 2


def stop_using():
    """Layer 5 is used in step 0 and by nobody afterwards, layer 4 the other way round."""
    module = Branches()
    ddp = DDP(module)
    found = []
    for order in ([0, 5], [0, 4], [0, 4]):
        ddp.zero_grad()
        ddp(batch_of(0, rank()), order).square().mean().backward()
        ddp.finish_gradient_sync()
        found.append([module.layers[index].weight.grad is not None for index in (0, 4, 5)])
    return found


def test_a_gradient_of_the_step_before_does_not_come_back():
    expected = [[True, False, True], [True, True, False], [True, True, False]]
    assert run_distributed(stop_using, 2) == [expected] * 2


def orders_of_step(step, size):
    """Each rank's own subset of layers in an order of its own; sometimes none."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randperm(6, generator=generator)[
            : torch.randint(7, (), generator=generator).item()
        ].tolist()
        for _ in range(size)
    ]


def many_steps(steps, cap):
    ddp, alone = DDP(Branches(seed=rank()), cap), Branches(seed=0)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in (ddp, alone)
    ]
    for step in range(steps):
        orders = orders_of_step(step, world_size())
        if orders[rank()]:
            ddp(batch_of(step, rank()), orders[rank()]).square().mean().backward()
        ddp.finish_gradient_sync()
        step_of_one_process(alone, step, orders)
        assert_close(gradients(ddp), gradients(alone), 2e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return fingerprint(ddp.parameters())


@pytest.mark.parametrize(("size", "cap"), [(2, CAPS_MB[0]), (3, CAPS_MB[1]), (4, CAPS_MB[2])])
def test_ranks_that_use_other_parameters_in_other_orders_never_hang(size, cap):
    assert len(set(run_distributed(many_steps, size, 50, cap))) == 1


def freeze_and_thaw(cap):
    """Layer 1 is frozen from the start and thawed, layer 3 is frozen later, and thawed again."""

    def set_frozen(model, step):
        model.layers[1].requires_grad_(step >= 4)
        model.layers[3].requires_grad_(not 2 <= step < 5)

    module, alone = Branches(), Branches()
    set_frozen(module, 0)
    ddp = DDP(module, cap)
    assert not module.layers[1].weight.requires_grad  # the wrapper gave the flag back
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
    orders = [range(6)] * world_size()
    for step in range(7):
        for model in (module, alone):
            set_frozen(model, step)
        ddp(batch_of(step, rank()), range(6)).square().mean().backward()
        ddp.finish_gradient_sync()
        step_of_one_process(alone, step, orders)
        assert_close(gradients(ddp), gradients(alone), 2e-6)
        assert (module.layers[1].bias.grad is None) == (step < 4)
        assert (module.layers[3].bias.grad is None) == (2 <= step < 5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return fingerprint(ddp.parameters())


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("cap", CAPS_MB)
def test_parameters_may_be_frozen_and_thawed_at_any_time(size, cap):
    assert len(set(run_distributed(freeze_and_thaw, size, cap))) == 1


def frozen_on_one_rank():
    module = Branches()
    ddp = DDP(module, CAPS_MB[1])
    if rank() == 1:
        module.layers[2].requires_grad_(False)
    ddp(batch_of(0, rank()), range(6)).square().mean().backward()
    ddp.finish_gradient_sync()
    assert module.layers[2].weight.grad is not None
    return fingerprint(gradients(ddp))


def test_freezing_on_one_rank_alone_does_not_part_the_replicas():
    assert len(set(run_distributed(frozen_on_one_rank, 2))) == 1
