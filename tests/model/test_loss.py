"""Our cross-entropy against torch's, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.loss import CrossEntropyLoss

IGNORED = -100


def make_case(size: float = 3.0, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits (4, 6, 50) and targets (4, 6), some of which count for nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 50, generator=generator) * size
    targets = torch.randint(0, 50, (4, 6), generator=generator)
    targets[torch.rand(4, 6, generator=generator) < ignored] = IGNORED
    return logits, targets


def ours(logits: Tensor, targets: Tensor, weights: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a weighted sum of it (so that each loss has its own gradient)."""
    logits = logits.clone().requires_grad_()
    loss = CrossEntropyLoss(**kwargs)(logits, targets)
    (loss * weights).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def torchs(logits: Tensor, targets: Tensor, weights: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **kwargs)
    loss = loss.view_as(targets) if loss.dim() else loss
    (loss * weights).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("size", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient_are_those_of_torch(reduction, size, ignored):
    logits, targets = make_case(size, ignored)
    weights = torch.tensor(0.7)
    if reduction == "none":
        weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    loss, grad = ours(logits, targets, weights, reduction=reduction)
    expected_loss, expected_grad = torchs(logits, targets, weights, reduction=reduction)
    assert loss.shape == expected_loss.shape
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    # Logits of 1e4 carry a rounding of 1e-3 in fp32, and torch's fp32 gradient the same.
    atol = 1e-6 if size < 1e3 else 1e-3
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=atol)


def test_another_ignore_index_is_honoured():
    logits, targets = make_case()
    targets[0] = 7
    weights = torch.tensor(1.0)
    loss, grad = ours(logits, targets, weights, ignore_index=7)
    expected_loss, expected_grad = torchs(logits, targets, weights, ignore_index=7)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=1e-6)
    assert not grad[0].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_a_target_that_counts_loss_and_gradient_are_those_of_torch(reduction):
    logits, targets = make_case(ignored=1.1)
    weights = torch.tensor(1.0)
    loss, grad = ours(logits, targets, weights, reduction=reduction)
    expected_loss, expected_grad = torchs(logits, targets, weights, reduction=reduction)
    torch.testing.assert_close(loss.double(), expected_loss, equal_nan=True)
    torch.testing.assert_close(grad.double(), expected_grad)
    assert not grad.any()


def test_logits_near_the_end_of_fp32_give_a_finite_loss_and_gradient():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    loss, grad = ours(logits, torch.tensor([0, 1]), torch.ones(2), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.0]))
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_fp32(dtype):
    logits, targets = make_case(ignored=0.2)
    narrow = logits.to(dtype)
    loss, grad = ours(narrow, targets, torch.tensor(1.0))
    expected_loss, expected_grad = torchs(narrow, targets, torch.tensor(1.0))
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    # The gradient is rounded once, on its way out.
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2**-8, atol=1e-7)


def test_loss_is_the_same_under_autocast():
    logits, targets = make_case()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = CrossEntropyLoss()(logits, targets)
    assert torch.equal(under_autocast, CrossEntropyLoss()(logits, targets))


def test_inputs_are_left_as_they_were():
    logits, targets = make_case(ignored=0.3)
    before = logits.clone(), targets.clone()
    ours(logits, targets, torch.tensor(1.0))
    assert torch.equal(logits, before[0])
    assert torch.equal(targets, before[1])


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction is 'average'"):
        CrossEntropyLoss(reduction="average")
