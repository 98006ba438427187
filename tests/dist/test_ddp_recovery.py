"""After an exception anywhere in a step DDP is usable, and the replicas are equal."""

import contextlib
from typing import Any

import pytest
import torch

from dist.collectives import all_reduce_sum, rank, world_size
from dist.ddp import DDP
from tests.dist.helpers import Branches, assert_close, fingerprint, gradients
from tests.harness import run_distributed

ONE_LAYER_MB = 30 * 4 / 2**20
ALL = range(6)


class Trouble(Exception):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Trouble


def batch_of(step):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank()))


def failing_loss(ddp, layer):
    """A loss whose backward gets through the layers after `layer` and raises before it."""
    x = ddp(batch_of(1), ALL[: layer + 1])
    return ddp(RaiseInBackward.apply(x), ALL[layer + 1 :]).square().mean()


def fail_between_forward_and_backward(ddp):
    ddp(batch_of(1), ALL)
    raise Trouble


def fail_in_backward(ddp):
    failing_loss(ddp, layer=2).backward()


def fail_in_backward_at_a_place_of_its_own(ddp):
    # Rank 0 has sent most buckets, the last rank none.
    failing_loss(ddp, layer=[0, 3, 5][rank()]).backward()


def fail_under_no_sync(ddp):
    with ddp.no_sync():
        failing_loss(ddp, layer=2).backward()


def fail_after_a_micro_batch(ddp):
    with ddp.no_sync():
        ddp(batch_of(1), ALL).square().mean().backward()
    failing_loss(ddp, layer=2).backward()


def fail_in_the_second_backward(ddp):
    ddp(batch_of(1), ALL).square().mean().backward()
    try:
        ddp(batch_of(1), ALL).square().mean().backward()
    except RuntimeError as error:
        raise Trouble from error


def good_step(ddp, step):
    ddp(batch_of(step), ALL).square().mean().backward()
    ddp.finish_gradient_sync()


def train_around(fail, failing_ranks, finish_first):
    """Steps 0, 2 and 3 with a failed step 1 between them, against one that had none."""
    ddp, never_failed = DDP(Branches(), ONE_LAYER_MB), DDP(Branches(), ONE_LAYER_MB)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, never_failed)]
    for step in range(4):
        if step == 1:
            raised = False
            if rank() in failing_ranks:
                with contextlib.suppress(Trouble):
                    fail(ddp)
                    pytest.fail("nothing was raised")
                raised = True
            else:
                ddp(batch_of(1), ALL).square().mean().backward()
            if finish_first:
                ddp.finish_gradient_sync()
                digests = fingerprint(gradients(ddp))
                # Any decision about the step is now one that all ranks can take alike.
                assert all_reduce_sum(torch.tensor(float(raised))) == len(failing_ranks)
            else:
                digests = ""
            ddp.zero_grad()
            assert all(p.grad is None for p in ddp.parameters())
            continue
        for model in (ddp, never_failed):
            good_step(model, step)
        assert_close(gradients(ddp), gradients(never_failed), 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return digests, fingerprint(ddp.parameters())


@pytest.mark.parametrize(
    "fail",
    [
        fail_between_forward_and_backward,
        fail_in_backward,
        fail_under_no_sync,
        fail_after_a_micro_batch,
        fail_in_the_second_backward,
    ],
)
def test_when_all_ranks_fail_alike_clearing_the_gradients_is_enough(fail):
    assert len(set(run_distributed(train_around, 3, fail, range(3), False))) == 1


@pytest.mark.parametrize(
    "fail",
    [
        fail_between_forward_and_backward,
        fail_in_backward,
        fail_under_no_sync,
        fail_after_a_micro_batch,
    ],
)
@pytest.mark.parametrize("failing_rank", [0, 2])
def test_when_one_rank_fails_it_finishes_the_sync_that_the_others_wait_for(fail, failing_rank):
    assert len(set(run_distributed(train_around, 3, fail, [failing_rank], True))) == 1


def test_when_ranks_fail_at_different_places_all_finish_the_sync():
    fail = fail_in_backward_at_a_place_of_its_own
    assert len(set(run_distributed(train_around, 3, fail, range(3), True))) == 1


def second_backward(accumulating):
    ddp = DDP(Branches(), ONE_LAYER_MB)
    ddp(batch_of(0), ALL).sum().backward()
    with pytest.raises(RuntimeError, match="second backward before finish_gradient_sync") as caught:
        ddp(batch_of(0), ALL if not accumulating else [5]).sum().backward()
    ddp.zero_grad()
    good_step(ddp, 0)
    return str(caught.value)


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_second_backward_before_the_finish_is_an_error_that_says_so(accumulating):
    for message in run_distributed(second_backward, 2, accumulating):
        assert "run all micro-batches but the last under no_sync()" in message


def finish_after_a_second_backward():
    """What the refused backward computed is in no gradient; without the fault, the same."""
    averages = []
    for is_refused in (False, True):
        ddp = DDP(Branches(), ONE_LAYER_MB)
        ddp(batch_of(0), ALL).sum().backward()
        with pytest.raises(RuntimeError) if is_refused else contextlib.nullcontext():
            if is_refused:
                ddp(batch_of(rank()), ALL).sum().backward()
        ddp.finish_gradient_sync()
        averages.append(fingerprint(gradients(ddp)))
    return averages


def test_a_refused_backward_leaves_the_sync_as_it_was():
    (first, second), *others = run_distributed(finish_after_a_second_backward, 2)
    assert first == second
    assert others == [(first, second)] or others == [[first, second]]


def two_losses():
    ddp, alone = DDP(Branches(), ONE_LAYER_MB), Branches()
    for model in (ddp, alone):
        model(batch_of(0), [0, 1, 2]).square().mean().backward()
        model(batch_of(0), [3, 4, 5]).square().mean().backward()
    ddp.finish_gradient_sync()
    means = [
        all_reduce_sum(p.grad) / world_size() for p in alone.parameters() if p.grad is not None
    ]
    assert_close(gradients(ddp), means, 1e-6)


def test_backwards_through_different_parameters_may_share_a_sync():
    run_distributed(two_losses, 2)


def syncing_after_an_exception_under_no_sync():
    ddp = DDP(Branches(), ONE_LAYER_MB)
    for nested in (False, True):
        with contextlib.suppress(Trouble), ddp.no_sync():
            if nested:
                with ddp.no_sync():
                    raise Trouble
            raise Trouble
        ddp(batch_of(0), ALL).square().mean().backward()
        assert all(reducer.sent for reducer in ddp._reducers)
        ddp.finish_gradient_sync()
        ddp.zero_grad()


def test_an_exception_under_no_sync_does_not_leave_syncing_switched_off():
    run_distributed(syncing_after_an_exception_under_no_sync, 2)


def a_gradient_that_no_bucket_takes():
    """It is sparse; those beside it in its bucket are there as before."""
    ddp: Any = DDP(torch.nn.ParameterList([torch.ones(3), torch.ones(4)]))
    first, last = ddp.module
    ids = torch.zeros(2, dtype=torch.int64)
    loss = first.sum() + torch.gather(last, 0, ids, sparse_grad=True).sum()
    with pytest.raises(RuntimeError):
        loss.backward()
    assert first.grad is not None
    assert last.grad is not None


def test_a_bucket_that_cannot_be_filled_keeps_its_gradients():
    run_distributed(a_gradient_that_no_bucket_takes, 2)
